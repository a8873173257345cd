"""The classifier asked again every round: it sees what it would have seen had the prompt ended there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockpilot.decoding import Prefill, Round, generate
from blockpilot.oracle import replay, simulate
from blockpilot.policies.per_round import PerRoundPolicy
from tests.toy import make_prompts, make_scripted_pair
from tests.unit.policies.test_policies_predictor import SIZES, make_policy


def by_first_unit() -> PerRoundPolicy:
    """Size 3 where the first hidden unit is above 0, size 6 where it is below."""
    policy = make_policy(make_scripted_pair(3), "hidden", depth=1)
    predictor: Any = policy.predictor
    for parameter in predictor.parameters():
        parameter.data.zero_()
    # two units of the hidden layer: relu(x) and relu(-x)
    predictor.first.weight.data[0, 0], predictor.first.weight.data[1, 0] = 1.0, -1.0
    predictor.head.weight.data[SIZES.index(3), 0] = predictor.head.weight.data[SIZES.index(6), 1] = 1.0
    return PerRoundPolicy(policy)


def test_by_hand() -> None:
    def state(first: float) -> torch.Tensor:
        return torch.tensor([first, *[5.0] * 31])

    policy = by_first_unit()
    assert policy.choose(Prefill(1, 3, torch.zeros(64), state(0.5))) == 3
    seen = [(-2.0, 6), (0.1, 3), (-0.1, 6)]
    for index, (first, size) in enumerate(seen):
        what = {"logits": torch.zeros(64), "hidden": state(first)}
        assert policy.update(Round(index, 3, 2, what.__getitem__)) == size


@pytest.mark.parametrize("kind", ["probs", "hidden", "logits"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_it_chooses_as_at_the_end_of_a_longer_prompt_decoded_and_simulated(kind: str, temperature: float) -> None:
    pair = make_scripted_pair(lambda p: p * 5 % 7, noise=0.8)
    prompts = make_prompts([3, 6, 8, 11], seed=2)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "stop_token_ids": []}
    records = replay(pair, prompts, [4], **options)
    predictor = next(p for seed in range(50) if varies(p := make_policy(pair, kind, seed), pair, prompts))
    policy = PerRoundPolicy(predictor)
    found = simulate(pair, records, policy)
    for prompt, simulated in zip(prompts, found, strict=True):
        out = generate(pair, prompt, policy, **options)
        assert (out.block_sizes, out.acceptance_lengths) == (simulated.block_sizes, simulated.acceptance_lengths)
        known = 0  # output tokens known when a round begins, but for its anchor
        for size, length in zip(out.block_sizes, out.acceptance_lengths, strict=True):
            text = prompt + out.output_ids[:known]
            assert size == generate(pair, text, predictor, max_new_tokens=1).first_block_size
            known += length
    assert len({size for one in found for size in one.block_sizes}) > 1


def varies(policy: Any, pair: Any, prompts: list[list[int]]) -> bool:
    """Random weights may choose the same for everyone."""
    longer = [prompt + prompt[:end] for prompt in prompts for end in range(3)]
    return len({generate(pair, text, policy, max_new_tokens=1).first_block_size for text in longer}) > 2
