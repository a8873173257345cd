"""The charts of a run, a module per subject: each is a figure with its words and its numbers. Know no markup."""

from __future__ import annotations

from blockpilot.report.charts.chart import Chart
from blockpilot.report.charts.policies import acceptance_lengths, regret_distribution, tau_by_policy
from blockpilot.report.charts.prompts import prompt_curves
from blockpilot.report.charts.sizes import best_and_chosen, choices, confusion, tau_by_size
from blockpilot.report.charts.training import training_curves
from blockpilot.report.run_files import Run

__all__ = ["Chart", "run_charts"]

_CHARTS = (
    tau_by_policy, tau_by_size, best_and_chosen, choices, regret_distribution, confusion, prompt_curves,
    acceptance_lengths, training_curves,
)  # fmt: skip
"""In reading order."""


def run_charts(run: Run) -> list[Chart]:
    """All that there is to draw of a run."""
    return [chart for draw in _CHARTS if (chart := draw(run)) is not None]
