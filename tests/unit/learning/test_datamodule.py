"""Splits by prompt id, refusals, and batches that are the table's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.learning import FeatureExtractor
from blockpilot.learning.datamodule import LabelBatch, LabelDataModule, hash_fraction, split_table
from blockpilot.oracle.table import LabelTable, concatenate

TableMaker = Callable[..., LabelTable]


def _datamodule(train: LabelTable, test: LabelTable | None = None, **kwargs: object) -> LabelDataModule:
    if test is None:
        test, train = split_table(train, (0.2,), "test")
    arguments = {"block_sizes": train.block_sizes, "extractor": FeatureExtractor(), **kwargs}
    return LabelDataModule(collect=lambda: None, load=lambda: (train, test), **arguments)  # type: ignore[arg-type]


def test_a_known_hash() -> None:
    """The split is part of the results: it must not change between versions."""
    assert hash_fraction("gsm8k/test/0", seed=0) == pytest.approx(0.26685278180653427, abs=1e-12)


def test_splits_are_disjoint_complete_and_about_the_asked_size(make_table: TableMaker) -> None:
    table = make_table(3000)
    parts = [set(part.prompt_ids) for part in split_table(table, (0.3, 0.35), 0)]
    assert set.union(*parts) == set(table.prompt_ids) and sum(map(len, parts)) == 3000
    # four standard deviations of a binomial
    assert len(parts[0]) == pytest.approx(900, abs=100)
    assert len(parts[1]) == pytest.approx(1050, abs=105)


def test_turns_of_one_conversation_stay_together(make_table: TableMaker) -> None:
    table = make_table(400)
    table = dataclasses.replace(table, prompt_ids=tuple(f"c{i // 2}#{i % 2}" for i in range(400)))
    first, second = split_table(table, (0.5,), 0)
    conversations = [{i.split("#")[0] for i in part.prompt_ids} for part in (first, second)]
    assert all(conversations) and not conversations[0] & conversations[1]


def test_membership_depends_on_neither_order_nor_other_prompts(make_table: TableMaker) -> None:
    few = make_table(200)
    many = concatenate([make_table(300, prefix="other"), few.select(torch.arange(199, -1, -1))])
    for ours, theirs in zip(split_table(few, (0.2, 0.3), 5), split_table(many, (0.2, 0.3), 5), strict=True):
        assert set(ours.prompt_ids) == {i for i in theirs.prompt_ids if not i.startswith("other")}


def test_another_seed_is_another_split(make_table: TableMaker) -> None:
    table = make_table(100)
    assert split_table(table, (0.5,), 0)[0].prompt_ids != split_table(table, (0.5,), 1)[0].prompt_ids


def test_a_test_table_of_its_own_is_used_whole(make_table: TableMaker) -> None:
    data = _datamodule(make_table(200), make_table(30, prefix="t"), block_sizes=(15, 16, 17))
    data.setup()
    assert data.test_table.prompt_ids == make_table(30, prefix="t").prompt_ids
    assert data.train_table.block_sizes == data.test_table.block_sizes == (15, 16, 17)
    assert len(data.train_table) + len(data.validation_table) == 200


def test_overlap_of_train_and_test_is_refused(make_table: TableMaker) -> None:
    test = concatenate([make_table(5, prefix="t"), make_table(200).select([7])])
    with pytest.raises(UserError, match=r"share 1 prompts, such as 'p7'"):
        _datamodule(make_table(200), test).setup()
    renamed = dataclasses.replace(make_table(200).select([7]), prompt_ids=("other",))
    with pytest.raises(UserError, match=r"share 1 prompts, such as 'other'"):
        _datamodule(make_table(200), renamed).setup()


def test_empty_splits_are_refused_with_counts(make_table: TableMaker) -> None:
    with pytest.raises(UserError, match=r"train \d of \d, validation \d of \d, test \d of \d"):
        _datamodule(make_table(1), make_table(2, prefix="t")).setup()
    silent = dataclasses.replace(make_table(9, prefix="t"), rounds=torch.zeros(9, 5, dtype=torch.int64))
    with pytest.raises(UserError, match="test 0 of 9"):
        _datamodule(make_table(200), silent).setup()


def test_missing_candidates_are_refused(make_table: TableMaker) -> None:
    with pytest.raises(UserError, match=r"\[19\] have no labels"):
        _datamodule(make_table(50), block_sizes=(18, 19)).setup()


def test_collect_runs_in_prepare_data_and_load_once(make_table: TableMaker) -> None:
    calls: list[str] = []
    table = make_table(100)

    def load() -> tuple[LabelTable, LabelTable]:
        calls.append("load")
        return table, make_table(10, prefix="t")

    data = LabelDataModule(lambda: calls.append("collect"), load, FeatureExtractor(), table.block_sizes)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert calls == ["collect", "load"]


@pytest.mark.parametrize("kind", ["probs", "stats"])
def test_batches_are_rows_of_the_table(kind: str, make_table: TableMaker) -> None:
    extractor = FeatureExtractor(kind)
    data = _datamodule(make_table(100), extractor=extractor, batch_size=8)
    data.setup()
    table = data.validation_table
    batches: list[LabelBatch] = list(data.val_dataloader())
    assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)
    assert torch.equal(torch.cat([batch.committed_tokens for batch in batches]), table.committed_tokens)
    written = torch.cat([batch.features.dense(40) for batch in batches])
    assert torch.equal(written, extractor.from_table(table).dense(40))


def test_training_order_is_shuffled_anew_each_epoch_and_fixed_by_the_seed(make_table: TableMaker) -> None:
    def orders(seed: int) -> list[torch.Tensor]:
        data = _datamodule(table, make_table(5, prefix="t"), seed=seed, batch_size=16)
        data.setup()
        loader = data.train_dataloader()
        found = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # as Lightning does
            found.append(torch.cat([batch.committed_tokens[:, 0] for batch in loader]))
        return found

    table = make_table(200)
    # committed_tokens made unique, so that it tells the prompts apart
    table = dataclasses.replace(table, committed_tokens=torch.arange(1000).reshape(200, 5))
    first, second = orders(0)
    again_first, again_second = orders(0)
    assert torch.equal(first, again_first) and torch.equal(second, again_second)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
