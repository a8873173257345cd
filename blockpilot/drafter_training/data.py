"""Batches of texts for a drafter, by the number of the optimizer step.

Knows texts and their order; nothing of models or files. A step's batch depends on the seed and the step alone, so a
resumed run reads what an uninterrupted one would have read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from blockpilot.drafter_training.objective import NO_TOKEN, TextBatch
from blockpilot.drafter_training.texts import Text

_LIKE_LENGTHS = 32
"""Texts whose lengths fall into the same step of so many tokens are of like length."""


def batch_of(texts: Sequence[Text], block_size: int, soft: bool) -> TextBatch:
    """Texts side by side, padded on the right.

    Args:
        texts: at least one.
        block_size: B; so many positions without a token stand behind the longest text.
        soft: whether soft labels are wanted.
    """
    width = max(len(text.tokens) for text in texts)
    count = texts[0].soft_ids.shape[1]
    tokens = torch.full((len(texts), width + block_size), NO_TOKEN)
    features = torch.zeros(len(texts), width - 1, texts[0].features.shape[1])
    soft_ids = torch.zeros(*tokens.shape, count, dtype=torch.int64) if soft else None
    soft_probs = torch.zeros(*tokens.shape, count) if soft else None
    for row, text in enumerate(texts):
        end = len(text.tokens)
        tokens[row, :end] = text.tokens
        features[row, : end - 1] = text.features
        if soft_ids is not None and soft_probs is not None:
            soft_ids[row, text.prompt_length : end] = text.soft_ids
            soft_probs[row, text.prompt_length : end] = text.soft_probs
    prompts, lengths = ([f(text) for text in texts] for f in (lambda t: t.prompt_length, lambda t: len(t.tokens)))
    return TextBatch(tokens, torch.tensor(prompts), torch.tensor(lengths), features, soft_ids, soft_probs)


class Steps(Dataset[TextBatch]):
    """The batch of each optimizer step.

    Args:
        texts: to learn from, each with an answer of two tokens or more.
        block_size, soft: as in :func:`batch_of`.
        batch_size: texts per step.
        seed: of the order, which is another one in every pass over the texts.
    """

    def __init__(self, texts: Sequence[Text], block_size: int, soft: bool, batch_size: int, seed: int) -> None:
        self.texts, self.block_size, self.soft = texts, block_size, soft
        self.batch_size, self.seed = batch_size, seed
        self.per_pass = -(-len(texts) // batch_size)
        self._order = lru_cache(maxsize=1)(self._new_order)

    def __getitem__(self, step: int) -> TextBatch:
        members = self._order(step // self.per_pass)[step % self.per_pass]
        return batch_of([self.texts[i] for i in members], self.block_size, self.soft)

    def _new_order(self, number: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed}/{number}")
        order = sorted(range(len(self.texts)), key=lambda i: (len(self.texts[i].tokens) // _LIKE_LENGTHS, rng.random()))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        return batches


class DrafterDataModule(lightning.LightningDataModule):
    """Training steps in epochs of a fixed number of steps, each of which ends with a validation.

    Args:
        steps: all batches.
        max_steps: of the whole training.
        steps_per_epoch: between validations.
    """

    def __init__(self, steps: Steps, max_steps: int, steps_per_epoch: int) -> None:
        super().__init__()
        self.steps, self.max_steps, self.steps_per_epoch = steps, max_steps, steps_per_epoch

    def train_dataloader(self) -> DataLoader[TextBatch]:
        """The steps from the trainer's on; made anew every epoch."""
        assert self.trainer is not None
        first = self.trainer.global_step
        numbers = range(first, min(first + self.steps_per_epoch, self.max_steps))
        return DataLoader(self.steps, batch_size=None, sampler=numbers, num_workers=0)

    def val_dataloader(self) -> DataLoader[TextBatch]:
        """One batch; what validation reads, the callback knows."""
        return DataLoader(self.steps, batch_size=None, sampler=range(1), num_workers=0)

    def transfer_batch_to_device(self, batch: TextBatch, device: torch.device, dataloader_idx: int) -> TextBatch:
        """Moves every tensor."""
        return batch.to(device)
