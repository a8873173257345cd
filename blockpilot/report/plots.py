"""Figures of what is not a run: labels, latency profiles, multiruns.

Know sweeps, profiles and ablations; how a figure looks and becomes a file is in ``drawing.py``.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockpilot.decoding import LatencyProfile
from blockpilot.metrics import SweepSummary
from blockpilot.report.ablation import Ablation, Setting, always_of, is_share, short_name
from blockpilot.report.drawing import BLUE, INK, LOOKS, SERIES, SMALL, TEXT, dress, legend, new_figure
from blockpilot.report.latency import reference_size, relative_costs


def locality_figure(summary: SweepSummary) -> Figure:
    """Which block sizes are the best ones, around B: share of prompts by best size, under the mean tau of every size.

    Args:
        summary: figures of a sweep; the sizes need not be neighbours and need not hold B.
    """
    figure = new_figure(height=5.4)
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
    dress(curve, y_label="mean tau (tokens per round)")
    dress(shares, x_label="block size (positions verified per round)", y_label="share of prompts")
    shares.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    shares.set_ylim(bottom=0)
    shares.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curve, shares):
        legend(axes)
    return figure


def latency_figure(profile: LatencyProfile, trained: int) -> Figure:
    """Milliseconds of a round by block size with the middle half of the repeats, and what that costs relative to B.

    Args:
        profile: measured seconds.
        trained: B.
    """
    figure = new_figure(height=5.4)
    seconds, costs = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for row, context in enumerate(profile.contexts):
        colour, line, marker = LOOKS[row % len(LOOKS)]
        low, middle, high = (
            [1000 * second for second in table[row]]
            for table in (profile.round_seconds_low, profile.round_seconds, profile.round_seconds_high)
        )
        look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
        seconds.fill_between(profile.block_sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        seconds.plot(profile.block_sizes, middle, label=f"{context} tokens before", **look)
        costs.plot(profile.block_sizes, relative_costs(profile, row, trained), **look)
    costs.axhline(1, color=INK, linewidth=0.7)
    dress(seconds, y_label="ms per round (middle half)")
    reference = reference_size(profile, trained)
    dress(costs, x_label="block size (positions verified per round)", y_label=f"cost relative to b = {reference}")
    seconds.set_ylim(bottom=0)
    costs.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(seconds)
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
        figure = new_figure(height=1.3 + 0.36 * len(shown))
        axes = figure.subplots()
        places = [float(len(shown) - 1 - row) for row in range(len(shown))]
        _draw_settings(axes, shown, places, name, upright=False)
        axes.set_ylim(-0.6, len(shown) - 0.4)
        keys = " / ".join(short_name(key) for key in ablation.keys)
        dress(axes, x_label=label, y_label=keys, grid="x")
        axes.set_yticks(places, [" / ".join(one.values.values()) or one.label for one in shown], **TEXT)
        shared = axes.xaxis
    else:
        figure = new_figure(height=3.6)
        axes = figure.subplots()
        places = [place for place, one in zip(numbers, ablation.settings, strict=True) if one in shown]
        if min(places) > 0 and max(places) >= 8 * min(places):
            axes.set_xscale("log")
        _draw_settings(axes, shown, places, name, upright=True)
        dress(axes, x_label=short_name(ablation.keys[0]), y_label=label)
        axes.set_xticks(places, [one.label for one in shown], **SMALL)
        axes.set_xticks([], minor=True)
        shared = axes.yaxis
    if is_share(name):
        shared.set_major_formatter(axis)
    legend(axes)
    return figure


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
