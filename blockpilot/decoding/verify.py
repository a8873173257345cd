"""The verification rule: what of a block is committed. One rule for every temperature.

The target draws its own token at each position; a draft is accepted iff it equals that draw; at the first
mismatch the draw itself is emitted. Knows token lists; nothing of models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def count_matches(drafts: Sequence[int], draws: Sequence[int]) -> int:
    """Length of the common prefix: accepted drafts."""
    count = 0
    for draft, draw in zip(drafts, draws, strict=False):
        if draft != draw:
            break
        count += 1
    return count


def committed_length(draws: Sequence[int], accepted: int, budget: int, stop_ids: Collection[int]) -> int:
    """Tokens a round commits: accepted drafts + 1 bonus, cut at the first stop token and at the budget.

    Args:
        draws: the target's draws; the first ``accepted + 1`` of them are what an endless round would emit.
        accepted: from :func:`count_matches`.
        budget: output tokens still allowed, at least 1.
        stop_ids: tokens that end the output (themselves included in it).
    """
    length = min(accepted + 1, budget)
    for index in range(length):
        if draws[index] in stop_ids:
            return index + 1
    return length


def block_width(block_size: int, position: int, max_positions: int) -> int:
    """Positions a block may take from ``position`` on: the block size, shrunk only by a model's position limit."""
    return min(block_size, max_positions - position)


def output_budget(max_new_tokens: int, prompt_length: int, max_positions: int) -> int:
    """Output tokens that fit: the last one needs no position of its own."""
    return min(max_new_tokens, max_positions - prompt_length + 1)
