"""The lean forward: what it computes, when it is taken, when it is not, and that it follows the model's weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from blockpilot.errors import UserError
from blockpilot.models import TargetRunner
from blockpilot.models.lean import LeanDecoder, Linear, Norm, Rotary, rotate, supports
from tests.toy import hooks_of, make_prompts

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-tied-ungrouped": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-wide-heads": {"head_dim": 12},
    "llama-linear": {"rope_parameters": LINEAR},
    "llama-llama3": {"rope_parameters": LLAMA3},
    "mistral": {},
    "mistral-tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "mistral-yarn": {"rope_parameters": YARN},
    "qwen2": {},
    "qwen2-tied-ungrouped": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2-one-kv-head": {"num_key_value_heads": 1},
    "qwen3": {},
    "qwen3-biased-tied": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3-yarn-one-kv-head": {"rope_parameters": YARN, "num_key_value_heads": 1},
    "qwen3-ungrouped-wide-heads": {"num_key_value_heads": 4, "head_dim": 16},
}
ONE_EACH = ("llama", "mistral", "qwen2", "qwen3")
TAPS = (2, 0)


def make(kind: str, seed: int = 0, **extra: Any) -> PreTrainedModel:
    """A random model; all its biases and norms matter, too."""
    config_class, model_class = FAMILIES[kind.split("-")[0]]
    values: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": None,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "attn_implementation": "sdpa",
    }  # fmt: skip
    values |= KINDS.get(kind, {}) | extra
    if "rope_parameters" in values:
        values["rope_parameters"] = {"rope_theta": 10000.0} | values["rope_parameters"]
    model = model_class(config_class(**values)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        one = 1.0 if name.endswith("norm.weight") else 0.0
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data.copy_(one + scale * noise)
    return model


def layer(model: PreTrainedModel, index: int = 1) -> Any:
    return cast(Any, model).model.layers[index]


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and tapped features ``[Q, ...]`` of the model's own forward pass without a cache."""
    kept: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        return lambda module, args, out: kept.update({index: out if isinstance(out, Tensor) else out[0]})

    handles = [layer(model, index).register_forward_hook(keep(index)) for index in TAPS]
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits, torch.cat([kept[index][0] for index in TAPS], dim=-1)


def near(found: Tensor | None, expected: Tensor) -> bool:
    assert found is not None and found.shape == expected.shape
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def check(found: Tensor | None, expected: Tensor) -> None:
    assert near(found, expected)


@torch.no_grad()
def right(runner: TargetRunner, model: PreTrainedModel, lean: bool = True) -> bool:
    """Whether the next prompt's passes are the model's, and are taken as expected."""
    tokens = make_prompts([9], seed=4)[0]
    cache = runner.new_cache(9)
    assert (runner.decoder is not None) == lean
    first = runner.forward(torch.tensor([tokens[:6]]), cache)
    cache.length = 6
    second = runner.forward(torch.tensor([tokens[6:]]), cache)
    logits, features = plain(model, tokens)
    assert first.features is not None and second.features is not None
    return near(torch.cat([first.logits, second.logits], dim=1)[0], logits) and near(
        torch.cat([first.features, second.features], dim=1)[0], features
    )


# ---- what it computes


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_prefill_blocks_and_single_tokens_equal_a_plain_forward(kind: str) -> None:
    model, tokens = make(kind), make_prompts([40], seed=1)[0]
    biases = {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biases >= ({"q_proj", "k_proj", "v_proj"} if "qwen2" in kind or "biased" in kind else set())
    runner = TargetRunner(model, TAPS)
    cache = runner.new_cache(40)
    assert runner.decoder is not None
    logits, features = plain(model, tokens)
    start = 0
    for width, rejected in ((21, 0), (8, 5), (1, 1), (1, 0), (9, 7)):
        # what is rejected is written, and forgotten by the length alone
        if rejected:
            runner.forward(torch.tensor([[33] * rejected]), cache)
        out = runner.forward(torch.tensor([tokens[start : start + width]]), cache)
        check(out.logits[0], logits[start : start + width])
        check(out.features[0] if out.features is not None else None, features[start : start + width])
        start += width
        cache.length = start
    assert start == 40


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_ragged_rows_equal_a_plain_forward(kind: str) -> None:
    model, prompts = make(kind), make_prompts([4, 12, 4], seed=1)
    runner = TargetRunner(model, TAPS)
    cache = runner.new_ragged_cache(16, 3)
    assert runner.decoder is not None
    for rows in ([0, 2], [1]):
        tokens = torch.tensor([prompts[i] for i in rows])
        positions = torch.arange(tokens.shape[1]).expand(len(rows), -1)
        out = runner.forward_ragged(tokens, cache, torch.tensor(rows), positions)
        for row, index in enumerate(rows):
            logits, features = plain(model, prompts[index])
            check(out.logits[row], logits)
            check(cast(Tensor, out.features)[row], features)
    # two more tokens for every row, each at its own positions, after the first row is gone
    cache.keep_rows(torch.tensor([1, 2]))
    positions = torch.tensor([[12, 13], [4, 5]])
    out = runner.forward_ragged(torch.tensor([[20, 21], [30, 31]]), cache, torch.arange(2), positions)
    for row, tokens in enumerate(([*prompts[1], 20, 21], [*prompts[2], 30, 31])):
        logits, features = plain(model, tokens)
        check(out.logits[row], logits[-2:])
        check(cast(Tensor, out.features)[row], features[-2:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_passes_of_one_shape_equal_a_plain_forward(kind: str) -> None:
    model, tokens = make(kind), make_prompts([20], seed=1)[0]
    runner = TargetRunner(model, TAPS)
    assert runner.refresh() and runner.decoder is not None
    cache = runner.new_static_cache(64)
    runner.forward(torch.tensor([tokens[:9]]), cache)
    cache.length, cache.window = 9, 32
    logits, features = plain(model, tokens)
    for start, width in ((9, 6), (12, 1), (13, 4), (15, 5)):
        # stale keys and values of the pass before lie behind `start`
        positions = torch.arange(start, start + width)
        out = runner.forward_static(torch.tensor([tokens[start : start + width]]), cache, positions)
        check(out.logits[0], logits[start : start + width])
        check(cast(Tensor, out.features)[0], features[start : start + width])


@pytest.mark.parametrize("kind", ["llama-linear", "llama-llama3", "mistral-yarn", "qwen3"])
@torch.no_grad()
def test_long_texts_equal_a_plain_forward(kind: str) -> None:
    """Past the length a scaled rotary embedding was trained for, and past what the first table of angles holds."""
    model = make(kind, max_position_embeddings=700)
    tokens = make_prompts([600], seed=1)[0]
    runner = TargetRunner(model, TAPS)
    cache = runner.new_cache(600)
    assert runner.decoder is not None
    logits, features = plain(model, tokens)
    runner.forward(torch.tensor([tokens[:590]]), cache)
    cache.length = 590
    out = runner.forward(torch.tensor([tokens[590:]]), cache)
    check(out.logits[0], logits[590:])
    check(cast(Tensor, out.features)[0], features[590:])


@pytest.mark.parametrize("kind", ONE_EACH)
@torch.no_grad()
def test_half_precision_is_as_close_as_the_models_own(kind: str) -> None:
    model, tokens = make(kind), make_prompts([12], seed=1)[0]
    exact, _ = plain(model, tokens)
    model.bfloat16()
    own, _ = plain(model, tokens)
    runner = TargetRunner(model, TAPS)
    cache = runner.new_cache(12)
    assert runner.decoder is not None
    lean = runner.forward(torch.tensor([tokens]), cache).logits[0]
    assert lean.dtype == torch.bfloat16
    assert (lean - exact).abs().mean() <= 1.5 * (own - exact).abs().mean()


# ---- when it is not taken


class OtherLinear(nn.Linear):
    """Stands for a quantised linear: same parameters, another function."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5


class Adapter(nn.Module):
    """A low-rank addition around a linear, as adapters are injected."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.up(self.down(states))


class OtherLlama(LlamaForCausalLM):
    """A subclass may do anything."""


class OwnTensor(Tensor):
    """Stands for a weight that is quantised or spread over devices inside a plain linear."""


def swap_linear(model: PreTrainedModel) -> None:
    old = layer(model).self_attn.v_proj
    new = OtherLinear(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict(old.state_dict())
    layer(model).self_attn.v_proj = new


def wrap_linear(model: PreTrainedModel) -> None:
    layer(model).mlp.up_proj = Adapter(layer(model).mlp.up_proj)


def patch_forward(model: PreTrainedModel) -> None:
    own = layer(model).mlp.forward
    layer(model).mlp.forward = lambda states: 2 * own(states)


def swap_activation(model: PreTrainedModel) -> None:
    layer(model).mlp.act_fn = nn.GELU()


def swap_class(model: PreTrainedModel) -> None:
    model.__class__ = OtherLlama


def own_tensor(model: PreTrainedModel) -> None:
    linear = layer(model).mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().clone().as_subclass(OwnTensor))


def eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


DEVIATIONS = [swap_linear, wrap_linear, patch_forward, swap_activation, swap_class, own_tensor, eager]


@pytest.mark.parametrize("first", [True, False], ids=["from-the-start", "after-a-prompt"])
@pytest.mark.parametrize("deviate", DEVIATIONS)
def test_whatever_deviates_runs_as_the_model_does(
    deviate: Callable[[PreTrainedModel], None], first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama")
    runner = TargetRunner(model, TAPS)
    if not first:
        assert right(runner, model)
        before = plain(model, [9, 8, 7])[0]
    deviate(model)
    if not first and deviate not in (swap_class, own_tensor, eager):
        assert not near(plain(model, [9, 8, 7])[0], before)
    assert not supports(model)
    assert right(runner, model, lean=False)
    # known to be different, not found to be wrong
    assert not caplog.records


def test_a_model_that_runs_fewer_layers_than_it_has() -> None:
    model = make("llama")
    runner = TargetRunner(model, (0, 1))
    tokens = torch.tensor([[9, 8, 7]])
    for count in (3, 2, 3):
        model.config.num_hidden_layers = count
        with torch.no_grad():
            out = runner.forward(tokens, runner.new_cache(3))
            check(out.logits, model(tokens, use_cache=False).logits)
        assert (runner.decoder is not None) == (count == 3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_left_to_the_model(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    model = make("llama", rope_parameters=rope)
    assert not supports(model)
    assert right(TargetRunner(model, TAPS), model, lean=False)


@pytest.mark.parametrize("of", ["", "model", "model.layers.1", "model.layers.0.self_attn.q_norm", "lm_head"])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_are_called_and_the_lean_forward_comes_back_without_them(of: str, before: bool) -> None:
    model, calls = make("qwen3"), []
    runner = TargetRunner(model, TAPS)
    assert right(runner, model)
    module = model.get_submodule(of)
    for _ in range(2):
        hook: Any = lambda *_: calls.append(1)  # noqa: E731
        handle = module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
        assert right(runner, model, lean=False) and calls
        handle.remove()
        calls.clear()
        assert right(runner, model) and not calls


def test_hooks_with_an_effect_have_it() -> None:
    model = make("qwen3")
    runner = TargetRunner(model, TAPS)
    assert right(runner, model)
    handle = layer(model).mlp.register_forward_hook(lambda module, args, output: 3 * output)
    assert right(runner, model, lean=False)
    handle.remove()
    assert right(runner, model)


def test_a_patched_instance_that_is_mended() -> None:
    model = make("llama")
    runner = TargetRunner(model, TAPS)
    patch_forward(model)
    assert right(runner, model, lean=False)
    del layer(model).mlp.forward
    assert right(runner, model)


def test_what_transformers_leaves_behind_is_no_hook() -> None:
    model = make("llama")
    runner = TargetRunner(model, TAPS)
    with torch.no_grad():
        model(torch.tensor([[9, 8]]), output_hidden_states=True)
    assert hooks_of(model)
    assert right(runner, model)


@pytest.mark.parametrize("first", [True, False], ids=["from-the-start", "after-a-prompt"])
def test_a_patched_class_runs_as_the_model_does(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extensions to long texts patch the attention class and change nothing while the text is short."""
    model, own = make("llama"), LlamaAttention.forward
    runner = TargetRunner(model, TAPS)
    if not first:
        assert right(runner, model)

    def forward(self: LlamaAttention, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states * (3 if hidden_states.shape[1] > 20 else 1), *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaAttention, "forward", forward)
        assert right(runner, model, lean=False)
    assert right(runner, model)


def test_a_lean_forward_that_gives_other_logits_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    layer(model).self_attn.is_causal = False
    assert supports(model)
    runner = TargetRunner(model, TAPS)
    tokens = torch.tensor([[9, 8, 7, 6]])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with torch.no_grad():
                out = runner.forward(tokens, runner.new_cache(4))
                check(out.logits, model(tokens, use_cache=False).logits)
            assert runner.decoder is None
    (record,) = caplog.records
    assert record.getMessage() == "LlamaForCausalLM runs its own forward: the lean one gives other logits"


def test_lean_can_be_switched_off() -> None:
    model = make("llama")
    assert right(TargetRunner(model, TAPS, lean=False), model, lean=False)


@pytest.mark.parametrize("change", ["scaling", "eps", "angles"])
def test_numbers_that_are_no_weights_are_followed(change: str) -> None:
    model = make("qwen3")
    runner = TargetRunner(model, TAPS)
    assert right(runner, model)
    before = plain(model, [9, 8, 7])[0]
    if change == "scaling":
        layer(model).self_attn.scaling *= 3
    elif change == "eps":
        layer(model).input_layernorm.variance_epsilon = 0.5
    else:
        cast(Any, model).model.rotary_emb.inv_freq.mul_(0.5)
    assert not near(plain(model, [9, 8, 7])[0], before)
    assert right(runner, model)


def test_mistral_slides_whatever_its_layer_types_say() -> None:
    model = make("mistral", layer_types=["full_attention"] * 3, sliding_window=8)
    with pytest.raises(UserError, match="has sliding_attention layers"):
        TargetRunner(model, TAPS)


# ---- it follows the weights


def test_weights_are_shared() -> None:
    model = make("qwen3", hidden_size=256, intermediate_size=512)
    decoder, own = LeanDecoder(model), layer(model)
    lean = decoder.layers[1]
    pairs: list[tuple[Any, Any]] = [
        (lean.query, own.self_attn.q_proj), (lean.key, own.self_attn.k_proj), (lean.value, own.self_attn.v_proj),
        (lean.output, own.self_attn.o_proj), (lean.gate, own.mlp.gate_proj), (lean.up, own.mlp.up_proj),
        (lean.down, own.mlp.down_proj), (lean.input_norm, own.input_layernorm),
        (lean.mlp_norm, own.post_attention_layernorm), (decoder.head, model.get_output_embeddings()),
    ]  # fmt: skip
    for ours, theirs in pairs:
        assert ours.weight is theirs.weight
    assert decoder.embedding is cast(Any, model.get_input_embeddings()).weight
    tiles = lean.gate.tiles
    assert tiles is not None and tiles.data_ptr() == own.mlp.gate_proj.weight.data_ptr()
    assert tiles.untyped_storage().data_ptr() == own.mlp.gate_proj.weight.untyped_storage().data_ptr()


def every_weight() -> list[str]:
    names = [name for name, _ in make("qwen3").named_parameters() if "layers" not in name or "layers.1" in name]
    assert "model.layers.1.self_attn.q_norm.weight" in names and "lm_head.weight" in names
    return names


@pytest.mark.parametrize("way", ["in-place", "data", "assigned"])
@pytest.mark.parametrize("name", every_weight())
def test_a_changed_weight_shows_in_the_next_prompt(name: str, way: str) -> None:
    model = make("qwen3")
    runner = TargetRunner(model, TAPS)
    assert right(runner, model)
    before = plain(model, [9, 8, 7])[0]
    weight = model.get_parameter(name)
    new = weight.detach() * torch.linspace(-1, 1, weight.shape[-1])
    if way == "in-place":
        with torch.no_grad():
            weight.copy_(new)
    elif way == "data":
        weight.data.copy_(new)
    else:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(new))
    assert not near(plain(model, [9, 8, 7])[0], before)
    assert right(runner, model)


@pytest.mark.parametrize("kind", ONE_EACH)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_shows_in_the_next_prompt(kind: str, assign: bool) -> None:
    model, other = make(kind), make(kind, seed=7)
    runner = TargetRunner(model, TAPS)
    assert right(runner, model)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert right(runner, model) and right(runner, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_shows_in_the_next_prompt(dtype: torch.dtype) -> None:
    model, tokens = make("qwen3"), torch.tensor([[9, 8, 7]])
    runner = TargetRunner(model, TAPS)
    assert right(runner, model)
    nn.Module.to(model, dtype)
    with torch.no_grad():
        out = runner.forward(tokens, runner.new_cache(3))
    assert runner.decoder is not None and out.logits.dtype == dtype
    model.float()
    assert right(runner, model)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("part", ["head", "head with a bias", "embedding", "mlp", "layer", "all layers", "norm"])
def test_a_replaced_part_shows_in_the_next_prompt(part: str, lean: bool) -> None:
    model, other = make("qwen3"), make("qwen3", seed=7)
    runner = TargetRunner(model, TAPS, lean=lean)
    assert right(runner, model, lean)
    before = plain(model, [9, 8, 7])[0]
    ours, theirs = cast(Any, model), cast(Any, other)
    if part == "head":
        ours.lm_head = theirs.lm_head
    elif part == "head with a bias":
        ours.lm_head = nn.Linear(32, 64)
    elif part == "embedding":
        model.set_input_embeddings(theirs.model.embed_tokens)
    elif part == "mlp":
        layer(model).mlp = layer(other).mlp
    elif part == "layer":
        ours.model.layers[1] = theirs.model.layers[1]
    elif part == "all layers":
        ours.model.layers = theirs.model.layers
    else:
        ours.model.norm = theirs.model.norm
    assert not near(plain(model, [9, 8, 7])[0], before)
    assert right(runner, model, lean)
    # what a drafter reads is the target's as well
    states = torch.randn(1, 2, 32)
    check(runner.logits(states), ours.lm_head(states))
    check(runner.embed(torch.tensor([[5, 6]])), ours.model.embed_tokens(torch.tensor([[5, 6]])))


# ---- its parts


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "size"), [(256, 256), (2048, 32), (70, 960), (256, 264), (64, 96)])
def test_a_linear_of_any_number_of_rows(width: int, size: int, bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(width, size, bias=bias)
    linear = Linear.of(module)
    assert (linear.tiles is not None) == (size % 32 == 0 and width * size >= 1 << 16)
    for rows in range(1, 25):
        states = torch.randn(1, rows, width)
        check(linear(states), module(states))
        check(linear(states[0]), module(states[0]))
    for states in (
        torch.randn(width, 6).T,  # rows that do not lie side by side
        torch.randn(3, 2, 2 * width)[..., ::2],
        torch.randn(2, 5, width).transpose(0, 1),
        torch.randn(2, 2, 2, width),
    ):
        check(linear(states), module(states))


def test_a_linear_of_few_rows_takes_a_way_of_its_own() -> None:
    narrow, wide = Linear.of(nn.Linear(1024, 256)), Linear.of(nn.Linear(2048, 256))
    ways = [None, narrow.weight_first, narrow.weight_first, narrow.in_tiles, narrow.in_tiles, None]
    assert [narrow.for_rows(rows) for rows in (0, 1, 3, 4, 19, 20)] == ways
    assert [wide.for_rows(rows) for rows in (0, 1, 19, 20)] == [None, wide.in_tiles, wide.in_tiles, None]


def test_a_linear_with_a_bias_leaves_its_input_and_parameters_alone() -> None:
    module, states = nn.Linear(2048, 32), torch.randn(1, 6, 2048)
    before = [tensor.detach().clone() for tensor in (states, module.weight, module.bias)]
    linear = Linear.of(module)
    assert torch.equal(linear(states), linear(states))
    for kept, tensor in zip(before, (states, module.weight, module.bias), strict=True):
        assert torch.equal(kept, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_linear_in_other_precisions(dtype: torch.dtype) -> None:
    module = nn.Linear(256, 256).to(dtype)
    states = torch.randn(2, 4, 256, dtype=dtype)
    assert torch.equal(Linear.of(module)(states), module(states))


def test_a_linear_whose_weight_does_not_lie_in_rows() -> None:
    module = nn.Linear(256, 256)
    module.weight = nn.Parameter(torch.randn(256, 256).T)
    linear, states = Linear.of(module), torch.randn(1, 6, 256)
    assert linear.tiles is None
    check(linear(states), module(states))


def gradients(function: Callable[[Tensor], Tensor], states: Tensor, *parameters: Tensor) -> list[Tensor]:
    inputs = [states.clone().requires_grad_(), *parameters]
    out = function(inputs[0])
    weights = torch.linspace(-1, 2, out.numel()).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize("rows", [1, 6, 24])
@pytest.mark.parametrize("size", [32, 256])
def test_gradients_of_a_linear(rows: int, size: int) -> None:
    module, states = nn.Linear(65536 // size, size), torch.randn(1, rows, 65536 // size)
    linear = Linear.of(module)
    assert linear.tiles is not None
    parameters = (module.weight, module.bias)
    for ours, theirs in zip(
        gradients(linear, states, *parameters), gradients(module, states, *parameters), strict=True
    ):
        check(ours, theirs)


def make_norm(dtype: torch.dtype = torch.float32) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(24, eps=1e-5)
    norm.weight.data.normal_(1.0, 0.5, generator=torch.Generator().manual_seed(0))
    return norm.to(dtype)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4, 0.0])
def test_norm_of_any_size_of_states(scale: float) -> None:
    norm, states = make_norm(), scale * torch.randn(2, 3, 24)
    states[0, 1] = 0
    expected = norm(states)
    found = Norm(norm)(states)
    torch.testing.assert_close(found, expected)
    assert found[0, 1].eq(0).all()


def test_norm_in_half_precision() -> None:
    norm, states = make_norm(torch.bfloat16), torch.randn(2, 300, 24).bfloat16()
    states[0, 1] = 0
    found, expected = Norm(norm)(states), norm(states)
    assert found.dtype == torch.bfloat16
    # two orders of rounding: never more than the last bit apart
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_norm_with_a_weight_per_head() -> None:
    norm, states = make_norm(), torch.randn(2, 3, 5, 24)
    weight = torch.randn(5, 24)
    expected = norm(states) / norm.weight * weight
    torch.testing.assert_close(Norm(norm).scaled(states, weight), expected)


def test_gradients_of_a_norm() -> None:
    norm, states = make_norm(), torch.randn(2, 3, 24)
    states[0, 1] = 0
    for ours, theirs in zip(
        gradients(Norm(norm), states, norm.weight), gradients(norm, states, norm.weight), strict=True
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "llama-linear", "llama-llama3", "mistral-yarn"])
def test_angles_are_the_models_own(kind: str) -> None:
    module = cast(Any, make(kind)).model.rotary_emb
    rotary, sizes = Rotary(module), []
    queries, keys = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    for end, positions in (
        (2, [0, 1, 0, 1, 1]),
        (256, [0, 1, 255, 7, 3]),
        (5001, [0, 1, 255, 256, 5000]),
        (3, [2] * 5),
    ):
        where = torch.tensor([positions])
        cos, sin = rotary.at(where, queries, end)
        assert rotary.tables is not None
        sizes.append(len(rotary.tables[0]))
        expected = apply_rotary_pos_emb(queries, keys, *module(queries, where), unsqueeze_dim=2)
        torch.testing.assert_close(rotate(queries, cos, sin), expected[0])
        torch.testing.assert_close(rotate(keys, cos, sin), expected[1])
    # grown when needed, kept otherwise
    assert sizes == [256, 256, 8192, 8192]


def test_angles_of_rows_at_their_own_positions_and_in_another_precision() -> None:
    module = cast(Any, make("llama")).model.rotary_emb
    rotary, where = Rotary(module), torch.tensor([[0, 4], [9, 300]])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        states = torch.randn(2, 2, 4, 8, dtype=dtype)
        cos, sin = rotary.at(where, states, 301)
        assert cos.dtype == sin.dtype == dtype
        expected, _ = apply_rotary_pos_emb(states, states, *module(states, where), unsqueeze_dim=2)
        # half precision is rounded once here, and twice there
        close: dict[str, Any] = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(rotate(states, cos, sin), expected, **close)


def test_angles_made_while_decoding_serve_in_training() -> None:
    module = cast(Any, make("llama")).model.rotary_emb
    rotary, where = Rotary(module), torch.tensor([[0, 4]])
    with torch.inference_mode():
        rotary.at(where, torch.zeros(1), 5)
    assert rotary.tables is not None and not rotary.tables[0].is_inference()
    states = torch.randn(1, 2, 4, 8, requires_grad=True)
    F.mse_loss(rotate(states, *rotary.at(where, states, 5)), torch.zeros(1, 2, 4, 8)).backward()
    assert states.grad is not None and states.grad.abs().sum() > 0
