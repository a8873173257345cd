"""From scores to a candidate: the highest score, or B unless another promises enough more.

Knows scores and utilities; nothing of features, prompts or where utilities come from.

Shapes: N prompts with rounds, K candidate block sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockpilot.learning.losses import best_target

TEMPERATURES = torch.logspace(-1.5, 1.5, 121)
"""Tried in calibration: 0.03 to 30, 6 % apart."""


class Decision(nn.Module):
    """The rule that turns a predictor's scores into a choice.

    With ``min_gain=None`` (the paper) it is the highest score. Otherwise scores become a calibrated distribution over
    "which candidate is best", ``p = softmax(scores / temperature)`` (temperature scaling, Guo et al. 2017), and the
    expected gain of candidate b over B is ``sum_c p(c) gains[c, b]``, where ``gains[c, b]`` is the mean relative gain
    of b over B among training prompts whose best candidate is c. The candidate of the highest expected gain is chosen
    if that is above ``min_gain``, else B.

    Args:
        num_candidates: K.
        always_column: column of B.
        min_gain: expected relative gain that a candidate other than B must exceed; None takes the highest score.
    """

    temperature: Tensor
    """Divides the scores; 1 until :meth:`calibrate`."""
    gains: Tensor
    """float32 ``[K, K]``; 0 until :meth:`learn_gains`, so that every choice is B."""

    def __init__(self, num_candidates: int, always_column: int, min_gain: float | None = None) -> None:
        super().__init__()
        self.always_column, self.min_gain = always_column, min_gain
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("gains", torch.zeros(num_candidates, num_candidates))

    @torch.no_grad()
    def learn_gains(self, utility_NK: Tensor) -> None:
        """Takes the gains from training prompts; a candidate that is never best gets the mean over all of them."""
        always_N1 = utility_NK[:, self.always_column, None]
        gain_NK = (utility_NK / always_N1 - 1).double()
        best_NK = best_target(utility_NK.double())
        weight_K = best_NK.sum(dim=0)
        by_best_KK = (best_NK.T @ gain_NK) / weight_K[:, None]
        self.gains.copy_(torch.where(weight_K[:, None] > 0, by_best_KK, gain_NK.mean(dim=0)))

    @torch.no_grad()
    def calibrate(self, scores_NK: Tensor, utility_NK: Tensor) -> None:
        """Sets the temperature that makes the best candidates of validation prompts most likely."""
        temperatures_T11 = TEMPERATURES.to(scores_NK.device)[:, None, None]
        log_probs_TNK = (scores_NK.float() / temperatures_T11).log_softmax(dim=-1)
        likelihood_T = (log_probs_TNK * best_target(utility_NK.double()).float()).sum(dim=(1, 2))
        self.temperature.copy_(temperatures_T11[likelihood_T.argmax(), 0, 0])

    def expected_gain(self, scores_NK: Tensor) -> Tensor:
        """Relative gain over B that each candidate promises, ``[N, K]``."""
        return (scores_NK.float() / self.temperature).softmax(dim=-1) @ self.gains

    def forward(self, scores_NK: Tensor) -> Tensor:
        """Chosen columns, int64 ``[N]``."""
        if self.min_gain is None:
            return scores_NK.argmax(dim=-1)
        gain_N, column_N = self.expected_gain(scores_NK).max(dim=-1)
        return torch.where(gain_N > self.min_gain, column_N, self.always_column)
