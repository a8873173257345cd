"""The latency profile: measure, store where evaluation finds it, show."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from blockpilot.config import ProfileRunConfig, project_path
from blockpilot.decoding import LatencyProfile, measure_latency
from blockpilot.decoding.latency import contexts_that_fit, profile_path
from blockpilot.models import assemble_pair, locate_pair
from blockpilot.report import latency_figure, latency_table, progress_bar, save_png
from blockpilot.runs.job import start_job

log = logging.getLogger(__name__)

BEYOND_TRAINED = 4
"""Block sizes above B that are measured when nobody says which."""
TABLE_WIDTH = 112


def profile(config: ProfileRunConfig, folder: Path, group: str | None = None) -> LatencyProfile:
    """Measures a pair and returns the profile, which is then in ``latency_dir`` and in the output folder.

    Args:
        config: the run's configuration.
        folder: output folder, already there.
        group: unused; every run has the same signature.

    Raises:
        UserError: something in the configuration cannot be used.
    """
    start_job(config.seed)
    locate_pair(config.model, config.drafter)
    pair = assemble_pair(config.model, config.drafter, device=config.device)
    wanted = config.profile
    sizes = sorted(set(wanted.block_sizes or range(1, pair.block_size + BEYOND_TRAINED + 1)))
    contexts = contexts_that_fit(pair, sizes, wanted.contexts)
    turns = len(contexts) * len(sizes) * (wanted.warmup + wanted.repeats)
    with progress_bar(f"timing {pair.name}", turns, "turns") as advance:
        measured = measure_latency(
            pair, sizes, contexts, warmup=wanted.warmup, repeats=wanted.repeats, seed=config.seed, advance=advance
        )
    stored = profile_path(project_path(config.latency_dir), measured.model, measured.device)
    for path in (stored, folder / "latency.json"):
        measured.save(path)
        save_png(latency_figure(measured, pair.block_size), path.with_suffix(".png"))
    console = Console()
    # a narrow terminal may wrap the table, but nothing in it is cut
    Console(width=max(console.width, TABLE_WIDTH)).print(latency_table(measured, pair.block_size))
    log.info("latency profile in %s; evaluation on this device uses it (evaluation.latency_profile=auto)", stored)
    return measured
