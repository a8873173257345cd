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
from typing import IO, Any

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


def write_table(table: pa.Table, file: IO[bytes], info: Mapping[str, Any]) -> None:
    """Writes a shard with the digest of its rows.

    Args:
        table: all rows, of ``SCHEMA``.
        file: open for writing.
        info: what the shard says of itself, plain values: its place, ``skipped``, ``seconds`` and ``device``.
    """
    stored = json.dumps({**info, "content": content_digest(table, info)}).encode()
    rows = max(1, ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes))
    pq.write_table(table.replace_schema_metadata({_INFO: stored}), file, row_group_size=rows, **PARQUET_OPTIONS)


def content_digest(table: pa.Table, info: Mapping[str, Any]) -> str:
    """Digest of info, names and values: page checksums do not cover the headers and the footer of a Parquet file."""
    digest = hashlib.sha256(json.dumps([info, table.column_names], sort_keys=True).encode())

    def add(array: pa.Array) -> None:
        digest.update(f"{len(array)} {array.null_count}".encode())
        if pa.types.is_large_list(array.type):
            offsets, values = list_parts(array)
            digest.update(offsets.data)
            add(values)
        elif pa.types.is_string(array.type):
            digest.update(json.dumps(array.to_pylist()).encode())
        else:
            digest.update(str(array.type).encode())
            digest.update(np.ascontiguousarray(array.to_numpy(zero_copy_only=False)).data)

    for column in table.columns:
        add(column.combine_chunks())
    return digest.hexdigest()


# --- a file to rows

_UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)
"""What reading a file raises that is no shard, or no longer."""
_LET_GO: int | None = getattr(mmap, "MADV_DONTNEED", None)
"""Advice that gives back mapped pages that were read; without it (not on Linux) they stay until the file is closed."""


def read_checked(source: Path | bytes, place: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """All rows of a shard and what it says of itself, after comparing every value with its digest.

    Args:
        source: the file, or what is in it.
        place: what it must say of itself: files get copied, and a lost manifest may come back with another size.

    Raises:
        DamagedShard: it cannot be read, or holds something else.
        UserError: the system does not let it be read, which says nothing of its content.
    """
    try:
        # the reader of row_groups(): another one may be content with a footer that this one cannot read
        file = source if isinstance(source, Path) else pa.BufferReader(source)
        with pq.ParquetFile(file, memory_map=True, page_checksum_verification=True) as opened:
            table, bounds = opened.read(), _sizes(opened.metadata)
        info = json.loads(table.schema.metadata[_INFO])
        if info.pop("content") != content_digest(table, info):
            raise ValueError("its rows are not those that were written there")
        if any(info[name] != value for name, value in place.items()):
            raise ValueError("it is of another place or another cache")
        _check_sizes(table, bounds)
        return _of_schema(table), info
    except _UNREADABLE as error:
        number = getattr(error, "errno", None)
        if number not in (None, errno.ENOENT):  # the system's word, not the content's
            raise UserError(f"cache_dir: {source} cannot be read: {os.strerror(number)}") from None
        raise DamagedShard((str(error).splitlines() or [""])[0]) from None


def row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The rows of a shard, memory-mapped, a row group at a time; values are not compared with their digest.

    Args:
        path: the file.
        columns: names of those to read; None reads all.

    Raises:
        UserError: it cannot be read.
    """
    with _or_user_error(path), path.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        with pq.ParquetFile(pa.BufferReader(pa.py_buffer(mapped))) as file:
            for group in range(file.num_row_groups):
                table = _of_schema(file.read_row_group(group, columns), columns)
                if table.num_rows:
                    yield table
                if _LET_GO is not None:
                    mapped.madvise(_LET_GO)


@contextmanager
def _or_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"shard {path} cannot be read ({reason}); python -m blockpilot.collect rebuilds it") from None


def sizes(path: Path) -> tuple[int, int, int]:
    """Rows, and at most so many prompt tokens and entries of distributions, by a shard's footer.

    Raises:
        UserError: it cannot be read.
    """
    with _or_user_error(path):
        return _sizes(pq.read_metadata(path))


def _sizes(metadata: pq.FileMetaData) -> tuple[int, int, int]:
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    # every column has one leaf, so leaves are counted as columns are; an empty list counts as one number
    places = [SCHEMA.get_field_index(name) for name in ("prompt_id", "prompt_tokens", "distribution_ids")]
    rows, tokens, entries = (sum(group.column(place).num_values for group in groups) for place in places)
    return rows, tokens, entries


def _check_sizes(table: pa.Table, bounds: tuple[int, int, int]) -> None:
    names = ("prompt_tokens", "distribution_ids")
    true = [len(list_parts(table[name].combine_chunks())[1]) if table.num_rows else 0 for name in names]
    fine = bounds[0] == table.num_rows
    if not (fine and all(0 <= bound - n <= table.num_rows for n, bound in zip(true, bounds[1:], strict=True))):
        raise ValueError("its footer counts other rows than it holds")


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
