"""One logger per job, opened with the job and closed with it, also when it fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from blockpilot.config import LoggerConfig, require
from blockpilot.errors import UserError
from blockpilot.runs.processes import is_first

_OLD_MODES = {"dryrun": "offline", "run": "online"}
"""Names that W&B still takes for its modes; Lightning's logger sets the first for the rest of the process."""
_RUN_ID = "wandb_run_id.txt"
"""In the output folder: the W&B run, for a job that goes on."""


@contextmanager
def job_logger(
    config: LoggerConfig, folder: Path, run_config: Mapping[str, Any], group: str | None, resume: bool = False
) -> Iterator[Logger | None]:
    """The configured logger; None for ``kind=none``, and in all processes of a training but the first.

    W&B gets one run per job: it is finished in every case, with exit code 1 if the job failed, so that the next job
    of a multirun opens its own.

    Args:
        config: which logger, and W&B's settings. ``mode`` None takes ``WANDB_MODE``, else offline.
        folder: output folder of the job.
        run_config: the resolved configuration, logged as hyper-parameters.
        group: W&B group where the configuration names none: the sweep.
        resume: go on in the W&B run of an earlier job in this folder, if there was one.
    """
    if config.kind == "none" or not is_first():
        yield None
        return
    if config.kind == "csv":
        logger = CSVLogger(folder, name="", version=_csv_folder(folder))
        logger.log_hyperparams(dict(run_config))
        yield logger
        logger.finalize("success")
        return
    import wandb

    mode = config.mode or os.environ.get("WANDB_MODE") or "offline"
    mode = _OLD_MODES.get(mode, mode)
    require(mode in ("online", "offline", "disabled"), "WANDB_MODE", mode, "one of online, offline, disabled")
    run_id = _run_id(folder, resume)
    logger = WandbLogger(
        id=run_id,
        resume="allow",
        project=config.project,
        name=config.name,
        group=config.group or group,
        save_dir=folder,
        log_model=False,
        mode=mode,
        settings=wandb.Settings(silent=True),
    )
    code = 1
    try:
        _open_run(logger)
        logger.experiment.config.update(dict(run_config), allow_val_change=True)
        yield logger
        code = 0
    finally:
        wandb.finish(exit_code=code)


def _csv_folder(folder: Path) -> str:
    """``csv``, or ``csv-2`` and so on where earlier jobs have left theirs: Lightning would delete what it finds."""
    names = ("csv" if number == 1 else f"csv-{number}" for number in itertools.count(1))
    return next(name for name in names if not (folder / name).exists())


def _run_id(folder: Path, resume: bool) -> str:
    """The W&B run of this job: the one of an earlier job in the folder if it goes on, else a new one."""
    from wandb.sdk.lib.runid import generate_id

    path = folder / _RUN_ID
    if not resume or not path.exists():
        path.write_text(generate_id() + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _open_run(logger: WandbLogger) -> None:
    from wandb.errors import UsageError

    try:
        logger.experiment  # noqa: B018  opens the run
    except UsageError as error:
        raise UserError(f"logger.project, logger.name or logger.group: {' '.join(str(error).split())}") from error
