"""What the decoding benchmarks decode, and who decodes it: one function per engine, all on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from shared import tiny_prompts
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

import blockpilot as bp
from blockpilot.models import DFlashDrafter

Engine = Callable[[Sequence[int]], list[int]]
"""Prompt to output tokens."""


@dataclass(frozen=True)
class Subject:
    """What is decoded: a pair, prompts, and when to stop."""

    pair: bp.Pair
    prompts: list[list[int]]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@cache
def subject(model: str, device: str, num_prompts: int, max_new_tokens: int | None) -> Subject:
    """``tiny``, the embedded pair, or ``smollm2``, random in the shape of SmolLM2-135M; fp32 on a CPU, else bf16."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    if model == "tiny":
        pair = bp.load_pair("tiny", dtype=dtype, device=device)
        return Subject(pair, tiny_prompts(pair, num_prompts), max_new_tokens or 160, pair.stop_token_ids)
    pair = _smollm2(dtype, device)
    prompt = torch.randint(pair.vocab_size, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    return Subject(pair, [prompt], max_new_tokens or 128, ())


def _smollm2(dtype: str, device: str) -> bp.Pair:
    """SmolLM2-135M's shape and a two-layer drafter, B = 8; weights are normal with deviation 0.02, seeded.

    Such a target repeats one token and such a drafter is never right: every round commits one token.
    """
    shape: dict[str, Any] = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    dflash = {"mask_token_id": 0, "target_layer_ids": [1, 10, 19, 28]}
    drafter = {"num_hidden_layers": 2, "block_size": 8, "num_target_layers": 30, "dflash_config": dflash}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=30, rms_norm_eps=1e-5))
    draft = DFlashDrafter(Qwen3Config(**shape, **drafter))
    for model in (target, draft):
        nn.Module.to(model, getattr(torch, dtype))
    tokenizer = bp.load_pair("tiny", device="cpu").tokenizer  # a pair needs one; the prompt is token ids already
    return bp.load_pair(target=target, drafter=draft, tokenizer=tokenizer, device=device)


def engine(name: str, given: Subject, block_size: int) -> Engine:
    """``blockpilot``, ``dflash`` or ``transformers`` on the pair of ``given``."""
    return {"blockpilot": _blockpilot, "dflash": _dflash, "transformers": _transformers}[name](given, block_size)


def _blockpilot(given: Subject, block_size: int) -> Engine:
    policy = bp.FixedPolicy(block_size)
    return lambda prompt: (
        bp.generate(
            given.pair, prompt, policy, max_new_tokens=given.max_new_tokens, stop_token_ids=given.stop_token_ids
        ).output_ids
    )


def _dflash(given: Subject, block_size: int) -> Engine:
    from dflash.model import DFlashDraftModel, dflash_generate

    drafter = DFlashDraftModel(given.pair.drafter.config)
    drafter.load_state_dict(given.pair.drafter.state_dict(), assign=True)
    drafter.to(given.pair.device).eval()  # type: ignore[arg-type]
    stops = list(given.stop_token_ids) or None

    def run(prompt: Sequence[int]) -> list[int]:
        ids: Any = torch.tensor([list(prompt)], device=given.pair.device)
        output: Any = dflash_generate(
            drafter, given.pair.target, ids, given.max_new_tokens, stops, block_size=block_size
        )
        return output[0, len(prompt) :].tolist()

    return run


def _transformers(given: Subject, block_size: int) -> Engine:
    assert block_size == 1, "generate of transformers is compared at b = 1"
    target: Any = given.pair.target
    options = {"do_sample": False, "use_cache": True, "max_new_tokens": given.max_new_tokens, "pad_token_id": 0}

    def run(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=given.pair.device)
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=list(given.stop_token_ids) or None, **options
        )
        return output[0, len(prompt) :].tolist()

    return run
