"""The six views of a prefill: values, and the same ones from a stored table and from live logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.learning import FeatureExtractor, Features
from blockpilot.learning.features import LOG_PROB_FLOOR, STATS
from blockpilot.oracle.table import Distributions, LabelTable

KINDS = ("probs", "log_probs", "logits", "topk", "stats", "hidden")


@pytest.fixture
def hand_table(make_table: Callable[..., LabelTable]) -> LabelTable:
    """Two prompts over six tokens: one certain, one with 0.5, 0.25, 0.125 and a dropped 0.125."""
    rows = Distributions(
        torch.tensor([0, 1, 4]), torch.tensor([5, 2, 0, 4]), torch.tensor([1.0, 0.5, 0.25, 0.125]), vocab_size=6
    )
    return dataclasses.replace(make_table(2), distributions=rows)


def test_probs_and_log_probs(hand_table: LabelTable) -> None:
    probs = FeatureExtractor("probs").from_table(hand_table).dense(6)
    assert probs.tolist() == [[0, 0, 0, 0, 0, 1], [0.25, 0, 0.5, 0, 0.125, 0]]
    logs = FeatureExtractor("log_probs").from_table(hand_table).dense(6)
    assert ((logs == 0) == (probs == 0)).all()
    assert logs[1, 2] == pytest.approx(math.log(0.5 / LOG_PROB_FLOOR), rel=1e-6)


def test_log_probs_never_fall_below_a_dropped_entry() -> None:
    logits = torch.tensor([0.0, -15.0, -25.0])  # the last one's probability lies below the floor
    values = FeatureExtractor("log_probs", tail_mass=0.0).from_logits(logits).values
    assert len(values) == 3 and values[1] > 0 and values[2] == 0


def test_topk_pads_and_cuts(hand_table: LabelTable) -> None:
    assert FeatureExtractor("topk", top_k=5).from_table(hand_table).values.tolist() == [
        [1, 0, 0, 0, 0],
        [0.5, 0.25, 0.125, 0, 0],
    ]
    assert FeatureExtractor("topk", top_k=2).from_table(hand_table).values.tolist() == [[1, 0], [0.5, 0.25]]


def test_stats(hand_table: LabelTable) -> None:
    stats = FeatureExtractor("stats").from_table(hand_table).values
    certain, spread = (dict(zip(STATS, row, strict=True)) for row in stats.tolist())
    masses = {"top3_mass": 1, "top5_mass": 1, "top10_mass": 1, "tail_mass": 0}
    assert certain == {"entropy": 0, "max": 1, "margin": 1, "log_count": 0, **masses}
    entropy = -sum(p * math.log(p) for p in (0.5, 0.25, 0.125))
    masses = {"top3_mass": 0.875, "top5_mass": 0.875, "top10_mass": 0.875, "tail_mass": 0.125}
    expected = {"entropy": entropy, "max": 0.5, "margin": 0.25, "log_count": math.log(3), **masses}
    assert spread == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail_mass", [0.0, 1e-3, 0.2])
def test_live_logits_give_the_features_of_the_table(
    kind: str, tail_mass: float, make_table: Callable[..., LabelTable]
) -> None:
    table = make_table(20, tail_mass=tail_mass)
    extractor = FeatureExtractor(kind, top_k=7, tail_mass=tail_mass)
    stored = extractor.from_table(table)
    assert table.logits is not None and table.hidden is not None
    for i in range(len(table)):
        live = extractor.from_logits(table.logits[i], table.hidden[i])
        row = stored.select(torch.tensor([i]))
        assert len(live) == 1 and torch.equal(live.values, row.values)
        if extractor.is_sparse:
            assert live.token_ids is not None and row.token_ids is not None
            assert torch.equal(live.token_ids, row.token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_input_size_is_the_length_of_a_row(kind: str, make_table: Callable[..., LabelTable]) -> None:
    table = make_table(3)
    assert table.hidden is not None
    extractor = FeatureExtractor(kind, top_k=7)
    size = extractor.input_size(table.distributions.vocab_size, table.hidden.shape[1])
    features = extractor.from_table(table)
    assert (features.offsets is not None) == extractor.is_sparse
    assert features.dense(size).shape == (3, size)


@pytest.mark.parametrize("kind", KINDS)
def test_select_equals_indexing_the_dense_rows(kind: str, make_table: Callable[..., LabelTable]) -> None:
    features = FeatureExtractor(kind).from_table(make_table(9))
    size = 40 if features.offsets is not None else features.values.shape[1]
    index = torch.tensor([8, 0, 0, 3])
    selected: Features = features.select(index)
    assert len(selected) == 4
    assert torch.equal(selected.dense(size), features.dense(size)[index])


@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_missing_columns_name_the_key_that_stores_them(kind: str, make_table: Callable[..., LabelTable]) -> None:
    table = dataclasses.replace(make_table(3), logits=None, hidden=None)
    with pytest.raises(UserError, match=f"oracle.store_{kind}=true"):
        FeatureExtractor(kind).from_table(table)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"preprocess\.kind='probz'"):
        FeatureExtractor("probz")
    with pytest.raises(UserError, match="tail_mass"):
        FeatureExtractor(tail_mass=1.0)
    with pytest.raises(UserError, match="hidden_size"):
        FeatureExtractor("hidden").input_size(40)
    with pytest.raises(UserError, match="hidden state"):
        FeatureExtractor("hidden").from_logits(torch.zeros(4))
