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
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(f"{key}={value!r} is not allowed; expected a whole number") from None
