"""A small evaluation: four policies on six prompts of two data sets, the last of them without rounds."""

from __future__ import annotations

import pytest

from blockpilot.metrics import DecodedPrompt, PolicySummary, summarize


@pytest.fixture(scope="session")
def decoded() -> list[DecodedPrompt]:
    """Decodes of ``autoregressive``, ``always-4``, ``pilot <b>`` and ``oracle``; the best block size is 3 or 4."""

    def decode(policy: str, index: int, block_size: int, tokens: int, rounds: int) -> DecodedPrompt:
        if index == 5:
            tokens = rounds = 0
        lengths = tuple(tokens // rounds + (turn < tokens % rounds) for turn in range(rounds))
        return DecodedPrompt(
            policy=policy,
            prompt_id=f"p{index}",
            dataset=("math", "code")[index % 2],
            block_sizes=(block_size,) * rounds,
            first_block_size=block_size,
            acceptance_lengths=lengths,
            output_tokens=1 + tokens,
            decode_seconds=0.1 * rounds,
            policy_seconds=0.001 * rounds,
            prefill_seconds=0.2,
        )

    return [
        decode(policy, index, block_size, 24, 24 if block_size == 1 else 8 + (block_size != best))
        for policy, choices in {
            "autoregressive": (1,) * 6,
            "always-4": (4,) * 6,
            "pilot <b>": (3, 4, 4, 4, 3, 4),
            "oracle": (3, 4, 3, 4, 3, 4),
        }.items()
        for index, (block_size, best) in enumerate(zip(choices, (3, 4, 3, 4, 3, 4), strict=True))
    ]


@pytest.fixture(scope="session")
def summaries(decoded: list[DecodedPrompt]) -> list[PolicySummary]:
    """Their summaries; the best tau is 3 everywhere."""
    best_tau = {f"p{index}": 3.0 for index in range(5)} | {"p5": float("nan")}
    return summarize(
        decoded, baseline="autoregressive", always="always-4", oracle="oracle", best_tau=best_tau, samples=100
    )
