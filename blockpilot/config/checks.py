"""The checks that fields share: each raises one line that names the key, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from blockpilot.errors import UserError

LARGEST_BLOCK = 2**15 - 1
"""What the cache's block sizes go up to."""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises ``UserError`` naming key, value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise UserError(f"{key}={value!r} is not allowed; expected {allowed}")


def check_device(device: object) -> None:
    """Raises ``UserError`` unless ``device`` is the name of one (whether it is here is another question)."""
    name = device if isinstance(device, str) else ""
    known = name in ("auto", "cpu", "cuda") or (name.startswith("cuda:") and name[5:].isdigit())
    require(known, "device", device, "auto, cpu, cuda or cuda:N")


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ``UserError`` unless ``value`` is one of ``allowed``."""
    require(value in allowed, key, value, "one of " + ", ".join(allowed))


def expand_block_sizes(key: str, values: Sequence[object]) -> list[int]:
    """Rising block sizes without repeats; ``...`` between two of them stands for all in between.

    Raises:
        UserError: none is given, one is below 1 or above ``LARGEST_BLOCK``, or ``...`` has no number on a side.
    """
    sizes: list[int] = []
    for place, value in enumerate(values):
        around = values[place - 1 : place + 2] if place else ()
        if value == "..." and len(around) == 3 and all(type(end) is int for end in (around[0], around[2])):
            sizes += range(cast(int, around[0]), cast(int, around[2]))
        else:
            allowed = "sizes of 1 or more, and ... between two of them, as [2,...,32]"
            require(type(value) is int and 1 <= value <= LARGEST_BLOCK, key, list(values), allowed)
            sizes.append(cast(int, value))
    require(len(sizes) > 0, key, list(values), "at least one block size, as [2,...,32]")
    return sorted(set(sizes))
