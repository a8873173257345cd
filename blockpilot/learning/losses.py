"""What the predictor is trained for. Pure functions of scores and utility curves; know nothing of features.

Utility is tau, or tokens per second where the objective is speed. Prompts without rounds have none and therefore no
best block size: callers select those with rounds first (:func:`has_rounds`), and every function here returns one value
per row, so that means stay the caller's.

Shapes: N prompts with rounds, K candidate block sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot.metrics import best_share


def has_rounds(rounds_NK: Tensor) -> Tensor:
    """Whether every candidate of a prompt made at least one round, bool ``[N]``."""
    return (rounds_NK > 0).all(dim=-1)


def best_target(utility_NK: Tensor) -> Tensor:
    """``[N, K]``, rows summing to 1: weight on the best candidate, shared evenly where several tie.

    Short outputs tie often, and to name the smallest of the best then would teach that small is good.
    """
    best_NK = (utility_NK == utility_NK.amax(dim=-1, keepdim=True)).to(utility_NK.dtype)
    return best_NK / best_NK.sum(dim=-1, keepdim=True)


def relative_regret(utility_NK: Tensor) -> Tensor:
    """``1 - utility / best utility``, ``[N, K]``."""
    return 1 - utility_NK / utility_NK.amax(dim=-1, keepdim=True)


def balanced_weights(utility_NK: Tensor) -> Tensor:
    """Weight of each candidate in ``ce``, ``[K]``: one over its share of best labels, and 0 for one that is never best.

    Scaled so that the mean weight over these prompts is 1.
    """
    share_K = best_share(utility_NK)
    weights_K = torch.where(share_K > 0, 1 / share_K, 0)
    return weights_K / (weights_K * share_K).sum()


def cross_entropy_loss(scores_NK: Tensor, utility_NK: Tensor, class_weights_K: Tensor | None = None) -> Tensor:
    """``[N]``: cross-entropy on the best block size (BlockPilot, arXiv 2606.31315), ties by :func:`best_target`."""
    target_NK = best_target(utility_NK).to(scores_NK.dtype)
    weights_K = None if class_weights_K is None else class_weights_K.to(scores_NK.dtype)
    return F.cross_entropy(scores_NK, target_NK, weight=weights_K, reduction="none")


def soft_loss(scores_NK: Tensor, utility_NK: Tensor, temperature: float) -> Tensor:
    """``[N]``: cross-entropy against ``softmax(utility / best / temperature)``: near ties share the weight."""
    target_NK = (-relative_regret(utility_NK) / temperature).softmax(dim=-1).to(scores_NK.dtype)
    return F.cross_entropy(scores_NK, target_NK, reduction="none")


def regret_loss(scores_NK: Tensor, utility_NK: Tensor) -> Tensor:
    """``[N]``: expected regret ``sum_b p(b) (1 - u(b) / best)`` of drawing b from the predicted distribution."""
    return (scores_NK.softmax(dim=-1) * relative_regret(utility_NK).to(scores_NK.dtype)).sum(dim=-1)


def loss_per_prompt(
    name: str, scores_NK: Tensor, utility_NK: Tensor, soft_temperature: float, class_weights_K: Tensor | None = None
) -> Tensor:
    """``[N]``: the loss called ``name`` in ``predictor.loss``.

    Args:
        name: ``ce``, ``soft`` or ``regret``.
        scores_NK: the predictor's output.
        utility_NK: utility per candidate, above 0, no NaN.
        soft_temperature: used by ``soft`` only.
        class_weights_K: used by ``ce`` only.
    """
    if name == "ce":
        return cross_entropy_loss(scores_NK, utility_NK, class_weights_K)
    if name == "soft":
        return soft_loss(scores_NK, utility_NK, soft_temperature)
    assert name == "regret", name
    return regret_loss(scores_NK, utility_NK)
