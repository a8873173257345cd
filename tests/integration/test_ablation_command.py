"""An ablation as a user makes it: a multirun over settings and seeds, then its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from blockpilot.report.__main__ import main

from .conftest import Finished


def test_a_multirun_becomes_a_table_and_a_figure(
    run: Callable[..., Finished], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    done = run("train.py", "-m", "predictor.depth=1,2", "seed=0,1", "logger=none", "evaluation.latency_profile=null",
               "evaluation.bootstrap_samples=20", f"hydra.sweep.dir={folder}")  # fmt: skip
    assert done.code == 0, done.output
    assert len(list((tmp_path / "cache").iterdir())) == 1  # one pair, and of it one set of labels for all jobs
    assert [len(list(pair.iterdir())) for pair in (tmp_path / "cache").iterdir()] == [2]
    assert main(["ablation", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "predictor.depth on all test prompts" in shown and "the test prompts are the same" in shown
    assert "left out" not in shown
    assert (folder / "ablation.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((folder / "ablation.json").read_text())
    assert values["keys"] == ["predictor.depth"]
    assert [(one["values"], one["jobs"], one["seeds"]) for one in values["settings"]] == [
        ({"predictor.depth": "1"}, [0, 1], [0, 1]),
        ({"predictor.depth": "2"}, [2, 3], [0, 1]),
    ]
    for one in values["settings"]:
        for name in ("test/regret", "test/tau", "test/regret_always", "test/tau_always", "test/accuracy"):
            figure = one["figures"][name]
            own = [json.loads((folder / f"{job}/metrics.json").read_text())[name] for job in one["jobs"]]
            assert figure["by_job"] == own and figure["mean"] == pytest.approx(sum(own) / 2)
        assert one["figures"]["test/tau_always"]["low"] == one["figures"]["test/tau_always"]["high"]
        gain = one["figures"]["test/tau"]["mean"] - one["figures"]["test/tau_always"]["mean"]
        assert one["figures"]["test/tau_gain"]["mean"] == pytest.approx(gain)
        assert one["verdict"] in ("better", "worse", "not distinguishable")
    assert main(["build", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(
        f'<a href="{job}/report.html">' in page and (folder / f"{job}/report.html").is_file() for job in range(4)
    )
    # a job's page comes from its files alone
    before = (folder / "0/report.html").read_text(encoding="utf-8")
    (folder / "0/report.html").unlink()
    assert main(["build", str(folder / "0")]) == 0
    assert (folder / "0/report.html").read_text(encoding="utf-8") == before
