"""A drafter trained by the command: what is left in its folder, and a killed training that goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import blockpilot as bp

from .conftest import ROOT

STEPS, PER_VALIDATION = 12, 4


def command(folder: Path, *more: str) -> list[str]:
    """A training of seconds, whose texts lie beside its output."""
    return [
        sys.executable, "-m", "blockpilot.train_drafter", f"hydra.run.dir={folder}",
        f"answers_dir={folder.parent / 'answers'}", "dataset.tiny.train.limit=24", "dataset.tiny.test.limit=6",
        "drafter_training.block_size=6", "drafter_training.num_layers=2", "drafter_training.num_taps=2",
        "drafter_training.max_new_tokens=40", f"drafter_training.max_steps={STEPS}",
        f"drafter_training.steps_per_validation={PER_VALIDATION}", "drafter_training.validation_share=0.2",
        "drafter_training.self_written=6", "drafter_training.temperatures=[0.0,1.0]",
        "drafter_training.soft_weight=0.5", "logger=csv", *more,
    ]  # fmt: skip


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *more), cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("drafter") / "whole"
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_output_is_a_drafter_with_its_figures_and_its_card(whole: Path, prompts: list[list[int]]) -> None:
    metrics = json.loads((whole / "metrics.json").read_text())
    assert metrics["val/tau"] > 1
    sizes = range(2, 13)
    measured = [metrics[f"test/tau_b{b}/tiny-test"] for b in sizes]
    config = json.loads((whole / "drafter/config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6
    assert {t.dtype for t in load_file(whole / "drafter/model.safetensors").values()} == {torch.bfloat16}
    card = (whole / "drafter/README.md").read_text()
    assert " | ".join(f"{tau:.2f}" for tau in measured) in card
    assert "tiny-train-t0-" in card and "tiny-train-t1-" in card and "self-t0-" in card

    trained = bp.load_pair("tiny", drafter=whole / "drafter")
    assert trained.block_size == 6
    out = bp.generate(trained, prompts[0], policy=bp.FixedPolicy(6), max_new_tokens=40)
    plain = bp.generate(trained, prompts[0], policy=bp.FixedPolicy(1), max_new_tokens=40)
    assert out.output_ids == plain.output_ids


def test_the_figures_of_the_card_are_those_of_the_drafter_as_stored(whole: Path) -> None:
    """Replay with the drafter loaded from its folder gives the tau that the training reported."""
    pair = bp.load_pair("tiny", drafter=whole / "drafter")
    lines = (ROOT / "data/prompts/tiny_test.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    rows = [json.loads(line) for line in lines]
    assert all(len(row["turns"]) == 1 for row in rows)
    asked = [pair.encode(row["turns"]) for row in rows]
    records = bp.oracle.replay(pair, asked, block_sizes=[3, 6], max_new_tokens=40)
    metrics = json.loads((whole / "metrics.json").read_text())
    for size in (3, 6):
        mean = sum(record.tau[size] for record in records) / len(records)
        assert metrics[f"test/tau_b{size}/tiny-test"] == pytest.approx(mean, abs=1e-6)


def test_a_killed_training_ends_where_an_uninterrupted_one_does(whole: Path) -> None:
    parts = whole.parent / "parts"
    training = subprocess.Popen(command(parts), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = parts / "checkpoints/last.ckpt"
    deadline = time.monotonic() + 240
    while not checkpoint.exists() and training.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(training.pid, signal.SIGKILL)
    training.wait()
    assert checkpoint.exists() and not (parts / "drafter").exists(), "it must have been killed in between"
    other = run(parts, "drafter_training.resume=true", "drafter_training.learning_rate=0.5")
    assert other.returncode == 2
    told = f"drafter_training.resume: {checkpoint} was made with drafter_training.learning_rate=0.001, this run has 0.5"
    assert told in other.stdout + other.stderr
    resumed = run(parts, "drafter_training.resume=true")
    assert resumed.returncode == 0 and "going on from" in resumed.stdout, resumed.stdout + resumed.stderr
    expected, found = (load_file(folder / "drafter/model.safetensors") for folder in (whole, parts))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (whole, parts)]
    assert metrics[0] == metrics[1]


def test_a_full_disk_leaves_what_was_there(whole: Path) -> None:
    """As on a full disk: the system refuses the bytes of a checkpoint behind its first megabyte."""
    full = whole.parent / "full"
    shutil.copytree(whole, full)
    checkpoint = full / "checkpoints/last.ckpt"
    before = {path: path.read_bytes() for path in (checkpoint, *(full / "drafter").iterdir())}
    assert checkpoint.stat().st_size > 2**20
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
        "runpy.run_module('blockpilot.train_drafter', run_name='__main__')"
    )
    python, _, _, *settings = command(full)
    done = subprocess.run([python, "-c", limited, *settings], cwd=ROOT, capture_output=True, text=True, timeout=280)
    output = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in output, output
    assert f"error: hydra.run.dir: {checkpoint} cannot be written: File too large" in output
    assert all(path.read_bytes() == content for path, content in before.items())


def test_training_goes_on_from_a_trained_drafter(whole: Path) -> None:
    folder = whole.parent / "further"
    more = (f"drafter_training.initial={whole / 'drafter'}", "drafter_training.max_steps=2", "seed=0")
    done = run(folder, *more, "drafter_training.learning_rate=1e-9")
    assert done.returncode == 0, done.stdout + done.stderr
    earlier, later = (json.loads((f / "metrics.json").read_text())["val/tau"] for f in (whole, folder))
    assert later == pytest.approx(earlier, abs=1e-6), "two steps of next to nothing leave it as it was"
    other = run(folder, *more, "drafter_training.num_layers=3")
    assert other.returncode == 2 and "has num_layers 2, this run asks for 3" in other.stdout + other.stderr
