"""torchmetrics modules that score block-size choices against known tau curves.

Know how to hold sums and counts over batches and processes; what the figures mean is in ``formulas.py``.

All share one signature, ``update(committed_tokens_NK, rounds_NK, choice_N)``: the labels of N prompts for K candidate
block sizes and the column chosen for each. Prompts without rounds have no tau and are ignored. State names differ
between the classes on purpose: a ``MetricCollection`` merges metrics whose states have equal names and values.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torchmetrics import Metric

from blockpilot.metrics import formulas


class ChoiceMetric(Metric):
    """Base: drops the prompts without rounds and hands the rest to the subclass."""

    is_differentiable = False
    full_state_update = False
    sums: tuple[str, ...] = ()
    """Names of the float64 states."""
    counts: tuple[str, ...] = ()
    """Names of the int64 states."""

    def __init__(self) -> None:
        """Registers the states, which add up over batches and processes."""
        super().__init__()
        for names, dtype in ((self.sums, torch.float64), (self.counts, torch.int64)):
            for name in names:
                self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def update(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        """Adds a batch of prompts.

        Args:
            committed_tokens_NK: int64 ``[N, K]``, sum of the acceptance lengths.
            rounds_NK: int64 ``[N, K]``; a row of zeros is a prompt without rounds.
            choice_N: int64 ``[N]``, column chosen for each prompt.
        """
        kept_N = (rounds_NK > 0).all(1)
        self._accumulate(committed_tokens_NK[kept_N], rounds_NK[kept_N], choice_N[kept_N])

    @abstractmethod
    def _accumulate(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        """Adds prompts that all have rounds to the sums."""


class ChoiceTau(ChoiceMetric):
    """``formulas.mean_tau`` of the chosen block sizes; NaN before any prompt with rounds."""

    higher_is_better = True
    sums = ("tau_sum",)
    counts = ("tau_prompts",)
    tau_sum: Tensor
    tau_prompts: Tensor

    def _accumulate(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        tau_NK = formulas.tau_per_prompt(committed_tokens_NK, rounds_NK)
        self.tau_sum += _chosen(tau_NK, choice_N).sum()
        self.tau_prompts += len(choice_N)

    def compute(self) -> Tensor:
        """float64 scalar."""
        return self.tau_sum / self.tau_prompts


class ChoicePooledTau(ChoiceMetric):
    """``formulas.pooled_tau`` of the chosen block sizes; NaN before any round."""

    higher_is_better = True
    counts = ("pooled_tokens", "pooled_rounds")
    pooled_tokens: Tensor
    pooled_rounds: Tensor

    def _accumulate(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        self.pooled_tokens += _chosen(committed_tokens_NK, choice_N).sum()
        self.pooled_rounds += _chosen(rounds_NK, choice_N).sum()

    def compute(self) -> Tensor:
        """float64 scalar."""
        return formulas.tau_per_prompt(self.pooled_tokens, self.pooled_rounds)


class ChoiceRegret(ChoiceMetric):
    """Mean of ``formulas.regret_per_prompt`` with utility tau; NaN before any prompt with rounds."""

    higher_is_better = False
    sums = ("regret_sum",)
    counts = ("regret_prompts",)
    regret_sum: Tensor
    regret_prompts: Tensor

    def _accumulate(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        tau_NK = formulas.tau_per_prompt(committed_tokens_NK, rounds_NK)
        self.regret_sum += formulas.regret_per_prompt(tau_NK, choice_N).sum()
        self.regret_prompts += len(choice_N)

    def compute(self) -> Tensor:
        """float64 scalar."""
        return self.regret_sum / self.regret_prompts


class TieAwareAccuracy(ChoiceMetric):
    """Share of prompts whose choice reaches the best tau, exact ties included; NaN before any prompt with rounds."""

    higher_is_better = True
    counts = ("best_prompts", "judged_prompts")
    best_prompts: Tensor
    judged_prompts: Tensor

    def _accumulate(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        tau_NK = formulas.tau_per_prompt(committed_tokens_NK, rounds_NK)
        self.best_prompts += formulas.is_best(tau_NK, choice_N).sum()
        self.judged_prompts += len(choice_N)

    def compute(self) -> Tensor:
        """float64 scalar."""
        return self.best_prompts.double() / self.judged_prompts


class HeadroomCaptured(ChoiceMetric):
    """``formulas.headroom_captured`` with the best column of each prompt as oracle; NaN while there is no headroom."""

    higher_is_better = True
    sums = ("gain_sum", "headroom_sum")
    gain_sum: Tensor
    headroom_sum: Tensor

    def __init__(self, always_column: int) -> None:
        """Registers the states; ``always_column`` is the column of the block size that always-B uses."""
        super().__init__()
        self.always_column = always_column

    def _accumulate(self, committed_tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> None:
        tau_NK = formulas.tau_per_prompt(committed_tokens_NK, rounds_NK)
        always_N = tau_NK[:, self.always_column]
        self.gain_sum += (_chosen(tau_NK, choice_N) - always_N).sum()
        self.headroom_sum += (tau_NK.amax(1) - always_N).sum()

    def compute(self) -> Tensor:
        """float64 scalar."""
        return formulas.share_of_headroom(self.gain_sum, self.headroom_sum)


def _chosen(values_NK: Tensor, choice_N: Tensor) -> Tensor:
    """The chosen column of each row, ``[N]``."""
    return values_NK.gather(1, choice_N[:, None]).squeeze(1)
