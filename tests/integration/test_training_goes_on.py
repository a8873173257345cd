"""Training that was stopped goes on as if it had not been; training in two processes is training in one."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .conftest import QUICK_COLLECT, Finished

Run = Callable[..., Finished]
SMALL = (*QUICK_COLLECT, "predictor.width=64", "predictor.k=3", "evaluation.method=simulate", "evaluation.policies=[]",
         "evaluation.latency_profile=null")  # fmt: skip


@pytest.fixture
def train(run: Run) -> Run:
    """``python train.py`` with nothing added but the caches' place."""
    return lambda *arguments: run("train.py", *arguments, quick=False)


def figures(folder: Path, prefix: str) -> list[dict[str, float]]:
    """Logged figures by epoch."""
    with (folder / "csv/metrics.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [found for row in rows if (found := {key: row[key] for key in row if key.startswith(prefix)})]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "policy/model.safetensors")


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(train: Run, tmp_path: Path) -> None:
    """Epochs, optimizer, dropout, batches, best score and the W&B run go on; other settings are refused."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = (*SMALL, "trainer.patience=50", f"cache_dir={tmp_path / 'cache'}", "logger.kind=wandb")
    assert train(*common, f"hydra.run.dir={whole}", "trainer.max_epochs=6").code == 0
    first = train(*common, f"hydra.run.dir={parts}", "trainer.max_epochs=3")
    assert first.code == 0, first.output
    saved = torch.load(parts / "checkpoints/last.ckpt", weights_only=True)
    assert saved["epoch"] == 2
    refused = train(*common, f"hydra.run.dir={parts}", "trainer.resume=true", "trainer.learning_rate=0.5")
    assert refused.code == 2
    assert "made with trainer.learning_rate=0.001, this run has 0.5" in refused.output
    done = train(*common, f"hydra.run.dir={parts}", "trainer.max_epochs=6", "trainer.resume=true")
    assert done.code == 0 and "going on from" in done.output, done.output
    expected, resumed = (torch.load(f / "checkpoints/last.ckpt", weights_only=True) for f in (whole, parts))
    assert resumed["epoch"] == expected["epoch"] == 5 and resumed["global_step"] == expected["global_step"]
    assert expected["state_dict"].keys() == resumed["state_dict"].keys()
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name]), name
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name]), name
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (whole, parts)]
    assert metrics[0]["val/regret"] == metrics[1]["val/regret"]
    names = {path.name.rsplit("-", 1)[-1] for path in (parts / "wandb").glob("offline-run-*")}
    assert names == {(parts / "wandb_run_id.txt").read_text().strip()}  # one W&B run


def test_a_damaged_checkpoint_is_told_in_one_line(train: Run, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"not a checkpoint")
    done = train(*SMALL, "logger=none", "trainer.resume=true")
    assert done.code == 2 and f"trainer.resume: {checkpoint} cannot be read" in done.output


def test_a_run_whose_folder_was_copied_goes_on_there(train: Run, tmp_path: Path) -> None:
    """Its best epoch is that of the copy; where a checkpoint is gone or damaged, one line says so."""
    common = (*SMALL, "logger=none", f"cache_dir={tmp_path / 'cache'}", "trainer.max_epochs=2")
    old, new = tmp_path / "old", tmp_path / "new"
    assert train(*common, f"hydra.run.dir={old}").code == 0
    old.rename(new)
    again = (*common, f"hydra.run.dir={new}", "trainer.resume=true")
    first = weights(new)
    done = train(*again)
    assert done.code == 0 and "dirpath" not in done.output, done.output
    assert all(torch.equal(tensor, weights(new)[name]) for name, tensor in first.items())
    best = next((new / "checkpoints").glob("epoch-*.ckpt"))
    best.unlink()
    done = train(*again)
    assert done.code == 2 and f"trainer.resume: there is no {best}" in done.output, done.output
    last = new / "checkpoints/last.ckpt"
    content = bytearray(last.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(byte ^ 255 for byte in content[middle : middle + 200])
    last.write_bytes(content)
    done = train(*again)
    assert done.code == 2 and f"trainer.resume: {last} cannot be read" in done.output, done.output
    for saved in ([1], {"hyper_parameters": {}}):
        torch.save(saved, last)
        done = train(*again)
        assert done.code == 2 and "cannot be read: ValueError: it lacks state_dict" in done.output, done.output


def test_two_processes_give_the_figures_of_one(train: Run, tmp_path: Path) -> None:
    """Sparse gradients; shares of the last batch are uneven."""
    common = (*SMALL, "logger=csv", "device=cpu", "trainer.batch_size=5", "predictor.dropout=0",
              "trainer.max_epochs=3", f"cache_dir={tmp_path / 'cache'}")  # fmt: skip
    found = []
    for trainer in ("default", "ddp"):
        folder = tmp_path / trainer
        done = train(*common, f"trainer={trainer}", f"hydra.run.dir={folder}")
        assert done.code == 0, done.output
        found.append(folder)
    one, two = (figures(folder, "val/") for folder in found)
    assert len(one) == len(two) == 3
    for ours, theirs in zip(one, two, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    losses = [[row["train/loss"] for row in figures(folder, "train/loss")] for folder in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]
    tested = [json.loads((folder / "metrics.json").read_text()) for folder in found]
    assert tested[0]["test/regret"] == pytest.approx(tested[1]["test/regret"])


def test_several_processes_in_a_multirun_are_refused(train: Run, tmp_path: Path) -> None:
    done = train("-m", *SMALL, "logger=none", "trainer=ddp", "seed=0", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.code == 2 and "trainer.devices=2 is not allowed in a multirun" in done.output
