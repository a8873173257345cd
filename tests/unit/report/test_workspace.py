"""The W&B workspace: it names only what runs log, is printed without network, and is saved where W&B answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockpilot.config import names_of
from blockpilot.dashboard import main
from blockpilot.report import read_run, run_charts
from blockpilot.report.metric_keys import SUMMARIES
from tests.metric_page import documented


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    pytest.importorskip("wandb_workspaces", reason="needs the extra dashboard")
    assert main(["--dry-run", "--entity", "me", "--project", "blocks", "--name", "mine"]) == 0
    return json.loads(capsys.readouterr().out)


def texts(value: object) -> Iterator[str]:
    """All keys and values that are text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def test_every_metric_is_a_documented_key(printed: dict[str, Any]) -> None:
    named = {one.removeprefix("summary:") for one in texts(printed) if re.search(r"\b(train|val|test|eval)/", one)}
    patterns = {one for one in named if one.startswith("^")}
    assert patterns == {"^train/accuracy_[0-9]+$"} and "train/accuracy_N" in documented()
    summaries = {f"{key}.{summary}": key for key, summary in SUMMARIES.items()}
    keys = {summaries.get(one, one) for one in named - patterns}
    assert {"eval/tau", "eval/tau_always", "eval/tau_gain_low", "train/loss", "val/regret", "test/regret"} <= keys
    assert keys <= documented()


def test_every_setting_is_a_key_of_the_configuration(printed: dict[str, Any]) -> None:
    named = {one for one in texts(printed) if re.fullmatch(r"(config:)?\w+\.value\.\w+", one)}
    keys = {one.removeprefix("config:").replace(".value.", ".") for one in named}
    assert {"predictor.k", "predictor.depth", "predictor.width", "preprocess.kind"} <= keys
    assert keys <= set(names_of("train", {})[0])


def test_every_chart_and_table_of_a_run_has_a_panel(printed: dict[str, Any], built: Path) -> None:
    media = {one.removeprefix("figures/") for one in texts(printed) if one.startswith("figures/")}
    charts = {chart.name for chart in run_charts(read_run(built))}
    assert charts <= media and len(charts) >= len(media) - 1
    assert {"policies", "decisions"} <= set(texts(printed))
    assert (printed["entity"], printed["project"], printed["displayName"]) == ("me", "blocks", "mine")


def test_without_network_saving_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="needs the extra dashboard")
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_API_KEY": "a" * 40}
    done = subprocess.run(
        [sys.executable, "-m", "blockpilot.dashboard"], capture_output=True, text=True, env={**os.environ, **nowhere}
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot be saved: http://127.0.0.1:9 does not answer" in done.stderr and "--dry-run" in done.stderr


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["--dry-run"]) == 2
    assert "pip install -c constraints.txt -e '.[dashboard]'" in capsys.readouterr().err
