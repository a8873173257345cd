"""The classifier: the sparse first layer is Linear, the shape is the paper's, choices are block sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blockpilot.learning.predictor as predictor_module
from blockpilot.learning import BlockSizePredictor, FeatureExtractor, Features
from blockpilot.learning.predictor import DenseLinear, SparseLinear
from blockpilot.oracle.prefill import sparse_distributions
from blockpilot.oracle.table import LabelTable

SHAPES = {"shared": (6, 30), "one": (1, 30), "one long": (1, 6000), "mostly empty": (12, 40)}
"""Prompts and vocabulary, one for each way the product is made."""


def _of_shape(shape: str) -> tuple[Features, int]:
    num_rows, vocab_size = SHAPES[shape]
    if shape != "mostly empty":
        features = _sparse(num_rows, vocab_size)
    else:  # tokens 3 to 37, two of them in two prompts, the fifth prompt without any
        ids = torch.tensor([*range(3, 37, 3), 9, 30])
        lengths = torch.tensor([0, 1, 2, 1, 1, 0, 2, 1, 1, 2, 1, 1, 1])
        features = Features(torch.rand(len(ids)), lengths.cumsum(0), ids)
    assert features.offsets is not None and features.token_ids is not None
    assert len(features) == num_rows and features.offsets[-1] == len(features.token_ids)
    empty = len(features.token_ids.unique()) * num_rows > predictor_module.MOSTLY_EMPTY * len(features.token_ids)
    assert empty == (shape == "mostly empty")
    assert (len(features.token_ids) > 2 * predictor_module.PIECE_TOKENS) == (shape == "one long")
    return features, vocab_size


def _sparse(num_rows: int, vocab_size: int) -> Features:
    rows = sparse_distributions(2 * torch.randn(num_rows, vocab_size), tail_mass=0.05)
    return Features(rows.probs, rows.offsets, rows.token_ids)


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])  # live ones, and those of a cache
@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_linear_equals_linear_on_dense_rows_with_gradients(ids: torch.dtype, shape: str) -> None:
    torch.manual_seed(0)
    features, vocab_size = _of_shape(shape)
    assert features.token_ids is not None
    features = Features(features.values.double(), features.offsets, features.token_ids.to(ids))
    sparse, dense = SparseLinear(vocab_size, 8).double(), nn.Linear(vocab_size, 8).double()
    dense.load_state_dict({"weight": sparse.weight.T, "bias": sparse.bias})
    out, expected = sparse(features), dense(features.dense(vocab_size))
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert sparse.weight.grad is not None and dense.weight.grad is not None
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad.T)
    torch.testing.assert_close(sparse.bias.grad, dense.bias.grad)
    with torch.no_grad():
        torch.testing.assert_close(sparse(features), expected)


class DenseGradient(torch.autograd.Function):
    """Changes nothing but the layout of the gradient: gradcheck takes dense ones."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert gradients[0].is_sparse
        return gradients[0].to_dense()


@pytest.mark.parametrize("shape", ["shared", "one", "mostly empty"])
def test_the_gradient_of_a_sparse_linear_is_that_of_finite_differences(shape: str) -> None:
    torch.manual_seed(0)
    features, vocab_size = _of_shape(shape)
    layer = SparseLinear(vocab_size, 3).double()
    features = Features(features.values.double(), features.offsets, features.token_ids)

    def out(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"table.weight": DenseGradient.apply(weight)}, (features,)).tanh()

    assert torch.autograd.gradcheck(out, layer.weight.detach().requires_grad_())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_holds_each_token_of_the_batch_once(shape: str) -> None:
    features, vocab_size = _of_shape(shape)
    layer = SparseLinear(vocab_size, 8)
    layer(features).square().sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None and gradient.is_sparse and features.token_ids is not None
    assert torch.equal(gradient._indices()[0], features.token_ids.unique())
    assert gradient._values().shape == (len(features.token_ids.unique()), 8)


def test_distributed_training_is_told_of_the_sparse_gradient() -> None:
    layer = SparseLinear(30, 8)
    # what DistributedDataParallel looks at, and that it holds nothing with a dense gradient
    bags = [part for part in layer.modules() if isinstance(part, nn.EmbeddingBag) and part.sparse]
    assert [[name for name, _ in bag.named_parameters()] for bag in bags] == [["weight"]]
    assert layer.state_dict().keys() == {"table.weight", "bias"} and layer.weight.shape == (30, 8)


def test_sparse_linear_refuses_to_differentiate_its_features() -> None:
    features = Features(torch.ones(2, requires_grad=True), torch.tensor([0, 2]), torch.tensor([1, 3]))
    with pytest.raises(AssertionError, match="gradient"):
        SparseLinear(5, 2)(features)


def test_a_batch_of_empty_rows_has_an_empty_gradient() -> None:
    layer = SparseLinear(4, 3)
    nothing = Features(torch.empty(0), torch.tensor([0, 0, 0]), torch.empty(0, dtype=torch.int64))
    out = layer(nothing)
    torch.testing.assert_close(out, layer.bias.expand(2, 3))
    out.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad._values().shape == (0, 3)


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
