"""The figures of a sweep for a terminal and as plain JSON values; its figure is in ``plots``.

Knows how they are rounded and named; computes none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockpilot.metrics import Estimate, FixedSize, OracleGain, SequenceBound, SweepSummary

NO_VALUE = "-"
_UNBOUNDED = 10_000
_HISTOGRAMS = (1, 2, 3)
"""Radii whose labels are counted in the table of sizes: the paper's k."""
_BRIEF = (1, 2, 3, 4, 8, 16, 32, 64)
"""Radii in a brief table: gains level off, so those in between say little."""


def sizes_table(summary: SweepSummary) -> Table:
    """A row per block size: mean tau, gain over always-B, and the prompts it is the best for within each radius."""
    counted = [one for one in summary.oracles[:-1] if one.radius in _HISTOGRAMS] + [summary.oracles[-1]]
    table = _table(
        "One block size for all prompts [95% interval]; right: prompts it is best for, among these sizes, ties split",
        [
            "block size",
            "tau",
            f"gain over b={summary.trained}",
            "at 95%",
            *(_candidates(one, summary) for one in counted),
        ],
    )
    for fixed in summary.fixed:
        marks = [" (B)"] * (fixed.block_size == summary.trained) + [" (best)"] * (
            fixed.block_size == summary.best_fixed
        )
        table.add_row(
            f"{fixed.block_size}{''.join(marks)}",
            *_estimates(fixed),
            *(_count(one, fixed.block_size, summary.num_prompts) for one in counted),
        )
    return table


def oracle_table(summary: SweepSummary, brief: bool = False) -> Table:
    """Always-B, the best single size, and the best size of each prompt within every radius.

    Args:
        summary: the figures.
        brief: only the radii 1, 2, 3, 4, 8, 16, ... and all sizes.
    """
    table = _table(
        f"Choosing for {prompts_line(summary)} [95% interval]",
        ["block size", "tau", f"gain over b={summary.trained}", "at 95%", "tied", "median gap to second"],
    )
    always, best = summary.fixed_at(summary.trained), summary.fixed_at(summary.best_fixed)
    rows = {} if always is None else {f"always-{summary.trained}": always}
    if best is not None and best is not always:
        rows[f"best fixed: {summary.best_fixed}"] = best
    for name, fixed in rows.items():
        table.add_row(name, *_estimates(fixed), NO_VALUE, NO_VALUE)
    for one in summary.oracles[:-1] if not brief else [o for o in summary.oracles[:-1] if o.radius in _BRIEF]:
        table.add_row(*_oracle_cells(one, summary))
    table.add_row(*_oracle_cells(summary.oracles[-1], summary))
    return table


def print_tables(*tables: Table) -> None:
    """Prints tables whole: a narrow terminal may wrap their lines, but nothing in them is cut."""
    unbounded = Console(width=_UNBOUNDED)
    for table in tables:
        # not the least width that Rich measures: a table printed at it can still lose its last columns
        Console(width=max(Console().width, unbounded.measure(table).maximum)).print(table)


def choice_lines(summary: SweepSummary, name: str) -> list[str]:
    """What the chosen sizes reach, as sentences.

    Args:
        summary: the figures; without choices there is nothing to say.
        name: where the choices come from.
    """
    if summary.choice is None:
        return []
    one = summary.choice
    lines = [
        f"{name}: chosen sizes, against the best of {runs(one.candidates)}",
        f"  tau {_figure(one.tau, '{:.3f}')}, regret {_figure(one.regret, '{:.2%}')}, "
        f"a best size on {one.best_prompts} of {summary.num_prompts} prompts",
    ]
    if one.gain is not None:
        lines.append(
            f"  against always-{summary.trained}: {_figure(one.gain, '{:+.2%}')}, {one.gain.verdict} at 95% (paired)"
        )
    if one.best_prompts == summary.num_prompts:
        lines.append("  no choice is wrong: these are the oracle's own labels, or as good as them")
    return lines


def bound_line(bound: SequenceBound, trained: int, unit: str) -> str:
    """The bound of policies that decide every round, as a sentence.

    Args:
        bound: the figures.
        trained: B.
        unit: of the utility, such as ``tau``.
    """
    gains = [f"{_figure(bound.gain_over_oracle, '{:+.2%}')} over the best size of each prompt"]
    if bound.gain_over_always is not None:
        gains.insert(0, f"{_figure(bound.gain_over_always, '{:+.2%}')} over always-{trained}")
    return f"best size of every round (upper bound): {unit} {_figure(bound.utility, '{:.3f}')}, " + ", ".join(gains)


def prompts_line(summary: SweepSummary) -> str:
    """How many prompts the figures are over."""
    without = summary.num_prompts_without_rounds
    left_out = f" ({without} without rounds left out)" if without else ""
    return f"{summary.num_prompts} prompts{left_out}"


def sweep_values(summary: SweepSummary | SequenceBound) -> dict[str, Any]:
    """Every figure as plain JSON values; a figure that is undefined is null."""
    return _json_safe(asdict(summary))


def runs(sizes: Sequence[int]) -> str:
    """Rising sizes with runs of three or more shortened: ``4, 8, 13..19``."""
    parts = []
    for _, group in itertools.groupby(enumerate(sizes), lambda pair: pair[1] - pair[0]):
        members = [size for _, size in group]
        parts += [f"{members[0]}..{members[-1]}"] if len(members) > 2 else map(str, members)
    return ", ".join(parts)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(title))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _candidates(one: OracleGain, summary: SweepSummary) -> str:
    return "all" if one.block_sizes == summary.block_sizes else runs(one.block_sizes)


def _oracle_cells(one: OracleGain, summary: SweepSummary) -> list[str]:
    radius = "" if one.radius is None else f" (k={one.radius})"
    gap = NO_VALUE if one.median_gap is None else f"{one.median_gap:.1%}"
    # never below always-B, so an interval above 0 is no finding
    tau, gain, _ = _estimates(one)
    return [f"best of {_candidates(one, summary)}{radius}", tau, gain, "upper bound", str(one.tied_prompts), gap]


def _estimates(one: FixedSize | OracleGain) -> tuple[str, str, str]:
    if one.gain is None:
        return _figure(one.tau, "{:.3f}"), NO_VALUE, NO_VALUE
    return _figure(one.tau, "{:.3f}"), _figure(one.gain, "{:+.2%}"), one.gain.verdict


def _count(one: OracleGain, size: int, prompts: int) -> str:
    """Prompts a size is the best for: whole numbers without a point."""
    if size not in one.block_sizes:
        return ""
    return f"{prompts * one.best_share[one.block_sizes.index(size)]:.2f}".rstrip("0").rstrip(".")


def _figure(one: Estimate, style: str) -> str:
    value, low, high = (style.format(number) for number in (one.value, one.low, one.high))
    return f"{value} [{low}, {high}]"


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
