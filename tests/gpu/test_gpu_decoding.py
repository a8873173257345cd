"""On a GPU: rounds are captured as graphs, and decode what the CPU and the uncaptured steps decode."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from blockpilot.decoding import Prefill, Round, Sampling, engine, generate
from blockpilot.decoding.rounds import Rounds, Task
from blockpilot.decoding.static import StaticRounds
from blockpilot.models import Pair, load_pair
from blockpilot.policies import FixedPolicy
from tests.toy import Changing, make_pair, make_prompts

SIZES = (1, 2, 3, 8, 16, 19)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "seed": 5}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Rounds]:
    """Every rounds object of the test."""
    made: list[Rounds] = []
    make = engine.rounds_for

    def kept(pair: Pair, task: Task) -> Rounds:
        made.append(make(pair, task))
        return made[-1]

    monkeypatch.setattr(engine, "rounds_for", kept)
    return made


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("block_size", SIZES)
def test_captured_rounds_decode_what_the_cpu_decodes(
    pair: Pair, used: list[Rounds], block_size: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cpu = make_pair(seed=5, layers=3, eos=None)
    with caplog.at_level(logging.WARNING):
        for prompt in make_prompts([9, 30], seed=3):
            out = generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=40, **options)
            same = generate(cpu, prompt, FixedPolicy(block_size), max_new_tokens=40, **options)
            assert (out.output_ids, out.acceptance_lengths) == (same.output_ids, same.acceptance_lengths)
    rounds = used[0]
    assert isinstance(rounds, StaticRounds)
    assert any(captured is not None for captured in rounds.work.graphs.values()), caplog.text
    assert not caplog.records


def test_graphs_of_all_sizes_take_turns(pair: Pair, used: list[Rounds]) -> None:
    prompt = make_prompts([9], seed=3)[0]
    expected = generate(pair, prompt, FixedPolicy(1), max_new_tokens=120).output_ids
    for _ in range(2):
        out = generate(pair, prompt, Changing([4, 1, 8, 2, 3]), max_new_tokens=120)
        assert out.output_ids == expected
    rounds = used[-1]
    assert isinstance(rounds, StaticRounds)
    assert {shape.width for shape, captured in rounds.work.graphs.items() if captured} >= {1, 2, 3, 4, 8}


@pytest.mark.parametrize("block_size", SIZES)
def test_nothing_but_the_result_is_waited_for(pair: Pair, block_size: int) -> None:
    prompt = make_prompts([9], seed=3)[0]
    generate(pair, prompt, FixedPolicy(block_size), max_new_tokens=100)
    with torch.inference_mode():
        rounds = StaticRounds(pair, Task(prompt, Sampling(), frozenset(), 100))
        rounds.prefill()
        rounds.start(drafting=block_size > 1)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            settled = rounds._step(rounds.width(block_size))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert 1 <= len(rounds._commit(settled).tokens) <= block_size
        rounds.close()


@pytest.mark.parametrize("block_size", SIZES)
def test_tiny_in_fp32_decodes_what_transformers_decodes(block_size: int) -> None:
    tiny = load_pair("tiny", device="cuda")
    for text in ("Count from 3 to 60 in steps of 3.", "Write a list."):
        prompt = tiny.encode([text])
        out = generate(tiny, prompt, FixedPolicy(block_size), max_new_tokens=64)
        tokens = torch.tensor([prompt], device="cuda")
        model: Any = tiny.target
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=64,
            eos_token_id=list(tiny.stop_token_ids), pad_token_id=0,
        )  # fmt: skip
        assert out.output_ids == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("block_size", SIZES)
def test_half_precision_accepts_and_ends_like_full(block_size: int) -> None:
    """Widths round differently in bf16, so outputs may part at near-ties: their form is tested, not their tokens."""
    tiny = load_pair("tiny", device="cuda", dtype="bfloat16")
    prompt = tiny.encode(["Count from 3 to 60 in steps of 3."])
    out = generate(tiny, prompt, FixedPolicy(block_size), max_new_tokens=64)
    assert 1 + sum(out.acceptance_lengths) == len(out.output_ids) <= 64
    assert all(1 <= n <= block_size for n in out.acceptance_lengths)
    assert generate(tiny, prompt, FixedPolicy(block_size), max_new_tokens=64).output_ids == out.output_ids


def test_a_policy_sees_the_prefill_on_the_device_and_every_round(pair: Pair) -> None:
    class Told(Changing):
        def choose(self, prefill: Prefill) -> int:
            assert prefill.logits.is_cuda and prefill.hidden.is_cuda
            return super().choose(prefill)

        def update(self, round: Round) -> int:
            assert round.logits.is_cuda and round.hidden.is_cuda
            # greedy: the anchor is the token with the highest logit, whether the round was captured or not
            anchors.append(int(round.logits.argmax()))
            heads.append(int(pair.runner.logits(round.hidden[None, None])[0, 0].argmax()))
            return super().update(round)

    anchors: list[int] = []
    heads: list[int] = []
    policy = Told([4, 2])
    out = generate(pair, make_prompts([9], seed=3)[0], policy, max_new_tokens=20)
    ends = torch.tensor(out.acceptance_lengths[:-1]).cumsum(0).tolist()
    assert anchors == heads == [out.output_ids[end] for end in ends]
    told = list(zip(range(99), out.block_sizes, out.acceptance_lengths, strict=False))[:-1]
    assert policy.rounds == [Round(*round) for round in told]
