"""What a run leaves in its output folder, the same for training and evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from blockpilot.config import EvaluateConfig, TrainConfig, to_yaml
from blockpilot.decoding import LatencyProfile
from blockpilot.decoding.latency import device_name
from blockpilot.metrics import DecodedPrompt, PolicySummary
from blockpilot.models import Pair
from blockpilot.oracle import LabelTable
from blockpilot.report import (
    choice_figure,
    dataset_table,
    log_summary,
    print_tables,
    summary_rows,
    summary_table,
    tau_bar_figure,
    tau_curve_figure,
    write_decisions,
    write_report,
)
from blockpilot.runs.compare import summarize_datasets


def write_results(
    folder: Path,
    config: TrainConfig | EvaluateConfig,
    pair: Pair,
    table: LabelTable,
    decoded: Sequence[DecodedPrompt],
    summaries: Sequence[PolicySummary],
    metrics: Mapping[str, Any],
    logger: Logger | None,
    latency: LatencyProfile | None = None,
) -> None:
    """Writes ``metrics.json``, ``decisions.parquet`` and ``report.html``, logs the table, prints it.

    Where the decoded prompts are of several data sets, each has figures of its own beside those of all.

    Args:
        folder: output folder of the run.
        config: the run's configuration.
        pair: the pair that decoded.
        table: labels of all test prompts.
        decoded, summaries: of the prompts that were decoded, or simulated.
        metrics: figures to keep beside the table.
        logger: the run's logger.
        latency: the profile behind the regret in speed, if there is one.
    """
    datasets = summarize_datasets(decoded, table, pair.block_size, config.evaluation, config.seed, latency)
    content: dict[str, Any] = {**metrics, "policies": summary_rows(summaries)}
    if datasets:
        content["datasets"] = {name: summary_rows(own) for name, own in datasets.items()}
    (folder / "metrics.json").write_text(json.dumps(_json_safe(content), indent=2) + "\n", encoding="utf-8")
    write_decisions(folder / "decisions.parquet", decoded)
    figures = {
        "tau by block size (labels of all test prompts)": tau_curve_figure(table),
        "tau by policy (prompts of the table)": tau_bar_figure(summaries),
        "block sizes chosen": choice_figure(decoded),
    }
    log_summary(logger, summaries, figures, datasets)
    write_report(
        folder / "report.html",
        title=f"BlockPilot on {pair.name}",
        summaries=summaries,
        figures=figures,
        config_yaml=to_yaml(config),
        facts={
            "model": pair.name,
            "device": device_name(pair.device),
            "data sets": ", ".join(config.dataset),
            "trained block size B": str(pair.block_size),
            "candidates": ", ".join(map(str, table.block_sizes)),
            "temperature": str(config.generation.temperature),
            "output budget": f"{config.generation.max_new_tokens} tokens",
            "test prompts": f"{len(table)} labelled, {summaries[0].num_prompts} in the table",
            "seed": str(config.seed),
            **({} if latency is None else {"latency profile": latency.device}),
        },
        datasets=datasets,
    )
    print_tables(summary_table(summaries), *([dataset_table(datasets)] if datasets else []))


def _json_safe(value: Any) -> Any:
    """NaN, which JSON does not have, as null."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
