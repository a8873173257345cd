"""One logger per job, opened with the job and closed with it, also when it fails."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from blockpilot.config import LoggerConfig, require
from blockpilot.errors import UserError


@contextmanager
def job_logger(
    config: LoggerConfig, folder: Path, run_config: Mapping[str, Any], group: str | None
) -> Iterator[Logger | None]:
    """The configured logger, or None for ``kind=none``.

    W&B gets one run per job: it is finished in every case, with exit code 1 if the job failed, so that the next job
    of a multirun opens its own.

    Args:
        config: which logger, and W&B's settings. ``mode`` None takes ``WANDB_MODE``, else offline.
        folder: output folder of the job.
        run_config: the resolved configuration, logged as hyper-parameters.
        group: W&B group where the configuration names none: the sweep.
    """
    if config.kind == "none":
        yield None
        return
    if config.kind == "csv":
        logger = CSVLogger(folder, name="", version="csv")
        logger.log_hyperparams(dict(run_config))
        yield logger
        logger.finalize("success")
        return
    import wandb

    mode = config.mode or os.environ.get("WANDB_MODE") or "offline"
    require(mode in ("online", "offline", "disabled"), "WANDB_MODE", mode, "one of online, offline, disabled")
    logger = WandbLogger(
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


def _open_run(logger: WandbLogger) -> None:
    from wandb.errors import UsageError

    try:
        logger.experiment  # noqa: B018  opens the run
    except UsageError as error:
        raise UserError(f"logger.project, logger.name or logger.group: {' '.join(str(error).split())}") from error
