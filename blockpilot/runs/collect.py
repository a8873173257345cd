"""Collection alone: fill this writer's share of the caches."""

from __future__ import annotations

from pathlib import Path

from blockpilot.config import CollectRunConfig
from blockpilot.models import assemble_pair, locate_pair
from blockpilot.runs.labels import Labels, read_sources


def collect(config: CollectRunConfig, folder: Path, group: str | None = None) -> None:
    """Labels every prompt of the configured data sets, train and test; what is there already is kept.

    Args:
        config: the run's configuration; ``collect.shard_index`` of ``collect.num_shards`` is this writer.
        folder: output folder (the log only).
        group: unused; every run has the same signature.

    Raises:
        UserError: something in the configuration or the data cannot be used.
    """
    locate_pair(config.model, config.drafter)
    sources = read_sources(config)
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    Labels(config, pair, sources).collect()
