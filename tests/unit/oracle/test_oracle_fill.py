"""Filling a cache: samples from rows and turns, shards of several writers, kills, and what a cache is named by."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot import oracle
from blockpilot.config import CollectConfig, GenerationConfig, OracleConfig
from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.oracle import LabelCache, fill, open_cache
from blockpilot.oracle.collect import cache_key, label_rows, sample_id
from blockpilot.oracle.prefill import sparsify
from blockpilot.prompts import PromptRow
from tests.toy import EOS, Changing, make_drafter, make_pair, make_prompts, make_target, word

GENERATION = GenerationConfig(max_new_tokens=7, temperature=1.0, seed=3)
ORACLE = OracleConfig(radius=1)
COLLECT = CollectConfig(batch_size=2, shard_size=2)


@cache
def pair() -> Pair:
    return make_pair(layers=3, seed=4)


def rows(count: int = 7) -> list[PromptRow]:
    prompts = make_prompts([1 + i % 4 for i in range(count)], seed=1)
    return [PromptRow(f"r{i}", f"set{i % 2}", (" ".join(map(word, prompt)),)) for i, prompt in enumerate(prompts)]


def opened(root: Path, **changes: Any) -> LabelCache:
    arguments: dict[str, Any] = {
        "pair": pair(), "rows": rows(), "generation": GENERATION, "oracle": ORACLE, "collect": COLLECT,
    } | changes  # fmt: skip
    return open_cache(root, "toy-train", **arguments)


def filled(root: Path, **changes: Any) -> LabelCache:
    cache = opened(root, **changes)
    arguments: dict[str, Any] = {
        "pair": pair(), "rows": rows(), "generation": GENERATION, "oracle": ORACLE, "collect": COLLECT,
    } | changes  # fmt: skip
    fill(cache, **arguments)
    return cache


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LabelCache:
    return filled(tmp_path_factory.mktemp("undisturbed"))


# ---- what is in it


def test_rows_are_the_labels_of_the_oracle(undisturbed: LabelCache) -> None:
    table = undisturbed.load()
    assert table.prompt_ids == tuple(row.id for row in rows())
    assert table.datasets == tuple(row.dataset for row in rows())
    assert table.block_sizes == (3, 4, 5)
    prompts = [pair().encode(row.turns) for row in rows()]
    assert [table.prompts.row(i) for i in range(7)] == prompts
    assert table.prompt_keys.tolist() == [signed_prompt_key(prompt) for prompt in prompts]
    records = oracle.enumerate(pair(), prompts, [3, 4, 5], max_new_tokens=7, temperature=1.0, seed=3)
    for index, record in enumerate(records):
        lengths = list(record.acceptance_lengths.values())
        assert table.committed_tokens[index].tolist() == [sum(each) for each in lengths]
        assert table.rounds[index].tolist() == [len(each) for each in lengths]
        stored = undisturbed.read().slice(index, 1).to_pylist()[0]
        assert stored["acceptance_lengths"] == lengths and stored["output_tokens"] == record.output_ids
        assert stored["block_sizes"] == [3, 4, 5] and stored["seed"] == 3
        # the distribution has neither temperature nor filter
        assert record.logits is not None
        probs = record.logits.softmax(-1)
        begin, end = table.distributions.offsets[index : index + 2].tolist()
        ids, kept = table.distributions.token_ids[begin:end], table.distributions.probs[begin:end]
        torch.testing.assert_close(kept, probs[ids], rtol=1e-4, atol=1e-6)
        assert (kept.diff() <= 0).all() and 1 - 1e-3 - 1e-6 <= kept.sum() < 1


@pytest.mark.parametrize("tail_mass", [0.0, 0.05, 0.5])
def test_kept_mass(tmp_path: Path, tail_mass: float) -> None:
    found = filled(tmp_path, oracle=OracleConfig(radius=0, tail_mass=tail_mass)).load().distributions
    for i in range(len(found)):
        begin, end = found.offsets[i : i + 2].tolist()
        mass, least = float(found.probs[begin:end].sum()), float(found.probs[end - 1])
        assert mass >= 1 - tail_mass - 1e-5
        if tail_mass:
            assert mass - least < 1 - tail_mass + 1e-5, "one token fewer would have done"
        else:
            assert end - begin == 64 and mass == pytest.approx(1, abs=1e-5)


def test_logits_and_hidden_are_stored_when_asked_for(tmp_path: Path) -> None:
    table = filled(tmp_path, oracle=OracleConfig(radius=0, store_logits=True, store_hidden=True)).load()
    assert table.logits is not None and table.hidden is not None
    assert table.logits.shape == (7, 64) and table.hidden.shape == (7, 32)
    for i in range(7):
        with torch.no_grad():
            plain = pair().target(torch.tensor([table.prompts.row(i)]), output_hidden_states=True)
        torch.testing.assert_close(table.logits[i], plain.logits[0, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(table.hidden[i], plain.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)


def test_both_methods_fill_the_same_rows(tmp_path: Path, undisturbed: LabelCache) -> None:
    by_enumeration = filled(tmp_path, oracle=OracleConfig(radius=1, method="enumerate"))
    assert by_enumeration.folder.name == undisturbed.folder.name
    one, other = by_enumeration.load(), undisturbed.load()
    assert torch.equal(one.committed_tokens, other.committed_tokens) and torch.equal(one.rounds, other.rounds)
    assert torch.equal(one.distributions.token_ids, other.distributions.token_ids)


def test_every_turn_is_a_sample_behind_the_targets_own_answers() -> None:
    several = [
        PromptRow("one", "d", ("w9",)),
        PromptRow("three", "d", ("w10", "w11 w12", "w13")),
        PromptRow("two", "d", ("w14", "w15")),
    ]
    stored, skipped = label_rows(pair(), several, GENERATION, ORACLE, batch_size=8)
    assert skipped == 0
    ids = ["one", "three#0", "three#1", "three#2", "two#0", "two#1"]
    assert [row.prompt_id for row in stored] == ids
    by_id = {row.prompt_id: row for row in stored}
    for row in several:
        answers: list[str] = []
        for turn in range(len(row.turns)):
            sample = by_id[sample_id(row, turn)]
            assert sample.prompt_tokens == pair().encode(row.turns[: turn + 1], answers)
            (alone,) = oracle.enumerate(
                pair(), [sample.prompt_tokens], [3, 4, 5], max_new_tokens=7, temperature=1.0, seed=3
            )
            assert sample.output_tokens == alone.output_ids
            assert sample.acceptance_lengths == list(alone.acceptance_lengths.values())
            answers.append(pair().decode(sample.output_tokens))
    # the answer itself is in the context of the next turn, as tokens (this toy decodes and encodes without loss)
    first, second = by_id["three#0"], by_id["three#1"]
    answer = [token for token in first.output_tokens if token > 7]
    assert answer and any(second.prompt_tokens[i : i + len(answer)] == answer for i in range(len(second.prompt_tokens)))


def test_prompts_too_long_are_skipped_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = make_target(layers=3, max_positions=12)
    small = make_pair(target=target)
    nine, ten = (" ".join(["w9"] * n) for n in (9, 10))
    # three tokens of the template: a turn of nine words just fits
    many = [
        PromptRow("fits", "d", (nine,)),
        PromptRow("long", "d", (ten,)),
        PromptRow("grows", "d", ("w9", nine, "w9")),  # the second turn is too long, and so the third has no context
        PromptRow("short", "d", ("w9",)),
        PromptRow("longer", "d", (ten + " w9", "w9")),
    ]
    with caplog.at_level(logging.WARNING):
        found = filled(tmp_path, pair=small, rows=many)
    assert found.load().prompt_ids == ("fits", "grows#0", "short")
    assert found.skipped() == 1 + 2 + 2 == found.manifest["skipped_too_long"]
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("5 samples skipped") and "12 positions" in said[0]


def test_nothing_but_prompts_too_long(tmp_path: Path) -> None:
    small = make_pair(target=make_target(layers=3, max_positions=3))
    found = filled(tmp_path, pair=small)
    with pytest.raises(UserError, match="holds no prompt: 7 were longer"):
        found.load()


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_that_decoding_allows_can_be_collected(tmp_path: Path, seed: int) -> None:
    found = filled(tmp_path, rows=rows(2), generation=replace(GENERATION, seed=seed, max_new_tokens=2))
    assert len(found.load()) == 2


# ---- what it is named by


def test_how_it_is_collected_changes_neither_name_nor_rows(tmp_path: Path, undisturbed: LabelCache) -> None:
    other = filled(tmp_path, collect=CollectConfig(batch_size=64, shard_size=3))
    assert other.folder.relative_to(tmp_path) == undisturbed.folder.relative_to(undisturbed.folder.parents[1])
    assert (other.num_shards, undisturbed.num_shards) == (3, 4)
    assert_same_rows(other, undisturbed)
    moved = make_pair(layers=3, seed=4)  # the same weights in other objects
    assert cache_key(moved, rows(), GENERATION, ORACLE) == undisturbed.key


def assert_same_rows(one: LabelCache, other: LabelCache) -> None:
    left, right = one.read(), other.read()
    for name in left.column_names:
        if name == "distribution_probs":  # a batch of another shape may round otherwise in the last bit
            flat = [torch.tensor(table[name].combine_chunks().flatten().to_numpy()) for table in (left, right)]
            torch.testing.assert_close(flat[0], flat[1], rtol=1e-4, atol=1e-6)
        else:
            assert left[name].combine_chunks().equals(right[name].combine_chunks()), name


CONTENT: dict[str, Callable[[], dict[str, Any]]] = {
    "max_new_tokens": lambda: {"generation": replace(GENERATION, max_new_tokens=8)},
    "temperature": lambda: {"generation": replace(GENERATION, temperature=0.9)},
    "top_p": lambda: {"generation": replace(GENERATION, top_p=0.9)},
    "top_k": lambda: {"generation": replace(GENERATION, top_k=9)},
    "seed": lambda: {"generation": replace(GENERATION, seed=4)},
    "radius": lambda: {"oracle": replace(ORACLE, radius=2)},
    "tail_mass": lambda: {"oracle": replace(ORACLE, tail_mass=0.0)},
    "store_logits": lambda: {"oracle": replace(ORACLE, store_logits=True)},
    "store_hidden": lambda: {"oracle": replace(ORACLE, store_hidden=True)},
    "tau_convention": lambda: {"oracle": replace(ORACLE, tau_convention="reference")},
    "order of rows": lambda: {"rows": rows()[::-1]},
    "number of rows": lambda: {"rows": rows(6)},
    "text of a row": lambda: {"rows": [replace(rows()[0], turns=("w9 w9",)), *rows()[1:]]},
    "id of a row": lambda: {"rows": [replace(rows()[0], id="other"), *rows()[1:]]},
    "target": lambda: {"pair": make_pair(layers=3, seed=5)},
    "drafter": lambda: {"pair": make_pair(target=pair().target, drafter=make_drafter(pair().target, seed=9))},
    "trained block size": lambda: {
        "pair": make_pair(target=pair().target, drafter=make_drafter(pair().target, block_size=5))
    },
    "chat template": lambda: {"pair": make_pair(layers=3, seed=4, template=None)},
    "thinking": lambda: {"pair": make_pair(layers=3, seed=4, thinking=True)},
    "stop tokens": lambda: {"pair": make_pair(layers=3, seed=4, eos=None)},
}


@pytest.mark.parametrize("what", CONTENT)
def test_whatever_changes_content_changes_the_folder(tmp_path: Path, what: str, undisturbed: LabelCache) -> None:
    other = opened(tmp_path, **CONTENT[what]())
    here = undisturbed.folder.relative_to(undisturbed.folder.parents[1])
    assert other.folder.relative_to(tmp_path) != here


def test_the_method_does_not(tmp_path: Path, undisturbed: LabelCache) -> None:
    other = opened(tmp_path, oracle=replace(ORACLE, method="enumerate"))
    assert other.key == undisturbed.key


def test_whole_numbers_name_the_same_cache(tmp_path: Path) -> None:
    whole = opened(
        tmp_path, generation=replace(GENERATION, temperature=0, top_p=1), oracle=replace(ORACLE, tail_mass=0)
    )
    generation = replace(GENERATION, temperature=0.0, top_p=1.0)
    assert opened(tmp_path, generation=generation, oracle=replace(ORACLE, tail_mass=0.0)).folder == whole.folder


# ---- writers, kills, damage


def test_a_second_fill_does_nothing(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in cache.folder.glob("*.parquet")}
    done: list[int] = []
    fill(opened(tmp_path), pair(), rows(), GENERATION, ORACLE, COLLECT, done.append)
    assert done == []
    assert before == {path.name: path.stat().st_mtime_ns for path in cache.folder.glob("*.parquet")}


def test_progress_is_told_in_rows(tmp_path: Path) -> None:
    done: list[int] = []
    fill(opened(tmp_path), pair(), rows(), GENERATION, ORACLE, COLLECT, done.append)
    assert done == [2, 2, 2, 1]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "removed"])
def test_a_damaged_shard_is_named_and_rebuilt(
    tmp_path: Path, damage: str, undisturbed: LabelCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = filled(tmp_path)
    path = cache.path(2)
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    # in the middle of the pages (what follows them is the footer, whose length stands at the end)
    content[(len(content) - 8 - int.from_bytes(content[-8:-4], "little")) // 2] ^= 0x10
    damaged = {"truncated": whole[: len(whole) // 2], "empty": b"", "flipped": bytes(content)}
    path.unlink() if damage == "removed" else path.write_bytes(damaged[damage])
    others = {p: p.stat().st_ino for p in cache.folder.glob("*.parquet") if p != path}
    done: list[int] = []
    with caplog.at_level(logging.WARNING):
        fill(opened(tmp_path), pair(), rows(), GENERATION, ORACLE, COLLECT, done.append)
    assert done == [2]
    assert (f"shard {path.name} is damaged" in caplog.text) == (damage != "removed")
    assert all(p.stat().st_ino == inode for p, inode in others.items())
    assert cache.read().equals(undisturbed.read())


def in_child(work: Callable[[], None]) -> BaseProcess:
    """Starts a process that shares nothing but files; a fork, so that it need not load the libraries again."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


@needs_fork
@pytest.mark.parametrize("moment", ["while labels are made", "before the file is whole", "before the rename", "after"])
def test_a_killed_run_is_finished_by_the_next(tmp_path: Path, moment: str, undisturbed: LabelCache) -> None:
    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def collect() -> None:
        torch.set_num_threads(1)
        finished: list[int] = []

        def on_rows(done: int) -> None:
            finished.append(done)
            if len(finished) == 2 and moment == "after":
                die()
            if len(finished) == 1:  # during the second shard
                if moment == "while labels are made":
                    pair().target.register_forward_hook(die)
                elif moment == "before the file is whole":
                    os.fsync = die
                elif moment == "before the rename":
                    os.replace = die

        fill(opened(tmp_path), pair(), rows(), GENERATION, ORACLE, COLLECT, on_rows)

    process = in_child(collect)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    kept = 2 if moment == "after" else 1
    cache = opened(tmp_path)
    there = {path: path.stat().st_ino for path in cache.folder.glob("*.parquet")}
    assert len(there) == kept and cache.missing() == list(range(kept, 4))
    done: list[int] = []
    fill(cache, pair(), rows(), GENERATION, ORACLE, COLLECT, done.append)
    assert len(done) == 4 - kept
    assert all(path.stat().st_ino == inode for path, inode in there.items())
    assert cache.read().equals(undisturbed.read())
    assert "skipped_too_long" in opened(tmp_path).manifest
    assert not [path.name for path in cache.folder.iterdir() if path.name.startswith(".")]


@needs_fork
def test_two_writers_at_once_fill_one_cache(tmp_path: Path, undisturbed: LabelCache) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)

    def writer(index: int) -> Callable[[], None]:
        def work() -> None:
            torch.set_num_threads(1)
            settings = CollectConfig(batch_size=2, shard_size=2, num_shards=2, shard_index=index)
            barrier.wait(60)
            cache = opened(tmp_path, collect=settings)  # both create it, or find the other's
            fill(cache, pair(), rows(), GENERATION, ORACLE, settings)

        return work

    processes = [in_child(writer(index)) for index in range(2)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    cache = opened(tmp_path)
    assert cache.missing() == []
    assert cache.read().equals(undisturbed.read())
    assert not [path.name for path in cache.folder.iterdir() if path.name.startswith(".")]
    assert cache.manifest["skipped_too_long"] == 0


def test_each_writer_makes_its_own_shards_only(tmp_path: Path) -> None:
    second = CollectConfig(batch_size=2, shard_size=2, num_shards=3, shard_index=1)
    cache = filled(tmp_path, collect=second)
    assert cache.missing() == [0, 2, 3]
    assert "skipped_too_long" not in cache.manifest  # not complete yet
    for index in (0, 2):
        filled(tmp_path, collect=replace(second, shard_index=index))
    assert opened(tmp_path).missing() == []


def test_a_damaged_shard_of_another_writer_is_left_to_it(tmp_path: Path, undisturbed: LabelCache) -> None:
    cache = filled(tmp_path)
    cache.path(0).unlink()
    cache.path(1).write_bytes(cache.path(1).read_bytes()[:-1])
    other = CollectConfig(batch_size=2, shard_size=2, num_shards=2, shard_index=1)
    filled(tmp_path, collect=replace(other, shard_index=0))
    assert opened(tmp_path).missing() == [1]
    assert filled(tmp_path, collect=other).read().equals(undisturbed.read())


def test_labels_are_those_of_any_policys_run() -> None:
    """What the oracle promises: the same output, and the same first round, when that block size is really used."""
    prompt = pair().encode(rows()[2].turns)
    (record,) = oracle.replay(pair(), [prompt], [3, 4, 5], max_new_tokens=7, temperature=1.0, seed=3)
    from blockpilot.decoding import generate

    out = generate(pair(), prompt, Changing([5, 3]), max_new_tokens=7, temperature=1.0, seed=3)
    assert out.output_ids == record.output_ids
    assert out.acceptance_lengths[0] == record.acceptance_lengths[5][0]
    assert EOS in pair().stop_token_ids


def test_a_single_row_keeps_every_entry_where_no_tail_is_dropped() -> None:
    """Sums of probabilities in fp32 reach 1 before the last of them."""
    generator = torch.Generator().manual_seed(0)
    for scale in range(1, 21):
        probs = (torch.randn(1, 5000, generator=generator) * scale).softmax(-1)
        alone, twice = sparsify(probs, 0.0), sparsify(probs.repeat(2, 1), 0.0)
        assert len(alone.probs) == int((probs > 0).sum()) == int(twice.offsets[1])


def test_logits_that_are_not_finite_are_told(tmp_path: Path) -> None:
    broken = make_pair(seed=5)
    head: Any = broken.target.get_output_embeddings()
    torch.nn.init.constant_(head.weight, torch.nan)
    for tail_mass in (0.0, 1e-3):
        with pytest.raises(UserError, match=r"the target's logits for prompt .* are not finite"):
            filled(tmp_path, pair=broken, oracle=OracleConfig(radius=0, tail_mass=tail_mass))
