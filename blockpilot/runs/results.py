"""What a run leaves in its output folder, the same for training and evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from blockpilot.config import EvaluateConfig, TrainConfig
from blockpilot.decoding import LatencyProfile
from blockpilot.decoding.latency import device_name
from blockpilot.metrics import DecodedPrompt, PolicySummary
from blockpilot.models import Pair
from blockpilot.oracle import LabelTable
from blockpilot.oracle.collect import provenance
from blockpilot.report import (
    About,
    Curves,
    build_run,
    chart_file,
    dataset_table,
    log_summary,
    print_tables,
    read_run,
    run_charts,
    summary_rows,
    summary_table,
    write_about,
    write_curves,
    write_decisions,
)
from blockpilot.report.run_files import DECISIONS, METRICS, PROMPTS
from blockpilot.runs.compare import summarize_datasets
from blockpilot.runs.policies import always


def write_results(
    folder: Path,
    config: TrainConfig | EvaluateConfig,
    pair: Pair,
    table: LabelTable,
    decoded: Sequence[DecodedPrompt],
    summaries: Sequence[PolicySummary],
    policy: str,
    metrics: Mapping[str, Any],
    logger: Logger | None,
    latency: LatencyProfile | None = None,
    step: int = 0,
) -> Path:
    """Writes the files of a run and, from them, its report; then logs all of it, prints the table, returns the report.

    The files are ``metrics.json``, ``decisions.parquet``, ``prompts.parquet`` and ``run.json``. Where the decoded
    prompts are of several data sets, each has figures of its own beside those of all.

    Args:
        folder: output folder of the run.
        config: the run's configuration.
        pair: the pair that decoded.
        table: labels of all test prompts.
        decoded, summaries: of the prompts that were decoded, or simulated.
        policy: name of the row in question.
        metrics: figures to keep beside the table.
        logger: the run's logger; gets all figures but those of validation, which it has.
        latency: the profile behind the regret in speed, if there is one.
        step: of training, at which figures are logged.
    """
    datasets = summarize_datasets(decoded, table, pair.block_size, config.evaluation, config.seed, latency)
    content: dict[str, Any] = {**metrics, "policies": summary_rows(summaries)}
    if datasets:
        content["datasets"] = {name: summary_rows(own) for name, own in datasets.items()}
    (folder / METRICS).write_text(json.dumps(_json_safe(content), indent=2) + "\n", encoding="utf-8")
    write_decisions(folder / DECISIONS, decoded)
    write_curves(folder / PROMPTS, Curves.of(table, pair.decode))
    write_about(folder, _about(pair, policy, latency))
    run = read_run(folder)
    charts = run_charts(run)
    report = build_run(folder, run, charts)
    if logger is not None:
        logger.log_metrics({key: value for key, value in metrics.items() if not key.startswith("val/")}, step)
    files = {chart.name: chart_file(folder, chart) for chart in charts}
    log_summary(logger, summaries, decoded, files, datasets, step)
    print_tables(summary_table(summaries), *([dataset_table(datasets)] if datasets else []))
    return report


def _about(pair: Pair, policy: str, latency: LatencyProfile | None) -> About:
    return About(
        model=pair.name,
        device=device_name(pair.device),
        policy=policy,
        always=always(pair.block_size),
        trained_block_size=pair.block_size,
        latency_profile=None if latency is None else latency.device,
        provenance={
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "blockpilot": version("blockpilot"),
            **provenance(pair),
            **{f"identity of {name}": value for name, value in pair.identity.items()},
        },
    )


def _json_safe(value: Any) -> Any:
    """NaN, which JSON does not have, as null."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
