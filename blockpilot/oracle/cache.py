"""The cache on disk: Parquet shards of labels and prefill distributions under a digest of what made them.

Knows which shards there are and how they get there; what is in one is in ``shards.py``, what the cache says of itself
in ``manifest.py``, and nothing here knows models or how a label is found. A shard appears whole or not at all, so any
number of writers may fill one cache and any of them may be killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from blockpilot.errors import UserError
from blockpilot.oracle.files import remove_leftovers, write_whole
from blockpilot.oracle.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    CacheKey,
    prompts_digest,
    read_key,
    read_manifest,
    require_same,
    write_manifest,
)
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.shards import SCHEMA, CacheRow, DamagedShard, Shard, in_batches, table_of, write_table
from blockpilot.oracle.table import LabelTable, gather
from blockpilot.oracle.tensors import COLUMNS, labels_of, records_of

__all__ = ["SCHEMA_VERSION", "CacheKey", "CacheRow", "LabelCache", "prompts_digest"]

log = logging.getLogger(__name__)


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
        try:
            new = not (folder / MANIFEST).exists()
            if new:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cache_dir: {folder} cannot be made: {error.strerror}") from None
        if new:
            facts = dict(provenance or {})
            content = {"key": key.fields(), "num_rows": num_rows, "shard_size": shard_size, "provenance": facts}
            write_manifest(folder, content, keep_existing=True)
        self.manifest = read_manifest(folder, key.schema_version)
        there, wanted = self.manifest["key"], key.fields()
        require_same(folder, there | {"num_rows": self.manifest["num_rows"]}, wanted | {"num_rows": num_rows})
        self.shard_size: int = self.manifest["shard_size"]
        self.num_shards = -(-num_rows // self.shard_size)
        self._verified: dict[int, dict[str, Any]] = {}  # what each shard says of itself

    @classmethod
    def existing(cls, folder: Path) -> LabelCache:
        """The cache that is in ``folder``, whatever it holds; nothing is written.

        Raises:
            UserError: there is none, it has another schema version, or its manifest cannot be read.
        """
        manifest = read_manifest(folder)
        return cls(folder, read_key(folder), manifest["num_rows"], manifest["shard_size"])

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
            opened = self.open_shard(shard)
            opened.check()
        except DamagedShard as error:
            log.warning("shard %s is damaged (%s) and will be rebuilt", path.name, error)
            return False
        self._verified[shard] = opened.info
        return True

    def open_shard(self, shard: int, content: bytes | None = None) -> Shard:
        """The file of a shard, or ``content`` as if it were in it; that its rows are right is not checked yet.

        Raises:
            DamagedShard: it cannot be read, or is of another place or cache.
            UserError: the system does not let it be read.
        """
        source = self.path(shard) if content is None else content
        return Shard(source, self._place(shard), trusted=content is None and shard in self._verified)

    def _place(self, shard: int) -> dict[str, Any]:
        """What a shard must say of itself: files get copied, and a lost manifest may come back with another size."""
        rows = self.rows_of(shard)
        return {"key": self.key.digest(), "shard": shard, "rows": [rows.start, rows.stop]}

    def write(self, shard: int, rows: Sequence[CacheRow], *, skipped: int, seconds: float, device: str) -> None:
        """Stores a shard: whole file, flushed to disk, then renamed into place.

        Raises:
            UserError: a number does not fit its column, the disk is full, or the folder takes no file; earlier shards
                are as they were.
        """
        table = table_of(rows)
        info = self._place(shard) | {"skipped": skipped, "seconds": seconds, "device": device}
        self.put(shard, lambda file: write_table(table, file, info))

    def put(self, shard: int, write: Callable[[BinaryIO], object]) -> None:
        """Lets ``write`` make the file of a shard beside its place, flushes it to disk, then renames it into place.

        Raises:
            UserError: it cannot be written.
        """
        self._verified.pop(shard, None)
        write_whole(self.path(shard), write)

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
            write_manifest(self.folder, content)
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
        self._require(self.missing())
        return pa.concat_tables([SCHEMA.empty_table(), *self._row_groups()])

    def batches(self, rows: int) -> Iterator[LabelTable]:
        """All rows as tensors, ``rows`` at a time (fewer in the last batch); a row group and a batch are held at once.

        Files are memory-mapped, and no Python runs per row of a wide column. A damaged shard is told when its turn
        comes.

        Raises:
            UserError: ``rows`` is below 1, or shards are missing or damaged.
        """
        if rows < 1:
            raise UserError(f"rows={rows!r} of a batch is not allowed; expected 1 or more")
        self._require([shard for shard in range(self.num_shards) if not self.path(shard).exists()])
        return map(self._labels, in_batches(self._row_groups(self._label_columns), rows))

    def load(self) -> LabelTable:
        """All rows as tensors; each number is held once.

        Raises:
            UserError: shards are missing or damaged, or no row is left.
        """
        self._require(self.missing())
        sizes = [self.open_shard(shard).sizes.tolist() for shard in range(self.num_shards)]
        rows, tokens, entries = map(sum, zip(*sizes, strict=True)) if sizes else (0, 0, 0)
        if rows == 0:
            raise UserError(f"cache {self.folder} holds no prompt: {self.skipped()} were longer than the model allows")
        return gather(map(self._labels, self._row_groups(self._label_columns)), rows, tokens, entries)

    def records(self) -> Iterator[OracleRecord]:
        """All rows as records, in order, for :func:`~blockpilot.oracle.simulate` and tables of every round.

        Raises:
            UserError: shards are missing or damaged.
        """
        self._require([shard for shard in range(self.num_shards) if not self.path(shard).exists()])
        return (record for table in self._row_groups() for record in records_of(table))

    @property
    def _dense(self) -> list[str]:
        stored = {"logits": self.key.store_logits, "hidden": self.key.store_hidden}
        return [name for name, there in stored.items() if there]

    @property
    def _label_columns(self) -> list[str]:
        return [*COLUMNS, *self._dense]

    def _labels(self, table: pa.Table) -> LabelTable:
        return labels_of(table, self.key.block_sizes, self.key.vocab_size, self._dense)

    def _row_groups(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for shard in range(self.num_shards):
            try:
                yield from self._row_groups_of(shard, columns)
            except DamagedShard as error:
                raise UserError(
                    f"shard {self.path(shard)} is damaged ({error}); python -m blockpilot.collect rebuilds it"
                ) from None

    def _row_groups_of(self, shard: int, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Never rows that were not compared with the digest, by this or by an earlier reading of this object."""
        opened = self.open_shard(shard)
        if shard in self._verified or opened.num_row_groups > 1:
            if shard not in self._verified:
                opened.check()
            tables = opened.row_groups(columns)
        else:  # small enough to be held until it is checked, so it is read only once
            tables = (table if columns is None else table.select(columns) for table in list(opened.checked()))
        self._verified[shard] = opened.info
        yield from tables

    def _require(self, missing: Sequence[int]) -> None:
        if missing:
            raise UserError(
                f"cache {self.folder} lacks {len(missing)} of {self.num_shards} shards, such as "
                f"{self.path(missing[0]).name}"
            )
