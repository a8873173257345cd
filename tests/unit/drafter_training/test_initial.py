"""An untrained drafter fits its target, and may start from its last layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockpilot.drafter_training.initial import copy_last_layers, new_drafter
from blockpilot.errors import UserError
from blockpilot.models.drafter_config import spread_taps
from blockpilot.models.lean import DenseLayer
from blockpilot.models.pair import check_fit
from tests.toy import make_target


def _drafter(target, layers: int = 2):
    return new_drafter(target, block_size=8, num_layers=layers, target_layer_ids=[0, 2], mask_token_id=4)


def _last(layers: Any) -> Any:
    return layers[-1]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
def test_a_new_drafter_fits_its_target(kind):
    target = make_target(kind)
    drafter = _drafter(target)
    check_fit(target, drafter)
    assert (drafter.block_size, drafter.mask_token_id, drafter.target_layer_ids) == (8, 4, [0, 2])


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
def test_layers_read_and_write_states_as_the_targets_last_ones_do(kind):
    target = make_target(kind)
    drafter = _drafter(target)
    copy_last_layers(drafter, target)
    states = torch.randn(1, 5, 32)
    unit = states / states.square().mean(dim=-1, keepdim=True).sqrt()
    pairs: list[tuple[Any, Any]] = list(zip(drafter.layers, target.model.layers[-2:], strict=True))
    for ours, theirs in pairs:
        for name in ("q_proj", "k_proj", "v_proj"):
            wanted = torch.nn.functional.linear(theirs.input_layernorm(states), getattr(theirs.self_attn, name).weight)
            # by way of the layer's own norm, and of the context's
            hidden_norm: Any = drafter.hidden_norm
            for normed in (ours.input_layernorm(states), hidden_norm(unit)):
                found = getattr(ours.self_attn, name)(normed)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        mine, its = DenseLayer(ours), DenseLayer(theirs)
        attended = torch.randn(1, 5, 32)
        torch.testing.assert_close(mine.finish(states, attended), its.finish(states, attended))
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)


def test_head_norms_are_the_targets_or_the_usual_length():
    target = make_target("qwen3")
    drafter = _drafter(target)
    copy_last_layers(drafter, target)
    ours, theirs = _last(drafter.layers), _last(target.model.layers)
    assert torch.equal(ours.self_attn.k_norm.weight, theirs.self_attn.k_norm.weight)
    target = make_target("llama")
    drafter = _drafter(target)
    copy_last_layers(drafter, target)
    ours, theirs = _last(drafter.layers), _last(target.model.layers)
    many = torch.nn.functional.normalize(torch.randn(4000, 32)) * 32**0.5
    lengths = theirs.self_attn.k_proj(many * theirs.input_layernorm.weight).unflatten(-1, (2, 8))
    usual = lengths.square().mean().sqrt()
    torch.testing.assert_close(ours.self_attn.k_norm.weight.mean(), usual, rtol=0.05, atol=0)


def test_what_has_no_such_layers_is_refused_by_name():
    target = make_target("qwen3")
    with pytest.raises(UserError, match=r"drafter_training\.initial='target' .*Qwen3ForCausalLM.*expected random"):
        copy_last_layers(_drafter(target, layers=5), target)


@pytest.mark.parametrize(
    ("depth", "count", "taps"),
    [(36, 5, [1, 9, 17, 25, 33]), (30, 5, [1, 8, 14, 20, 27]), (30, 1, [15]), (6, 3, [1, 2, 3]), (28, 2, [1, 25])],
)
def test_taps_are_spread_as_dflash_spreads_them(depth, count, taps):
    assert spread_taps(depth, count) == taps
