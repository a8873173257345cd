"""W&B and TensorBoard: what real, offline runs receive of an evaluation; other loggers receive nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from PIL import Image

from blockpilot.metrics import DecodedPrompt, PolicySummary
from blockpilot.report import log_artifacts, log_summary, summary_rows, tracking


@pytest.fixture
def logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[WandbLogger]:
    """Of an offline run, or of another mode."""
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    mode: Any = getattr(request, "param", "offline")
    run = wandb.init(project="test", dir=tmp_path, mode=mode)
    yield WandbLogger(save_dir=tmp_path, experiment=run)
    run.finish()


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    path = tmp_path / "chart.png"
    Image.new("RGB", (640, 480)).save(path)
    return path


def table(logger: WandbLogger, name: str) -> dict:
    (path,) = Path(logger.experiment.dir).glob(f"media/table/{name}_*.table.json")
    return json.loads(path.read_text())


def test_an_offline_run_holds_tables_and_figures(
    logger: WandbLogger, chart: Path, summaries: list[PolicySummary], decoded: list[DecodedPrompt]
) -> None:
    log_summary(logger, summaries, decoded, {"tau-by-policy": chart}, {"math": summaries[1:]}, step=7)
    assert {"policies", "decisions", "figures/tau-by-policy"} <= set(logger.experiment.summary.keys())
    assert logger.experiment.summary["trainer/global_step"] == 7
    content, rows = table(logger, "policies"), summary_rows(summaries)
    assert content["columns"] == ["dataset", *rows[0]]
    for row in rows:
        row["choices"] = json.dumps(row["choices"])
    assert content["data"] == [["all", *row.values()] for row in rows] + [["math", *row.values()] for row in rows[1:]]
    content = table(logger, "decisions")
    assert len(content["data"]) == len(decoded)
    first, last = (dict(zip(content["columns"], content["data"][place], strict=True)) for place in (0, 5))
    assert (first["policy"], first["tau"], first["acceptance_lengths"]) == ("autoregressive", 1, " ".join("1" * 24))
    assert (last["prompt_id"], last["rounds"], last["tau"], last["block_sizes"]) == ("p5", 0, None, "")
    (image,) = Path(logger.experiment.dir).glob("media/images/figures/*.png")
    assert Image.open(image).width == 640


def test_too_many_decisions_are_cut_by_whole_prompts_and_told(
    logger: WandbLogger, summaries: list[PolicySummary], decoded: list[DecodedPrompt],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(tracking, "MOST_DECISIONS", 15)
    with caplog.at_level(logging.INFO):
        log_summary(logger, summaries, decoded)
    content = table(logger, "decisions")
    kept = [row[content["columns"].index("prompt_id")] for row in content["data"]]
    assert sorted(kept) == ["p0"] * 4 + ["p2"] * 4 + ["p4"] * 4
    assert "the logged table of decisions has 3 of 6 prompts" in caplog.text


@pytest.mark.parametrize("logger", ["disabled"], indirect=True)
def test_a_disabled_run_takes_everything_and_writes_nothing(
    logger: WandbLogger, chart: Path, tmp_path: Path, summaries: list[PolicySummary], decoded: list[DecodedPrompt]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    log_summary(logger, summaries, decoded, {"tau-by-policy": chart})
    log_artifacts(logger, [tmp_path / "nowhere/manifest.json"], tmp_path / "policy")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_wandb_cannot_store_is_a_line(
    logger: WandbLogger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    summaries: list[PolicySummary], decoded: list[DecodedPrompt],
) -> None:  # fmt: skip
    log_artifacts(logger, [tmp_path / "gone/manifest.json"])
    assert "artifacts could not be logged (FileNotFoundError" in caplog.text
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "a file"))
    log_summary(logger, summaries, decoded)
    assert "tables and figures could not be logged (PermissionError" in caplog.text


def test_tensorboard_gets_the_table_as_text_and_the_figures(
    tmp_path: Path, chart: Path, summaries: list[PolicySummary], decoded: list[DecodedPrompt]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path, name="", version="board")
    log_summary(logger, summaries, decoded, {"tau-by-policy": chart}, step=3)
    logger.finalize("success")
    found = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    (image,) = found.Images("figures/tau-by-policy")
    assert (image.step, image.width, image.height) == (3, 640, 480)
    text = found.Tensors("policies/text_summary")[0].tensor_proto.string_val[0].decode()
    lines = text.splitlines()
    assert len(lines) == 2 + len(summaries) and len({line.count(" | ") for line in lines}) == 1


def test_other_loggers_are_left_alone(
    tmp_path: Path, summaries: list[PolicySummary], decoded: list[DecodedPrompt]
) -> None:
    for logger in (None, CSVLogger(tmp_path)):
        log_summary(logger, summaries, decoded, {"tau-by-policy": tmp_path / "chart.png"})
        log_artifacts(logger, [tmp_path / "manifest.json"], tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []
