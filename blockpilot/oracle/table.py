"""Labels and prefill distributions of many prompts as a few flat tensors.

Knows the layout that learning and evaluation read; nothing of files (``cache.py``) or of how labels are made.

Shapes: N prompts, K candidate block sizes, V vocabulary, D hidden size, Z stored entries in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from blockpilot.errors import UserError


@dataclass(frozen=True)
class TokenLists:
    """Token ids of N prompts in CSR form: row ``i`` is ``token_ids[offsets[i]:offsets[i + 1]]``."""

    offsets: Tensor
    """int64 ``[N + 1]``."""
    token_ids: Tensor
    """integers ``[Z]``."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenLists:
        """From plain lists."""
        lengths = torch.tensor([0, *(len(row) for row in rows)])
        return cls(lengths.cumsum(0), torch.tensor([token for row in rows for token in row], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> list[int]:
        """Token ids of one prompt."""
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]].tolist()

    def select(self, indices: Tensor) -> TokenLists:
        """The rows at ``indices`` (int64 ``[M]``), in that order."""
        offsets, places = _csr_select(self.offsets, indices)
        return TokenLists(offsets, self.token_ids[places])


@dataclass(frozen=True)
class Distributions:
    """Sparse next-token distributions in CSR form, each row sorted by falling probability.

    Row ``i`` holds ``token_ids[offsets[i]:offsets[i + 1]]`` with ``probs`` at the same places.
    """

    offsets: Tensor
    """int64 ``[N + 1]``."""
    token_ids: Tensor
    """int32 (from a cache) or int64 ``[Z]``."""
    probs: Tensor
    """float32 ``[Z]``."""
    vocab_size: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def select(self, indices: Tensor) -> Distributions:
        """The rows at ``indices`` (int64 ``[M]``), in that order, without per-row Python."""
        offsets, places = _csr_select(self.offsets, indices)
        return Distributions(offsets, self.token_ids[places], self.probs[places], self.vocab_size)


def _csr_select(offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """New offsets, and the places of the chosen rows' entries."""
    starts, lengths = offsets[indices], offsets[indices + 1] - offsets[indices]
    chosen = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rows = torch.repeat_interleave(torch.arange(len(indices), device=lengths.device), lengths)
    places = starts[rows] + torch.arange(int(chosen[-1]), device=lengths.device) - chosen[rows]
    return chosen, places


def _csr_join(parts: Sequence[Tensor]) -> Tensor:
    """Offsets of several CSR parts one behind the other."""
    joined = [torch.zeros(1, dtype=torch.int64)]
    for offsets in parts:
        joined.append(offsets[1:] + joined[-1][-1])
    return torch.cat(joined)


@dataclass(frozen=True)
class LabelTable:
    """What the oracle knows of N prompts."""

    prompt_ids: tuple[str, ...]
    datasets: tuple[str, ...]
    """Data set of each prompt."""
    prompt_keys: Tensor
    """int64 ``[N]``: the prompts' 64-bit keys (:func:`~blockpilot.decoding.prompt_key`), as signed numbers."""
    prompts: TokenLists
    """Token ids of each prompt."""
    block_sizes: tuple[int, ...]
    """The K candidates, rising."""
    committed_tokens: Tensor
    """int64 ``[N, K]``: sum of the acceptance lengths."""
    rounds: Tensor
    """int64 ``[N, K]``; 0 where the output is the prefill token alone."""
    distributions: Distributions
    logits: Tensor | None = None
    """float32 ``[N, V]``, if the cache stores them."""
    hidden: Tensor | None = None
    """float32 ``[N, D]``, if the cache stores them."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def tau(self) -> Tensor:
        """float64 ``[N, K]``: mean acceptance length per prompt and block size; NaN without rounds."""
        return self.committed_tokens.double() / self.rounds.double()

    def select(self, indices: Sequence[int] | Tensor) -> LabelTable:
        """The prompts at ``indices``, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return replace(
            self,
            prompt_ids=tuple(self.prompt_ids[i] for i in index.tolist()),
            datasets=tuple(self.datasets[i] for i in index.tolist()),
            prompt_keys=self.prompt_keys[index],
            prompts=self.prompts.select(index),
            committed_tokens=self.committed_tokens[index],
            rounds=self.rounds[index],
            distributions=self.distributions.select(index),
            logits=None if self.logits is None else self.logits[index],
            hidden=None if self.hidden is None else self.hidden[index],
        )

    def restrict(self, block_sizes: Sequence[int]) -> LabelTable:
        """The same prompts with only these candidates.

        Raises:
            UserError: a block size without labels.
        """
        missing = [b for b in block_sizes if b not in self.block_sizes]
        if missing:
            raise UserError(f"block sizes {missing} have no labels; the cache holds {list(self.block_sizes)}")
        columns = [self.block_sizes.index(b) for b in block_sizes]
        return replace(
            self,
            block_sizes=tuple(block_sizes),
            committed_tokens=self.committed_tokens[:, columns],
            rounds=self.rounds[:, columns],
        )


def concatenate(tables: Sequence[LabelTable]) -> LabelTable:
    """Several tables of the same candidates and vocabulary as one.

    Raises:
        UserError: candidates differ, or only some tables hold ``logits`` or ``hidden``.
    """
    first = tables[0]
    if len(tables) == 1:
        return first
    for table in tables[1:]:
        if table.block_sizes != first.block_sizes:
            raise UserError(f"tables differ in block_sizes: {list(first.block_sizes)} and {list(table.block_sizes)}")
        for name in ("logits", "hidden"):
            if (getattr(table, name) is None) != (getattr(first, name) is None):
                raise UserError(f"only some of the tables hold {name}")
    distributions, prompts = [t.distributions for t in tables], [t.prompts for t in tables]
    joined = {
        field.name: torch.cat([getattr(table, field.name) for table in tables])
        for field in fields(first)
        if isinstance(getattr(first, field.name), Tensor)
    }
    return replace(
        first,
        prompt_ids=tuple(i for table in tables for i in table.prompt_ids),
        datasets=tuple(d for table in tables for d in table.datasets),
        prompts=TokenLists(_csr_join([p.offsets for p in prompts]), torch.cat([p.token_ids for p in prompts])),
        distributions=Distributions(
            _csr_join([d.offsets for d in distributions]),
            torch.cat([d.token_ids for d in distributions]),
            torch.cat([d.probs for d in distributions]),
            first.distributions.vocab_size,
        ),
        **joined,
    )


def gather(parts: Iterable[LabelTable], rows: int, tokens: int, entries: int) -> LabelTable:
    """Parts that come one at a time, as one table: the result and one part are held, never everything twice.

    Args:
        parts: at least one; all of the same candidates, vocabulary and columns.
        rows, tokens, entries: at most so many prompts, prompt tokens, and stored entries of distributions in all.
    """
    flat = {"prompts.token_ids": tokens, "distributions.token_ids": entries, "distributions.probs": entries}
    flat |= dict.fromkeys(("prompt_keys", "committed_tokens", "rounds", "logits", "hidden"), rows)
    columns = {name: _Column(most) for name, most in flat.items()}
    lists: dict[str, list[Tensor]] = {"prompts.offsets": [], "distributions.offsets": []}
    prompt_ids: list[str] = []
    datasets: list[str] = []
    last: LabelTable | None = None
    for last in parts:
        prompt_ids += last.prompt_ids
        datasets += last.datasets
        for name, values in lists.items():
            values.append(attrgetter(name)(last))
        for name, column in columns.items():
            column.append(attrgetter(name)(last))
    assert last is not None, "nothing to gather"
    done: dict[str, Any] = {name: column.values for name, column in columns.items()}
    ids, probs = done.pop("distributions.token_ids"), done.pop("distributions.probs")
    offsets = {name: _csr_join(values) for name, values in lists.items()}
    return replace(
        last,
        prompt_ids=tuple(prompt_ids),
        datasets=tuple(datasets),
        prompts=TokenLists(offsets["prompts.offsets"], done.pop("prompts.token_ids")),
        distributions=Distributions(offsets["distributions.offsets"], ids, probs, last.distributions.vocab_size),
        **done,
    )


class _Column:
    """A tensor that grows up to a size known in advance; memory behind its end is never touched, so never taken."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._all: Tensor | None = None

    def append(self, part: Tensor | None) -> None:
        if part is None:
            return
        if self._all is None:
            self._all = torch.empty(self._most, *part.shape[1:], dtype=part.dtype)
        self._all[self._used : self._used + len(part)] = part
        self._used += len(part)

    @property
    def values(self) -> Tensor | None:
        return None if self._all is None else self._all[: self._used]
