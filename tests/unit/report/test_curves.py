"""prompts.parquet: what is written is read back; other files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists
from blockpilot.report import Curves, read_curves, write_curves

TABLE = LabelTable(
    prompt_ids=("a", "é|2"),
    datasets=("toy", "math"),
    prompt_keys=torch.arange(2),
    prompts=TokenLists.of([[7, 8], [9]]),
    block_sizes=(15, 17),
    committed_tokens=torch.tensor([[12, 12], [0, 0]]),
    rounds=torch.tensor([[6, 4], [0, 0]]),
    distributions=Distributions(torch.arange(3), torch.zeros(2, dtype=torch.int64), torch.ones(2), 8),
)


def test_round_trip(tmp_path: Path) -> None:
    curves = Curves.of(TABLE, lambda ids: f"<{ids}>")
    write_curves(tmp_path / "prompts.parquet", curves)
    again = read_curves(tmp_path / "prompts.parquet")
    assert (again.prompt_ids, again.datasets, again.texts) == (("a", "é|2"), ("toy", "math"), ("<[7, 8]>", "<[9]>"))
    assert again.block_sizes == (15, 17) and len(again) == 2
    torch.testing.assert_close(again.tau, TABLE.tau, equal_nan=True)
    chosen = again.select(["é|2", "a"])
    assert chosen.texts == ("<[9]>", "<[7, 8]>") and chosen.rounds.tolist() == [[0, 0], [6, 4]]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    with pytest.raises(UserError, match=r"prompts\.parquet cannot be read"):
        read_curves(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"prompts\.parquet cannot be read"):
        read_curves(path)
    pq.write_table(pa.table({"prompt_id": ["a"]}), path)
    with pytest.raises(UserError, match="has 1 rows of prompt_id; expected a row per test prompt with prompt_id, data"):
        read_curves(path)
