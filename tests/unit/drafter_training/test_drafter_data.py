"""Which texts a step reads."""

from __future__ import annotations

import torch

from blockpilot.drafter_training.data import Steps, batch_of
from blockpilot.drafter_training.objective import NO_TOKEN
from blockpilot.drafter_training.texts import Text


def _text(number: int, prompt: int, answer: int) -> Text:
    total = prompt + answer
    return Text(
        f"p{number}", torch.full((total,), number, dtype=torch.int32), prompt, torch.full((total - 1, 3), 0.5 + number),
        torch.full((answer, 2), number), torch.full((answer, 2), 0.25),
    )  # fmt: skip


TEXTS = [_text(i, 4 + 11 * i % 50, 2 + 7 * i % 60) for i in range(23)]


def test_a_batch_is_padded_behind_its_texts():
    batch = batch_of([TEXTS[1], TEXTS[2]], block_size=8, soft=True)
    assert batch.soft_probs_RTK is not None
    for row, text in enumerate((TEXTS[1], TEXTS[2])):
        end = len(text.tokens)
        assert batch.tokens_RT[row, :end].tolist() == text.tokens.tolist()
        assert set(batch.tokens_RT[row, end:].tolist()) == {NO_TOKEN}
        assert torch.equal(batch.features_RTF[row, : end - 1], text.features)
        known = batch.soft_probs_RTK[row].sum(dim=1) > 0
        assert known.nonzero()[:, 0].tolist() == list(range(text.prompt_length, end))
    longest = max(len(TEXTS[1].tokens), len(TEXTS[2].tokens))
    assert batch.tokens_RT.shape == (2, longest + 8)
    assert batch.prompt_lengths_R.tolist() == [TEXTS[1].prompt_length, TEXTS[2].prompt_length]
    assert batch_of(TEXTS[:2], 8, soft=False).soft_ids_RTK is None


def test_every_pass_reads_every_text_once_in_another_order():
    steps = Steps(TEXTS, block_size=8, soft=False, batch_size=5, seed=0)
    passes = []
    for number in range(3):
        read = [steps[number * steps.per_pass + i].tokens_RT[:, 0].tolist() for i in range(steps.per_pass)]
        passes.append(read)
        assert sorted(token for batch in read for token in batch) == list(range(23))
    assert passes[0] != passes[1] != passes[2]


def test_a_step_is_the_same_whatever_was_read_before():
    first, second = (Steps(TEXTS, 8, False, 5, seed=7) for _ in range(2))
    for step in (0, 13, 4, 26):
        first[step]
    for step in (9, 2, 21):
        assert torch.equal(first[step].tokens_RT, second[step].tokens_RT)
    other = Steps(TEXTS, 8, False, 5, seed=8)
    assert any(not torch.equal(first[s].lengths_R, other[s].lengths_R) for s in range(5))


def test_texts_of_like_length_stand_together():
    steps = Steps(TEXTS, block_size=8, soft=False, batch_size=4, seed=0)
    widths = [steps[i].lengths_R for i in range(steps.per_pass)]
    padded = sum(len(w) * int(w.max()) for w in widths)
    assert padded < 1.35 * sum(len(text.tokens) for text in TEXTS)
