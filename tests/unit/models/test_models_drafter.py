"""The drafter: published names of its weights, the published function and gradients, contexts, masks, its config."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from blockpilot.decoding import Sampling
from blockpilot.decoding.rounds import Rounds, Task
from blockpilot.decoding.static import StaticRounds
from blockpilot.errors import UserError
from blockpilot.models import DFlashDrafter, DrafterContext, Pair, TargetRunner
from tests.toy import make_drafter, make_pair, make_prompts, make_target

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def inputs(drafter: DFlashDrafter, context: int, block: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = drafter.config.hidden_size
    features = torch.randn(batch, context, len(drafter.target_layer_ids) * hidden, generator=generator)
    return features, torch.randn(batch, block, hidden, generator=generator)


def test_weights_have_the_names_of_published_checkpoints() -> None:
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for layer in range(2):
        parts = "q_proj k_proj v_proj o_proj q_norm k_norm".split()
        names |= {f"layers.{layer}.self_attn.{part}.weight" for part in parts}
        names |= {f"layers.{layer}.mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
        names |= {f"layers.{layer}.{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")}
    drafter = make_drafter(make_target())
    assert set(drafter.state_dict()) == names
    assert drafter.fc.weight.shape == (32, 64)  # two tapped layers side by side


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("layer_ids", [(0, 2), (3,)])
def test_hidden_states_are_those_of_the_published_implementation(kv_heads: int, layer_ids: tuple[int, ...]) -> None:
    reference = pytest.importorskip("dflash.model")
    drafter = make_drafter(make_target(), kv_heads=kv_heads, layer_ids=layer_ids)
    config = copy.deepcopy(drafter.config)
    config._attn_implementation = "sdpa"
    theirs = reference.DFlashDraftModel(config).eval()
    assert set(theirs.state_dict()) == set(drafter.state_dict())
    theirs.load_state_dict(drafter.state_dict())
    features, block = inputs(drafter, 11, 5)
    with torch.no_grad():
        expected = theirs(
            target_hidden=features, noise_embedding=block, position_ids=torch.arange(16)[None], use_cache=False
        )
        context = drafter.allocate(1, 20)
        drafter.extend(context, features)
        states = drafter(block, torch.arange(11, 16)[None], context)
    torch.testing.assert_close(states, expected[:, -5:], **CLOSE)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [12, 28, 36])
def test_default_layers_are_those_of_the_published_implementation(count: int, depth: int) -> None:
    reference = pytest.importorskip("dflash.model")
    target = make_target(hidden_size=16, heads=2, kv_heads=1)
    drafter = make_drafter(target, layers=count, dflash_config={"mask_token_id": 4}, num_target_layers=depth)
    assert drafter.target_layer_ids == reference.build_target_layer_ids(depth, count)


def test_default_layers_in_cases_worked_by_hand() -> None:
    target = make_target(hidden_size=16, heads=2, kv_heads=1)
    for count, depth, expected in ((1, 36, [18]), (2, 12, [1, 9]), (5, 36, [1, 9, 17, 25, 33])):
        drafter = make_drafter(target, layers=count, dflash_config={"mask_token_id": 4}, num_target_layers=depth)
        assert drafter.target_layer_ids == expected


def test_a_context_in_pieces_equals_one_in_one_go() -> None:
    drafter = make_drafter(make_target())
    features, block = inputs(drafter, 10, 4)
    whole, pieces = drafter.allocate(1, 10), drafter.allocate(1, 16)
    with torch.no_grad():
        drafter.extend(whole, features)
        for start, end in ((0, 3), (3, 4), (4, 10)):
            drafter.extend(pieces, features[:, start:end])
        positions = torch.arange(10, 14)[None]
        assert whole.length == pieces.length == 10
        torch.testing.assert_close(drafter(block, positions, pieces), drafter(block, positions, whole), **CLOSE)


def test_every_place_of_a_block_sees_every_other_and_all_of_the_context() -> None:
    drafter = make_drafter(make_target())
    features, block = inputs(drafter, 6, 4)

    @torch.no_grad()
    def run(features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        context = drafter.allocate(1, 6)
        drafter.extend(context, features)
        return drafter(block, torch.arange(6, 10)[None], context)[0]

    base = run(features, block)
    for place in range(4):
        changed = block.clone()
        changed[0, place] += 1
        assert ((run(features, changed) - base).abs().amax(-1) > 1e-4).all()
    for place in range(6):
        changed = features.clone()
        changed[0, place] += 1
        assert ((run(changed, block) - base).abs().amax(-1) > 1e-4).all()


def test_blocks_side_by_side_under_a_mask_equal_blocks_alone() -> None:
    drafter = make_drafter(make_target())
    features, states = inputs(drafter, 9, 7, batch=2)
    anchors, widths = (4, 8), (3, 4)
    positions = torch.cat([torch.arange(a, a + w) for a, w in zip(anchors, widths, strict=True)])
    block_of = torch.tensor([0] * 3 + [1] * 4)
    before = torch.arange(9) < torch.tensor(anchors)[block_of][:, None]
    mask = torch.cat([before, block_of[:, None] == block_of], dim=1)[None, None]
    with torch.no_grad():
        context = drafter.allocate(2, 9)
        drafter.extend(context, features)
        together = drafter(states, positions.expand(2, -1), context, mask)
        for row in range(2):
            for index, (anchor, width) in enumerate(zip(anchors, widths, strict=True)):
                alone = drafter.allocate(1, 9)
                drafter.extend(alone, features[row : row + 1, :anchor])
                part = states[row : row + 1, block_of == index]
                expected = drafter(part, torch.arange(anchor, anchor + width)[None], alone)
                torch.testing.assert_close(together[row, block_of == index], expected[0], **CLOSE)


def config_of(**changes: Any) -> Qwen3Config:
    values: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "block_size": 4, "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1]},
    } | changes  # fmt: skip
    return Qwen3Config(**{key: value for key, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("block_size", {"block_size": None}),
        ("mask_token_id", {"dflash_config": {"target_layer_ids": [1]}}),
        ("mask_token_id", {"dflash_config": None}),
        ("num_target_layers", {"dflash_config": {"mask_token_id": 4}, "num_target_layers": None}),
    ],
)
def test_a_missing_key_is_named(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"no '{key}'") as caught:
        DFlashDrafter(config_of(**changes))
    assert "\n" not in str(caught.value)


def test_keys_may_stand_at_the_top_level() -> None:
    drafter = DFlashDrafter(config_of(dflash_config=None, mask_token_id=4, target_layer_ids=[2, 3]))
    assert (drafter.mask_token_id, drafter.target_layer_ids, drafter.block_size) == (4, [2, 3], 4)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("layer_types", {"layer_types": ["chunked_attention"]}),
        ("rope_type", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("use_swa", {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1], "use_swa": True}}),
        ("selector_rank", {"selector_rank": 8}),
        ("conv_kernel_size", {"conv_kernel_size": 3}),
        ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("input_embedding_scale=2", {"input_embedding_scale": 2.0}),
    ],
)
def test_what_this_class_does_not_do_is_refused_by_name(what: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=what):
        DFlashDrafter(config_of(**changes))
    DFlashDrafter(config_of(input_embedding_scale=1.0, is_causal=False))


# ---- its weights: gradients reach them, changes show


def with_gradient(drafter: DFlashDrafter, features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """A pass as training makes it: context and block under one graph."""
    count, width = features.shape[1], block.shape[1]
    projected = drafter.project_context(features, torch.arange(count)[None], count)
    context = DrafterContext([keys for keys, _ in projected], [values for _, values in projected], length=count)
    return drafter(block, torch.arange(count, count + width)[None], context)


@pytest.mark.parametrize("hidden_size", [32, 256])  # the wider one takes the tiled linears
@pytest.mark.parametrize("after_decoding", [False, True])
def test_gradients_are_those_of_the_published_implementation(hidden_size: int, after_decoding: bool) -> None:
    reference = pytest.importorskip("dflash.model")
    drafter = make_drafter(make_target(hidden_size=hidden_size))
    config = copy.deepcopy(drafter.config)
    config._attn_implementation = "sdpa"
    theirs = reference.DFlashDraftModel(config).eval()
    theirs.load_state_dict(drafter.state_dict())
    features, block = inputs(drafter, 11, 5)
    if after_decoding:
        # tables and views made in inference mode must not reach the graph
        with torch.inference_mode():
            context = drafter.allocate(1, 20)
            drafter.extend(context, features)
            drafter(block, torch.arange(11, 16)[None], context)
    weights = torch.linspace(-1, 2, block.numel()).view_as(block)
    positions = torch.arange(16)[None]
    found, wanted = {}, {}
    for model, grads, states in (
        (drafter, found, with_gradient(drafter, features, block)),
        (theirs, wanted, theirs(
            target_hidden=features, noise_embedding=block, position_ids=positions, use_cache=False
        )[:, -5:]),
    ):  # fmt: skip
        (states * weights).sum().backward()
        grads |= {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys() == set(drafter.state_dict())
    for name, gradient in found.items():
        expected = wanted[name]
        assert expected.abs().max() > 0
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_gradients_are_those_of_finite_differences() -> None:
    """Holds without the published implementation, and for inputs as well."""
    drafter = make_drafter(make_target(hidden_size=16, heads=2, kv_heads=1), layers=1).double()
    features, block = (tensor.double() for tensor in inputs(drafter, 3, 2))
    names = [name for name, _ in drafter.named_parameters()]

    def run(features: torch.Tensor, block: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            _Pass(drafter), {f"drafter.{name}": value for name, value in zip(names, values, strict=True)},
            (features, block),
        )  # fmt: skip

    values = [parameter.detach().clone().requires_grad_() for parameter in drafter.parameters()]
    arguments = (features.requires_grad_(), block.requires_grad_(), *values)
    assert torch.autograd.gradcheck(run, arguments, fast_mode=True)


class _Pass(torch.nn.Module):
    def __init__(self, drafter: DFlashDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        return with_gradient(self.drafter, features, block)


PARAMETERS = [name for name, _ in make_drafter(make_target()).named_parameters() if "layers.0" not in name]


@pytest.mark.parametrize("kind", [Rounds, StaticRounds])
@pytest.mark.parametrize("way", ["in-place", "data", "assigned"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_changed_weight_shows_in_the_drafts_of_the_next_prompt(
    name: str, way: str, kind: type[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, read, logits = make_pair(seed=5), [], TargetRunner.logits
    monkeypatch.setattr(TargetRunner, "logits", lambda self, states: read.append(states) or logits(self, states))
    task = Task(make_prompts([9])[0], Sampling(), frozenset(), 20)

    @torch.inference_mode()
    def drafts(pair: Pair, kind: type[Rounds]) -> torch.Tensor:
        rounds = kind(pair, task)
        rounds.prefill()
        rounds.start(drafting=True)
        rounds.draft(6)
        rounds.close()
        return read[-1]

    before = drafts(pair, kind)
    weight = pair.drafter.get_parameter(name)
    new = weight.detach() * torch.linspace(-1, 1, weight.shape[-1])
    if way == "in-place":
        with torch.no_grad():
            weight.copy_(new)
    elif way == "data":
        weight.data.copy_(new)
    else:
        owner, _, leaf = name.rpartition(".")
        setattr(pair.drafter.get_submodule(owner), leaf, torch.nn.Parameter(new))
    after = drafts(pair, kind)
    assert (after - before).abs().max() > 1e-3
    # a copy has never run before
    fresh = dataclasses.replace(pair, drafter=copy.deepcopy(pair.drafter))
    torch.testing.assert_close(after, drafts(fresh, Rounds), **CLOSE)
