"""Charts of block sizes: what each would bring, which are best, which were chosen, and how the two agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockpilot.metrics import best_choice, best_share, bootstrap_interval
from blockpilot.report.charts.chart import Chart
from blockpilot.report.drawing import BLUE, INK, ON_BLUE, SERIES, SMALL, TEXT, dress, legend, new_figure
from blockpilot.report.run_files import Run

BEST = "best (ties split)"


def tau_by_size(run: Run) -> Chart:
    """Mean tau of every candidate with its 95 % band, and what the best size of each prompt would bring."""
    kept_N = (run.labels.rounds > 0).all(1)
    tau_NK, sizes = run.labels.tau[kept_N], run.labels.block_sizes
    figure = new_figure(height=3.6)
    axes = figure.subplots()
    rows: list[tuple[str, ...]] = []
    if len(tau_NK):
        low, high = zip(*(bootstrap_interval(lambda x: x.mean(-1), one_N) for one_N in tau_NK.unbind(1)), strict=True)
        means = tau_NK.mean(0).tolist()
        axes.fill_between(sizes, low, high, color=BLUE, alpha=0.2, linewidth=0, label="95% interval")
        axes.plot(sizes, means, color=BLUE, marker="o", markersize=4, label="same for all prompts")
        rows = [
            (str(size), f"{mean:.3f}", f"[{a:.3f}, {b:.3f}]")
            for size, mean, a, b in zip(sizes, means, low, high, strict=True)
        ]
        lines = {"best size of each prompt": float(tau_NK.amax(1).mean())}
        if run.figures.get("test/tau") is not None:  # the trained policy's choices on all test prompts
            lines[run.about.policy] = run.figures["test/tau"]
        for look, (name, value) in zip(SERIES, lines.items(), strict=False):
            axes.axhline(value, color=look.colour, linestyle=look.line, linewidth=1.3, label=f"{name}: {value:.3f}")
            rows.append((name, f"{value:.3f}", ""))
    dress(axes, x_label="block size (positions verified per round)", y_label="mean tau (tokens per round)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    return Chart(
        "tau-by-size", "tau by block size",
        f"Mean tau if one block size is used for all prompts, from the labels of all {len(kept_N)} test prompts; above "
        "it what choosing per prompt gives.",
        figure, ("block size", "mean tau", "95% interval"), tuple(rows),
    )  # fmt: skip


def best_and_chosen(run: Run) -> Chart:
    """Histogram of the best size of each prompt, beside that of the sizes chosen by the policy in question."""
    best = dict(zip(run.curves.block_sizes, _best_shares(run), strict=True))
    picked = Counter(run.chosen(run.about.policy))
    sizes, total = sorted({*best, *picked}), picked.total()
    figure = new_figure(height=3.0)
    axes = figure.subplots()
    bars = [(best.get(size, 0.0), picked[size] / total) for size in sizes]
    looks = ((BLUE, "", BEST), (SERIES[0].colour, "////", f"chosen by {run.about.policy}"))
    for index, (colour, hatch, label) in enumerate(looks):
        axes.bar(
            [place + 0.4 * index - 0.2 for place in range(len(sizes))], [one[index] for one in bars], width=0.4,
            color=colour, alpha=0.75, hatch=hatch, edgecolor=ON_BLUE if hatch else "none", linewidth=0, label=label,
        )  # fmt: skip
    dress(axes, x_label="block size (positions verified per round)", y_label="share of prompts")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes], **SMALL)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    legend(axes)
    rows = tuple((str(size), f"{a:.1%}", f"{b:.1%}") for size, (a, b) in zip(sizes, bars, strict=True))
    return Chart(
        "best-and-chosen-sizes", "best and chosen block sizes",
        f"Share of prompts for which each size is the best one, and share for which {run.about.policy} chose it first; "
        f"{len(run.curves)} prompts.",
        figure, ("block size", BEST, f"chosen by {run.about.policy}"), rows,
    )  # fmt: skip


def choices(run: Run) -> Chart:
    """Share of prompts for which each policy first chose each size, a panel per data set, the best sizes on top."""
    shares: dict[str, dict[str, dict[int, float]]] = {}
    counts: dict[str, int] = {}
    for dataset in dict.fromkeys(run.curves.datasets):
        inside = torch.tensor([name == dataset for name in run.curves.datasets])
        counts[dataset] = int(inside.sum())
        panel = {BEST: dict(zip(run.curves.block_sizes, _best_shares(run, inside), strict=True))}
        for policy in run.choosing:
            own = Counter(size for size, kept in zip(run.chosen(policy), inside.tolist(), strict=True) if kept)
            panel[policy] = {size: count / own.total() for size, count in own.items()}
        shares[dataset] = panel
    sizes = sorted({size for panel in shares.values() for own in panel.values() for size in own})
    heights = [len(panel) for panel in shares.values()]
    figure = new_figure(height=0.7 + sum(0.4 + 0.32 * height for height in heights))
    panels = figure.subplots(len(shares), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (dataset, panel) in zip(panels, shares.items(), strict=True):
        _share_grid(axes, panel, sizes)
        axes.set_title(f"{dataset} ({counts[dataset]} prompts)", loc="left", parse_math=False, **TEXT)
    panels[-1].set_xlabel("first block size chosen; share of prompts in %", **TEXT)
    rows = tuple(
        (f"{dataset}: {name}", *(f"{own.get(size, 0):.0%}" for size in sizes))
        for dataset, panel in shares.items()
        for name, own in panel.items()
    )
    return Chart(
        "choices", "block sizes chosen by each policy",
        "Share of prompts, in per cent, for which each policy first chose each block size, beside the best sizes.",
        figure, ("data set: policy", *map(str, sizes)), rows,
    )  # fmt: skip


def confusion(run: Run) -> Chart:
    """Prompts by their best size and the size chosen by the policy in question."""
    best_N = best_choice(run.curves.tau)
    pairs = Counter(
        (run.curves.block_sizes[column], size)
        for column, size, kept in zip(
            best_N.tolist(), run.chosen(run.about.policy), run.has_rounds.tolist(), strict=True
        )
        if kept
    )
    candidates = run.curves.block_sizes
    columns = sorted({*candidates, *(size for _, size in pairs)})
    figure = new_figure(height=1.0 + 0.42 * len(candidates))
    axes = figure.subplots()
    most = max(pairs.values(), default=1)
    for row, best in enumerate(candidates):
        for column, size in enumerate(columns):
            _cell(axes, column, row, pairs[best, size] / most, str(pairs[best, size]) if pairs[best, size] else "")
            if size == best:
                axes.add_patch(
                    Rectangle((column - 0.46, row - 0.42), 0.92, 0.84, fill=False, edgecolor=INK, linewidth=1)
                )
    _grid_axes(axes, [str(size) for size in columns], [str(size) for size in candidates])
    axes.set_xlabel(f"size chosen by {run.about.policy}", **TEXT)
    axes.set_ylabel("best size", **TEXT)
    rows = tuple((str(best), *(str(pairs[best, size]) for size in columns)) for best in candidates)
    return Chart(
        "confusion", "best size against chosen size",
        f"Prompts by their best size (a row; the smallest where several are best) and the size {run.about.policy} "
        "chose (a column); outlined cells are right. Where sizes tie, a choice outside the outline can be as good.",
        figure, ("best \\ chosen", *map(str, columns)), rows,
    )  # fmt: skip


def _best_shares(run: Run, inside_N: torch.Tensor | None = None) -> list[float]:
    """Share of the prompts with rounds (of those marked) for which each candidate is the best, ties split evenly."""
    kept_N = run.has_rounds if inside_N is None else run.has_rounds & inside_N
    return best_share(run.curves.tau[kept_N]).nan_to_num().tolist()


def _share_grid(axes: Axes, rows: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> None:
    """A table whose cells are filled in proportion to the share and carry it in per cent."""
    for row, own in enumerate(rows.values()):
        for column, size in enumerate(sizes):
            share = own.get(size, 0.0)
            _cell(axes, column, row, share, f"{100 * share:.0f}" if share else "")
    _grid_axes(axes, [str(size) for size in sizes], list(rows))


def _cell(axes: Axes, column: int, row: int, share: float, text: str) -> None:
    corner = (column - 0.46, row - 0.42)
    axes.add_patch(Rectangle(corner, 0.92, 0.84, facecolor=BLUE, alpha=0.06 + 0.84 * share, linewidth=0))
    if text:
        colour = ON_BLUE if share > 0.8 else INK
        axes.text(column, row, text, color=colour, fontsize=9, ha="center", va="center_baseline")


def _grid_axes(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    dress(axes, grid=None)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(len(columns)), columns, **SMALL)
    axes.set_yticks(range(len(rows)), rows, **TEXT)
