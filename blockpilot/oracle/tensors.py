"""Arrow columns of labels as tensors: list offsets and values become CSR, without Python per row of a wide column.

Knows the columns of ``shards.py`` and the layout of ``table.py``; nothing of files.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.shards import list_parts
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists

COLUMNS = (
    "prompt_id",
    "prompt_key",
    "dataset",
    "prompt_tokens",
    "acceptance_lengths",
    "distribution_ids",
    "distribution_probs",
)
"""What :func:`labels_of` reads, besides dense columns."""


def labels_of(table: pa.Table, block_sizes: Sequence[int], vocab_size: int, dense: Sequence[str] = ()) -> LabelTable:
    """Rows as tensors of their own memory; token ids are int32, as they are stored.

    Args:
        table: rows with ``COLUMNS`` and ``dense``.
        block_sizes: the K candidates of every row.
        vocab_size: of the distributions.
        dense: which of ``logits`` and ``hidden`` the rows hold.
    """
    committed, rounds = acceptance(table, len(block_sizes))
    offsets, ids = csr(table, "distribution_ids")
    _, probs = csr(table, "distribution_probs")
    return LabelTable(
        prompt_ids=tuple(table["prompt_id"].to_pylist()),
        datasets=tuple(table["dataset"].to_pylist()),
        prompt_keys=_own(table["prompt_key"].to_numpy()),
        prompts=TokenLists(*csr(table, "prompt_tokens")),
        block_sizes=tuple(block_sizes),
        committed_tokens=committed,
        rounds=rounds,
        distributions=Distributions(offsets, ids, probs, vocab_size),
        logits=_dense(table, "logits") if "logits" in dense else None,
        hidden=_dense(table, "hidden") if "hidden" in dense else None,
    )


def records_of(table: pa.Table) -> Iterator[OracleRecord]:
    """Rows as records, one by one; what is not stored is None."""
    names = ("prompt_tokens", "output_tokens", "block_sizes", "acceptance_lengths")
    columns = [table[name].to_pylist() for name in names]
    wide = [table[name] for name in ("logits", "hidden", "acceptance_table")]
    for index, (prompt, output, sizes, lengths) in enumerate(zip(*columns, strict=True)):
        logits, hidden, rounds = (_own(c[index].values.to_numpy()) if c[index].is_valid else None for c in wide)
        lengths_of = dict(zip(sizes, lengths, strict=True))
        rows = None if rounds is None else rounds.long().view(-1, len(sizes))
        yield OracleRecord(prompt, output, lengths_of, logits, hidden, rows)


def csr(table: pa.Table, name: str) -> tuple[Tensor, Tensor]:
    """A list column as int64 offsets ``[N + 1]`` and flat values."""
    offsets, values = list_parts(table[name].combine_chunks())
    return _own(offsets.astype(np.int64, copy=False)), _own(values.to_numpy())


def acceptance(table: pa.Table, candidates: int) -> tuple[Tensor, Tensor]:
    """Sums and counts of the acceptance lengths, int64 ``[N, K]`` each."""
    _, per_candidate = list_parts(table["acceptance_lengths"].combine_chunks())
    offsets, lengths = list_parts(per_candidate)
    total = np.concatenate([[0], np.cumsum(lengths.to_numpy(), dtype=np.int64)])
    sums, counts = total[offsets[1:]] - total[offsets[:-1]], np.diff(offsets)
    return _own(sums).view(-1, candidates), _own(counts.astype(np.int64)).view(-1, candidates)


def _dense(table: pa.Table, name: str) -> Tensor:
    offsets, values = csr(table, name)
    return values.view(len(offsets) - 1, -1)


def _own(array: np.ndarray) -> Tensor:
    """A tensor that may be written to: Arrow's memory may not."""
    return torch.from_numpy(array.copy() if not array.flags.writeable else array)
