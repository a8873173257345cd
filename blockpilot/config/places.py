"""Where things are: the project, its configuration, and folders that several commands must agree on."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONF_DIR = ROOT / "conf"
LATENCY_DIR = "data/latency"
MODELS_DIR = "data/models"
OUTPUTS_DIR = "outputs"


def project_path(path: str | os.PathLike[str]) -> Path:
    """``path`` itself if absolute or there; otherwise the same path inside the project."""
    given = Path(path).expanduser()
    # os.path: a name that no file can have is not there, while Path may raise
    return given if given.is_absolute() or os.path.exists(given) else ROOT / given


def preset_names(group: str) -> list[str]:
    """Names of the presets in one folder of ``conf/``."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
