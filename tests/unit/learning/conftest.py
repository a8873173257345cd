"""Made-up label tables whose best block size is a function of the distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blockpilot.oracle.prefill import sparse_distributions
from blockpilot.oracle.table import LabelTable, TokenLists

VOCAB_SIZE, HIDDEN_SIZE, BLOCK_SIZES = 40, 6, (14, 15, 16, 17, 18)

TableMaker = Callable[..., LabelTable]


def _make_table(num_prompts: int = 400, seed: int = 0, prefix: str = "p", tail_mass: float = 1e-3) -> LabelTable:
    """Prompt ``i`` is best at one column, its group's, its tau falling by 8 % of the best per step away from it.

    The group decides the likeliest token (token = group), how peaked the distribution is, and the hidden state, so
    that every kind of feature can tell it.
    """
    generator = torch.Generator().manual_seed(seed)
    num_sizes, everyone = len(BLOCK_SIZES), torch.arange(num_prompts)
    group = torch.randint(num_sizes, (num_prompts,), generator=generator)
    logits = 0.3 * torch.randn(num_prompts, VOCAB_SIZE, generator=generator)
    logits[everyone, group] += 2 + 1.5 * group
    hidden = 0.1 * torch.randn(num_prompts, HIDDEN_SIZE, generator=generator)
    hidden[everyone, group] += 1
    distance = (torch.arange(num_sizes)[None] - group[:, None]).abs()
    return LabelTable(
        prompt_ids=tuple(f"{prefix}{i}" for i in range(num_prompts)),
        datasets=("synthetic",) * num_prompts,
        prompt_keys=everyone + int.from_bytes(prefix.encode(), "big") * 100_000,
        prompts=TokenLists.of([[i, i + 1] for i in range(num_prompts)]),
        block_sizes=BLOCK_SIZES,
        committed_tokens=600 - 48 * distance,
        rounds=torch.full((num_prompts, num_sizes), 100),
        distributions=sparse_distributions(logits, tail_mass),
        logits=logits,
        hidden=hidden,
    )


@pytest.fixture
def make_table() -> TableMaker:
    """The function that makes them."""
    return _make_table
