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
from typing import Any
import hydra
from blockpilot.errors import UserError
from blockpilot.runs.launch import launch, run_job

@dataclass
class Settings:
    x: int = 0
    trainer: Any = None

def work(settings, folder, group):
    (folder / "gpus.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    if settings.x == 1:
        raise UserError("x=1 is not allowed; expected another")
    if settings.x == 2:
        raise RuntimeError("a bug")
    if settings.x == 3 and not (folder / "started").exists():
        (folder / "started").write_text(str(os.getpid()))
        time.sleep(60)
    if settings.x == 8:
        import resource, torch
        from safetensors.torch import save_file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        save_file({"weight": torch.zeros(1000)}, folder / "model.safetensors")
    if settings.x == 9:
        (folder / "checkpoints").mkdir()
        raise KeyboardInterrupt
    (folder / "done.txt").write_text(str(group))

@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(config):
    run_job(config, Settings, work)

if __name__ == "__main__":
    launch(main, "app")
"""
SEARCH = """
import math
from dataclasses import dataclass
from pathlib import Path
import hydra
from hydra.experimental.callback import Callback
from blockpilot.errors import UserError
from blockpilot.runs.launch import launch, optimized, run_job

@dataclass
class Settings:
    x: float = 0.0
    optimized_metric: str = "loss"

def work(settings, folder, group):
    if settings.x > 2:
        raise UserError(f"x={settings.x} is too large")
    return {"loss": (settings.x - 1) ** 2, "undefined": math.nan, "name": "text", "rows": []}

class Returned(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        Path(config.hydra.runtime.output_dir, "returned.txt").write_text(repr(job_return.return_value))

@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(config):
    return run_job(config, Settings, optimized(work))

if __name__ == "__main__":
    launch(main, "app")
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
    """Exit code and all that was shown, in that order."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout


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
    hint = "(HYDRA_FULL_ERROR=1 shows where this comes from)"
    assert (code, output.splitlines()) == (2, ["error: x=1 is not allowed; expected another", hint])
    assert finished([*app, "x=one"], tmp_path)[0] == 2
    # weights that the disk has no room for: their library has an error of its own
    code, output = finished([*app, "x=8"], tmp_path)
    assert (code, output.splitlines()[1:]) == (2, [hint]), output
    assert output.startswith("error: hydra.run.dir: ") and "cannot be written: File too large" in output
    # a bug's traceback begins at the job: what is above it is Hydra's
    code, output = finished([*app, "x=2"], tmp_path)
    assert code == 1 and "RuntimeError: a bug" in output
    assert "in run_job" in output and "hydra/_internal" not in output


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


@pytest.mark.parametrize("x", [1, 2])
def test_where_tracebacks_are_asked_for_they_are_whole(app: list[str], tmp_path: Path, x: int) -> None:
    code, output = finished(["env", "HYDRA_FULL_ERROR=1", *app, f"x={x}"], tmp_path)
    assert code == (2 if x == 1 else 1)
    assert "Traceback" in output and ("hydra/_internal" in output or x == 1) and "shows where" not in output


def test_the_errors_of_a_multirun_that_a_bug_ends_come_last(app: list[str], tmp_path: Path) -> None:
    code, output = finished([*app, "x=1,2,4", "-m"], tmp_path)
    assert code == 2 and "RuntimeError: a bug" in output
    assert output.rstrip().splitlines()[-1].endswith("error: job 0: x=1 is not allowed; expected another (x=1)")
    code, output = finished([*app, "x=0,2,4", "-m"], tmp_path)
    assert code == 1 and "error: job" not in output


# --- what a job hands to its sweeper


@pytest.fixture
def search(app: list[str], tmp_path: Path) -> list[str]:
    """A command whose jobs are worth ``(x - 1) ** 2``, and leave what they handed over in ``returned.txt``."""
    settings = "defaults: [{hydra: default}, _self_]\nx: 0\noptimized_metric: loss\n"
    (tmp_path / "conf/app.yaml").write_text(settings)
    (tmp_path / "app.py").write_text(SEARCH)
    return [*app, "+hydra.callbacks.returned={_target_: __main__.Returned}"]


@pytest.mark.parametrize(
    ("overrides", "returned"),
    [
        (["x=3"], "None"),
        (["x=0.5"], "0.25"),
        (["optimized_metric=undefined"], "None"),
        (["optimized_metric=name"], "None"),
        (["optimized_metric=typo"], "None"),
    ],
)
def test_a_job_returns_its_figure_or_nothing(
    search: list[str], tmp_path: Path, overrides: list[str], returned: str
) -> None:
    code, output = finished([*search, *overrides, "-m"], tmp_path)  # a grid needs no figure
    assert code == (2 if "x=3" in overrides else 0), output
    assert (tmp_path / "sweep/0/returned.txt").read_text() == returned


def test_a_single_run_ends_well_without_its_figure(search: list[str], tmp_path: Path) -> None:
    code, output = finished([*search, "optimized_metric=typo"], tmp_path)
    assert (code, output) == (0, "")
    assert (tmp_path / "run/returned.txt").read_text() == "None"


OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0"]


def need_optuna() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra optuna")


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_search_finds_the_best_and_goes_on_after_failed_trials(
    search: list[str], tmp_path: Path, launcher: str
) -> None:
    need_optuna()
    need(launcher)
    overrides = ["x=choice(0.5,0.9,3)", "hydra.sweeper.n_trials=9", f"hydra/launcher={launcher}"]
    code, output = finished([*search, *OPTUNA, *overrides, "-m"], tmp_path)
    assert code == 2 and "Traceback" not in output, output
    result = (tmp_path / "sweep/optimization_results.yaml").read_text()
    assert "best_value: 0.00999" in result or "best_value: 0.01" in result
    assert len(list((tmp_path / "sweep").glob("*/returned.txt"))) == 9
    assert output.rstrip().splitlines()[-1].endswith(": x=3.0 is too large (x=3)")


def test_a_search_without_any_figure_ends_with_the_users_lines(search: list[str], tmp_path: Path) -> None:
    need_optuna()
    code, output = finished([*search, *OPTUNA, "x=choice(3,4)", "hydra.sweeper.n_trials=2", "-m"], tmp_path)
    assert code == 2
    last = output.rstrip().splitlines()[-2:]
    assert ["error: job 0: " in last[0], "error: job 1: " in last[1]] == [True, True]
    assert all("is too large" in line for line in last)


@pytest.mark.parametrize("name", ["typo", "undefined", "name"])
def test_a_search_for_what_is_no_figure_is_told_the_figures(search: list[str], tmp_path: Path, name: str) -> None:
    need_optuna()
    overrides = ["x=interval(0.0,2.0)", f"optimized_metric={name}", "hydra.sweeper.n_trials=1"]
    code, output = finished([*search, *OPTUNA, *overrides, "-m"], tmp_path)
    assert code == 2
    line = output.rstrip().splitlines()[-1]
    assert f"job 0: optimized_metric='{name}' has no value in this run; expected one of loss (" in line


def test_a_study_on_disk_goes_on(search: list[str], tmp_path: Path) -> None:
    need_optuna()
    study = [f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db", "hydra.sweeper.study_name=one"]
    overrides = [*study, "x=interval(0.0,2.0)", "hydra.sweeper.n_trials=2"]
    for _ in range(2):
        code, output = finished([*search, *OPTUNA, *overrides, "-m"], tmp_path)
        assert code == 0, output
    import sqlite3

    with sqlite3.connect(tmp_path / "study.db") as base:
        assert base.execute("select count(*), sum(state = 'COMPLETE') from trials").fetchone() == (4, 4)


def test_an_interrupted_training_is_told_how_it_goes_on(app: list[str], tmp_path: Path) -> None:
    code, output = finished([*app, "x=9", "+trainer.resume=false"], tmp_path)
    assert code == 130 and output.rstrip().endswith(
        f"the same command goes on from them; trainer.resume=true hydra.run.dir={tmp_path / 'run'} goes on with the "
        "training"
    )


@pytest.mark.parametrize("launcher", PLUGINS)
def test_an_interrupt_is_told_and_ends_all_jobs(app: list[str], tmp_path: Path, launcher: str) -> None:
    need(launcher)
    process, _ = started([*app, f"hydra/launcher={launcher}", "x=3,3", "-m"], tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "interrupted; labels and answers made so far are kept" in output
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
