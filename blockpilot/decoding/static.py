"""Rounds of one shape, replayed as CUDA graphs: at batch 1 a GPU waits for launches, not for arithmetic.

The same round as :class:`~blockpilot.decoding.rounds.Rounds`, with every position, length and budget in tensors, so
that nothing in it depends on what the host knows. A round of block size ``b`` is captured once per window (slots of
context it may look at) and then replayed for every round of every prompt. Without CUDA the same steps run one by
one, which is how they are tested.

Knows a pair and the rules; nothing of policies. Needs a target with a lean forward.

Shapes: N positions of the block, F tapped features, W draft vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blockpilot.decoding.rounds import Rounds, Settled, Task
from blockpilot.decoding.sampling import Sampling, signed
from blockpilot.decoding.verify import settle
from blockpilot.models.drafter import DrafterContext
from blockpilot.models.kv_cache import KVCache
from blockpilot.models.lean import whereabouts
from blockpilot.models.pair import Pair
from blockpilot.models.target import TargetOutput, TargetRunner

log = logging.getLogger(__name__)

SMALLEST_WINDOW = 256
"""Windows are powers of two from here on: few graphs, and no round looks at more than twice what it must."""


@dataclass(frozen=True)
class Shape:
    """All that a captured round depends on, besides what is in its tensors."""

    width: int
    window: int
    drafting: bool
    sampling: Sampling
    """Its seed is 0 here: that is in a tensor."""
    num_stops: int


@dataclass(frozen=True)
class Captured:
    """A round as a graph."""

    graph: torch.cuda.CUDAGraph
    settled: Tensor
    """Where a replay leaves its result."""
    held: tuple[object, ...]
    """What the graph reads by address and nobody else may still hold."""


class Workspace:
    """Buffers with fixed addresses and the graphs captured over them. Outlives a prompt; its contents do not."""

    def __init__(self, pair: Pair, capacity: int) -> None:
        self.cache = pair.runner.new_static_cache(capacity)
        self.context = pair.drafter.allocate_static(capacity)
        self.target, self.drafter = pair.runner.decoder, whereabouts(pair.drafter.parameters())
        self.graphs: dict[Shape, Captured | None] = {}
        self.may_capture = pair.device.type == "cuda"
        self.busy = False
        zero = torch.zeros(1, dtype=torch.int64, device=pair.device)
        # the last committed token, its position, the output place of the next one, tokens still allowed
        self.token, self.position, self.place, self.budget = (zero.clone() for _ in range(4))
        self.key, self.seed = zero.clone(), zero.clone()
        # what the last committed token was drawn from, by name; made by the first round, for it knows size and dtype
        self.seen: dict[str, Tensor] = {}
        # graphs never run at the same time, so what they compute on the way may lie in one place
        self.pool = torch.cuda.graph_pool_handle() if self.may_capture else None
        self.stop_ids: dict[int, Tensor] = {}

    def fits(self, pair: Pair, capacity: int) -> bool:
        """Whether it can take a prompt of this pair: idle, large enough, the weights where they were."""
        same = self.target is pair.runner.decoder and self.drafter == whereabouts(pair.drafter.parameters())
        return same and not self.busy and self.cache.capacity >= capacity

    def reserve(self, positions: int) -> None:
        """Makes room. New buffers have other addresses, so the graphs go."""
        if positions > self.cache.capacity:
            self.graphs.clear()
            self.cache.reserve(_power_of_two(positions))
            self.context.reserve(self.cache.capacity)


_workspaces: WeakKeyDictionary[TargetRunner, Workspace] = WeakKeyDictionary()


def _workspace(pair: Pair, capacity: int) -> Workspace:
    """The pair's workspace; a new one where that does not fit or is in use (a policy may decode, too)."""
    known = _workspaces.get(pair.runner)
    if known is not None and known.fits(pair, capacity):
        return known
    if known is None or not known.busy:
        _workspaces.pop(pair.runner, None)  # its memory is free before the new one is made
        known = None
    made = Workspace(pair, _power_of_two(capacity))
    if known is None:
        _workspaces[pair.runner] = made
    return made


def _power_of_two(positions: int) -> int:
    return max(SMALLEST_WINDOW, 1 << (positions - 1).bit_length())


class StaticRounds(Rounds):
    """Prefill and rounds of one prompt over a workspace. Only for a target with a lean forward."""

    def __init__(self, pair: Pair, task: Task) -> None:
        assert pair.runner.refresh(), "rounds of one shape need a lean forward"
        self.work = _workspace(pair, len(task.prompt_ids) + task.budget + pair.block_size)
        self.work.busy = True
        super().__init__(pair, task)

    def close(self) -> None:
        """Hands the workspace back."""
        self.work.busy = False

    def start(self, drafting: bool) -> None:
        """Fills the device's accounts; see :meth:`Rounds.start`."""
        super().start(drafting)
        work, task, count = self.work, self.task, len(self.stop_ids)
        work.key.copy_(self.key)
        work.seed.fill_(signed(task.sampling.seed))
        work.stop_ids.setdefault(count, torch.empty_like(self.stop_ids)).copy_(self.stop_ids)
        # from here on it is the workspace's copies that count
        self.key, self.seed, self.stop_ids = work.key, work.seed, work.stop_ids[count]
        self._open_accounts()

    def rewind(self, drafting: bool) -> None:
        """See :meth:`Rounds.rewind`."""
        super().rewind(drafting)
        self._open_accounts()

    def _open_accounts(self) -> None:
        work, task = self.work, self.task
        self.anchor = work.token.copy_(self.first)
        for account, value in ((work.position, len(task.prompt_ids)), (work.place, 1), (work.budget, task.budget - 1)):
            account.fill_(value)

    def seen(self, name: str) -> Tensor:
        """See :meth:`Rounds.seen`; here the next round writes over it."""
        return self.work.seen[name]

    def propose(self, width: int) -> Tensor:
        """The drafter's logits for the positions behind the anchor, ``[1, width - 1, W]``."""
        work, pair = self.work, self.pair
        positions = self._place(width)
        ids = self.anchor.new_full((1, width), pair.mask_token_id)
        ids[:, :1] = self.anchor
        # every place sees the context before the anchor and the whole block
        seen = torch.arange(work.context.window, device=pair.device) <= positions[-1]
        mask = seen.expand(width, -1)
        states = pair.drafter(pair.draft_embeddings(ids), positions[None], work.context, mask)
        return pair.draft_logits(states[:, 1:])

    def verify(self, block_1N: Tensor) -> TargetOutput:
        """The target's pass over the block."""
        positions = self._place(block_1N.shape[1])
        return self.pair.runner.forward_static(block_1N, self.work.cache, positions, tap=self.drafting)

    def _place(self, width: int) -> Tensor:
        """The block's positions, int64 ``[width]``; caches write there from now on."""
        work = self.work
        positions = work.position + torch.arange(width, device=self.pair.device)
        work.cache.positions = work.context.positions = positions
        window = min(_power_of_two(work.cache.length + width), work.cache.capacity)
        work.cache.window = work.context.window = window
        return positions

    def _step(self, width: int) -> Tensor:
        work = self.work
        work.reserve(work.cache.length + width)
        if not work.may_capture:
            return self._advance(width)
        window = _power_of_two(work.cache.length + width)
        shape = Shape(width, window, self.drafting, replace(self.task.sampling, seed=0), len(self.stop_ids))
        if shape not in work.graphs:
            # the first time runs as it is: it also makes tables and workspaces that must exist before a capture
            work.graphs[shape] = None
            return self._advance(width)
        captured = work.graphs[shape]
        if captured is None:
            return self._capture(shape)
        captured.graph.replay()
        return captured.settled

    def _advance(self, width: int) -> Tensor:
        """One round with nothing read back: the accounts move on where they are."""
        work = self.work
        block = self.draft(width) if width > 1 else self.anchor[None]
        out = self.verify(block)
        draws = self._draw(out.logits[0], work.place + torch.arange(width, device=self.pair.device))
        settled = settle(block[0, 1:], draws, work.budget, self.stop_ids)
        if out.features is not None:
            # of all positions, since how many were committed is not known here; what the rejected ones leave lies
            # behind the next anchor, out of sight until it is written over
            positions = work.context.positions
            assert positions is not None
            self.pair.drafter.extend_at(work.context, out.features, positions[None], work.context.capacity)
        committed = settled[:1]
        for name, rows in (("logits", out.logits), ("hidden", out.hidden)):
            row = rows[0].index_select(0, committed - 1)[0]
            if name not in work.seen:
                work.seen[name] = torch.empty_like(row)
            work.seen[name].copy_(row)
        work.token.copy_(draws.gather(0, committed - 1))
        for account, sign in ((work.position, 1), (work.place, 1), (work.budget, -1)):
            account.add_(committed, alpha=sign)
        return settled

    def _commit(self, settled: Tensor) -> Settled:
        # the one time in a round that the host waits for the device
        committed, uncut, *draws = settled.tolist()
        self.cache.length += committed
        self.work.context.length += committed if self.drafting else 0
        self.committed += committed
        return Settled(draws[:committed], uncut)

    def _capture(self, shape: Shape) -> Tensor:
        """Captures a round, and takes it only if its replay gives what the same steps give one by one."""
        work = self.work
        accounts = (work.token, work.position, work.place, work.budget)
        before = [account.clone() for account in accounts]
        replayed: Tensor | None = None
        captured: Captured | None = None
        try:
            graph = torch.cuda.CUDAGraph()
            # other threads (a data loader, say) may use the device meanwhile
            with torch.cuda.graph(graph, pool=work.pool, capture_error_mode="thread_local"):
                settled = self._advance(shape.width)
            tables = (self.pair.runner.decoder, self.pair.drafter.rotary.tables)
            captured = Captured(graph, settled, (*tables, self.pair.runner.decoder.rotary.tables))  # type: ignore[union-attr]
            graph.replay()
            replayed = settled.clone()
        except RuntimeError as error:
            log.warning("rounds are not captured as CUDA graphs: %s", str(error).splitlines()[0])
        for account, value in zip(accounts, before, strict=True):
            account.copy_(value)
        stepped = self._advance(shape.width)
        if replayed is not None and torch.equal(replayed, stepped):
            work.graphs[shape] = captured
            return stepped
        if replayed is not None:
            log.warning("rounds are not captured as CUDA graphs: a replay of b=%d gives other tokens", shape.width)
        work.may_capture = False
        work.graphs.clear()
        return stepped

    def _new_cache(self) -> KVCache:
        self.work.cache.length, self.work.cache.positions = 0, None
        return self.work.cache

    def _new_context(self) -> DrafterContext:
        context = self.work.context
        context.length, context.positions = 0, None
        assert context.weights is not None
        context.weights.restack()
        return context
