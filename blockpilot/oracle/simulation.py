"""Runs a policy along known outputs: what real decoding would commit, without decoding.

What the labels say is looked up; the rest is drafted (``wavefront.py``). The target is needed only where a record lacks
hidden states that are wanted, to draft or because the policy looks at them: then it reads the known text once. Knows
the engine's rules of what is committed and when a policy is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from blockpilot.decoding.engine import (
    BlockSizePolicy,
    Draft,
    Prefill,
    Round,
    check_policy,
    checked_block_size,
    checked_trim,
    until_next_round,
)
from blockpilot.decoding.sampling import prompt_key
from blockpilot.errors import UserError, integer
from blockpilot.models.pair import Pair
from blockpilot.oracle.memory import BatchMemory
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.wavefront import Ints, KnownText, Wavefront

_LOGITS = 1 << 26
"""Most logits held at once while the target reads."""


@dataclass(frozen=True)
class Simulation:
    """One prompt under a policy; fields as in :class:`~blockpilot.decoding.engine.Generation`."""

    acceptance_lengths: list[int]
    """Committed tokens, one per round; 1 + their sum is the number of output tokens."""
    block_sizes: list[int]
    """Positions verified, one per round."""
    drafted_sizes: list[int]
    """Positions drafted, one per round: ``block_sizes`` unless the policy trims."""
    first_block_size: int
    """The policy's choice after prefill, before any trimming."""

    @property
    def tau(self) -> float:
        """Mean acceptance length; NaN without rounds."""
        rounds = len(self.acceptance_lengths)
        return sum(self.acceptance_lengths) / rounds if rounds else float("nan")


@torch.inference_mode()
def simulate(
    pair: Pair,
    records: Sequence[OracleRecord],
    policy: BlockSizePolicy | Sequence[BlockSizePolicy],
    *,
    batch_size: int = 64,
    max_batch_tokens: int | None = None,
) -> list[Simulation]:
    """What ``generate`` would do with this policy on the prompts of ``records``; in fp32 the same, round for round.

    A policy is asked in the order of the records, as decoding them one after the other would ask it. One that decides
    in every round (``update``, ``trim``) may keep state, so its prompts are simulated one by one, unless there is one
    policy per record.

    Args:
        pair: the pair that made the records.
        records: from :func:`blockpilot.oracle.replay` or ``enumerate``; with ``acceptance_table`` nothing is drafted
            for its candidates (unless the policy trims), with ``features`` and ``states`` the target is not run.
        policy: one for all records, or a list of one for each.
        batch_size: most prompts drafted together.
        max_batch_tokens: most positions held, and tokens drafted, at once; None takes what most machines hold.

    Raises:
        UserError: a policy that cannot be called, picks less than 1 or trims to what was not drafted, a list of
            policies that is not as long as ``records``, or a value out of range.
    """
    if integer("batch_size", batch_size) < 1:
        raise UserError(f"batch_size={batch_size!r} is not allowed; expected a number of at least 1")
    memory = BatchMemory(max_batch_tokens, pair.device, 1)
    records = list(records)
    policies = _one_each(policy, len(records))
    # state that several prompts share must see them one after the other
    stateful = [id(one) for one in policies if _has(one, "update") or _has(one, "trim")]
    shared = len(set(stateful)) < len(stateful)
    costs = [len(record.prompt_ids) + len(record.output_ids) for record in records]
    done: list[Simulation] = []
    for group in memory.in_order(costs, 1 if shared else batch_size):
        members = [_Prompt(pair, records[i], policies[i]) for i in group]
        # policies cannot be asked again, so what does not fit is not tried in parts
        if not memory.fits(lambda members=members: _run(pair, members, memory.tokens)):
            raise UserError(
                f"out of memory on {pair.device} with max_batch_tokens={memory.tokens}; expected a smaller number"
            )
        done += [Simulation(one.lengths, one.sizes, one.drafted, one.first) for one in members]
    return done


def _has(policy: BlockSizePolicy, name: str) -> bool:
    return getattr(policy, name, None) is not None


def _one_each(policy: BlockSizePolicy | Sequence[BlockSizePolicy], count: int) -> Sequence[BlockSizePolicy]:
    if hasattr(policy, "choose") or not isinstance(policy, Sequence):
        policies = [cast(BlockSizePolicy, policy)] * count
    else:
        policies = list(policy)
    if len(policies) != count:
        raise UserError(f"{len(policies)} policies for {count} records; expected one for each, or a single policy")
    for one in policies:
        check_policy(one)
    return policies


def _run(pair: Pair, members: list[_Prompt], max_tokens: int) -> None:
    """All rounds of a group, in step."""
    for one in members:
        one.choose()
    front: Wavefront | None = None
    while any(one.left > 0 for one in members):
        rows = [row for row, one in enumerate(members) if one.left > 0]
        done = {row: found for row in rows if (found := members[row].look_up()) is not None}
        asked = [row for row in rows if row not in done]
        if asked:
            front = front or _front(pair, members, max_tokens)
            done |= _draft([row for row in asked if not members[row].trims], members, front)
            done |= _draft_and_trim([row for row in asked if members[row].trims], members, front)
        for row in rows:
            members[row].commit(done[row])


@dataclass(frozen=True)
class _Drafted:
    """A round before its end is cut."""

    verified: int
    whole: int
    """Tokens it would commit if the output went on."""


def _blocks(rows: Sequence[int], members: Sequence[_Prompt], limit: int) -> tuple[Ints, Ints, Ints]:
    """Prompt, anchor and size of the blocks of these rows; no block is larger than the models' positions."""
    sizes = [min(members[row].size, limit) for row in rows]
    listed = [rows, [members[row].anchor for row in rows], sizes]
    return tuple(np.array(one, dtype=np.int64) for one in listed)  # type: ignore[return-value]


def _draft(rows: Sequence[int], members: Sequence[_Prompt], front: Wavefront) -> dict[int, _Drafted]:
    rights = front.right(*_blocks(rows, members, front.limit)).tolist()
    return {row: _Drafted(members[row].size, right + 1) for row, right in zip(rows, rights, strict=True)}


def _draft_and_trim(rows: Sequence[int], members: Sequence[_Prompt], front: Wavefront) -> dict[int, _Drafted]:
    """As :func:`_draft`; labels cannot say it, for what is drafted by one size is verified by another."""
    rights, probs = front.right_with_probs(*_blocks(rows, members, front.limit))
    done = {}
    for row, right, probs_of_row in zip(rows, rights.tolist(), probs, strict=True):
        verified = members[row].trim(probs_of_row)
        done[row] = _Drafted(verified, min(right, verified - 1) + 1)
    return done


def _front(pair: Pair, members: list[_Prompt], max_tokens: int) -> Wavefront:
    for one in members:
        one.supply("features")
    texts = []
    for record in [one.record for one in members]:
        assert record.features is not None
        texts.append(KnownText(record.prompt_ids + record.output_ids, record.features.to(pair.device)))
    return Wavefront(pair, texts, 2 * pair.block_size, max_tokens)


class _Prompt:
    """Where one prompt stands."""

    def __init__(self, pair: Pair, record: OracleRecord, policy: BlockSizePolicy) -> None:
        self.pair, self.record, self.policy = pair, record, policy
        self.candidates = list(record.acceptance_lengths)
        self.updates, self.trims = _has(policy, "update"), _has(policy, "trim")
        self.lengths: list[int] = []
        self.sizes: list[int] = []
        self.drafted: list[int] = []
        self.left = len(record.output_ids) - 1

    @property
    def anchor(self) -> int:
        return len(self.record.prompt_ids) + len(self.record.output_ids) - 1 - self.left

    def choose(self) -> None:
        prompt_ids = self.record.prompt_ids
        prefill = _KnownPrefill(prompt_key(prompt_ids), len(prompt_ids), lambda name: self.seen(name, 0))
        self.first = self.size = checked_block_size(self.policy.choose(prefill))

    def look_up(self) -> _Drafted | None:
        """What this round commits by the labels (it may reach past the end); None where they do not say."""
        whole = self._label()
        return None if whole is None else _Drafted(self.size, whole)

    def _label(self) -> int | None:
        if self.size == 1:
            return 1
        if self.trims or self.size not in self.candidates:
            return None
        if self.record.acceptance_table is not None:
            place = len(self.record.output_ids) - 1 - self.left
            return int(self.record.acceptance_table[place, self.candidates.index(self.size)])
        # with one size for all rounds these are the rounds of its label
        return None if self.updates else self.record.acceptance_lengths[self.size][len(self.lengths)]

    def trim(self, probs: Tensor) -> int:
        """Positions of the block to verify."""
        if len(probs) == 0:
            return 1
        draft = Draft(len(probs) + 1, probs)
        return checked_trim(self.policy.trim(draft), draft)  # type: ignore[attr-defined]

    def commit(self, done: _Drafted) -> None:
        self.lengths.append(min(done.whole, self.left))
        self.sizes.append(done.verified)
        self.drafted.append(self.size)
        self.left -= self.lengths[-1]
        if self.updates and self.left > 0:
            place = len(self.record.output_ids) - 1 - self.left
            read = until_next_round(self.sizes, lambda name: self.seen(name, place))
            told = Round(len(self.sizes) - 1, self.sizes[-1], self.lengths[-1], read)
            self.size = checked_block_size(self.policy.update(told))  # type: ignore[attr-defined]

    def seen(self, name: str, place: int) -> Tensor:
        """``logits`` (``[V]``) or ``hidden`` (``[D]``) that output token ``place`` was drawn from."""
        like = {"device": self.pair.device, "dtype": self.pair.target.dtype}
        if place == 0:
            if getattr(self.record, name) is None:
                self.record = read_prefill(self.pair, self.record)
            return getattr(self.record, name).to(**like)
        self.supply("states")
        assert self.record.states is not None
        state = self.record.states[place].to(**like)
        return state if name == "hidden" else self.pair.runner.logits(state[None, None])[0, 0]

    def supply(self, name: str) -> None:
        """Has the target read the text if the record lacks ``features`` or ``states``."""
        if getattr(self.record, name) is None:
            self.record = read_text(self.pair, self.record)


class _KnownPrefill(Prefill):
    """A prefill whose numbers are fetched when a policy looks at them."""

    def __init__(self, key: int, prompt_tokens: int, read: Callable[[str], Tensor]) -> None:
        for name, value in (("key", key), ("prompt_tokens", prompt_tokens), ("_read", read)):
            object.__setattr__(self, name, value)

    @property
    def logits(self) -> Tensor:  # type: ignore[override]
        return self._read("logits")  # type: ignore[attr-defined]

    @property
    def hidden(self) -> Tensor:  # type: ignore[override]
        return self._read("hidden")  # type: ignore[attr-defined]


@torch.inference_mode()
def read_prefill(pair: Pair, record: OracleRecord) -> OracleRecord:
    """The record with ``logits`` and ``hidden`` of its prompt's last position, for which the output is not read."""
    tokens = torch.tensor([record.prompt_ids], device=pair.device)
    first = pair.runner.forward(tokens, pair.runner.new_cache(len(record.prompt_ids)), keep=1)
    return replace(record, logits=first.logits[0, -1].float().cpu(), hidden=first.hidden[0, -1].float().cpu())


@torch.inference_mode()
def read_text(pair: Pair, record: OracleRecord) -> OracleRecord:
    """The record with all that a target's pass over the known text gives: its numbers, ``features``, ``states``."""
    count, length = len(record.prompt_ids), len(record.prompt_ids) + len(record.output_ids) - 1
    tokens = torch.tensor([record.prompt_ids + record.output_ids], device=pair.device)
    cache = pair.runner.new_cache(length)
    # in two parts, so that the prompt's numbers are those of a prefill
    first = pair.runner.forward(tokens[:, :count], cache, keep=1)
    cache.length = count
    features, states = [first.features], [first.hidden[0]]
    # the head's input comes with the head's output, which is large
    step = max(1, _LOGITS // pair.vocab_size)
    for start in range(count, length, step):
        part = pair.runner.forward(tokens[:, start : min(start + step, length)], cache)
        features.append(part.features)
        states.append(part.hidden[0])
        cache.length = min(start + step, length)
    return replace(
        record,
        logits=first.logits[0, -1].float().cpu(),
        hidden=first.hidden[0, -1].float().cpu(),
        features=torch.cat([part for part in features if part is not None], dim=1)[0],
        states=torch.cat(states),
    )
