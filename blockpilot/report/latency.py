"""A latency profile as a terminal table with a bar for every block size.

Knows measured seconds and how they are shown; measures nothing.
"""

from __future__ import annotations

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from blockpilot.decoding import LatencyProfile

_BAR_WIDTH = 24


def latency_table(profile: LatencyProfile, trained: int) -> Table:
    """Milliseconds by context and block size, the cost of a round relative to B, and a bar of it.

    Args:
        profile: measured seconds.
        trained: B.
    """
    reference = reference_size(profile, trained)
    table = Table(title=Text(f"{profile.model} on {profile.device}: ms, medians of {profile.repeats} [middle half]"))
    for heading in ("context", "block size", "draft", "verify", "round", "tokens", f"cost vs b={reference}"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("round as a bar")
    longest = max(max(row) for row in profile.round_seconds)
    for row, context in enumerate(profile.contexts):
        costs = relative_costs(profile, row, trained)
        for column, size in enumerate(profile.block_sizes):
            whole = profile.round_seconds[row][column]
            low, high = profile.round_seconds_low[row][column], profile.round_seconds_high[row][column]
            table.add_row(
                str(context) if column == 0 else "",
                f"{size} (B)" if size == trained else str(size),
                _ms(profile.draft_seconds[row][column]) if size > 1 else "-",
                _ms(profile.verify_seconds[row][column]),
                Text(f"{_ms(whole)} [{_ms(low)}, {_ms(high)}]"),
                f"{profile.acceptance_length[row][column]:.1f}",
                f"{costs[column]:.2f}",
                Bar(longest, 0, whole, width=_BAR_WIDTH),
                end_section=size == profile.block_sizes[-1],
            )
    return table


def reference_size(profile: LatencyProfile, trained: int) -> int:
    """The block size that others are compared with: B, or the largest measured where B was not."""
    return trained if trained in profile.block_sizes else profile.block_sizes[-1]


def relative_costs(profile: LatencyProfile, row: int, trained: int) -> list[float]:
    """Seconds of a round over those at B, per block size: how much more tau a size must bring to be as fast."""
    seconds = profile.round_seconds[row]
    base = seconds[profile.block_sizes.index(reference_size(profile, trained))]
    return [second / base for second in seconds]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
