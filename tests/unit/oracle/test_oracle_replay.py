"""Replay against enumeration, and against acceptance lengths worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from blockpilot import oracle
from blockpilot.decoding import generate
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.oracle import OracleRecord, candidate_block_sizes
from blockpilot.policies import FixedPolicy
from tests.toy import make_pair, make_prompts, make_scripted_pair, make_target

SIZES = [1, 2, 3, 5, 8]

# Drafters that are right now and then, by what they read in their context: target options and drafter options.
PAIRS: dict[str, tuple[dict, dict]] = {
    "qwen3": ({}, {}),
    "llama-ungrouped": ({"kind": "llama", "kv_heads": 4}, {"kv_heads": 1}),
    "eager": ({"attention": "eager"}, {"layers": 1}),
    "position-limits": ({"max_positions": 22}, {"max_positions": 17}),
    "drafter-reaches-further": ({"max_positions": 19}, {"max_positions": 40}),
    "windows": (
        {}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
    ),
    "windows-both-ways": (
        {}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True,
             "is_causal": False}
    ),
    "draft-vocabulary": ({}, {"draft_vocab_size": 48}),
}  # fmt: skip


@cache
def random_pair(kind: str = "qwen3") -> Pair:
    target_options, drafter_options = PAIRS[kind]
    target = make_target(layers=3, seed=4, successor=True, **target_options)
    return make_scripted_pair(99, target=target, noise=0.6, **drafter_options)


PROMPTS = make_prompts([4, 16, 1, 9, 17, 4, 12], seed=3)


def assert_same(replayed: list[OracleRecord], enumerated: list[OracleRecord]) -> None:
    assert len(replayed) == len(enumerated)
    for one, other in zip(replayed, enumerated, strict=True):
        assert one.prompt_ids == other.prompt_ids
        assert one.output_ids == other.output_ids
        assert one.acceptance_lengths == other.acceptance_lengths
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("convention", ["committed", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("kind", PAIRS)
def test_replay_equals_enumeration_round_for_round(kind: str, temperature: float, convention: str) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9, "temperature": temperature, "top_p": 0.98, "seed": 2, "tau_convention": convention,
        "stop_token_ids": [PROMPTS[0][-1] + 1, PROMPTS[3][-1] + 4],
    }  # fmt: skip
    pair = random_pair(kind)
    replayed = oracle.replay(pair, PROMPTS, SIZES, **options)
    assert_same(replayed, oracle.enumerate(pair, PROMPTS, SIZES, **options))
    lengths = [length for record in replayed for size in SIZES for length in record.acceptance_lengths[size]]
    assert set(lengths) >= {1, 2, 3}
    assert {len(record.output_ids) for record in replayed} >= {1, 9} or "limit" in kind or "further" in kind
    if convention == "committed":
        for record in replayed:
            assert all(1 + sum(each) == len(record.output_ids) for each in record.acceptance_lengths.values())


@pytest.mark.parametrize(("target_limit", "drafter_limit"), [(40, 17), (17, 40)])
def test_blocks_shrunk_by_a_position_limit_see_nothing_behind_it(target_limit: int, drafter_limit: int) -> None:
    target = make_target(layers=3, seed=4, successor=True, max_positions=target_limit)
    pair = make_scripted_pair(99, target=target, noise=0.9, max_positions=drafter_limit)
    prompts = make_prompts([10, 11, 12, 12, 13, 13, 14, 14, 15], seed=8)
    options: dict[str, Any] = {"max_new_tokens": 8, "stop_token_ids": []}
    replayed = oracle.replay(pair, prompts, [3, 8, 16], **options)
    assert_same(replayed, oracle.enumerate(pair, prompts, [3, 8, 16], **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_equals_enumeration_on_random_weights_with_a_tied_head(temperature: float) -> None:
    pair = make_pair(layers=3, seed=4, tied=True)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": temperature, "stop_token_ids": []}
    replayed = oracle.replay(pair, PROMPTS[:4], [1, 3, 8], **options)
    assert_same(replayed, oracle.enumerate(pair, PROMPTS[:4], [1, 3, 8], **options))


def test_enumeration_is_generate_with_each_block_size() -> None:
    pair = random_pair()
    (record,) = oracle.enumerate(pair, PROMPTS[:1], [2, 5], max_new_tokens=9, temperature=3.0, seed=4)
    for size in (2, 5):
        out = generate(pair, PROMPTS[0], FixedPolicy(size), max_new_tokens=9, temperature=3.0, seed=4)
        assert record.output_ids == out.output_ids
        assert record.acceptance_lengths[size] == out.acceptance_lengths
        assert record.tau[size] == out.tau or math.isnan(out.tau)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_batch_size_changes_nothing(batch_size: int) -> None:
    pair = random_pair()
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 3.0, "stop_token_ids": [3]}
    expected = oracle.replay(pair, PROMPTS, SIZES, **options)
    assert_same(oracle.replay(pair, PROMPTS, SIZES, batch_size=batch_size, **options), expected)


def test_the_order_of_prompts_and_the_other_candidates_change_nothing() -> None:
    pair = random_pair()
    forward = oracle.replay(pair, PROMPTS, SIZES, max_new_tokens=8)
    backward = oracle.replay(pair, PROMPTS[::-1], [8, 3, 3], max_new_tokens=8)
    assert [record.prompt_ids for record in backward] == PROMPTS[::-1]
    for one, other in zip(forward, backward[::-1], strict=True):
        assert list(other.acceptance_lengths) == [3, 8]  # rising, without repeats
        assert other.acceptance_lengths == {b: one.acceptance_lengths[b] for b in (3, 8)}


def test_no_prompts() -> None:
    assert oracle.replay(random_pair(), [], SIZES) == oracle.enumerate(random_pair(), [], SIZES) == []


# ---- worked out by hand: the next token is the last one plus 1, and drafts are right to a known depth


def by_hand(
    length: int, output: int, size: int, depth: Callable[[int], int], uncut: bool, limit: int = 10**6
) -> list[int]:
    """Acceptance lengths, by the definition, of an output of so many tokens behind a prompt of ``length``."""
    lengths, anchor, left = [], length, output - 1
    while left > 0:
        whole = min(depth(anchor) + 1, max(1, min(size, limit - anchor)))
        lengths.append(whole if uncut else min(whole, left))
        anchor, left = anchor + min(whole, left), left - whole
    return lengths


METHODS = {"replay": oracle.replay, "enumerate": oracle.enumerate}


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_right_to_a_fixed_depth(method: str) -> None:
    # prompts end with 20, 36, 39 and 10; 40 stops: 20 tokens (the budget), 4, 1 (the prefill token), 20
    prompts = [[9, 20], [9, 8, 7, 36], [39], [11, 10]]
    records = METHODS[method](make_scripted_pair(3), prompts, [1, 2, 4, 5, 9], max_new_tokens=20, stop_token_ids=[40])
    assert [record.output_ids[-1] for record in records] == [40, 40, 40, 30]
    assert [len(record.output_ids) for record in records] == [20, 4, 1, 20]
    full = {1: [1] * 19, 2: [2] * 9 + [1], 4: [4] * 4 + [3], 5: [4] * 4 + [3], 9: [4] * 4 + [3]}
    assert records[0].acceptance_lengths == records[3].acceptance_lengths == full
    assert records[1].acceptance_lengths == {1: [1, 1, 1], 2: [2, 1], 4: [3], 5: [3], 9: [3]}
    assert records[2].acceptance_lengths == {1: [], 2: [], 4: [], 5: [], 9: []}
    assert records[0].tau[4] == pytest.approx(19 / 5) and records[1].tau[2] == 1.5
    assert all(math.isnan(tau) for tau in records[2].tau.values())


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_count_does_not_cut_the_last_round(method: str) -> None:
    records = METHODS[method](
        make_scripted_pair(3), [[9, 20], [36], [39]], [1, 2, 5], max_new_tokens=20, stop_token_ids=[40],
        tau_convention="reference",
    )  # fmt: skip
    assert records[0].acceptance_lengths == {1: [1] * 19, 2: [2] * 10, 5: [4] * 5}
    assert records[1].acceptance_lengths == {1: [1, 1, 1], 2: [2, 2], 5: [4]}
    assert records[2].acceptance_lengths == {1: [], 2: [], 5: []}


@pytest.mark.parametrize("uncut", [False, True])
@pytest.mark.parametrize(("target_limit", "drafter_limit"), [(256, 256), (30, 256), (256, 21), (33, 21)])
def test_a_depth_that_changes_along_the_text(target_limit: int, drafter_limit: int, uncut: bool) -> None:
    def depth(anchor: int) -> int:
        return anchor * 7 % 6

    target = make_target(successor=True, max_positions=target_limit)
    pair = make_scripted_pair(lambda p: p * 7 % 6, target=target, max_positions=drafter_limit)
    prompts = [[*make_prompts([n - 1])[0], 10 + n] for n in (3, 8, 20, 21, 26, 29, 30)]
    sizes = [1, 2, 3, 5, 16]
    records = oracle.replay(
        pair, prompts, sizes, max_new_tokens=17, stop_token_ids=[50],
        tau_convention="reference" if uncut else "committed",
    )  # fmt: skip
    for prompt, record in zip(prompts, records, strict=True):
        fits = min(17, target_limit - len(prompt) + 1, 50 - prompt[-1])
        assert record.output_ids == [prompt[-1] + 1 + i for i in range(fits)]
        for size in sizes:
            expected = by_hand(len(prompt), fits, size, depth, uncut, min(target_limit, drafter_limit))
            assert record.acceptance_lengths[size] == expected


def test_records_hold_what_the_target_saw_at_the_end_of_the_prompt() -> None:
    pair = random_pair()
    records = oracle.replay(pair, PROMPTS, [4], max_new_tokens=3, temperature=3.0)
    for prompt, record in zip(PROMPTS, records, strict=True):
        with torch.no_grad():
            plain = pair.target(torch.tensor([prompt]), output_hidden_states=True)
        assert plain.hidden_states is not None and record.logits is not None and record.hidden is not None
        # raw: no temperature, no filter
        torch.testing.assert_close(record.logits, plain.logits[0, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(record.hidden, plain.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)
        assert record.logits.dtype == record.hidden.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_sizes": []}, "block_sizes"),
        ({"block_sizes": [0, 3]}, r"block_sizes=\[0, 3\]"),
        ({"tau_convention": "theirs"}, "tau_convention='theirs'.*committed, reference"),
        ({"prompts": [[9], []]}, "empty"),
        ({"prompts": [[64]]}, "holds 64"),
        ({"prompts": [[9] * 300]}, "300 tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_what_is_refused(method: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": [[9]], "block_sizes": [2]} | changes
    with pytest.raises(UserError, match=message):
        METHODS[method](random_pair(), **arguments)


@pytest.mark.parametrize(
    ("trained", "radius", "expected"),
    [
        (16, 3, (13, 14, 15, 16, 17, 18, 19)),
        (16, 0, (16,)),
        (10, 2, (8, 9, 10, 11, 12)),
        (4, 3, (2, 3, 4, 5, 6, 7)),  # cut at 2 from below
        (2, 5, (2, 3, 4, 5, 6, 7)),
    ],
)
def test_candidates(trained: int, radius: int, expected: tuple[int, ...]) -> None:
    assert candidate_block_sizes(trained, radius) == expected


@pytest.mark.parametrize("method", METHODS)
def test_huge_sizes_reach_as_far_as_the_models_do(method: str) -> None:
    (record,) = METHODS[method](make_scripted_pair(3), [[9, 20]], [4, 10**9], max_new_tokens=9)
    assert record.acceptance_lengths == {4: [4, 4], 10**9: [4, 4]}


@pytest.mark.parametrize("method", METHODS)
def test_prompts_of_any_kind_of_list(method: str) -> None:
    pair = make_scripted_pair(3)
    expected = METHODS[method](pair, [[9, 20], [11]], [4], max_new_tokens=9)
    for prompts in ((torch.tensor(p) for p in ([9, 20], [11])), ((9, 20), (11,))):
        found = METHODS[method](pair, prompts, [4], max_new_tokens=9)
        assert [r.prompt_ids for r in found] == [[9, 20], [11]]
        assert [r.acceptance_lengths for r in found] == [r.acceptance_lengths for r in expected]
    for prompts, message in ((None, "prompts=None"), (5, "prompts=5"), ([5], "prompt_ids is a int")):
        with pytest.raises(UserError, match=message):
            METHODS[method](pair, prompts, [4], max_new_tokens=9)
    for options in ({"max_new_tokens": 9, "temperature": -1.0}, {"max_new_tokens": 9, "top_p": 0.0}):
        with pytest.raises(UserError):
            METHODS[method](pair, [], [4], **options)
