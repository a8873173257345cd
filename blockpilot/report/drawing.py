"""The common look of all figures, and how one becomes a PNG file or a part of a page.

Knows matplotlib; nothing of what is drawn. Built with matplotlib's objects alone, so that no backend, current figure or
rcParams is touched. Backgrounds are clear, text is drawn in ``INK``, rules in ``RULE`` and data in the colours of
``LOOKS``: a page replaces these colours by its own, light or dark. Series differ by line and marker as well as by
colour, and the colours are of the palette by Okabe and Ito (https://jfly.uni-koeln.de/color), which colour-blind people
tell apart.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#24292f"
RULE = "#d0d7de"
BLUE = "#0072b2"
ON_BLUE = "#ffffff"
"""Text and hatching upon data."""


class Look(NamedTuple):
    """What tells a series apart."""

    colour: str
    line: Any
    marker: str


SERIES = (
    Look("#d55e00", "--", "D"),
    Look("#009e73", "-.", "o"),
    Look("#b35c94", ":", "s"),
    Look("#8a6d00", (0, (5, 1)), "^"),
)
"""Of the series beside the first."""
LOOKS = (Look(BLUE, "-", "o"), *SERIES)
THEMED = {INK: "currentColor", RULE: "var(--rule)", ON_BLUE: "var(--page)"} | {
    look.colour: f"var(--series-{index})" for index, look in enumerate(LOOKS)
}
"""What a page has in place of each colour."""

WIDTH = 4.8
"""Inches; narrow, so that text stays readable when a phone scales the figure down."""
TEXT = {"color": INK, "fontsize": 10}
SMALL = {"color": INK, "fontsize": 9}


def new_figure(height: float) -> Figure:
    """An empty figure, its height in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")


def dress(axes: Axes, *, x_label: str = "", y_label: str = "", grid: Literal["x", "y"] | None = "y") -> None:
    """Labels, ticks, rules and spines in the common style."""
    axes.set_facecolor("none")
    axes.set_xlabel(x_label, **TEXT)
    axes.set_ylabel(y_label, **TEXT)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=RULE, linewidth=0.7)


def legend(axes: Axes) -> None:
    """A frameless legend above the axes, in two columns; none where nothing was drawn."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, labelcolor=INK, fontsize=9, borderaxespad=0.2
    )


def save_png(figure: Figure, path: str | Path) -> None:
    """Writes a figure on white, replacing a file that is there."""
    figure.savefig(path, format="png", dpi=160, facecolor="white")


def svg_of(figure: Figure, prefix: str) -> str:
    """A figure as an SVG element whose colours are the page's (:data:`THEMED`) and whose text is text.

    Ids get ``prefix``: matplotlib numbers its elements from 1 in every figure, and a page needs them unique.
    """
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "blockpilot"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    for colour, themed in THEMED.items():
        svg = svg.replace(colour, themed)
    return svg
