"""One logger per job, opened with the job and closed with it, also when it fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from blockpilot.config import MOST_TAG_LETTERS, LoggerConfig, require
from blockpilot.errors import UserError
from blockpilot.report import define_summaries
from blockpilot.runs.processes import is_first

_OLD_MODES = {"dryrun": "offline", "run": "online"}
"""Names that W&B still takes for its modes."""
_RUN_ID = "wandb_run_id.txt"
"""In the output folder: the W&B run, for a job that goes on."""


def require_logger(config: LoggerConfig) -> None:
    """Whether the logger's package is here, told before anything is computed.

    Raises:
        UserError: it is not.
    """
    if config.kind == "tensorboard" and find_spec("tensorboard") is None:
        raise UserError(
            "logger=tensorboard needs the package tensorboard, which is not installed: it comes with the extra "
            "tensorboard, pip install -c constraints.txt -e '.[tensorboard]'; csv and wandb need none"
        )


@contextmanager
def job_logger(
    config: LoggerConfig,
    folder: Path,
    run_config: Mapping[str, Any],
    group: str | None,
    job_type: str,
    tags: Iterable[str] = (),
    resume: bool = False,
) -> Iterator[Logger | None]:
    """The configured logger; None for ``kind=none``, and in all processes of a training but the first.

    W&B gets one run per job: it is finished in every case, with exit code 1 if the job failed, so that the next job
    of a multirun opens its own.

    Args:
        config: which logger, and W&B's settings. ``mode`` None takes ``WANDB_MODE``, else offline.
        folder: output folder of the job.
        run_config: the resolved configuration, logged as hyper-parameters.
        group: W&B group where the configuration names none: the sweep.
        job_type: what the job does, for W&B.
        tags: W&B tags before the configured ones; cut where they are too long.
        resume: go on in the W&B run of an earlier job in this folder, if there was one.

    Raises:
        UserError: the logger cannot be opened.
    """
    require_logger(config)
    if config.kind == "none" or not is_first():
        yield None
    elif config.kind == "wandb":
        names = dict.fromkeys([*(tag[:MOST_TAG_LETTERS] for tag in tags if tag), *config.tags])
        with _wandb_logger(config, folder, run_config, group, job_type, list(names), resume) as logger:
            yield logger
    else:
        logger = _file_logger(config.kind, folder, run_config)
        status = "failed"
        try:
            yield logger
            status = "success"
        finally:
            logger.finalize(status)


def _file_logger(kind: str, folder: Path, run_config: Mapping[str, Any]) -> Logger:
    """A logger that writes files in a folder of its own in the job's."""
    own = _new_folder(folder, kind)
    if kind == "csv":
        logger = CSVLogger(folder, name="", version=own)
        logger.log_hyperparams(dict(run_config))
        return logger
    board = TensorBoardLogger(folder, name="", version=own, default_hp_metric=False)
    board.log_hyperparams(dict(run_config))
    board.experiment.add_text("config", f"```yaml\n{yaml.safe_dump(dict(run_config), sort_keys=False)}```", 0)
    return board


def _new_folder(folder: Path, kind: str) -> str:
    """``csv``, or ``csv-2`` and so on where earlier jobs have left theirs.

    What is there would be deleted by the logger of CSV files, and mixed with the new by that of TensorBoard.
    """
    names = (kind if number == 1 else f"{kind}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (folder / name).exists())


@contextmanager
def _wandb_logger(
    config: LoggerConfig,
    folder: Path,
    run_config: Mapping[str, Any],
    group: str | None,
    job_type: str,
    tags: list[str],
    resume: bool,
) -> Iterator[WandbLogger]:
    import wandb  # imported late: takes a second, and most loggers do not need it

    mode = config.mode or os.environ.get("WANDB_MODE") or "offline"
    mode = _OLD_MODES.get(mode, mode)
    require(mode in ("online", "offline", "disabled"), "WANDB_MODE", mode, "one of online, offline, disabled")
    try:
        # opened here and handed to Lightning, which would pass a setting that W&B warns of
        run = wandb.init(
            project=config.project,
            name=config.name,
            group=config.group or group,
            job_type=job_type,
            tags=tags,
            id=_run_id(folder, resume),
            resume="allow",
            dir=folder,
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True),
        )
    except wandb.Error as error:
        keys = "logger.mode=online" if mode == "online" else "logger.project, logger.name or logger.group"
        hint = "; logger.mode=offline needs neither key nor network" if mode == "online" else ""
        raise UserError(f"{keys}: {' '.join(str(error).split())}{hint}") from error
    code = 1
    try:
        define_summaries(run)
        run.config.update(dict(run_config), allow_val_change=True)
        yield WandbLogger(project=config.project, save_dir=folder, log_model=False, experiment=run)
        code = 0
    finally:
        run.finish(exit_code=code)


def _run_id(folder: Path, resume: bool) -> str:
    """The W&B run of this job: the one of an earlier job in the folder if it goes on, else a new one."""
    from wandb.sdk.lib.runid import generate_id

    path = folder / _RUN_ID
    if not resume or not path.exists():
        path.write_text(generate_id() + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
