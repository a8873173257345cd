"""Collection alone: fill this writer's share of the caches; who finds them whole says what the labels are worth."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from blockpilot.config import CollectRunConfig, EvaluationConfig
from blockpilot.decoding import LatencyProfile
from blockpilot.errors import UserError
from blockpilot.metrics import SequenceBound, SweepSummary, summarize_sweep
from blockpilot.models import Pair, assemble_pair, locate_pair
from blockpilot.oracle import candidates_of
from blockpilot.report import bound_line, locality_figure, oracle_table, print_tables, save_png, sweep_values
from blockpilot.runs.job import start_job
from blockpilot.runs.labels import Labels, read_sources
from blockpilot.runs.latency import find_profile
from blockpilot.runs.per_round import per_round_bounds

log = logging.getLogger(__name__)


def collect(config: CollectRunConfig, folder: Path, group: str | None = None) -> None:
    """Labels every prompt of the configured data sets, train and test; what is there already is kept.

    Args:
        config: the run's configuration; ``collect.shard_index`` of ``collect.num_shards`` is this writer.
        folder: output folder; gets ``labels.json`` and ``locality.png`` once all writers are done.
        group: unused; every run has the same signature.

    Raises:
        UserError: something in the configuration or the data cannot be used.
    """
    start_job(config.seed)
    locate_pair(config.model, config.drafter)
    sources = read_sources(config)
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    labels = Labels(config, pair, sources)
    profile = _profile(config, pair) if config.oracle.per_round else None
    labels.collect()
    if absent := missing_writers(labels):
        log.info("figures of the labels come with the last writer; shards are missing of %s", absent)
        return
    summaries = label_summaries(labels, pair, config.seed)
    if "all" not in summaries:
        return
    bounds = {}
    if config.oracle.per_round:
        records = (record for cache in labels.caches for record in cache.records())
        sizes = candidates_of(pair, config.oracle)
        bounds = per_round_bounds(records, sizes, pair.block_size, profile, config.seed)
    write_labels(folder, summaries, bounds)


def _profile(config: CollectRunConfig, pair: Pair) -> LatencyProfile | None:
    """What rounds cost. One that nobody asked for by name, and that lacks a candidate, is left alone."""
    wanted = EvaluationConfig(latency_profile=config.oracle.latency_profile)
    try:
        return find_profile(wanted, pair, candidates_of(pair, config.oracle), key="oracle.latency_profile")
    except UserError as error:
        if wanted.latency_profile != "auto":
            raise
        log.warning("no bound in speed: %s", error)
        return None


def missing_writers(labels: Labels) -> str:
    """Which writers' shards are not there, by source; nothing if all are."""
    writers = labels.config.collect.num_shards
    found = {
        source.name: sorted({shard % writers for shard in cache.missing()})
        for source, cache in zip(labels.sources, labels.caches, strict=True)
    }
    return "; ".join(
        f"{name}: collect.shard_index={','.join(map(str, indices))} of {writers}"
        for name, indices in found.items()
        if indices
    )


def label_summaries(labels: Labels, pair: Pair, seed: int) -> dict[str, SweepSummary]:
    """Figures of each source by name, and of all prompts together as ``all``; sources without figures are left out."""
    tau: dict[str, torch.Tensor] = {}
    block_sizes: tuple[int, ...] = ()
    for source, cache in zip(labels.sources, labels.caches, strict=True):
        try:
            table = cache.load()
        except UserError as error:  # every prompt was too long: nothing was lost, and nothing can be said
            log.warning("%s", error)
            continue
        tau[source.name], block_sizes = table.tau, table.block_sizes
    if tau:
        tau["all"] = torch.cat(list(tau.values()))
    summaries = {}
    for name, tau_NK in tau.items():
        try:
            summaries[name] = summarize_sweep(tau_NK, block_sizes, pair.block_size, seed=seed)
        except UserError as error:
            log.warning("%s: %s", name, error)
    return summaries


def write_labels(
    folder: Path, summaries: Mapping[str, SweepSummary], bounds: Mapping[str, SequenceBound] = MappingProxyType({})
) -> None:
    """Prints the table of all prompts; writes ``labels.json`` (every source) and ``locality.png``."""
    values = {name: sweep_values(summary) for name, summary in summaries.items()}
    if bounds:
        values["per_round"] = {name: sweep_values(bound) for name, bound in bounds.items()}
    (folder / "labels.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_png(locality_figure(summaries["all"]), folder / "locality.png")
    print_tables(oracle_table(summaries["all"], brief=True))
    for name, bound in bounds.items():
        log.info(bound_line(bound, summaries["all"].trained, name))
    log.info("figures of the labels in %s", folder)
