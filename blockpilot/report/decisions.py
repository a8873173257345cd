"""Every decode of an evaluation as a Parquet file: one row per test prompt and policy.

Knows the columns of ``decisions.parquet``, which are the fields of ``DecodedPrompt``; computes no figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from blockpilot.errors import UserError
from blockpilot.metrics import DecodedPrompt

SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("block_sizes", pa.list_(pa.int32()), nullable=False),
        pa.field("first_block_size", pa.int32(), nullable=False),
        pa.field("acceptance_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("decode_seconds", pa.float64(), nullable=False),
        pa.field("policy_seconds", pa.float64(), nullable=False),
        pa.field("prefill_seconds", pa.float64(), nullable=False),
        pa.field("drafted_sizes", pa.list_(pa.int32()), nullable=False),
    ]
)
assert SCHEMA.names == [field.name for field in fields(DecodedPrompt)]


def write_decisions(path: str | Path, decoded: Sequence[DecodedPrompt]) -> None:
    """Writes ``decoded`` in the given order, replacing a file that is there."""
    columns = {name: [getattr(one, name) for one in decoded] for name in SCHEMA.names}
    pq.write_table(pa.table(columns, schema=SCHEMA), path)


def read_decisions(path: str | Path) -> list[DecodedPrompt]:
    """The decodes that ``write_decisions`` wrote, in the same order.

    Raises:
        UserError: there is no such file, it is not Parquet or its columns are others.
    """
    try:
        table = pq.read_table(path)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise UserError(f"decisions={str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    if not table.schema.equals(SCHEMA):
        raise UserError(f"decisions={str(path)!r} has columns {table.schema.names}; expected {SCHEMA.names}")
    rows = table.to_pylist()
    for row in rows:
        for name in ("block_sizes", "acceptance_lengths", "drafted_sizes"):
            row[name] = tuple(row[name])
    return [DecodedPrompt(**row) for row in rows]
