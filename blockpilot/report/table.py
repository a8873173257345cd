"""Policy summaries as plain rows, and those rows as terminal tables.

Knows how figures are rounded and named for people and for files; computes none of them. A row is what ``metrics.json``
holds of one policy, so a table of a run that has just ended and one made later from its files are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from blockpilot.metrics import FEWEST_PROMPTS, Estimate, PolicySummary

NO_VALUE = "-"
"""Shown where a figure is undefined or was not asked for."""

Row = Mapping[str, Any]
"""Of one policy, with the keys of :func:`summary_rows`."""


@dataclass(frozen=True)
class Column:
    """How one figure of a row is shown."""

    heading: str
    key: str
    """Its key in a row; ``<key>_low``, ``<key>_high`` and ``<key>_verdict`` are shown with it where a row has them."""
    style: str
    meaning: str
    ends: str | None = None
    """Style of the interval's ends, where it is not that of the figure."""

    def cell(self, row: Row) -> tuple[str, ...]:
        """Its lines, rounded for people: figure, interval, verdict, as far as there are any."""
        value, low, high = (row.get(f"{self.key}{end}") for end in ("", "_low", "_high"))
        if value is None:
            return (NO_VALUE,)
        lines = [self.style.format(value)]
        if low is not None and high is not None:
            ends = self.ends or self.style
            lines.append(f"[{ends.format(low)}, {ends.format(high)}]")
        words = row.get(f"{self.key}_verdict")
        return (*lines, words) if words is not None else tuple(lines)


COLUMNS = (
    Column(
        "block size", "mean_block_size", "{:.2f}",
        "positions verified per round, anchor included: mean over a prompt's rounds, then over prompts",
    ),
    Column(
        "tau", "tau", "{:.3f}",
        "tokens committed per round: mean over a prompt's rounds, then over prompts. Higher is better",
    ),
    Column(
        "tau gain", "tau_gain", "{:+.2%}",
        "difference in tau to always using the trained block size, relative to the latter's tau",
    ),
    Column(
        "speedup", "speedup", "{:.2f}x",
        "seconds per output token of autoregressive decoding over those of this policy. Prefill is in neither; "
        "the policy's own time is included",
        ends="{:.2f}",
    ),
    Column(
        "speed gain", "speed_gain", "{:+.2%}",
        "difference in measured tokens per second to always using the trained block size, relative to the latter's; "
        "the policy's own time is included",
    ),
    Column(
        "accuracy", "accuracy", "{:.0%}",
        "share of the prompts on which the policy reaches the tau of the best candidate; where several are best, each "
        "is right",
    ),
    Column(
        "regret", "regret", "{:.1%}",
        "share of the best candidate's tau that the policy gives away, mean over prompts. 0% is perfect",
    ),
    Column(
        "regret (speed)", "regret_speed", "{:.1%}",
        "regret in tokens per second instead of tau: tau divided by the seconds a round of that size costs on the "
        "device of the latency profile. The policy's own time is not in it",
    ),
    Column(
        "headroom captured", "headroom_captured", "{:.0%}",
        "how much of the way from always using the trained block size (0%) to the best candidate for every prompt "
        "(100%) the policy covers. Below 0% the trained block size alone does better",
    ),
)  # fmt: skip
"""After the policy's name."""
TAU_GAIN = next(one for one in COLUMNS if one.key == "tau_gain")


def summary_rows(summaries: Sequence[PolicySummary]) -> list[dict[str, Any]]:
    """One flat dict per policy, fit for JSON: an interval is two keys, NaN and infinity become None.

    ``choices`` maps block sizes, as strings, to prompts. ``regret_speed`` is a key only where rounds have costs.
    """
    speed = any(one.regret_speed is not None for one in summaries)
    return [
        {
            "policy": one.policy,
            "mean_block_size": _finite(one.mean_block_size),
            **_with_interval("tau", one.tau),
            "tau_pooled": _finite(one.tau_pooled),
            **_with_interval("tau_gain", one.tau_gain),
            "tau_gain_verdict": _verdict(one.tau_gain),
            **_with_interval("speedup", one.speedup),
            **_with_interval("speed_gain", one.speed_gain),
            "speed_gain_verdict": _verdict(one.speed_gain),
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
    rows = summary_rows(summaries)
    few = max(row["num_prompts"] for row in rows) < FEWEST_PROMPTS
    return _table(
        f"Policies on {prompts_text(rows)} [95% interval]",
        [row["policy"] for row in rows],
        {column.heading: [column.cell(row) for row in rows] for column in columns(rows)},
        f"with fewer than {FEWEST_PROMPTS} prompts no gain counts as distinguishable" if few else None,
    )


def dataset_table(datasets: Mapping[str, Sequence[PolicySummary]]) -> Table:
    """A terminal table of the gains in tau: a row per policy, a column per data set.

    Args:
        datasets: data set -> summaries of the same policies. Always-B and plain decoding, whose gains say nothing, have
            no row.
    """
    first = next(iter(datasets.values()))
    by_dataset = {name: summary_rows(own) for name, own in datasets.items()}
    with_gain = [index for index, one in enumerate(first) if one.tau_gain is not None]
    shown = [index for index in with_gain if not plain(next(iter(by_dataset.values()))[index])]
    return _table(
        "Gain in tau over always-B by data set [95% interval]",
        [first[index].policy for index in shown],
        {
            f"{name}\n{prompts_text(rows)}": [TAU_GAIN.cell(rows[index]) for index in shown]
            for name, rows in by_dataset.items()
        },
    )


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns to show: regret in speed only where rounds have costs."""
    return [column for column in COLUMNS if column.key in rows[0]]


def plain(row: Row) -> bool:
    """Whether a policy is plain autoregressive decoding: one token per round by definition."""
    return row["mean_block_size"] == 1


def prompts_text(rows: Sequence[Row]) -> str:
    """How many prompts the figures are over, the same for all policies."""
    count, without = rows[0]["num_prompts"], rows[0]["num_prompts_without_rounds"]
    left_out = f" ({without} without rounds)" if without else ""
    return f"{count} prompt{'s' * (count != 1)}{left_out}"


def _verdict(gain: Estimate | None) -> str | None:
    """What a gain says at 95 %, if there is one."""
    return None if gain is None or math.isnan(gain.value) else gain.verdict


def _table(
    title: str, policies: Sequence[str], cells: Mapping[str, Sequence[Sequence[str]]], caption: str | None = None
) -> Table:
    """A row per policy, a column per heading; columns may become as narrow as their longest word, which stays whole."""
    table = Table(title=Text(title), caption=caption)
    table.add_column("policy", no_wrap=True, min_width=max(map(len, ["policy", *policies])))
    for heading, column in cells.items():
        words = " ".join([heading, *(line for lines in column for line in lines)]).split()
        table.add_column(Text(heading), justify="right", min_width=max(map(len, words)))
    for index, policy in enumerate(policies):
        table.add_row(Text(policy), *(Text("\n".join(column[index])) for column in cells.values()))
    return table


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _with_interval(name: str, one: Estimate | None) -> dict[str, float | None]:
    value, low, high = (None, None, None) if one is None else map(_finite, (one.value, one.low, one.high))
    return {name: value, f"{name}_low": low, f"{name}_high": high}
