"""The verification rule: what of a block is committed. One rule for every temperature.

The target draws its own token at each position; a draft is accepted iff it equals that draw; at the first
mismatch the draw itself is emitted. Knows tokens; nothing of models.

Shapes: N positions of the block (anchor included), S stop tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def settle(drafts: Tensor, draws_N: Tensor, budget: int | Tensor, stop_ids_S: Tensor) -> Tensor:
    """What a round commits, computed where the tokens are and read by the host in one go.

    Accepted drafts + 1 bonus, cut at the first stop token (itself committed) and at the budget.

    Args:
        drafts: int64, as many as were drafted, at most ``N - 1``.
        draws_N: the target's draws, int64; those up to the first mismatch are what an endless round would emit.
        budget: output tokens still allowed, at least 1.
        stop_ids_S: tokens that end the output.

    Returns:
        int64 ``[2 + N]``: tokens committed, tokens an endless round would commit, the draws.
    """
    # the bonus ends a round in which every draft was right
    wrong = torch.nn.functional.pad(draws_N[: len(drafts)] != drafts, (0, 1), value=True)
    uncut = wrong.int().argmax(dim=0, keepdim=True) + 1
    last = torch.minimum(uncut, torch.as_tensor(budget, device=draws_N.device)) - 1
    ends = (draws_N[:, None] == stop_ids_S).any(dim=1).scatter(0, last, True)
    committed = ends.int().argmax(dim=0, keepdim=True) + 1
    return torch.cat([committed, uncut, draws_N])


def block_width(block_size: int, position: int, max_positions: int) -> int:
    """Positions a block may take from ``position`` on: the block size, shrunk only by a model's position limit."""
    return min(block_size, max_positions - position)


def output_budget(max_new_tokens: int, prompt_length: int, max_positions: int) -> int:
    """Output tokens that fit: the last one needs no position of its own."""
    return min(max_new_tokens, max_positions - prompt_length + 1)
