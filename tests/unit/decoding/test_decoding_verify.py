"""What of a block is committed: tables of cases, and properties against a slow definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.decoding.verify import block_width, committed_length, count_matches, output_budget

TOKENS = st.lists(st.integers(0, 3), max_size=8)


@pytest.mark.parametrize(
    ("drafts", "draws", "expected"),
    [
        ([], [7], 0),
        ([7], [7, 8], 1),
        ([7], [6, 8], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 9, 3], [1, 2, 3, 4], 1),  # a later match does not count
        ([9, 2, 3], [1, 2, 3, 4], 0),
        ([1, 2, 9], [1, 2, 3, 4], 2),
    ],
)
def test_matches(drafts: list[int], draws: list[int], expected: int) -> None:
    assert count_matches(drafts, draws) == expected


@pytest.mark.parametrize(
    ("draws", "accepted", "budget", "stops", "expected"),
    [
        ([5, 6, 7, 8], 0, 100, {0}, 1),  # nothing accepted: the bonus alone
        ([5, 6, 7, 8], 3, 100, {0}, 4),  # all accepted, and the bonus
        ([5, 6, 7, 8], 3, 2, {0}, 2),  # cut by the budget
        ([5, 6, 7, 8], 3, 4, {0}, 4),
        ([5, 6, 7, 8], 3, 100, {5}, 1),  # a stop token at each slot, itself kept
        ([5, 6, 7, 8], 3, 100, {6}, 2),
        ([5, 6, 7, 8], 3, 100, {8}, 4),
        ([5, 6, 7, 8], 3, 100, {8, 6}, 2),  # the first of two
        ([5, 6, 7, 8], 1, 100, {7}, 2),  # a stop token behind what is accepted is no stop
        ([5, 6, 7, 8], 3, 2, {7}, 2),  # nor one behind the budget
        ([5, 6, 7, 8], 3, 2, {6}, 2),
        ([5], 0, 1, set(), 1),
    ],
)
def test_committed(draws: list[int], accepted: int, budget: int, stops: set[int], expected: int) -> None:
    assert committed_length(draws, accepted, budget, stops) == expected


@given(TOKENS, TOKENS)
def test_matches_are_the_longest_common_prefix(drafts: list[int], draws: list[int]) -> None:
    count = count_matches(drafts, draws)
    assert drafts[:count] == draws[:count]
    assert drafts[: count + 1] != draws[: count + 1] or count == min(len(drafts), len(draws))


@given(TOKENS, st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(1, 12), st.sets(st.integers(0, 3)))
def test_committed_tokens_are_those_of_one_by_one_decoding(
    drafts: list[int], draws: list[int], budget: int, stops: set[int]
) -> None:
    accepted = count_matches(drafts, draws)
    slow = []
    for index, token in enumerate(draws[: accepted + 1]):
        slow.append(token)
        if token in stops or index + 1 == budget:
            break
    assert committed_length(draws, accepted, budget, stops) == len(slow)


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
