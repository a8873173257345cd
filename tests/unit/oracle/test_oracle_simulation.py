"""Simulation against real decoding, with nothing to look up, with labels, and with whole tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockpilot import oracle
from blockpilot.decoding import Draft, Prefill, Round, generate
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.oracle import OracleRecord, simulate, simulation
from blockpilot.policies import FixedPolicy, RandomPolicy
from tests.toy import Changing, make_prompts
from tests.unit.oracle.test_oracle_replay import PAIRS, PROMPTS, SIZES, random_pair

OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "top_p": 0.98, "seed": 2, "stop_token_ids": [21, 40]}


class ByLogits:
    """Picks by what it sees of the prefill, and keeps state over rounds and prompts."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.asked = sizes, 0

    def choose(self, prefill: Prefill) -> int:
        self.asked += 1
        return self.sizes[(int(prefill.logits.argmax()) + int(prefill.hidden.argmax()) + self.asked) % len(self.sizes)]

    def update(self, round: Round) -> int:
        self.asked += 1
        return self.sizes[(round.index + round.block_size + round.acceptance_length + self.asked) % len(self.sizes)]


class ByAnchor(ByLogits):
    """Picks by what every anchor was drawn from."""

    def update(self, round: Round) -> int:
        return self.sizes[(int(round.logits.argmax()) + int(round.hidden.argmax())) % len(self.sizes)]


class Trimming(ByLogits):
    """Verifies by what it sees of the draft, and keeps state over rounds and prompts; may draft one size for ever."""

    def __init__(self, sizes: list[int], changing: bool) -> None:
        super().__init__(sizes)
        if not changing:
            self.update = None  # type: ignore[assignment]

    def trim(self, draft: Draft) -> int:
        self.asked += 1
        return 1 + (int(draft.probs.sum() * 1000) + self.asked) % draft.block_size


def bare(record: OracleRecord) -> OracleRecord:
    """What is left when nothing but the text is known."""
    return OracleRecord(record.prompt_ids, record.output_ids, {}, None, None)


KNOWLEDGE: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({}, bare),
    "hidden states": ({"keep_features": True}, lambda record: replace(record, acceptance_lengths={})),
    "labels": ({}, lambda record: record),
    "labels and hidden states": ({"keep_features": True}, lambda record: record),
    "tables": ({"per_round": True}, lambda record: record),
    "reference tables": ({"per_round": True, "tau_convention": "reference"}, lambda record: record),
    "reference labels": ({"tau_convention": "reference"}, lambda record: record),
}
POLICIES = {
    "fixed": lambda: FixedPolicy(5),
    "autoregressive": lambda: FixedPolicy(1),
    "not a candidate": lambda: FixedPolicy(11),
    "random": lambda: RandomPolicy(SIZES, seed=1),
    "changing": lambda: Changing([8, 2, 1, 5, 3]),
    "changing, not all candidates": lambda: Changing([4, 8, 1]),
    "by logits": lambda: ByLogits(SIZES),
    "by anchor": lambda: ByAnchor(SIZES),
    "trimming": lambda: Trimming([5], changing=False),
    "trimming and changing": lambda: Trimming([*SIZES, 11], changing=True),
}


def rounds_of(out: Any) -> tuple[list[int], list[int], list[int], int]:
    return out.acceptance_lengths, out.block_sizes, out.drafted_sizes, out.first_block_size


def decoded(pair: Pair, policy: Any, **options: Any) -> list[tuple]:
    return [rounds_of(generate(pair, prompt, policy, **options)) for prompt in PROMPTS]


def simulated(pair: Pair, records: list[OracleRecord], policy: Any, **options: Any) -> list[tuple]:
    return [rounds_of(one) for one in simulate(pair, records, policy, **options)]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_simulation_equals_decoding_round_for_round(knowledge: str, policy: str, temperature: float) -> None:
    pair = random_pair()
    extras, keep = KNOWLEDGE[knowledge]
    options = OPTIONS | {"temperature": temperature}
    records = [keep(record) for record in oracle.replay(pair, PROMPTS, SIZES, **options, **extras)]
    expected = decoded(pair, POLICIES[policy](), **options)
    assert simulated(pair, records, POLICIES[policy]()) == expected
    assert simulated(pair, records, POLICIES[policy](), batch_size=2, max_batch_tokens=40) == expected


@pytest.mark.parametrize("kind", PAIRS)
def test_position_limits_and_families(kind: str) -> None:
    pair = random_pair(kind)
    options: dict[str, Any] = OPTIONS | {"max_new_tokens": 30}
    records = [bare(record) for record in oracle.replay(pair, PROMPTS, SIZES, **options)]
    for policy in ("changing", "not a candidate", "by anchor", "trimming and changing"):
        assert simulated(pair, records, POLICIES[policy]()) == decoded(pair, POLICIES[policy](), **options)


def test_one_policy_per_record_runs_all_at_once_with_a_state_of_its_own() -> None:
    pair = random_pair()
    records = [bare(record) for record in oracle.replay(pair, PROMPTS, SIZES, **OPTIONS)]
    sizes = [SIZES, [3, 5], [1], [8], [2, 9], [5, 1, 2], [4]]
    for make in (ByLogits, lambda sizes: Trimming(sizes, changing=True)):
        expected = [rounds_of(generate(pair, p, make(s), **OPTIONS)) for p, s in zip(PROMPTS, sizes, strict=True)]
        assert simulated(pair, records, [make(s) for s in sizes]) == expected


def test_labels_are_looked_up_and_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair()
    labels = oracle.replay(pair, PROMPTS, SIZES, **OPTIONS)
    tables = oracle.replay(pair, PROMPTS, SIZES, per_round=True, **OPTIONS)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("drafted")

    monkeypatch.setattr(type(pair.drafter), "forward", refuse)
    monkeypatch.setattr(type(pair.runner), "forward", refuse)
    for fixed in SIZES:
        for records in (labels, tables):
            got = simulate(pair, records, FixedPolicy(fixed))
            assert [s.acceptance_lengths for s in got] == [r.acceptance_lengths[fixed] for r in labels]
    simulate(pair, tables, Changing([8, 2, 1, 5, 3]))
    with pytest.raises(AssertionError, match="drafted"):
        simulate(pair, labels, Changing([8, 2]))


def test_who_looks_at_nothing_needs_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache stores neither logits nor hidden states, unless it is asked to."""
    pair = random_pair()
    records = [replace(r, logits=None, hidden=None) for r in oracle.replay(pair, PROMPTS, SIZES, **OPTIONS)]
    expected = decoded(pair, FixedPolicy(5), **OPTIONS)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(type(pair.runner), "forward", refuse)
    assert simulated(pair, records, FixedPolicy(5)) == expected
    with pytest.raises(AssertionError, match="the target ran"):
        simulate(pair, records, ByLogits(SIZES))


def test_texts_are_read_in_parts_where_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair()
    (kept,) = oracle.replay(pair, PROMPTS[3:4], SIZES, keep_features=True, **OPTIONS)
    monkeypatch.setattr(simulation, "_LOGITS", 3 * pair.vocab_size)
    read = simulation.read_text(pair, bare(kept))
    assert kept.states is not None and kept.features is not None and kept.hidden is not None
    assert kept.states.shape == (len(kept.output_ids), pair.hidden_size) and len(kept.output_ids) > 8
    torch.testing.assert_close(kept.states[0], kept.hidden, rtol=0, atol=0)
    torch.testing.assert_close(read.states, kept.states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read.features, kept.features, rtol=1e-4, atol=1e-4)


def test_hidden_states_that_were_kept_spare_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair()
    records = oracle.replay(pair, PROMPTS, SIZES, keep_features=True, **OPTIONS)
    expected = decoded(pair, Changing([11, 4]), **OPTIONS)
    by_anchor = decoded(pair, ByAnchor(SIZES), **OPTIONS)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(type(pair.runner), "forward", refuse)
    assert simulated(pair, records, Changing([11, 4])) == expected
    assert simulated(pair, records, ByAnchor(SIZES)) == by_anchor
    assert records[0].features is not None
    assert len(records[0].features) == len(records[0].prompt_ids) + len(records[0].output_ids) - 1


def test_tau_and_outputs_without_rounds() -> None:
    pair = random_pair()
    (record,) = oracle.replay(pair, make_prompts([4]), [3], max_new_tokens=1)
    (alone,) = simulate(pair, [record], FixedPolicy(3))
    assert alone.acceptance_lengths == alone.block_sizes == [] and alone.first_block_size == 3
    assert torch.isnan(torch.tensor(alone.tau))
    assert simulate(pair, [], FixedPolicy(3)) == []


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (FixedPolicy, {}, "policy=.*FixedPolicy.* is not allowed; expected an object with choose"),
        ([FixedPolicy(3)], {}, "1 policies for 7 records; expected one for each"),
        (Changing([0]), {}, "the policy picked block size 0"),
        (Changing([2, 0]), {}, "the policy picked block size 0"),
        (SimpleNamespace(choose=lambda prefill: 4, trim=lambda draft: 5), {}, "trim returned 5; expected 1 to 4"),
        (SimpleNamespace(choose=lambda prefill: 4, trim=7), {}, "policy=.* is not allowed"),
        (FixedPolicy(3), {"batch_size": 0}, "batch_size=0 is not allowed"),
        (FixedPolicy(3), {"max_batch_tokens": 0}, "max_batch_tokens=0 is not allowed"),
    ],
)
def test_what_is_refused(policy: Any, options: dict[str, Any], message: str) -> None:
    pair = random_pair()
    records = oracle.replay(pair, PROMPTS, SIZES, **OPTIONS)
    with pytest.raises(UserError, match=message):
        simulate(pair, records, policy, **options)


def test_a_policy_that_is_in_the_list_twice_sees_its_prompts_one_by_one() -> None:
    pair = random_pair()
    records = [bare(record) for record in oracle.replay(pair, PROMPTS, SIZES, **OPTIONS)]
    expected = decoded(pair, ByLogits(SIZES), **OPTIONS)
    assert simulated(pair, records, [ByLogits(SIZES)] * len(PROMPTS)) == expected


def test_an_update_of_none_and_huge_sizes() -> None:
    class Once:
        update = None

        def choose(self, prefill: Prefill) -> int:
            return 2**63

    pair = random_pair()
    records = [bare(record) for record in oracle.replay(pair, PROMPTS, SIZES, **OPTIONS)]
    assert simulated(pair, records, Once()) == decoded(pair, Once(), **OPTIONS)


def test_memory_that_runs_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair()
    records = oracle.replay(pair, PROMPTS, SIZES, keep_features=True, **OPTIONS)

    def no_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(pair.drafter), "forward", no_memory)
    with pytest.raises(UserError, match="out of memory on cpu with max_batch_tokens=32768; expected a smaller number"):
        simulate(pair, records, FixedPolicy(11))
