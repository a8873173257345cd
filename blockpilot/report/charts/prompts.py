"""A chart of single prompts: the tau curve of each, its best size and the chosen one."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator

from blockpilot.metrics import best_choice
from blockpilot.report.charts.chart import Chart
from blockpilot.report.drawing import BLUE, INK, SERIES, dress, new_figure
from blockpilot.report.run_files import Run

MOST = 12
_COLUMNS = 3


def prompt_curves(run: Run) -> Chart:
    """Up to :data:`MOST` prompts, evenly spread from the smallest loss of the policy in question to the largest."""
    loss_N = run.loss(run.about.policy)
    order = [i for i in loss_N.argsort(stable=True).tolist() if run.has_rounds[i]]
    shown = [order[i * (len(order) - 1) // max(min(MOST, len(order)) - 1, 1)] for i in range(min(MOST, len(order)))]
    tau_NK, best_N = run.curves.tau, best_choice(run.curves.tau)
    chosen, own_N, sizes = run.chosen(run.about.policy), run.tau(run.about.policy), run.curves.block_sizes
    lines = max(-(-len(shown) // _COLUMNS), 1)
    figure = new_figure(height=0.5 + 1.25 * lines)
    panels = figure.subplots(lines, _COLUMNS, sharex=True, squeeze=False).ravel()
    rows = []
    for axes, index in zip(panels, shown, strict=False):
        axes.plot(sizes, tau_NK[index].tolist(), color=BLUE, marker="o", markersize=2.5, linewidth=1.2)
        best = sizes[int(best_N[index])]
        axes.plot(best, float(tau_NK[index].max()), marker="*", markersize=9, color=SERIES[1].colour, linestyle="")
        axes.plot(
            chosen[index], float(own_N[index]), marker="D", markersize=7, color=SERIES[0].colour, linestyle="",
            fillstyle="none", markeredgewidth=1.5,
        )  # fmt: skip
        dress(axes)
        axes.tick_params(labelsize=7)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.margins(0.12, 0.2)
        name = run.curves.prompt_ids[index]
        short = name if len(name) <= 18 else f"{name[:17]}…"
        axes.set_title(short, loc="left", parse_math=False, color=INK, fontsize=7.5)
        rows.append((name, str(best), str(chosen[index]), *(f"{tau:.3f}" for tau in tau_NK[index].tolist())))
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    return Chart(
        "prompt-curves", "tau curves of single prompts",
        f"tau by block size of {len(shown)} prompts, from the smallest regret of {run.about.policy} to the largest. A "
        "star is the best size, a diamond the chosen one.",
        figure, ("prompt", "best", "chosen", *(f"tau at {size}" for size in sizes)), tuple(rows),
    )  # fmt: skip
