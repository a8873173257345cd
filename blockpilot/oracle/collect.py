"""Fills a cache: prompt rows to samples, samples to labels, labels to shards.

Knows which shards are whose; turns, replay, enumeration and files are elsewhere.
"""

from __future__ import annotations

import logging
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from blockpilot.config import ROOT, CollectConfig, GenerationConfig, OracleConfig
from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.errors import UserError
from blockpilot.models.pair import Pair
from blockpilot.oracle.cache import CacheKey, CacheRow, LabelCache, prompts_digest
from blockpilot.oracle.enumeration import enumerate_block_sizes
from blockpilot.oracle.prefill import sparse_distributions
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.replay import replay
from blockpilot.oracle.turns import sample_id, turn_by_turn
from blockpilot.prompts import PromptRow

log = logging.getLogger(__name__)

MIN_BLOCK_SIZE = 2


def candidate_block_sizes(trained: int, radius: int) -> tuple[int, ...]:
    """``{B - radius .. B + radius}``, cut at 2 from below."""
    return tuple(range(max(MIN_BLOCK_SIZE, trained - radius), trained + radius + 1))


def candidates_of(pair: Pair, oracle: OracleConfig) -> tuple[int, ...]:
    """The block sizes to label: those given by hand, or those around B."""
    if oracle.block_sizes is not None:
        return tuple(oracle.block_sizes)
    return candidate_block_sizes(pair.block_size, oracle.radius)


def cache_key(pair: Pair, rows: Sequence[PromptRow], generation: GenerationConfig, oracle: OracleConfig) -> CacheKey:
    """What a cache of these rows must hold."""
    return CacheKey(
        pair=pair.identity,
        prompts=prompts_digest(rows),
        block_sizes=candidates_of(pair, oracle),
        vocab_size=pair.vocab_size,
        max_new_tokens=generation.max_new_tokens,
        temperature=float(generation.temperature),  # from Python it may be 0, which is written otherwise than 0.0
        top_p=float(generation.top_p),
        top_k=generation.top_k,
        seed=generation.seed,
        stop_token_ids=pair.stop_token_ids,
        tail_mass=float(oracle.tail_mass),
        store_logits=oracle.store_logits,
        store_hidden=oracle.store_hidden,
        tau_convention=oracle.tau_convention,
        per_round=oracle.per_round,
    )


def open_cache(
    root: Path, source: str, pair: Pair, rows: Sequence[PromptRow], generation: GenerationConfig, oracle: OracleConfig,
    collect: CollectConfig,
) -> LabelCache:  # fmt: skip
    """The cache of ``rows`` under ``root``, made if it is new.

    Args:
        root: folder of all caches.
        source: readable name of the prompts, such as ``gsm8k-train``.
        pair, rows, generation, oracle: what decides its content.
        collect: shard size of a new cache.
    """
    key = cache_key(pair, rows, generation, oracle)
    folder = key.folder(root, pair.name, source)
    return LabelCache(folder, key, len(rows), collect.shard_size, provenance(pair))


def fill(
    cache: LabelCache,
    pair: Pair,
    rows: Sequence[PromptRow],
    generation: GenerationConfig,
    oracle: OracleConfig,
    collect: CollectConfig,
    on_rows: Callable[[int], None] = lambda done: None,
) -> None:
    """Makes this writer's missing shards (``shard_index`` of ``num_shards``); existing ones are left alone.

    Args:
        on_rows: told the number of prompt rows after each shard.
    """
    skipped = 0
    for shard in shards_to_fill(cache, collect):
        began = time.perf_counter()
        members = [rows[i] for i in cache.rows_of(shard)]
        stored, too_long = label_rows(pair, members, generation, oracle, collect.batch_size)
        cache.write(
            shard, stored, skipped=too_long, seconds=time.perf_counter() - began, device=_device_name(pair.device)
        )
        skipped += too_long
        on_rows(len(members))
    if skipped:
        log.warning(
            "%d samples skipped: their prompt is longer than the target's %d positions", skipped, pair.max_positions
        )
    if not cache.missing():
        cache.finish()


def shards_to_fill(cache: LabelCache, collect: CollectConfig) -> list[int]:
    """Missing shards that are this writer's."""
    return [shard for shard in cache.missing() if shard % collect.num_shards == collect.shard_index]


def label_rows(
    pair: Pair, rows: Sequence[PromptRow], generation: GenerationConfig, oracle: OracleConfig, batch_size: int
) -> tuple[list[CacheRow], int]:
    """Samples of ``rows``, in row and turn order, and how many were too long.

    Every user turn is one sample; its context holds the target's own answers to the earlier turns. A prompt longer
    than the target's positions is left out, and with it the later turns of its row.
    """
    extras = {"max_batch_tokens": oracle.max_batch_tokens, "per_round": oracle.per_round}
    method = partial(replay, **extras) if oracle.method == "replay" else enumerate_block_sizes
    block_sizes = candidates_of(pair, oracle)

    def label(prompts: list[list[int]]) -> list[OracleRecord]:
        return method(
            pair, prompts, block_sizes, max_new_tokens=generation.max_new_tokens, temperature=generation.temperature,
            top_p=generation.top_p, top_k=generation.top_k, seed=generation.seed,
            tau_convention=oracle.tau_convention, batch_size=batch_size,
        )  # fmt: skip

    records, cut = turn_by_turn(pair, rows, pair.max_positions, label)
    stored = [_stored(rows[row], turn, record, generation.seed, oracle) for (row, turn), record in records.items()]
    return stored, sum(len(rows[row].turns) - turn for row, turn in cut.items())


def _stored(row: PromptRow, turn: int, record: OracleRecord, seed: int, oracle: OracleConfig) -> CacheRow:
    assert record.logits is not None and record.hidden is not None
    if not bool(record.logits.isfinite().all()):
        raise UserError(f"the target's logits for prompt {row.id!r} are not finite; expected a target that computes")
    table = record.acceptance_table
    sparse = sparse_distributions(record.logits[None], oracle.tail_mass)
    return CacheRow(
        prompt_id=sample_id(row, turn),
        prompt_key=signed_prompt_key(record.prompt_ids),
        dataset=row.dataset,
        prompt_tokens=record.prompt_ids,
        output_tokens=record.output_ids,
        block_sizes=list(record.acceptance_lengths),
        acceptance_lengths=list(record.acceptance_lengths.values()),
        distribution_ids=sparse.token_ids.tolist(),
        distribution_probs=sparse.probs.tolist(),
        seed=seed,
        logits=record.logits.tolist() if oracle.store_logits else None,
        hidden=record.hidden.tolist() if oracle.store_hidden else None,
        acceptance_table=None if table is None else table.flatten().tolist(),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def provenance(pair: Pair) -> dict[str, str]:
    """What is worth knowing beside a result, though it does not decide it: versions, device, commit."""
    facts = {name: version(name) for name in ("torch", "transformers")}
    facts["python"] = platform.python_version()
    facts["device"] = _device_name(pair.device)
    facts["git_commit"] = git_commit()
    if pair.origin is not None:
        facts["target"] = pair.origin
    return facts


def git_commit() -> str:
    """Commit of the project's checkout, or ``unknown``."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
