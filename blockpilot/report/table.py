"""Policy summaries as terminal tables and as plain rows.

Knows how figures are rounded and named for people and for files; computes none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from blockpilot.metrics import Estimate, PolicySummary

NO_VALUE = "-"
"""Shown where a figure is undefined or was not asked for."""

REGRET_SPEED = "regret (speed)"
COLUMNS = (
    "block size", "tau", "tau gain", "speedup", "speed gain", "accuracy", "regret", REGRET_SPEED, "headroom captured",
)  # fmt: skip
"""Headings after the policy's name."""


def summary_rows(summaries: Sequence[PolicySummary]) -> list[dict[str, Any]]:
    """One flat dict per policy, fit for JSON: an interval is two keys, NaN and infinity become None.

    ``choices`` maps block sizes, as strings, to prompts. ``regret_speed`` is a key only where rounds have costs.
    """
    speed = has_speed(summaries)
    return [
        {
            "policy": one.policy,
            "mean_block_size": _finite(one.mean_block_size),
            **_with_interval("tau", one.tau),
            "tau_pooled": _finite(one.tau_pooled),
            **_with_interval("tau_gain", one.tau_gain),
            "tau_gain_verdict": verdict(one.tau_gain),
            **_with_interval("speedup", one.speedup),
            **_with_interval("speed_gain", one.speed_gain),
            "speed_gain_verdict": verdict(one.speed_gain),
            "accuracy": _finite(one.accuracy),
            **_with_interval("regret", one.regret),
            **_with_interval("headroom_captured", one.headroom_captured),
            **(_with_interval("regret_speed", one.regret_speed) if speed else {}),
            "choices": {str(size): count for size, count in one.choices.items()},
            "num_prompts": one.num_prompts,
            "num_prompts_without_rounds": one.num_prompts_without_rounds,
        }
        for one in summaries
    ]


def summary_table(summaries: Sequence[PolicySummary]) -> Table:
    """A terminal table with a row per policy; 95 % intervals stand in brackets under their figures."""
    shown = columns(has_speed(summaries))
    cells = [summary_cells(one) for one in summaries]
    return _table(
        f"Policies on {prompts_text(summaries)} [95% interval]",
        [one.policy for one in summaries],
        {heading: [own[heading] for own in cells] for heading in shown},
    )


def dataset_table(datasets: Mapping[str, Sequence[PolicySummary]]) -> Table:
    """A terminal table of the gains in tau: a row per policy, a column per data set.

    Args:
        datasets: data set -> summaries of the same policies. Always-B and plain decoding, whose gains say nothing, have
            no row.
    """
    first = next(iter(datasets.values()))
    shown = [index for index, one in enumerate(first) if one.tau_gain is not None and not plain(one)]
    return _table(
        "Gain in tau over always-B by data set [95% interval]",
        [first[index].policy for index in shown],
        {
            f"{name}\n{prompts_text(own)}": [_gain(own[index].tau_gain) for index in shown]
            for name, own in datasets.items()
        },
    )


def has_speed(summaries: Sequence[PolicySummary]) -> bool:
    """Whether rounds have costs, so that there is a regret in speed."""
    return any(one.regret_speed is not None for one in summaries)


def columns(speed: bool) -> list[str]:
    """Headings after the policy's name, with or without the regret in speed."""
    return [name for name in COLUMNS if speed or name != REGRET_SPEED]


def plain(one: PolicySummary) -> bool:
    """Whether a policy is plain autoregressive decoding: one token per round by definition."""
    return one.mean_block_size == 1


def prompts_text(summaries: Sequence[PolicySummary]) -> str:
    """How many prompts the figures are over, the same for all policies."""
    count, without = summaries[0].num_prompts, summaries[0].num_prompts_without_rounds
    left_out = f" ({without} without rounds)" if without else ""
    return f"{count} prompt{'s' * (count != 1)}{left_out}"


def summary_cells(one: PolicySummary) -> dict[str, tuple[str, ...]]:
    """The lines of each of ``COLUMNS``, rounded for people: figure, interval, verdict, as far as there are any."""
    cells = [
        (_number(one.mean_block_size, "{:.2f}"),),
        _figure(one.tau, "{:.3f}"),
        _gain(one.tau_gain),
        _figure(one.speedup, "{:.2f}x", "{:.2f}"),
        _gain(one.speed_gain),
        (_number(one.accuracy, "{:.0%}"),),
        _figure(one.regret, "{:.1%}"),
        _figure(one.regret_speed, "{:.1%}"),
        _figure(one.headroom_captured, "{:.0%}"),
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def verdict(gain: Estimate | None) -> str | None:
    """What a gain says at 95 %, if there is one."""
    return None if gain is None or math.isnan(gain.value) else gain.verdict


def _table(title: str, policies: Sequence[str], cells: Mapping[str, Sequence[Sequence[str]]]) -> Table:
    """A row per policy, a column per heading; columns may become as narrow as their longest word, which stays whole."""
    table = Table(title=Text(title))
    table.add_column("policy", no_wrap=True, min_width=max(map(len, ["policy", *policies])))
    for heading, column in cells.items():
        words = " ".join([heading, *(line for lines in column for line in lines)]).split()
        table.add_column(Text(heading), justify="right", min_width=max(map(len, words)))
    for index, policy in enumerate(policies):
        table.add_row(Text(policy), *(Text("\n".join(column[index])) for column in cells.values()))
    return table


def _gain(gain: Estimate | None) -> tuple[str, ...]:
    words = verdict(gain)
    return (NO_VALUE,) if words is None else (*_figure(gain, "{:+.2%}"), words)


def _figure(one: Estimate | None, style: str, ends: str | None = None) -> tuple[str, ...]:
    """Value and interval, the ends in a style of their own if given."""
    if one is None or not math.isfinite(one.value):
        return (NO_VALUE,)
    low, high = map((ends or style).format, (one.low, one.high))
    return style.format(one.value), f"[{low}, {high}]"


def _number(value: float | None, style: str) -> str:
    return NO_VALUE if _finite(value) is None else style.format(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _with_interval(name: str, one: Estimate | None) -> dict[str, float | None]:
    value, low, high = (None, None, None) if one is None else map(_finite, (one.value, one.low, one.high))
    return {name: value, f"{name}_low": low, f"{name}_high": high}
