"""The one exception that means "the user can fix this"; entries print it as a single line."""

from __future__ import annotations


class UserError(ValueError):
    """Input or configuration that cannot be used; the message names the key, the value and what is allowed."""
