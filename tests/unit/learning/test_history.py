"""history.jsonl holds every epoch, without a logger, and goes on with a training that does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.learning import FeatureExtractor
from blockpilot.learning.callbacks import LAST, early_stopping_and_checkpoints
from blockpilot.learning.datamodule import LabelDataModule, split_table
from blockpilot.learning.history import HISTORY, History, read_history
from blockpilot.learning.module import BlockSizeModule
from blockpilot.oracle.table import LabelTable

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
]


def fit(table: LabelTable, folder: Path, epochs: int, checkpoint: Path | None = None) -> lightning.Trainer:
    test, rest = split_table(table, (0.2,), "test")
    stats = FeatureExtractor("stats")
    data = LabelDataModule(lambda: None, lambda: (rest, test), stats, table.block_sizes, batch_size=32)
    torch.manual_seed(0)
    module = BlockSizeModule(list(table.block_sizes), 16, 40, preprocess={"kind": "stats"}, predictor={"width": 16})
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[History(folder), *early_stopping_and_checkpoints(50, folder, "val/regret")],
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=checkpoint)
    return trainer


def test_every_epoch_is_a_row(make_table: Callable[..., LabelTable], tmp_path: Path) -> None:
    (tmp_path / HISTORY).write_text('{"epoch": 0, "of": "an earlier run in this folder"}\n')
    table = make_table(80)
    trainer = fit(table, tmp_path, 2)
    rows = read_history(tmp_path / HISTORY)
    assert [row["epoch"] for row in rows] == [0, 1] and rows[1]["step"] == 2 * rows[0]["step"] > 0
    assert {"train/loss", "val/loss", "val/regret", "val/accuracy", "val/tau"} <= rows[0].keys()
    assert rows[1]["train/loss"] == float(trainer.callback_metrics["train/loss"]) != rows[0]["train/loss"]

    fit(table, tmp_path, 4, tmp_path / LAST)
    again = read_history(tmp_path / HISTORY)
    assert again[:2] == rows and [row["epoch"] for row in again] == [0, 1, 2, 3]
    assert json.loads((tmp_path / HISTORY).read_text().splitlines()[3]) == again[3]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert read_history(tmp_path / HISTORY) == []
    for text in ('{"epoch": 0}\n{"epo', "[1]\n", '{"step": 0}\n'):
        (tmp_path / HISTORY).write_text(text)
        with pytest.raises(UserError, match=r"history\.jsonl"):
            read_history(tmp_path / HISTORY)
