"""A bar on a terminal, few lines in a log, one line at a step's end; a fit is one step."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from blockpilot.report import TrainingProgress, progress_bar
from blockpilot.report import progress as module
from blockpilot.report.progress import duration

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of the project's own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("blockpilot")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[float]]:
    """Seconds of the step's clock, to be set by the test; lines of the log are caught."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, logger="blockpilot"):
        yield now


def test_a_log_gets_a_line_after_1_2_4_minutes_and_one_at_the_end(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with progress_bar("collecting", 1000, where=Path("labels")) as advance:
        for _ in range(1000):
            clock[0] += 1.0
            advance(1)
    assert said(caplog) == [
        "collecting: 60 of 1000 prompts, 1.0/s, 15 min 40 s left",
        "collecting: 120 of 1000 prompts, 1.0/s, 14 min 40 s left",
        "collecting: 240 of 1000 prompts, 1.0/s, 12 min 40 s left",
        "collecting: 480 of 1000 prompts, 1.0/s, 8 min 40 s left",
        "collecting: 960 of 1000 prompts, 1.0/s, 40 s left",
        "collecting: 1000 prompts in 16 min 40 s; written to labels",
    ]


def test_slow_units_are_told_by_their_seconds_and_notes_beside(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with progress_bar("training", 4, "steps") as advance:
        for step in range(2):
            clock[0] += 1000.0
            advance(1, note=f"loss {step}")
    assert said(caplog) == [
        "training: 1 of 4 steps, 1000.0 s each, 50 min 0 s left (loss 0)",
        "training: 2 of 4 steps, 1000.0 s each, 33 min 20 s left (loss 1)",
        "training: 2 steps in 33 min 20 s",
    ]


def test_a_step_that_fails_is_not_told_as_done(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), progress_bar("collecting", 3) as advance:
        advance(1)
        raise KeyError
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


SCRIPT = """
import logging, sys, time
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
from blockpilot.report import progress_bar
with progress_bar("collecting", 3) as advance:
    for number in range(3):
        time.sleep(0.3)
        advance(1, note=f"note {number}")
        logging.warning("a warning in the middle")
print("after")
"""


def on_a_terminal(script: str) -> str:
    main, side = pty.openpty()
    env = os.environ | {"COLUMNS": "140", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=side, stderr=side, env=env) as process:
        os.close(side)
        shown = b""
        while True:
            try:
                chunk = os.read(main, 4096)
            except OSError:  # the other side is closed
                break
            shown += chunk
    os.close(main)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def test_a_terminal_gets_a_bar_with_rate_and_notes_and_whole_lines_above_it() -> None:
    shown = on_a_terminal(SCRIPT)
    assert re.search(r"collecting .*━.*[123]/3 .*prompts .*\d\.\d/s", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    assert "note 2" in shown
    # what stays on the screen once a terminal has carried out the erasures: log lines are whole, the bar is taken back
    left = [erased(line) for line in shown.split("\n")]
    assert left.count("a warning in the middle") == 3
    assert left[-3:-1] == [left[-3], "after"] and re.fullmatch(r"collecting: 3 prompts in \d s", left[-3])
    assert "\x1b[1A\x1b[2K" in shown[shown.rindex("━") :]


def erased(line: str) -> str:
    """A line as it stays: what stands before its last erasure is gone."""
    rest = re.split(r"\x1b\[2K", line)[-1]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", rest).strip("\r")


class Stops(lightning.Callback):
    """Ends the fit by an error in the third epoch."""

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.current_epoch == 2:
            raise RuntimeError("stop")


def fit(
    progress: TrainingProgress,
    folder: Path,
    epochs: int = -1,
    steps: int = -1,
    *more: lightning.Callback,
    **options: str,
) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, max_steps=steps, callbacks=[progress, *more], logger=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    model = BoringModel()
    model.training_step = lambda batch: log_loss(model, batch)  # type: ignore[method-assign]
    trainer.fit(model, DataLoader(torch.randn(8, 32), batch_size=2), **options)  # type: ignore[arg-type]
    trainer.save_checkpoint(folder / "last.ckpt")


def log_loss(model: BoringModel, batch: torch.Tensor) -> torch.Tensor:
    loss = model.loss(model(batch))
    model.log("train/loss", loss, on_step=True)
    return loss


def test_a_fit_is_one_step_and_goes_on_where_it_was(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, logger="blockpilot"):
        fit(TrainingProgress("training", 3, "epochs", ("train/loss",)), tmp_path, 3)
        fit(TrainingProgress("training", 5, "epochs", ()), tmp_path, 5, -1, ckpt_path=str(tmp_path / "last.ckpt"))
        fit(TrainingProgress("learning", 6, "steps", ()), tmp_path, -1, 6)
    lines = [re.sub(r"in \d+ s", "in time", message) for message in said(caplog)]
    assert lines == ["training: 3 epochs in time", "training: 5 epochs in time", "learning: 6 steps in time"]


def test_the_newest_figures_are_notes(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 1e-9)
    with caplog.at_level(logging.INFO, logger="blockpilot"):
        fit(TrainingProgress("training", 40, "steps", ("train/loss", "val/none")), tmp_path, -1, 40)
    assert any(re.search(r"of 40 steps, .* left \(train/loss \d", message) for message in said(caplog))


def test_a_fit_that_fails_closes_its_bar(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    progress = TrainingProgress("training", 5, "epochs", ())
    with caplog.at_level(logging.INFO, logger="blockpilot"), pytest.raises(RuntimeError, match="stop"):
        fit(progress, tmp_path, 5, -1, Stops())
    assert said(caplog) == []
    with caplog.at_level(logging.INFO, logger="blockpilot"):
        fit(progress, tmp_path, 1)
    assert len(said(caplog)) == 1


def test_the_unit_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="unit='hours'; expected epochs or steps"):
        TrainingProgress("training", 1, "hours", ())
