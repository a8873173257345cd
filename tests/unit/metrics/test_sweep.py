"""Figures of a sweep against hand-worked ones."""

from __future__ import annotations

import math

import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.metrics import Estimate, bootstrap_interval, summarize_sweep
from blockpilot.metrics.sweep import windows

NAN = math.nan
# prompts a, b, c (a tie), and one without rounds; B = 4
TAU = torch.tensor([[2, 3, 4, 5], [2, 6, 4, 5], [1, 3, 3, 2], [NAN] * 4], dtype=torch.float64)
SIZES = (2, 3, 4, 5)


def test_one_size_for_all() -> None:
    summary = summarize_sweep(TAU, SIZES, 4)
    assert (summary.num_prompts, summary.num_prompts_without_rounds) == (3, 1)
    assert [one.tau.value for one in summary.fixed] == pytest.approx([5 / 3, 4, 11 / 3, 4])
    assert summary.best_fixed == 3  # the smaller of two equal ones
    gains = [one.gain and one.gain.value for one in summary.fixed]
    assert gains == [pytest.approx(5 / 11 - 1), pytest.approx(1 / 11), None, pytest.approx(1 / 11)]
    assert summary.fixed_at(5) is summary.fixed[3] and summary.fixed_at(6) is None


def test_the_best_of_each_range() -> None:
    near, everything = summarize_sweep(TAU, SIZES, 4).oracles
    assert (near.block_sizes, near.radius) == ((3, 4, 5), 1)
    assert (everything.block_sizes, everything.radius) == (SIZES, None)
    for one in (near, everything):
        assert one.tau.value == pytest.approx((5 + 6 + 3) / 3)
        assert one.gain is not None and one.gain.value == pytest.approx(14 / 11 - 1)
        assert one.tied_prompts == 1
        assert one.median_gap == pytest.approx(1 / 6)  # of 1/5, 1/6 and 0
    assert near.best_share == pytest.approx([1.5 / 3, 0.5 / 3, 1 / 3])
    assert everything.best_share == pytest.approx([0, 1.5 / 3, 0.5 / 3, 1 / 3])


def test_choices_are_measured_against_sizes_as_far_as_they_go() -> None:
    chosen = torch.tensor([5, 5, 4, 2])  # that of the prompt without rounds does not count
    choice = summarize_sweep(TAU, SIZES, 4, chosen).choice
    assert choice is not None and choice.gain is not None
    assert choice.candidates == (3, 4, 5)
    assert choice.tau.value == pytest.approx(13 / 3)
    assert choice.regret.value == pytest.approx((0 + 1 / 6 + 0) / 3)
    assert choice.gain.value == pytest.approx(13 / 11 - 1)
    assert choice.best_prompts == 2  # a tie counts as right


def test_intervals_are_those_of_the_paired_bootstrap() -> None:
    tau = torch.rand(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    summary = summarize_sweep(tau, (3, 4, 5), 4, torch.full((40,), 5), samples=500, seed=7)
    own, base, best = tau[:, 2], tau[:, 1], tau.amax(1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.mean(-1)

    def gain(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return values.mean(-1) / others.mean(-1) - 1

    assert summary.choice is not None
    for found, statistic, arrays in (
        (summary.fixed[2].tau, mean, (own,)),
        (summary.fixed[2].gain, gain, (own, base)),
        (summary.choice.gain, gain, (own, base)),
        (summary.choice.regret, mean, (1 - own / best,)),
        (summary.oracles[0].gain, gain, (best, base)),
    ):
        assert found is not None
        expected = bootstrap_interval(statistic, *arrays, samples=500, seed=7)
        assert (found.low, found.high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sizes", "trained", "radii"),
    [
        ((13, 14, 15, 16, 17, 18, 19), 16, [1, 2, 3]),
        ((4, 8, 14, 15, 16, 17, 18, 32), 16, [1, 2]),
        ((14, 15, 16), 16, []),
        ((13, 14, 16, 17, 18), 16, []),
        ((15, 17), 16, []),
    ],
)
def test_a_range_needs_all_its_sizes(sizes: tuple[int, ...], trained: int, radii: list[int]) -> None:
    assert list(windows(sizes, trained)) == radii
    summary = summarize_sweep(torch.ones(2, len(sizes)), sizes, trained)
    last = summary.oracles[-1]
    assert [one.radius for one in summary.oracles if one is not last] == radii[: len(summary.oracles) - 1]
    assert last.block_sizes == sizes


def test_all_sizes_are_not_listed_twice() -> None:
    [one] = summarize_sweep(torch.ones(2, 3), (3, 4, 5), 4).oracles
    assert (one.radius, one.tied_prompts, one.median_gap) == (1, 2, 0)


def test_without_b_there_are_no_gains() -> None:
    summary = summarize_sweep(TAU, SIZES, 16, torch.tensor([5, 5, 4, 2]))
    assert [one.gain for one in summary.fixed] == [None] * 4
    assert [one.gain for one in summary.oracles] == [None]
    assert summary.choice is not None and summary.choice.gain is None
    assert summary.best_fixed == 3


def test_a_single_size_has_no_second() -> None:
    [one] = summarize_sweep(torch.ones(2, 1), (4,), 4).oracles
    assert (one.median_gap, one.tied_prompts, one.best_share) == (None, 0, (1,))


def test_prompts_without_rounds_alone_are_refused() -> None:
    with pytest.raises(UserError, match="none of the 2 prompts has any rounds"):
        summarize_sweep(torch.full((2, 3), NAN), (3, 4, 5), 4)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.2, "better"), (-0.2, -0.1, "worse"), (-0.1, 0.1, "not distinguishable"), (0, 0.1, "not distinguishable"),
     (0, 0, "not distinguishable")],
)  # fmt: skip
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Estimate(0, low, high).verdict == verdict
