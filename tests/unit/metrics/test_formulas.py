"""Formulas against hand-worked numbers, plain-Python loops and simulated coverage."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot.errors import UserError
from blockpilot.metrics import formulas

NAN = float("nan")
TOKENS_NK = torch.tensor([[12, 12, 12], [9, 10, 10], [0, 0, 0], [20, 20, 21]])
ROUNDS_NK = torch.tensor([[4, 3, 6], [3, 2, 2], [0, 0, 0], [5, 8, 7]])
# tau:                    3  4  2     3  5  5    NaN         4  2.5 3


def curves() -> st.SearchStrategy[tuple[Tensor, ...]]:
    """Small (committed_tokens, rounds) tables; about every fourth prompt has no rounds."""
    cell = st.integers(1, 6).flatmap(lambda rounds: st.tuples(st.integers(rounds, 16 * rounds), st.just(rounds)))
    row = st.one_of(
        st.lists(cell, min_size=3, max_size=3),
        st.lists(cell, min_size=3, max_size=3),
        st.lists(cell, min_size=3, max_size=3),
        st.just([(0, 0)] * 3),
    )
    return st.lists(row, min_size=1, max_size=12).map(lambda rows: torch.tensor(rows).unbind(-1))


def test_tau_is_nan_only_without_rounds() -> None:
    tau = formulas.tau_per_prompt(TOKENS_NK, ROUNDS_NK)
    assert tau.dtype == torch.float64
    expected = torch.tensor([[3, 4, 2], [3, 5, 5], [NAN] * 3, [4, 2.5, 3]], dtype=torch.float64)
    assert torch.equal(tau.nan_to_num(-1), expected.nan_to_num(-1))


def test_mean_and_pooled_tau_differ_and_leave_out_prompts_without_rounds() -> None:
    tokens, rounds = TOKENS_NK[:, 0], ROUNDS_NK[:, 0]
    tau, left_out = formulas.mean_tau(tokens, rounds)
    assert (tau.item(), left_out.item()) == (10 / 3, 1)
    assert formulas.pooled_tau(tokens, rounds).item() == 41 / 12
    empty = torch.zeros(2, dtype=torch.int64)
    tau, left_out = formulas.mean_tau(empty, empty)
    assert (math.isnan(tau), left_out.item(), math.isnan(formulas.pooled_tau(empty, empty))) == (True, 2, True)


@given(curves())
def test_choices_match_a_loop(labels: tuple[Tensor, ...]) -> None:
    tokens_NK, rounds_NK = labels
    tau_NK = formulas.tau_per_prompt(tokens_NK, rounds_NK)
    best_N = formulas.best_choice(tau_NK)
    for row, best in zip(tau_NK.tolist(), best_N.tolist(), strict=True):
        assert best == (0 if math.isnan(row[0]) else row.index(max(row)))
    for column in range(3):
        choice_N = torch.full((len(tau_NK),), column)
        regret_N = formulas.regret_per_prompt(tau_NK, choice_N).tolist()
        right_N = formulas.is_best(tau_NK, choice_N).tolist()
        for row, regret, right in zip(tau_NK.tolist(), regret_N, right_N, strict=True):
            if math.isnan(row[0]):
                assert math.isnan(regret) and not right
            else:
                assert regret == (max(row) - row[column]) / max(row)
                assert right == (regret == 0) == (row[column] == max(row))


def test_ties_between_equal_ratios_of_different_counts_are_exact() -> None:
    tau_NK = formulas.tau_per_prompt(torch.tensor([[7, 14, 35]]), torch.tensor([[3, 6, 15]]))
    assert formulas.best_choice(tau_NK).tolist() == [0]
    assert all(formulas.is_best(tau_NK, torch.tensor([column])).item() for column in range(3))


def test_speed_utility_is_tau_over_the_seconds_of_a_round() -> None:
    # 12 tokens in 3 rounds of 0.5 s, 12 in 4 of 0.25 s: tau prefers the first, tokens per second the second
    committed, rounds = torch.tensor([[12, 12], [0, 0]]), torch.tensor([[3, 4], [0, 0]])
    seconds = torch.tensor([0.5, 0.25], dtype=torch.float64)
    utility = formulas.speed_utility(committed, rounds * seconds)
    assert utility[0].tolist() == [8, 12] == (formulas.tau_per_prompt(committed, rounds)[0] / seconds).tolist()
    assert bool(utility[1].isnan().all())
    assert formulas.regret_per_prompt(utility, torch.tensor([0, 0]))[0] == pytest.approx(1 / 3)


def test_relative_loss_may_be_a_gain() -> None:
    loss = formulas.relative_loss(torch.tensor([4.0, 4.0, 4.0]), torch.tensor([3.0, 4.0, 5.0]))
    assert loss.tolist() == [0.25, 0, -0.25]


def test_best_fixed_ignores_prompts_without_rounds_and_needs_one_with() -> None:
    tau_NK = formulas.tau_per_prompt(TOKENS_NK, ROUNDS_NK)
    assert formulas.best_fixed(tau_NK) == 1  # means 10/3, 11.5/3, 10/3
    assert formulas.best_fixed(tau_NK[:, [0, 2]]) == 0
    with pytest.raises(UserError, match="none of the 2 prompts"):
        formulas.best_fixed(torch.full((2, 3), NAN))


def test_headroom_captured() -> None:
    always, oracle = torch.tensor([3.0, NAN, 5.0]), torch.tensor([4.0, NAN, 8.0])
    assert formulas.headroom_captured(torch.tensor([4.0, NAN, 5.0]), always, oracle).item() == 0.25
    assert formulas.headroom_captured(torch.tensor([1.0, NAN, 5.0]), always, oracle).item() == -0.5
    assert formulas.headroom_captured(always, always, oracle).item() == 0
    assert formulas.headroom_captured(oracle, always, oracle).item() == 1
    assert math.isnan(formulas.headroom_captured(oracle, oracle, oracle))


def test_speedup_is_a_ratio_of_totals_per_token() -> None:
    tokens, none = torch.tensor([60, 60]), torch.zeros(2)
    baseline_seconds, seconds = torch.tensor([12.0, 12.0]), torch.tensor([3.0, 0.0])
    assert formulas.speedup(baseline_seconds, tokens, seconds, tokens)[0] == 4
    assert formulas.speedup(baseline_seconds, tokens, seconds, 2 * tokens)[0] == 8
    assert formulas.speedup(baseline_seconds, tokens, seconds, tokens)[1].isnan()  # no time
    assert formulas.speedup(baseline_seconds, none, seconds, none).isnan().all()


def test_speed_gain_is_that_of_tokens_per_second() -> None:
    # 120 tokens in 8 s, always-B: 100 in 10 s
    gain = formulas.speed_gain(*map(torch.tensor, (10.0 - 8.0, 8.0, 120 - 100, 100)))
    assert gain.item() == pytest.approx((120 / 8) / (100 / 10) - 1)
    assert formulas.speed_gain(*map(torch.tensor, (0.0, 0.3, 0, 7))).item() == 0
    assert formulas.speed_gain(*map(torch.tensor, (0.0, 0.0, 0, 7))).isnan()
    assert formulas.speed_gain(*map(torch.tensor, (0.0, 0.3, 0, 0))).isnan()


def test_bootstrap_matches_a_loop_and_stays_paired() -> None:
    generator = torch.Generator().manual_seed(3)
    rounds = torch.randint(0, 5, (40,), generator=generator)
    tokens = rounds * 4 + torch.randint(0, 3, (40,), generator=generator) * (rounds > 0)

    def statistic(tokens: Tensor, rounds: Tensor) -> Tensor:
        return formulas.mean_tau(tokens, rounds)[0]

    interval = formulas.bootstrap_interval(statistic, tokens, rounds, samples=400, seed=7)
    drawn = torch.randint(40, (400, 40), generator=torch.Generator().manual_seed(7))
    means = []
    for indices in drawn.tolist():
        taus = [tokens[i].item() / rounds[i].item() for i in indices if rounds[i] > 0]
        means.append(statistics.fmean(taus))
    expected = torch.tensor(means, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    assert interval == pytest.approx(expected.tolist(), rel=1e-12)


def test_bootstrap_is_reproducible_and_leaves_the_global_random_state_alone() -> None:
    values = torch.arange(30.0)
    before = torch.get_rng_state()
    first = formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=100, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=100, seed=1) == first
    assert formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=100, seed=2) != first
    wider = formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=100, seed=1, confidence=0.99)
    assert wider[0] < first[0] < first[1] < wider[1]


def test_bootstrap_in_slices_equals_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(30.0)
    whole = formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=101)
    monkeypatch.setattr(formulas, "_RESAMPLED_ELEMENTS", 30 * 7)
    assert formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=101) == whole


def test_bootstrap_without_values_is_nan() -> None:
    for values in (torch.tensor([]), torch.tensor([NAN, NAN])):
        assert all(map(math.isnan, formulas.bootstrap_interval(lambda x: x.nanmean(-1), values, samples=10)))
    low, high = formulas.bootstrap_interval(lambda x: x.nanmean(-1), torch.tensor([2.0, NAN]), samples=50)
    assert (low, high) == (2.0, 2.0)


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(300):
        values = torch.randn(60, generator=generator, dtype=torch.float64)
        low, high = formulas.bootstrap_interval(lambda x: x.mean(-1), values, samples=300, confidence=0.9, seed=seed)
        covered += low <= 0 <= high
    assert 0.84 <= covered / 300 <= 0.94
