"""The checkpoint that a training goes on from: whole, and of the same configuration.

Knows the file and hyper-parameters; what is restored from it, Lightning knows.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from blockpilot.errors import UserError
from blockpilot.learning.callbacks import LAST

log = logging.getLogger(__name__)

_PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", "epoch", "hyper_parameters")
"""Of a checkpoint that training can go on from."""


def checkpoint_to_resume(checkpoints: Path, settings: Mapping[str, Any], key: str) -> Path | None:
    """The last checkpoint of a folder, if it is there.

    Args:
        checkpoints: the folder.
        settings: hyper-parameters of this run; those of the checkpoint must be the same, but for how long to train.
        key: configuration key that asks for it, named in errors.

    Raises:
        UserError: it cannot be read, or was made with another configuration.
    """
    path = checkpoints / LAST
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            # torch compares no check sums
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} in it is damaged")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        missing = [part for part in _PARTS if not isinstance(saved, dict) or part not in saved]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        earlier = dict(saved["hyper_parameters"])
    except (OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{key}: {path} cannot be read: {type(error).__name__}: {reason}") from error
    free = {"max_epochs", "patience", "devices", "resume"}
    for name, now in flat(settings).items():
        before = flat(earlier).get(name)
        if before != now and name.split(".")[-1] not in free:
            raise UserError(f"{key}: {path} was made with {name}={before!r}, this run has {now!r}")
    log.info("going on from %s", path)
    return path


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    parts: dict[str, Any] = {}
    for name, value in values.items():
        parts |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return parts
