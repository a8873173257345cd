"""From what a page shows to its HTML: one self-contained file, nothing fetched, no script, light or dark.

Knows the templates beside it and what goes into them; every number comes ready. All text is escaped by Jinja, and a
content security policy forbids scripts and every fetch, so a prompt that holds markup stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from blockpilot.report.charts import Chart
from blockpilot.report.drawing import svg_of

_PAGES = Environment(
    loader=PackageLoader("blockpilot.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown: rounded, and whole for who copies it."""

    lines: tuple[str, ...]
    value: float | None = None


@dataclass(frozen=True)
class TableOf:
    """A table with a heading per row."""

    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[tuple[Cell, ...]]


def write_page(path: Path, template: str, charts: Sequence[Chart], **content: Any) -> None:
    """Writes a page, replacing a file that is there.

    Args:
        path: the HTML file.
        template: of ``templates/``.
        charts: drawn in the page, in reading order.
        content: what the template names.
    """
    drawn = [{"chart": chart, "svg": _drawing(chart, index)} for index, chart in enumerate(charts)]
    path.write_text(_PAGES.get_template(template).render(charts=drawn, **content), encoding="utf-8")


def facts_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values as text, what is empty left out."""
    return [(name, str(value)) for name, value in values.items() if value not in (None, "")]


def _drawing(chart: Chart, index: int) -> Markup:
    """Matplotlib's own markup, which has escaped its texts."""
    label = escape(f"{chart.title}. {chart.words}")
    return Markup(svg_of(chart.figure, f"f{index}-").replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
