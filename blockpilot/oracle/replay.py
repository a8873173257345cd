"""Labels by replay: draft along the target's known output, for every candidate block size at once.

The target's output does not depend on the block size, so it is decoded once; after that no target forward pass is
needed. A *chain* is (prompt, block size); its state is a position. Each step drafts one block for every chain of
every prompt in one drafter pass, compares with the known output, and moves each chain on by its acceptance length.

Knows the engine's rules (anchor, tail, position limits) and follows them; ``enumeration.py`` is the check.

Shapes: P prompts, K candidates, Q = sum of the candidates (all blocks of a prompt side by side), N context positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockpilot.decoding.sampling import most_likely
from blockpilot.decoding.trajectory import Trajectory, generate_batch
from blockpilot.errors import UserError, integer
from blockpilot.models.drafter import DrafterContext
from blockpilot.models.pair import Pair
from blockpilot.oracle.record import OracleRecord


def replay(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token_ids: Collection[int] | None = None,
    tau_convention: str = "committed",
    batch_size: int = 64,
) -> list[OracleRecord]:
    """Acceptance lengths of every candidate for every prompt, without decoding once per candidate.

    In fp32 the result equals :func:`blockpilot.oracle.enumerate` round for round.

    Args:
        pair: target and drafter.
        prompts: token ids of each prompt.
        block_sizes: candidates, each at least 1.
        max_new_tokens, temperature, top_p, top_k, seed, stop_token_ids: as in :func:`blockpilot.generate`.
        tau_convention: ``committed``, or ``reference`` (the last round is not cut).
        batch_size: prompts worked on at once; changes nothing but speed and memory.

    Raises:
        UserError: a prompt that cannot be decoded, or a value out of range.
    """
    candidates = check_block_sizes(block_sizes)
    uncut = check_convention(tau_convention)
    if integer("batch_size", batch_size) < 1:
        raise UserError(f"batch_size={batch_size!r} is not allowed; expected a number of at least 1")
    records: list[OracleRecord | None] = [None] * len(prompts)
    # prompts of like length side by side waste least
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        trajectories = generate_batch(
            pair, [prompts[i] for i in members], max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
            top_k=top_k, seed=seed, stop_token_ids=stop_token_ids, features=True,
            beyond=max(candidates) if uncut else 0,
        )  # fmt: skip
        lengths = replay_trajectories(pair, trajectories, candidates, uncut=uncut)
        for index, t, accepted in zip(members, trajectories, lengths, strict=True):
            records[index] = OracleRecord(t.prompt_ids, t.output_ids, accepted, t.logits, t.hidden)
    return [record for record in records if record is not None]


def check_block_sizes(block_sizes: Sequence[int]) -> tuple[int, ...]:
    """Rising candidates without repeats.

    Raises:
        UserError: none given, or one below 1.
    """
    candidates = tuple(sorted(set(block_sizes)))
    if not candidates or candidates[0] < 1:
        raise UserError(f"block_sizes={list(block_sizes)} is not allowed; expected at least one, each 1 or more")
    return candidates


def check_convention(tau_convention: str) -> bool:
    """Whether the last round is left uncut."""
    if tau_convention not in ("committed", "reference"):
        raise UserError(f"tau_convention={tau_convention!r} is not allowed; expected one of committed, reference")
    return tau_convention == "reference"


@torch.inference_mode()
def replay_trajectories(
    pair: Pair, trajectories: Sequence[Trajectory], block_sizes: Sequence[int], *, uncut: bool = False
) -> list[dict[int, list[int]]]:
    """Acceptance lengths per trajectory and block size.

    Args:
        pair: the pair that made the trajectories.
        trajectories: all are worked on at once.
        block_sizes: candidates.
        uncut: count the last round in full (needs trajectories that go on past their end).
    """
    wave = _Wave(pair, trajectories, tuple(block_sizes))
    lengths: list[dict[int, list[int]]] = [{b: [] for b in block_sizes} for _ in trajectories]
    for members, accepted_PK, remaining_PK in wave:
        kept_PK = accepted_PK + 1 if uncut else torch.minimum(accepted_PK + 1, remaining_PK)
        for row, kept, remaining in zip(members, kept_PK.tolist(), remaining_PK.tolist(), strict=True):
            for b, length, left in zip(block_sizes, kept, remaining, strict=True):
                if left > 0:
                    lengths[row][b].append(length)
    return lengths


class _Wave:
    """All chains of a batch. Iterating yields, per step, the prompts worked on, accepted drafts and tokens left."""

    def __init__(self, pair: Pair, trajectories: Sequence[Trajectory], block_sizes: tuple[int, ...]) -> None:
        self.pair = pair
        device = pair.device
        sizes = torch.tensor(block_sizes, device=device)
        self.sizes = sizes
        # the blocks of a prompt lie side by side: which block a column belongs to, and its place in it
        self.block_of = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
        self.place_of = torch.cat([torch.arange(b, device=device) for b in block_sizes])
        self.same_block = self.block_of[:, None] == self.block_of
        self.members = [i for i, t in enumerate(trajectories) if len(t.output_ids) > 1]
        kept = [trajectories[i] for i in self.members]
        self.prompt_lengths = torch.tensor([len(t.prompt_ids) for t in kept], device=device)
        self.output_lengths = torch.tensor([len(t.output_ids) for t in kept], device=device)
        self.anchors = self.prompt_lengths[:, None].expand(-1, len(sizes)).clone()
        self.tokens = self._tokens(kept, max(block_sizes))
        self.context = self._context(kept)

    def _tokens(self, kept: Sequence[Trajectory], margin: int) -> Tensor:
        """Prompt and output ids ``[P, positions]``; -1, which no draft equals, behind the known end."""
        rows = [t.prompt_ids + t.output_ids + t.beyond_ids for t in kept]
        width = max((len(row) for row in rows), default=0) + margin
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=self.pair.device)

    def _context(self, kept: Sequence[Trajectory]) -> DrafterContext:
        """Every prompt's context keys and values, projected once; a chain sees those before its anchor."""
        drafter = self.pair.drafter
        longest = min(max((len(t.features) for t in kept), default=0), self.pair.max_drafter_positions)
        # with room for one step of all blocks behind
        context = drafter.allocate(len(kept), longest + len(self.block_of))
        context.length = longest
        for row, t in enumerate(kept):
            features = t.features[None, :longest]
            positions = torch.arange(features.shape[1], device=features.device)[None]
            for layer, (keys, values) in enumerate(drafter.project_context(features, positions, longest)):
                context.keys[layer][row, :, : features.shape[1]] = keys[0]
                context.values[layer][row, :, : features.shape[1]] = values[0]
        return context

    def __iter__(self) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        while self.members:
            remaining = self._remaining()
            active = (remaining > 0).any(dim=1)
            if not active.all() and active.sum() <= 0.8 * len(active):
                self._keep(active.nonzero()[:, 0])
                continue
            accepted = self._step()
            yield self.members, accepted, remaining
            self.anchors = self.anchors + torch.where(remaining > 0, torch.minimum(accepted + 1, remaining), 0)

    def _remaining(self) -> Tensor:
        """Output tokens each chain has yet to commit, ``[P, K]``."""
        return (self.prompt_lengths + self.output_lengths - 1)[:, None] - self.anchors

    def _keep(self, rows: Tensor) -> None:
        self.members = [self.members[i] for i in rows.tolist()]
        for name in ("prompt_lengths", "output_lengths", "anchors", "tokens"):
            setattr(self, name, getattr(self, name)[rows])
        keys, values = ([kept[rows] for kept in kind] for kind in (self.context.keys, self.context.values))
        self.context = replace(self.context, keys=keys, values=values)

    def _step(self) -> Tensor:
        """Drafts one block per chain; accepted drafts ``[P, K]``."""
        pair = self.pair
        anchors_PQ = self.anchors[:, self.block_of]
        positions_PQ = anchors_PQ + self.place_of
        is_anchor = self.place_of == 0
        ids = torch.where(is_anchor, self.tokens.gather(1, anchors_PQ), pair.mask_token_id)
        # a block is shrunk only by a position limit; the columns behind are invisible and never accepted
        limit = min(pair.max_positions, pair.max_drafter_positions)
        inside_PQ = positions_PQ < limit
        before = torch.arange(self.context.length, device=pair.device) < anchors_PQ[..., None]
        within = self.same_block & inside_PQ[:, None, :]
        # a column must see something, or its softmax is NaN: itself
        within = within | torch.eye(len(self.block_of), dtype=torch.bool, device=pair.device)
        mask = torch.cat([before, within], dim=2)[:, None]
        states = pair.drafter(pair.runner.embed(ids), positions_PQ.clamp(max=limit - 1), self.context, mask)
        drafts = most_likely(pair.runner.logits(states[:, ~is_anchor]))
        truth = self.tokens.gather(1, positions_PQ[:, ~is_anchor])
        right = (drafts == truth) & inside_PQ[:, ~is_anchor]
        return self._leading(right)

    def _leading(self, right: Tensor) -> Tensor:
        """Length of the leading run of True in each block, ``[P, K]``."""
        counts, start = [], 0
        for size in self.sizes.tolist():
            counts.append(right[:, start : start + size - 1].int().cumprod(dim=1).sum(dim=1))
            start += size - 1
        return torch.stack(counts, dim=1)
