"""One shard: rows as they are stored, and the Parquet file that holds them.

Knows columns, encodings and digests; nothing of keys and manifests, nor which shards there are (``cache.py``), nor of
tensors (``tensors.py``).
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from blockpilot.errors import UserError

_INFO = b"blockpilot"

ROW_GROUP_BYTES = 16 * 2**20
"""Decoded size that a row group may reach: what a reader holds at once, however many rows a shard has."""


class DamagedShard(ValueError):
    """A file that does not hold what was written there; the message says why, on one line."""


@dataclass(frozen=True)
class CacheRow:
    """One sample as it is stored. A list of numbers may as well be a NumPy array, which is quicker to write."""

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


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(pa.field("element", kind, nullable=False))


# Whatever cannot be null is declared so: Parquet then stores fewer levels per number, and reads lists faster.
SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_key", pa.int64(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("prompt_tokens", _list(pa.int32()), nullable=False),
        pa.field("output_tokens", _list(pa.int32()), nullable=False),
        pa.field("block_sizes", _list(pa.int32()), nullable=False),
        pa.field("acceptance_lengths", _list(_list(pa.int16())), nullable=False),
        pa.field("distribution_ids", _list(pa.int32()), nullable=False),
        pa.field("distribution_probs", _list(pa.float32()), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
        pa.field("logits", _list(pa.float32())),
        pa.field("hidden", _list(pa.float32())),
        pa.field("acceptance_table", _list(pa.int16())),
    ]
)

# Numbers that hardly repeat: a dictionary of them would be as long as the column. Split into streams of first, second
# ... bytes, the leading ones are nearly constant and compress; benchmarks/cache_reading.py has the alternatives.
_WIDE = [f"{name}.list.element" for name in ("distribution_ids", "distribution_probs", "logits", "hidden")]
_NARROW = [
    "prompt_id",
    "dataset",
    "seed",
    *(f"{name}.list.element" for name in ("prompt_tokens", "output_tokens", "block_sizes", "acceptance_table")),
    "acceptance_lengths.list.element.list.element",
]
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": _NARROW,
    "column_encoding": dict.fromkeys(_WIDE, "BYTE_STREAM_SPLIT"),
    "write_page_checksum": True,
}


# --- rows to a file


def table_of(rows: Sequence[CacheRow]) -> pa.Table:
    """Rows as an Arrow table.

    Raises:
        UserError: a number does not fit its column; the message names prompt, column, number and range.
    """
    return pa.table([_column(rows, field) for field in SCHEMA], schema=SCHEMA)


def _column(rows: Sequence[CacheRow], field: pa.Field) -> pa.Array:
    try:
        return pa.array([getattr(row, field.name) for row in rows], type=field.type)
    except (pa.ArrowInvalid, OverflowError):
        for row in rows:
            _refuse_what_does_not_fit(row, field)
        raise


def _refuse_what_does_not_fit(row: CacheRow, field: pa.Field) -> None:
    kind, values = field.type, [getattr(row, field.name)]
    while pa.types.is_large_list(kind):
        kind, values = kind.value_type, list(chain.from_iterable(value for value in values if value is not None))
    if not pa.types.is_integer(kind):
        return
    limits = np.iinfo(kind.to_pandas_dtype())
    for value in values:
        if not limits.min <= value <= limits.max:
            raise UserError(
                f"prompt {row.prompt_id!r} cannot be stored: {field.name} holds {int(value)}, and the cache keeps "
                f"whole numbers from {limits.min} to {limits.max} there"
            )


def write_table(table: pa.Table, file: BinaryIO, info: Mapping[str, Any]) -> None:
    """Writes a shard, and in its footer what it says of itself and a digest of that and of its rows.

    Args:
        table: all rows, of ``SCHEMA``.
        file: open for writing.
        info: plain values.
    """
    digest = ContentDigest(info)
    digest.add(table)
    stored = json.dumps({**info, "content": digest.value()}).encode()
    rows = max(1, ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes))
    pq.write_table(table.replace_schema_metadata({_INFO: stored}), file, row_group_size=rows, **PARQUET_OPTIONS)


class ContentDigest:
    """Digest of ``info`` and of rows, the same in whatever groups they come.

    Page checksums do not cover the headers and the footer of a Parquet file. Lengths of lists, numbers and missing
    values of a column are streams of their own.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = dict(info)
        self._streams: dict[str, Any] = {}

    def add(self, table: pa.Table) -> None:
        """Further rows."""
        for name in table.column_names if table.num_rows else ():
            array = table[name].combine_chunks()
            self._update(f"{name} missing", array.is_null().to_numpy(zero_copy_only=False))
            self._add(name, array)

    def _add(self, name: str, array: pa.Array) -> None:
        if pa.types.is_large_list(array.type):
            offsets, values = list_parts(array)
            self._update(f"{name} lengths", np.diff(offsets))
            self._add(f"{name} element", values)
        elif pa.types.is_string(array.type):
            _, starts, letters = array.buffers()
            offsets = np.frombuffer(starts, np.int32)[array.offset : array.offset + len(array) + 1]
            self._update(f"{name} lengths", np.diff(offsets))
            self._update(name, np.frombuffer(letters or b"", np.uint8)[offsets[0] : offsets[-1]])
        else:
            self._update(f"{name} {array.type}", array.to_numpy(zero_copy_only=False))

    def _update(self, stream: str, values: np.ndarray) -> None:
        self._streams.setdefault(stream, hashlib.sha256()).update(np.ascontiguousarray(values).data)

    def value(self) -> str:
        """Of all that was added so far."""
        streams = {name: stream.hexdigest() for name, stream in self._streams.items()}
        return hashlib.sha256(json.dumps([self._info, streams], sort_keys=True).encode()).hexdigest()


# --- a file to rows

_UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)
"""What reading a file raises that is no shard, or no longer."""
_LET_GO: int | None = getattr(mmap, "MADV_DONTNEED", None)
"""Advice that gives back mapped pages that were read; without it (not on Linux) they stay until the file is closed."""


class Shard:
    """The file of a shard, memory-mapped. Whatever reads it says first that it is damaged.

    Args:
        source: the file, or what is in it.
        place: what the shard must say of itself.
        trusted: whether it was checked before; its pages are then not compared with their checksums again.

    Raises:
        DamagedShard: it cannot be read, or is of another place.
        UserError: the system does not let it be read, which says nothing of its content.
    """

    def __init__(self, source: Path | bytes, place: Mapping[str, Any], *, trusted: bool = False) -> None:
        self._source = source
        with self._telling():
            self._data: Any = source
            if isinstance(source, Path):
                with source.open("rb") as file:
                    self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            buffer = pa.BufferReader(pa.py_buffer(self._data))
            self._file = pq.ParquetFile(buffer, page_checksum_verification=not trusted)
            self.info: dict[str, Any] = json.loads(self._file.schema_arrow.metadata[_INFO])
            """What it says of itself."""
            self._content = self.info.pop("content")
            self.sizes = _sizes(self._file.metadata)
            """Rows, and at most so many prompt tokens and entries of distributions, by the footer."""
            if any(self.info[name] != value for name, value in place.items()):
                raise DamagedShard("it is of another place or another cache")

    @property
    def num_row_groups(self) -> int:
        """Parts that :meth:`row_groups` reads one at a time."""
        return self._file.num_row_groups

    def row_groups(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Its rows, a row group at a time; values are not compared with the digest.

        Args:
            columns: names of those to read; None reads all.
        """
        for group in range(self.num_row_groups):
            with self._telling():
                table = _of_schema(self._file.read_row_group(group, columns), columns)
            if table.num_rows:
                yield table
            if _LET_GO is not None and isinstance(self._data, mmap.mmap):
                self._data.madvise(_LET_GO)

    def checked(self) -> Iterator[pa.Table]:
        """Its rows, a row group at a time; ends with :class:`DamagedShard` if they are not those that were written."""
        digest, seen = ContentDigest(self.info), np.zeros(3, dtype=np.int64)
        for table in self.row_groups():
            with self._telling():
                digest.add(table)
                seen += _true_sizes(table)
            yield table
        beyond = self.sizes - seen  # an empty list counts as one number
        if digest.value() != self._content or beyond[0] != 0 or (beyond < 0).any() or (beyond > seen[0]).any():
            raise DamagedShard("its rows are not those that were written there")

    def check(self) -> None:
        """Raises :class:`DamagedShard` unless every value is the one that was written."""
        for _ in self.checked():
            pass

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (DamagedShard, UserError):
            raise
        except _UNREADABLE as error:
            number = getattr(error, "errno", None)
            if number not in (None, errno.ENOENT):  # the system's word, not the content's
                raise UserError(f"cache_dir: {self._source} cannot be read: {os.strerror(number)}") from None
            raise DamagedShard((str(error).splitlines() or [""])[0]) from None


_COUNTED = ("prompt_id", "prompt_tokens", "distribution_ids")


def _sizes(metadata: pq.FileMetaData) -> np.ndarray:
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    # every column has one leaf, so leaves are counted as columns are
    places = [SCHEMA.get_field_index(name) for name in _COUNTED]
    return np.array([sum(group.column(place).num_values for group in groups) for place in places], dtype=np.int64)


def _true_sizes(table: pa.Table) -> list[int]:
    return [table.num_rows, *(len(list_parts(table[name].combine_chunks())[1]) for name in _COUNTED[1:])]


def in_batches(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of ``rows`` rows each, the last one with what is left."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        count = sum(part.num_rows for part in held)
        if count < rows:
            continue
        joined = pa.concat_tables(held)
        for start in range(0, count - rows + 1, rows):
            yield joined.slice(start, rows)
        held = [joined.slice(count - count % rows)]
    if sum(part.num_rows for part in held):
        yield pa.concat_tables(held)


def _of_schema(table: pa.Table, columns: Sequence[str] | None = None) -> pa.Table:
    """Without the metadata, and typed as in ``SCHEMA`` even where a writer declared numbers that may be null."""
    names = SCHEMA.names if columns is None else columns
    return table.replace_schema_metadata(None).select(names).cast(pa.schema([SCHEMA.field(name) for name in names]))


def list_parts(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Offsets (from 0) and values of a list array that may be a slice."""
    offsets = array.offsets.to_numpy()
    return offsets - offsets[0], array.values.slice(offsets[0], offsets[-1] - offsets[0])
