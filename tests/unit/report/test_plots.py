"""Figures hold the numbers they claim to show, and drawing them leaves matplotlib's global state alone."""

from __future__ import annotations

import io

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blockpilot.metrics import DecodedPrompt, PolicySummary
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists
from blockpilot.report import choice_figure, tau_bar_figure, tau_curve_figure


@pytest.fixture
def table() -> LabelTable:
    """Four prompts, tau [[2, 4, 4], [3, 3, 6], [5, 4, 2]] and one without rounds."""
    rounds = torch.tensor([[6, 3, 3], [2, 2, 1], [4, 5, 10], [0, 0, 0]])
    tokens = torch.tensor([[12, 12, 12], [6, 6, 6], [20, 20, 20], [0, 0, 0]])
    return LabelTable(
        prompt_ids=("a", "b", "c", "d"),
        datasets=("toy",) * 4,
        prompt_keys=torch.arange(4),
        prompts=TokenLists.of([[1]] * 4),
        block_sizes=(15, 16, 17),
        committed_tokens=tokens,
        rounds=rounds,
        distributions=Distributions(torch.arange(5), torch.zeros(4, dtype=torch.int64), torch.ones(4), 8),
    )


def png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    found = next(one for one in axes.lines if one.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())  # type: ignore[arg-type]


def test_tau_curve(table: LabelTable) -> None:
    figure = tau_curve_figure(table, {"pilot": torch.tensor([1, 2, 1, 0])})
    curve, shares = figure.axes
    assert line(curve, "same for all prompts") == ([15, 16, 17], pytest.approx([10 / 3, 11 / 3, 4]))
    assert line(curve, f"pilot: {14 / 3:.3f}")[1] == pytest.approx([14 / 3, 14 / 3])
    heights = [bar.get_height() for bar in shares.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([1 / 3, 0.5 / 3, 1.5 / 3])  # the tie of the first prompt is split
    assert line(shares, "picked by pilot") == ([16, 17], pytest.approx([2 / 3, 1 / 3]))
    assert curve.get_ylabel() and shares.get_xlabel() and shares.get_ylabel()
    assert png(figure).startswith(b"\x89PNG")


def test_tau_curve_needs_no_policy(table: LabelTable) -> None:
    assert png(tau_curve_figure(table)).startswith(b"\x89PNG")


def test_tau_bars_leave_out_plain_decoding(summaries: list[PolicySummary]) -> None:
    axes = tau_bar_figure(summaries).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["oracle", "pilot <b>", "always-4"]
    spans = [list(one.get_xdata()) for one in axes.lines]  # type: ignore[arg-type]
    for summary, (interval, point) in zip(summaries[:0:-1], zip(spans[::2], spans[1::2], strict=True), strict=True):
        assert (interval, point) == ([summary.tau.low, summary.tau.high], [summary.tau.value])


def test_choices_by_policy_and_data_set(decoded: list[DecodedPrompt]) -> None:
    figure = choice_figure(decoded)
    math, code = figure.axes
    assert (math.get_title("left"), code.get_title("left")) == ("math (3 prompts)", "code (3 prompts)")
    assert [label.get_text() for label in code.get_xticklabels()] == ["3", "4"]
    shown = {(text.get_position(), text.get_text()) for text in math.texts}
    assert shown == {((1, 0), "100"), ((0, 1), "67"), ((1, 1), "33"), ((0, 2), "100")}
    assert png(figure).startswith(b"\x89PNG")


def test_global_state_is_untouched(
    table: LabelTable, decoded: list[DecodedPrompt], summaries: list[PolicySummary]
) -> None:
    before = dict(matplotlib.rcParams)
    for figure in (tau_curve_figure(table), tau_bar_figure(summaries), choice_figure(decoded)):
        png(figure)
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []
