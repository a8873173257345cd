"""One prompt's rounds: draft, verify, commit, extend the drafter's context. The host reads the device once a round.

Knows a pair and the rules; nothing of policies. :class:`Rounds` addresses its caches by slices and runs everywhere;
:mod:`blockpilot.decoding.static` makes the same round of one shape, for CUDA graphs.

Shapes: N positions of the block, F tapped features, W draft vocabulary (the target's unless the drafter has its own).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.decoding.sampling import Sampling, draw_tokens, most_likely, signed_prompt_key
from blockpilot.decoding.verify import block_width, settle
from blockpilot.errors import integers
from blockpilot.models.drafter import DrafterContext
from blockpilot.models.kv_cache import KVCache
from blockpilot.models.pair import Pair
from blockpilot.models.target import TargetOutput


@dataclass(frozen=True)
class Task:
    """What is to be decoded: the prompt and all that decides where its output ends."""

    prompt_ids: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    budget: int
    """Output tokens, the prefill token included."""


@dataclass(frozen=True)
class Settled:
    """What a round did."""

    tokens: list[int]
    """Committed."""
    uncut: int
    """Tokens it would have committed without stop tokens and budget."""


class Rounds:
    """Prefill and rounds of one prompt.

    ``cache.length`` counts the positions processed: prompt and output but the last token, which is the next anchor.
    """

    def __init__(self, pair: Pair, task: Task) -> None:
        self.pair, self.task = pair, task
        self.key = torch.tensor([signed_prompt_key(task.prompt_ids)], device=pair.device)
        self.seed: int | Tensor = task.sampling.seed
        self.stop_ids = torch.tensor(sorted(task.stop_ids), dtype=torch.int64, device=pair.device)
        self.drafting = False
        self.committed = 0
        self.cache = self._new_cache()
        self.context: DrafterContext | None = None

    def prefill(self) -> tuple[TargetOutput, int]:
        """The target's pass over the prompt, and the first output token."""
        tokens = torch.tensor([self.task.prompt_ids], device=self.pair.device)
        out = self.pair.runner.forward(tokens, self.cache, keep=1)
        self.cache.length = len(self.task.prompt_ids)
        self.anchor = self.first = self._draw(out.logits[0], self.key.new_zeros(1))
        self.committed = 1
        self.features = out.features
        return out, int(self.anchor)

    def start(self, drafting: bool) -> None:
        """Called once before the first round: whether rounds may draft; if not, no features are kept."""
        self.drafting = drafting
        if drafting:
            self.context = self._new_context()
            assert self.features is not None
            self._extend(self.features)
        self.features = None

    def rewind(self, drafting: bool) -> None:
        """Back to before the first round, as :meth:`start` left it; for measuring, which wants the same rounds again.

        ``drafting`` may change from True to False and back, not from a start without.
        """
        self.drafting = drafting
        self.cache.length = len(self.task.prompt_ids)
        self.committed = 1
        self.anchor = self.first
        if self.context is not None:
            self.context.length = min(len(self.task.prompt_ids), self.pair.max_drafter_positions)

    def round(self, block_size: int) -> Settled:
        """Drafts, verifies and commits.

        A block may reach past the budget: what is committed is cut, not the block. Only a model's position limit
        shrinks it.
        """
        return self._commit(self._step(self.width(block_size)))

    def trimmed_round(self, block_size: int, trim: Callable[[Tensor], int]) -> tuple[Settled, int]:
        """Drafts as :meth:`round` does, and verifies the first positions only, as many as ``trim`` says.

        ``trim`` gets the drafter's probabilities (:func:`drafted_probs`) and returns 1 to their number + 1. Where
        nothing is drafted it is not called.

        Returns:
            What the round did, and how many positions were verified.
        """
        width = self.width(block_size)
        if width == 1:
            return self._commit(self._step(1)), 1
        scores = self.propose(width)[0]
        best = most_likely(scores)
        verified = trim(drafted_probs(scores, best))
        drafts = self.pair.drafter.target_ids(best)
        return self._commit(self._check(torch.cat([self.anchor, drafts[: verified - 1]])[None])), verified

    def seen(self, name: str) -> Tensor:
        """``logits`` (``[V]``) or ``hidden`` (``[D]``) that the last committed token was drawn from.

        Of the last round, and only until the next one.
        """
        return getattr(self.out, name)[0, self.last]

    def width(self, block_size: int) -> int:
        """Positions the next block takes."""
        pair, anchor = self.pair, self.cache.length
        width = block_width(block_size, anchor, pair.max_positions)
        return max(1, block_width(width, anchor, pair.max_drafter_positions)) if self.drafting else 1

    def close(self) -> None:
        """Called when the prompt is done, whatever ended it."""

    # ---- the parts of a round

    def draft(self, width: int) -> Tensor:
        """The anchor and the drafter's tokens for the positions behind it, int64 ``[1, width]``."""
        drafts = self.pair.drafter.target_ids(most_likely(self.propose(width)))
        return torch.cat([self.anchor[None], drafts], dim=1)

    def propose(self, width: int) -> Tensor:
        """The drafter's logits for the positions behind the anchor, ``[1, width - 1, W]``."""
        assert self.context is not None
        pair, anchor = self.pair, self.cache.length
        ids = self.anchor.new_full((1, width), pair.mask_token_id)
        ids[:, :1] = self.anchor
        positions = torch.arange(anchor, anchor + width, device=pair.device)[None]
        states = pair.drafter(pair.draft_embeddings(ids), positions, self.context)
        return pair.draft_logits(states[:, 1:])

    def verify(self, block_1N: Tensor) -> TargetOutput:
        """The target's pass over the block."""
        self.cache.reserve(self.cache.length + block_1N.shape[1])
        return self.pair.runner.forward(block_1N, self.cache, tap=self.drafting)

    def _step(self, width: int) -> Tensor:
        return self._check(self.draft(width) if width > 1 else self.anchor[None])

    def _check(self, block_1N: Tensor) -> Tensor:
        self.out = self.verify(block_1N)
        self.features = self.out.features
        places = torch.arange(self.committed, self.committed + block_1N.shape[1], device=self.pair.device)
        self.draws = self._draw(self.out.logits[0], places)
        return settle(block_1N[0, 1:], self.draws, self.task.budget - self.committed, self.stop_ids)

    def _commit(self, settled: Tensor) -> Settled:
        # the one time in a round that the host waits for the device
        committed, uncut, *draws = settled.tolist()
        self.last = committed - 1
        self.anchor = self.draws[self.last : committed]
        self.cache.length += committed
        self.committed += committed
        ended = self.committed >= self.task.budget or draws[committed - 1] in self.task.stop_ids
        if self.features is not None and not ended:
            self._extend(self.features[:, :committed])
        return Settled(draws[:committed], uncut)

    def _draw(self, logits_NV: Tensor, places_N: Tensor) -> Tensor:
        """The target's tokens at these output positions."""
        return draw_tokens(logits_NV, self.task.sampling, self.key.expand(len(places_N)), places_N, self.seed)

    # ---- where keys and values are kept

    def _new_cache(self) -> KVCache:
        return self.pair.runner.new_cache(len(self.task.prompt_ids) + self.task.budget)

    def _new_context(self) -> DrafterContext:
        pair = self.pair
        # room for the block behind it, as far as the drafter's trained one goes
        capacity = len(self.task.prompt_ids) + self.task.budget + pair.block_size
        return pair.drafter.allocate(1, min(capacity, pair.max_drafter_positions))

    def _extend(self, features_1NF: Tensor) -> None:
        """Gives the drafter the features of the positions just committed, as far as it has positions."""
        assert self.context is not None
        room = self.pair.max_drafter_positions - self.context.length
        if room > 0:
            self.pair.drafter.extend(self.context, features_1NF[:, :room])


def drafted_probs(scores: Tensor, drafts: Tensor) -> Tensor:
    """The drafter's softmax probability (temperature 1) of each token it drafted, fp32.

    Args:
        scores: the drafter's logits, ``[..., W]``.
        drafts: ids in the drafter's own vocabulary, int64 ``[...]``.
    """
    return scores.float().softmax(dim=-1).gather(-1, drafts[..., None]).squeeze(-1)


def stop_ids_of(pair: Pair, stop_token_ids: Collection[int] | None) -> frozenset[int]:
    """The pair's stop tokens, or the caller's in their place.

    Raises:
        UserError: the caller's are not whole numbers.
    """
    given = pair.stop_token_ids if stop_token_ids is None else stop_token_ids
    # plain numbers: the host looks a token up by its hash, which that of a tensor is not
    listed = integers("stop_token_ids", given)
    # what is outside the vocabulary is never drawn
    return frozenset(token for token in listed if 0 <= token < pair.vocab_size)
