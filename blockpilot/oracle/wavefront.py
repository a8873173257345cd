"""Drafts blocks anywhere along known texts, and counts how many of their drafts are right.

The target's output is known, so no target pass is needed: a block is drafted behind its anchor and compared with the
text. Knows contexts, passes and the position limits of the models; nothing of chains, policies or what is committed.

A prompt's context is projected once and shared by all its blocks. A *pass* is one forward of the drafter over many
blocks, of like size and like context length, a row each.

Shapes: P prompts, M blocks asked for, R rows of a pass, Q its widest block, S context positions it sees, C blocks that
are still right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.decoding.rounds import drafted_probs
from blockpilot.decoding.sampling import most_likely
from blockpilot.models.drafter import SharedContext
from blockpilot.models.pair import Pair

Ints = NDArray[np.int64]

_PASS_TOKENS = {"cpu": 2048, "cuda": 1 << 14}
"""Most tokens of a pass, memory permitting: enough to fill the processor. The figure for CUDA is a guess."""
_PASS_PRICE = {"cpu": 128, "cuda": 2048}
"""Tokens of a pass that may be padding, rather than one more pass. Both figures are guesses."""
_LOGITS = 1 << 26
"""Most logits held at once."""
_FIRST_STAGE = {"cpu": 1, "cuda": 4}
"""Fewest drafts whose logits are looked at first; where stages cost more than logits, more of them."""


@dataclass(frozen=True)
class KnownText:
    """A prompt with its output, and what the target computed on the way."""

    token_ids: list[int]
    features: Tensor
    """``[T, F]``: tapped hidden states of all positions that can precede an anchor."""


class Wavefront:
    """The contexts of several texts, projected once.

    Args:
        pair: the pair whose drafter drafts.
        texts: known texts.
        widest: largest block size that will be asked for.
        max_tokens: most positions a pass holds, its copy of the contexts included (at least one row).
    """

    @torch.inference_mode()
    def __init__(self, pair: Pair, texts: Sequence[KnownText], widest: int, max_tokens: int) -> None:
        self.pair, self.max_tokens = pair, max_tokens
        self.limit = min(pair.max_positions, pair.max_drafter_positions)
        kind = pair.device.type if pair.device.type in _PASS_TOKENS else "cuda"
        self.pass_tokens, self.pass_price = min(max_tokens, _PASS_TOKENS[kind]), _PASS_PRICE[kind]
        self.fewest, self.compared, self.found = _FIRST_STAGE[kind], 1, 3  # as if a block had had three right drafts
        self.context = self._project([text.features for text in texts], min(widest, self.limit))
        # -1, which no draft equals, behind the known end
        width = max((len(text.token_ids) for text in texts), default=0)
        rows = [text.token_ids + [-1] * (width - len(text.token_ids)) for text in texts]
        self.tokens_PT = torch.tensor(rows, dtype=torch.int64, device=pair.device)

    def _project(self, features: Sequence[Tensor], widest: int) -> SharedContext:
        drafter = self.pair.drafter
        lengths = [min(len(one), self.pair.max_drafter_positions) for one in features]
        context = drafter.allocate_shared(len(features), max(lengths, default=0), widest)
        for row, (one, length) in enumerate(zip(features, lengths, strict=True)):
            positions = torch.arange(length, device=one.device)[None]
            projected = drafter.project_context(one[None, :length], positions, length)
            for layer, (keys, values) in enumerate(projected):
                context.put(layer, row, keys[0], values[0])
        return context

    @torch.inference_mode()
    def right(self, prompts_M: Ints, anchors_M: Ints, sizes_M: Ints) -> Ints:
        """Right drafts before the first wrong one in each block, int64 ``[M]``.

        Args:
            prompts_M: which text.
            anchors_M: position of the anchor in it.
            sizes_M: block size, anchor included. Only a model's position limit shrinks a block.
        """
        counts_M = np.zeros(len(sizes_M), dtype=np.int64)
        widths_M = self.widths(anchors_M, sizes_M)
        for rows in self._passes(anchors_M, widths_M):
            states_RQD = self._states(prompts_M[rows], anchors_M[rows], widths_M[rows])
            counts_M[rows] = self._compare(states_RQD, prompts_M[rows], anchors_M[rows], widths_M[rows])
        return counts_M

    @torch.inference_mode()
    def right_with_probs(self, prompts_M: Ints, anchors_M: Ints, sizes_M: Ints) -> tuple[Ints, list[Tensor]]:
        """What :meth:`right` returns, and the drafter's probabilities of each block's drafts, right or wrong.

        Args:
            prompts_M: which text.
            anchors_M: position of the anchor in it.
            sizes_M: block size, anchor included.

        Returns:
            int64 ``[M]``, and per block fp32 ``[width - 1]`` (see :meth:`widths`).
        """
        counts_M = np.zeros(len(sizes_M), dtype=np.int64)
        probs_M = [torch.empty(0, device=self.pair.device)] * len(sizes_M)
        widths_M = self.widths(anchors_M, sizes_M)
        for rows in self._passes(anchors_M, widths_M):
            states_RQD = self._states(prompts_M[rows], anchors_M[rows], widths_M[rows])
            # one by one: every logit is needed, and those of many blocks are large
            for row, state_QD in zip(rows.tolist(), states_RQD, strict=True):
                width, anchor = int(widths_M[row]), int(anchors_M[row])
                scores = self.pair.draft_logits(state_QD[None, 1:width])[0]
                best = most_likely(scores)
                probs_M[row] = drafted_probs(scores, best)
                drafts = self.pair.drafter.target_ids(best)
                known = self.tokens_PT[int(prompts_M[row]), anchor + 1 : anchor + width]
                right = drafts[: len(known)] == known
                counts_M[row] = int(right.int().cumprod(dim=0).sum())
        return counts_M, probs_M

    def widths(self, anchors_M: Ints, sizes_M: Ints) -> Ints:
        """Positions the blocks take, below 2 where nothing is drafted: a block ends where the models' positions do."""
        return np.minimum(sizes_M, self.limit - anchors_M)

    def _passes(self, anchors_M: Ints, widths_M: Ints) -> Iterator[Ints]:
        """Indices of blocks to draft together: by falling size, then by context length, so that little is padded."""
        order = np.lexsort((anchors_M, -widths_M))
        order = order[: np.count_nonzero(widths_M > 1)]
        start = 0
        while start < len(order):
            widest = widths_M[order[start]]
            rest = order[start : start + max(1, self.pass_tokens // widest)]
            padded = np.cumsum(widest - widths_M[rest]) > self.pass_price
            longest = np.minimum(np.maximum.accumulate(anchors_M[rest]), self.context.longest)
            heavy = np.arange(1, len(rest) + 1) * (longest + widest) > self.max_tokens
            over = padded | heavy
            count = max(1, int(over.argmax())) if over.any() else len(rest)
            yield rest[:count]
            start += count

    def _states(self, prompts_on_host: Ints, anchors_on_host: Ints, widths_on_host: Ints) -> Tensor:
        """One pass of the drafter, ``[R, Q, D]``; what is behind a block's width means nothing."""
        device = self.pair.device
        prompts_R, anchors_R, widths_R = self._on_device(prompts_on_host, anchors_on_host, widths_on_host)
        places_Q = torch.arange(int(widths_on_host.max()), device=device)
        length = min(int(anchors_on_host.max()), self.context.longest)
        self.context.select(prompts_R, length)
        even = bool((anchors_on_host == length).all() and (widths_on_host == len(places_Q)).all())
        mask = None
        if not even:
            # a block has itself and what precedes its anchor; what of it a layer sees is the layer's business
            before = torch.arange(length, device=device) < anchors_R[:, None]
            mask = torch.cat([places_Q < widths_R[:, None], before], dim=1)[:, None, None]
        ids_RQ = torch.full((len(prompts_R), len(places_Q)), self.pair.mask_token_id, device=device)
        ids_RQ[:, 0] = self.tokens_PT[prompts_R, anchors_R]
        positions_RQ = (anchors_R[:, None] + places_Q).clamp(max=self.limit - 1)
        return self.pair.drafter(self.pair.draft_embeddings(ids_RQ), positions_RQ, self.context, mask)

    def _on_device(self, *rows: Ints) -> Tensor:
        return torch.from_numpy(np.stack(rows)).to(self.pair.device)

    def _compare(self, states_RQD: Tensor, prompts_on_host: Ints, anchors_on_host: Ints, widths_on_host: Ints) -> Ints:
        """Leading right drafts of each block. In stages: only blocks that are right so far go on to the head.

        The head is a large part of a drafter, and most blocks are wrong early: the first stage looks at as many drafts
        as have been right on average, and the one behind them.
        """
        prompts_R, anchors_R, widths_R = self._on_device(prompts_on_host, anchors_on_host, widths_on_host)
        # drafts behind the known end are wrong
        ends_R = torch.minimum(widths_R, self.tokens_PT.shape[1] - anchors_R)
        counts_R = torch.zeros_like(anchors_R)
        alive_C, place = (ends_R > 1).nonzero()[:, 0], 1
        while len(alive_C) > 0:
            # as many again as were right: few stages, and less than twice the logits that were needed
            width = max(self.fewest, round(self.found / self.compared) + 1) if place == 1 else place - 1
            offsets = torch.arange(place, place + width, device=alive_C.device)
            parts = []
            for part in alive_C.split(max(1, _LOGITS // (width * self.pair.vocab_size))):
                at = torch.minimum(offsets, ends_R[part, None] - 1)
                best = most_likely(self.pair.draft_logits(states_RQD[part[:, None], at]))
                drafts = self.pair.drafter.target_ids(best)
                truth = self.tokens_PT[prompts_R[part, None], anchors_R[part, None] + at]
                right = (drafts == truth) & (offsets < ends_R[part, None])
                parts.append(right.int().cumprod(dim=1).sum(dim=1))
            leading = torch.cat(parts)
            counts_R[alive_C] += leading
            place += width
            alive_C = alive_C[(leading == width) & (ends_R[alive_C] > place)]
        counts = counts_R.cpu().numpy()
        self.compared, self.found = self.compared + len(counts), self.found + int(counts.sum())
        return counts
