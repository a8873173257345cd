"""A figure over repetitions of the same run: its mean, and how far another set of repetitions might put it.

Knows numbers only. The interval is over the repetitions, such as seeds, and says nothing of other prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicated:
    """A mean over repetitions with its 95 % interval."""

    mean: float
    """NaN if there is no repetition."""
    low: float | None
    """None where there are fewer than two repetitions, as for ``high``: one says nothing of the next."""
    high: float | None
    count: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends, if there are any."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def verdict(self) -> str | None:
        """What a gain says: ``better`` or ``worse`` where the interval has 0 on one side only; None without one."""
        if self.interval is None:
            return None
        low, high = self.interval
        return "better" if low > 0 else "worse" if high < 0 else "not distinguishable"


def over_repetitions(values: Sequence[float]) -> Replicated:
    """Mean and Student's t interval, ``mean +- t(n - 1) * s / sqrt(n)``, of independent repetitions.

    It is exact for normal values, and wide for few: t is 4.30 for three repetitions. A bootstrap of three values would
    cover far less than it claims.

    Args:
        values: one per repetition, without NaN.
    """
    count = len(values)
    if count == 0:
        return Replicated(math.nan, None, None, 0)
    mean = float(statistics.mean(values))  # exact: equal values have their own value as mean, and no spread
    if count == 1:
        return Replicated(mean, None, None, 1)
    half = student_t(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Replicated(mean, mean - half, mean + half, count)


def student_t(degrees: int, confidence: float = 0.95) -> float:
    """The t that ``|T|`` stays below with probability ``confidence``, by bisection.

    Args:
        degrees: degrees of freedom, at least 1.
        confidence: in (0, 1).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass_within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _mass_within(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle)): Abramowitz and Stegun, 26.7.3 (odd degrees) and 26.7.4 (even)."""
    power = degrees % 2
    term, total = math.cos(angle) ** power, 0.0
    while power <= degrees - 2:
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
        power += 2
    if degrees % 2:
        return (angle + math.sin(angle) * total) * 2 / math.pi
    return math.sin(angle) * total
