"""Merging: what several writers filled apart is the cache of one writer; nothing is lost, taken twice or mixed up."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from blockpilot.config import CollectConfig, GenerationConfig, OracleConfig
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.oracle import CacheKey, CacheRow, LabelCache, fill, open_cache
from blockpilot.oracle.audit import inspect_cache
from blockpilot.oracle.merge import merge
from blockpilot.prompts import PromptRow
from blockpilot.report.caches import merge_lines
from tests.toy import make_pair, make_prompts, word

GENERATION = GenerationConfig(max_new_tokens=7, temperature=1.0, seed=3)
ORACLE = OracleConfig(radius=1, store_logits=True, store_hidden=True, per_round=True)


@cache
def pair() -> Pair:
    return make_pair(layers=3, seed=4)


def collected(root: Path, index: int = 0, writers: int = 1, name: str = "toy", turns: int = 1) -> LabelCache:
    prompts = make_prompts([1 + i % 4 for i in range(7)], seed=turns)
    rows = [PromptRow(f"{name}{i}", "d", (" ".join(map(word, prompt)),) * turns) for i, prompt in enumerate(prompts)]
    settings = CollectConfig(batch_size=2, shard_size=2, num_shards=writers, shard_index=index)
    found = open_cache(root, name, pair(), rows, GENERATION, ORACLE, settings)
    fill(found, pair(), rows, GENERATION, ORACLE, settings)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> LabelCache:
    """What one writer makes."""
    return collected(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> list[LabelCache]:
    """Three writers on machines of their own."""
    root = tmp_path_factory.mktemp("writers")
    return [collected(root / str(index), index, 3) for index in range(3)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def copy_of(found: LabelCache, folder: Path) -> LabelCache:
    folder.mkdir(parents=True)
    for name, content in contents(found.folder).items():
        (folder / name).write_bytes(content)
    return LabelCache.existing(folder)


# ---- equal to one writer's


def test_the_folders_of_several_writers_become_the_cache_of_one(
    tmp_path: Path, alone: LabelCache, writers: list[LabelCache]
) -> None:
    assert [len(writer.missing()) for writer in writers] == [2, 3, 3]
    before = [contents(writer.folder) for writer in writers]
    (merged,) = merge(tmp_path / "merged", [writer.folder for writer in writers])
    assert (merged.copied, merged.kept, merged.missing, merged.notes) == (4, 0, [], [])
    assert [contents(writer.folder) for writer in writers] == before
    found = LabelCache.existing(tmp_path / "merged")
    assert found.key == alone.key and found.missing() == []
    ours, theirs = found.read(), alone.read()
    assert ours.column_names == theirs.column_names and len(ours.column_names) == 13
    for name in theirs.column_names:
        assert ours[name].combine_chunks().equals(theirs[name].combine_chunks()), name
        assert ours[name].null_count == 0, name
    assert inspect_cache(found.folder).is_whole
    assert found.manifest["skipped_too_long"] == 0 and found.manifest["provenance"]["seconds"] > 0
    # a run that opens it finds nothing to do
    assert collected_again(tmp_path / "merged", alone) == []


def collected_again(folder: Path, like: LabelCache) -> list[int]:
    return LabelCache(folder, like.key, 7, 2).missing()


def test_whole_trees_are_merged_cache_by_cache(tmp_path: Path) -> None:
    for index in range(2):
        for name, turns in (("one", 1), ("two", 2)):
            collected(tmp_path / f"writer{index}", index, 2, name, turns)
    sources = [tmp_path / "writer0", tmp_path / "writer1"]
    merged = merge(tmp_path / "all", sources)
    assert [(one.copied, one.missing) for one in merged] == [(4, []), (4, [])]
    for name, turns in (("one", 1), ("two", 2)):
        alone = collected(tmp_path / "alone", name=name, turns=turns)
        found = LabelCache.existing(tmp_path / "all" / alone.folder.relative_to(tmp_path / "alone"))
        assert found.read().equals(alone.read())
    again = merge(tmp_path / "all", sources)
    assert [(one.copied, one.kept) for one in again] == [(0, 4), (0, 4)]


def test_merging_again_changes_nothing(tmp_path: Path, writers: list[LabelCache]) -> None:
    target, folders = tmp_path / "merged", [writer.folder for writer in writers]
    merge(target, folders)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in target.iterdir()}
    for sources in (folders, folders[::-1], [target, *folders]):
        (merged,) = merge(target, sources)
        assert (merged.copied, merged.kept, merged.notes) == (0, 4, [])
        assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in target.iterdir()} == before


def test_writers_may_come_one_after_the_other_and_collect_may_make_the_rest(
    tmp_path: Path, alone: LabelCache, writers: list[LabelCache]
) -> None:
    folder = tmp_path / alone.folder.relative_to(alone.folder.parents[1])  # where a run looks
    (merged,) = merge(folder, [writers[2].folder])
    assert merged.missing == [f"shard-0000{i}-of-00004.parquet" for i in (0, 1, 3)]
    assert next(merge_lines(merged)).endswith(
        f"1 of 4 shards, 1 copied, 0 were there; still missing {', '.join(merged.missing)}"
    )
    assert "skipped_too_long" not in merged.cache.manifest
    (merged,) = merge(folder, [writers[0].folder])
    assert (merged.copied, merged.kept, merged.missing) == (2, 1, ["shard-00001-of-00004.parquet"])
    rest = collected(tmp_path)
    assert rest.folder == folder and rest.read().equals(alone.read())


# ---- damaged and overlapping shards


def test_a_damaged_shard_is_taken_from_whoever_has_it_whole(
    tmp_path: Path, alone: LabelCache, writers: list[LabelCache]
) -> None:
    bad = copy_of(alone, tmp_path / "bad")
    bad.path(0).write_bytes(b"")
    bad.path(1).write_bytes(bad.path(1).read_bytes()[:-20])
    (merged,) = merge(tmp_path / "merged", [bad.folder, writers[0].folder])
    assert (merged.copied, merged.missing) == (3, ["shard-00001-of-00004.parquet"])
    assert [note.split(" (")[0] for note in merged.notes] == [f"{bad.path(i)} is damaged" for i in (0, 1)]
    assert all(note.endswith("and was not taken") for note in merged.notes)
    assert not merged.cache.path(1).exists()
    (merged,) = merge(tmp_path / "merged", [writers[1].folder])
    assert merged.missing == [] and merged.cache.read().equals(alone.read())


def test_a_damaged_shard_of_the_target_is_replaced(
    tmp_path: Path, alone: LabelCache, writers: list[LabelCache]
) -> None:
    target = copy_of(alone, tmp_path / "target")
    for shard in (1, 2):
        target.path(shard).write_bytes(b"PAR1")
    (merged,) = merge(target.folder, [writers[1].folder])
    assert (merged.copied, merged.kept, merged.missing) == (1, 2, ["shard-00002-of-00004.parquet"])
    assert all(f"{target.path(i)} is damaged" in note for i, note in zip((1, 2), merged.notes, strict=True))
    (merged,) = merge(target.folder, [writers[2].folder])
    assert merged.missing == [] and merged.cache.read().equals(alone.read())


KEY = CacheKey(
    pair={"target": "t"}, prompts="0" * 64, block_sizes=(3,), vocab_size=64, max_new_tokens=8, temperature=0.0,
    top_p=1.0, top_k=0, seed=0, stop_token_ids=(3,), tail_mass=1e-3, store_logits=False, store_hidden=False,
    tau_convention="committed",
)  # fmt: skip


def made(
    folder: Path, key: CacheKey = KEY, rows: int = 4, shard_size: int = 2, prob: float = 1.0, device: str = "a"
) -> LabelCache:
    found = LabelCache(folder, key, rows, shard_size)
    for shard in range(found.num_shards):
        stored = [CacheRow(f"p{i}", i, "d", [i], [5, 5], [3], [[1]], [9], [prob], 0) for i in found.rows_of(shard)]
        found.write(shard, stored, skipped=0, seconds=1.0, device=device)
    return found


def test_the_same_rows_from_another_device_are_no_difference(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made(tmp_path / name, device=name)
    (merged,) = merge(tmp_path / "merged", [tmp_path / "one", tmp_path / "two"])
    assert (merged.copied, merged.notes) == (2, [])


def test_other_rows_under_the_same_key_are_told_and_the_first_are_taken(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two", prob=0.9999999)
    (merged,) = merge(tmp_path / "merged", [one.folder, two.folder])
    assert (merged.copied, merged.missing) == (2, [])
    assert [note.split(", which was taken")[0] for note in merged.notes] == [
        f"{two.path(shard)} holds other rows than {one.path(shard)}" for shard in range(2)
    ]
    assert merged.cache.read().equals(one.read())
    (merged,) = merge(two.folder, [one.folder])
    assert (merged.copied, merged.kept, len(merged.notes)) == (0, 2, 2)
    assert merged.cache.read().equals(two.read())


# ---- what does not belong together


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": replace(KEY, seed=1)}, "seed=1 .* seed=0"),
        ({"key": replace(KEY, pair={"target": "u"})}, "pair.target='u' .* pair.target='t'"),
        ({"key": replace(KEY, pair={"target": "t", "dtype": "bf"})}, "pair.dtype='bf' .* pair.dtype=None"),
        ({"rows": 6}, "num_rows=6 .* num_rows=4"),
        ({"shard_size": 3}, "shard_size=3 .* shard_size=2; their shards hold other rows"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_other_caches_are_refused_before_anything_is_copied(
    tmp_path: Path, change: dict, words: str, existing: bool
) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other", **change)
    if existing:
        target, sources = one.folder, [other.folder]
    else:
        target, sources = tmp_path / "new", [one.folder, other.folder]
    with pytest.raises(UserError, match=words) as caught:
        merge(target, sources)
    assert str(one.folder) in str(caught.value) and str(other.folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert target.exists() == existing and one.missing() == []


def test_folders_that_do_not_match_are_refused(tmp_path: Path) -> None:
    one, tree = made(tmp_path / "one"), tmp_path / "tree"
    made(tree / "pair/set")
    made(tmp_path / "other/pair/set", replace(KEY, seed=1))
    new = tmp_path / "new"
    for target, sources, words in (
        (new, [one.folder, tree], "tree holds caches and .*one is the folder of one cache"),
        (one.folder, [tree], "tree holds caches and .*one is the folder of one cache"),
        (tree, [one.folder], "one is the folder of one cache and .*tree holds caches"),
        (tree / "new", [tree], "is inside the other"),
        (tmp_path, [tree], "is inside the other"),
        (new, [tree, tree / "pair"], "the same key but would go to different places"),
        (new, [tree, tmp_path / "other"], "seed=1 .* seed=0"),
        (new, [tmp_path / "nowhere"], "nowhere is no folder"),
    ):
        with pytest.raises(UserError, match=words):
            merge(target, sources)
    assert not new.exists() and not (tree / "new").exists()


def test_a_source_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    one, old = made(tmp_path / "one"), made(tmp_path / "old")
    path = old.folder / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(UserError, match=r"old has schema_version=1, .* schema_version=2"):
        merge(tmp_path / "new", [one.folder, old.folder])
    assert not (tmp_path / "new").exists()


# ---- killed


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("what", ["fsync", "replace"])
def test_a_merge_killed_at_any_file_is_finished_by_the_next(
    tmp_path: Path, what: str, alone: LabelCache, writers: list[LabelCache]
) -> None:
    folders = [writer.folder for writer in writers]

    def killed_at(count: int, folder: Path) -> Callable[[], None]:
        def run() -> None:
            calls, real = [], getattr(os, what)

            def die(*arguments: object) -> None:
                calls.append(arguments)
                if len(calls) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(*arguments)

            setattr(os, what, die)
            merge(folder, folders)

        return run

    for count in range(1, 20):
        folder = tmp_path / f"{count}"
        process = multiprocessing.get_context("fork").Process(target=killed_at(count, folder))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        (merged,) = merge(folder, folders)
        assert merged.missing == [] and merged.cache.read().equals(alone.read())
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in alone.folder.iterdir())
    assert 4 < count < 19
