"""Runs a policy along known outputs: what real decoding would commit, without decoding.

What the labels say is looked up; the rest is drafted (``wavefront.py``). The target is needed only where a record lacks
its hidden states: then it reads the known text once. Knows the engine's rules of what is committed and when a policy is
asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from blockpilot.decoding.engine import BlockSizePolicy, Prefill, Round, check_policy, checked_block_size
from blockpilot.decoding.sampling import prompt_key
from blockpilot.errors import UserError, integer
from blockpilot.models.pair import Pair
from blockpilot.oracle.memory import BatchMemory
from blockpilot.oracle.record import OracleRecord
from blockpilot.oracle.wavefront import KnownText, Wavefront


@dataclass(frozen=True)
class Simulation:
    """One prompt under a policy; fields as in :class:`~blockpilot.decoding.engine.Generation`."""

    acceptance_lengths: list[int]
    """Committed tokens, one per round; 1 + their sum is the number of output tokens."""
    block_sizes: list[int]
    """What the policy asked for, one per round."""
    first_block_size: int
    """The policy's choice after prefill."""

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
    again every round may keep state, so its prompts are simulated one by one, unless there is one policy per record.

    Args:
        pair: the pair that made the records.
        records: from :func:`blockpilot.oracle.replay` or ``enumerate``; with ``acceptance_table`` nothing is drafted
            for its candidates, with ``features`` the target is not run.
        policy: one for all records, or a list of one for each.
        batch_size: most prompts drafted together.
        max_batch_tokens: most positions held, and tokens drafted, at once; None takes what most machines hold.

    Raises:
        UserError: a policy that cannot be called or picks less than 1, a list of policies that is not as long as
            ``records``, or a value out of range.
    """
    if integer("batch_size", batch_size) < 1:
        raise UserError(f"batch_size={batch_size!r} is not allowed; expected a number of at least 1")
    memory = BatchMemory(max_batch_tokens, pair.device, 1)
    records = list(records)
    policies = _one_each(policy, len(records))
    # state that several prompts share must see them one after the other
    stateful = [id(one) for one in policies if _updates(one)]
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
        done += [Simulation(one.lengths, one.sizes, one.first) for one in members]
    return done


def _updates(policy: BlockSizePolicy) -> bool:
    return getattr(policy, "update", None) is not None


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
        known = {row: members[row].look_up() for row in rows}
        committed = {row: whole for row, whole in known.items() if whole is not None}
        asked = [row for row in rows if row not in committed]
        if asked:
            front = front or _front(pair, members, max_tokens)
            anchors = np.array([members[row].anchor for row in asked])
            sizes = np.array([min(members[row].size, pair.max_positions) for row in asked])
            for row, right in zip(asked, front.right(np.array(asked), anchors, sizes).tolist(), strict=True):
                committed[row] = right + 1
        for row in rows:
            members[row].commit(committed[row])


def _front(pair: Pair, members: list[_Prompt], max_tokens: int) -> Wavefront:
    for one in members:
        one.supply(features=True)
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
        self.updates = _updates(policy)
        self.lengths: list[int] = []
        self.sizes: list[int] = []
        self.left = len(record.output_ids) - 1

    @property
    def anchor(self) -> int:
        return len(self.record.prompt_ids) + len(self.record.output_ids) - 1 - self.left

    def choose(self) -> None:
        self.supply(features=False)
        record, like = self.record, {"device": self.pair.device, "dtype": self.pair.target.dtype}
        assert record.logits is not None and record.hidden is not None
        key = prompt_key(record.prompt_ids)
        prefill = Prefill(key, len(record.prompt_ids), record.logits.to(**like), record.hidden.to(**like))
        self.first = self.size = checked_block_size(self.policy.choose(prefill))

    def look_up(self) -> int | None:
        """What the labels say this round commits (it may reach past the end); None where they do not."""
        if self.size == 1:
            return 1
        if self.size not in self.candidates:
            return None
        if self.record.acceptance_table is not None:
            place = len(self.record.output_ids) - 1 - self.left
            return int(self.record.acceptance_table[place, self.candidates.index(self.size)])
        # with one size for all rounds these are the rounds of its label
        return None if self.updates else self.record.acceptance_lengths[self.size][len(self.lengths)]

    def commit(self, whole: int) -> None:
        self.lengths.append(min(whole, self.left))
        self.sizes.append(self.size)
        self.left -= self.lengths[-1]
        if self.updates and self.left > 0:
            done = Round(len(self.sizes) - 1, self.size, self.lengths[-1])
            self.size = checked_block_size(self.policy.update(done))  # type: ignore[attr-defined]

    def supply(self, *, features: bool) -> None:
        """Has the target read the text if the record lacks what is needed."""
        record = self.record
        if record.logits is None or record.hidden is None or (features and record.features is None):
            self.record = read_text(self.pair, record)


@torch.inference_mode()
def read_text(pair: Pair, record: OracleRecord) -> OracleRecord:
    """The record with ``logits``, ``hidden`` and ``features``, from one pass of the target over the known text."""
    count, length = len(record.prompt_ids), len(record.prompt_ids) + len(record.output_ids) - 1
    tokens = torch.tensor([record.prompt_ids + record.output_ids], device=pair.device)
    cache = pair.runner.new_cache(length)
    # in two parts, so that the prompt's numbers are those of a prefill
    first = pair.runner.forward(tokens[:, :count], cache, keep=1)
    cache.length = count
    assert first.features is not None
    parts = [first.features]
    if length > count:
        rest = pair.runner.forward(tokens[:, count:length], cache, keep=1)
        assert rest.features is not None
        parts.append(rest.features)
    return replace(
        record,
        logits=first.logits[0, -1].float().cpu(),
        hidden=first.hidden[0, -1].float().cpu(),
        features=torch.cat(parts, dim=1)[0],
    )
