"""Looks through a cache that is there: which shards are whole, what is in them, what contradicts what. Changes nothing.

Knows what every row of a cache must fulfil; nothing of how one is filled, nor of how findings are shown.

Shapes: N rows, K candidate block sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.errors import UserError
from blockpilot.oracle.cache import LabelCache
from blockpilot.oracle.manifest import MANIFEST, CacheKey
from blockpilot.oracle.shards import DamagedShard, list_parts
from blockpilot.oracle.tensors import acceptance

ROUNDING = 1e-4
"""How far a softmax in fp32 over a large vocabulary may be from 1."""


@dataclass
class ShardState:
    """What was found of one shard; sums are over its rows."""

    name: str
    kind: str = "whole"
    """``whole``; ``missing`` or ``damaged`` (collect makes it); ``wrong``: as it was written, but that cannot be; or
    ``closed``: the system does not let it be read."""
    problem: str = ""
    """What is wrong with it, and what to do."""
    bytes: int = 0
    """On disk."""
    prompt_ids: list[str] = field(default_factory=list)
    skipped: int = 0
    """Samples left out because their prompt was too long."""
    nonzeros: int = 0
    """Stored probabilities."""
    tau_sums: np.ndarray | float = 0.0
    """float64 ``[K]``."""
    tau_counts: np.ndarray | float = 0.0
    """Rows with rounds, float64 ``[K]``."""
    device: str = ""
    """That made it."""


@dataclass(frozen=True)
class CacheState:
    """What was found of one cache; sums are over the shards that are whole."""

    cache: LabelCache
    shards: tuple[ShardState, ...]
    problems: tuple[str, ...]
    """What is wrong between shards, or between them and the manifest."""

    @property
    def is_whole(self) -> bool:
        """Whether every shard is there and nothing is wrong."""
        return not self.problems and len(self.whole) == len(self.shards)

    @property
    def whole(self) -> list[ShardState]:
        """The shards that are."""
        return [shard for shard in self.shards if shard.kind == "whole"]

    @property
    def kinds(self) -> Counter[str]:
        """Number of shards of each kind."""
        return Counter(shard.kind for shard in self.shards)

    @property
    def rows(self) -> int:
        """Samples."""
        return sum(len(shard.prompt_ids) for shard in self.whole)

    def total(self, name: str) -> int:
        """Sum of ``skipped``, ``bytes`` or ``nonzeros``."""
        return sum(getattr(shard, name) for shard in self.whole)

    @property
    def tau(self) -> dict[int, float]:
        """Mean over the prompts with rounds, per candidate; NaN without any."""
        sizes = self.cache.key.block_sizes
        sums, counts = np.zeros(len(sizes)), np.zeros(len(sizes))
        for shard in self.whole:
            sums, counts = sums + shard.tau_sums, counts + shard.tau_counts
        means = np.divide(sums, counts, out=np.full(len(sizes), np.nan), where=counts > 0)
        return dict(zip(sizes, means.tolist(), strict=True))


def find_caches(path: Path) -> list[Path]:
    """``path`` itself if it is the folder of a cache, else all such folders below it, sorted.

    Raises:
        UserError: there is none.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder; expected the folder of a cache, or one above")
    found = [path] if (path / MANIFEST).exists() else sorted(file.parent for file in path.rglob(MANIFEST))
    if not found:
        raise UserError(f"there is no cache in {path} or below; the folder of one holds {MANIFEST}")
    return found


def inspect_cache(folder: Path) -> CacheState:
    """Reads a whole cache, a row group at a time.

    Raises:
        UserError: its manifest cannot be read, or is of another schema version.
    """
    cache = LabelCache.existing(folder)
    shards = tuple(inspect_shard(cache, shard) for shard in range(cache.num_shards))
    return CacheState(cache, shards, tuple(_problems_between(cache, shards)))


def inspect_shard(cache: LabelCache, shard: int) -> ShardState:
    """Reads one shard."""
    path = cache.path(shard)
    state = ShardState(path.name)
    try:
        if not path.exists():
            state.kind, state.problem = "missing", "is missing; collect makes it"
            return state
        state.bytes = path.stat().st_size
        opened = cache.open_shard(shard)
        wrong: list[str] = []
        for table in opened.checked():
            odd = list(_wrong_rows(table, cache.key))
            wrong = wrong or odd
            _count(state, table, cache.key, with_tau=not odd)
    except DamagedShard as error:
        state.kind, state.problem = "damaged", f"is damaged ({error}); collect rebuilds it"
        return state
    except (UserError, OSError) as error:
        state.kind, state.problem = "closed", f"cannot be read ({error})"
        return state
    state.skipped, state.device = opened.info["skipped"], opened.info["device"]
    wrong = wrong or list(_wrong_counts(state, len(cache.rows_of(shard))))
    if wrong:
        state.kind, state.problem = "wrong", f"is wrong ({'; '.join(wrong)}); remove it, then collect makes it again"
    return state


def _count(state: ShardState, table: pa.Table, key: CacheKey, with_tau: bool) -> None:
    state.prompt_ids += table["prompt_id"].to_pylist()
    state.nonzeros += int(_lengths(table, "distribution_ids").sum())
    if with_tau:
        committed, rounds = (part.double().numpy() for part in acceptance(table, len(key.block_sizes)))
        tau = np.divide(committed, rounds, out=np.zeros_like(committed), where=rounds > 0)
        state.tau_sums = state.tau_sums + tau.sum(axis=0)
        state.tau_counts = state.tau_counts + (rounds > 0).sum(axis=0)


# --- what must hold


def _wrong_rows(table: pa.Table, key: CacheKey) -> Iterator[str]:
    """What is wrong with rows, each with the first prompt of which it is true."""
    for what, wrong in _checks(table, key):
        if wrong.any():
            more = " and others" if wrong.sum() > 1 else ""
            yield f"prompt {table['prompt_id'][int(wrong.argmax())].as_py()!r}{more}: {what}"


def _checks(table: pa.Table, key: CacheKey) -> Iterator[tuple[str, np.ndarray]]:
    """Pairs of what is wrong and of which rows, bool ``[N]``; what others hang on comes first and ends the list."""
    count = len(key.block_sizes)
    odd = (_lengths(table, "block_sizes") != count) | (_lengths(table, "acceptance_lengths") != count)
    if not odd.any():
        odd = np.any(_flat(table, "block_sizes").reshape(-1, count) != np.array(key.block_sizes), axis=1)
    yield f"its block sizes are not {list(key.block_sizes)}", odd
    if odd.any():
        return
    yield f"its seed is not {key.seed}", np.array([seed != key.seed for seed in table["seed"].to_pylist()])
    keys = [signed_prompt_key(prompt) for prompt in table["prompt_tokens"].to_pylist()]
    yield "its key is not that of its tokens", table["prompt_key"].to_numpy() != np.array(keys)
    for name in ("prompt_tokens", "output_tokens", "distribution_ids"):
        ids, row_of_each = _flat(table, name), _row_of_each(table, name)
        outside = row_of_each[(ids < 0) | (ids >= key.vocab_size)]
        yield f"{name} leaves [0, {key.vocab_size})", _are_in(outside, table.num_rows)
        yield f"{name} is empty", _lengths(table, name) == 0
    outputs = _lengths(table, "output_tokens")
    yield f"its output is longer than {key.max_new_tokens} tokens", outputs > key.max_new_tokens
    yield from _acceptance_checks(table, key, outputs)
    yield from _distribution_checks(table, key)
    yield from _optional_checks(table, key)


def _acceptance_checks(table: pa.Table, key: CacheKey, outputs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    rows, candidates = len(outputs), len(key.block_sizes)
    _, per_candidate = list_parts(table["acceptance_lengths"].combine_chunks())
    offsets, lengths = list_parts(per_candidate)
    most = np.repeat(np.tile(key.block_sizes, rows), np.diff(offsets))
    row_of_each = np.repeat(np.arange(rows), np.diff(offsets[::candidates]))
    outside = row_of_each[(lengths.to_numpy() < 1) | (lengths.to_numpy() > most)]
    yield "an acceptance length is not between 1 and its block size", _are_in(outside, rows)
    beyond = 1 + acceptance(table, candidates)[0].numpy() - outputs[:, None]
    if key.tau_convention == "committed":
        yield "1 + its acceptance lengths is not the number of its output tokens", np.any(beyond != 0, axis=1)
    else:  # the last round is not cut
        yield "1 + its acceptance lengths is below the number of its output tokens", np.any(beyond < 0, axis=1)


def _distribution_checks(table: pa.Table, key: CacheKey) -> Iterator[tuple[str, np.ndarray]]:
    rows, odd = table.num_rows, _lengths(table, "distribution_ids") != _lengths(table, "distribution_probs")
    yield "it has not as many probabilities as tokens", odd
    if odd.any():
        return
    ids, probs = _flat(table, "distribution_ids"), _flat(table, "distribution_probs")
    row_of_each = _row_of_each(table, "distribution_ids")
    tokens = np.sort(row_of_each * key.vocab_size + ids)
    again = tokens[1:][np.diff(tokens) == 0] // key.vocab_size
    yield "a token is there twice", _are_in(again.clip(0, rows - 1), rows)
    yield "a probability is not in (0, 1]", _are_in(row_of_each[~((probs > 0) & (probs <= 1 + ROUNDING))], rows)
    rises = (np.diff(probs) > 0) & (np.diff(row_of_each) == 0)
    yield "its probabilities are not sorted, falling", _are_in(row_of_each[1:][rises], rows)
    mass, least = np.bincount(row_of_each, probs.astype(np.float64), rows), 1 - key.tail_mass
    yield f"its mass is not between {least:g} and 1", ~((mass >= least - ROUNDING) & (mass <= 1 + ROUNDING))


def _optional_checks(table: pa.Table, key: CacheKey) -> Iterator[tuple[str, np.ndarray]]:
    wanted = {"logits": key.store_logits, "hidden": key.store_hidden, "acceptance_table": key.per_round}
    for name, there in wanted.items():
        yield f"{name} is {'missing' if there else 'there'}", table[name].is_null().to_numpy() == there
    lengths = {name: _lengths(table, name) for name, there in wanted.items() if there}
    if key.store_logits:
        yield f"it has not {key.vocab_size} logits", lengths["logits"] != key.vocab_size
    if key.store_hidden:
        yield "its hidden state is not as long as the others", lengths["hidden"] != lengths["hidden"][0]
    if key.per_round:
        size = (_lengths(table, "output_tokens") - 1) * len(key.block_sizes)
        odd = lengths["acceptance_table"] != size
        yield "its acceptance table has not the size of positions by candidates", odd
        if not odd.any():
            yield "an entry of its acceptance table cannot be", _impossible_entries(table, key)


def _impossible_entries(table: pa.Table, key: CacheKey) -> np.ndarray:
    """Rows with an entry that is below 1, above its block size or, where rounds are cut, above the tokens left."""
    entries, row_of_each = _flat(table, "acceptance_table"), _row_of_each(table, "acceptance_table")
    starts = list_parts(table["acceptance_table"].combine_chunks())[0][:-1]
    anchor, column = np.divmod(np.arange(len(entries)) - starts[row_of_each], len(key.block_sizes))
    most = np.array(key.block_sizes)[column]
    if key.tau_convention == "committed":
        most = np.minimum(most, (_lengths(table, "output_tokens") - 1)[row_of_each] - anchor)
    return _are_in(row_of_each[(entries < 1) | (entries > most)], table.num_rows)


def _wrong_counts(state: ShardState, prompts: int) -> Iterator[str]:
    """Rows against prompts: a prompt has a sample for each of its turns (``id#turn``), less those that were skipped."""
    sampled, skipped = len({name.split("#")[0] for name in state.prompt_ids}), state.skipped
    if not prompts - skipped <= sampled <= prompts:
        yield f"it has samples of {sampled} prompts and skipped {skipped} samples, but stands for {prompts} prompts"


def _problems_between(cache: LabelCache, shards: tuple[ShardState, ...]) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for shard in shards:
        for name in shard.prompt_ids if shard.kind == "whole" else ():
            places.setdefault(name, []).append(shard.name)
    repeated = [name for name, files in places.items() if len(files) > 1]
    if repeated:
        first = repeated[0]
        yield f"{len(repeated)} prompt ids are there twice, such as {first!r} in {' and '.join(places[first])}"
    total, skipped = cache.manifest.get("skipped_too_long"), sum(shard.skipped for shard in shards)
    if total not in (None, skipped) and all(shard.kind == "whole" for shard in shards):
        yield f"{MANIFEST} says that {total} samples were skipped, the shards say {skipped}; collect corrects it"


# --- columns


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    """Length of each row's list, ``[N]``."""
    return np.diff(list_parts(table[name].combine_chunks())[0])


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return list_parts(table[name].combine_chunks())[1].to_numpy()


def _row_of_each(table: pa.Table, name: str) -> np.ndarray:
    """The row of each number of a list column."""
    return np.repeat(np.arange(table.num_rows), _lengths(table, name))


def _are_in(rows: np.ndarray, count: int) -> np.ndarray:
    """Which of ``count`` rows are among ``rows``, bool ``[count]``."""
    return np.bincount(rows, minlength=count) > 0
