"""Figures: tau by block size, tau by policy, block sizes chosen, seconds of a round by block size, ablations.

Know labels, decodes, summaries, latency profiles and ablations; of files only how a figure becomes one. Built with
matplotlib's objects alone, so that no backend, current figure or rcParams is touched. Backgrounds are clear, text is
drawn in ``INK``, rules in ``RULE`` and data first in ``BLUE``: a page that embeds a figure may replace these colours to
suit its own theme.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from blockpilot.decoding import LatencyProfile
from blockpilot.metrics import DecodedPrompt, PolicySummary, SweepSummary, best_share, bootstrap_interval
from blockpilot.oracle.table import LabelTable
from blockpilot.report.ablation import Ablation, Setting, always_of, is_share, short_name
from blockpilot.report.latency import reference_size, relative_costs
from blockpilot.report.table import plain

INK = "#24292f"
RULE = "#d0d7de"
BLUE = "#0072b2"
SERIES = (("#d55e00", "--", "D"), ("#009e73", "-.", "o"), ("#b35c94", ":", "s"), ("#8a6d00", (0, (5, 1)), "^"))
"""(colour, line, marker) of the policies in turn: told apart by shape as well as by colour."""

_WIDTH = 4.8
"""Inches; narrow, so that text stays readable when a phone scales the figure down."""
_TEXT = {"color": INK, "fontsize": 10}
_SMALL = {"color": INK, "fontsize": 9}


def tau_curve_figure(table: LabelTable, chosen: Mapping[str, Tensor] | None = None) -> Figure:
    """Mean tau of every candidate with its 95 % band, and how often each is a prompt's best.

    Args:
        table: labels of N prompts.
        chosen: for each policy to mark, the column of ``table`` it picks for each prompt, int64 ``[N]``: its mean tau
            is drawn as a line over the curve, its picks as markers over the bars.
    """
    figure = _figure(height=5.4)
    curve, shares = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    kept_N = (table.rounds > 0).all(1)
    tau_NK = table.tau[kept_N]
    low, high = zip(*(bootstrap_interval(_mean, column_N) for column_N in tau_NK.unbind(1)), strict=True)
    curve.fill_between(table.block_sizes, low, high, color=BLUE, alpha=0.2, linewidth=0, label="95% interval")
    means = tau_NK.mean(0).tolist()
    curve.plot(table.block_sizes, means, color=BLUE, marker="o", markersize=4, label="same for all prompts")

    share_K = best_share(tau_NK).tolist()
    shares.bar(table.block_sizes, share_K, width=0.7, color=BLUE, alpha=0.6, label="best (ties split evenly)")

    for index, (policy, choice_N) in enumerate((chosen or {}).items()):
        colour, line, marker = SERIES[index % len(SERIES)]
        choice_N = choice_N[kept_N]
        mean = float(tau_NK.gather(1, choice_N[:, None]).mean())
        curve.axhline(mean, color=colour, linestyle=line, label=f"{policy}: {mean:.3f}")
        picked_K = torch.bincount(choice_N, minlength=len(table.block_sizes)).double() / len(choice_N)
        picked = {size: share for size, share in zip(table.block_sizes, picked_K.tolist(), strict=True) if share}
        shares.plot(*zip(*picked.items(), strict=True), marker, color=colour, label=f"picked by {policy}")
    _dress(curve, y_label="mean tau (tokens per round)")
    _dress(shares, x_label="block size (positions verified per round)", y_label="share of prompts")
    shares.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    shares.set_ylim(bottom=0)
    shares.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curve, shares):
        _legend(axes)
    return figure


def locality_figure(summary: SweepSummary) -> Figure:
    """Which block sizes are the best ones, around B: share of prompts by best size, under the mean tau of every size.

    Args:
        summary: figures of a sweep; the sizes need not be neighbours and need not hold B.
    """
    figure = _figure(height=5.4)
    curve, shares = figure.subplots(2, 1, sharex=True)
    sizes, everything = summary.block_sizes, summary.oracles[-1]
    tau = [one.tau for one in summary.fixed]
    curve.fill_between(
        sizes, [one.low for one in tau], [one.high for one in tau], color=BLUE, alpha=0.2, linewidth=0,
        label="95% interval",
    )  # fmt: skip
    curve.plot(sizes, [one.value for one in tau], color=BLUE, marker="o", markersize=4, label="same for all prompts")
    label = f"best size of {summary.num_prompts} prompts ({everything.tied_prompts} tied: split evenly)"
    shares.bar(sizes, everything.best_share, width=0.7, color=BLUE, alpha=0.6, label=label)
    colour, line, _ = SERIES[0]
    for axes, name in ((curve, f"B = {summary.trained}"), (shares, None)):
        axes.axvline(summary.trained, color=colour, linestyle=line, linewidth=1.2, label=name)
    _dress(curve, y_label="mean tau (tokens per round)")
    _dress(shares, x_label="block size (positions verified per round)", y_label="share of prompts")
    shares.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    shares.set_ylim(bottom=0)
    shares.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curve, shares):
        _legend(axes)
    return figure


def tau_bar_figure(summaries: Sequence[PolicySummary]) -> Figure:
    """Tau of every policy with its 95 % interval. Plain autoregressive decoding (tau 1 by definition) is left out."""
    shown = [one for one in summaries if not plain(one)][::-1]
    figure = _figure(height=1.0 + 0.36 * len(shown))
    axes = figure.subplots()
    for place, one in enumerate(shown):
        tau = one.tau
        axes.plot((tau.low, tau.high), (place, place), color=BLUE, linewidth=6, alpha=0.3, solid_capstyle="butt")
        axes.plot(tau.value, place, color=BLUE, marker="o", markersize=6)
        axes.annotate(
            f"{tau.value:.3f}", (tau.value, place), xytext=(0, 6), textcoords="offset points", ha="center", **_SMALL
        )
    axes.set_ylim(-0.6, len(shown) - 0.2)
    _dress(axes, x_label="tau with 95% interval (tokens per round)", grid="x")
    axes.set_yticks(range(len(shown)), [one.policy for one in shown], **_TEXT)
    return figure


def choice_figure(decoded: Sequence[DecodedPrompt]) -> Figure:
    """Share of prompts for which each policy first chose each block size, one panel per data set.

    Plain autoregressive decoding, which never chooses, is left out.
    """
    counts: dict[str, dict[str, Counter[int]]] = {}
    for one in decoded:
        counts.setdefault(one.dataset, {}).setdefault(one.policy, Counter())[one.first_block_size] += 1
    counts = {
        dataset: {policy: count for policy, count in policies.items() if set(count) != {1}}
        for dataset, policies in counts.items()
    }
    sizes = sorted({size for policies in counts.values() for count in policies.values() for size in count})
    heights = [len(policies) for policies in counts.values()]
    figure = _figure(height=0.7 + sum(0.4 + 0.32 * height for height in heights))
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (dataset, policies) in zip(panels, counts.items(), strict=True):
        _share_grid(axes, policies, sizes)
        num_prompts = max(count.total() for count in policies.values())
        axes.set_title(f"{dataset} ({num_prompts} prompts)", loc="left", **_TEXT)
    panels[-1].set_xlabel("first block size chosen; share of prompts in %", **_TEXT)
    return figure


def latency_figure(profile: LatencyProfile, trained: int) -> Figure:
    """Milliseconds of a round by block size with the middle half of the repeats, and what that costs relative to B.

    Args:
        profile: measured seconds.
        trained: B.
    """
    figure = _figure(height=5.4)
    seconds, costs = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    looks = ((BLUE, "-", "o"), *SERIES)
    for row, context in enumerate(profile.contexts):
        colour, line, marker = looks[row % len(looks)]
        low, middle, high = (
            [1000 * second for second in table[row]]
            for table in (profile.round_seconds_low, profile.round_seconds, profile.round_seconds_high)
        )
        look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
        seconds.fill_between(profile.block_sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        seconds.plot(profile.block_sizes, middle, label=f"{context} tokens before", **look)
        costs.plot(profile.block_sizes, relative_costs(profile, row, trained), **look)
    costs.axhline(1, color=INK, linewidth=0.7)
    _dress(seconds, y_label="ms per round (middle half)")
    reference = reference_size(profile, trained)
    _dress(costs, x_label="block size (positions verified per round)", y_label=f"cost relative to b = {reference}")
    seconds.set_ylim(bottom=0)
    costs.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(seconds)
    return figure


def ablation_figure(ablation: Ablation, name: str) -> Figure:
    """One figure of every setting: mean and 95 % interval over seeds, each seed as a dot, always-B beside it.

    A single numeric key is an axis, logarithmic where its values span a factor of 8 or more; anything else is a row
    per setting.

    Args:
        ablation: what was swept.
        name: the figure to draw, such as ``test/regret``; settings without it are left out.
    """
    shown = [one for one in ablation.settings if name in one.figures and one.figures[name].count]
    numbers = ablation.numbers(ablation.keys[0]) if len(ablation.keys) == 1 else None
    label, axis = f"{name} (95% interval over seeds)", PercentFormatter(xmax=1)
    if numbers is None:
        figure = _figure(height=1.3 + 0.36 * len(shown))
        axes = figure.subplots()
        places = [float(len(shown) - 1 - row) for row in range(len(shown))]
        _draw_settings(axes, shown, places, name, upright=False)
        axes.set_ylim(-0.6, len(shown) - 0.4)
        keys = " / ".join(short_name(key) for key in ablation.keys)
        _dress(axes, x_label=label, y_label=keys, grid="x")
        axes.set_yticks(places, [" / ".join(one.values.values()) or one.label for one in shown], **_TEXT)
        shared = axes.xaxis
    else:
        figure = _figure(height=3.6)
        axes = figure.subplots()
        places = [place for place, one in zip(numbers, ablation.settings, strict=True) if one in shown]
        if min(places) > 0 and max(places) >= 8 * min(places):
            axes.set_xscale("log")
        _draw_settings(axes, shown, places, name, upright=True)
        _dress(axes, x_label=short_name(ablation.keys[0]), y_label=label)
        axes.set_xticks(places, [one.label for one in shown], **_SMALL)
        axes.set_xticks([], minor=True)
        shared = axes.yaxis
    if is_share(name):
        shared.set_major_formatter(axis)
    _legend(axes)
    return figure


def save_png(figure: Figure, path: str | Path) -> None:
    """Writes a figure on white, replacing a file that is there."""
    figure.savefig(path, format="png", dpi=160, facecolor="white")


def _draw_settings(axes: Axes, shown: Sequence[Setting], places: Sequence[float], name: str, *, upright: bool) -> None:
    """Settings at their places, their figures along the other axis (``upright``: the vertical one)."""

    def at(place: Sequence[float], value: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
        return (place, value) if upright else (value, place)

    colour, line, _ = SERIES[0]
    for place, one in zip(places, shown, strict=True):
        values = [value for value in one.by_job[name] if value is not None]
        axes.plot(*at([place] * len(values), values), linestyle="", marker=".", markersize=5, color=INK, alpha=0.5,
                  label="each seed" if one is shown[0] else None)  # fmt: skip
        if (interval := one.figures[name].interval) is not None:
            axes.plot(*at((place, place), interval), color=BLUE, linewidth=6, alpha=0.3, solid_capstyle="butt")
    look = {"color": BLUE, "marker": "o", "markersize": 6, "linewidth": 1.2, "linestyle": "-" if upright else ""}
    axes.plot(*at(places, [one.figures[name].mean for one in shown]), label="mean over seeds", **look)
    always = {place: always_of(name, one) for place, one in zip(places, shown, strict=True)}
    known = {place: value for place, value in always.items() if value is not None}
    if known and len(set(known.values())) == 1:
        mark = axes.axhline if upright else axes.axvline
        mark(next(iter(known.values())), color=colour, linestyle=line, linewidth=1.2, label="always-B")
    elif known:
        axes.plot(*at(list(known), list(known.values())), color=colour, linestyle=line, linewidth=1.2, label="always-B")


def _share_grid(axes: Axes, policies: Mapping[str, Counter[int]], sizes: Sequence[int]) -> None:
    """A table whose cells are filled in proportion to the share and carry it in per cent."""
    for row, count in enumerate(policies.values()):
        for column, size in enumerate(sizes):
            share = count[size] / count.total()
            corner = (column - 0.46, row - 0.42)
            axes.add_patch(Rectangle(corner, 0.92, 0.84, facecolor=BLUE, alpha=0.06 + 0.84 * share, linewidth=0))
            colour = "#ffffff" if share > 0.8 else INK
            if count[size]:
                axes.text(
                    column, row, f"{100 * share:.0f}", color=colour, fontsize=9, ha="center", va="center_baseline"
                )
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(policies) - 0.5, -0.5))
    _dress(axes, grid=None)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes], **_SMALL)
    axes.set_yticks(range(len(policies)), list(policies), **_TEXT)


def _mean(values: Tensor) -> Tensor:
    return values.mean(-1)


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")


def _dress(axes: Axes, *, x_label: str = "", y_label: str = "", grid: Literal["x", "y"] | None = "y") -> None:
    """Labels, ticks, rules and spines in the common style."""
    axes.set_facecolor("none")
    axes.set_xlabel(x_label, **_TEXT)
    axes.set_ylabel(y_label, **_TEXT)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=RULE, linewidth=0.7)


def _legend(axes: Axes) -> None:
    """A frameless legend above the axes, in two columns."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, labelcolor=INK, fontsize=9, borderaxespad=0.2
    )
