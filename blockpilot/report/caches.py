"""Caches as lines and tables for people: what is whole, what is in them, what a merge did.

Knows what was found and how it is shown; reads no cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from blockpilot.oracle.audit import CacheState
from blockpilot.oracle.merge import Merged

_DIGEST_LENGTH = 12
"""Letters of a digest that are shown: folders are named by as many."""
_MOST_NAMES = 4


def verify_lines(state: CacheState) -> Iterator[str]:
    """One line on the cache, then one for everything that is wrong."""
    verdict = "whole" if state.is_whole else "NOT whole"
    yield f"{state.cache.folder}: {verdict}; {_shards(state)}, {state.rows} rows, {state.total('skipped')} skipped"
    for shard in state.shards:
        if shard.problem:
            yield f"  {shard.name} {shard.problem}"
    for problem in state.problems:
        yield f"  {problem}"


def cache_table(state: CacheState) -> Table:
    """What a cache holds and what made it, a line per fact; its folder is not in it, since paths are long."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for section in (_content(state), state.cache.key.fields(), state.cache.manifest["provenance"]):
        for name, value in section.items():
            table.add_row(name, Text(_shown(value)))
        table.add_section()
    for shard in state.shards:
        if shard.problem:
            table.add_row(shard.name, Text(shard.problem))
    for problem in state.problems:
        table.add_row("problem", Text(problem))
    return table


def merge_lines(merged: Merged) -> Iterator[str]:
    """One line on the merged cache, then one for every file that was not taken."""
    there, all_of_them = merged.copied + merged.kept, merged.cache.num_shards
    line = f"{merged.cache.folder}: {there} of {all_of_them} shards, {merged.copied} copied, {merged.kept} were there"
    yield f"{line}; {'still missing ' + _names(merged.missing) if merged.missing else 'complete'}"
    for note in merged.notes:
        yield f"  {note}"


def _content(state: CacheState) -> dict[str, Any]:
    rows, size = state.rows, state.total("bytes")
    tau = [f"{b}: {_tau(value)}" for b, value in state.tau.items()]
    made_by = Counter(shard.device for shard in state.whole)
    return {
        "shards": f"{_shards(state)}; {state.cache.shard_size} prompts each",
        "prompts": state.cache.manifest["num_rows"],
        "rows": f"{rows}, {state.total('skipped')} skipped (too long)",
        "on disk": f"{_bytes(size)}, {size / rows:,.0f} bytes per row" if rows else _bytes(size),
        "non-zeros per row": f"{state.total('nonzeros') / rows:,.1f}" if rows else "-",
        "mean tau": "  ".join(tau),
        "made by": ", ".join(f"{device} ({count} shard{'s' * (count > 1)})" for device, count in made_by.items())
        or "-",
    }


def _counted(count: int) -> str:
    return f"{count} shard{'s' * (count != 1)}"


def _shards(state: CacheState) -> str:
    kinds = state.kinds
    others = [f"{kinds[kind]} {kind}" for kind in ("missing", "damaged", "wrong", "closed") if kinds[kind]]
    return ", ".join([f"{kinds['whole']} of {len(state.shards)} shards whole", *others])


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _shown(value: Any) -> str:
    """A value as it stands, a digest cut."""
    text = str(value)
    kind, _, digest = text.rpartition(":")
    if len(digest) >= 40 and set(digest) <= set("0123456789abcdef"):
        return f"{kind}:{digest[:_DIGEST_LENGTH]}" if kind else digest[:_DIGEST_LENGTH]
    return text


def _tau(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
