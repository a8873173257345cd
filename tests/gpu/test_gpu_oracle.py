"""On a GPU: replay gives the labels of enumeration and of the CPU, within the memory there is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from blockpilot import oracle
from blockpilot.models import Pair, load_pair
from tests.toy import Changing, make_pair, make_prompts

SIZES = [1, 2, 5, 8, 13]
PROMPTS = make_prompts([4, 16, 1, 9, 17], seed=3)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "seed": 5}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_replay_equals_enumeration_and_the_cpu(pair: Pair, options: dict[str, Any]) -> None:
    cpu = make_pair(seed=5, layers=3, eos=None)
    by_replay = oracle.replay(pair, PROMPTS, SIZES, max_new_tokens=40, per_round=True, **options)
    for other in (
        oracle.enumerate(pair, PROMPTS, SIZES, max_new_tokens=40, **options),
        oracle.replay(cpu, PROMPTS, SIZES, max_new_tokens=40, **options),
        oracle.replay(pair, PROMPTS, SIZES, max_new_tokens=40, max_batch_tokens=64, **options),
    ):
        assert [r.output_ids for r in by_replay] == [r.output_ids for r in other]
        assert [r.acceptance_lengths for r in by_replay] == [r.acceptance_lengths for r in other]
    policies = [Changing([3, 8, 1]) for _ in PROMPTS]
    on_cpu = oracle.simulate(cpu, oracle.replay(cpu, PROMPTS, SIZES, max_new_tokens=40, **options), policies)
    policies = [Changing([3, 8, 1]) for _ in PROMPTS]
    assert oracle.simulate(pair, by_replay, policies) == on_cpu


def test_half_precision_labels_add_up() -> None:
    """In bf16 widths round differently, so labels may part at near-ties: their sums are tested."""
    tiny = load_pair("tiny", device="cuda", dtype="bfloat16")
    prompts = [tiny.encode([f"Count from {i} to {i + 30}."]) for i in range(12)]
    for record in oracle.replay(tiny, prompts, [2, 15, 16, 32], max_new_tokens=64):
        for size, lengths in record.acceptance_lengths.items():
            assert 1 + sum(lengths) == len(record.output_ids) <= 64
            assert all(1 <= n <= size for n in lengths)


def test_memory_that_runs_out_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    tiny = load_pair("tiny", device="cuda")
    prompts = [tiny.encode([f"Count from {i} to {i + 30}."]) for i in range(256)]
    expected = oracle.replay(tiny, prompts, [15, 16], max_new_tokens=64, batch_size=32)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (48 << 20)) / total)
    try:
        with caplog.at_level(logging.WARNING):
            found = oracle.replay(tiny, prompts, [15, 16], max_new_tokens=64, batch_size=256)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "going on with oracle.max_batch_tokens=" in caplog.text
    assert [r.acceptance_lengths for r in found] == [r.acceptance_lengths for r in expected]
