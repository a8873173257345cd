"""What of a block is committed: tables of cases, and a property against a slow definition."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.decoding.verify import block_width, output_budget, settle


def settled(
    drafts: Sequence[int], draws: Sequence[int], budget: int = 100, stops: Collection[int] = ()
) -> tuple[int, int]:
    """Committed and uncut; the draws come back as they were, and a budget on the device gives the same."""
    tokens = [torch.tensor(list(part), dtype=torch.int64) for part in (drafts, draws, stops)]
    found = settle(tokens[0], tokens[1], budget, tokens[2])
    assert found.dtype == torch.int64
    assert torch.equal(found, settle(tokens[0], tokens[1], torch.tensor([budget]), tokens[2]))
    committed, uncut, *rest = found.tolist()
    assert rest == list(draws)
    return committed, uncut


@pytest.mark.parametrize(
    ("drafts", "draws", "expected"),
    [
        ([], [7], 1),
        ([7], [7, 8], 2),
        ([7], [6, 8], 1),
        ([1, 2, 3], [1, 2, 3, 4], 4),
        ([1, 9, 3], [1, 2, 3, 4], 2),  # a later match does not count
        ([9, 2, 3], [1, 2, 3, 4], 1),
        ([1, 2, 9], [1, 2, 3, 4], 3),
    ],
)
def test_accepted_drafts_and_one_more(drafts: list[int], draws: list[int], expected: int) -> None:
    assert settled(drafts, draws) == (expected, expected)


@pytest.mark.parametrize(
    ("accepted", "budget", "stops", "expected"),
    [
        (0, 100, {0}, 1),  # nothing accepted: the bonus alone
        (3, 100, {0}, 4),  # all accepted, and the bonus
        (3, 2, {0}, 2),  # cut by the budget
        (3, 4, {0}, 4),
        (3, 100, {5}, 1),  # a stop token at each slot, itself kept
        (3, 100, {6}, 2),
        (3, 100, {8}, 4),
        (3, 100, {8, 6}, 2),  # the first of two
        (1, 100, {7}, 2),  # a stop token behind what is accepted is no stop
        (3, 2, {7}, 2),  # nor one behind the budget
        (3, 2, {6}, 2),
        (3, 1, set(), 1),
    ],
)
def test_cuts(accepted: int, budget: int, stops: set[int], expected: int) -> None:
    draws = [5, 6, 7, 8]
    drafts = [token if place < accepted else 99 for place, token in enumerate(draws[:3])]
    assert settled(drafts, draws, budget, stops) == (expected, accepted + 1)


@given(st.data())
def test_committed_tokens_are_those_of_one_by_one_decoding(data: st.DataObject) -> None:
    draws = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=len(draws) - 1, max_size=len(draws) - 1))
    budget, stops = data.draw(st.integers(1, 12)), data.draw(st.sets(st.integers(0, 3)))
    right = 0
    while right < len(drafts) and drafts[right] == draws[right]:
        right += 1
    slow = []
    for index, token in enumerate(draws[: right + 1]):
        slow.append(token)
        if token in stops or index + 1 == budget:
            break
    assert settled(drafts, draws, budget, stops) == (len(slow), right + 1)


@pytest.mark.parametrize(
    ("block_size", "position", "limit", "expected"),
    [(4, 0, 100, 4), (4, 96, 100, 4), (4, 97, 100, 3), (4, 99, 100, 1), (1, 99, 100, 1), (4, 100, 100, 0)],
)
def test_width_shrinks_only_at_the_position_limit(block_size: int, position: int, limit: int, expected: int) -> None:
    assert block_width(block_size, position, limit) == expected


@pytest.mark.parametrize(
    ("max_new_tokens", "prompt_length", "limit", "expected"),
    [(10, 5, 100, 10), (10, 91, 100, 10), (10, 92, 100, 9), (10, 99, 100, 2), (10, 100, 100, 1), (1, 100, 100, 1)],
)
def test_budget_leaves_the_last_token_without_a_position(
    max_new_tokens: int, prompt_length: int, limit: int, expected: int
) -> None:
    assert output_budget(max_new_tokens, prompt_length, limit) == expected
