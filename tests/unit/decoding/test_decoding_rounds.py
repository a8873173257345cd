"""Rounds can be taken back: what follows a rewind is what followed the start."""

from __future__ import annotations

import pytest
import torch

from blockpilot.decoding import engine
from blockpilot.decoding.rounds import Rounds, Settled, Task
from blockpilot.decoding.sampling import Sampling
from tests.toy import make_pair, make_prompts, make_scripted_pair

pytestmark = pytest.mark.usefixtures("each_kind_of_rounds")

PAIRS = {"random": make_pair, "two right": lambda: make_scripted_pair(2)}


def started(kind: str, temperature: float) -> Rounds:
    [prompt] = make_prompts([9])
    rounds = engine.rounds_for(PAIRS[kind](), Task(prompt, Sampling(temperature), frozenset(), 60))
    rounds.prefill()
    rounds.start(drafting=True)
    return rounds


def lengths(rounds: Rounds) -> tuple[int, int, int]:
    assert rounds.context is not None
    return rounds.cache.length, rounds.context.length, rounds.committed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", PAIRS)
@torch.inference_mode()
def test_after_a_rewind_the_same_rounds_follow(kind: str, temperature: float) -> None:
    rounds = started(kind, temperature)
    before = lengths(rounds)
    assert before == (9, 9, 1)

    def go(drafting: bool, sizes: tuple[int, ...]) -> list[Settled]:
        rounds.rewind(drafting)
        assert lengths(rounds) == before
        done = [rounds.round(size) for size in sizes]
        assert rounds.cache.length == 9 + sum(len(one.tokens) for one in done)
        return done

    wide = go(True, (4, 3, 5))
    plain = go(False, (1,) * 4)
    assert [len(one.tokens) for one in plain] == [1] * 4
    assert go(True, (4, 3, 5)) == wide
    text = [token for one in wide for token in one.tokens]
    assert [token for one in plain for token in one.tokens][: len(text)] == text[:4]


@torch.inference_mode()
def test_a_rewind_without_drafting_leaves_the_drafter_alone() -> None:
    rounds = started("random", 0.0)
    rounds.rewind(drafting=False)
    rounds.round(5)
    assert lengths(rounds) == (10, 9, 2)
    rounds.close()
