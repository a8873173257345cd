"""The rule from scores to a candidate, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from blockpilot.learning.decision import TEMPERATURES, Decision

UTILITY = torch.tensor([[4.0, 5.0, 6.0], [4.0, 5.0, 5.5], [6.0, 5.0, 4.0]], dtype=torch.float64)
"""B is the middle column: the last is best twice, by 20 % and 10 %; the first once, by 20 %."""


def test_gains_are_means_over_the_prompts_whose_best_candidate_it_is() -> None:
    decision = Decision(3, always_column=1, min_gain=0.0)
    decision.learn_gains(UTILITY)
    everyone = [(-0.2 - 0.2 + 0.2) / 3, 0, (0.2 + 0.1 - 0.2) / 3]  # B itself is never best
    expected = [[0.2, 0, -0.2], everyone, [-0.2, 0, 0.15]]
    torch.testing.assert_close(decision.gains, torch.tensor(expected, dtype=torch.float32))


def test_a_tied_prompt_counts_for_each_of_its_best_by_its_share() -> None:
    decision = Decision(2, always_column=0, min_gain=0.0)
    decision.learn_gains(torch.tensor([[2.0, 2.0], [2.0, 3.0]], dtype=torch.float64))
    # best 0: half of the first prompt, gain 0; best 1: the other half with 0, and all of the second with 0.5
    torch.testing.assert_close(decision.gains, torch.tensor([[0, 0.0], [0, (0.5 * 0 + 0.5) / 1.5]]))


@pytest.mark.parametrize(("min_gain", "column"), [(None, 0), (0.0, 2), (0.024, 2), (0.026, 1)])
def test_b_is_kept_unless_the_expected_gain_exceeds_the_least(min_gain: float | None, column: int) -> None:
    decision = Decision(3, always_column=1, min_gain=min_gain)
    decision.gains.copy_(torch.tensor([[0.1, 0, -0.1], [0, 0, 0], [-0.2, 0, 0.15]]))
    scores = torch.tensor([[0.5, 0.0, 0.5]]).log().clamp_min(-50) + torch.tensor([0.01, 0, 0])
    # p = 1/2, 0, 1/2 (up to 0.0025): candidate 0 promises -0.05, B nothing, candidate 2 promises 0.025
    promised = decision.expected_gain(scores)[0].tolist()
    assert promised == pytest.approx([-0.05, 0, 0.025], abs=1e-3)
    assert decision(scores).tolist() == [column]


def test_before_training_every_choice_is_b() -> None:
    scores = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    assert decisions(Decision(3, 1, min_gain=0.0), scores) == {1}
    assert len(decisions(Decision(3, 1), scores)) == 3


def decisions(decision: Decision, scores: torch.Tensor) -> set[int]:
    return set(decision(scores).tolist())


def test_calibration_finds_the_temperature_that_made_the_labels() -> None:
    """Labels drawn from softmax(scores / 3): of the temperatures tried, one close to 3 makes them most likely."""
    generator = torch.Generator().manual_seed(1)
    scores = 6 * torch.randn(20_000, 4, generator=generator)
    drawn = torch.multinomial((scores / 3).softmax(dim=-1), 1, generator=generator)
    utility = torch.ones(20_000, 4, dtype=torch.float64).scatter(1, drawn, 2.0)
    decision = Decision(4, 0, min_gain=0.0)
    decision.calibrate(scores, utility)
    step = float(TEMPERATURES[1] / TEMPERATURES[0])
    assert math.log(3 / float(decision.temperature)) == pytest.approx(0, abs=math.log(step))
