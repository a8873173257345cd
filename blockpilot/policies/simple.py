"""Policies that choose without looking: one size for all, chance, and the upper bound that knows the labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blockpilot.config import require
from blockpilot.decoding.engine import Prefill
from blockpilot.errors import UserError, integer, integers
from blockpilot.metrics import best_choice, best_fixed

if TYPE_CHECKING:
    from blockpilot.oracle.table import LabelTable


@dataclass(frozen=True)
class FixedPolicy:
    """Always the same block size; 1 is plain autoregressive decoding.

    Raises:
        UserError: it is below 1.
    """

    block_size: int

    def __post_init__(self) -> None:
        require(integer("block_size", self.block_size) >= 1, "block_size", self.block_size, "a number of at least 1")

    @classmethod
    def best(cls, table: LabelTable) -> FixedPolicy:
        """The one size with the highest mean tau over the prompts of a table, the smallest of equals (``best_fixed``).

        Args:
            table: labels of training prompts; chosen on the test prompts it would be an upper bound.

        Raises:
            UserError: no prompt has rounds.
        """
        return cls(table.block_sizes[best_fixed(table.tau)])

    def choose(self, prefill: Prefill) -> int:
        """The block size."""
        return self.block_size


@dataclass(frozen=True)
class RandomPolicy:
    """A uniform choice that depends only on the seed and the prompt.

    Raises:
        UserError: no candidate, or one below 1.
    """

    block_sizes: Sequence[int]
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = integers("block_sizes", self.block_sizes)
        require(len(sizes) > 0 and min(sizes) >= 1, "block_sizes", sizes, "at least one block size, each 1 or more")

    def choose(self, prefill: Prefill) -> int:
        """One of the candidates."""
        digest = hashlib.blake2b(f"{self.seed}/{prefill.key}".encode(), digest_size=8).digest()
        return self.block_sizes[int.from_bytes(digest, "little") % len(self.block_sizes)]


@dataclass(frozen=True)
class OraclePolicy:
    """The best block size of each prompt by its labels: an upper bound, not something that can be deployed."""

    best: Mapping[int, int]
    """Block size by prompt key."""

    @classmethod
    def from_table(cls, table: LabelTable) -> OraclePolicy:
        """Labels of a table; the smallest block size where several are best."""
        sizes = torch.tensor(table.block_sizes)[best_choice(table.tau)]
        return cls(dict(zip((key % 2**64 for key in table.prompt_keys.tolist()), sizes.tolist(), strict=True)))

    def choose(self, prefill: Prefill) -> int:
        """The label of this prompt.

        Raises:
            UserError: it has none.
        """
        if prefill.key not in self.best:
            raise UserError("the oracle has no label for this prompt; collect labels for it first")
        return self.best[prefill.key]
