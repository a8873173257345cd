"""Losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from blockpilot.learning import cross_entropy_loss, has_rounds, loss_per_prompt, regret_loss, soft_loss
from blockpilot.learning.losses import balanced_weights

TAU = torch.tensor([[4.0, 5.0, 5.0], [2.0, 1.0, 1.5]], dtype=torch.float64)
LOGITS = torch.tensor([[0.0, math.log(2), 0.0], [math.log(2), 0.0, math.log(5)]])
PROBS = [[0.25, 0.5, 0.25], [0.25, 0.125, 0.625]]


def test_cross_entropy_shares_the_label_among_tied_bests() -> None:
    tied = -(math.log(0.5) + math.log(0.25)) / 2
    assert cross_entropy_loss(LOGITS, TAU).tolist() == pytest.approx([tied, -math.log(0.25)])


def test_regret_is_the_expected_share_given_away() -> None:
    expected = [0.25 * 0.2, 0.125 * 0.5 + 0.625 * 0.25]
    assert regret_loss(LOGITS, TAU).tolist() == pytest.approx(expected)


def test_soft_targets_are_a_softmax_of_the_relative_curve() -> None:
    weights = [[math.exp(value / max(row) / 0.1) for value in row] for row in TAU.tolist()]
    targets = [[w / sum(row) for w in row] for row in weights]
    expected = [-sum(t * math.log(p) for t, p in zip(*rows, strict=True)) for rows in zip(targets, PROBS, strict=True)]
    assert soft_loss(LOGITS, TAU, temperature=0.1).tolist() == pytest.approx(expected)


def test_a_cold_soft_loss_without_ties_is_cross_entropy() -> None:
    assert soft_loss(LOGITS[1:], TAU[1:], 1e-3).item() == pytest.approx(cross_entropy_loss(LOGITS[1:], TAU[1:]).item())


@pytest.mark.parametrize("name", ["ce", "soft", "regret"])
def test_every_loss_by_name_pulls_towards_the_best(name: str) -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = loss_per_prompt(name, logits, TAU[1:], soft_temperature=0.05)
    assert loss.shape == (1,) and loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.argmin() == 0 and gradient[0, 0] < 0


def test_prompts_without_rounds_are_known() -> None:
    assert has_rounds(torch.tensor([[3, 2], [0, 0], [1, 1]])).tolist() == [True, False, True]


def test_balanced_weights_are_inverse_shares_of_best_labels_with_mean_one() -> None:
    # best: first; first; second and third tied. Shares 2/3, 1/6, 1/6, 0; one over them 1.5, 6, 6, and 0 for none
    tau = torch.tensor([[3.0, 1, 1, 1], [4, 2, 3, 1], [1, 2, 2, 1]], dtype=torch.float64)
    # mean weight over the prompts: 2/3 * 1.5 + 1/6 * 6 + 1/6 * 6 = 3
    assert balanced_weights(tau).tolist() == pytest.approx([0.5, 2, 2, 0])


def test_class_weights_scale_each_candidates_part_of_the_cross_entropy() -> None:
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    # first prompt: candidates 1 and 2 tie; second: candidate 0
    expected = [-(2 * math.log(0.5) + 0.5 * math.log(0.25)) / 2, -math.log(0.25)]
    assert cross_entropy_loss(LOGITS, TAU, weights).tolist() == pytest.approx(expected)
    assert loss_per_prompt("ce", LOGITS, TAU, 0.05, weights).tolist() == pytest.approx(expected)
