"""The cache on disk: Parquet shards of labels and prefill distributions under a digest of what made them.

Knows files, manifests and shards; nothing of models or of how a label is found. A shard appears whole or not at
all, so any number of writers may fill one cache and any of them may be killed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from blockpilot.errors import UserError
from blockpilot.oracle.files import remove_leftovers, write_whole
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists

log = logging.getLogger(__name__)

SCHEMA_VERSION = 2
_INFO = b"blockpilot"


@dataclass(frozen=True)
class CacheKey:
    """Everything that changes a cache's content, and nothing else.

    Device, batch size, number of writers and the method (replay and enumeration agree) are not here.
    """

    pair: Mapping[str, str]
    """Identity of target, drafter, dtype, tokenizer, chat template and thinking switch."""
    prompts: str
    """Digest of the prompt rows, in order."""
    block_sizes: tuple[int, ...]
    vocab_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    tail_mass: float
    store_logits: bool
    store_hidden: bool
    tau_convention: str
    per_round: bool = False
    schema_version: int = SCHEMA_VERSION

    def fields(self) -> dict[str, Any]:
        """Flat plain values; the pair's are named ``pair.target`` and so on."""
        values = asdict(self)
        pair = {f"pair.{name}": value for name, value in sorted(values.pop("pair").items())}
        return json.loads(json.dumps(pair | values))

    def digest(self) -> str:
        """Digest of all fields."""
        return _digest(self.fields())

    def folder(self, root: Path, pair_name: str, source: str) -> Path:
        """``<root>/<pair>-<digest of all but the prompts>/<source>-<digest of the prompts>``."""
        settings = {name: value for name, value in self.fields().items() if name != "prompts"}
        return root / f"{pair_name}-{_digest(settings)[:12]}" / f"{source}-{self.prompts[:12]}"


@dataclass(frozen=True)
class CacheRow:
    """One sample as it is stored."""

    prompt_id: str
    prompt_key: int
    """Signed 64-bit."""
    dataset: str
    prompt_tokens: list[int]
    output_tokens: list[int]
    block_sizes: list[int]
    acceptance_lengths: list[list[int]]
    """One list per block size."""
    distribution_ids: list[int]
    distribution_probs: list[float]
    seed: int
    logits: list[float] | None = None
    hidden: list[float] | None = None
    acceptance_table: list[int] | None = None
    """Tokens committed from each position on (rows, from the prefill token) by each block size (columns), flat."""


_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt_key", pa.int64()),
        ("dataset", pa.string()),
        ("prompt_tokens", pa.large_list(pa.int32())),
        ("output_tokens", pa.large_list(pa.int32())),
        ("block_sizes", pa.large_list(pa.int32())),
        ("acceptance_lengths", pa.large_list(pa.large_list(pa.int16()))),
        ("distribution_ids", pa.large_list(pa.int32())),
        ("distribution_probs", pa.large_list(pa.float32())),
        ("seed", pa.uint64()),
        ("logits", pa.large_list(pa.float32())),
        ("hidden", pa.large_list(pa.float32())),
        ("acceptance_table", pa.large_list(pa.int16())),
    ]
)


class LabelCache:
    """One folder of shards.

    Args:
        folder: where it is or will be.
        key: what it must hold.
        num_rows: prompt rows behind it.
        shard_size: prompt rows per shard, for a new cache; an existing one keeps its own.
        provenance: facts to write beside the key when the cache is new (versions, commit, device).

    Raises:
        UserError: the folder's manifest differs from ``key`` (the message names the field and both values), or
            cannot be read.
    """

    def __init__(
        self, folder: Path, key: CacheKey, num_rows: int, shard_size: int, provenance: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.key = folder, key
        manifest = folder / "manifest.json"
        try:
            new = not manifest.exists()
            if new:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cache_dir: {folder} cannot be made: {error.strerror}") from None
        if new:
            content = {
                "key": key.fields(),
                "num_rows": num_rows,
                "shard_size": shard_size,
                "provenance": dict(provenance or {}),
            }
            write_whole(manifest, lambda file: file.write(_json(content)), keep_existing=True)
        self.manifest = _read_manifest(manifest)
        _compare(
            manifest,
            self.manifest["key"] | {"num_rows": self.manifest["num_rows"]},
            key.fields() | {"num_rows": num_rows},
        )
        self.shard_size: int = self.manifest["shard_size"]
        self.num_shards = -(-num_rows // self.shard_size)
        self._verified: dict[int, dict[str, Any]] = {}  # what each shard says of itself

    def rows_of(self, shard: int) -> range:
        """Indices of the prompt rows of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.manifest["num_rows"]))

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}-of-{self.num_shards:05d}.parquet"

    def missing(self) -> list[int]:
        """Shards that are not there, or are damaged (named in the log; they will be rebuilt).

        Raises:
            UserError: the system does not let a shard be read, which is no reason to make it anew.
        """
        return [shard for shard in range(self.num_shards) if not self._readable(shard)]

    def _readable(self, shard: int) -> bool:
        path = self.path(shard)
        if shard in self._verified or not path.exists():
            return shard in self._verified
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            info = json.loads(table.schema.metadata[_INFO])
            if info.pop("content") != _content_digest(table, info):
                raise ValueError("its rows are not those that were written there")
            if any(info[name] != value for name, value in self._place(shard).items()):
                raise ValueError("it is of another place or another cache")
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            number = getattr(error, "errno", None)
            if number not in (None, errno.ENOENT):  # the system's word, not the content's
                raise UserError(f"cache_dir: {path} cannot be read: {os.strerror(number)}") from None
            log.warning("shard %s is damaged (%s) and will be rebuilt", path.name, (str(error).splitlines() or [""])[0])
            return False
        self._verified[shard] = info
        return True

    def _place(self, shard: int) -> dict[str, Any]:
        """What a shard must say of itself: files get copied, and a lost manifest may come back with another size."""
        rows = self.rows_of(shard)
        return {"key": self.key.digest(), "shard": shard, "rows": [rows.start, rows.stop]}

    def write(self, shard: int, rows: Sequence[CacheRow], *, skipped: int, seconds: float, device: str) -> None:
        """Stores a shard: whole file, flushed to disk, then renamed into place.

        Raises:
            UserError: the disk is full, or the folder takes no file; earlier shards are as they were.
        """
        columns = {name: [getattr(row, name) for row in rows] for name in _SCHEMA.names}
        table = pa.table(columns, schema=_SCHEMA)
        info = self._place(shard) | {"skipped": skipped, "seconds": seconds, "device": device}
        info["content"] = _content_digest(table, info)
        table = table.replace_schema_metadata({_INFO: json.dumps(info).encode()})
        self._verified.pop(shard, None)
        write_whole(
            self.path(shard),
            lambda file: pq.write_table(table, file, compression="zstd", write_page_checksum=True),
        )

    def finish(self) -> None:
        """Once every shard is there: adds their totals to the manifest, removes what killed writers left.

        A finished cache is left as it is.

        Raises:
            UserError: the manifest cannot be written.
        """
        seconds = round(sum(self._info(shard)["seconds"] for shard in range(self.num_shards)), 3)
        provenance = {**self.manifest["provenance"], "seconds": seconds}
        content: dict[str, Any] = {**self.manifest, "provenance": provenance, "skipped_too_long": self.skipped()}
        if content != self.manifest:
            write_whole(self.folder / "manifest.json", lambda file: file.write(_json(content)))
            self.manifest = content
        remove_leftovers(self.folder)

    def _info(self, shard: int) -> dict[str, Any]:
        if not self._readable(shard):
            raise UserError(f"cache {self.folder} lacks shard {self.path(shard).name}")
        return self._verified[shard]

    def skipped(self) -> int:
        """Samples left out because their prompt was longer than the model allows."""
        return sum(self._info(shard)["skipped"] for shard in range(self.num_shards))

    def read(self) -> pa.Table:
        """All rows as one Arrow table, memory-mapped.

        Raises:
            UserError: shards are missing or damaged.
        """
        missing = [self.path(shard).name for shard in self.missing()]
        if missing:
            raise UserError(
                f"cache {self.folder} lacks {len(missing)} of {self.num_shards} shards, such as {missing[0]}"
            )
        tables = [pq.read_table(self.path(shard), memory_map=True) for shard in range(self.num_shards)]
        return pa.concat_tables([table.replace_schema_metadata(None) for table in tables])

    def load(self) -> LabelTable:
        """All rows as tensors; no per-row Python for the wide columns.

        Raises:
            UserError: shards are missing or damaged, or no row is left.
        """
        table = self.read()
        if table.num_rows == 0:
            raise UserError(f"cache {self.folder} holds no prompt: {self.skipped()} were longer than the model allows")
        committed, rounds = _rounds(table, len(self.key.block_sizes))
        offsets, ids = _csr(table, "distribution_ids")
        _, probs = _csr(table, "distribution_probs")
        return LabelTable(
            prompt_ids=tuple(table["prompt_id"].to_pylist()),
            datasets=tuple(table["dataset"].to_pylist()),
            prompt_keys=torch.from_numpy(table["prompt_key"].to_numpy().copy()),
            prompts=TokenLists(*_csr(table, "prompt_tokens")),
            block_sizes=self.key.block_sizes,
            committed_tokens=committed,
            rounds=rounds,
            distributions=Distributions(offsets, ids.long(), probs, self.key.vocab_size),
            logits=_dense(table, "logits") if self.key.store_logits else None,
            hidden=_dense(table, "hidden") if self.key.store_hidden else None,
        )


def prompts_digest(rows: Iterable[object]) -> str:
    """Digest of prompt rows (dataclasses), in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(asdict(row), sort_keys=True).encode() + b"\n")  # type: ignore[call-overload]
    return digest.hexdigest()


def _compare(manifest: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in sorted(there.keys() | wanted.keys()):
        if there.get(name) != wanted.get(name):
            raise UserError(
                f"cache {manifest.parent} was collected with {name}={there.get(name)!r}, this run asks for "
                f"{name}={wanted.get(name)!r}; use another cache_dir or remove that folder"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"key": dict, "provenance": dict, "num_rows": int, "shard_size": int}
        wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
        if wrong or content["shard_size"] < 1:
            raise ValueError(f"{(wrong or ['shard_size'])[0]} is missing or wrong")
        return content
    except OSError as error:
        raise UserError(f"cache_dir: cache manifest {path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"cache manifest {path} cannot be read ({error}); remove this file alone, and the same command with the "
            "same collect.shard_size makes it anew and keeps the shards beside it"
        ) from None


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _list_parts(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Offsets (from 0) and values of a list array that may be a slice."""
    offsets = array.offsets.to_numpy()
    return offsets - offsets[0], array.values.slice(offsets[0], offsets[-1] - offsets[0])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content_digest(table: pa.Table, info: Mapping[str, Any]) -> str:
    """Digest of info, names and values: page checksums do not cover the headers and the footer of a Parquet file."""
    digest = hashlib.sha256(json.dumps([info, table.column_names], sort_keys=True).encode())

    def add(array: pa.Array) -> None:
        digest.update(f"{len(array)} {array.null_count}".encode())
        if pa.types.is_large_list(array.type):
            offsets, values = _list_parts(array)
            digest.update(offsets.tobytes())
            add(values)
        elif pa.types.is_string(array.type):
            digest.update(json.dumps(array.to_pylist()).encode())
        else:
            digest.update(str(array.type).encode())
            digest.update(array.to_numpy(zero_copy_only=False).tobytes())

    for column in table.columns:
        add(column.combine_chunks())
    return digest.hexdigest()


def _csr(table: pa.Table, name: str) -> tuple[Tensor, Tensor]:
    """A list column as int64 offsets ``[N + 1]`` and flat values."""
    offsets, values = _list_parts(table[name].combine_chunks())
    return torch.from_numpy(offsets.astype(np.int64)), torch.from_numpy(values.to_numpy().copy())


def _dense(table: pa.Table, name: str) -> Tensor:
    offsets, values = _csr(table, name)
    return values.view(len(offsets) - 1, -1)


def _rounds(table: pa.Table, candidates: int) -> tuple[Tensor, Tensor]:
    """Sums and counts of the acceptance lengths, int64 ``[N, K]`` each."""
    _, per_candidate = _list_parts(table["acceptance_lengths"].combine_chunks())
    offsets, lengths = _list_parts(per_candidate)
    total = np.concatenate([[0], np.cumsum(lengths.to_numpy(), dtype=np.int64)])
    sums, counts = total[offsets[1:]] - total[offsets[:-1]], np.diff(offsets)
    return (
        torch.from_numpy(sums).view(-1, candidates),
        torch.from_numpy(counts.astype(np.int64)).view(-1, candidates),
    )
