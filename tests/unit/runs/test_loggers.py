"""Loggers of a job: tags, packages that are not here, files that stay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import wandb

from blockpilot.config import LoggerConfig
from blockpilot.errors import UserError
from blockpilot.runs.loggers import job_logger, require_logger


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B keeps to the test's folder and finds no key."""
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_every_job_of_a_folder_keeps_its_figures(tmp_path: Path, kind: str) -> None:
    if kind == "tensorboard":
        pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    names = (kind, f"{kind}-2", f"{kind}-3")
    there: dict[Path, bytes] = {}
    for value, name in enumerate(names, start=1):
        with job_logger(LoggerConfig(kind=kind), tmp_path, {"seed": value}, None, "train", resume=value > 1) as logger:
            assert logger is not None
            logger.log_metrics({"val/tau": float(value)}, step=0)
        assert {path: path.read_bytes() for path in there} == there
        there |= {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert sorted({path.parent.name for path in there}) == sorted(names)
    if kind == "csv":
        found = [(tmp_path / name / "metrics.csv").read_text() for name in names]
        assert [text.split()[-1] for text in found] == ["0,1.0", "0,2.0", "0,3.0"]


def test_a_job_that_fails_keeps_its_figures_and_ends_its_run(tmp_path: Path, own_places: None) -> None:
    for kind in ("csv", "wandb"):
        with pytest.raises(ZeroDivisionError), job_logger(LoggerConfig(kind=kind), tmp_path, {}, None, "train") as log:
            assert log is not None
            log.log_metrics({"val/tau": 1.0}, step=0)
            raise ZeroDivisionError
    assert "1.0" in (tmp_path / "csv/metrics.csv").read_text()
    assert wandb.run is None


def test_names_are_cut_to_what_a_tag_may_be_and_told_once(tmp_path: Path, own_places: None) -> None:
    config = LoggerConfig(kind="wandb", mode="offline", tags=["mine", "tiny"])
    with job_logger(config, tmp_path, {}, "sweep", "evaluate", ["m" * 70, "tiny", ""]) as logger:
        assert logger is not None
        run = logger.experiment  # type: ignore[attr-defined]
        assert (run.tags, run.group, run.job_type) == (("m" * 64, "tiny", "mine"), "sweep", "evaluate")


def test_a_tag_that_is_too_long_is_one_line() -> None:
    for tag in ("", "x" * 65):
        with pytest.raises(UserError, match=r"logger\.tags=.* is not allowed; expected tags of 1 to 64 letters"):
            LoggerConfig(tags=["fine", tag])


def test_without_tensorboard_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"logger=tensorboard needs .* extra tensorboard"):
        require_logger(LoggerConfig(kind="tensorboard"))


def test_online_without_a_key_is_one_line(tmp_path: Path, own_places: None) -> None:
    opened = job_logger(LoggerConfig(kind="wandb", mode="online"), tmp_path, {}, None, "train")
    with pytest.raises(UserError, match=r"logger.mode=online: .*key.*; logger.mode=offline needs neither"), opened:
        pass
