"""The classifier: the sparse first layer is Linear, the shape is the paper's, choices are block sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from blockpilot.learning import BlockSizePredictor, FeatureExtractor, Features
from blockpilot.learning.predictor import DenseLinear, SparseLinear
from blockpilot.oracle.prefill import sparse_distributions
from blockpilot.oracle.table import LabelTable


def _sparse(num_rows: int, vocab_size: int) -> Features:
    rows = sparse_distributions(2 * torch.randn(num_rows, vocab_size), tail_mass=0.05)
    return Features(rows.probs, rows.offsets, rows.token_ids)


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])  # live ones, and those of a cache
@pytest.mark.parametrize("rows", [6, 1])
def test_sparse_linear_equals_linear_on_dense_rows_with_gradients(ids: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    features = _sparse(rows, 30)
    assert features.token_ids is not None
    features = Features(features.values, features.offsets, features.token_ids.to(ids))
    sparse, dense = SparseLinear(30, 8), nn.Linear(30, 8)
    dense.load_state_dict({"weight": sparse.weight.T, "bias": sparse.bias})
    out, expected = sparse(features), dense(features.dense(30))
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert sparse.weight.grad is not None and dense.weight.grad is not None
    torch.testing.assert_close(sparse.weight.grad, dense.weight.grad.T)
    torch.testing.assert_close(sparse.bias.grad, dense.bias.grad)


def test_sparse_linear_takes_an_empty_row() -> None:
    layer = SparseLinear(4, 3)
    empty_then_one = Features(torch.tensor([1.0]), torch.tensor([0, 0, 1]), torch.tensor([2]))
    out = layer(empty_then_one)
    torch.testing.assert_close(out, torch.stack([layer.bias, layer.weight[2] + layer.bias]))


def test_sparse_linear_starts_as_linear_does() -> None:
    torch.manual_seed(0)
    sparse, dense = SparseLinear(400, 500), nn.Linear(400, 500)
    bound = 1 / math.sqrt(400)
    for name in ("weight", "bias"):
        mine, theirs = getattr(sparse, name).detach().flatten(), getattr(dense, name).detach().flatten()
        assert mine.abs().max() <= bound and mine.abs().max() > 0.98 * bound
        quantiles = torch.linspace(0, 1, 11)
        gap = (mine[:100_000].quantile(quantiles) - theirs[:100_000].quantile(quantiles)).abs().max()
        assert gap < (0.01 if name == "weight" else 0.2) * bound


@pytest.mark.parametrize("residual", [True, False])
def test_forward_is_the_documented_network(residual: bool) -> None:
    torch.manual_seed(0)
    predictor = BlockSizePredictor(5, [3, 4], sparse_input=False, depth=3, width=8, residual=residual).eval()
    rows = torch.randn(7, 5)
    states = torch.relu(nn.functional.linear(rows, predictor.first.weight, predictor.first.bias))
    for layer in predictor.hidden:
        update = torch.relu(layer(states))
        states = states + update if residual else update
    torch.testing.assert_close(predictor(Features(rows)), predictor.head(states))


def test_defaults_are_the_papers() -> None:
    predictor = BlockSizePredictor(10, range(14, 19), sparse_input=True)
    assert (predictor.first.weight.shape, len(predictor.hidden)) == ((10, 2048), 1)
    assert (predictor.dropout, predictor.residual, predictor.head.out_features) == (0.2, True, 5)


def test_choose_returns_block_sizes_without_dropout() -> None:
    torch.manual_seed(0)
    predictor = BlockSizePredictor(30, [2, 5, 11], sparse_input=True, width=16, dropout=0.9).train()
    features = _sparse(50, 30)
    chosen = predictor.choose(features)
    assert predictor.training
    assert torch.equal(chosen, predictor.choose(features))
    columns = predictor.eval()(features).argmax(dim=-1)
    assert torch.equal(chosen, torch.tensor([2, 5, 11])[columns])


def test_a_layer_refuses_features_of_the_other_form(make_table: Callable[..., LabelTable]) -> None:
    table = make_table(2)
    with pytest.raises(AssertionError, match="sparse"):
        SparseLinear(40, 3)(FeatureExtractor("logits").from_table(table))
    with pytest.raises(AssertionError, match="dense"):
        DenseLinear(40, 3)(FeatureExtractor("probs").from_table(table))
