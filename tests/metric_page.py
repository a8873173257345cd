"""Reads docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/metrics.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def sections() -> dict[str, str]:
    """Text of the page by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented() -> set[str]:
    """Keys of figures, in the first column of the page's tables."""
    text = "".join(sections()[name] for name in ("Training", "Evaluation", "Drafter training"))
    return {key for first, _ in ROW.findall(text) for key in re.findall("`([^`]+)`", first)}
