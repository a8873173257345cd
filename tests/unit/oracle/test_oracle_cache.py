"""The cache on disk: what comes back, what names it, and what happens to damaged files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from blockpilot.errors import UserError
from blockpilot.oracle import CacheKey, CacheRow, LabelCache, LabelTable, concatenate
from blockpilot.oracle.shards import ContentDigest, table_of

PAIR = {"target": "sha256:t", "drafter": "sha256:d", "dtype": "float32", "thinking": "false"}


def key(**changes: Any) -> CacheKey:
    values: dict[str, Any] = {
        "pair": PAIR, "prompts": "0123456789abcdef" * 4, "block_sizes": (3, 4, 5), "vocab_size": 64,
        "max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "stop_token_ids": (3,),
        "tail_mass": 1e-3, "store_logits": False, "store_hidden": False, "tau_convention": "committed",
    } | changes  # fmt: skip
    return CacheKey(**values)


def row(index: int, **changes: Any) -> CacheRow:
    lengths = [[2, 1, 4], [3, 4], [index + 1, 5]]
    values: dict[str, Any] = {
        "prompt_id": f"p{index}", "prompt_key": -(2**63) + index, "dataset": f"set{index % 2}",
        "prompt_tokens": list(range(index + 1)), "output_tokens": [5] * 8, "block_sizes": [3, 4, 5],
        "acceptance_lengths": lengths, "distribution_ids": [9, index, 60][: index % 3 + 1],
        "distribution_probs": [0.5, 0.25, 0.125][: index % 3 + 1], "seed": 0,
    } | changes  # fmt: skip
    return CacheRow(**values)


def write(cache: LabelCache, shard: int, rows: list[CacheRow] | None = None, skipped: int = 0) -> None:
    rows = [row(i) for i in cache.rows_of(shard)] if rows is None else rows
    cache.write(shard, rows, skipped=skipped, seconds=1.5, device="cpu")


def assert_equal(one: LabelTable, other: LabelTable) -> None:
    assert (one.prompt_ids, one.datasets, one.block_sizes) == (other.prompt_ids, other.datasets, other.block_sizes)
    assert one.distributions.vocab_size == other.distributions.vocab_size
    tensors = ["prompt_keys", "committed_tokens", "rounds", "logits", "hidden", "prompts.offsets", "prompts.token_ids"]
    for name in [*tensors, *(f"distributions.{part}" for part in ("offsets", "token_ids", "probs"))]:
        left, right = (attrgetter(name)(table) for table in (one, other))
        if left is None or right is None:
            assert left is right, name
        else:
            assert left.dtype == right.dtype and torch.equal(left, right), name


def full(folder: Path, rows: int = 7, shard_size: int = 3, **changes: Any) -> LabelCache:
    cache = LabelCache(folder, key(**changes), rows, shard_size)
    for shard in range(cache.num_shards):
        write(cache, shard)
    return cache


def test_round_trip_to_tensors(tmp_path: Path) -> None:
    cache = full(tmp_path / "cache")
    assert (cache.num_shards, cache.missing()) == (3, [])
    assert [list(cache.rows_of(shard)) for shard in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    table = cache.load()
    assert table.prompt_ids == tuple(f"p{i}" for i in range(7))
    assert table.datasets == ("set0", "set1", "set0", "set1", "set0", "set1", "set0")
    assert table.prompt_keys.tolist() == [-(2**63) + i for i in range(7)]
    assert [table.prompts.row(i) for i in range(7)] == [list(range(i + 1)) for i in range(7)]
    assert table.block_sizes == (3, 4, 5)
    assert table.committed_tokens.tolist() == [[7, 7, i + 6] for i in range(7)]
    assert table.rounds.tolist() == [[3, 2, 2]] * 7
    assert table.tau[2].tolist() == pytest.approx([7 / 3, 3.5, 4.0])
    assert table.distributions.offsets.tolist() == [0, 1, 3, 6, 7, 9, 12, 13]
    assert table.distributions.token_ids.tolist() == [9, 9, 1, 9, 2, 60, 9, 9, 4, 9, 5, 60, 9]
    assert table.distributions.probs.tolist() == [
        0.5,
        0.5,
        0.25,
        0.5,
        0.25,
        0.125,
        0.5,
        0.5,
        0.25,
        0.5,
        0.25,
        0.125,
        0.5,
    ]
    assert table.distributions.vocab_size == 64
    assert table.logits is None and table.hidden is None


def test_prompts_without_rounds_have_no_tau(tmp_path: Path) -> None:
    cache = LabelCache(tmp_path / "cache", key(), 3, 8)
    write(cache, 0, [row(0), row(1, acceptance_lengths=[[], [], []], output_tokens=[3]), row(2)])
    table = cache.load()
    assert table.committed_tokens.tolist() == [[7, 7, 6], [0, 0, 0], [7, 7, 8]]
    assert table.rounds[1].tolist() == [0, 0, 0]
    assert all(math.isnan(tau) for tau in table.tau[1].tolist())


def test_dense_columns(tmp_path: Path) -> None:
    cache = LabelCache(tmp_path / "cache", key(store_logits=True, store_hidden=True), 2, 1)
    for i in range(2):
        write(cache, i, [row(i, logits=[float(i), 1.5, -2.0], hidden=[0.25 * i])])
    table = cache.load()
    assert table.logits is not None and table.hidden is not None
    assert table.logits.tolist() == [[0.0, 1.5, -2.0], [1.0, 1.5, -2.0]] and table.hidden.tolist() == [[0.0], [0.25]]
    assert table.logits.dtype == torch.float32


def test_a_shard_of_nothing_but_skipped_prompts(tmp_path: Path) -> None:
    cache = LabelCache(tmp_path / "cache", key(), 4, 2)
    write(cache, 0, [], skipped=2)
    write(cache, 1)
    assert cache.missing() == [] and cache.skipped() == 2
    assert cache.load().prompt_ids == ("p2", "p3")
    write(cache, 1, [], skipped=2)
    with pytest.raises(UserError, match=r"holds no prompt: 4 were longer"):
        cache.load()


def test_an_incomplete_cache_cannot_be_read(tmp_path: Path) -> None:
    cache = LabelCache(tmp_path / "cache", key(), 7, 3)
    write(cache, 1)
    assert cache.missing() == [0, 2]
    with pytest.raises(UserError, match=r"lacks 2 of 3 shards, such as shard-00000-of-00003"):
        cache.load()


def test_finish_writes_the_totals_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = LabelCache(folder, key(), 4, 2, {"device": "here", "git_commit": "abc"})
    write(cache, 0, skipped=1)
    write(cache, 1, skipped=2)
    cache.finish()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["provenance"] == {"device": "here", "git_commit": "abc", "seconds": 3.0}
    assert manifest["skipped_too_long"] == 3
    assert manifest["key"]["pair.target"] == "sha256:t" and manifest["key"]["block_sizes"] == [3, 4, 5]
    LabelCache(folder, key(), 4, 2)  # still opens
    # files that a killed writer left are no shards
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "manifest.json", "shard-00000-of-00002.parquet", "shard-00001-of-00002.parquet",
    ]  # fmt: skip
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_finished_cache_is_left_as_it_is(tmp_path: Path) -> None:
    cache = full(tmp_path / "cache")
    cache.finish()
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in [cache.folder, *cache.folder.iterdir()]}
    LabelCache(tmp_path / "cache", key(), 7, 3).finish()
    cache.finish()
    after = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in [cache.folder, *cache.folder.iterdir()]}
    assert before == after
    write(cache, 1, skipped=4)
    LabelCache(tmp_path / "cache", key(), 7, 3).finish()
    assert json.loads((tmp_path / "cache/manifest.json").read_text())["skipped_too_long"] == 4


# ---- manifest

CHANGES = {
    "prompts": "f" * 64, "block_sizes": (3, 4), "vocab_size": 65, "max_new_tokens": 9, "temperature": 0.5,
    "top_p": 0.9, "top_k": 5, "seed": 1, "stop_token_ids": (3, 4), "tail_mass": 0.0, "store_logits": True,
    "store_hidden": True, "tau_convention": "reference", "schema_version": 3, "per_round": True,
}  # fmt: skip


def test_every_field_is_tried() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(CacheKey)} - {"pair"}


@pytest.mark.parametrize("name", CHANGES)
def test_another_configuration_is_refused_with_field_and_both_values(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cache"
    LabelCache(folder, key(), 7, 3)
    with pytest.raises(UserError) as caught:
        LabelCache(folder, key(**{name: CHANGES[name]}), 7, 3)
    there, wanted = (json.loads(json.dumps(v)) for v in (key().fields()[name], CHANGES[name]))
    assert f"{name}={there!r}" in str(caught.value) and f"{name}={wanted!r}" in str(caught.value)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("part", PAIR)
def test_another_pair_is_refused_with_part_and_both_values(tmp_path: Path, part: str) -> None:
    LabelCache(tmp_path / "cache", key(), 7, 3)
    with pytest.raises(UserError, match=rf"pair\.{part}='{PAIR[part]}'.*pair\.{part}='other'"):
        LabelCache(tmp_path / "cache", key(pair=PAIR | {part: "other"}), 7, 3)


@pytest.mark.parametrize("name", CHANGES)
def test_the_folder_changes_with_every_field(name: str) -> None:
    here = key().folder(Path("root"), "pair", "gsm8k-train")
    assert here == key().folder(Path("root"), "pair", "gsm8k-train")
    other = key(**{name: CHANGES[name]}).folder(Path("root"), "pair", "gsm8k-train")
    assert other != here
    # other prompts of the same settings lie side by side
    assert (other.parent == here.parent) == (name == "prompts")
    changed_pair = key(pair=PAIR | {"drafter": "other"}).folder(Path("root"), "pair", "gsm8k-train")
    assert changed_pair.parent != here.parent


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": {}}', "null"])
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "cache"
    full(folder)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest .*manifest\.json cannot be read") as caught:
        LabelCache(folder, key(), 7, 3)
    assert "\n" not in str(caught.value)


def test_the_shard_size_of_an_existing_cache_wins(tmp_path: Path) -> None:
    full(tmp_path / "cache", shard_size=3)
    again = LabelCache(tmp_path / "cache", key(), 7, 5)
    assert (again.shard_size, again.num_shards, again.missing()) == (3, 3, [])
    assert len(again.load()) == 7


# ---- damaged shards


def damaged(cache: LabelCache, caplog: pytest.LogCaptureFixture) -> list[int]:
    """What a run that opens the cache now finds; each damaged shard must be named in the log."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        missing = LabelCache(cache.folder, cache.key, cache.manifest["num_rows"], 1).missing()
    for shard in missing:
        assert f"shard {cache.path(shard).name} is damaged" in caplog.text
    return missing


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_shards_are_named(tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture) -> None:
    cache = full(tmp_path / "cache")
    content = cache.path(1).read_bytes()
    cache.path(1).write_bytes(content[: int(share * len(content))])
    assert damaged(cache, caplog) == [1]
    write(cache, 1)
    assert damaged(cache, caplog) == []
    assert cache.load().prompt_ids == tuple(f"p{i}" for i in range(7))


def test_a_damaged_shard_is_not_read(tmp_path: Path) -> None:
    cache = full(tmp_path / "cache")
    cache.path(1).write_bytes(cache.path(1).read_bytes()[:-1])
    with pytest.raises(UserError, match=r"lacks 1 of 3 shards, such as shard-00001-of-00003"):
        LabelCache(cache.folder, key(), 7, 3).load()


def test_a_file_of_zeros_and_a_foreign_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = full(tmp_path / "cache")
    cache.path(0).write_bytes(bytes(cache.path(0).stat().st_size))
    cache.path(2).write_text("PAR1 not really PAR1")
    assert damaged(cache, caplog) == [0, 2]


def test_a_shard_of_another_cache_or_place_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, warmer = full(tmp_path / "cache"), full(tmp_path / "warmer", temperature=1.0)
    cache.path(0).write_bytes(warmer.path(0).read_bytes())
    cache.path(1).write_bytes(cache.path(2).read_bytes())
    assert damaged(cache, caplog) == [0, 1]
    assert "another place or another cache" in caplog.text


def test_shards_behind_a_lost_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = full(tmp_path / "cache", rows=9, shard_size=4)
    (cache.folder / "manifest.json").unlink()
    assert LabelCache(cache.folder, key(), 9, 4).missing() == []
    (cache.folder / "manifest.json").unlink()
    other = LabelCache(cache.folder, key(), 9, 3)  # three shards too, but of other rows
    assert other.path(0) == cache.path(0)
    assert damaged(other, caplog) == [0, 1, 2]


def test_no_flipped_bit_changes_a_row_unseen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = full(tmp_path / "cache", rows=3, shard_size=3)
    good, table, loaded, seconds = cache.path(0).read_bytes(), cache.read(), cache.load(), 1.5
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    found = 0
    for place in [*range(4, footer, 5), *range(footer, len(good) - 8, 7)]:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        cache.path(0).write_bytes(bytes(bad))
        if damaged(cache, caplog) == [0]:
            found += 1
        else:  # it hit something that no row hangs on, such as a statistic
            assert cache.read().equals(table) and cache.skipped() == 0, place
            assert_equal(cache.load(), loaded)
            cache.finish()
            assert cache.manifest["provenance"]["seconds"] == seconds, place
    assert found > 100


def test_a_slower_writer_of_the_same_shard_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = full(tmp_path / "cache"), LabelCache(tmp_path / "cache", key(), 7, 3)
    rename, finished = os.replace, []

    def replace(source: Path, place: Path) -> None:
        if not finished:  # the other one comes to its end between this one's last byte and its rename
            finished.append(True)
            cache.finish()
        rename(source, place)

    monkeypatch.setattr("os.replace", replace)
    write(other, 1)
    assert finished and other.load().prompt_ids == tuple(f"p{i}" for i in range(7))


def test_a_shard_of_another_schema_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = full(tmp_path / "cache")
    pq.write_table(pa.table({"prompt_id": ["p0"]}), cache.path(0))
    assert damaged(cache, caplog) == [0]


# ---- reading in batches


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 100])
def test_batches_are_the_whole_table_in_order(tmp_path: Path, rows: int) -> None:
    cache = LabelCache(tmp_path / "cache", key(store_hidden=True), 7, 3)
    for shard in range(3):
        write(cache, shard, [row(i, hidden=[float(i), 0.5]) for i in cache.rows_of(shard)])
    batches = list(cache.batches(rows))
    assert [len(batch) for batch in batches] == [min(rows, 7 - start) for start in range(0, 7, rows)]
    assert_equal(concatenate(batches), cache.load())
    assert cache.load().distributions.token_ids.dtype == torch.int32
    batches[0].distributions.probs.zero_()  # a batch's memory is its own
    assert_equal(concatenate(list(cache.batches(rows))), cache.load())


def test_a_shard_larger_than_a_row_group_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = full(tmp_path / "whole", rows=7, shard_size=7)
    monkeypatch.setattr("blockpilot.oracle.shards.ROW_GROUP_BYTES", 300)
    parts = full(tmp_path / "parts", rows=7, shard_size=7)
    assert pq.read_metadata(parts.path(0)).num_row_groups > 2 > pq.read_metadata(whole.path(0)).num_row_groups
    assert parts.missing() == [] and parts.read().equals(whole.read())
    assert_equal(parts.load(), whole.load())
    assert [len(batch) for batch in parts.batches(4)] == [4, 3]
    assert_equal(concatenate(list(parts.batches(4))), whole.load())


def test_batches_of_nothing(tmp_path: Path) -> None:
    cache = LabelCache(tmp_path / "cache", key(), 3, 2)
    write(cache, 0, [], skipped=2)
    with pytest.raises(UserError, match=r"lacks 1 of 2 shards"):
        cache.batches(4)
    write(cache, 1, [], skipped=1)
    assert list(cache.batches(4)) == []
    with pytest.raises(UserError, match=r"rows=0 .* expected 1 or more"):
        cache.batches(0)


@pytest.mark.parametrize("row_group_bytes", [300, 2**20])
@pytest.mark.parametrize("damage", ["short", "flipped", "another shard"])
def test_no_batch_of_a_damaged_shard_is_given(
    tmp_path: Path, damage: str, row_group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockpilot.oracle.shards.ROW_GROUP_BYTES", row_group_bytes)
    cache = full(tmp_path / "cache", rows=9, shard_size=3)
    good, other = cache.path(1).read_bytes(), cache.path(2).read_bytes()
    flipped = bytearray(good)
    flipped[good.index(b"p4")] ^= 1  # a prompt's id
    cache.path(1).write_bytes({"short": good[:-9], "flipped": bytes(flipped), "another shard": other}[damage])
    given = []
    with pytest.raises(UserError, match=r"shard-00001-of-00003\.parquet is damaged \(.*\); .*collect rebuilds it"):
        given.extend(batch.prompt_ids for batch in LabelCache.existing(cache.folder).batches(1))
    assert given == [("p0",), ("p1",), ("p2",)]
    for read in (LabelCache.existing(cache.folder).read, LabelCache.existing(cache.folder).load):
        with pytest.raises(UserError, match=r"lacks 1 of 3 shards, such as shard-00001-of-00003"):
            read()


def test_the_wide_columns_are_not_stored_as_they_stand(tmp_path: Path) -> None:
    """Bytes of a row of 2,000 shuffled tokens with falling probabilities: 8 per token as numbers, about 5 stored."""
    cache, generator = LabelCache(tmp_path / "cache", key(vocab_size=49_152), 64, 64), torch.Generator().manual_seed(0)
    rows = []
    for i in range(64):
        probs = (2.5 * torch.randn(2000, generator=generator)).softmax(0).sort(descending=True).values
        ids = torch.randperm(49_152, generator=generator)[:2000]
        rows.append(row(i, distribution_ids=ids.tolist(), distribution_probs=probs.tolist()))
    write(cache, 0, rows)
    assert cache.path(0).stat().st_size / (64 * 2000) < 5.5
    assert cache.load().distributions.token_ids.tolist() == [token for one in rows for token in one.distribution_ids]


# ---- numbers that do not fit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"acceptance_lengths": [[2], [2**15], [3]]}, "acceptance_lengths holds 32768, .* from -32768 to 32767"),
        ({"distribution_ids": [1, 2**31]}, "distribution_ids holds 2147483648, .* to 2147483647"),
        ({"distribution_ids": np.array([1, 2**31])}, "distribution_ids holds 2147483648"),
        ({"prompt_tokens": [-(2**40)]}, "prompt_tokens holds -1099511627776"),
        ({"output_tokens": [2**63]}, "output_tokens holds 9223372036854775808"),
        ({"acceptance_table": [1, 2**15]}, "acceptance_table holds 32768"),
        ({"prompt_key": 2**63}, "prompt_key holds"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    cache = LabelCache(tmp_path / "cache", key(), 2, 2)
    with pytest.raises(UserError, match=rf"prompt 'p1' cannot be stored: {words}") as caught:
        write(cache, 0, [row(0), row(1, **changes)])
    assert "\n" not in str(caught.value)
    assert cache.missing() == [0] and [path.name for path in cache.folder.iterdir()] == ["manifest.json"]


def test_arrays_are_stored_as_lists_are(tmp_path: Path) -> None:
    plain, arrays = LabelCache(tmp_path / "plain", key(), 1, 1), LabelCache(tmp_path / "arrays", key(), 1, 1)
    one = row(2)
    write(plain, 0, [one])
    names = ("prompt_tokens", "output_tokens", "distribution_ids", "distribution_probs")
    write(arrays, 0, [dataclasses.replace(one, **{name: np.array(getattr(one, name)) for name in names})])
    assert plain.read().equals(arrays.read())


# ---- the digest of a shard's rows


def digest_of(rows: list[CacheRow], groups: tuple[int, ...] = (9,)) -> str:
    table, digest, start = table_of(rows), ContentDigest({"shard": 1}), 0
    for count in groups:
        digest.add(table.slice(start, count))
        start += count
    return digest.value()


def digest_rows() -> list[CacheRow]:
    return [row(i, prompt_id=f"p{i}" * i, hidden=None if i % 3 else [1.0] * i) for i in range(9)]


@pytest.mark.parametrize("groups", [(1, 8), (4, 0, 5), (2, 3, 4), (1,) * 9])
def test_row_groups_do_not_change_the_digest(groups: tuple[int, ...]) -> None:
    assert digest_of(digest_rows(), groups) == digest_of(digest_rows())


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize(
    "changes",
    [{"prompt_id": "p"}, {"seed": 1}, {"hidden": [2.0]}, {"hidden": []}, {"hidden": None}, {"dataset": ""},
     {"acceptance_lengths": [[2], [3], [4]]}, {"acceptance_table": [1]}, {"distribution_probs": [0.25]}],
)  # fmt: skip
def test_whatever_changes_a_row_changes_the_digest(changes: dict[str, Any], place: int) -> None:
    rows = digest_rows()
    changed = dataclasses.replace(rows[place], **changes)
    assert (digest_of([*rows[:place], changed, *rows[place + 1 :]]) == digest_of(rows)) == (changed == rows[place])
