"""The block-size classifier: an MLP from prefill features to one score per candidate block size.

Knows features and candidates; nothing of labels, losses or targets. Architecture: BlockPilot, arXiv 2606.31315.

Shapes: N prompts, K candidate block sizes, V input size, W width, Z stored non-zeros in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockpilot.learning.decision import Decision
from blockpilot.learning.features import Features

FEW_TOKENS = 64
"""A single row of so few tokens is a product of its own: an embedding bag costs more to set up."""


class SparseLinear(nn.Module):
    """``nn.Linear(V, W)`` on sparse rows: reads the weights of the stored non-zeros only.

    The same function, gradients and initial distribution as ``nn.Linear`` on the rows written out in full; the
    weight is stored transposed, ``[V, W]``, so that a token's weights lie together.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        # Gradients stay dense: with sparse ones, only SparseAdam works, which is not AdamW (no weight decay, and
        # moments that stand still for absent tokens). benchmarks/predictor.py shows what that costs.
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        bound = 1 / math.sqrt(in_features)  # what nn.Linear.reset_parameters amounts to
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, features: Features) -> Tensor:
        """Sparse rows to ``[N, W]``."""
        assert features.offsets is not None and features.token_ids is not None, "SparseLinear needs sparse features"
        if len(features) == 1 and len(features.token_ids) <= FEW_TOKENS:
            weights = features.values.to(self.weight.dtype)
            return (weights @ self.weight[features.token_ids] + self.bias)[None]
        summed = nn.functional.embedding_bag(
            features.token_ids,
            self.weight,
            features.offsets,
            mode="sum",
            per_sample_weights=features.values.to(self.weight.dtype),
            include_last_offset=True,
        )
        return summed + self.bias


class DenseLinear(nn.Linear):
    """``nn.Linear`` that takes dense :class:`Features`."""

    def forward(self, input: Features) -> Tensor:  # noqa: D102  (named as in nn.Linear)
        assert input.offsets is None, "DenseLinear needs dense features"
        return super().forward(input.values.to(self.weight.dtype))


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
        always_block_size: B, what ``min_gain`` falls back to; the middle candidate if not given.
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
        always = len(sizes) // 2 if always_block_size is None else sizes.index(always_block_size)
        self.decision = Decision(len(sizes), always, min_gain)

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
