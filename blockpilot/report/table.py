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

REGRET_SPEED = "regret (speed)"
COLUMNS = (
    "block size", "tau", "tau pooled", "speedup", "regret", REGRET_SPEED, "headroom captured", "prompts",
)  # fmt: skip
"""Headings after the policy's name."""


def summary_rows(summaries: Sequence[PolicySummary]) -> list[dict[str, str | int | float | None]]:
    """One flat dict per policy, fit for JSON and W&B: an interval is two keys, NaN and infinity become None.

    ``regret_speed`` is a key only where rounds have costs.
    """
    speed = has_speed(summaries)
    return [
        {
            "policy": one.policy,
            "mean_block_size": _finite(one.mean_block_size),
            **_with_interval("tau", one.tau, one.tau_interval),
            "tau_pooled": _finite(one.tau_pooled),
            **_with_interval("speedup", one.speedup, one.speedup_interval),
            **_with_interval("regret", one.regret, one.regret_interval),
            **_with_interval("headroom_captured", one.headroom_captured, one.headroom_captured_interval),
            **(_with_interval("regret_speed", one.regret_speed, one.regret_speed_interval) if speed else {}),
            "num_prompts": one.num_prompts,
            "num_prompts_without_rounds": one.num_prompts_without_rounds,
        }
        for one in summaries
    ]


def summary_table(summaries: Sequence[PolicySummary]) -> Table:
    """A terminal table with a row per policy; 95 % intervals stand in brackets under their figures."""
    table = Table(title=Text("Policies on the test prompts [95% interval]"))
    table.add_column("policy", no_wrap=True)
    speed = has_speed(summaries)
    for heading in columns(speed):
        table.add_column(heading, justify="right")
    for one in summaries:
        cells = summary_cells(one)
        table.add_row(Text(one.policy), *(Text("\n".join(filter(None, cells[name]))) for name in columns(speed)))
    return table


def has_speed(summaries: Sequence[PolicySummary]) -> bool:
    """Whether rounds have costs, so that there is a regret in speed."""
    return any(one.regret_speed is not None for one in summaries)


def columns(speed: bool) -> list[str]:
    """Headings after the policy's name, with or without the regret in speed."""
    return [name for name in COLUMNS if speed or name != REGRET_SPEED]


def summary_cells(one: PolicySummary) -> dict[str, tuple[str, str]]:
    """(figure, interval or nothing) of each of ``COLUMNS``, rounded for people; prompts: with rounds, of all."""
    with_rounds = one.num_prompts - one.num_prompts_without_rounds
    cells = [
        (_number(one.mean_block_size, "{:.2f}"), ""),
        (_number(one.tau, "{:.3f}"), _interval(one.tau_interval, "{:.3f}")),
        (_number(one.tau_pooled, "{:.3f}"), ""),
        (_number(one.speedup, "{:.2f}x"), _interval(one.speedup_interval, "{:.2f}")),
        (_number(one.regret, "{:.1%}"), _interval(one.regret_interval, "{:.1%}")),
        (_number(one.regret_speed, "{:.1%}"), _interval(one.regret_speed_interval, "{:.1%}")),
        (_number(one.headroom_captured, "{:.0%}"), _interval(one.headroom_captured_interval, "{:.0%}")),
        (str(with_rounds) if with_rounds == one.num_prompts else f"{with_rounds} of {one.num_prompts}", ""),
    ]
    return dict(zip(COLUMNS, cells, strict=True))


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
