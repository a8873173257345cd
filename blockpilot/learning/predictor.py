"""The block-size classifier: an MLP from prefill features to one score per candidate block size.

Knows features and candidates; nothing of labels, losses or targets. Architecture: BlockPilot, arXiv 2606.31315.

Shapes: N prompts, K candidate block sizes, V input size, W width, Z stored non-zeros in all, U distinct
tokens among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from blockpilot.config import require
from blockpilot.learning.decision import Decision
from blockpilot.learning.features import Features, row_of_each_entry

FEW_TOKENS = 64
"""A single row of so few tokens is a product of its own: an embedding bag costs more to set up."""
PIECE_TOKENS = 512
"""A longer single row is summed in pieces of so many tokens."""
CHUNK_TOKENS = 512
"""Tokens of a batch whose weights are gathered at a time: 4 MiB at a width of 2048, which stay in the cache."""
MOSTLY_EMPTY = 8
"""Rows that share their tokens are multiplied as a dense matrix of prompts by distinct tokens, unless it has more than
so many places for each entry: then an embedding bag is faster."""


class SparseLinear(nn.Module):
    """``nn.Linear(V, W)`` on sparse rows: reads the weights of the stored non-zeros only.

    The same function, gradients and initial distribution as ``nn.Linear`` on the rows written out in full; the
    weight is stored transposed, ``[V, W]``, so that a token's weights lie together, and its gradient is sparse: it
    holds the tokens of the batch only. :class:`~blockpilot.learning.optimizer.LazyAdamW` takes such gradients.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        bound = 1 / math.sqrt(in_features)  # what nn.Linear.reset_parameters amounts to
        weight_VW = torch.empty(in_features, out_features).uniform_(-bound, bound)
        # an EmbeddingBag(sparse=True) tells DistributedDataParallel to expect sparse gradients, of all it holds: so
        # the bias is not in it
        self.table = nn.EmbeddingBag.from_pretrained(
            weight_VW, freeze=False, mode="sum", sparse=True, include_last_offset=True
        )
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))

    @property
    def weight(self) -> Tensor:
        """``[V, W]``."""
        return self.table.weight

    def on_raw_inputs(self) -> tuple[Tensor, Tensor]:
        """Weight ``[W, V]`` and bias of the ``nn.Linear`` that is the same function."""
        return self.weight.detach().T, self.bias.detach()

    def forward(self, features: Features) -> Tensor:  # type: ignore[override]
        """Sparse rows to ``[N, W]``; no gradient flows to the features."""
        assert features.offsets is not None and features.token_ids is not None, "SparseLinear needs sparse features"
        assert not features.values.requires_grad, "SparseLinear gives no gradient to its features"
        weighted_sum = _WeightedSum.apply if torch.is_grad_enabled() else _weighted_sum
        values = features.values.to(self.weight.dtype)
        return weighted_sum(self.weight, features.token_ids, features.offsets, values) + self.bias


def _weighted_sum(weight_VW: Tensor, token_ids: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
    """Sparse rows (CSR) times a matrix, ``[N, W]``."""
    if len(offsets) == 2:
        return _single_row(weight_VW, token_ids, values)
    distinct, held_UN = _by_token(token_ids, offsets, values)
    if held_UN is None:
        return _bag(weight_VW, token_ids, offsets, values)
    total_NW = weight_VW.new_zeros(len(offsets) - 1, weight_VW.shape[1])
    copies = weight_VW.new_empty(min(CHUNK_TOKENS, len(distinct)), weight_VW.shape[1])
    for tokens, held in zip(distinct.split(CHUNK_TOKENS), held_UN.split(CHUNK_TOKENS), strict=True):
        rows = torch.index_select(weight_VW, 0, tokens, out=copies[: len(tokens)])
        total_NW.addmm_(held.T, rows)
    return total_NW


def _single_row(weight_VW: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """One sparse row times a matrix, ``[1, W]``."""
    if len(token_ids) <= FEW_TOKENS:
        return (values @ weight_VW[token_ids])[None]
    # threads share the bags, never the inside of one
    starts = torch.arange(0, len(token_ids), PIECE_TOKENS, device=token_ids.device)
    pieces = torch.cat([starts, starts.new_tensor([len(token_ids)])])
    return _bag(weight_VW, token_ids, pieces, values).sum(dim=0, keepdim=True)


def _bag(weight: Tensor, indices: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
    return nn.functional.embedding_bag(
        indices, weight, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
    )


def _by_token(token_ids: Tensor, offsets: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """The distinct tokens (rising, ``[U]``), and the rows as a matrix ``[U, N]`` unless that is mostly empty."""
    distinct, place = token_ids.unique(return_inverse=True)
    num_rows = len(offsets) - 1
    if len(distinct) * num_rows > MOSTLY_EMPTY * len(token_ids):
        return distinct, None
    held_UN = values.new_zeros(len(distinct), num_rows)
    return distinct, held_UN.index_put_((place, row_of_each_entry(offsets)), values, accumulate=True)


class _WeightedSum(torch.autograd.Function):
    """:func:`_weighted_sum` whose weight gradient is a coalesced sparse tensor of the batch's U distinct tokens.

    torch's own sparse gradient of an embedding bag has a row of W numbers for every stored entry, repeated tokens
    included: 1 GB for 64 prompts of 2,000 tokens at W = 2048. Here the gradient of a token is the sum over the
    prompts that hold it, ``sum_n value(n, token) * delta_n``: the same sum with the roles of prompts and tokens
    exchanged, so it costs U x W numbers and nothing of size Z x W.
    """

    @staticmethod
    def forward(ctx: Any, weight_VW: Tensor, token_ids: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids, offsets, values)
        ctx.weight_shape = weight_VW.shape
        # detached, torch takes the kernel that prepares nothing for a backward pass of its own
        return _weighted_sum(weight_VW.detach(), token_ids, offsets, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor, None, None, None]:
        token_ids, offsets, values = ctx.saved_tensors
        delta_NW = deltas[0].contiguous()
        distinct, held_UN = _by_token(token_ids, offsets, values)
        if held_UN is None:
            sorted_ids, order = token_ids.sort(stable=True)
            counts = sorted_ids.unique_consecutive(return_counts=True)[1]
            bags = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            rows_UW = _bag(delta_NW, row_of_each_entry(offsets)[order], bags, values[order])
        else:
            rows_UW = held_UN @ delta_NW
        gradient = torch.sparse_coo_tensor(
            distinct.long()[None], rows_UW, ctx.weight_shape, is_coalesced=True, check_invariants=False
        )
        return gradient, None, None, None


class DenseLinear(nn.Linear):
    """``nn.Linear`` on dense :class:`Features`, each input shifted and scaled: ``(x - mean) / scale``."""

    mean: Tensor
    """``[V]``; 0 until :meth:`standardize`."""
    scale: Tensor
    """``[V]``; 1 until :meth:`standardize`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("scale", torch.ones(in_features))

    def standardize(self, values_NV: Tensor) -> None:
        """Takes mean and deviation of each input from training prompts; an input that never varies is only shifted."""
        deviation_V, mean_V = torch.std_mean(values_NV.to(self.mean), dim=0, correction=0)
        self.mean.copy_(mean_V)
        self.scale.copy_(torch.where(deviation_V > 0, deviation_V, 1))

    def on_raw_inputs(self) -> tuple[Tensor, Tensor]:
        """Weight ``[W, V]`` and bias of the ``nn.Linear`` that is the same function of inputs as they come."""
        weight_WV = self.weight.detach() / self.scale
        return weight_WV, self.bias.detach() - weight_WV @ self.mean

    def forward(self, input: Features) -> Tensor:  # noqa: D102  (named as in nn.Linear)
        assert input.offsets is None, "DenseLinear needs dense features"
        return super().forward((input.values.to(self.weight.dtype) - self.mean) / self.scale)


class BlockSizePredictor(nn.Module):
    """MLP with ``depth`` hidden layers; ReLU, the plain choice for the paper's "MLP", and dropout after each.

    Args:
        input_size: length of a feature row.
        block_sizes: the K candidates, in the order of the outputs.
        sparse_input: whether features come as sparse rows.
        depth: number of hidden layers.
        width: units per hidden layer.
        dropout: dropout probability after each hidden layer.
        residual: add a hidden layer's input to its output, for every hidden layer after the first.
        always_block_size: B, what ``min_gain`` falls back to; without ``min_gain`` it need not be a candidate.
        min_gain: see :class:`~blockpilot.learning.decision.Decision`; None chooses the highest score.
    """

    def __init__(
        self,
        input_size: int,
        block_sizes: Sequence[int],
        *,
        sparse_input: bool,
        depth: int = 2,
        width: int = 2048,
        dropout: float = 0.2,
        residual: bool = True,
        always_block_size: int | None = None,
        min_gain: float | None = None,
    ):
        super().__init__()
        self.input_size = input_size
        self.block_sizes = tuple(block_sizes)
        self.residual = residual
        self.first = (SparseLinear if sparse_input else DenseLinear)(input_size, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, len(self.block_sizes))
        self.dropout = dropout
        sizes = self.block_sizes
        known = always_block_size in sizes
        require(known or min_gain is None, "predictor.min_gain", min_gain, f"null where B is none of {list(sizes)}")
        self.decision = Decision(len(sizes), sizes.index(always_block_size) if known else 0, min_gain)

    def forward(self, features: Features) -> Tensor:
        """Scores, ``[N, K]``."""
        states_NW = self._activated(self.first(features))
        for layer in self.hidden:
            update_NW = self._activated(layer(states_NW))
            states_NW = states_NW + update_NW if self.residual else update_NW
        return self.head(states_NW)

    def _activated(self, states_NW: Tensor) -> Tensor:
        active = nn.functional.relu(states_NW)
        return nn.functional.dropout(active, self.dropout) if self.training else active

    @torch.no_grad()
    def scores(self, features: Features) -> Tensor:
        """Scores without dropout whatever the mode, ``[N, K]`` where the weights are."""
        was_training = self.training
        self.eval()
        try:
            return self(features.to(self.head.weight.device))
        finally:
            self.train(was_training)

    def choose(self, features: Features) -> Tensor:
        """Block sizes by the :attr:`decision`, int64 ``[N]`` on the CPU; dropout is off whatever the mode."""
        columns = self.decision(self.scores(features))
        return torch.tensor([self.block_sizes[column] for column in columns.tolist()])
