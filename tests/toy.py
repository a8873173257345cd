"""Toy pairs for tests: two to five layers of random weights, and drafters that agree as far as a test wants.

A drafter of random weights agrees with its target by chance only. ``ScriptedDrafter`` is the real class with its
forward pass replaced: it returns hidden states whose token under the target's head is the one asked for, so engine
and replay run on it unchanged. For that, all rows of a toy head have the same length: row ``v`` is then the hidden
state at which token ``v`` wins (Cauchy-Schwarz).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockpilot.decoding import Prefill, Round, Sampling, draw_tokens, prompt_key
from blockpilot.models import DFlashDrafter, DrafterContext, Pair

SPECIAL = ("<unk>", "<pad>", "<bos>", "<eos>", "<mask>", "<user>", "<assistant>", "<think>")
BOS, EOS, MASK, USER, ASSISTANT, THINK = (SPECIAL.index(f"<{n}>") for n in "bos eos mask user assistant think".split())

TEMPLATE = (
    "<bos>{% for m in messages %} <{{ m.role }}> {{ m.content }}{% if m.role == 'assistant' %} <eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} <assistant>{% if enable_thinking %} <think>{% endif %}{% endif %}"
)

HEAD_NORM = 3.0


def word(token_id: int) -> str:
    """Text of an ordinary token."""
    return f"w{token_id}"


def make_tokenizer(
    vocab_size: int = 64, template: str | None = TEMPLATE, eos: str | None = "<eos>"
) -> PreTrainedTokenizerFast:
    """One word is one token: ``w9`` is 9. Encoding a text puts <bos> before it."""
    words = list(SPECIAL) + [word(i) for i in range(len(SPECIAL), vocab_size)]
    core = Tokenizer(WordLevel({text: i for i, text in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])  # type: ignore
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
        additional_special_tokens=["<user>", "<assistant>", "<think>"], **({"eos_token": eos} if eos else {}),
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def make_target(
    kind: str = "qwen3",
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    max_positions: int = 256,
    successor: bool = False,
    attention: str = "sdpa",
    seed: int = 0,
    **extra: Any,
) -> PreTrainedModel:
    """A random target in fp32 whose outputs depend on all of the context.

    Args:
        successor: the next token is always the last one plus 1 (modulo the vocabulary), whatever came before.
        extra: further keys of the configuration.
    """
    classes: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }
    extra = {"sliding_window": None} | extra if kind == "mistral" else extra
    config_class, model_class = classes[kind]
    config = config_class(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden_size // heads,
        max_position_embeddings=max_positions, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, attn_implementation=attention, **extra,
    )  # fmt: skip
    model = model_class(config)
    _randomize(model, seed)
    embedding, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    embedding.copy_(HEAD_NORM * torch.nn.functional.normalize(embedding, dim=-1))
    if successor:
        assert not tied, "a tied head repeats the last token"
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.mul_(0.02)
            layer.mlp.down_proj.weight.data.mul_(0.02)
        head.copy_(embedding.roll(1, dims=0))
    elif not tied:
        head.copy_(HEAD_NORM * torch.nn.functional.normalize(head, dim=-1))
    return model.eval()


def make_drafter(
    target: PreTrainedModel,
    *,
    layer_ids: Sequence[int] = (0, 2),
    layers: int = 2,
    block_size: int = 4,
    mask_token_id: int = MASK,
    max_positions: int | None = None,
    kv_heads: int | None = None,
    seed: int = 1,
    kind: type[DFlashDrafter] = DFlashDrafter,
    **extra: Any,
) -> DFlashDrafter:
    """A drafter of random weights for ``target``."""
    of = target.config
    config = Qwen3Config(
        vocab_size=of.vocab_size, hidden_size=of.hidden_size, intermediate_size=of.hidden_size,
        num_hidden_layers=layers, num_attention_heads=of.num_attention_heads,
        num_key_value_heads=kv_heads or of.num_key_value_heads,
        head_dim=getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads,
        max_position_embeddings=max_positions or of.max_position_embeddings,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
        **({
            "block_size": block_size,
            "num_target_layers": of.num_hidden_layers,
            "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)},
        } | extra),
    )  # fmt: skip
    drafter = kind(config)
    _randomize(drafter, seed)
    return drafter.eval()


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough for every layer to matter, and norms that are not all ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)


def make_pair(
    *,
    eos: str | None = "<eos>",
    template: str | None = TEMPLATE,
    target: PreTrainedModel | None = None,
    drafter: DFlashDrafter | None = None,
    thinking: bool = False,
    **target_options: Any,
) -> Pair:
    """A random pair; keywords go to :func:`make_target`."""
    target = target or make_target(**target_options)
    drafter = drafter or make_drafter(target)
    return Pair(target, drafter, make_tokenizer(target.config.vocab_size, template, eos), "toy", thinking)


def weight_of(layer: Any) -> Tensor:
    """A copy of the weight of an embedding or a head."""
    return layer.weight.detach().clone()


class ScriptedDrafter(DFlashDrafter):
    """Right for ``depth`` drafts of a block, wrong behind them."""

    def follow(
        self,
        target: PreTrainedModel,
        truth: Callable[[Tensor, Tensor, Tensor], Tensor],
        depth: int | Callable[[Tensor], Tensor],
        noise: float = 0.0,
    ) -> ScriptedDrafter:
        """Sets what it says.

        Args:
            target: whose embedding is read and whose head will read the result.
            truth: (anchor tokens, anchor positions, places in the block) to token ids, all int64 ``[P, Q]``.
            depth: number of right drafts, or a function of the anchor positions.
            noise: share of the real forward pass to add, which makes it err by what it reads in its context.
        """
        if self.lm_head is not None:  # over tokens spread along the target's, so that ids differ
            assert self.d2t is not None
            rows, vocab_size = len(self.d2t), self.config.vocab_size
            ids = torch.arange(rows) * vocab_size // rows
            self.d2t.copy_(ids - torch.arange(rows))
            self.lm_head.weight.data.copy_(weight_of(target.get_output_embeddings())[ids])
        self.embeddings = weight_of(target.get_input_embeddings())
        self.answers = weight_of(target.get_output_embeddings())
        self.truth, self.depth, self.noise = truth, depth, noise
        self.calls: list[tuple[int, int]] = []
        return self

    def forward(
        self, embeddings_BQD: Tensor, positions_BQ: Tensor, context: DrafterContext, mask: Tensor | None = None
    ) -> Tensor:
        width = embeddings_BQD.shape[1]
        self.calls.append((context.length, width))
        tokens = (embeddings_BQD @ self.embeddings.T).argmax(-1)
        anchors, anchor_positions, places = tokens[:, :1], positions_BQ[:, :1], torch.arange(width)
        wanted = self.truth(anchors, anchor_positions, places)
        depth = self.depth(anchor_positions) if callable(self.depth) else self.depth
        states = self.answers[torch.where(places <= depth, wanted, wanted + 1) % len(self.answers)]
        return (
            states + self.noise * super().forward(embeddings_BQD, positions_BQ, context, mask) if self.noise else states
        )


def successor_truth(vocab_size: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Truth of a successor target."""
    return lambda anchors, positions, places: (anchors + places) % vocab_size


def script_truth(tokens: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Truth of one known text (prompt and output); token 0 behind its end."""
    script = torch.tensor([*tokens, *[0] * 64])
    return lambda anchors, positions, places: script[(positions + places).clamp(max=len(script) - 1)]


def make_scripted_pair(
    depth: int | Callable[[Tensor], Tensor],
    *,
    target: PreTrainedModel | None = None,
    script: Sequence[int] | None = None,
    eos: str | None = None,
    noise: float = 0.0,
    **drafter_options: Any,
) -> Pair:
    """A pair whose drafter is right to ``depth``: on a successor target, or along one ``script``."""
    target = target or make_target(successor=script is None)
    drafter = make_drafter(target, kind=ScriptedDrafter, **drafter_options)
    assert isinstance(drafter, ScriptedDrafter)
    truth = successor_truth(target.config.vocab_size) if script is None else script_truth(script)
    return make_pair(target=target, drafter=drafter.follow(target, truth, depth, noise), eos=eos)


class Changing:
    """A policy that goes through ``sizes`` round by round, and keeps what it was told."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.rounds: list[Round] = []
        self.prefill: Prefill | None = None

    def choose(self, prefill: Prefill) -> int:
        self.prefill = prefill
        return self.sizes[0]

    def update(self, round: Round) -> int:
        self.rounds.append(round)
        return self.sizes[(round.index + 1) % len(self.sizes)]


def greedy_by_transformers(
    target: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stops: Sequence[int] = ()
) -> list[int]:
    """Output of ``generate`` of the ``transformers`` library, new tokens only."""
    prompt = torch.tensor([list(prompt_ids)])
    model: Any = target
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens,
        eos_token_id=list(stops) or None, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt_ids) :].tolist()


def cut(output_ids: Sequence[int], budget: int, stops: Sequence[int]) -> list[int]:
    """``output_ids`` up to the budget and the first stop token, itself included."""
    kept: list[int] = []
    for token in output_ids[:budget]:
        kept.append(token)
        if token in stops:
            break
    return kept


def make_prompts(lengths: Sequence[int], vocab_size: int = 64, seed: int = 0) -> list[list[int]]:
    """Random ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(len(SPECIAL), vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def decode_one_by_one(target: PreTrainedModel, prompt_ids: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """The slow definition of the target's own output: a whole forward pass, then a draw, ``count`` times."""
    tokens = list(prompt_ids)
    for position in range(count):
        logits = target(torch.tensor([tokens]), use_cache=False).logits[:, -1]
        tokens += draw_tokens(logits, sampling, [prompt_key(prompt_ids)], [position]).tolist()
    return tokens[len(prompt_ids) :]


def hooks_of(model: torch.nn.Module) -> list[object]:
    """All hooks on a model and its parts."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
