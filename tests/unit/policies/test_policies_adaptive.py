"""Policies that adapt without learning: every case is worked out by hand, then decoded and simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockpilot.decoding import Draft, Prefill, Round, generate
from blockpilot.errors import UserError
from blockpilot.oracle import replay, simulate
from blockpilot.policies import ConfidencePolicy, EmaPolicy
from tests.toy import HEAD_NORM, make_prompts, make_scripted_pair

PREFILL = Prefill(1, 3, torch.zeros(8), torch.zeros(4))


def told(policy: EmaPolicy, lengths: list[int]) -> list[int]:
    """The policy's answers to a prompt whose rounds commit these lengths."""
    sizes = [policy.choose(PREFILL)]
    for index, length in enumerate(lengths):
        sizes.append(policy.update(Round(index, sizes[-1], length)))
    return sizes


def test_ema_by_hand() -> None:
    policy = EmaPolicy([2, 4, 8], 4, alpha=0.5, update_interval=1, down_hysteresis=0.0)
    # begins at 4 - 1 = 3. Length 4: (3 + 4) / 2 = 3.5, not above 4 - 0.5: stays. Length 4: 3.75 is above: up to 8.
    # Length 4: 3.875, above 4 - 0.5, so not down to 4. Length 3: 3.4375 <= 3.5: down to 4, and not above 3.5.
    # Length 1: 2.21875 > 2 - 0.5. Length 1: 1.609375. Length 1: 1.3046875 <= 1.5: down to 2.
    assert told(policy, [4, 4, 4, 3, 1, 1, 1]) == [4, 4, 8, 8, 4, 4, 4, 2]
    assert policy.ema == 1.3046875


def test_ema_goes_several_tiers_at_once_and_only_at_its_interval() -> None:
    # alpha = 1: the average is the last length. With a warm-up of 1 and an interval of 2, rounds 3 and 5 decide.
    policy = EmaPolicy([2, 4, 8], 2, alpha=1.0, warmup_rounds=1, update_interval=2, down_hysteresis=0.0)
    assert told(policy, [8, 8, 8, 1, 1, 8]) == [2, 2, 2, 8, 8, 2, 2]


def test_emas_hysteresis_moves_the_thresholds() -> None:
    # alpha = 1 and no waiting. From 4 it goes down to 2 at 2 - 0.5 + down, up to 8 above 4 - 0.5 + up.
    def after(length: int, **options: Any) -> int:
        return told(EmaPolicy([2, 4, 8], 4, alpha=1.0, update_interval=1, **options), [length])[-1]

    assert after(1, down_hysteresis=0.0) == 2  # 1 <= 1.5
    assert after(1, down_hysteresis=-0.5) == 2  # 1 <= 1.0
    assert after(1, down_hysteresis=-0.75) == 4  # 1 > 0.75
    assert after(4, up_hysteresis=0.25) == 8  # 4 > 3.75
    assert after(4, up_hysteresis=0.5) == 4  # 4 is not above 4


def test_ema_over_neighbouring_sizes_is_one_more_than_is_accepted() -> None:
    # SGLang's formula in block sizes: round(average) + 1, within the tiers
    for length in range(1, 12):
        policy = EmaPolicy(range(3, 9), 6, alpha=1.0, update_interval=1, down_hysteresis=0.0)
        assert told(policy, [length])[-1] == min(max(length + 1, 3), 8)


def test_ema_starts_at_the_nearest_tier_and_forgets_the_prompt_before() -> None:
    assert EmaPolicy([2, 4, 8], 6).choose(PREFILL) == 8  # as near as 4
    assert EmaPolicy([2, 4, 8], 5).choose(PREFILL) == 4
    policy = EmaPolicy([2, 4, 8], 4, alpha=0.7, update_interval=1)
    first = told(policy, [1, 1, 4])
    assert first != [4] * 4
    told(policy, [8, 8, 8, 8])
    assert told(policy, [1, 1, 4]) == first


def test_confidence_by_hand() -> None:
    policy = ConfidencePolicy(5, 0.4)
    assert policy.choose(PREFILL) == 5
    # the anchor and the drafts before the first below 0.4; a later one above it does not count
    for probs, verified in (
        ([0.9, 0.5, 0.39, 0.9], 3),
        ([0.9, 0.8, 0.7, 0.6], 5),
        ([0.1, 0.9, 0.9, 0.9], 1),
        ([0.4, 0.4, 0.4, 0.3], 4),  # the threshold itself is enough
    ):
        assert policy.trim(Draft(5, torch.tensor(probs))) == verified
    assert ConfidencePolicy(5, 0.0).trim(Draft(5, torch.zeros(4))) == 5


def test_confidence_with_rounds_worked_out_by_hand() -> None:
    # the drafter is right twice, then wrong; all its drafts are as likely: it says rows of the head, all of one length
    pair, prompt = make_scripted_pair(2), make_prompts([7])[0]
    head = pair.runner.head.weight.detach()
    probs = (head @ head.T).softmax(-1).diagonal()
    sure, unsure = float(probs.min()) * 0.99, float(probs.max()) * 1.01
    assert 0 < sure < unsure < 1 and float(head.norm(dim=-1).mean()) == pytest.approx(HEAD_NORM)
    all_of_it = generate(pair, prompt, ConfidencePolicy(6, sure), max_new_tokens=14)
    # 13 tokens in rounds of 2 right drafts and a bonus
    assert (all_of_it.block_sizes, all_of_it.drafted_sizes) == ([6] * 5, [6] * 5)
    assert all_of_it.acceptance_lengths == [3, 3, 3, 3, 1]
    none_of_it = generate(pair, prompt, ConfidencePolicy(6, unsure), max_new_tokens=14)
    assert (none_of_it.block_sizes, none_of_it.drafted_sizes) == ([1] * 13, [6] * 13)
    assert none_of_it.acceptance_lengths == [1] * 13
    assert none_of_it.output_ids == all_of_it.output_ids


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_decoding_and_simulation_agree(temperature: float) -> None:
    pair = make_scripted_pair(lambda p: p * 5 % 7, noise=0.8)
    prompts = make_prompts([3, 6, 8, 11], seed=2)
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature}
    records = replay(pair, prompts, [4], **options)
    for policy in (
        EmaPolicy([2, 3, 4, 5, 6], 6, update_interval=2),
        EmaPolicy([1, 3, 5], 5, alpha=0.6, update_interval=1),
        ConfidencePolicy(8, 0.3),
        ConfidencePolicy(4),
    ):
        outs = [generate(pair, prompt, policy, **options) for prompt in prompts]
        assert len({size for out in outs for size in out.block_sizes}) > 1
        for out, one in zip(outs, simulate(pair, records, policy), strict=True):
            assert (out.acceptance_lengths, out.block_sizes) == (one.acceptance_lengths, one.block_sizes)
            assert (out.drafted_sizes, out.first_block_size) == (one.drafted_sizes, one.first_block_size)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_sizes": []}, "block_sizes=.* is not allowed; expected at least one"),
        ({"block_sizes": [0, 4]}, "block_sizes=.* is not allowed"),
        ({"start": 0}, "start=0 is not allowed"),
        ({"alpha": 0}, "alpha=0 is not allowed; expected a number in .0, 1."),
        ({"alpha": float("nan")}, "alpha=nan is not allowed"),
        ({"warmup_rounds": -1}, "warmup_rounds=-1 is not allowed"),
        ({"update_interval": 0}, "update_interval=0 is not allowed"),
    ],
)
def test_ema_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EmaPolicy(**({"block_sizes": [2, 4], "start": 4} | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 0}, "block_size=0 is not allowed"),
        ({"block_size": 4, "threshold": 1.1}, "threshold=1.1 is not allowed; expected a number in .0, 1."),
        ({"block_size": 4, "threshold": float("nan")}, "threshold=nan is not allowed"),
    ],
)
def test_confidence_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConfidencePolicy(**wrong)
