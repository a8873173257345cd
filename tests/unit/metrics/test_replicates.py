"""Means and intervals over repetitions against tables and hand-worked numbers."""

from __future__ import annotations

import math
import random

import pytest

from blockpilot.metrics.replicates import over_repetitions, student_t


@pytest.mark.parametrize(
    ("degrees", "confidence", "expected"),
    [
        (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (5, 0.95, 2.571), (9, 0.95, 2.262),
        (30, 0.95, 2.042), (120, 0.95, 1.980), (2, 0.9, 2.920), (7, 0.99, 3.499),
    ],
)  # fmt: skip
def test_t_is_that_of_the_printed_tables(degrees: int, confidence: float, expected: float) -> None:
    assert student_t(degrees, confidence) == pytest.approx(expected, abs=5e-4)


def test_three_values_by_hand() -> None:
    one = over_repetitions([1.0, 2.0, 3.0])
    assert (one.mean, one.count) == (2.0, 3)
    half = 4.302653 * 1.0 / math.sqrt(3)  # s = 1
    assert one.interval == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_two_values_by_hand() -> None:
    one = over_repetitions([0.1, 0.3])
    half = 12.706205 * math.sqrt(0.02) / math.sqrt(2)
    assert one.interval == pytest.approx((0.2 - half, 0.2 + half), rel=1e-6)


def test_one_repetition_has_no_interval_and_none_has_no_mean() -> None:
    one, none = over_repetitions([0.5]), over_repetitions([])
    assert (one.mean, one.interval, one.verdict, one.count) == (0.5, None, None, 1)
    assert math.isnan(none.mean)
    assert (none.interval, none.verdict, none.count) == (None, None, 0)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.1, 0.11, 0.12], "better"),
        ([-0.1, -0.11, -0.12], "worse"),
        ([0.0, 0.01, 0.1], "not distinguishable"),
        ([0.1] * 3, "better"),
        ([0.0] * 3, "not distinguishable"),
    ],
)
def test_verdicts(values: list[float], verdict: str) -> None:
    assert over_repetitions(values).verdict == verdict


def test_equal_values_have_no_spread() -> None:
    one = over_repetitions([0.1] * 3)  # 0.1 + 0.1 + 0.1 is not 0.3 in floats
    assert (one.mean, one.interval) == (0.1, (0.1, 0.1))


def test_the_interval_of_three_covers_as_often_as_it_says() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(2000):
        interval = over_repetitions([draw.gauss(5, 2) for _ in range(3)]).interval
        assert interval is not None
        covered += interval[0] < 5 < interval[1]
    assert 0.935 < covered / 2000 < 0.965  # three standard errors
