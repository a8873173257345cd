"""The truncated distribution: smallest sufficient set, order, ties, and rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot.oracle import prefill
from blockpilot.oracle.prefill import sparse_distributions, sparsify


def _by_hand(probs_V: Tensor, tail_mass: float) -> tuple[list[int], list[float]]:
    """The definition, one token at a time."""
    order = sorted(range(len(probs_V)), key=lambda token: (-float(probs_V[token]), token))
    ids: list[int] = []
    mass = 0.0
    for token in order:
        if probs_V[token] == 0 or (tail_mass > 0 and mass >= 1 - tail_mass):
            break
        ids.append(token)
        mass += float(probs_V[token])
    return ids, [float(probs_V[token]) for token in ids]


@given(
    weights=st.lists(st.lists(st.integers(0, 4), min_size=9, max_size=9).filter(any), min_size=1, max_size=5),
    tail_mass=st.sampled_from([0.0, 1e-3, 0.1, 0.3, 0.9]),
    first_topk=st.sampled_from([1, 3, 1024]),
)
def test_equals_the_definition_with_many_ties(weights: list[list[int]], tail_mass: float, first_topk: int) -> None:
    counts = torch.tensor(weights, dtype=torch.float32)
    probs = counts / counts.sum(dim=-1, keepdim=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "FIRST_TOPK", first_topk)
        rows = sparsify(probs, tail_mass)
    assert rows.vocab_size == 9 and len(rows) == len(weights)
    for i, row in enumerate(probs):
        part = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
        assert (rows.token_ids[part].tolist(), rows.probs[part].tolist()) == _by_hand(row, tail_mass)


def test_exactly_the_mass_is_enough() -> None:
    rows = sparsify(torch.tensor([[0.25, 0.5, 0.25]]), tail_mass=0.5)
    assert rows.token_ids.tolist() == [1]


def test_tail_mass_zero_keeps_every_nonzero_entry() -> None:
    logits = torch.randn(3, 50)
    logits[:, 7] = -torch.inf
    rows = sparse_distributions(logits, 0.0)
    assert rows.offsets.tolist() == [0, 49, 98, 147]
    assert 7 not in rows.token_ids
    assert rows.probs.sum() == pytest.approx(3, abs=1e-5)


@pytest.mark.parametrize("tail_mass", [0.0, 1e-7, 1e-3, 0.5])
def test_a_row_does_not_depend_on_the_others(tail_mass: float) -> None:
    """Peaked and flat rows over a vocabulary far wider than the first topk, alone and together."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 20_000, generator=generator) * torch.tensor([[0.0], [0.5], [3.0], [9.0]])
    together = sparse_distributions(logits, tail_mass)
    for i in range(4):
        alone = sparse_distributions(logits[i : i + 1], tail_mass)
        chosen = together.select(torch.tensor([i]))
        assert torch.equal(alone.token_ids, chosen.token_ids)
        assert torch.equal(alone.probs, chosen.probs)


def test_softmax_is_in_fp32() -> None:
    logits = torch.randn(2, 300).bfloat16()
    rows = sparse_distributions(logits, 1e-3)
    expected = sparse_distributions(logits.float(), 1e-3)
    assert rows.probs.dtype == torch.float32
    assert torch.equal(rows.probs, expected.probs)
