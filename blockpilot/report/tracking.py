"""A run's figures, tables, charts and files in its logger: Weights & Biases or TensorBoard.

Knows Lightning's loggers, through which all of it goes; with any other, or none, figures are all that is logged, and
the files in the run's folder are all there is. Those are written before anything comes here, so a disk that W&B cannot
write to costs a line in the log and no results.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from blockpilot.metrics import DecodedPrompt, PolicySummary
from blockpilot.report.table import summary_rows

log = logging.getLogger(__name__)

ALL = "all"
"""Data set of the rows that are over all of them."""
MOST_DECISIONS = 10_000
"""Rows of the table ``decisions``; W&B shows no more."""
Table = tuple[list[str], list[list[Any]]]
"""Columns and rows."""


@rank_zero_only
def log_summary(
    logger: Logger | None,
    summaries: Sequence[PolicySummary],
    decoded: Sequence[DecodedPrompt],
    charts: Mapping[str, Path] | None = None,
    datasets: Mapping[str, Sequence[PolicySummary]] | None = None,
    step: int = 0,
) -> None:
    """Logs the tables ``policies`` and ``decisions``, and one ``figures/<name>`` image per chart.

    ``policies`` has the keys of ``summary_rows``, ``choices`` as JSON, after ``dataset``: ``all``, then every data set.
    ``decisions`` has the columns of ``decisions.parquet``, with ``rounds`` and ``tau``. TensorBoard has no tables: it
    gets the first as text. Other loggers get nothing. The caller still owns the run and finishes it.

    Args:
        logger: of the run.
        summaries: a row per policy.
        decoded: what they are of.
        charts: PNG files by name.
        datasets: the same rows for each data set by itself.
        step: where on the axis of training steps it is logged.
    """
    columns, rows = _policies(summaries, datasets or {})
    if isinstance(logger, WandbLogger):
        with _or_warn("tables and figures"):
            logger.log_table("policies", columns=columns, data=rows, step=step)
            columns, rows = _decisions(decoded)
            logger.log_table("decisions", columns=columns, data=rows, step=step)
            for name, png in (charts or {}).items():
                logger.log_image(f"figures/{name}", [str(png)], step=step)
    elif isinstance(logger, TensorBoardLogger):
        with _or_warn("table and figures"):
            logger.experiment.add_text("policies", _markdown(columns, rows), step)
            for name, png in (charts or {}).items():
                with Image.open(png) as image:
                    pixels = numpy.asarray(image.convert("RGB"))
                logger.experiment.add_image(f"figures/{name}", pixels, step, dataformats="HWC")


@rank_zero_only
def log_artifacts(logger: Logger | None, manifests: Iterable[Path], policy: Path | None = None) -> None:
    """Tells W&B which labels a run stands on, and which policy it made; other loggers have nothing of the kind.

    Files are artifacts by reference: their place, size and digest, with what they say of themselves as metadata.
    Nothing is copied or uploaded.

    Args:
        logger: of the run.
        manifests: ``manifest.json`` of each label cache.
        policy: folder of the policy that was trained.
    """
    if not isinstance(logger, WandbLogger) or logger.experiment.disabled:
        return
    with _or_warn("artifacts"):
        for path in manifests:
            content = json.loads(path.read_text(encoding="utf-8"))
            _log_artifact(logger, f"labels-{path.parent.parent.name}-{path.parent.name}", "labels", [path], content)
        if policy is not None:
            content = json.loads((policy / "config.json").read_text(encoding="utf-8"))
            _log_artifact(logger, f"policy-{logger.version}", "policy", sorted(policy.iterdir()), content)


def _log_artifact(logger: WandbLogger, name: str, kind: str, files: Sequence[Path], metadata: dict[str, Any]) -> None:
    import wandb  # imported late: takes a second, and most loggers do not need it

    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:128], kind, metadata=metadata)
    for path in files:
        artifact.add_reference(path.resolve().as_uri(), name=path.name)
    logger.experiment.log_artifact(artifact)


@contextmanager
def _or_warn(what: str) -> Iterator[None]:
    """What keeps W&B or TensorBoard from taking something is a line in the log: the run's own files are there."""
    from wandb import Error

    try:
        yield
    except (OSError, Error) as error:
        reason = " ".join(str(error).split())
        log.warning("%s could not be logged (%s: %s); the files in the run's folder are complete", what,
                    type(error).__name__, reason)  # fmt: skip


def _policies(summaries: Sequence[PolicySummary], datasets: Mapping[str, Sequence[PolicySummary]]) -> Table:
    # together, so that all rows have the same keys
    parts = {ALL: summaries, **datasets}
    names = [name for name, own in parts.items() for _ in own]
    rows = [
        {"dataset": name, **row, "choices": json.dumps(row["choices"])}
        for name, row in zip(names, summary_rows([one for own in parts.values() for one in own]), strict=True)
    ]
    return list(rows[0]), [list(row.values()) for row in rows]


def _decisions(decoded: Sequence[DecodedPrompt]) -> Table:
    """A row per prompt and policy, lists as text; of too many prompts, some that are evenly spread."""
    prompts = list(dict.fromkeys(one.prompt_id for one in decoded))
    kept = min(len(prompts), MOST_DECISIONS * len(prompts) // max(len(decoded), 1))
    if kept < len(prompts):
        log.info("the logged table of decisions has %d of %d prompts; decisions.parquet has all", kept, len(prompts))
    shown = {prompts[index * len(prompts) // kept] for index in range(kept)}
    rows = [_decision(one) for one in decoded if one.prompt_id in shown]
    return list(_decision(decoded[0])), [list(row.values()) for row in rows]


def _decision(one: DecodedPrompt) -> dict[str, Any]:
    tokens, rounds = sum(one.acceptance_lengths), len(one.acceptance_lengths)
    row: dict[str, Any] = {"rounds": rounds, "tau": tokens / rounds if rounds else None}
    for name, value in asdict(one).items():
        if isinstance(value, tuple):
            row[name] = " ".join(map(str, value))
        else:
            row[name] = None if isinstance(value, float) and math.isnan(value) else value
    first = ("policy", "dataset", "prompt_id", "first_block_size", "tau", "rounds", "output_tokens")
    return {name: row.pop(name) for name in first} | row


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
