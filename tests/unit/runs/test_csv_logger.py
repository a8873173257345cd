"""Figures in CSV files: a job never deletes those of an earlier one in its folder."""

from __future__ import annotations

from pathlib import Path

from blockpilot.config import LoggerConfig
from blockpilot.runs.loggers import job_logger


def test_every_job_of_a_folder_keeps_its_figures(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        with job_logger(LoggerConfig(kind="csv"), tmp_path, {}, None, resume=value > 1) as logger:
            assert logger is not None
            logger.log_metrics({"val/tau": value}, step=0)
            logger.save()
    found = [(tmp_path / name / "metrics.csv").read_text() for name in ("csv", "csv-2", "csv-3")]
    assert [text.split()[-1] for text in found] == ["0,1.0", "0,2.0", "0,3.0"]
