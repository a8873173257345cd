"""Policies without learning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from blockpilot.decoding import Prefill, generate, prompt_key
from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.errors import UserError
from blockpilot.oracle import LabelTable, TokenLists, replay, sparse_distributions
from blockpilot.policies import FixedPolicy, OraclePolicy, RandomPolicy
from tests.toy import make_prompts, make_scripted_pair


def prefill(key: int) -> Prefill:
    return Prefill(key, 3, torch.zeros(8), torch.zeros(4))


def table(prompts: list[list[int]], committed: list[list[int]], rounds: list[list[int]], sizes: tuple) -> LabelTable:
    return LabelTable(
        tuple(map(str, range(len(prompts)))), ("d",) * len(prompts),
        torch.tensor([signed_prompt_key(prompt) for prompt in prompts]), TokenLists.of(prompts), sizes,
        torch.tensor(committed), torch.tensor(rounds), sparse_distributions(torch.zeros(len(prompts), 8), 0.0),
    )  # fmt: skip


def test_fixed() -> None:
    assert {FixedPolicy(7).choose(prefill(key)) for key in range(20)} == {7}
    for wrong in (0, -1):
        with pytest.raises(UserError, match=f"block_size={wrong} is not allowed; expected a number of at least 1"):
            FixedPolicy(wrong)


def test_random_depends_on_seed_and_prompt_alone() -> None:
    sizes = (14, 15, 16, 17, 18)
    choices = [RandomPolicy(sizes, seed=1).choose(prefill(key)) for key in range(2000)]
    assert choices == [RandomPolicy(sizes, seed=1).choose(prefill(key)) for key in range(2000)]
    # uniform: chi-square with four degrees of freedom, 18.5 is p = 0.001
    counts = Counter(choices)
    assert set(counts) == set(sizes)
    assert sum((counts[size] - 400) ** 2 / 400 for size in sizes) < 18.5
    other = [RandomPolicy(sizes, seed=2).choose(prefill(key)) for key in range(2000)]
    assert 0.1 < sum(a == b for a, b in zip(choices, other, strict=True)) / 2000 < 0.3


@pytest.mark.parametrize("sizes", [[], [0, 2], [-1]])
def test_random_needs_block_sizes(sizes: list[int]) -> None:
    with pytest.raises(UserError, match="block_sizes="):
        RandomPolicy(sizes)


def test_oracle_takes_the_best_and_the_smallest_of_equals() -> None:
    prompts = [[1], [2], [3], [4]]
    labels = table(
        prompts,
        committed=[[10, 12, 11], [10, 20, 30], [9, 9, 9], [0, 0, 0]],
        rounds=[[5, 5, 5], [5, 10, 15], [3, 3, 4], [0, 0, 0]],
        sizes=(3, 4, 5),
    )
    policy = OraclePolicy.from_table(labels)
    assert [policy.choose(prefill(prompt_key(prompt))) for prompt in prompts[:3]] == [4, 3, 3]
    # a prompt that ends with its prefill token: any choice will do, but there must be one
    assert policy.choose(prefill(prompt_key([4]))) in (3, 4, 5)
    with pytest.raises(UserError, match="no label for this prompt"):
        policy.choose(prefill(prompt_key([5])))


def test_oracle_finds_keys_of_either_sign() -> None:
    prompts = [[i] for i in range(40)]
    signs = {signed_prompt_key(prompt) < 0 for prompt in prompts}
    assert signs == {True, False}
    labels = table(prompts, [[i % 3 == 0, i % 3 == 1, i % 3 == 2] for i in range(40)], [[1, 1, 1]] * 40, (3, 4, 5))
    policy = OraclePolicy.from_table(labels)
    assert [policy.choose(prefill(prompt_key(prompt))) for prompt in prompts] == [3 + i % 3 for i in range(40)]


def test_oracle_reaches_the_best_tau_when_decoding() -> None:
    pair = make_scripted_pair(lambda p: p * 5 % 7)
    prompts = make_prompts([3, 6, 8, 11], seed=2)
    sizes = (2, 3, 4, 6)
    records = replay(pair, prompts, sizes, max_new_tokens=25)
    labels = table(
        prompts,
        [[sum(record.acceptance_lengths[b]) for b in sizes] for record in records],
        [[len(record.acceptance_lengths[b]) for b in sizes] for record in records],
        sizes,
    )
    policy = OraclePolicy.from_table(labels)
    for prompt, record in zip(prompts, records, strict=True):
        out = generate(pair, prompt, policy, max_new_tokens=25)
        assert out.tau == max(record.tau.values())
        assert set(out.block_sizes) == {out.first_block_size}


@pytest.mark.parametrize("sizes", [None, 4, [None], ["4"], [2.5], [[4]]])
def test_random_takes_whole_numbers_only(sizes: Any) -> None:
    with pytest.raises(UserError, match=r"block_sizes.* is not allowed; expected a"):
        RandomPolicy(sizes)


def test_best_fixed_has_the_highest_mean_and_is_the_smallest_of_equals() -> None:
    # means of tau over the three prompts with rounds: 3 -> (2 + 1 + 3) / 3 = 2, 4 -> (4 + 2 + 3) / 3 = 3,
    # 5 -> (1 + 5 + 3) / 3 = 3; the oracle would say 4, 5, 3
    labels = table(
        [[1], [2], [3], [4]],
        committed=[[4, 4, 4], [10, 10, 10], [9, 9, 9], [0, 0, 0]],
        rounds=[[2, 1, 4], [10, 5, 2], [3, 3, 3], [0, 0, 0]],
        sizes=(3, 4, 5),
    )
    assert FixedPolicy.best(labels) == FixedPolicy(4)
    with pytest.raises(UserError, match="rounds"):
        FixedPolicy.best(labels.select([3]))
