"""The one exception that means "the user can fix this"; entries print it as a single line."""

from __future__ import annotations

import difflib
import operator
import os
import sys
from collections.abc import Iterable


class UserError(ValueError):
    """Input or configuration that cannot be used; the message names the key, the value and what is allowed."""


def integer(key: str, value: object) -> int:
    """``value`` as an int if it is a whole number of any library.

    Raises:
        UserError: it is something else; the message names ``key``.
    """
    try:
        # int: a bool is its own index, and torch does not take one for a number
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise UserError(f"{key}={brief(value)} is not allowed; expected a whole number") from None


def integers(key: str, values: object) -> list[int]:
    """``values`` (a list, a tensor of one dimension, ...) as plain ints.

    Raises:
        UserError: it holds something else or cannot be listed; the message names ``key``.
    """
    try:
        listed = list(values)  # type: ignore[call-overload]
    except TypeError:
        raise UserError(f"{key}={brief(values)} is not allowed; expected a list of whole numbers") from None
    return [integer(f"{key}[{place}]", value) for place, value in enumerate(listed)]


def did_you_mean(name: str, known: Iterable[str], before: str = "", cutoff: float = 0.7) -> str:
    """``; did you mean NAME?`` with the closest of ``known``, or nothing where none is close.

    Args:
        name: what was given.
        known: what there is.
        before: stands before the name that is shown.
        cutoff: likeness from which a name is close, as of ``difflib.get_close_matches``.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {before}{close[0]}?" if close else ""


FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's own switch: 1 in the environment shows tracebacks."""
ONE_LINE = "BLOCKPILOT_ONE_LINE"
"""1 where this project has set the switch itself, to answer in one line what Hydra raises."""
HINT = f"({FULL_ERROR}=1 shows where this comes from)"


def full_errors() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(FULL_ERROR) == "1" and os.environ.get(ONE_LINE) != "1"


def tell(error: object, hint: str = HINT) -> None:
    """Prints an error as one line, and a hint under it, where a user looks for them."""
    print(f"error: {error}\n{hint}", file=sys.stderr)


def brief(value: object) -> str:
    """Its text on one line, cut where it is long: a tensor's has many lines."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
