"""The chart of a training: losses and validation figures by epoch."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockpilot.report.charts.chart import Chart
from blockpilot.report.drawing import LOOKS, TEXT, dress, legend, new_figure
from blockpilot.report.run_files import Run
from blockpilot.report.table import NO_VALUE

_LOSSES = ("train/loss", "val/loss")
_SHARES = ("val/regret", "val/regret_speed", "val/accuracy")


def training_curves(run: Run) -> Chart | None:
    """Two panels over one epoch axis; None where nothing was trained."""
    if not run.history:
        return None
    known = {name for row in run.history for name, value in row.items() if value is not None}
    groups = [[name for name in names if name in known] for names in (_LOSSES, _SHARES)]
    groups = [names for names in groups if names]
    if not groups:
        return None
    figure = new_figure(height=0.5 + 2.2 * len(groups))
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for axes, names in zip(panels, groups, strict=True):
        for look, name in zip(LOOKS, names, strict=False):
            points = [(row["epoch"], row[name]) for row in run.history if row.get(name) is not None]
            axes.plot(
                *zip(*points, strict=True), color=look.colour, linestyle=look.line, marker=look.marker, markersize=3.5,
                label=name,
            )  # fmt: skip
        dress(axes, y_label="loss" if names[0] in _LOSSES else "share")
        if names[0] in _SHARES:
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes)
    panels[-1].set_xlabel("epoch", **TEXT)
    names = [name for group in groups for name in group]
    rows = tuple(
        (str(row["epoch"]), *(NO_VALUE if row.get(name) is None else f"{row[name]:.4f}" for name in names))
        for row in run.history
    )
    return Chart(
        "training", "training",
        f"Losses and validation figures over {len(run.history)} epochs. The policy is the epoch of lowest validation "
        "regret.",
        figure, ("epoch", *names), rows,
    )  # fmt: skip
