"""Speculative decoding at T = 1 samples the target's distribution: counted over seeds, against exact probabilities."""

from __future__ import annotations

import pytest
import torch

from blockpilot.decoding import generate
from tests.toy import make_drafter, make_pair, make_target

SEEDS = 1200
PROMPT = [1, 3, 2]


class _Always:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def choose(self, prefill: object) -> int:
        return self.block_size


@pytest.fixture(scope="module")
def exact() -> tuple[object, torch.Tensor]:
    """A target of four tokens, and the probability of every pair of first tokens, ``[16]``."""
    target = make_target(vocab_size=4, layers=3, seed=2)
    pair = make_pair(target=target, drafter=make_drafter(target, mask_token_id=0), eos=None)
    with torch.no_grad():
        first = target(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
        after = target(torch.tensor([[*PROMPT, token] for token in range(4)])).logits[:, -1].double().softmax(-1)
    return pair, (first[:, None] * after).flatten()


@pytest.mark.parametrize("block_size", [1, 4])
def test_pairs_of_tokens_have_the_targets_probabilities(exact: tuple, block_size: int) -> None:
    pair, probs = exact
    counts = torch.zeros(16, dtype=torch.float64)
    for seed in range(SEEDS):
        out = generate(
            pair, PROMPT, _Always(block_size), max_new_tokens=2, temperature=1.0, seed=seed, stop_token_ids=[]
        )
        counts[out.output_ids[0] * 4 + out.output_ids[1]] += 1
    assert _p_value(counts, probs) > 0.001
    # and the test could tell: the same counts against a distribution that is a little off
    tilted = probs**1.5
    assert _p_value(counts, tilted / tilted.sum()) < 0.001


def _p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = counts.sum() * probs
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(probs) - 1) / 2, dtype=torch.float64), statistic / 2))
