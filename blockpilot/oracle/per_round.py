"""What every candidate would commit at every position of a known output, and the best sequence of sizes by that table.

The table bounds every policy that decides again each round: no sequence of block sizes from the candidates costs less
than the one found here. Knows tables and costs; drafting is in ``wavefront.py``.

Shapes: P prompts, N output tokens (N - 1 anchors before the last), K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.decoding.trajectory import Trajectory
from blockpilot.errors import UserError, brief
from blockpilot.oracle.wavefront import Ints, Wavefront


def acceptance_tables(
    front: Wavefront, trajectories: Sequence[Trajectory], candidates: Sequence[int], uncut: bool = False
) -> list[Ints]:
    """Tokens a round commits, by anchor and candidate, int64 ``[N - 1, K]`` per trajectory.

    Args:
        front: holds the same trajectories, in order.
        trajectories: known outputs.
        candidates: block sizes.
        uncut: leave a round that reaches the end of the output uncut (needs trajectories that go on past it).
    """
    tables = []
    for row, t in enumerate(trajectories):
        left = np.arange(len(t.output_ids) - 1, 0, -1)
        anchors = np.arange(len(t.prompt_ids), len(t.prompt_ids) + len(left))
        shape = (len(left), len(candidates))
        asked = [np.broadcast_to(one, shape).ravel() for one in (np.array(row), anchors[:, None], np.array(candidates))]
        whole = (front.right(*asked) + 1).reshape(shape)
        tables.append(whole if uncut else np.minimum(whole, left[:, None]))
    return tables


def walk(table: Ints, candidates: Sequence[int]) -> dict[int, list[int]]:
    """Acceptance lengths of every candidate when it is used in all rounds."""
    lengths: dict[int, list[int]] = {}
    for column, size in enumerate(candidates):
        lengths[size], place = [], 0
        while place < len(table):
            lengths[size].append(int(table[place, column]))
            place += lengths[size][-1]
    return lengths


@dataclass(frozen=True)
class BestSequence:
    """The cheapest way through one prompt's output."""

    block_sizes: list[int]
    """One per round; the smallest where several are best."""
    acceptance_lengths: list[int]
    cost: float
    """Sum over the rounds, in the unit of the costs."""


def best_sequence(table: Tensor, candidates: Sequence[int], costs: Tensor | None = None) -> BestSequence:
    """The sequence of block sizes of least cost, by dynamic programming from the end.

    ``cost(i) = min over b of costs(i, b) + cost(i + committed(i, b))``, and 0 at the end (Bellman 1957). With costs of
    1 it has the fewest rounds, so the highest tau that any sequence of the candidates reaches.

    Args:
        table: ``[N - 1, K]``: tokens committed from each anchor by each candidate, cut at the end of the output or not.
        candidates: the K block sizes, rising.
        costs: of a round, above 0, ``[K]`` or, where they change along the output, ``[N - 1, K]``; None is 1.

    Raises:
        UserError: shapes differ, a round commits nothing, or a cost is not finite and above 0.
    """
    committed, price = _checked(table, len(candidates), costs)
    count = len(committed)
    least = np.zeros(count + 1)
    choice = np.zeros(count, dtype=np.int64)
    for place in range(count - 1, -1, -1):
        total = price[place] + least[np.minimum(place + committed[place], count)]
        choice[place] = total.argmin()
        least[place] = total[choice[place]]
    sizes, lengths, place = [], [], 0
    while place < count:
        sizes.append(candidates[choice[place]])
        lengths.append(int(committed[place, choice[place]]))
        place += lengths[-1]
    return BestSequence(sizes, lengths, float(least[0]))


def cost_of_one_size(table: Tensor, costs: Tensor | None = None) -> Tensor:
    """What each candidate costs when it is used in all rounds, float64 ``[K]``.

    Args:
        table: ``[N - 1, K]``, as in :func:`best_sequence`.
        costs: as there.

    Raises:
        UserError: as there.
    """
    committed, price = _checked(table, table.shape[-1], costs)
    count = len(committed)
    place, total = np.zeros(table.shape[1], dtype=np.int64), np.zeros(table.shape[1])
    columns = np.arange(table.shape[1])
    while count > 0 and (open_K := place < count).any():
        at, of = place[open_K], columns[open_K]
        total[open_K] += price[at, of]
        place[open_K] += committed[at, of]
    return torch.from_numpy(total)


def _checked(table: Tensor, candidates: int, costs: Tensor | None) -> tuple[Ints, NDArray[np.float64]]:
    """Table and costs as arrays, both ``[N - 1, K]``."""
    if table.ndim != 2 or table.shape[1] != candidates or table.is_floating_point() or bool((table < 1).any()):
        raise UserError(
            f"an acceptance table of shape {list(table.shape)} and {table.dtype} is not allowed; expected "
            f"[anchors, {candidates}] whole numbers of at least 1"
        )
    price = torch.ones(candidates) if costs is None else torch.as_tensor(costs).detach()
    fits = tuple(price.shape) in ((candidates,), tuple(table.shape))
    if not fits or not bool((price.isfinite() & (price > 0)).all()):
        raise UserError(
            f"costs={brief(price.tolist())} is not allowed; expected finite numbers above 0 of {candidates} block sizes"
        )
    return table.cpu().numpy(), np.broadcast_to(price.double().cpu().numpy(), tuple(table.shape))
