"""A figure with its interval, and the paired bootstrap that all figures of the same prompts share.

Knows numbers per prompt and their sums; what they mean is the caller's.

Shapes: N prompts, S resamplings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.metrics import formulas

FEWEST_PROMPTS = 10
"""Fewer say nothing of other prompts: an interval meant to hold the truth 95 times in 100 then does so less than 90."""

_PRESENT = object()
"""Marks the name of a count: prompts that have a number of the name beside it."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval over prompts; all three are NaN where it is undefined."""

    value: float
    low: float
    high: float
    num_prompts: int | None = None
    """Prompts behind it, where that is known."""

    @property
    def verdict(self) -> str:
        """What a gain says: ``better`` or ``worse`` where the interval has 0 on one side only.

        Of fewer than ``FEWEST_PROMPTS`` prompts nothing is said.
        """
        if self.num_prompts is not None and self.num_prompts < FEWEST_PROMPTS:
            return "not distinguishable"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "not distinguishable"


class PairedBootstrap:
    """Sums of named numbers over the prompts, and over prompts drawn with replacement.

    All names are summed over the same draws, so a comparison of two of them stays paired. Give a difference its own
    name, its number per prompt being the difference, rather than subtract two sums: what is 0 at every prompt then is
    exactly 0 in every resampling, and what is above 0 at every prompt is above 0 in all. NaN means that a prompt has no
    such number; it is left out of the sum and of the mean.
    """

    def __init__(self, numbers: Mapping[Hashable, Tensor], samples: int = 2000, seed: int = 0) -> None:
        """Draws.

        Args:
            numbers: name -> a number of each of the N >= 1 prompts, ``[N]``.
            samples: resamplings S.
            seed: seed of the resampling.
        """
        numbers_MN = torch.stack([one.double() for one in numbers.values()])
        missing_MN = numbers_MN.isnan()
        gaps = [name for name, missing_N in zip(numbers, missing_MN, strict=True) if missing_N.any()]
        columns_MN = torch.cat([numbers_MN.nan_to_num(nan=0.0), (~missing_MN[missing_MN.any(1)]).double()])
        names = [*numbers, *((_PRESENT, name) for name in gaps)]
        self._num_prompts = columns_MN.shape[1]
        self._sums = dict(zip(names, columns_MN.sum(1), strict=True))
        self._resampled = dict(zip(names, formulas.bootstrap_sums(columns_MN.T, samples, seed).unbind(1), strict=True))

    def estimate(
        self, statistic: Callable[[Callable[[Hashable], Tensor]], Tensor], num_prompts: int | None = None
    ) -> Estimate:
        """A figure that is a function of sums.

        Args:
            statistic: is given the sum of every name, as a function of the name, and works elementwise. Where it gives
                NaN a resampling is left out.
            num_prompts: prompts behind the figure; None: all.
        """
        value = float(statistic(self._sums.__getitem__))
        low, high = formulas.percentile_interval(statistic(self._resampled.__getitem__))
        return Estimate(value, low, high, self._num_prompts if num_prompts is None else num_prompts)

    def ratio(self, numerator: Hashable, denominator: Hashable) -> Estimate:
        """One sum over another; undefined where that is not above 0."""
        present = self._sums.get((_PRESENT, numerator))
        return self.estimate(
            lambda total: formulas.ratio(total(numerator), total(denominator)),
            None if present is None else int(present),
        )

    def mean(self, name: Hashable) -> Estimate:
        """Mean over the prompts that have such a number."""
        if (_PRESENT, name) in self._sums:
            return self.ratio(name, (_PRESENT, name))
        return self.estimate(lambda total: total(name) / self._num_prompts)
