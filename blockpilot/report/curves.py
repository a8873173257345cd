"""The test prompts of a run and their labels as a Parquet file: one row per prompt, its text and its tau curve.

Knows the columns of ``prompts.parquet``; computes no figures.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from blockpilot.errors import UserError
from blockpilot.metrics import tau_per_prompt
from blockpilot.oracle.table import LabelTable

SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("block_sizes", pa.list_(pa.int32()), nullable=False),
        pa.field("committed_tokens", pa.list_(pa.int64()), nullable=False),
        pa.field("rounds", pa.list_(pa.int64()), nullable=False),
    ]
)


@dataclass(frozen=True)
class Curves:
    """Labels of N prompts: tau of every candidate block size, and what was asked."""

    prompt_ids: tuple[str, ...]
    datasets: tuple[str, ...]
    texts: tuple[str, ...]
    block_sizes: tuple[int, ...]
    """The K candidates, rising."""
    committed_tokens: Tensor
    """int64 ``[N, K]``."""
    rounds: Tensor
    """int64 ``[N, K]``; 0 where the output is the prefill token alone."""

    @classmethod
    def of(cls, table: LabelTable, decode: Callable[[Sequence[int]], str]) -> Curves:
        """From labels; ``decode`` gives the text of token ids."""
        texts = tuple(decode(table.prompts.row(index)) for index in range(len(table)))
        return cls(
            table.prompt_ids, table.datasets, texts, table.block_sizes, table.committed_tokens.cpu(), table.rounds.cpu()
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def tau(self) -> Tensor:
        """float64 ``[N, K]``; NaN without rounds."""
        return tau_per_prompt(self.committed_tokens, self.rounds)

    def select(self, prompt_ids: Sequence[str]) -> Curves:
        """These prompts, in this order."""
        places = {name: index for index, name in enumerate(self.prompt_ids)}
        kept = [places[name] for name in prompt_ids]
        index = torch.tensor(kept, dtype=torch.int64)
        return Curves(
            tuple(prompt_ids), tuple(self.datasets[i] for i in kept), tuple(self.texts[i] for i in kept),
            self.block_sizes, self.committed_tokens[index], self.rounds[index],
        )  # fmt: skip


def write_curves(path: str | Path, curves: Curves) -> None:
    """Writes ``curves``, replacing a file that is there."""
    columns = {
        "prompt_id": list(curves.prompt_ids),
        "dataset": list(curves.datasets),
        "text": list(curves.texts),
        "block_sizes": [list(curves.block_sizes)] * len(curves),
        "committed_tokens": curves.committed_tokens.tolist(),
        "rounds": curves.rounds.tolist(),
    }
    pq.write_table(pa.table(columns, schema=SCHEMA), path)


def read_curves(path: str | Path) -> Curves:
    """What ``write_curves`` wrote.

    Raises:
        UserError: there is no such file, it is not Parquet, its columns are others, or it holds no prompts.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not table.schema.equals(SCHEMA) or table.num_rows == 0:
        found = f"{table.num_rows} rows of {', '.join(table.schema.names)}"
        raise UserError(f"{path} has {found}; expected a row per test prompt with {', '.join(SCHEMA.names)}")
    columns = table.to_pydict()
    return Curves(
        tuple(columns["prompt_id"]), tuple(columns["dataset"]), tuple(columns["text"]),
        tuple(columns["block_sizes"][0]), torch.tensor(columns["committed_tokens"]), torch.tensor(columns["rounds"]),
    )  # fmt: skip
