"""Speculative decoding of one prompt: prefill, then rounds of draft, verify, commit.

Knows a pair, the sampling rule and the verification rule. Knows no policy: it is handed one.
The output is the target's own whatever the drafter and the policy do (DESIGN rules: README, "Lossless").

Shapes: V vocabulary, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockpilot.decoding.sampling import Sampling, draw_tokens, prompt_key
from blockpilot.decoding.verify import block_width, committed_length, count_matches, output_budget
from blockpilot.errors import UserError, integer
from blockpilot.models.drafter import DrafterContext
from blockpilot.models.pair import Pair


@dataclass(frozen=True)
class Prefill:
    """What a policy may read before the first round."""

    key: int
    """The prompt's key (:func:`~blockpilot.decoding.sampling.prompt_key`)."""
    prompt_tokens: int
    logits: Tensor
    """``[V]``, raw, at the last prompt position."""
    hidden: Tensor
    """``[D]``, input of the target's head at the last prompt position."""


@dataclass(frozen=True)
class Round:
    """What a policy may read after a round."""

    index: int
    block_size: int
    acceptance_length: int


class BlockSizePolicy(Protocol):
    """Picks the block size: once per prompt, and again after a round if it also has ``update(round) -> int``."""

    def choose(self, prefill: Prefill) -> int:
        """Block size of the first round (and of all, without ``update``); 1 is plain autoregressive decoding."""
        ...


@dataclass(frozen=True)
class Generation:
    """Result of :func:`generate`."""

    output_ids: list[int]
    """New tokens only; a stop token that ended the output is its last."""
    acceptance_lengths: list[int]
    """Committed tokens, one per round; 1 + their sum is ``len(output_ids)``."""
    block_sizes: list[int]
    """What the policy asked for, one per round."""
    first_block_size: int
    """The policy's choice after prefill (there even when no round followed)."""
    last_round_uncut: int
    """The last round before stop token and budget cut it (``tau_convention: reference``); 0 without rounds."""
    prefill_seconds: float
    """Prompt to first token."""
    decode_seconds: float
    """All that follows, the policy's own time included."""
    policy_seconds: float
    """The policy's share of ``decode_seconds``."""

    @property
    def tau(self) -> float:
        """Mean acceptance length; NaN without rounds."""
        rounds = len(self.acceptance_lengths)
        return sum(self.acceptance_lengths) / rounds if rounds else float("nan")


@torch.inference_mode()
def generate(
    pair: Pair,
    prompt_ids: Sequence[int],
    policy: BlockSizePolicy,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token_ids: Collection[int] | None = None,
) -> Generation:
    """Decodes one prompt speculatively.

    Args:
        pair: target and drafter.
        prompt_ids: token ids, at least one.
        policy: picks block sizes; see :class:`BlockSizePolicy`.
        max_new_tokens: output budget, the prefill token included.
        temperature: below 1e-5 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: tokens kept; 0 keeps all.
        seed: seed of the position-keyed noise.
        stop_token_ids: None takes the pair's; an empty collection never stops.

    Raises:
        UserError: an empty prompt, one longer than the target's positions, a value out of range, or a policy that
            picks less than 1.
    """
    sampling = Sampling(temperature, top_p, top_k, seed)
    prompt_ids = check_prompt(pair, prompt_ids, max_new_tokens)
    stops = frozenset(pair.stop_token_ids if stop_token_ids is None else stop_token_ids)
    return _Decoding(pair, prompt_ids, sampling, stops, max_new_tokens).run(policy)


def check_prompt(pair: Pair, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The prompt as plain numbers; raises ``UserError`` unless it can be decoded."""
    if isinstance(prompt_ids, str) or not hasattr(prompt_ids, "__len__"):
        raise UserError(f"prompt_ids is a {type(prompt_ids).__name__}; expected a list of token ids (see Pair.encode)")
    prompt_ids = [integer("prompt_ids holds a token that", token) for token in prompt_ids]
    if len(prompt_ids) < 1:
        raise UserError("prompt_ids is empty; expected at least one token id")
    if len(prompt_ids) > pair.max_positions:
        raise UserError(f"the prompt has {len(prompt_ids)} tokens, the target holds {pair.max_positions} positions")
    if not all(0 <= token < pair.vocab_size for token in prompt_ids):
        wrong = next(token for token in prompt_ids if not 0 <= token < pair.vocab_size)
        raise UserError(f"prompt_ids holds {wrong}, the target's vocabulary is 0 to {pair.vocab_size - 1}")
    if integer("max_new_tokens", max_new_tokens) < 1:
        raise UserError(f"max_new_tokens={max_new_tokens!r} is not allowed; expected a number of at least 1")
    return prompt_ids


class _Decoding:
    """State of one prompt's decoding: caches, tokens so far, features the drafter has not yet read."""

    def __init__(
        self, pair: Pair, prompt_ids: list[int], sampling: Sampling, stops: frozenset[int], max_new_tokens: int
    ) -> None:
        self.pair, self.sampling, self.stops = pair, sampling, stops
        self.prompt_ids = prompt_ids
        self.key = prompt_key(prompt_ids)
        self.budget = output_budget(max_new_tokens, len(prompt_ids), pair.max_positions)
        self.output: list[int] = []
        self.context: DrafterContext | None = None
        self.pending: list[Tensor] = []
        self.tap = True

    def run(self, policy: BlockSizePolicy) -> Generation:
        started = self._clock()
        prefill = self._prefill()
        decoding = self._clock()
        block_size = _checked(policy.choose(prefill))
        policy_seconds = self._clock() - decoding
        first = block_size
        update = getattr(policy, "update", None)
        # a policy that stays at b = 1 never drafts, so the baseline does not pay for features
        self.tap = block_size > 1 or update is not None
        lengths: list[int] = []
        sizes: list[int] = []
        uncut = 0
        while not self.finished:
            committed, uncut = self._round(block_size)
            lengths.append(committed)
            sizes.append(block_size)
            if update is not None and not self.finished:
                before = self._clock()
                block_size = _checked(update(Round(len(sizes) - 1, block_size, committed)))
                policy_seconds += self._clock() - before
        ended = self._clock()
        return Generation(
            self.output, lengths, sizes, first, uncut, decoding - started, ended - decoding, policy_seconds
        )

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.budget or self.output[-1] in self.stops

    def _clock(self) -> float:
        if self.pair.device.type == "cuda":
            torch.cuda.synchronize(self.pair.device)
        return time.perf_counter()

    def _prefill(self) -> Prefill:
        runner = self.pair.runner
        self.cache = runner.new_cache(len(self.prompt_ids) + self.budget)
        tokens = torch.tensor([self.prompt_ids], device=self.pair.device)
        out = runner.forward(tokens, self.cache, keep=1)
        self.cache.length = len(self.prompt_ids)
        assert out.features is not None
        self.pending = [out.features]
        self.output = draw_tokens(out.logits[0], self.sampling, [self.key], [0]).tolist()
        return Prefill(self.key, len(self.prompt_ids), out.logits[0, -1], out.hidden[0, -1])

    def _round(self, block_size: int) -> tuple[int, int]:
        """Drafts, verifies and commits; returns the acceptance length, cut and uncut."""
        pair, anchor = self.pair, self.cache.length
        width = block_width(block_size, anchor, pair.max_positions)
        draft_width = block_width(width, anchor, pair.max_drafter_positions)
        drafts = self._draft(draft_width) if draft_width > 1 else []
        block = torch.tensor([[self.output[-1], *drafts]], device=pair.device)
        # a block may reach past the budget: what is committed is cut, not the block
        self.cache.reserve(anchor + width)
        out = pair.runner.forward(block, self.cache, tap=self.tap)
        places = range(len(self.output), len(self.output) + len(drafts) + 1)
        draws = draw_tokens(out.logits[0], self.sampling, [self.key] * len(places), list(places)).tolist()
        accepted = count_matches(drafts, draws)
        committed = committed_length(draws, accepted, self.budget - len(self.output), self.stops)
        self.output += draws[:committed]
        # the anchor and all committed tokens but the last have been processed
        self.cache.length = anchor + committed
        if out.features is not None:
            self.pending.append(out.features[:, :committed])
        return committed, accepted + 1

    def _draft(self, width: int) -> list[int]:
        """The drafter's tokens for the ``width - 1`` positions after the anchor."""
        pair, anchor = self.pair, self.cache.length
        if self.context is None:
            capacity = min(len(self.prompt_ids) + self.budget, pair.max_drafter_positions)
            self.context = pair.drafter.allocate(1, capacity)
        self._catch_up()
        ids = torch.tensor([[self.output[-1]] + [pair.mask_token_id] * (width - 1)], device=pair.device)
        positions = torch.arange(anchor, anchor + width, device=pair.device)[None]
        states = pair.drafter(pair.runner.embedding(ids), positions, self.context)
        return pair.runner.head(states[0, 1:]).argmax(dim=-1).tolist()

    def _catch_up(self) -> None:
        """Gives the drafter the features of every position before the anchor."""
        assert self.context is not None
        missing = self.cache.length - self.context.length
        if not self.pending or sum(f.shape[1] for f in self.pending) < missing:
            raise AssertionError("features of committed positions were not kept")
        features = torch.cat(self.pending, dim=1)[:, -missing:] if missing else None
        self.pending = []
        if features is not None:
            self.pair.drafter.extend(self.context, features)


def _checked(block_size: int) -> int:
    if integer("the policy's block size", block_size) < 1:
        raise UserError(f"the policy picked block size {block_size}; expected a number of at least 1")
    return int(block_size)
