"""Speculative decoding of one prompt: prefill, then rounds of draft, verify, commit.

Knows a pair, the sampling rule and the verification rule. Knows no policy: it is handed one.
The output is the target's own whatever the drafter and the policy do (DESIGN rules: README, "Lossless").

Shapes: V vocabulary, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from blockpilot.decoding.rounds import Rounds, Task, stop_ids_of
from blockpilot.decoding.sampling import Sampling, prompt_key
from blockpilot.decoding.static import StaticRounds
from blockpilot.decoding.verify import output_budget
from blockpilot.errors import UserError, brief, integer, integers
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
    """Positions verified."""
    acceptance_length: int
    read: Callable[[str], Tensor] | None = field(default=None, repr=False, compare=False)
    """Gives ``logits`` or ``hidden`` when they are asked for: a policy that does not look costs nothing."""

    @property
    def logits(self) -> Tensor:
        """``[V]``, raw: what the last committed token, the next anchor, was drawn from. Until the next round only.

        Raises:
            UserError: the round was made without them, or the next one has begun.
        """
        return self._read("logits")

    @property
    def hidden(self) -> Tensor:
        """``[D]``, input of the target's head at the same place; see :attr:`logits`.

        Raises:
            UserError: as there.
        """
        return self._read("hidden")

    def _read(self, name: str) -> Tensor:
        if self.read is None:
            raise UserError(f"round {self.index} was made without {name}; those of generate and simulate have it")
        return self.read(name)


@dataclass(frozen=True)
class Draft:
    """What a policy with ``trim`` may read between draft and verification."""

    block_size: int
    """Positions drafted, anchor included."""
    probs: Tensor
    """fp32 ``[block_size - 1]``: the drafter's softmax probability (temperature 1) of each token it drafted."""


class BlockSizePolicy(Protocol):
    """Picks the block size: once per prompt, and again after a round if it also has ``update(round) -> int``.

    With ``trim(draft) -> int``, too, what is drafted by that block size is verified in part: ``trim`` says how many
    positions, 1 to ``draft.block_size``, the anchor included. It is not asked where nothing is drafted.
    """

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
    """Positions verified, one per round: what the policy asked for (a position limit may have shrunk the block)."""
    drafted_sizes: list[int]
    """Positions drafted, the anchor included, one per round: ``block_sizes`` unless the policy trims."""
    first_block_size: int
    """The policy's choice after prefill (there even when no round followed), before any trimming."""
    last_round_uncut: int
    """The last round before stop token and budget cut it (``tau_convention: reference``); 0 without rounds."""
    prefill_seconds: float
    """Prompt to first token."""
    decode_seconds: float
    """All that follows, the policy's own time included, that of ``on_tokens`` not."""
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
    on_tokens: Callable[[list[int]], None] | None = None,
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
        on_tokens: called with the first token, then with each round's committed tokens. What it raises ends the call.

    Raises:
        UserError: an empty prompt, one longer than the target's positions, a value out of range, a policy that
            picks less than 1, or a policy or ``on_tokens`` that cannot be called.
    """
    check_policy(policy)
    if on_tokens is not None and not callable(on_tokens):
        raise UserError(
            f"on_tokens={brief(on_tokens)} is not allowed; expected a function of a list of tokens, or None"
        )
    sampling = Sampling(temperature, top_p, top_k, seed)
    max_new_tokens = integer("max_new_tokens", max_new_tokens)
    prompt_ids = check_prompt(pair, prompt_ids, max_new_tokens)
    budget = output_budget(max_new_tokens, len(prompt_ids), pair.max_positions)
    task = Task(prompt_ids, sampling, stop_ids_of(pair, stop_token_ids), budget)
    # all state of a call lives in its rounds: a call that is interrupted leaves nothing behind
    return _Decoding(pair, task, on_tokens).run(policy)


def rounds_for(pair: Pair, task: Task) -> Rounds:
    """The fastest rounds this pair can have where it is.

    Raises:
        UserError: target and drafter were given different dtypes after they were loaded.
    """
    rounds = StaticRounds if pair.device.type == "cuda" and pair.runner.refresh() else Rounds
    return _made(rounds, pair, task)


def _made(rounds: type[Rounds], pair: Pair, task: Task) -> Rounds:
    if pair.target.dtype != pair.drafter.dtype:
        raise UserError(f"target and drafter differ in dtype: {pair.target.dtype} and {pair.drafter.dtype}")
    return rounds(pair, task)


def check_prompt(pair: Pair, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The prompt as plain numbers; raises ``UserError`` unless it can be decoded."""
    # a set has no order
    if isinstance(prompt_ids, str) or not hasattr(prompt_ids, "__getitem__"):
        raise UserError(f"prompt_ids is a {type(prompt_ids).__name__}; expected a list of token ids (see Pair.encode)")
    prompt_ids = integers("prompt_ids", prompt_ids)
    if len(prompt_ids) < 1:
        raise UserError("prompt_ids is empty; expected at least one token id")
    if len(prompt_ids) > pair.max_positions:
        raise UserError(f"the prompt has {len(prompt_ids)} tokens, the target holds {pair.max_positions} positions")
    size = pair.vocab_size
    if not all(0 <= token < size for token in prompt_ids):
        wrong = next(token for token in prompt_ids if not 0 <= token < size)
        raise UserError(f"prompt_ids holds {wrong}, the target's vocabulary is 0 to {size - 1}")
    if integer("max_new_tokens", max_new_tokens) < 1:
        raise UserError(f"max_new_tokens={max_new_tokens!r} is not allowed; expected a number of at least 1")
    return prompt_ids


def check_prompts(pair: Pair, prompts: object, max_new_tokens: int) -> list[list[int]]:
    """All of them by :func:`check_prompt`; raises ``UserError`` also where they are no list of prompts."""
    if not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts={brief(prompts)} is not allowed; expected a list of prompts, each a list of token ids"
        )
    return [check_prompt(pair, prompt, max_new_tokens) for prompt in prompts]


def check_policy(policy: object) -> None:
    """Raises ``UserError`` unless it can be asked as :func:`generate` will."""
    more = (getattr(policy, name, None) for name in ("update", "trim"))
    if (
        isinstance(policy, type)
        or not callable(getattr(policy, "choose", None))
        or not all(one is None or callable(one) for one in more)
    ):
        raise UserError(
            f"policy={brief(policy)} is not allowed; expected an object with choose(prefill), as FixedPolicy(16)"
        )


class _Decoding:
    """The loop around the rounds: asks the policy, keeps the accounts and the time."""

    def __init__(self, pair: Pair, task: Task, on_tokens: Callable[[list[int]], None] | None) -> None:
        self.pair, self.task, self.on_tokens = pair, task, on_tokens
        self.output: list[int] = []
        self.seconds_watched = 0.0

    def run(self, policy: BlockSizePolicy) -> Generation:
        started = self._clock()
        # what is verified is known after the draft only: such a round is not of one shape
        trims = getattr(policy, "trim", None) is not None
        rounds = _made(Rounds, self.pair, self.task) if trims else rounds_for(self.pair, self.task)
        try:
            return self._run(policy, rounds, started)
        finally:
            rounds.close()

    def _run(self, policy: BlockSizePolicy, rounds: Rounds, started: float) -> Generation:
        out, first_token = rounds.prefill()
        decoding = self._clock()
        self._emit([first_token])
        asked = self._clock()
        prompt_ids = self.task.prompt_ids
        prefill = Prefill(prompt_key(prompt_ids), len(prompt_ids), out.logits[0, -1], out.hidden[0, -1])
        block_size = first = checked_block_size(policy.choose(prefill))
        policy_seconds = self._clock() - asked
        update, trim = getattr(policy, "update", None), getattr(policy, "trim", None)
        # a policy that stays at b = 1 never drafts, so the baseline does not pay for features
        rounds.start(drafting=block_size > 1 or update is not None)
        lengths: list[int] = []
        sizes: list[int] = []
        drafted: list[int] = []
        uncut = 0

        def timed_trim(probs: Tensor) -> int:
            nonlocal policy_seconds
            assert trim is not None
            before = self._clock()
            draft = Draft(len(probs) + 1, probs)
            verified = checked_trim(trim(draft), draft)
            policy_seconds += self._clock() - before
            return verified

        while not self.finished:
            if trim is None:
                settled, verified = rounds.round(block_size), block_size
            else:
                settled, verified = rounds.trimmed_round(block_size, timed_trim)
            uncut = settled.uncut
            lengths.append(len(settled.tokens))
            sizes.append(verified)
            drafted.append(block_size)
            self._emit(settled.tokens)
            if update is not None and not self.finished:
                before = self._clock()
                read = until_next_round(sizes, rounds.seen)
                block_size = checked_block_size(update(Round(len(sizes) - 1, verified, lengths[-1], read)))
                policy_seconds += self._clock() - before
        decode_seconds = self._clock() - decoding - self.seconds_watched
        return Generation(
            self.output, lengths, sizes, drafted, first, uncut, decoding - started, decode_seconds, policy_seconds
        )

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.task.budget or self.output[-1] in self.task.stop_ids

    def _emit(self, tokens: list[int]) -> None:
        self.output += tokens
        if self.on_tokens is not None:
            before = time.perf_counter()
            self.on_tokens(list(tokens))
            self.seconds_watched += time.perf_counter() - before

    def _clock(self) -> float:
        if self.pair.device.type == "cuda":
            torch.cuda.synchronize(self.pair.device)
        return time.perf_counter()


def checked_block_size(block_size: int) -> int:
    """A policy's pick as a plain number; raises ``UserError`` unless it is a whole number of at least 1."""
    size = integer("the policy's block size", block_size)
    if size < 1:
        raise UserError(f"the policy picked block size {size}; expected a number of at least 1")
    return size


def checked_trim(verified: int, draft: Draft) -> int:
    """What a policy's ``trim`` returned, as a plain number; raises ``UserError`` unless the draft has so many."""
    size = integer("the policy's trim", verified)
    if not 1 <= size <= draft.block_size:
        raise UserError(f"the policy's trim returned {size}; expected 1 to {draft.block_size}, the positions drafted")
    return size


def until_next_round(rounds: Sequence[int], read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """``read`` for as long as ``rounds``, which has an entry per round, does not grow.

    The place it reads is then written over: a policy that came late would see another round's numbers.
    """
    count = len(rounds)

    def read_in_time(name: str) -> Tensor:
        if len(rounds) != count:
            raise UserError(f"{name} of round {count - 1} were asked for after the next round; read them in update")
        return read(name)

    return read_in_time
