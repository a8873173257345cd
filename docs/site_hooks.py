"""What the site adds to the pages: the configuration reference, made from the dataclasses when it is built."""

from __future__ import annotations

import re
from typing import Any

from blockpilot.config.reference import markdown

REFERENCE = "<!-- reference -->"


def on_page_markdown(text: str, **of_page: Any) -> str:
    """Puts the reference where a page asks for it."""
    return text.replace(REFERENCE, markdown())


def on_page_content(html: str, **of_page: Any) -> str:
    """Docstrings name other objects by roles such as ``:class:``, which the site shows as code alone."""
    return re.sub(r":(?:class|func|meth|data|attr|mod):(?=<code>)", "", html)
