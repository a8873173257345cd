"""Rounds of one shape: nothing in them is read back, buffers are reused, grown, shared with nobody.

That their output is the target's own is tested with the engine (test_decoding_engine.py runs on both kinds).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from blockpilot.decoding import Prefill, Sampling, engine, generate, static
from blockpilot.decoding.rounds import Rounds, Task
from blockpilot.decoding.static import SMALLEST_WINDOW, StaticRounds
from blockpilot.models import Pair
from blockpilot.policies import FixedPolicy
from tests.toy import (
    Changing,
    decode_one_by_one,
    make_drafter,
    make_pair,
    make_prompts,
    make_scripted_pair,
    make_target,
)

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": WINDOWS,
    "windows-both-ways": WINDOWS | {"is_causal": False},
    "draft-vocabulary": {"draft_vocab_size": 48},
}


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StaticRounds]]:
    """Every rounds object of the test."""
    made: list[StaticRounds] = []

    def always_static(pair: Pair, task: Task) -> StaticRounds:
        made.append(StaticRounds(pair, task))
        return made[-1]

    monkeypatch.setattr(engine, "rounds_for", always_static)
    yield made
    assert not any(rounds.work.busy for rounds in made)


def addresses(rounds: StaticRounds) -> list[int]:
    layers: list[Any] = list(rounds.work.cache.layers)
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    tensors += [*rounds.work.context.keys, *rounds.work.context.values]
    return [tensor.data_ptr() for tensor in [*tensors, rounds.work.token, rounds.work.budget]]


def own_output(pair: Pair, prompt: list[int], count: int, **options: Any) -> list[int]:
    return decode_one_by_one(pair.target, prompt, Sampling(**options), count)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 12}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("block_size", "drafting"), [(1, False), (1, True), (2, True), (8, True)])
@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_a_round_reads_nothing_back(kind: str, options: dict[str, Any], block_size: int, drafting: bool) -> None:
    """With tensors that have shapes but no values a round still runs: what a graph captures cannot depend on values."""
    target, prompt = make_target(seed=5, layers=3), make_prompts([7])[0]
    pair = make_pair(target=target, drafter=make_drafter(target, **DRAFTERS[kind]))
    rounds = StaticRounds(pair, Task(prompt, Sampling(**options), frozenset({60, 61}), 30))
    rounds.prefill()
    rounds.start(drafting)
    rounds.round(block_size)  # tables are made in the first
    with FakeTensorMode(allow_non_fake_inputs=True):
        settled = rounds._advance(block_size)
        assert settled.shape == (2 + block_size,)
        with pytest.raises(DataDependentOutputException):
            rounds._commit(settled)
    rounds.close()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_a_round_shows_the_rows_that_plain_rounds_show(options: dict[str, Any]) -> None:
    pair, prompt = make_pair(seed=5, layers=3), make_prompts([7])[0]
    shown = []
    for kind in (StaticRounds, Rounds):
        rounds = kind(pair, Task(prompt, Sampling(**options), frozenset(), 30))
        rounds.prefill()
        rounds.start(True)
        rows, addresses_seen = [], set()
        for size in (4, 1, 6, 3):
            tokens = rounds.round(size).tokens
            rows.append((tokens, rounds.seen("logits").clone(), rounds.seen("hidden").clone()))
            addresses_seen.add(rounds.seen("logits").data_ptr())
        # one buffer for all rounds: a graph writes where it wrote when it was captured
        assert kind is Rounds or len(addresses_seen) == 1
        rounds.close()
        shown.append(rows)
    for (ours, logits, hidden), (theirs, plain_logits, plain_hidden) in zip(*shown, strict=True):
        assert ours == theirs
        torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hidden, plain_hidden, rtol=1e-4, atol=1e-4)
        assert (logits.shape, hidden.shape) == ((pair.vocab_size,), (pair.hidden_size,))


@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_a_round_drafts_what_plain_rounds_draft(kind: str) -> None:
    """With windows narrower than the context, and with a vocabulary of the drafter's own."""
    pair, prompt, made = make_scripted_pair(99, noise=0.6, **DRAFTERS[kind]), make_prompts([9])[0], []
    for rounds in (one(pair, Task(prompt, Sampling(), frozenset(), 60)) for one in (StaticRounds, Rounds)):
        rounds.prefill()
        rounds.start(True)
        made.append([(rounds.propose(size), rounds.round(size).tokens) for size in (4, 2, 6, 3, 8, 5, 4, 7)])
        rounds.close()
    assert len({len(tokens) for _, tokens in made[0]}) > 2
    for (scores, tokens), (plain_scores, plain_tokens) in zip(*made, strict=True):
        assert tokens == plain_tokens
        torch.testing.assert_close(scores, plain_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 5, 2**32 + 7, 2**63 + 9])
def test_seeds_stand_on_the_device(seed: int, used: list[StaticRounds]) -> None:
    pair, prompt = make_pair(seed=5, layers=3, eos=None), make_prompts([9], seed=3)[0]
    out = generate(pair, prompt, FixedPolicy(3), max_new_tokens=12, temperature=1.0, seed=seed)
    assert out.output_ids == own_output(pair, prompt, 12, temperature=1.0, seed=seed)


def test_prompts_share_the_buffers_and_see_nothing_of_each_other(used: list[StaticRounds]) -> None:
    pair, prompts = make_pair(seed=5, layers=3, eos=None), make_prompts([30, 4, 17, 30], seed=7)
    for prompt in prompts:
        out = generate(pair, prompt, Changing([6, 1, 3]), max_new_tokens=15)
        assert out.output_ids == own_output(pair, prompt, 15)
    assert len({id(rounds.work) for rounds in used}) == 1
    assert all(addresses(rounds) == addresses(used[0]) for rounds in used)


def test_a_longer_prompt_gets_larger_buffers_and_a_larger_window(used: list[StaticRounds]) -> None:
    pair = make_scripted_pair(2, target=None, script=None)
    windows = []
    for length, count in ((20, 30), (SMALLEST_WINDOW - 60, 50), (20, 30)):
        out = generate(pair, [*make_prompts([length - 1])[0], 20], FixedPolicy(8), max_new_tokens=count)
        assert out.output_ids == [(21 + i) % 64 for i in range(count)]
        windows.append(used[-1].work.cache.window)
    assert len({id(rounds.work) for rounds in used}) == 1
    assert windows == [SMALLEST_WINDOW] * 3
    pair = make_pair(seed=5, layers=3, max_positions=600, eos=None)
    for length, window in ((200, 256), (280, 512), (30, 256)):
        prompt = make_prompts([length], seed=2)[0]
        assert generate(pair, prompt, FixedPolicy(4), max_new_tokens=9).output_ids == own_output(pair, prompt, 9)
        assert used[-1].work.cache.window == window
    assert used[-1].work.cache.capacity == 512


def test_a_block_wider_than_planned_makes_room(used: list[StaticRounds]) -> None:
    pair = make_pair(seed=5, layers=3, max_positions=2000, eos=None)
    prompt = make_prompts([40], seed=2)[0]
    out = generate(pair, prompt, Changing([4, 300, 4, 700]), max_new_tokens=12)
    assert out.output_ids == own_output(pair, prompt, 12)
    assert used[-1].work.cache.capacity == used[-1].work.context.capacity == 1024


def test_a_policy_may_decode_with_the_same_pair(used: list[StaticRounds]) -> None:
    pair, (outer, inner) = make_pair(seed=5, layers=3, eos=None), make_prompts([9, 12], seed=3)
    found: list[list[int]] = []

    class Nosy(Changing):
        def choose(self, prefill: Prefill) -> int:
            if prefill.prompt_tokens == len(outer):
                found.append(generate(pair, inner, FixedPolicy(4), max_new_tokens=10).output_ids)
            return super().choose(prefill)

    assert generate(pair, outer, Nosy([5]), max_new_tokens=14).output_ids == own_output(pair, outer, 14)
    assert found == [own_output(pair, inner, 10)]
    assert used[0].work is not used[1].work


def test_other_weights_are_noticed(used: list[StaticRounds]) -> None:
    pair, prompt = make_pair(seed=5, layers=3, eos=None), make_prompts([9], seed=3)[0]
    for changed in ("nothing", "head", "dtype"):
        if changed == "head":
            pair.runner.head.weight.data.neg_()
        if changed == "dtype":
            pair.target.double()
            pair.drafter.double()
        assert generate(pair, prompt, FixedPolicy(4), max_new_tokens=9).output_ids == own_output(pair, prompt, 9)
    assert used[0].work is not used[-1].work


def test_a_workspace_goes_with_its_pair(used: list[StaticRounds]) -> None:
    pair = make_pair(seed=5, layers=3)
    before = len(static._workspaces)
    generate(pair, [9, 10], FixedPolicy(4), max_new_tokens=5)
    assert len(static._workspaces) == before + 1
    used.clear()
    del pair
    gc.collect()
    assert len(static._workspaces) <= before


# ---- taking and refusing a capture, with a stand-in for the graph: it replays by running the steps again


class StandIn:
    """Captures like a CUDA graph (nothing has happened afterwards) and replays its round's steps."""

    replays = 0
    broken: str | None = None

    def __enter__(self) -> None:
        if self.broken == "capture":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.rounds = next(rounds for rounds in CURRENT if rounds.work.busy)
        work = self.rounds.work
        self.accounts = (work.token, work.position, work.place, work.budget)
        self.before = [account.clone() for account in self.accounts]

    def __exit__(self, *_: object) -> None:
        for account, value in zip(self.accounts, self.before, strict=True):
            account.copy_(value)

    def replay(self) -> None:
        StandIn.replays += 1
        shape = next(s for s, c in self.rounds.work.graphs.items() if c is None or c.graph is self)
        settled = self.rounds._advance(shape.width)
        captured = self.rounds.work.graphs.get(shape)
        if captured is not None:
            captured.settled.copy_(settled)


CURRENT: list[StaticRounds] = []


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, used: list[StaticRounds]) -> Iterator[type[StandIn]]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    build = static.Workspace.__init__

    def capturing(self: static.Workspace, pair: Pair, capacity: int) -> None:
        build(self, pair, capacity)
        self.may_capture = True

    monkeypatch.setattr(static.Workspace, "__init__", capturing)
    monkeypatch.setattr(StandIn, "replays", 0)
    monkeypatch.setitem(globals(), "CURRENT", used)
    yield StandIn


def test_a_round_is_captured_when_it_comes_again(graphs: type[StandIn], used: list[StaticRounds]) -> None:
    pair, prompt = make_pair(seed=5, layers=3, eos=None), make_prompts([9], seed=3)[0]
    for _ in range(2):
        out = generate(pair, prompt, FixedPolicy(4), max_new_tokens=15)
        assert out.output_ids == own_output(pair, prompt, 15)
    (captured,) = used[-1].work.graphs.values()
    assert captured is not None
    # the first round ran, the second was captured (and replayed once as a check), all others were replayed
    assert graphs.replays == 2 * len(out.acceptance_lengths) - 1


@pytest.mark.parametrize("broken", ["capture", "replay"])
def test_a_capture_that_fails_or_gives_other_tokens_is_not_used(
    graphs: type[StandIn], used: list[StaticRounds], broken: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(graphs, "broken", broken)
    if broken == "replay":
        advance, calls = StaticRounds._advance, []

        def second_is_wrong(self: StaticRounds, width: int) -> torch.Tensor:
            calls.append(width)
            settled = advance(self, width)
            return settled + 1 if len(calls) == 2 else settled

        monkeypatch.setattr(StaticRounds, "_advance", second_is_wrong)
        monkeypatch.setattr(graphs, "replay", lambda self: None)
    pair, prompt = make_pair(seed=5, layers=3, eos=None), make_prompts([9], seed=3)[0]
    out = generate(pair, prompt, FixedPolicy(4), max_new_tokens=15)
    assert out.output_ids == own_output(pair, prompt, 15)
    assert not used[-1].work.may_capture and not used[-1].work.graphs
    (record,) = caplog.records
    assert record.getMessage().startswith("rounds are not captured as CUDA graphs: ")
    assert "\n" not in record.getMessage()
