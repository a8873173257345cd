"""The engine: its output is the target's own, whatever drafter, block size and policy do; its accounts are right."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockpilot.decoding import Draft, Generation, Prefill, Round, Sampling, engine, generate, prompt_key
from blockpilot.decoding.rounds import Rounds
from blockpilot.decoding.sampling import filtered_log_probs
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.policies import FixedPolicy
from tests.toy import (
    EOS,
    MASK,
    Changing,
    ScriptedDrafter,
    cut,
    decode_one_by_one,
    greedy_by_transformers,
    hooks_of,
    make_drafter,
    make_pair,
    make_prompts,
    make_scripted_pair,
    make_target,
)

SIZES = (1, 2, 3, 8, 16, 19)
ALWAYS, NEVER = 99, 0

pytestmark = pytest.mark.usefixtures("each_kind_of_rounds")

KINDS: dict[str, Any] = {
    "qwen3": {},
    "qwen3-tied-ungrouped": {"tied": True, "kv_heads": 4},
    "qwen3-eager": {"attention": "eager"},
    "llama-one-kv-head": {"kind": "llama", "kv_heads": 1},
    "llama-tied": {"kind": "llama", "tied": True},
    "mistral": {"kind": "mistral"},
    "mistral-tied": {"kind": "mistral", "tied": True},
    "qwen2": {"kind": "qwen2", "kv_heads": 4},
    "qwen2-tied": {"kind": "qwen2", "tied": True},
}


@cache
def random_pair(kind: str = "qwen3") -> Pair:
    return make_pair(seed=5, layers=3, **KINDS[kind])


@cache
def successor_pair(depth: int, **options: Any) -> Pair:
    return make_scripted_pair(depth, **options)


@cache
def greedy(kind: str, prompt: tuple[int, ...], count: int) -> list[int]:
    return greedy_by_transformers(random_pair(kind).target, prompt, count)


def check_accounts(out: Generation) -> None:
    assert 1 + sum(out.acceptance_lengths) == len(out.output_ids)
    assert len(out.acceptance_lengths) == len(out.block_sizes)
    assert all(1 <= length <= size for length, size in zip(out.acceptance_lengths, out.block_sizes, strict=True))
    if out.acceptance_lengths:
        assert out.acceptance_lengths[-1] <= out.last_round_uncut <= out.block_sizes[-1]
        assert out.tau == pytest.approx((len(out.output_ids) - 1) / len(out.acceptance_lengths))
    else:
        assert math.isnan(out.tau) and out.last_round_uncut == 0
    assert 0 <= out.policy_seconds <= out.decode_seconds


def rounds_of(tokens: int, most: int) -> list[int]:
    """``tokens`` committed ``most`` at a time."""
    return [most] * (tokens // most) + [tokens % most] * (tokens % most > 0)


# ---- losslessness at T = 0


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_transformers(kind: str, block_size: int) -> None:
    for prompt in make_prompts([1, 9], seed=3):
        out = generate(random_pair(kind), prompt, FixedPolicy(block_size), max_new_tokens=21, stop_token_ids=[])
        assert out.output_ids == greedy(kind, tuple(prompt), 21)
        check_accounts(out)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("depth", [NEVER, 2, ALWAYS])
def test_drafts_right_to_a_known_depth(block_size: int, depth: int) -> None:
    prompt = make_prompts([6], seed=1)[0]
    expected = greedy("qwen3", tuple(prompt), 30)
    pair = make_scripted_pair(depth, target=random_pair().target, script=prompt + expected)
    out = generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=30, stop_token_ids=[])
    assert out.output_ids == expected
    assert out.acceptance_lengths == rounds_of(29, min(depth + 1, block_size))
    assert out.block_sizes == [block_size] * len(out.acceptance_lengths)
    check_accounts(out)


def test_a_depth_that_changes_along_the_text() -> None:
    prompt = make_prompts([6], seed=1)[0]
    expected = greedy("qwen3", tuple(prompt), 30)
    # the anchor at position p is followed by p % 5 right drafts: 6 -> 1 right, +2 -> 8 -> 3 right, +4 -> 12 ...
    pair = make_scripted_pair(lambda p: p % 5, target=random_pair().target, script=prompt + expected)
    out = generate(pair, prompt, FixedPolicy(8), max_new_tokens=30, stop_token_ids=[])
    assert out.output_ids == expected
    assert out.acceptance_lengths == [2, 4, 3, 1, 2, 4, 3, 1, 2, 4, 3]


def test_a_target_whose_logits_are_all_equal_accepts_what_equals_its_draw() -> None:
    pair = make_pair(target=make_target(seed=2), eos=None)
    pair.runner.head.weight.data.zero_()
    for block_size in SIZES:
        out = generate(pair, [9, 8], FixedPolicy(block_size), max_new_tokens=20)
        # argmax of equal logits is token 0, for the target and for drafts read through its head
        assert out.output_ids == [0] * 20
        assert out.acceptance_lengths == rounds_of(19, block_size)


@pytest.mark.parametrize("block_size", SIZES)
def test_block_size_one_drafts_nothing_and_others_draft_their_width(block_size: int) -> None:
    pair = make_scripted_pair(NEVER)
    assert isinstance(pair.drafter, ScriptedDrafter)
    prompt = make_prompts([5])[0]
    generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=6)
    # each pass sees the context before its anchor and is as wide as the block, also where the budget is nearly used up
    assert pair.drafter.calls == [(5 + i, block_size) for i in range(5) if block_size > 1]


# ---- stops and budgets


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("depth", [2, ALWAYS])
def test_a_stop_token_at_every_slot(block_size: int, depth: int) -> None:
    pair = successor_pair(depth)
    whole = [21 + i for i in range(block_size + 4)]
    # 0 is the prefill token, 1 .. block_size the slots of the first block, then the second block begins
    for slot in range(block_size + 3 if depth == ALWAYS else 5):
        out = generate(pair, [9, 20], FixedPolicy(block_size), max_new_tokens=60, stop_token_ids=[whole[slot]])
        assert out.output_ids == whole[: slot + 1]
        assert out.acceptance_lengths == rounds_of(slot, min(depth + 1, block_size))
        check_accounts(out)
        if slot and depth == ALWAYS:
            assert out.last_round_uncut == block_size


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("depth", [NEVER, ALWAYS])
def test_every_budget_is_exact(block_size: int, depth: int) -> None:
    pair = successor_pair(depth)
    whole = range(1, 2 * block_size + 2)
    for budget in whole if depth == ALWAYS else (1, 2, block_size, block_size + 1):
        out = generate(pair, [9, 15], FixedPolicy(block_size), max_new_tokens=budget)
        assert out.output_ids == [16 + i for i in range(budget)]
        assert out.acceptance_lengths == rounds_of(budget - 1, min(depth + 1, block_size))
        check_accounts(out)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("depth", [NEVER, 1, ALWAYS])
def test_the_mask_token_is_a_token_like_any_other(block_size: int, depth: int) -> None:
    pair = successor_pair(depth)
    assert pair.mask_token_id == MASK
    run = [(63 + i) % 64 for i in range(12)]
    assert MASK in run[2:8]
    out = generate(pair, [9, 62], FixedPolicy(block_size), max_new_tokens=12)
    assert out.output_ids == run
    stopped = generate(pair, [9, 62], FixedPolicy(block_size), max_new_tokens=12, stop_token_ids=[MASK])
    assert stopped.output_ids == run[: run.index(MASK) + 1]
    # as anchor, as prefill token, and inside the prompt
    assert generate(pair, [9, MASK], FixedPolicy(block_size), max_new_tokens=9).output_ids == list(range(5, 14))
    out = generate(pair, [MASK, 8, MASK - 1], FixedPolicy(block_size), max_new_tokens=5)
    assert out.output_ids == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("block_size", SIZES)
def test_a_real_drafter_whose_mask_is_a_token_of_the_output(block_size: int) -> None:
    prompt = make_prompts([7], seed=2)[0]
    expected = greedy("qwen3", tuple(prompt), 25)
    mask = Counter(expected[1:]).most_common(1)[0][0]
    target = random_pair().target
    pair = make_pair(target=target, drafter=make_drafter(target, mask_token_id=mask), eos=None)
    assert generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=25).output_ids == expected
    stopped = generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=25, stop_token_ids=[mask])
    assert stopped.output_ids == cut(expected, 25, [mask])


@pytest.mark.parametrize(
    ("configured", "tokenizer", "expected"),
    [
        (None, None, ()),
        (None, "<eos>", (EOS,)),
        (30, None, (30,)),
        (30, "<eos>", (EOS, 30)),
        ([30, 25], "<eos>", (EOS, 25, 30)),
        ([EOS, 25], "<eos>", (EOS, 25)),
    ],
)
def test_stop_ids_are_the_union_of_tokenizer_and_generation_config(
    configured: int | list[int] | None, tokenizer: str | None, expected: tuple[int, ...]
) -> None:
    target = make_target(successor=True)
    target.generation_config.eos_token_id = configured  # type: ignore[union-attr]
    pair = make_pair(target=target, eos=tokenizer)
    assert pair.stop_token_ids == expected
    reached = cut([(21 + i) % 64 for i in range(50)], 50, expected)
    for block_size in SIZES:
        assert generate(pair, [20], FixedPolicy(block_size), max_new_tokens=50).output_ids == reached
    # what the caller names replaces the pair's; an empty list never stops
    assert generate(pair, [20], FixedPolicy(8), max_new_tokens=50, stop_token_ids=()).output_ids[-1] == 70 - 64
    assert generate(pair, [20], FixedPolicy(8), max_new_tokens=50, stop_token_ids={40}).output_ids[-1] == 40


@pytest.mark.parametrize("block_size", SIZES)
def test_the_first_of_two_stop_tokens_ends_the_output(block_size: int) -> None:
    pair = successor_pair(ALWAYS)
    for first, second in ((25, 24), (24, 30)):
        out = generate(pair, [20], FixedPolicy(block_size), max_new_tokens=40, stop_token_ids=[first, second])
        assert out.output_ids == [21, 22, 23, 24]


# ---- position limits


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("depth", [NEVER, 2, ALWAYS])
def test_prompts_around_the_position_limit(block_size: int, depth: int) -> None:
    limit = 24
    pair = make_scripted_pair(depth, target=make_target(successor=True, max_positions=limit))
    policy = FixedPolicy(block_size)
    for length, tokens in ((limit - 3, 4), (limit - 1, 2), (limit, 1)):
        prompt = make_prompts([length - 1])[0] + [40]
        out = generate(pair, prompt, policy, max_new_tokens=50)
        assert out.output_ids == [41 + i for i in range(tokens)]
        check_accounts(out)
    with pytest.raises(UserError, match=rf"{limit + 1} tokens.*{limit} positions"):
        generate(pair, make_prompts([limit + 1])[0], policy, max_new_tokens=50)


@pytest.mark.parametrize("block_size", SIZES)
def test_running_into_the_position_limit_equals_transformers(block_size: int) -> None:
    target = make_target(max_positions=32, seed=5, layers=3)
    prompt = make_prompts([10], seed=6)[0]
    expected = greedy_by_transformers(target, prompt, 23)
    for pair in (
        make_pair(target=target, eos=None),
        make_scripted_pair(ALWAYS, target=target, script=prompt + expected),
    ):
        out = generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=1000)
        assert out.output_ids == expected
        check_accounts(out)
        assert generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=22).output_ids == expected[:22]


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("prompt_length", [3, 15, 16, 20])
def test_a_drafter_with_fewer_positions_than_the_target(block_size: int, prompt_length: int) -> None:
    limit = 16
    pair = make_scripted_pair(ALWAYS, max_positions=limit)
    assert isinstance(pair.drafter, ScriptedDrafter)
    prompt = make_prompts([prompt_length - 1])[0] + [20]
    out = generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=30)
    assert out.output_ids == [21 + i for i in range(30)]
    check_accounts(out)
    assert all(context + width <= limit for context, width in pair.drafter.calls)
    # whole blocks while they fit, a shrunk one at the limit, then one token at a time
    lengths, position, left = [], prompt_length, 29
    while left:
        lengths.append(min(max(1, min(block_size, limit - position)), left))
        position, left = position + lengths[-1], left - lengths[-1]
    assert out.acceptance_lengths == lengths


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("limit", [8, 16, 20])
def test_a_real_drafter_with_fewer_positions_than_the_target(block_size: int, limit: int) -> None:
    """It reads its context, so it also has to stop being given one."""
    target, prompt = random_pair().target, make_prompts([9], seed=3)[0]
    pair = make_pair(target=target, drafter=make_drafter(target, max_positions=limit), eos=None)
    for policy in (FixedPolicy(block_size), Changing([block_size, 1])):
        out = generate(pair, prompt, policy, max_new_tokens=21)
        assert out.output_ids == greedy("qwen3", tuple(prompt), 21)
        check_accounts(out)


# ---- T > 0


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "seed": 11}], ids=str
)
def test_sampled_output_depends_on_neither_block_size_nor_policy_nor_drafter(options: dict[str, Any]) -> None:
    target, prompt = random_pair().target, make_prompts([8], seed=4)[0]
    expected = decode_one_by_one(target, prompt, Sampling(**options), 20)
    assert expected != greedy("qwen3", tuple(prompt), 20)
    changing = [3, 1, 8, 2, 19, 1, 1]
    random = [make_pair(target=target, drafter=make_drafter(target, seed=seed), eos=None) for seed in (1, 2)]
    scripted = [make_scripted_pair(depth, target=target, script=prompt + expected) for depth in (2, ALWAYS)]
    for pair, sizes in ((random[0], (1, 2, 19)), (random[1], (3, 16)), (scripted[0], SIZES), (scripted[1], SIZES)):
        for policy in (*(FixedPolicy(size) for size in sizes), Changing(changing)):
            out = generate(pair, prompt, policy, max_new_tokens=20, **options)
            assert out.output_ids == expected
            check_accounts(out)
    assert out.acceptance_lengths == [3, 1, 8, 2, 5]  # the last pair is always right


def test_seed_and_prompt_change_the_noise() -> None:
    pair, (one, other) = random_pair(), make_prompts([8, 8], seed=4)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": []}
    outputs = [
        generate(pair, prompt, FixedPolicy(2), seed=seed, **options).output_ids
        for prompt, seed in ((one, 0), (one, 1), (one, 2**32), (other, 0))
    ]
    assert len({tuple(output) for output in outputs}) == 4


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float, block_size: int) -> None:
    pair, prompt, policy = random_pair(), make_prompts([9], seed=3)[0], FixedPolicy(block_size)
    out = generate(pair, prompt, policy, max_new_tokens=9, temperature=temperature, top_p=0.9, stop_token_ids=[])
    assert out.output_ids == greedy("qwen3", tuple(prompt), 9)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0}, {"temperature": -1e-9}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_p": -0.5}, {"top_p": math.nan}, {"top_k": -1},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_values_out_of_range(options: dict[str, Any], block_size: int) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(options))}="):
        generate(random_pair(), [9], FixedPolicy(block_size), **options)


@pytest.mark.parametrize("block_size", SIZES)
def test_top_p_one_half_never_leaves_the_nucleus(block_size: int) -> None:
    pair, sampling = random_pair(), Sampling(1.0, top_p=0.5)
    for prompt in make_prompts([3, 5, 7, 9], seed=8):
        out = generate(
            pair, prompt, FixedPolicy(block_size), max_new_tokens=30, temperature=1.0, top_p=0.5, stop_token_ids=[]
        )
        with torch.no_grad():
            logits = pair.target(torch.tensor([prompt + out.output_ids])).logits[0, len(prompt) - 1 : -1]
        inside = filtered_log_probs(logits, sampling).isfinite()
        assert inside[range(30), out.output_ids].all()
        assert not inside.all()


def test_speculative_samples_follow_the_distribution_of_a_four_token_target() -> None:
    """Chi-square over all texts of two tokens, the second one drafted by a biased drafter."""
    target = make_target(vocab_size=4, hidden_size=16, layers=2, heads=2, kv_heads=1, seed=9)
    target.lm_head.weight.data.mul_(0.25)  # type: ignore[union-attr]  # no token is rare
    # always proposes token 1: right or wrong, it must not show
    drafter = make_drafter(target, layer_ids=(0, 1), layers=1, mask_token_id=3, kind=ScriptedDrafter)
    assert isinstance(drafter, ScriptedDrafter)
    drafter.follow(target, lambda anchors, positions, places: torch.ones_like(anchors), ALWAYS)
    pair = Pair(target, drafter, random_pair().tokenizer)
    prompt = [0, 2, 1]
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        after = target(torch.tensor([[*prompt, token] for token in range(4)])).logits[:, -1].softmax(-1)
    expected = 400 * (first[:, None] * after).flatten().double()
    assert expected.min() > 5
    counts, accepted = torch.zeros(16, dtype=torch.float64), 0
    for seed in range(400):
        out = generate(pair, prompt, FixedPolicy(2), max_new_tokens=2, temperature=1.0, seed=seed, stop_token_ids=[])
        counts[4 * out.output_ids[0] + out.output_ids[1]] += 1
        accepted += out.last_round_uncut - 1
    assert 20 < accepted < 380
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert float(torch.special.gammaincc(torch.tensor(7.5).double(), statistic / 2)) > 0.001
    # the test has teeth: had every draft been accepted, the second token would always be 1
    skewed = torch.zeros(4, 4).double()
    skewed[:, 1] = 400 * first.double()
    assert float((((skewed.flatten() - expected) ** 2) / expected).sum()) > 100


# ---- policies inside the loop


def test_policies_are_told_what_happened() -> None:
    pair, prompt = make_scripted_pair(2), make_prompts([7])[0]
    policy = Changing([8, 1, 2, 4])
    out = generate(pair, prompt, policy, max_new_tokens=14)
    assert out.block_sizes == [8, 1, 2, 4, 8, 1]
    assert out.acceptance_lengths == [3, 1, 2, 3, 3, 1]
    assert out.first_block_size == 8
    # not told of the last round: nothing follows it
    told = list(zip(range(99), out.block_sizes, out.acceptance_lengths, strict=False))[:-1]
    assert policy.rounds == [Round(*round) for round in told]


def test_a_policy_sees_the_prefill_of_a_plain_forward() -> None:
    pair, prompt = random_pair("llama-tied"), make_prompts([7], seed=1)[0]
    policy = Changing([2])
    generate(pair, prompt, policy, max_new_tokens=3, temperature=1.0)
    assert policy.prefill is not None
    with torch.no_grad():
        plain = pair.target(torch.tensor([prompt]), output_hidden_states=True)
    assert plain.hidden_states is not None
    torch.testing.assert_close(policy.prefill.logits, plain.logits[0, -1])
    torch.testing.assert_close(policy.prefill.hidden, plain.hidden_states[-1][0, -1])
    assert policy.prefill.key == prompt_key(prompt)
    assert policy.prefill.prompt_tokens == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["qwen3", "llama-tied"])
def test_a_round_shows_what_the_next_anchor_was_drawn_from(kind: str, temperature: float) -> None:
    class Looking(Changing):
        def update(self, round: Round) -> int:
            seen.append((round.logits.clone(), round.hidden.clone()))
            return super().update(round)

    pair, prompt = random_pair(kind), make_prompts([7], seed=1)[0]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    out = generate(pair, prompt, Looking([4, 1, 6]), max_new_tokens=14, temperature=temperature, stop_token_ids=[])
    with torch.no_grad():
        plain = pair.target(torch.tensor([prompt + out.output_ids]), output_hidden_states=True)
    assert plain.hidden_states is not None
    anchor = len(prompt)
    assert len(seen) == len(out.acceptance_lengths) - 1 > 3
    for length, (logits, hidden) in zip(out.acceptance_lengths, seen, strict=False):
        anchor += length
        torch.testing.assert_close(logits, plain.logits[0, anchor - 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hidden, plain.hidden_states[-1][0, anchor - 1], rtol=1e-4, atol=1e-4)


def test_a_round_is_not_shown_once_the_next_has_begun_nor_without_a_target() -> None:
    policy = Changing([2])
    generate(random_pair(), [9], policy, max_new_tokens=9, stop_token_ids=[])
    assert len(policy.rounds) > 2
    with pytest.raises(UserError, match="logits of round 0 were asked for after the next round; read them in update"):
        _ = policy.rounds[0].logits
    with pytest.raises(UserError, match="round 0 was made without hidden"):
        _ = Round(0, 16, 5).hidden
    assert repr(Round(0, 16, 5)) == "Round(index=0, block_size=16, acceptance_length=5)"


# ---- policies that verify a part of what was drafted


class Trimming(Changing):
    """Verifies as many as ``cuts`` say, draft by draft (all of them where that is more), and keeps what it saw."""

    def __init__(self, sizes: list[int], cuts: list[int]) -> None:
        super().__init__(sizes)
        self.cuts, self.drafts = cuts, list[Draft]()

    def trim(self, draft: Draft) -> int:
        self.drafts.append(draft)
        return min(self.cuts[(len(self.drafts) - 1) % len(self.cuts)], draft.block_size)


def test_a_trimmed_round_commits_no_more_than_is_verified() -> None:
    # two drafts are right: min(2, verified - 1) + 1 tokens a round. With b = 1 nothing is drafted and trim not asked.
    pair, prompt = make_scripted_pair(2), make_prompts([7])[0]
    policy = Trimming([8, 1, 5], [2, 1, 4])
    out = generate(pair, prompt, policy, max_new_tokens=14)
    assert out.drafted_sizes == [8, 1, 5, 8, 1, 5, 8, 1, 5]
    assert out.block_sizes == [2, 1, 1, 4, 1, 2, 1, 1, 4]
    # the budget of 13 behind the first token cuts the last round
    assert out.acceptance_lengths == [2, 1, 1, 3, 1, 2, 1, 1, 1] and out.first_block_size == 8
    assert [(draft.block_size, len(draft.probs)) for draft in policy.drafts] == [(8, 7), (5, 4)] * 3
    assert [round.block_size for round in policy.rounds] == out.block_sizes[:8]
    assert out.output_ids == generate(pair, prompt, FixedPolicy(8), max_new_tokens=14).output_ids


def test_a_draft_tells_the_drafters_probabilities() -> None:
    pair, prompt = make_scripted_pair(2), make_prompts([7])[0]
    policy = Trimming([4], [4])
    out = generate(pair, prompt, policy, max_new_tokens=6)
    # it says the rows of the head of the next two tokens, and of the one after the third: softmax of their products
    head, first = pair.runner.head.weight.detach(), out.output_ids[0]
    said = head[torch.tensor([first + 1, first + 2, first + 4]) % 64]
    expected = (said @ head.T).softmax(-1).amax(-1)
    torch.testing.assert_close(policy.drafts[0].probs, expected)
    assert policy.drafts[0].probs.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_trimming_changes_nothing_in_the_output(options: dict[str, Any]) -> None:
    pair = random_pair()
    for prompt in make_prompts([1, 9], seed=3):
        expected = generate(pair, prompt, FixedPolicy(1), max_new_tokens=30, **options).output_ids
        out = generate(pair, prompt, Trimming([6, 3], [1, 5, 2]), max_new_tokens=30, **options)
        assert out.output_ids == expected
        check_accounts(out)


def test_trimming_at_the_position_limit() -> None:
    # the target holds 20 positions: from position 18 on a block of 6 has 2, then 1
    pair = make_scripted_pair(0, target=make_target(successor=True, max_positions=20))
    policy = Trimming([6], [6])
    out = generate(pair, make_prompts([14])[0], policy, max_new_tokens=30)
    assert out.output_ids == generate(pair, make_prompts([14])[0], FixedPolicy(1), max_new_tokens=30).output_ids
    assert [draft.block_size for draft in policy.drafts] == [6, 5, 4, 3, 2]
    assert (out.block_sizes, out.drafted_sizes) == ([6, 5, 4, 3, 2, 1], [6] * 6)


def test_a_policy_that_trims_runs_no_captured_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("rounds of one shape cannot be trimmed")

    monkeypatch.setattr(engine, "rounds_for", refuse)
    assert len(generate(successor_pair(2), [9], Trimming([4], [3]), max_new_tokens=8).output_ids) == 8


@pytest.mark.parametrize("picked", [0, 5, -1])
def test_a_trim_to_what_was_not_drafted(picked: int) -> None:
    policy: Any = SimpleNamespace(choose=lambda prefill: 4, trim=lambda draft: picked)
    with pytest.raises(UserError, match=f"trim returned {picked}; expected 1 to 4, the positions drafted") as caught:
        generate(random_pair(), [9], policy, max_new_tokens=5, stop_token_ids=[])
    assert "\n" not in str(caught.value)


def test_a_policy_is_asked_even_when_no_round_follows() -> None:
    out = generate(successor_pair(ALWAYS), [20], FixedPolicy(5), max_new_tokens=1)
    assert (out.output_ids, out.first_block_size, out.acceptance_lengths, out.block_sizes) == ([21], 5, [], [])
    assert math.isnan(out.tau)


@pytest.mark.parametrize("sizes", [[8, 3, 16, 1], *([size] for size in SIZES)], ids=str)
def test_the_cache_holds_the_committed_tokens_after_every_round(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompt = make_scripted_pair(lambda p: p % 5), make_prompts([7])[0]
    seen: list[Rounds] = []
    make = engine.rounds_for
    monkeypatch.setattr(engine, "rounds_for", lambda pair, task: seen.append(make(pair, task)) or seen[-1])
    lengths: list[int] = []
    contexts: list[int] = []

    def look(tokens: list[int]) -> None:
        lengths.append(seen[0].cache.length)
        if seen[0].context is not None:
            contexts.append(seen[0].context.length)

    out = generate(pair, prompt, Changing(sizes), max_new_tokens=30, on_tokens=look)
    assert len(seen) == 1
    # the last committed token is the next anchor: not processed yet
    committed = torch.tensor([0, *out.acceptance_lengths]).cumsum(0)
    assert lengths == (len(prompt) + committed).tolist()
    # the drafter knows as much, but for the round that ended the output: nothing drafts after it
    assert contexts[:-1] == lengths[1:-1]
    assert len(set(out.acceptance_lengths)) >= min(max(sizes), 3)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-eager", "llama-tied", "mistral", "qwen2"])
def test_the_drafter_is_given_the_features_of_a_plain_forward(
    kind: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output stays right when they are wrong, so what was kept of every committed position is looked at."""
    target, prompt = random_pair(kind).target, make_prompts([7], seed=1)[0]
    script = prompt + greedy(kind, tuple(prompt), 30)
    pair = make_scripted_pair(lambda p: p % 5, target=target, script=script, layer_ids=(1, 0))
    seen: list[Rounds] = []
    make = engine.rounds_for
    monkeypatch.setattr(engine, "rounds_for", lambda pair, task: seen.append(make(pair, task)) or seen[-1])
    generate(pair, prompt, Changing([block_size]), max_new_tokens=30, stop_token_ids=[])
    context = seen[0].context
    # all but the last round's are kept
    assert context is not None and context.length >= len(script) - 1 - block_size
    with torch.no_grad():
        states = target(torch.tensor([script[: context.length]]), output_hidden_states=True).hidden_states
        assert states is not None
        features = torch.cat([states[i + 1] for i in pair.drafter.target_layer_ids], dim=-1)
        positions = torch.arange(context.length)[None]
        expected = pair.drafter.project_context(features, positions, context.length)
    for index, (keys, values) in enumerate(expected):
        for kept, wanted in ((context.keys[index], keys), (context.values[index], values)):
            torch.testing.assert_close(kept[:, :, : context.length], wanted, rtol=1e-4, atol=1e-4)


def test_drafter_context_is_the_same_after_rounds_without_drafts() -> None:
    """Features kept while b = 1 must reach the drafter later: drafts then equal those of an uninterrupted run."""
    pair, prompt = random_pair(), make_prompts([8], seed=4)[0]
    drafter_forward = pair.drafter.forward

    def run(sizes: list[int]) -> dict[int, torch.Tensor]:
        kept: dict[int, torch.Tensor] = {}

        def forward(embeddings, positions, context, mask=None):  # type: ignore[no-untyped-def]
            states = drafter_forward(embeddings, positions, context, mask)
            kept[int(positions[0, 0])] = states.clone()
            return states

        pair.drafter.forward = forward  # type: ignore[method-assign]
        try:
            generate(pair, prompt, Changing(sizes), max_new_tokens=20, stop_token_ids=[])
        finally:
            del pair.drafter.forward
        return kept

    steady, broken = run([4]), run([4, 1, 1, 1, 1])
    shared = sorted(steady.keys() & broken.keys())
    assert len(shared) >= 2 and len(broken) < len(steady)
    for position in shared:
        torch.testing.assert_close(broken[position], steady[position])


# ---- what is refused, and what is left behind


@pytest.mark.parametrize("block_size", [0, -3])
def test_a_policy_that_picks_less_than_one(block_size: int) -> None:
    with pytest.raises(UserError, match=f"block size {block_size}; expected"):
        generate(random_pair(), [9], Changing([block_size]), max_new_tokens=5)
    with pytest.raises(UserError, match=f"block size {block_size}; expected"):
        generate(random_pair(), [9], Changing([2, block_size]), max_new_tokens=9, stop_token_ids=[])


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([], 5, "prompt_ids is empty"),
        ([9, 64], 5, "holds 64.*0 to 63"),
        ([-1, 9], 5, "holds -1.*0 to 63"),
        ([9], 0, "max_new_tokens=0"),
        ([9], -2, "max_new_tokens=-2"),
    ],
)
def test_prompts_and_budgets_that_cannot_be_used(prompt: list[int], budget: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(random_pair(), prompt, FixedPolicy(2), max_new_tokens=budget)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calls_do_not_influence_each_other(temperature: float, block_size: int) -> None:
    pair, prompts = random_pair(), make_prompts([17, 3], seed=7)
    options: dict[str, Any] = {"max_new_tokens": 15, "temperature": temperature}

    def outputs(order: tuple[int, ...]) -> dict[int, tuple[list[int], list[int]]]:
        found = {}
        for index in order:
            out = generate(pair, prompts[index], FixedPolicy(block_size), **options)
            found[index] = (out.output_ids, out.acceptance_lengths)
        return found

    assert outputs((0, 1)) == outputs((1, 0)) == outputs((1, 1, 0))


class Stopped(Exception):
    """Ends a run in the middle of a prompt."""


@pytest.mark.parametrize("block_size", SIZES)
def test_a_run_that_was_stopped_is_resumed_with_the_same_samples(block_size: int) -> None:
    """What is left is decoded by models loaded anew, in another order, the prompt that was cut off from its start."""
    prompts = make_prompts([17, 3, 9], seed=7)
    options: dict[str, Any] = {"max_new_tokens": 15, "temperature": 1.0, "stop_token_ids": []}
    whole = [generate(random_pair(), prompt, FixedPolicy(block_size), **options).output_ids for prompt in prompts]
    parts: list[list[int]] = []

    def stop(tokens: list[int]) -> None:
        parts.append(tokens)
        if sum(map(len, parts)) > 1:
            raise Stopped

    first = random_pair()
    assert generate(first, prompts[0], FixedPolicy(block_size), **options).output_ids == whole[0]
    with pytest.raises(Stopped):
        generate(first, prompts[1], FixedPolicy(block_size), on_tokens=stop, **options)
    seen = [token for part in parts for token in part]
    assert seen == whole[1][: len(seen)]
    resumed = make_pair(seed=5, layers=3)
    for pair in (resumed, first):
        for index in (2, 1):
            assert generate(pair, prompts[index], FixedPolicy(block_size), **options).output_ids == whole[index]


@pytest.mark.parametrize("block_size", SIZES)
def test_tokens_can_be_watched_as_they_are_committed(block_size: int) -> None:
    pair, parts = successor_pair(2), []
    out = generate(pair, [20], FixedPolicy(block_size), max_new_tokens=20, on_tokens=parts.append)
    assert [len(part) for part in parts] == [1, *out.acceptance_lengths]
    assert [token for part in parts for token in part] == out.output_ids
    parts.clear()
    generate(pair, [20], FixedPolicy(block_size), max_new_tokens=1, on_tokens=parts.append)
    assert parts == [[21]]


def test_who_watches_cannot_change_the_output_nor_its_time() -> None:
    pair = successor_pair(2)

    def slow(tokens: list[int]) -> None:
        tokens.append(99)
        time.sleep(0.02)

    out = generate(pair, [20], FixedPolicy(3), max_new_tokens=13, on_tokens=slow)
    assert out.output_ids == list(range(21, 34))
    # five calls of 20 ms; only a clock that counts them gives more than the rounds took
    watched = generate(pair, [20], FixedPolicy(3), max_new_tokens=13, on_tokens=lambda tokens: time.sleep(0.2))
    plain = generate(pair, [20], FixedPolicy(3), max_new_tokens=13)
    assert watched.decode_seconds < plain.decode_seconds + 0.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupt_at_any_moment_leaves_the_next_call_as_it_was(temperature: float) -> None:
    """A timer raises KeyboardInterrupt inside calls, early and late; calls in between must not notice."""
    pair, prompt = random_pair(), make_prompts([9], seed=3)[0]
    policy, options = FixedPolicy(4), {"max_new_tokens": 21, "stop_token_ids": [], "temperature": temperature}
    began = time.perf_counter()
    expected = generate(pair, prompt, policy, **options).output_ids
    took = time.perf_counter() - began

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for share in torch.linspace(0.02, 0.9, 24).tolist():
            try:
                signal.setitimer(signal.ITIMER_REAL, share * took)
                generate(pair, prompt, policy, **options)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert generate(pair, prompt, policy, **options).output_ids == expected
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted >= 6
    assert hooks_of(pair.target) == []


class Failing:
    """Raises when asked: at once, or after some rounds."""

    def __init__(self, error: BaseException, rounds: int) -> None:
        self.error, self.rounds = error, rounds

    def choose(self, prefill: Prefill) -> int:
        if self.rounds == 0:
            raise self.error
        return 4

    def update(self, round: Round) -> int:
        if round.index + 1 >= self.rounds:
            raise self.error
        return 4


@pytest.mark.parametrize("error", [RuntimeError("policy"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_an_exception_in_a_policy_leaves_nothing_behind(error: BaseException, rounds: int) -> None:
    pair, prompt = random_pair(), make_prompts([9], seed=3)[0]
    with pytest.raises(type(error)):
        generate(pair, prompt, Failing(error, rounds), max_new_tokens=21, stop_token_ids=[])
    assert hooks_of(pair.target) == []
    out = generate(pair, prompt, FixedPolicy(4), max_new_tokens=21, stop_token_ids=[])
    assert out.output_ids == greedy("qwen3", tuple(prompt), 21)


def test_an_exception_inside_the_target_leaves_no_hooks() -> None:
    pair = make_pair()

    def fail(*args: object) -> None:
        assert hooks_of(pair.target), "the engine's hooks should be there now"
        raise RuntimeError("inside")

    handle = pair.target.get_decoder().layers[-1].register_forward_pre_hook(fail)  # type: ignore[union-attr, index]
    with pytest.raises(RuntimeError, match="inside"):
        generate(pair, [9, 10], FixedPolicy(4), max_new_tokens=5)
    assert len(hooks_of(pair.target)) == 1
    handle.remove()
    generate(pair, [9, 10], FixedPolicy(4), max_new_tokens=5)
    assert hooks_of(pair.target) == []


def test_the_users_model_is_left_as_it_was() -> None:
    target = make_target()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    config = target.config.to_dict()
    pair = make_pair(target=target)
    generate(pair, [9, 10], FixedPolicy(4), max_new_tokens=9, temperature=1.0)
    assert hooks_of(target) == [] and hooks_of(pair.drafter) == []
    assert target.config.to_dict() == config
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert all(parameter.requires_grad for parameter in target.parameters())


# ---- everything at once


# a fixture that stays the same from example to example
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pair_any_policy_any_stops(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    pair = random_pair(kind)
    prompt = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=12))
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    budget = data.draw(st.integers(1, 18))
    stops = data.draw(st.lists(st.integers(0, 63), max_size=6))
    temperature = data.draw(st.sampled_from([0.0, 0.8]))
    whole = decode_one_by_one(pair.target, prompt, Sampling(temperature), budget)
    depth = data.draw(st.sampled_from([None, 0, 1, 3, 99]))
    if depth is not None:
        pair = make_scripted_pair(depth, target=pair.target, script=prompt + whole)
    policy = Changing(sizes)
    out = generate(pair, prompt, policy, max_new_tokens=budget, temperature=temperature, stop_token_ids=stops)
    assert out.output_ids == cut(whole, budget, stops)
    assert out.block_sizes == [sizes[i % len(sizes)] for i in range(len(out.block_sizes))]
    check_accounts(out)
    if depth is not None:
        lengths, left = [], len(out.output_ids) - 1
        while left:
            lengths.append(min(depth + 1, sizes[len(lengths) % len(sizes)], left))
            left -= lengths[-1]
        assert out.acceptance_lengths == lengths


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: [torch.tensor(i) for i in ids]])
@pytest.mark.parametrize("block_size", [1, 4])
def test_numbers_of_other_libraries_are_numbers(kind: Any, block_size: int) -> None:
    pair = successor_pair(2)
    plain = generate(pair, [9, 10], FixedPolicy(block_size), max_new_tokens=100, stop_token_ids=[40])
    # np.uint8(255) + 2 is 1: budgets must not be added up as what they came as
    budget: Any = np.uint8(255)
    other = generate(
        pair, kind([9, 10]), FixedPolicy(kind([block_size])[0]), max_new_tokens=budget, stop_token_ids=kind([40])
    )
    assert plain.output_ids[-1] == 40 and other.output_ids == plain.output_ids


def test_stop_ids_outside_the_vocabulary_never_stop() -> None:
    pair = successor_pair(2)
    plain = generate(pair, [9, 10], FixedPolicy(4), max_new_tokens=20, stop_token_ids=[])
    beyond = generate(pair, [9, 10], FixedPolicy(4), max_new_tokens=20, stop_token_ids=[-1, 64, 2**63, 2**80])
    assert beyond.output_ids == plain.output_ids


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids=5 is not allowed; expected a list"),
        ({"stop_token_ids": torch.tensor(5)}, "stop_token_ids=tensor.5. is not allowed; expected a list"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids.0.='</s>' is not allowed; expected a whole"),
        ({"stop_token_ids": [3, 5.5]}, "stop_token_ids.1.=5.5 is not allowed"),
        ({"stop_token_ids": [None]}, "stop_token_ids.0.=None is not allowed"),
        ({"prompt_ids": torch.tensor(5)}, "prompt_ids=tensor.5. is not allowed; expected a list"),
        ({"prompt_ids": torch.zeros(1, 200, dtype=torch.int64)}, "prompt_ids.0.=tensor"),
        ({"prompt_ids": {9, 10}}, "prompt_ids is a set"),
        ({"on_tokens": 5}, "on_tokens=5 is not allowed; expected a function"),
        ({"policy": 16}, "policy=16 is not allowed; expected an object with choose"),
        ({"policy": None}, "policy=None is not allowed"),
        ({"policy": FixedPolicy}, "policy=<class .* is not allowed"),
        ({"policy": SimpleNamespace(choose=lambda prefill: 3, update=5)}, "policy=.* is not allowed"),
        ({"policy": SimpleNamespace(choose=lambda prefill: 3, trim=5)}, "policy=.* is not allowed"),
        ({"policy": SimpleNamespace(choose=lambda prefill: 3, trim=lambda draft: 1.5)}, "trim=1.5 is not allowed"),
        ({"policy": SimpleNamespace(choose=lambda prefill: torch.zeros(40, 40))}, "block size=tensor"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        arguments: dict[str, Any] = {"prompt_ids": [9, 10], "policy": FixedPolicy(4)} | wrong
        generate(successor_pair(2), **arguments)
    assert "\n" not in str(caught.value)
