"""W&B: a real offline run receives the table and the charts; other loggers receive nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from PIL import Image

from blockpilot.metrics import PolicySummary
from blockpilot.report import log_summary, summary_rows


def test_offline_run_holds_the_table_and_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summaries: list[PolicySummary]
) -> None:
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    chart = tmp_path / "chart.png"
    Image.new("RGB", (640, 480)).save(chart)
    logger = WandbLogger(project="test", save_dir=tmp_path, offline=True)
    try:
        log_summary(logger, summaries, {"tau-by-policy": chart}, {"math": summaries[1:]})
        folder = Path(logger.experiment.dir)
        logged = dict(logger.experiment.summary)
    finally:
        wandb.finish()
    assert {"policies", "figures/tau-by-policy"} <= set(logged)
    (table,) = folder.glob("media/table/policies_*.table.json")
    content = json.loads(table.read_text())
    rows = summary_rows(summaries)
    assert content["columns"] == ["dataset", *rows[0]]
    for row in rows:
        row["choices"] = json.dumps(row["choices"])
    assert content["data"] == [["all", *row.values()] for row in rows] + [["math", *row.values()] for row in rows[1:]]
    (image,) = folder.glob("media/images/figures/*.png")
    assert Image.open(image).width == 640


def test_other_loggers_are_left_alone(tmp_path: Path, summaries: list[PolicySummary]) -> None:
    log_summary(None, summaries, {})
    log_summary(CSVLogger(tmp_path), summaries, {"tau-by-policy": tmp_path / "chart.png"})
    assert list(tmp_path.iterdir()) == []
