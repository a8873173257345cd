"""Mistakes that would otherwise be silent or end deep inside a library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockpilot.config import CollectRunConfig, DatasetConfig, DrafterConfig, ModelConfig, PromptSource
from blockpilot.decoding import generate, prompt_key
from blockpilot.errors import UserError, integer
from blockpilot.models import Pair
from blockpilot.policies import FixedPolicy
from blockpilot.runs.labels import read_sources
from tests.toy import make_pair


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair()


def _rows(path: Path, rows: list[dict]) -> CollectRunConfig:
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DatasetConfig(PromptSource(kind="jsonl", path=str(path)))
    return CollectRunConfig(ModelConfig("m", "m"), DrafterConfig("d", "d"), {"toy": data})


def test_a_hash_sign_in_an_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'p#0' of toy-train holds '#'"):
        read_sources(_rows(tmp_path / "a", [{"id": "p#0", "turns": ["one"]}]))


def test_repeated_prompts_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": i, "turns": [text]} for i, text in (("a", "one"), ("b", "two"), ("c", "one"))]
    (source,) = read_sources(_rows(tmp_path / "a", rows))
    assert [row.id for row in source.rows] == ["a", "b"]
    assert "left out 1 prompts" in caplog.text


def test_a_prompts_key_does_not_depend_on_the_container() -> None:
    assert prompt_key([5, 6]) == prompt_key(torch.tensor([5, 6])) == prompt_key((5, 6))  # type: ignore[arg-type]


def test_whole_numbers_of_any_library() -> None:
    assert integer("k", torch.tensor(3)) == 3
    for wrong in (1.5, "3", None):
        with pytest.raises(UserError, match="k="):
            integer("k", wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda pair: generate(pair, "hello", FixedPolicy(2)),  # type: ignore[arg-type]
        lambda pair: generate(pair, [1.5], FixedPolicy(2)),  # type: ignore[arg-type]
        lambda pair: generate(pair, [7], FixedPolicy(2), max_new_tokens=2.5),  # type: ignore[arg-type]
        lambda pair: generate(pair, [7], FixedPolicy(2), temperature="1"),  # type: ignore[arg-type]
        lambda pair: generate(pair, [7], FixedPolicy(2), seed=1.5),  # type: ignore[arg-type]
        lambda pair: FixedPolicy(1.5),  # type: ignore[arg-type]
    ],
)
def test_values_of_another_kind_are_refused(pair: Pair, call: Callable[[Pair], object]) -> None:
    with pytest.raises(UserError):
        call(pair)
