"""A latency profile as people see it says what was measured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from blockpilot.decoding import LatencyProfile
from blockpilot.report import latency_figure, latency_table, save_png


@pytest.fixture
def profile() -> LatencyProfile:
    low, middle, high = (
        tuple(tuple(scale * ms / 1000 for ms in row) for row in ((2, 4, 5), (3, 8, 12))) for scale in (0.5, 1, 1.5)
    )
    draft, ones = ((0.0, 0.0011, 0.0012),) * 2, ((1.0, 2.5, 3.0),) * 2
    pair = {"target": "t", "drafter": "d", "dtype": "float32"}
    return LatencyProfile(
        "GPU [X]", "toy", pair, 1, "2", 1, 9, (1, 4, 8), (64, 256), draft, middle, middle, low, high, ones
    )


def rendered(profile: LatencyProfile, trained: int) -> list[list[str]]:
    console = Console(width=120, file=io.StringIO())
    console.print(latency_table(profile, trained))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "toy on GPU [X]: ms, medians of 9" in text
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_table_has_a_row_per_context_and_size(profile: LatencyProfile) -> None:
    rows = rendered(profile, trained=4)
    assert [row[:2] for row in rows] == [["64", "1"], ["", "4 (B)"], ["", "8"], ["256", "1"], ["", "4 (B)"], ["", "8"]]
    assert rows[0][2:7] == ["-", "2.00", "2.00 [1.00, 3.00]", "1.0", "0.50"]
    assert rows[5][2:7] == ["1.20", "12.00", "12.00 [6.00, 18.00]", "3.0", "1.50"]


def test_bars_are_as_long_as_rounds_take(profile: LatencyProfile) -> None:
    bars = [len(row[7]) for row in rendered(profile, trained=4)]
    assert bars == [4, 8, 10, 6, 16, 24]  # 12 ms is 24 columns


def test_cost_is_relative_to_the_largest_size_where_b_was_not_measured(profile: LatencyProfile) -> None:
    assert [row[6] for row in rendered(profile, trained=16)] == ["0.40", "0.80", "1.00", "0.25", "0.67", "1.00"]


def test_figure(profile: LatencyProfile, tmp_path: Path) -> None:
    figure = latency_figure(profile, trained=4)
    seconds, costs = figure.axes
    assert [list(line.get_ydata()) for line in seconds.lines] == [  # type: ignore[arg-type]
        pytest.approx([2, 4, 5]),
        pytest.approx([3, 8, 12]),
    ]
    assert list(costs.lines[1].get_ydata()) == pytest.approx([3 / 8, 1, 1.5])  # type: ignore[arg-type]
    assert "b = 4" in costs.get_ylabel() and "ms" in seconds.get_ylabel()
    save_png(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
