"""The one exception that means "the user can fix this"; entries print it as a single line."""

from __future__ import annotations

import operator


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


def brief(value: object) -> str:
    """Its text on one line, cut where it is long: a tensor's has many lines."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
