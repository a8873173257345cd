"""Tables of what every position commits, and the best sequence of block sizes through them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from blockpilot import oracle
from blockpilot.decoding import generate
from blockpilot.errors import UserError
from blockpilot.oracle import best_sequence
from tests.toy import Changing, make_scripted_pair
from tests.unit.oracle.test_oracle_replay import PAIRS, PROMPTS, SIZES, random_pair


@pytest.mark.parametrize("convention", ["committed", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("kind", PAIRS)
def test_the_chains_of_a_table_are_those_of_a_replay(kind: str, temperature: float, convention: str) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 14, "temperature": temperature, "seed": 2, "tau_convention": convention,
        "stop_token_ids": [21],
    }  # fmt: skip
    pair = random_pair(kind)
    alone = oracle.replay(pair, PROMPTS, SIZES, **options)
    tables = oracle.replay(pair, PROMPTS, SIZES, per_round=True, **options)
    assert [r.acceptance_lengths for r in tables] == [r.acceptance_lengths for r in alone]
    for record in tables:
        assert record.acceptance_table is not None
        assert record.acceptance_table.shape == (len(record.output_ids) - 1, len(SIZES))


def test_every_entry_is_the_first_round_of_a_decode_that_starts_there() -> None:
    pair = random_pair()
    (record,) = oracle.replay(pair, PROMPTS[:1], SIZES, max_new_tokens=14, per_round=True)
    assert record.acceptance_table is not None
    for place, column in itertools.product(range(13), range(len(SIZES))):
        started = generate(
            pair, record.prompt_ids + record.output_ids[:place], Changing([SIZES[column]]), max_new_tokens=14 - place
        )
        assert record.acceptance_table[place, column] == started.acceptance_lengths[0], (place, column)


def test_a_table_worked_out_by_hand() -> None:
    # the next token is the last one plus 1; three drafts are right
    (record,) = oracle.replay(make_scripted_pair(3), [[9, 20]], [1, 2, 6], max_new_tokens=7, per_round=True)
    assert record.acceptance_table is not None
    assert record.acceptance_table.tolist() == [[1, 2, 4], [1, 2, 4], [1, 2, 4], [1, 2, 3], [1, 2, 2], [1, 1, 1]]


def brute_force(table: torch.Tensor, costs: torch.Tensor) -> float:
    """Least cost over all sequences, by trying all of them."""
    if len(table) == 0:
        return 0.0
    return min(
        float(costs[0, k]) + brute_force(table[int(table[0, k]) :], costs[int(table[0, k]) :])
        for k in range(table.shape[1])
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_is_cheaper(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 5, (9, 3), generator=generator).clamp(max=torch.arange(9, 0, -1)[:, None])
    costs = torch.rand(9, 3, generator=generator)
    best = best_sequence(table, [2, 3, 4], costs)
    assert best.cost == pytest.approx(brute_force(table, costs))
    assert sum(best.acceptance_lengths) == 9
    place, total = 0, 0.0
    for size, length in zip(best.block_sizes, best.acceptance_lengths, strict=True):
        assert table[place, size - 2] == length
        total, place = total + float(costs[place, size - 2]), place + length
    assert total == pytest.approx(best.cost)


def test_costs_by_size_alone_and_ties() -> None:
    table = torch.tensor([[2, 3], [1, 2], [1, 1]])
    assert best_sequence(table, [4, 8]) == oracle.BestSequence([8], [3], 1.0)
    # twice the cheap size is cheaper than once the other: 2 + 1 tokens for 1.8
    cheap = best_sequence(table, [4, 8], torch.tensor([0.9, 2.0]))
    assert (cheap.block_sizes, cheap.acceptance_lengths, cheap.cost) == ([4, 4], [2, 1], pytest.approx(1.8))
    assert best_sequence(torch.ones(2, 2, dtype=torch.int64), [4, 8]).block_sizes == [4, 4]
    assert best_sequence(torch.empty(0, 2, dtype=torch.int64), [4, 8]) == oracle.BestSequence([], [], 0.0)


def test_the_cost_of_one_size_is_that_of_its_rounds() -> None:
    table = torch.tensor([[2, 3], [1, 2], [1, 1]])
    assert oracle.cost_of_one_size(table).tolist() == [2, 1]
    costs = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert oracle.cost_of_one_size(table, costs).tolist() == [5, 10]
    assert oracle.cost_of_one_size(table, torch.tensor([0.5, 2.0])).tolist() == [1, 2]
    assert oracle.cost_of_one_size(torch.empty(0, 2, dtype=torch.int64)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("table", "costs", "message"),
    [
        ([[0, 2], [1, 1]], None, "expected .* whole numbers of at least 1"),
        ([[1, 2, 3]], None, "shape .*1, 3.* expected .*anchors, 2"),
        ([[1.0, 2.0]], None, "torch.float32 is not allowed"),
        ([[1, 2]], [float("nan"), 1.0], "finite numbers above 0"),
        ([[1, 2]], [float("inf"), 1.0], "finite numbers above 0"),
        ([[1, 2]], [0.0, 1.0], "finite numbers above 0"),
        ([[1, 2]], [1.0, 1.0, 1.0], "finite numbers above 0 of 2 block sizes"),
    ],
)
def test_tables_and_costs_that_are_none(table: list, costs: list | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        best_sequence(torch.tensor(table), [4, 8], None if costs is None else torch.tensor(costs))


def test_uncut_entries_end_the_output() -> None:
    assert best_sequence(torch.tensor([[2, 5], [4, 5]]), [4, 8]).acceptance_lengths == [2]


def test_the_best_sequence_is_what_decoding_commits_and_no_single_size_beats_it() -> None:
    pair = random_pair()
    for record in oracle.replay(pair, PROMPTS, SIZES, max_new_tokens=14, per_round=True):
        assert record.acceptance_table is not None
        best = best_sequence(record.acceptance_table, SIZES)
        out = generate(pair, record.prompt_ids, Changing(best.block_sizes), max_new_tokens=14)
        assert out.acceptance_lengths == best.acceptance_lengths
        assert len(best.block_sizes) <= min(len(lengths) for lengths in record.acceptance_lengths.values())
