"""Batched decoding: tokens of single-prompt decoding, features of a plain forward pass."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch

from blockpilot.decoding import Sampling, Trajectory, generate, generate_batch
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.policies import FixedPolicy
from tests.toy import cut, decode_one_by_one, hooks_of, make_drafter, make_pair, make_prompts, make_target

LENGTHS = [9, 1, 5, 17, 5, 5, 2, 11]

KINDS: dict[str, Any] = {
    "qwen3": {},
    "qwen3-tied-eager": {"tied": True, "attention": "eager"},
    "llama-ungrouped": {"kind": "llama", "kv_heads": 4},
    "mistral": {"kind": "mistral"},
    "qwen2-one-kv-head": {"kind": "qwen2", "kv_heads": 1},
}


@cache
def pair_of(kind: str) -> Pair:
    target = make_target(seed=5, layers=3, **KINDS[kind])
    return make_pair(target=target, drafter=make_drafter(target, layer_ids=(2, 0)))


def check_numbers(pair: Pair, trajectory: Trajectory) -> None:
    """Features, prefill logits and prefill hidden state against one plain forward pass."""
    prompt, output = trajectory.prompt_ids, trajectory.output_ids
    with torch.no_grad():
        plain = pair.target(torch.tensor([prompt + output]), output_hidden_states=True)
    states = plain.hidden_states
    assert states is not None
    last = len(pair.runner.layers) - 1
    captured = []
    handle = pair.runner.layers[last].register_forward_hook(lambda module, args, output: captured.append(output))
    with torch.no_grad():
        pair.target(torch.tensor([prompt + output]))
    handle.remove()
    final = captured[0] if isinstance(captured[0], torch.Tensor) else captured[0][0]
    # the last entry of hidden_states is after the final norm, so the last layer's output is taken by hand
    layers = [final[0] if i == last else states[i + 1][0] for i in pair.drafter.target_layer_ids]
    expected = torch.cat(layers, dim=-1)[: len(prompt) + len(output) - 1]
    assert trajectory.features.shape == expected.shape
    torch.testing.assert_close(trajectory.features, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trajectory.logits, plain.logits[0, len(prompt) - 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trajectory.hidden, states[-1][0, len(prompt) - 1], rtol=1e-4, atol=1e-4)


def values(sampling: Sampling) -> dict[str, Any]:
    return asdict(sampling)


def test_features_are_kept_only_where_asked_for() -> None:
    pair, prompts = pair_of("qwen3"), make_prompts(LENGTHS, seed=2)
    plain = generate_batch(pair, prompts, max_new_tokens=9, stop_token_ids=[])
    full = generate_batch(pair, prompts, max_new_tokens=9, stop_token_ids=[], features=True)
    for one, other in zip(plain, full, strict=True):
        assert one.features.shape == (0, other.features.shape[1])
        assert one.output_ids == other.output_ids
        check_numbers(pair, other)
    assert generate_batch(pair, []) == []


def test_defaults_are_those_of_generate() -> None:
    pair, prompts = pair_of("qwen3"), make_prompts([5, 3], seed=2)
    for prompt, trajectory in zip(prompts, generate_batch(pair, prompts), strict=True):
        assert trajectory.output_ids == generate(pair, prompt, FixedPolicy(1)).output_ids
    with pytest.raises(UserError, match=r"^top_p=0"):
        generate_batch(pair, prompts, top_p=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.95, seed=3)], ids=["greedy", "sampled"])
def test_a_batch_of_uneven_prompts_equals_each_prompt_alone(kind: str, sampling: Sampling) -> None:
    pair, prompts = pair_of(kind), make_prompts(LENGTHS, seed=2)
    # many stop tokens, so that rows end one by one and the batch is thinned out on the way
    stops = list(range(0, 8))
    before = len(hooks_of(pair.target))
    found = generate_batch(pair, prompts, max_new_tokens=14, stop_token_ids=stops, **values(sampling), features=True)
    assert len(hooks_of(pair.target)) == before
    for prompt, trajectory in zip(prompts, found, strict=True):
        alone = generate(
            pair, prompt, FixedPolicy(1), max_new_tokens=14, stop_token_ids=stops, temperature=sampling.temperature,
            top_p=sampling.top_p, seed=sampling.seed,
        )  # fmt: skip
        assert trajectory.prompt_ids == prompt
        assert trajectory.output_ids == alone.output_ids
        assert trajectory.beyond_ids == []
        check_numbers(pair, trajectory)
    if kind == "qwen3" and not sampling.greedy:
        assert len({len(trajectory.output_ids) for trajectory in found}) > 3


def test_single_prompt_decoding_itself_equals_the_slow_definition() -> None:
    pair, prompts = pair_of("qwen3"), make_prompts([4, 9, 1], seed=2)
    sampling = Sampling(0.9, seed=1)
    for prompt, trajectory in zip(
        prompts,
        generate_batch(pair, prompts, max_new_tokens=12, stop_token_ids=[], **values(sampling), features=True),
        strict=True,
    ):
        assert trajectory.output_ids == decode_one_by_one(pair.target, prompt, sampling, 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_beyond_the_end(temperature: float) -> None:
    pair, prompts, sampling = pair_of("qwen3"), make_prompts(LENGTHS, seed=2), Sampling(temperature)
    whole = [decode_one_by_one(pair.target, prompt, sampling, 17) for prompt in prompts]
    stops = [whole[0][2], whole[3][0]]
    found = generate_batch(
        pair, prompts, max_new_tokens=10, stop_token_ids=stops, beyond=7, **values(sampling), features=True
    )
    for expected, trajectory in zip(whole, found, strict=True):
        assert trajectory.output_ids == cut(expected, 10, stops)
        end = len(trajectory.output_ids)
        assert trajectory.beyond_ids == expected[end : end + 7]
        check_numbers(pair, trajectory)
    assert found[3].output_ids == whole[3][:1]


def test_prompts_at_the_position_limit() -> None:
    """Six rows, so that those at the limit are still held while the others go on."""
    limit, sampling = 20, Sampling(1.0)
    target = make_target(seed=5, max_positions=limit)
    pair = make_pair(target=target, eos=None)
    prompts = make_prompts([17, 3, 4, 5, 6, 7], seed=2)
    found = generate_batch(
        pair, prompts, max_new_tokens=10, stop_token_ids=[], beyond=2, **values(sampling), features=True
    )
    for prompt, trajectory in zip(prompts, found, strict=True):
        fit = limit - len(prompt) + 1
        whole = decode_one_by_one(target, prompt, sampling, min(12, fit))
        assert trajectory.output_ids == whole[:10]
        assert trajectory.beyond_ids == whole[10:]
        check_numbers(pair, trajectory)


def test_prompts_that_fill_the_positions() -> None:
    target = make_target(seed=5, layers=3, max_positions=12)
    pair = make_pair(target=target, eos=None)
    prompts = make_prompts([12, 11, 12], seed=2)
    found = generate_batch(pair, prompts, max_new_tokens=10, stop_token_ids=[], features=True)
    assert [len(trajectory.output_ids) for trajectory in found] == [1, 2, 1]
    for trajectory in found:
        check_numbers(pair, trajectory)


@pytest.mark.parametrize(
    ("prompts", "message"), [([[9], []], "empty"), ([[9], [64]], "holds 64"), ([[9], [9] * 300], "300 tokens")]
)
def test_prompts_that_cannot_be_decoded(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate_batch(pair_of("qwen3"), prompts, max_new_tokens=2, stop_token_ids=[], features=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": None}, "prompts=None is not allowed; expected a list of prompts"),
        ({"beyond": -1}, "beyond=-1 is not allowed"),
        ({"beyond": 1.5}, "beyond=1.5 is not allowed"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 is not allowed"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0 is not allowed"),
    ],
)
def test_values_that_cannot_be_used(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments: dict[str, Any] = {"prompts": [[9, 10]]} | wrong
        generate_batch(make_pair(), **arguments)


def test_stop_ids_in_a_tensor_stop_every_row() -> None:
    pair = make_pair(successor=True, eos=None)
    stops: Any = torch.tensor([40])
    both = generate_batch(pair, [[9], [20]], max_new_tokens=60, stop_token_ids=stops)
    assert [one.output_ids[-1] for one in both] == [40, 40]
