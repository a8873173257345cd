"""Policy summaries as a terminal table and as plain rows.

Knows how figures are rounded and named for people and for files; computes none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from blockpilot.metrics import Interval, PolicySummary

NO_VALUE = "-"
"""Shown where a figure is undefined or was not asked for."""


def summary_rows(summaries: Sequence[PolicySummary]) -> list[dict[str, str | int | float | None]]:
    """One flat dict per policy, fit for JSON and W&B: an interval is two keys, NaN and infinity become None."""
    return [
        {
            "policy": one.policy,
            "mean_block_size": _finite(one.mean_block_size),
            **_with_interval("tau", one.tau, one.tau_interval),
            "tau_pooled": _finite(one.tau_pooled),
            **_with_interval("speedup", one.speedup, one.speedup_interval),
            **_with_interval("regret", one.regret, one.regret_interval),
            **_with_interval("headroom_captured", one.headroom_captured, one.headroom_captured_interval),
            "num_prompts": one.num_prompts,
            "num_prompts_without_rounds": one.num_prompts_without_rounds,
        }
        for one in summaries
    ]


def summary_table(summaries: Sequence[PolicySummary]) -> Table:
    """A terminal table with a row per policy; 95 % intervals stand in brackets under their figures."""
    table = Table(title=Text("Policies on the test prompts [95% interval]"))
    table.add_column("policy", no_wrap=True)
    for heading in ("block size", "tau", "tau pooled", "speedup", "regret", "headroom captured", "prompts"):
        table.add_column(heading, justify="right")
    for one in summaries:
        table.add_row(Text(one.policy), *(Text("\n".join(filter(None, cell))) for cell in summary_cells(one)))
    return table


def summary_cells(one: PolicySummary) -> list[tuple[str, str]]:
    """(figure, interval or nothing) of each column after the policy's name, rounded for people.

    Columns: block size, tau, tau pooled, speedup, regret, headroom captured, prompts (with rounds, of all).
    """
    with_rounds = one.num_prompts - one.num_prompts_without_rounds
    return [
        (_number(one.mean_block_size, "{:.2f}"), ""),
        (_number(one.tau, "{:.3f}"), _interval(one.tau_interval, "{:.3f}")),
        (_number(one.tau_pooled, "{:.3f}"), ""),
        (_number(one.speedup, "{:.2f}x"), _interval(one.speedup_interval, "{:.2f}")),
        (_number(one.regret, "{:.1%}"), _interval(one.regret_interval, "{:.1%}")),
        (_number(one.headroom_captured, "{:.0%}"), _interval(one.headroom_captured_interval, "{:.0%}")),
        (str(with_rounds) if with_rounds == one.num_prompts else f"{with_rounds} of {one.num_prompts}", ""),
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _with_interval(name: str, value: float | None, interval: Interval | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {name: _finite(value), f"{name}_low": _finite(low), f"{name}_high": _finite(high)}


def _number(value: float | None, style: str) -> str:
    return NO_VALUE if _finite(value) is None else style.format(value)


def _interval(interval: Interval | None, style: str) -> str:
    if interval is None or not all(map(math.isfinite, interval)):
        return ""
    low, high = map(style.format, interval)
    return f"[{low}, {high}]"
