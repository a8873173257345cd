"""The figures of every epoch in a file of their own, whatever logger a run has.

Knows Lightning's logged figures and the file; nothing of what they mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from blockpilot.errors import UserError
from blockpilot.oracle.files import write_whole

HISTORY = "history.jsonl"
"""In a run's folder: a JSON object per epoch with ``epoch``, ``step`` and every figure logged by then."""


class History(Callback):
    """Writes :data:`HISTORY` anew after every epoch; a training that goes on keeps the epochs before.

    Args:
        folder: the run's output folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / HISTORY
        self.rows: list[Mapping[str, Any]] = []

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Takes up what an earlier job wrote, if this one goes on from its checkpoint."""
        self.rows = list(read_history(self.path)) if trainer.ckpt_path is not None else []

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Adds this epoch; an epoch that is made again replaces the one there was."""
        # of all processes, since a figure may be a sum over them
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        epoch = trainer.current_epoch
        earlier = [row for row in self.rows if row["epoch"] < epoch]
        self.rows = [*earlier, {"epoch": epoch, "step": trainer.global_step, **finite}]
        if trainer.is_global_zero:
            text = "".join(f"{json.dumps(row)}\n" for row in self.rows).encode()
            write_whole(self.path, lambda file: file.write(text), key="hydra.run.dir")


def read_history(path: Path) -> list[Mapping[str, Any]]:
    """A row per epoch, in order; none where nothing was trained.

    Raises:
        UserError: it is not what :class:`History` wrote.
    """
    if not path.is_file():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not all(isinstance(row, dict) and isinstance(row.get("epoch"), int) for row in rows):
        raise UserError(f"{path} has a line without epoch; expected a JSON object per epoch")
    return rows
