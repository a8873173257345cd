"""Which run's policy is taken where none is named."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from blockpilot.config import EvaluateConfig, compose_command, to_dataclass, to_yaml
from blockpilot.errors import UserError
from blockpilot.runs.newest import with_newest_policy


def evaluation(*overrides: str) -> EvaluateConfig:
    return to_dataclass(compose_command("evaluate", overrides), EvaluateConfig)


def leave_run(folder: Path, config: EvaluateConfig, age: float) -> None:
    """What a run of this pair leaves that a later one looks at."""
    (folder / "policy").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "policy/config.json").write_text("{}")
    os.utime(folder / "policy/config.json", (1e9 - age, 1e9 - age))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()


def test_the_newest_of_the_same_pair(caplog: pytest.LogCaptureFixture) -> None:
    leave_run(Path("outputs/2026-01-01/10-00-00"), evaluation(), age=30)
    leave_run(Path("outputs/multirun/2026-01-01/11-00-00/2"), evaluation("policy=ema"), age=20)
    leave_run(Path("outputs/other"), evaluation("model=qwen3-8b"), age=10)
    leave_run(Path("outputs/drafter"), evaluation("drafter.path=/elsewhere"), age=5)
    broken = Path("outputs/broken")
    for text in ("a: [", "model: tiny", "- a list"):
        leave_run(broken, evaluation(), age=1)
        (broken / "config.yaml").write_text(text)
        with caplog.at_level(logging.INFO):
            found = with_newest_policy(evaluation()).policy.path
        assert found == "outputs/multirun/2026-01-01/11-00-00/2/policy"
        for path in sorted(broken.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        broken.rmdir()
    assert caplog.messages[0] == f"policy.path is not set: taking the newest run of tiny, {found}"


def test_nothing_else_changes() -> None:
    leave_run(Path("outputs/one"), evaluation(), age=0)
    before = evaluation("policy=per_round", "evaluation.num_prompts=3")
    after = with_newest_policy(before)
    assert before.policy.path is None and after.policy.path == "outputs/one/policy"
    after.policy.path = None
    assert after == before and dataclasses.asdict(after) == dataclasses.asdict(before)


def test_no_run_is_one_line_that_says_what_to_do() -> None:
    with pytest.raises(UserError) as caught:
        with_newest_policy(evaluation())
    assert str(caught.value) == (
        "policy=predictor needs policy.path, the policy folder of a training run, and none of tiny is under outputs; "
        "train one with python train.py model=tiny"
    )
    leave_run(Path("outputs/other"), evaluation("model=qwen3-8b"), age=0)
    with pytest.raises(UserError, match=r"is under outputs \(1 of other pairs is\); train one"):
        with_newest_policy(evaluation())
