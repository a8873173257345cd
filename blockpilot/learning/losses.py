"""What the predictor is trained for. Pure functions of scores and tau curves; know nothing of features.

Prompts without rounds have no tau and therefore no best block size: callers select those with rounds first
(:func:`has_rounds`), and every function here returns one value per row, so that means stay the caller's.

Shapes: N prompts with rounds, K candidate block sizes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def has_rounds(rounds_NK: Tensor) -> Tensor:
    """Whether every candidate of a prompt made at least one round, bool ``[N]``."""
    return (rounds_NK > 0).all(dim=-1)


def cross_entropy_loss(logits_NK: Tensor, tau_NK: Tensor) -> Tensor:
    """``[N]``: cross-entropy on the best block size (BlockPilot, arXiv 2606.31315), shared evenly where several tie.

    Short outputs tie often, and to name the smallest of the best then would teach that small is good.
    """
    best_NK = (tau_NK == tau_NK.amax(dim=-1, keepdim=True)).to(logits_NK.dtype)
    return F.cross_entropy(logits_NK, best_NK / best_NK.sum(dim=-1, keepdim=True), reduction="none")


def soft_loss(logits_NK: Tensor, tau_NK: Tensor, temperature: float) -> Tensor:
    """``[N]``: cross-entropy against ``softmax(tau / max tau / temperature)``: near ties share the weight."""
    relative_NK = tau_NK / tau_NK.amax(dim=-1, keepdim=True)
    target_NK = (relative_NK / temperature).softmax(dim=-1).to(logits_NK.dtype)
    return F.cross_entropy(logits_NK, target_NK, reduction="none")


def regret_loss(logits_NK: Tensor, tau_NK: Tensor) -> Tensor:
    """``[N]``: expected regret ``sum_b p(b) (1 - tau(b) / max tau)`` of drawing b from the predicted distribution."""
    regret_NK = 1 - tau_NK / tau_NK.amax(dim=-1, keepdim=True)
    return (logits_NK.softmax(dim=-1) * regret_NK.to(logits_NK.dtype)).sum(dim=-1)


def loss_per_prompt(name: str, logits_NK: Tensor, tau_NK: Tensor, soft_temperature: float) -> Tensor:
    """``[N]``: the loss called ``name`` in ``predictor.loss``.

    Args:
        name: ``ce``, ``soft`` or ``regret``.
        logits_NK: scores.
        tau_NK: mean acceptance length per candidate, no NaN.
        soft_temperature: used by ``soft`` only.
    """
    if name == "ce":
        return cross_entropy_loss(logits_NK, tau_NK)
    if name == "soft":
        return soft_loss(logits_NK, tau_NK, soft_temperature)
    assert name == "regret", name
    return regret_loss(logits_NK, tau_NK)
