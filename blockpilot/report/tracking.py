"""The final table and charts of a run in Weights & Biases.

Knows Lightning loggers; with any other logger, or none, the files in the run's folder are all there is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from blockpilot.metrics import PolicySummary
from blockpilot.report.table import summary_rows

ALL = "all"
"""Data set of the rows that are over all of them."""


@rank_zero_only
def log_summary(
    logger: Logger | None,
    summaries: Sequence[PolicySummary],
    charts: Mapping[str, Path] | None = None,
    datasets: Mapping[str, Sequence[PolicySummary]] | None = None,
) -> None:
    """Logs ``policies``, a table, and one ``figures/<name>`` image per chart.

    The table has the keys of ``summary_rows``, ``choices`` as JSON, after ``dataset``: ``all``, then every data set.

    Does nothing unless ``logger`` is a ``WandbLogger``. The caller still owns the run and finishes it.
    """
    if not isinstance(logger, WandbLogger):
        return
    import wandb  # imported late: takes a second, and most loggers do not need it

    # together, so that all rows have the same keys
    parts = {ALL: summaries, **(datasets or {})}
    names = [name for name, own in parts.items() for _ in own]
    rows = [
        {"dataset": name, **row, "choices": json.dumps(row["choices"])}
        for name, row in zip(names, summary_rows([one for own in parts.values() for one in own]), strict=True)
    ]
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    images = {f"figures/{name}": wandb.Image(str(png)) for name, png in (charts or {}).items()}
    logger.experiment.log({"policies": table, **images})
