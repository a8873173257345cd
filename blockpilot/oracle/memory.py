"""How much is worked on at once: groups of prompts within a number of positions, halved where memory runs out.

Knows costs and the errors that mean "out of memory"; nothing of what the work is.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from blockpilot.errors import UserError, brief, integer

log = logging.getLogger(__name__)

_START = {"cpu": 1 << 15, "cuda": 1 << 18}


class BatchMemory:
    """Positions that may be held at once, and tokens that may be drafted at once.

    Args:
        max_batch_tokens: where to start; None starts at what most machines hold.
        device: where the work is done.
        least: tokens below which nothing can be done (the largest block).

    Raises:
        UserError: ``max_batch_tokens`` is no number of at least 1.
    """

    def __init__(self, max_batch_tokens: int | None, device: torch.device, least: int) -> None:
        if max_batch_tokens is not None and integer("max_batch_tokens", max_batch_tokens) < 1:
            raise UserError(
                f"max_batch_tokens={brief(max_batch_tokens)} is not allowed; expected a number of at least 1, or None"
            )
        self.device, self.least = device, least
        self.tokens = max_batch_tokens or _START.get(device.type, max(_START.values()))

    def in_order(self, costs: Sequence[int], batch_size: int) -> Iterator[list[int]]:
        """Groups of consecutive indices, as large as :meth:`work_off` would try them, in order."""
        rest = list(range(len(costs)))
        while rest:
            size = self._size(costs, rest, batch_size)
            yield rest[:size]
            rest = rest[size:]

    def work_off(self, costs: Sequence[int], batch_size: int, work: Callable[[list[int]], None]) -> None:
        """Calls ``work`` with groups of indices that cover all of ``costs``, like costs together.

        A group has at most ``batch_size`` members, which hold ``tokens`` positions together when all are padded to the
        largest (or is a single one). Where memory runs out, ``tokens`` is halved and the group is tried again in parts.

        Args:
            costs: positions that each index holds.
            batch_size: most members of a group.
            work: must leave nothing behind when it fails.

        Raises:
            UserError: memory runs out with a single index and ``least`` tokens.
        """
        order = sorted(range(len(costs)), key=lambda i: costs[i])
        while order:
            group = order[: self._size(costs, order, batch_size)]
            if self.fits(lambda group=group: work(group)):
                order = order[len(group) :]
                give_back()
            else:
                self._halve(len(group) * costs[group[-1]])

    def _size(self, costs: Sequence[int], order: Sequence[int], batch_size: int) -> int:
        """How many of the first can be held together."""
        size, largest = 1, costs[order[0]]
        for index in order[1:batch_size]:
            largest = max(largest, costs[index])
            if (size + 1) * largest > self.tokens:
                break
            size += 1
        return size

    def fits(self, work: Callable[[], None]) -> bool:
        """Does the work; whether memory was enough."""
        try:
            work()
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            return False
        return True

    def _halve(self, held: int) -> None:
        # what the failed work held is free only now that its error is gone
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        tried = min(self.tokens, max(held, self.least))
        self.tokens = tried // 2
        if self.tokens < self.least:
            raise UserError(
                f"out of memory on {self.device} with {tried} tokens at once, as few as one prompt and a block take; "
                "expected shorter prompts, a smaller generation.max_new_tokens or a device with more memory"
            )
        log.warning(
            "out of memory on %s with %d tokens at once; going on with oracle.max_batch_tokens=%d",
            self.device, tried, self.tokens,
        )  # fmt: skip


def give_back() -> None:
    """Hands memory of freed tensors back to the system, where the C library can be asked to (glibc).

    Otherwise its heap keeps what batches of other shapes have freed, and grows from shard to shard.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return None


@contextmanager
def within_memory(device: torch.device, smaller: str) -> Iterator[None]:
    """Work that is not tried again in parts.

    Args:
        device: where it is done.
        smaller: configuration keys of which smaller values need less.

    Raises:
        UserError: memory runs out; the message names both.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        raise UserError(f"out of memory on {device}; expected a smaller {smaller}") from error


def _out_of_memory(error: Exception) -> bool:
    # torch has a class of its own for this on a GPU; on a CPU it is a RuntimeError of its allocator
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
