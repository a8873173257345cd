"""Charts hold the numbers they claim to show, beside them as a table, and leave matplotlib's global state alone."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes

from blockpilot.report import Chart, Run, read_run, run_charts


@pytest.fixture
def run(run_folder: Path) -> Run:
    return read_run(run_folder)


@pytest.fixture
def charts(run: Run) -> dict[str, Chart]:
    return {chart.name: chart for chart in run_charts(run)}


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    found = next(one for one in axes.lines if str(one.get_label()).startswith(label))
    return list(found.get_xdata()), list(found.get_ydata())  # type: ignore[arg-type]


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]


def test_every_row_has_a_cell_for_every_heading(charts: dict[str, Chart]) -> None:
    for chart in charts.values():
        assert chart.rows and {len(row) for row in chart.rows} == {len(chart.headings)}


def test_tau_bars_leave_out_plain_decoding(charts: dict[str, Chart], run: Run) -> None:
    chart = charts["tau-by-policy"]
    axes = chart.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["oracle", "pilot <b>", "always-4"]
    spans = [list(one.get_xdata()) for one in axes.lines]  # type: ignore[arg-type]
    for row, interval, point in zip(run.rows[:0:-1], spans[::2], spans[1::2], strict=True):
        assert (interval, point) == ([row["tau_low"], row["tau_high"]], [row["tau"]])
    assert chart.rows[1][:2] == ("pilot <b>", f"{run.rows[2]['tau']:.3f}")


def test_tau_by_size_is_over_all_labels(charts: dict[str, Chart]) -> None:
    chart = charts["tau-by-size"]
    three, four = (3 * 4 + 24 / 9 * 2) / 6, (3 * 3 + 24 / 9 * 3) / 6  # six prompts with rounds
    assert line(chart.figure.axes[0], "same for all prompts") == ([3, 4], pytest.approx([three, four]))
    assert line(chart.figure.axes[0], "best size of each prompt")[1] == pytest.approx([3, 3])
    assert line(chart.figure.axes[0], "pilot <b>: 2.900")[1] == pytest.approx([2.9, 2.9])  # test/tau
    assert [row[:2] for row in chart.rows] == [
        ("3", f"{three:.3f}"), ("4", f"{four:.3f}"), ("best size of each prompt", "3.000"), ("pilot <b>", "2.900"),
    ]  # fmt: skip


def test_best_and_chosen_sizes(charts: dict[str, Chart]) -> None:
    chart = charts["best-and-chosen-sizes"]
    # best: of five prompts with rounds; chosen: of all six
    assert heights(chart.figure.axes[0]) == pytest.approx([3 / 5, 2 / 5, 2 / 6, 4 / 6])
    assert chart.rows == (("3", "60.0%", "33.3%"), ("4", "40.0%", "66.7%"))


def test_choices_by_policy_and_data_set(charts: dict[str, Chart]) -> None:
    math, code = charts["choices"].figure.axes
    assert (math.get_title("left"), code.get_title("left")) == ("math (3 prompts)", "code (3 prompts)")
    assert [label.get_text() for label in code.get_xticklabels()] == ["3", "4"]
    shown = {(text.get_position(), text.get_text()) for text in math.texts}
    assert shown == {((0, 0), "100"), ((1, 1), "100"), ((0, 2), "67"), ((1, 2), "33"), ((0, 3), "100")}
    assert ("math: pilot <b>", "67%", "33%") in charts["choices"].rows


def test_regret_prompt_by_prompt_has_the_mean_of_the_table(charts: dict[str, Chart], run: Run) -> None:
    for policy, row in zip(run.choosing, run.rows[1:], strict=True):
        assert run.loss(policy).nanmean().item() == pytest.approx(row["regret"], abs=1e-12)
        assert run.tau(policy).nanmean().item() == pytest.approx(row["tau"], abs=1e-12)
    losses, shares = line(charts["regret"].figure.axes[0], "pilot <b>")
    assert losses == pytest.approx([0, 0, 0, 0, 1 / 9], abs=1e-12) and shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert charts["regret"].rows[1] == ("pilot <b>", "2.22%", "80%", "0.00%", "0.00%", "0.00%", "6.67%", "11.11%")


def test_confusion_counts_prompts_with_rounds(charts: dict[str, Chart]) -> None:
    assert charts["confusion"].headings[1:] == ("3", "4")
    assert charts["confusion"].rows == (("3", "2", "1"), ("4", "0", "2"))


def test_acceptance_lengths_count_rounds(charts: dict[str, Chart]) -> None:
    # a best size takes 8 rounds of 3 tokens, another 9 rounds: 6 of 3 and 3 of 2
    assert charts["acceptance-lengths"].rows == (("1", "0", "0"), ("2", "3", "9"), ("3", "38", "34"))
    bars = heights(charts["acceptance-lengths"].figure.axes[0])
    assert bars == pytest.approx([0, 3 / 41, 38 / 41, 0, 9 / 43, 34 / 43])


def test_single_prompts_from_the_smallest_regret_to_the_largest(charts: dict[str, Chart]) -> None:
    chart = charts["prompt-curves"]
    assert [row[:3] for row in chart.rows] == [
        ("p0", "3", "3"), ("p1", "4", "4"), ("p3", "4", "4"), ("p4", "3", "3"), ("p2", "3", "4"),
    ]  # fmt: skip
    curve, best, chosen = chart.figure.axes[4].lines
    assert list(curve.get_ydata()) == pytest.approx([3, 24 / 9])  # type: ignore[arg-type]
    marks = [float(value) for mark in (best, chosen) for value in (*mark.get_xdata(), *mark.get_ydata())]  # type: ignore[misc]
    assert marks == pytest.approx([3, 3, 4, 24 / 9])


def test_training_by_epoch(charts: dict[str, Chart]) -> None:
    loss, shares = charts["training"].figure.axes
    assert line(loss, "train/loss") == ([0, 1], [2, 1]) and line(shares, "val/regret") == ([0, 1], [0.1, 0.05])
    assert charts["training"].rows == (("0", "2.0000", "0.1000"), ("1", "1.0000", "0.0500"))


def test_global_state_is_untouched(run: Run) -> None:
    before = dict(matplotlib.rcParams)
    for chart in run_charts(run):
        chart.figure.savefig(io.BytesIO(), format="png")
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []
