"""decisions.parquet: what is written is read back; other files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blockpilot.errors import UserError
from blockpilot.metrics import DecodedPrompt
from blockpilot.report import read_decisions, write_decisions

DECODED = [
    DecodedPrompt("pilot", "gsm8k-1", "gsm8k", (14, 15), 14, (3, 7), 11, 0.25, 0.0125, 0.5),
    DecodedPrompt("always-16", "é|2", "math", (), 16, (), 1, 0.0, 0.0, 1 / 3),
]


def test_round_trip_keeps_order_types_and_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "decisions.parquet"
    write_decisions(path, DECODED[:1])
    write_decisions(path, DECODED)
    assert read_decisions(path) == DECODED
    assert all(isinstance(one.block_sizes, tuple) for one in read_decisions(path))


def test_no_rows(tmp_path: Path) -> None:
    write_decisions(tmp_path / "decisions.parquet", [])
    assert read_decisions(tmp_path / "decisions.parquet") == []


def test_other_programs_see_list_columns(tmp_path: Path) -> None:
    write_decisions(tmp_path / "decisions.parquet", DECODED)
    table = pq.read_table(tmp_path / "decisions.parquet")
    assert table["acceptance_lengths"].to_pylist() == [[3, 7], []]
    assert table.num_rows == 2


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.parquet"):
        read_decisions(tmp_path / "nowhere.parquet")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"broken\.parquet"):
        read_decisions(broken)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"policy": ["pilot"]}), other)
    with pytest.raises(UserError, match=r"has columns \['policy'\]; expected \['policy', 'prompt_id'"):
        read_decisions(other)
