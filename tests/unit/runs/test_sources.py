"""Which prompts a run reads, which of them are held out, and which are decoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blockpilot.config import CollectRunConfig, DatasetConfig, DrafterConfig, ModelConfig, PromptSource
from blockpilot.errors import UserError
from blockpilot.oracle import Distributions, LabelTable, TokenLists
from blockpilot.runs.compare import spread
from blockpilot.runs.labels import read_sources, unseen


def _file(path: Path, texts: list[str], prefix: str) -> PromptSource:
    path.write_text("\n".join(json.dumps({"id": f"{prefix}{i}", "turns": [t]}) for i, t in enumerate(texts)))
    return PromptSource(kind="jsonl", path=str(path))


def _config(**datasets: DatasetConfig) -> CollectRunConfig:
    return CollectRunConfig(ModelConfig("m", "m"), DrafterConfig("d", "d"), datasets)


def _table(count: int) -> LabelTable:
    return LabelTable(
        prompt_ids=tuple(f"p{i}" for i in range(count)),
        datasets=("toy",) * count,
        prompt_keys=torch.arange(count),
        prompts=TokenLists.of([[i] for i in range(count)]),
        block_sizes=(4,),
        committed_tokens=torch.ones(count, 1, dtype=torch.int64),
        rounds=torch.ones(count, 1, dtype=torch.int64),
        distributions=Distributions(
            torch.arange(count + 1), torch.zeros(count, dtype=torch.int64), torch.ones(count), 5
        ),
    )


def test_every_data_set_brings_its_splits(tmp_path: Path) -> None:
    with_test = DatasetConfig(_file(tmp_path / "a", ["one", "two"], "a"), _file(tmp_path / "b", ["three"], "b"))
    alone = DatasetConfig(_file(tmp_path / "c", ["four"], "c"))
    config = _config(first=with_test, second=alone)
    assert [s.name for s in read_sources(config)] == ["first-train", "first-test", "second-train"]
    # for evaluation the training prompts are not read, unless there is nothing else
    assert [s.name for s in read_sources(config, splits=("test",))] == ["first-test", "second-train"]


def test_a_text_in_train_and_test_is_refused(tmp_path: Path) -> None:
    both = DatasetConfig(_file(tmp_path / "a", ["one", "two"], "a"), _file(tmp_path / "b", ["two"], "b"))
    with pytest.raises(UserError, match="1 prompts are both in train and in test, such as 'a1' and 'b0'"):
        read_sources(_config(toy=both))


def test_an_id_in_two_sources_is_refused(tmp_path: Path) -> None:
    both = DatasetConfig(_file(tmp_path / "a", ["one"], "x"), _file(tmp_path / "b", ["two"], "x"))
    with pytest.raises(UserError, match="'x0' is in toy-train and in toy-test"):
        read_sources(_config(toy=both))


def test_unseen_prompts_are_those_not_learned_from() -> None:
    assert unseen(_table(4), torch.tensor([0, 2, 99])).prompt_ids == ("p1", "p3")
    with pytest.raises(UserError, match="trained on all 2 prompts"):
        unseen(_table(2), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 5]), (4, [0, 2, 5, 7]), (10, range(10)), (99, range(10))]
)
def test_decoded_prompts_are_spread_over_the_test_set(count: int, expected: list[int]) -> None:
    assert spread(_table(10), count).prompt_ids == tuple(f"p{i}" for i in expected)
