"""From a Hydra job to an exit code: one clear line for an error the user can fix, wherever the job runs.

Knows Hydra's jobs; nothing of what they do. A launcher may run the jobs of a multirun in other processes or on other
machines, so a job leaves its error in a file in the sweep's folder, and the process that launched it reads it there.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from blockpilot.config import to_dataclass, to_yaml
from blockpilot.errors import FULL_ERROR, HINT, ONE_LINE, UserError, full_errors, tell
from blockpilot.runs.overrides import explain

log = logging.getLogger("blockpilot")

T = TypeVar("T")


class Searched(Protocol):
    """A configuration that says which figure of a run a search is after."""

    optimized_metric: str


S = TypeVar("S", bound=Searched)

USER_ERROR, INTERRUPTED = 2, 130
"""Exit codes."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FAILED = "failed-*.txt"
"""In the folder of a sweep: the error of each job that failed, by its number."""
_GRID = "BasicSweeper"
"""Hydra's own sweeper, which asks nothing of its jobs."""
_NOT_COMPOSED = (HydraException, OmegaConfBaseException, ValueError)
"""What Hydra raises about a command line."""
_HELP = "(--help lists groups, presets and the most used keys; --cfg job shows all keys)"
_GO_ON = "interrupted; labels and answers made so far are kept, and the same command goes on from them"


def launch(main: Callable[[], object], command: str) -> None:
    """Runs an entry decorated by Hydra and turns whatever ends it into lines and an exit code.

    What cannot be composed is one line and exit code 2, an interrupt one line and 130. An exception of a job, or of
    what launched it, is a bug: its traceback is shown from the job on, since to see it a user would have to run the
    job again. With ``HYDRA_FULL_ERROR=1`` every traceback is shown, whole. A sweep that ends by an exception has
    printed it; the errors of the jobs that failed before come last, where they are seen.

    Args:
        main: the entry.
        command: its configuration, as in ``conf/``.
    """
    try:
        with _raising():
            main()
    except KeyboardInterrupt:  # while it composed, or waited for jobs in other processes
        print(_GO_ON, file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        code = _tell_why(error, command)
        FailedJobs.tell_of_unfinished()
        sys.exit(code)


def _tell_why(error: Exception, command: str) -> int:
    """Prints what ended the command, and returns its exit code."""
    job, line = _from_the_job_on(error), None
    typed = isinstance(error, HydraException) or (isinstance(error, _NOT_COMPOSED) and not FailedJobs.is_unfinished())
    if job is None and typed:
        line = explain(error, command, sys.argv[1:])
    elif job is None and isinstance(error, OSError) and (reason := _no_room(error)) is not None:
        line = f"hydra.run.dir: {error.filename or 'the output folder'} cannot be written: {reason}"
    if full_errors():
        traceback.print_exc()
    elif line is not None:
        tell(line, _HELP if typed else HINT)
    else:
        traceback.print_exception(error.with_traceback(job or error.__traceback__))
    return 1 if line is None else USER_ERROR


def _no_room(error: OSError | SafetensorError) -> str | None:
    """What the system says where it takes no more bytes; None for another error."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _NO_ROOM else None
    # of the system's error this library keeps the text alone
    told = (os.strerror(number) for number in _NO_ROOM if f"(os error {number})" in str(error))
    return next(told, None)


@contextmanager
def _raising() -> Iterator[None]:
    """Has Hydra raise its errors instead of printing them."""
    before = {name: os.environ.get(name) for name in (FULL_ERROR, ONE_LINE)}
    if not full_errors():
        os.environ |= {FULL_ERROR: "1", ONE_LINE: "1"}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _from_the_job_on(error: Exception) -> TracebackType | None:
    """The traceback without Hydra's frames above the job; None where no job had begun."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not run_job.__code__:
        frame = frame.tb_next
    return frame


def run_job(config: DictConfig, schema: type[T], run: Callable[[T, Path, str | None], object]) -> float | None:
    """One Hydra job: typed configuration, output folder, one clear line for an error the user can fix.

    A single run ends with exit code 2 at such an error. A job of a multirun does not stop the others;
    :class:`FailedJobs` gives the command its exit code.

    Args:
        config: as Hydra composed it.
        schema: its dataclass.
        run: called with the configuration, the output folder and, in a multirun, the name of the sweep.

    Returns:
        What ``run`` returned if that is a float, for Hydra's sweeper; None for anything else, or after an error.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    group = "-".join(Path(hydra.sweep.dir).parts[-2:]) if hydra.mode == RunMode.MULTIRUN else None
    logging.raiseExceptions = False  # a log file on a full disk must not bury the one line that says so
    try:
        typed = to_dataclass(config, schema)
        (folder / "config.yaml").write_text(to_yaml(typed), encoding="utf-8")
        result = run(typed, folder, group)
        return result if isinstance(result, float) else None
    except UserError as error:
        _fail(str(error))
    except (OSError, SafetensorError) as error:
        reason = _no_room(error)
        if reason is None:
            raise
        _fail(f"hydra.run.dir: {getattr(error, 'filename', None) or folder} cannot be written: {reason}")
    except (KeyboardInterrupt, SystemExit) as error:
        # Lightning turns an interrupt into exit code 1; other codes are a launcher's, which may run the job again
        if isinstance(error, SystemExit) and error.code != 1:
            raise
        log.error("%s%s", _GO_ON, _resuming(config, folder))
        sys.exit(INTERRUPTED)
    return None


def _resuming(config: DictConfig, folder: Path) -> str:
    """How to go on with a training that has left a checkpoint; nothing where there is none."""
    group = next((group for group in ("trainer", "drafter_training") if group in config), None)
    if group is None or not (folder / "checkpoints").is_dir():
        return ""
    return f"; {group}.resume=true hydra.run.dir={folder} goes on with the training"


def optimized(run: Callable[[S, Path, str | None], Mapping[str, Any]]) -> Callable[[S, Path, str | None], float | None]:
    """A run that returns the one figure that ``optimized_metric`` names, as sweepers that search want it.

    Only they need it: any other job ends well without such a figure, and returns None.
    """

    def run_one(config: S, folder: Path, group: str | None) -> float | None:
        figures = {name: value for name, value in run(config, folder, group).items() if isinstance(value, float)}
        value = figures.get(config.optimized_metric, math.nan)
        if math.isfinite(value):
            return value
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and not hydra.sweeper._target_.endswith(_GRID):
            known = ", ".join(name for name, figure in figures.items() if math.isfinite(figure))
            raise UserError(
                f"optimized_metric={config.optimized_metric!r} has no value in this run; expected one of {known}"
            )
        return None

    return run_one


def _fail(error: str) -> None:
    """Tells why this job failed: a single run ends, a job of a multirun leaves word for who launched it."""
    log.error("error: %s", error, exc_info=full_errors())
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        if not full_errors():
            log.error(HINT)
        sys.exit(USER_ERROR)
    path = Path(hydra.sweep.dir) / _FAILED.replace("*", str(hydra.job.num))
    path.write_text(f"job {hydra.job.num}: {error} ({' '.join(hydra.overrides.task)})\n", encoding="utf-8")


class FailedJobs(Callback):
    """Where a multirun was launched: tells which jobs failed, whatever ran them, and sets the exit code.

    ``conf/hydra/default.yaml`` names it.
    """

    _unfinished: DictConfig | None = None
    """Of the multirun that this process has started and not ended; Hydra tells its end only where all goes well."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Forgets the errors of an earlier sweep in the same folder."""
        for path in _failed_in(config):
            path.unlink()
        FailedJobs._unfinished = config

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Repeats each job's error, since its log may be in another process's file; exit code 2 if there is any."""
        FailedJobs._unfinished = None
        failed = _failed_in(config)
        for path in failed:
            log.error("error: %s", path.read_text(encoding="utf-8").rstrip())
        if failed:
            sys.exit(USER_ERROR)

    @classmethod
    def is_unfinished(cls) -> bool:
        """Whether a multirun of this process has started and not ended."""
        return cls._unfinished is not None

    @classmethod
    def tell_of_unfinished(cls) -> None:
        """The same for a multirun that ended by an exception; nothing without one."""
        if cls._unfinished is not None:
            cls().on_multirun_end(cls._unfinished)


def _failed_in(config: DictConfig) -> list[Path]:
    """Error files of a sweep in the order of its jobs."""
    return sorted(Path(config.hydra.sweep.dir).glob(_FAILED), key=lambda path: (len(path.name), path.name))
