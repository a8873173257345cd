"""Labels for Lightning: collect once, load, split by prompt id, serve batches.

Knows tables and splits; how labels are collected and where they are stored is in the two callables it is given.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from blockpilot.errors import UserError
from blockpilot.learning.features import FeatureExtractor, Features
from blockpilot.learning.losses import has_rounds
from blockpilot.oracle.table import LabelTable


@dataclass(frozen=True)
class LabelBatch:
    """Features and labels of N prompts."""

    features: Features
    committed_tokens: Tensor
    """int64 ``[N, K]``: sum of the acceptance lengths."""
    rounds: Tensor
    """int64 ``[N, K]``; 0 where the output is the prefill token alone."""

    def __len__(self) -> int:
        return len(self.rounds)

    def select(self, indices: Tensor) -> LabelBatch:
        """The prompts at ``indices`` (int64 ``[M]``), in that order."""
        return LabelBatch(self.features.select(indices), self.committed_tokens[indices], self.rounds[indices])

    def to(self, device: torch.device | str) -> LabelBatch:
        """The same batch on ``device``; Lightning moves batches with it."""
        return LabelBatch(self.features.to(device), self.committed_tokens.to(device), self.rounds.to(device))


class LabelDataset(Dataset[LabelBatch]):
    """A table with its features made once; a batch is one indexing of flat tensors."""

    def __init__(self, table: LabelTable, extractor: FeatureExtractor):
        self._all = LabelBatch(extractor.from_table(table), table.committed_tokens, table.rounds)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> LabelBatch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> LabelBatch:
        """The prompts at ``indices``; torch's DataLoader calls this with a whole batch."""
        return self._all.select(torch.tensor(indices, dtype=torch.int64))


def hash_fraction(prompt_id: str, seed: int | str) -> float:
    """A number in [0, 1) that depends on nothing but the prompt id and the seed: BLAKE2b of ``seed/prompt_id``."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits: exact in a float, and never rounded up to 1


def split_table(table: LabelTable, shares: Sequence[float], seed: int | str) -> list[LabelTable]:
    """Splits a table by a hash of its prompt ids.

    Where a prompt goes depends on its id, the seed and the shares only: not on order, nor on which other prompts
    there are, so a table that grows never moves a prompt across.

    Args:
        table: all prompts.
        shares: expected share of the prompts in each part but the last; their sum is below 1.
        seed: another seed is another split. To split a part again give it another seed, or nothing is left to take.

    Returns:
        One table per share, and a last one with the rest; each in the table's order.
    """
    edges = torch.tensor(shares, dtype=torch.float64).cumsum(0)
    # turns of one conversation ("id#turn") share their context, so they stay together
    fractions = torch.tensor([hash_fraction(i.split("#")[0], seed) for i in table.prompt_ids], dtype=torch.float64)
    parts = torch.bucketize(fractions, edges, right=True)
    return [table.select((parts == part).nonzero().squeeze(1)) for part in range(len(shares) + 1)]


class LabelDataModule(lightning.LightningDataModule):
    """Train, validation and test prompts of a predictor.

    Train and test may share neither an id nor, under whatever ids, the token ids of a prompt.

    Args:
        collect: makes whatever labels are missing; called before every run, so it must be idempotent.
        load: returns the training table and the test table.
        extractor: turns tables into features.
        block_sizes: the K candidates to keep of the tables, rising.
        batch_size: prompts per batch.
        validation_share: share of the training prompts, by a hash of their ids, kept for validation.
        seed: seed of the split and of the order of training batches.
    """

    def __init__(
        self,
        collect: Callable[[], None],
        load: Callable[[], tuple[LabelTable, LabelTable]],
        extractor: FeatureExtractor,
        block_sizes: Sequence[int],
        batch_size: int = 64,
        validation_share: float = 0.2,
        seed: int = 0,
    ):
        super().__init__()
        self._collect = collect
        self._load = load
        self.extractor = extractor
        self.block_sizes = tuple(block_sizes)
        self.batch_size = batch_size
        self.validation_share = validation_share
        self.seed = seed
        self._tables: dict[str, LabelTable] = {}
        self._datasets: dict[str, LabelDataset] = {}

    @property
    def train_table(self) -> LabelTable:
        """Prompts whose labels train the predictor; there after ``setup``."""
        return self._tables["train"]

    @property
    def validation_table(self) -> LabelTable:
        """Prompts that decide when to stop; there after ``setup``."""
        return self._tables["validation"]

    @property
    def test_table(self) -> LabelTable:
        """Held-out prompts; there after ``setup``."""
        return self._tables["test"]

    def prepare_data(self) -> None:
        """Collects missing labels."""
        self._collect()

    def setup(self, stage: str | None = None) -> None:
        """Loads and splits the labels, once, whatever the stage.

        Raises:
            UserError: train and test share a prompt, a split has no prompt with rounds, or the labels lack a
                candidate or what the features are made from.
        """
        if self._tables:
            return
        table, test = self._load()
        table = table.restrict(self.block_sizes)
        test = test.restrict(self.block_sizes)
        _refuse_overlap(table, test)
        validation, train = split_table(table, (self.validation_share,), self.seed)
        tables = {"train": train, "validation": validation, "test": test}
        _refuse_empty(tables)
        self._datasets = {name: LabelDataset(part, self.extractor) for name, part in tables.items()}
        self._tables = tables

    def train_dataloader(self) -> DataLoader[LabelBatch]:
        """Training batches, in an order drawn anew each epoch from the seed."""
        return self._loader("train", generator=torch.Generator().manual_seed(self.seed))

    def val_dataloader(self) -> DataLoader[LabelBatch]:
        """Validation batches, in the table's order."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[LabelBatch]:
        """Test batches, in the table's order."""
        return self._loader("test")

    def _loader(self, name: str, generator: torch.Generator | None = None) -> DataLoader[LabelBatch]:
        return DataLoader(
            self._datasets[name],
            batch_size=self.batch_size,
            shuffle=generator is not None,
            generator=generator,
            collate_fn=_already_a_batch,
        )


def _already_a_batch(batch: Any) -> Any:
    return batch


def _refuse_overlap(train: LabelTable, test: LabelTable) -> None:
    shared = sorted(set(train.prompt_ids) & set(test.prompt_ids))
    repeated = torch.isin(test.prompt_keys, train.prompt_keys).nonzero().squeeze(1).tolist()
    shared = shared or [test.prompt_ids[i] for i in repeated]
    if shared:
        raise UserError(
            f"training and test data share {len(shared)} prompts, such as {shared[0]!r}; "
            "a prompt may be in one of them only"
        )


def _refuse_empty(tables: dict[str, LabelTable]) -> None:
    usable = {name: int(has_rounds(table.rounds).sum()) for name, table in tables.items()}
    if min(usable.values()) == 0:
        counts = ", ".join(f"{name} {usable[name]} of {len(table)}" for name, table in tables.items())
        raise UserError(f"every split needs a prompt with at least one round; prompts with rounds: {counts}")
