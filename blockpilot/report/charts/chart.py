"""What a chart is: a figure, what it shows in words, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A figure that can be seen, heard and copied."""

    name: str
    """Of its PNG file, without the ending."""
    title: str
    words: str
    """What it shows, in a sentence or two: its caption, and what a screen reader says."""
    figure: Figure
    headings: tuple[str, ...]
    """Of its numbers; the first column names a row."""
    rows: tuple[tuple[str, ...], ...]
