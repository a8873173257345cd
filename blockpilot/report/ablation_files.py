"""A finished Hydra multirun as a folder: what was swept, and the figures each job left.

Knows files only: ``N/.hydra/overrides.yaml``, ``N/config.yaml``, ``N/metrics.json`` and, of a job that failed,
``failed-N.txt``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from blockpilot.errors import UserError


@dataclass(frozen=True)
class Job:
    """One job of a multirun."""

    number: int
    overrides: Mapping[str, str]
    """What it was started with, value by key, both as typed."""
    state: str
    """finished, failed or unfinished."""
    seed: int | None = None
    figures: Mapping[str, float | None] | None = None
    """The numbers of its ``metrics.json`` by name, null where undefined; only of a finished job."""
    split_by_seed: tuple[str, ...] = ()
    """Data sets without test prompts of their own: which are tested depends on the seed."""


def is_multirun(folder: Path) -> bool:
    """Whether Hydra ran jobs in numbered folders there."""
    return folder.is_dir() and any(_is_job(path) for path in folder.iterdir())


def read_multirun(folder: Path) -> list[Job]:
    """The jobs of a multirun in the order of their numbers.

    Raises:
        UserError: there is no such folder, or it holds no job.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; expected that of a multirun, such as outputs/multirun/DAY/TIME")
    numbered = sorted((int(path.name), path) for path in folder.iterdir() if _is_job(path))
    jobs = [_read_job(folder, number, path) for number, path in numbered]
    if not jobs:
        raise UserError(
            f"{folder} has no jobs; expected a multirun's folder, with a folder N/.hydra of each job N (a multirun is "
            "python train.py -m ..., its folder is hydra.sweep.dir)"
        )
    return jobs


def _is_job(path: Path) -> bool:
    return path.name.isdecimal() and (path / ".hydra/overrides.yaml").is_file()


def _read_job(folder: Path, number: int, path: Path) -> Job:
    overrides = _overrides(path / ".hydra/overrides.yaml")
    figures = _figures(path / "metrics.json")
    # a folder may be used twice: what is told of the last sweep counts, not what an earlier one left
    if (folder / f"failed-{number}.txt").exists() or figures is None:
        failed = (folder / f"failed-{number}.txt").exists()
        return Job(number, overrides, "failed" if failed else "unfinished")
    config = _mapping(path / "config.yaml")
    seed, datasets = config.get("seed"), config.get("dataset") or {}
    if seed is not None and type(seed) is not int:
        raise UserError(f"{path / 'config.yaml'}: seed={seed!r} is not allowed; expected a whole number")
    if not isinstance(datasets, dict) or not all(isinstance(splits, dict) for splits in datasets.values()):
        raise UserError(f"{path / 'config.yaml'}: dataset={datasets!r:.60} is not allowed; expected splits by name")
    return Job(
        number,
        overrides,
        "finished",
        seed=seed,
        figures=figures,
        split_by_seed=tuple(str(name) for name, splits in datasets.items() if splits.get("test") is None),
    )


def _overrides(path: Path) -> dict[str, str]:
    """Value by key, signs for adding and removing left out; the last of a key counts, as in Hydra."""
    pairs = (str(one).lstrip("+~").partition("=") for one in _load(path, list))
    return {key: value for key, _, value in pairs}


def _mapping(path: Path) -> dict[str, Any]:
    return _load(path, dict)


def _load(path: Path, kind: type) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, kind):
        raise UserError(f"{path} holds a {type(content).__name__}; expected what Hydra wrote there, a {kind.__name__}")
    return content


def _figures(path: Path) -> dict[str, float | None] | None:
    """The numbers of a ``metrics.json``; None where a killed job left none, or half of one.

    JSON has no number that is not finite, yet Python reads and writes some: such a figure is undefined.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return {
        name: None if value is None or not abs(value) <= sys.float_info.max else float(value)
        for name, value in content.items()
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    }
