"""Targets as they are published, in small: configurations as on the Hub, random weights, read from a folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from blockpilot import oracle
from blockpilot.config import DrafterConfig, GenerationConfig, ModelConfig, OracleConfig
from blockpilot.decoding import Sampling, generate
from blockpilot.errors import UserError
from blockpilot.models import Pair, TargetRunner, assemble_pair, load_pair
from blockpilot.oracle.collect import cache_key
from blockpilot.policies import FixedPolicy
from blockpilot.prompts import PromptRow
from tests.toy import (
    EOS,
    HEAD_NORM,
    ScriptedDrafter,
    decode_one_by_one,
    greedy_by_transformers,
    make_drafter,
    make_prompts,
    make_tokenizer,
    script_truth,
)

VOCAB, PADDED = 64, 72
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": VOCAB, "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 2, "eos_token_id": EOS,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "attention_bias": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "eos_token_id": [EOS, 9, 10], "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2, "tie_word_embeddings": True,
    "vocab_size": PADDED,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | {"tie_word_embeddings": True},
    "qwen3-moe": MOE,
    "qwen3-moe-with-dense-layers": MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "llama3.1": LLAMA,
    "llama3.2-tied": LLAMA | {"tie_word_embeddings": True, "head_dim": 8},
    "smollm2": LLAMA | {
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "is_llama_config": True,
        "rope_interleaved": False, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48,
        "eos_token_id": EOS, "pad_token_id": EOS,
    },
    "qwen2.5": QWEN25,
    "qwen2.5-untied": QWEN25 | {"tie_word_embeddings": False},
}  # fmt: skip
MOES = ("qwen3-moe", "qwen3-moe-with-dense-layers")
TAPS = (2, 0)
PROMPT = make_prompts([40], seed=3)[0]  # past the length that the scaled embeddings were made for
COUNT = 16
WARM = 3.0  # random heads are sure of themselves
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}

here: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder per target, as a checkpoint on the Hub."""
    for name, values in TARGETS.items():
        folder = here[name] = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(SHAPE | values))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        randomize(model)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(SHAPE | values))  # as published, not as it is written today
        if name.startswith("llama"):
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 9, 10]}))
        make_tokenizer(VOCAB).save_pretrained(folder)


def randomize(model: PreTrainedModel) -> None:
    """Weights that matter in every layer, biases and routers too; rows of the head of one length (see tests.toy)."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.data.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.1 * noise)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = cast(Any, layer).weight.data
        weight.copy_(HEAD_NORM * torch.nn.functional.normalize(weight, dim=-1))


@cache
def pair_of(name: str, temperature: float = 0.0) -> Pair:
    """The target with a random drafter that is right now and then: it is drawn towards the target's own text."""
    folder = here[name]
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = decode_one_by_one(target, PROMPT, Sampling(temperature), COUNT + 12)
    # as the published drafters do, it takes a token of the padding for its mask
    mask_token_id = target.config.vocab_size - 1
    drafter = make_drafter(target, layer_ids=TAPS, block_size=6, mask_token_id=mask_token_id, kind=ScriptedDrafter)
    assert isinstance(drafter, ScriptedDrafter)
    drafter.follow(target, script_truth([*PROMPT, *tokens]), 99, noise=0.6)
    return load_pair(target=folder, drafter=drafter, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", TARGETS)
def test_a_folder_of_the_hub_is_the_model_it_says(name: str) -> None:
    """What its configuration asks for is there: heads tied or not, biases, experts, a scaled embedding, stop tokens."""
    pair, values = pair_of(name), SHAPE | TARGETS[name]
    names = set(load_file(here[name] / "model.safetensors"))
    assert ("lm_head.weight" in names) != values["tie_word_embeddings"]
    head, embedding = (
        cast(Any, part).weight for part in (pair.target.get_output_embeddings(), pair.target.get_input_embeddings())
    )
    assert (head is embedding) == values["tie_word_embeddings"]
    assert pair.vocab_size == len(head) == values["vocab_size"]
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == name.startswith("qwen2.5")
    experts = {layer for layer in range(4) if f"model.layers.{layer}.mlp.experts.7.up_proj.weight" in names}
    assert experts == {"qwen3-moe": {0, 1, 2, 3}, "qwen3-moe-with-dense-layers": {1, 3}}.get(name, set())
    rotary = cast(Any, pair.target).model.rotary_emb
    assert rotary.rope_type == ("llama3" if name.startswith("llama") else "default")
    assert pair.target.config.rope_parameters["rope_theta"] == values["rope_theta"]
    assert pair.stop_token_ids == ((EOS, 9, 10) if name.startswith("llama") else (EOS,))
    assert (pair.runner.refresh(), pair.runner.decoder is not None) == (name not in MOES, name not in MOES)


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_output_is_that_of_transformers(name: str) -> None:
    pair = pair_of(name)
    expected = greedy_by_transformers(pair.target, PROMPT, COUNT)
    lengths = set()
    for size in (1, 2, 6, 9):
        out = generate(pair, PROMPT, FixedPolicy(size), max_new_tokens=COUNT, stop_token_ids=[])
        assert out.output_ids == expected
        lengths |= set(out.acceptance_lengths[:-1])
    assert len(lengths) > 2, "drafts of every kind: rejected at once, in part, and not"
    stops = expected[COUNT // 2 : COUNT // 2 + 1]
    out = generate(pair, PROMPT, FixedPolicy(6), max_new_tokens=COUNT, stop_token_ids=stops)
    assert out.output_ids == expected[: expected.index(stops[0]) + 1]


@pytest.mark.parametrize("name", TARGETS)
def test_sampled_output_does_not_depend_on_the_block_size(name: str) -> None:
    pair = pair_of(name, WARM)
    expected = decode_one_by_one(pair.target, PROMPT, Sampling(WARM), COUNT)
    assert expected != greedy_by_transformers(pair.target, PROMPT, COUNT)
    for size in (1, 3, 6, 9):
        out = generate(pair, PROMPT, FixedPolicy(size), max_new_tokens=COUNT, temperature=WARM, stop_token_ids=[])
        assert out.output_ids == expected


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("temperature", [0.0, WARM])
def test_replay_equals_enumeration(name: str, temperature: float) -> None:
    pair = pair_of(name, temperature)
    prompts = [PROMPT, PROMPT[:7]]  # decoded side by side, at their own positions
    options: dict[str, Any] = {"block_sizes": [5, 7], "max_new_tokens": COUNT, "temperature": temperature}
    options["stop_token_ids"] = []
    replayed, enumerated = (make(pair, prompts, **options) for make in (oracle.replay, oracle.enumerate))
    for one, other in zip(replayed, enumerated, strict=True):
        assert (one.output_ids, one.acceptance_lengths) == (other.output_ids, other.acceptance_lengths)
    assert len(set(replayed[0].acceptance_lengths[7])) > 1


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_tapped_features_are_the_outputs_of_the_layers(name: str) -> None:
    pair = pair_of(name)
    runner, cache = pair.runner, pair.runner.new_cache(48)
    tokens = [*PROMPT, *make_prompts([8], seed=9)[0]]
    states = pair.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert states is not None
    expected = torch.cat([states[i + 1] for i in TAPS], dim=-1)
    start = 0
    for width, rejected in ((40, 0), (6, 3), (1, 0)):
        if rejected:
            runner.forward(torch.tensor([[33] * rejected]), cache)
        features = runner.forward(torch.tensor([tokens[start : start + width]]), cache).features
        assert features is not None
        torch.testing.assert_close(features, expected[:, start : start + width], **CLOSE)
        start = cache.length = start + width


@pytest.mark.parametrize("name", MOES)
@torch.no_grad()
def test_a_block_is_routed_as_its_tokens_one_by_one(name: str) -> None:
    pair = pair_of(name)
    runner, block = pair.runner, make_prompts([9], seed=9)[0]
    routers = {n: m for n, m in pair.target.named_modules() if type(m).__name__ == "Qwen3MoeTopKRouter"}
    assert len(routers) == (4 if name == "qwen3-moe" else 2)

    def routed(pieces: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
        cache, logits = runner.new_cache(64), []
        chosen: dict[str, list[Tensor]] = {n: [] for n in routers}
        runner.forward(torch.tensor([PROMPT]), cache)
        cache.length = len(PROMPT)
        handles = [
            module.register_forward_hook(lambda m, args, out, n=n: chosen[n].append(out[-1]))  # type: ignore[misc]
            for n, module in routers.items()
        ]
        for piece in pieces:
            logits.append(runner.forward(torch.tensor([piece]), cache).logits[0])
            cache.length += len(piece)
        for handle in handles:
            handle.remove()
        return [torch.cat(lists) for lists in chosen.values()], logits

    wide, wide_logits = routed([block])
    single, single_logits = routed([[token] for token in block])
    for one, other in zip(wide, single, strict=True):
        assert one.shape == (9, 2) and one.dtype == torch.int64
        assert torch.equal(one, other)
        assert len(one.unique()) > 2
    torch.testing.assert_close(torch.cat(wide_logits), torch.cat(single_logits), **CLOSE)


def test_tokens_behind_the_tokenizers_last_decode_to_nothing() -> None:
    """Published vocabularies are padded: the target may draw a token that the tokenizer does not know."""
    pair = pair_of("qwen2.5", WARM)
    assert pair.mask_token_id == PADDED - 1 > len(pair.tokenizer) - 1
    out = generate(pair, PROMPT, FixedPolicy(6), max_new_tokens=COUNT, temperature=WARM, stop_token_ids=[])
    assert max(out.output_ids) >= len(pair.tokenizer), "take another seed"
    assert pair.decode(out.output_ids) == pair.decode([i for i in out.output_ids if i < len(pair.tokenizer)])


# ---- thinking


QWEN3_TEMPLATE = (
    "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %} <think> <think>{% endif %}{% endif %}"
)


def test_the_thinking_switch_reaches_the_template_and_the_caches_digest(tmp_path: Path) -> None:
    """Qwen3's template writes an empty thought when thinking is off, and nothing when it is on."""
    pair = pair_of("qwen3")
    tokenizer = make_tokenizer(VOCAB, QWEN3_TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    found = []
    for thinking in (False, True):
        model = ModelConfig("qwen3", str(here["qwen3"]), tokenizer=str(tmp_path), dtype="float32", thinking=thinking)
        other = assemble_pair(model, DrafterConfig("none", "none"), drafter=pair.drafter, device="cpu")
        key = cache_key(other, [PromptRow("a", "b", ("w9",))], GenerationConfig(), OracleConfig())
        found.append((tokenizer.convert_ids_to_tokens(other.encode(["w9"])), key.fields(), key.digest()))
    (off, off_fields, off_digest), (on, on_fields, on_digest) = found
    assert off == [*on, "<think>", "<think>"] and on == ["<user>", "w9", "<assistant>"]
    assert {name for name in on_fields if on_fields[name] != off_fields[name]} == {"pair.thinking"}
    assert off_digest != on_digest


# ---- what cannot roll back


LINEAR, SLIDING, RECURRENT = "linear_attention", "sliding_attention", "recurrent"
HYBRIDS = {
    "qwen3_next": LINEAR, "qwen3_5": LINEAR, "granitemoehybrid": LINEAR, "jamba": LINEAR, "mamba2": LINEAR,
    "kimi_linear": LINEAR, "bamba": LINEAR, "falcon_h1": "hybrid", "nemotron_h": LINEAR, "recurrent_gemma": LINEAR,
    "rwkv": RECURRENT, "gemma2": SLIDING, "gemma3": SLIDING, "gemma3_text": SLIDING, "gpt_oss": SLIDING,
    "mistral": SLIDING, "cohere2": SLIDING, "llama4_text": "chunked_attention", "deepseek_v32": "indexed_attention",
}  # fmt: skip


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_target_that_cannot_roll_back_is_refused_by_name_before_its_weights_are_read(
    tmp_path: Path, model_type: str
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)  # there are no weights
    pair = pair_of("qwen3")
    with pytest.raises(UserError) as caught:
        load_pair(target=tmp_path, drafter=pair.drafter, tokenizer=pair.tokenizer, device="cpu")
    message = str(caught.value)
    assert "\n" not in message and "expected full_attention in every layer" in message
    assert HYBRIDS[model_type] in message and f"model_type is {model_type.removesuffix('_text')}" in message


def test_lfm2_names_its_convolutions(tmp_path: Path) -> None:
    AutoConfig.for_model("lfm2", num_hidden_layers=3, full_attn_idxs=[1]).save_pretrained(tmp_path)
    pair = pair_of("qwen3")
    with pytest.raises(UserError, match=r"Lfm2ForCausalLM has conv layers.*model_type is lfm2"):
        load_pair(target=tmp_path, drafter=pair.drafter, tokenizer=pair.tokenizer, device="cpu")


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_an_object_that_cannot_roll_back_is_refused_too(model_type: str) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCAB}
    if model_type == "jamba":
        small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "num_experts": 2,
                  "attn_layer_period": 2, "attn_layer_offset": 1}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small))
    with pytest.raises(UserError, match=rf"has linear_attention layers.*model_type is {model_type}"):
        TargetRunner(model, (0, 1))
