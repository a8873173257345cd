"""The embedded pair and its test prompts, loaded once per worker; commands run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import blockpilot as bp

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pair() -> bp.Pair:
    return bp.load_pair("tiny")


@pytest.fixture(scope="session")
def rows() -> list[dict]:
    """Single-turn rows of the test prompts."""
    lines = (ROOT / "data/prompts/tiny_test.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if len(row["turns"]) == 1]


@pytest.fixture(scope="session")
def prompts(pair: bp.Pair, rows: list[dict]) -> list[list[int]]:
    return [pair.encode(row["turns"]) for row in rows]


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    output: str
    seconds: float


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Finished]:
    """Runs ``python ARGUMENTS`` in the project, with caches and outputs in the test's own folder."""

    def run_command(*arguments: str, quick: bool = True, environment: Sequence[tuple[str, str]] = ()) -> Finished:
        import os

        given = " ".join(arguments)
        command = [sys.executable, *arguments]
        if "cache_dir=" not in given and "blockpilot.profile" not in given:
            command.append(f"cache_dir={tmp_path / 'cache'}")
        if "-m" not in arguments[1:] and "hydra.run.dir" not in given:
            command.append(f"hydra.run.dir={tmp_path / 'run'}")
        if quick:
            command += QUICK if arguments[0] == "train.py" else QUICK_COLLECT
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, **dict(environment)}
        )
        return Finished(done.returncode, done.stdout + done.stderr, time.monotonic() - began)

    return run_command


QUICK_COLLECT = ["dataset.tiny.train.limit=24", "dataset.tiny.test.limit=8", "generation.max_new_tokens=40"]
QUICK = [*QUICK_COLLECT, "trainer.max_epochs=2", "predictor.width=64", "evaluation.num_prompts=3"]
