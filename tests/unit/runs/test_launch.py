"""Exit codes, error lines and interrupts of Hydra jobs, in this process and in others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockpilot.config import CONF_DIR

APP = """
import os, time
from dataclasses import dataclass
import hydra
from blockpilot.errors import UserError
from blockpilot.runs.launch import launch, run_job

@dataclass
class Settings:
    x: int = 0

def work(settings, folder, group):
    (folder / "gpus.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    if settings.x == 1:
        raise UserError("x=1 is not allowed; expected another")
    if settings.x == 2:
        raise RuntimeError("a bug")
    if settings.x == 3 and not (folder / "started").exists():
        (folder / "started").write_text(str(os.getpid()))
        time.sleep(60)
    (folder / "done.txt").write_text(str(group))

@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(config):
    run_job(config, Settings, work)

if __name__ == "__main__":
    launch(main)
"""
PLUGINS = {
    "basic": "hydra",
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
}


def need(launcher: str) -> None:
    pytest.importorskip(PLUGINS[launcher], reason="needs the extras cluster and joblib")


@pytest.fixture
def app(tmp_path: Path) -> list[str]:
    """A command with this project's Hydra settings and a job that can fail; its folders are ``run`` and ``sweep``."""
    (tmp_path / "conf/hydra").mkdir(parents=True)
    shutil.copy(CONF_DIR / "hydra/default.yaml", tmp_path / "conf/hydra")
    (tmp_path / "conf/app.yaml").write_text("defaults: [{hydra: default}, _self_]\nx: 0\n")
    (tmp_path / "app.py").write_text(APP)
    return [sys.executable, "app.py", "hydra.run.dir=run", "hydra.sweep.dir=sweep"]


def finished(command: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def started(command: list[str], folder: Path) -> tuple[subprocess.Popen[str], int]:
    """The command and the process of its first job, once that is at work.

    It has a group of its own: Ctrl-C in a terminal reaches every process of a command.
    """
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (jobs := [path.read_text() for path in (folder / "sweep").glob("*/started")]) or not jobs[0]:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=1)
        time.sleep(0.05)
    return process, int(jobs[0])


def test_a_single_run(app: list[str], tmp_path: Path) -> None:
    assert finished(app, tmp_path)[0] == 0
    assert (tmp_path / "run/done.txt").read_text() == "None"
    code, output = finished([*app, "x=1"], tmp_path)
    assert (code, output.strip()) == (2, "error: x=1 is not allowed; expected another")
    assert finished([*app, "x=one"], tmp_path)[0] == 2
    code, output = finished([*app, "x=2"], tmp_path)
    assert code == 1 and "RuntimeError: a bug" in output


@pytest.mark.parametrize("launcher", PLUGINS)
def test_failed_jobs_of_a_multirun_stop_no_other_and_are_told(app: list[str], tmp_path: Path, launcher: str) -> None:
    need(launcher)
    multirun = [*app, f"hydra/launcher={launcher}"]
    code, output = finished([*multirun, "x=1,0,one,4", "-m"], tmp_path)
    assert code == 2, output
    assert "Traceback" not in output
    for job in (1, 3):
        assert (tmp_path / f"sweep/{job}/done.txt").is_file()
    assert "error: job 0: x=1 is not allowed; expected another (x=1)\n" in output
    assert "error: job 2: x: Value 'one'" in output and "(x=one)\n" in output
    assert output.index("error: job 0:") < output.index("error: job 2:")
    assert sorted(path.name for path in (tmp_path / "sweep").glob("*.txt")) == ["failed-0.txt", "failed-2.txt"]

    # the same folder again, all well: the old errors are forgotten
    code, output = finished([*multirun, "x=0,4", "-m"], tmp_path)
    assert code == 0, output
    assert "error" not in output and not list((tmp_path / "sweep").glob("*.txt"))


@pytest.mark.parametrize("launcher", PLUGINS)
def test_an_interrupt_is_told_and_ends_all_jobs(app: list[str], tmp_path: Path, launcher: str) -> None:
    need(launcher)
    process, _ = started([*app, f"hydra/launcher={launcher}", "x=3,3", "-m"], tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "interrupted; labels collected so far are kept" in output
    deadline = time.monotonic() + 30
    while _group_is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_is_alive(process.pid)
    assert not list((tmp_path / "sweep").glob("*/done.txt"))


def test_a_job_that_its_launcher_puts_off_is_run_again(app: list[str], tmp_path: Path) -> None:
    """As at a time limit or a preemption: submitit is told by a signal and ends the job with a code of its own."""
    need("submitit_local")
    process, job = started([*app, "hydra/launcher=submitit_local", "x=3", "-m"], tmp_path)
    os.kill(job, signal.SIGUSR2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert (tmp_path / "sweep/0/done.txt").is_file()


def test_local_jobs_see_the_gpus_they_ask_for(app: list[str], tmp_path: Path) -> None:
    """submitit hides all GPUs from a job that asks for none, and shows the same ones to all jobs otherwise."""
    need("submitit_local")
    multirun = [*app, "hydra/launcher=submitit_local", "x=0,4"]
    for asked, seen in (([], ""), (["hydra.launcher.gpus_per_node=2"], "0,1")):
        assert finished([*multirun, *asked, "-m"], tmp_path)[0] == 0
        assert [(tmp_path / f"sweep/{job}/gpus.txt").read_text() for job in (0, 1)] == [seen, seen]


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
