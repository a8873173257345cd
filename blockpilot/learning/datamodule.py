"""Labels for Lightning: collect once, load, split by prompt id, serve batches.

Knows tables and splits; how labels are collected and where they are stored is in the two callables it is given.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from blockpilot.errors import UserError
from blockpilot.learning.features import FeatureExtractor, Features
from blockpilot.learning.losses import has_rounds
from blockpilot.metrics import speed_utility, tau_per_prompt
from blockpilot.oracle.table import LabelTable


@dataclass(frozen=True)
class LabelBatch:
    """Features and labels of N prompts."""

    features: Features
    committed_tokens: Tensor
    """int64 ``[N, K]``: sum of the acceptance lengths."""
    rounds: Tensor
    """int64 ``[N, K]``; 0 where the output is the prefill token alone."""
    seconds: Tensor | None = None
    """float64 ``[N, K]``: what all rounds cost by a latency profile; None without one."""

    def __len__(self) -> int:
        return len(self.rounds)

    def utility(self, objective: str) -> Tensor:
        """What the best block size is best at, float64 ``[N, K]``; NaN without rounds.

        ``tau`` is tokens per round, ``speed`` tokens per second of rounds (which needs ``seconds``).
        """
        if objective == "tau":
            return tau_per_prompt(self.committed_tokens, self.rounds)
        assert objective == "speed" and self.seconds is not None, objective
        return speed_utility(self.committed_tokens, self.seconds)

    def select(self, indices: Tensor) -> LabelBatch:
        """The prompts at ``indices`` (int64 ``[M]``), in that order."""
        return self._with(lambda part: part[indices], self.features.select(indices))

    def to(self, device: torch.device | str) -> LabelBatch:
        """The same batch on ``device``; Lightning moves batches with it."""
        return self._with(lambda part: part.to(device), self.features.to(device))

    def _with(self, change: Callable[[Tensor], Tensor], features: Features) -> LabelBatch:
        seconds = None if self.seconds is None else change(self.seconds)
        return LabelBatch(features, change(self.committed_tokens), change(self.rounds), seconds)


class LabelDataset(Dataset[LabelBatch]):
    """A table with its features made once; an item is a whole batch, by one indexing of flat tensors.

    Args:
        table: N prompts.
        extractor: makes the features.
        round_seconds: seconds of a round of each candidate at each prompt, ``[N, K]``; None leaves batches without.
    """

    def __init__(self, table: LabelTable, extractor: FeatureExtractor, round_seconds: Tensor | None = None):
        seconds = None if round_seconds is None else table.rounds * round_seconds
        self.all = LabelBatch(extractor.from_table(table), table.committed_tokens, table.rounds, seconds)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, indices: Sequence[int]) -> LabelBatch:
        """The prompts at ``indices``."""
        return self.all.select(torch.as_tensor(indices, dtype=torch.int64))


class Batches(Sampler[list[int]]):
    """One process's share of every batch, in an order that depends on the seed and the epoch alone.

    All processes together see each prompt once an epoch, in the batches that a single process would make; nothing is
    padded or repeated, and a run that is resumed sees what it would have seen.

    Args:
        count: prompts.
        batch_size: prompts of a batch, over all processes.
        seed: of the order; None keeps the prompts' own.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(self, count: int, batch_size: int, seed: int | None = None, rank: int = 0, world_size: int = 1):
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.count)
        if self.seed is not None:
            # torch takes a seed's lowest 32 bits only
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.count, generator=generator)
        for batch in order.split(self.batch_size):
            yield batch[self.rank :: self.world_size].tolist()


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
        batch_size: prompts per batch, over all processes of a trainer.
        validation_share: share of the training prompts, by a hash of their ids, kept for validation.
        seed: seed of the split and of the order of training batches.
        round_seconds: seconds of a round of each candidate at each prompt of a table, ``[N, K]``; None leaves batches
            without, so that there is no objective but tau.
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
        round_seconds: Callable[[LabelTable], Tensor] | None = None,
    ):
        super().__init__()
        self._collect = collect
        self._load = load
        self.extractor = extractor
        self.block_sizes = tuple(block_sizes)
        self.batch_size = batch_size
        self.validation_share = validation_share
        self.seed = seed
        self._round_seconds = round_seconds
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
        self._datasets = {name: self._dataset(part) for name, part in tables.items()}
        self._tables = tables

    def _dataset(self, table: LabelTable) -> LabelDataset:
        return LabelDataset(table, self.extractor, None if self._round_seconds is None else self._round_seconds(table))

    def batch(self, name: str) -> LabelBatch:
        """All of ``train``, ``validation`` or ``test`` as one batch; there after ``setup``."""
        return self._datasets[name].all

    def train_dataloader(self) -> DataLoader[LabelBatch]:
        """Training batches, in an order drawn anew each epoch from the seed."""
        return self._loader("train", self.seed)

    def val_dataloader(self) -> DataLoader[LabelBatch]:
        """Validation batches, in the table's order."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[LabelBatch]:
        """Test batches, in the table's order."""
        return self._loader("test")

    def _loader(self, name: str, seed: int | None = None) -> DataLoader[LabelBatch]:
        rank, world_size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        data = self._datasets[name]
        return DataLoader(data, sampler=Batches(len(data), self.batch_size, seed, rank, world_size), batch_size=None)


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
