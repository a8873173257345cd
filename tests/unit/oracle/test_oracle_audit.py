"""Looking through caches: collected ones are whole, and whatever cannot be is named with its shard and prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockpilot.config import CollectConfig, GenerationConfig, OracleConfig
from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.oracle import CacheKey, CacheRow, LabelCache, fill, open_cache
from blockpilot.oracle.audit import CacheState, find_caches, inspect_cache
from blockpilot.prompts import PromptRow
from blockpilot.report.caches import verify_lines
from tests.toy import make_pair, make_prompts, make_target, word

KEY = CacheKey(
    pair={"target": "t"}, prompts="0" * 64, block_sizes=(3, 4), vocab_size=64, max_new_tokens=8, temperature=0.0,
    top_p=1.0, top_k=0, seed=5, stop_token_ids=(3,), tail_mass=1e-3, store_logits=False, store_hidden=False,
    tau_convention="committed",
)  # fmt: skip


def row(index: int, **changes: Any) -> CacheRow:
    prompt = [index, 9]
    values: dict[str, Any] = {
        "prompt_id": f"p{index}", "prompt_key": signed_prompt_key(prompt), "dataset": "d", "prompt_tokens": prompt,
        "output_tokens": [5] * 6, "block_sizes": [3, 4], "acceptance_lengths": [[3, 2], [4, 1]],
        "distribution_ids": [7, index, 60], "distribution_probs": [0.5, 0.25, 0.25], "seed": 5,
    } | changes  # fmt: skip
    return CacheRow(**values)


def made(folder: Path, key: CacheKey = KEY, shard_1: list[CacheRow] | None = None, skipped: int = 0) -> LabelCache:
    """Five prompts in shards of two; the middle shard as given."""
    found = LabelCache(folder, key, 5, 2)
    for shard in range(3):
        rows = [row(i) for i in found.rows_of(shard)]
        count = skipped if shard == 1 else 0
        rows = shard_1 if shard == 1 and shard_1 is not None else rows
        found.write(shard, rows, skipped=count, seconds=1.0, device="here")
    return found


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


# ---- caches that are as they should be


@cache
def pair() -> Pair:
    return make_pair(target=make_target(layers=3, max_positions=40))


@pytest.mark.parametrize(
    ("oracle", "temperature"),
    [
        (OracleConfig(radius=1), 0.0),
        (OracleConfig(radius=1, tail_mass=0.0), 1.0),
        (OracleConfig(radius=1, tau_convention="reference"), 1.0),
        (OracleConfig(block_sizes=[2, 7], store_logits=True, store_hidden=True, per_round=True), 1.0),
    ],
)
def test_what_was_collected_is_whole(tmp_path: Path, oracle: OracleConfig, temperature: float) -> None:
    texts = [" ".join(map(word, prompt)) for prompt in make_prompts([3, 1, 2, 30, 2, 36], seed=1)]
    prompts = [PromptRow(f"r{i}", "d", (text,) * (1 + i % 3)) for i, text in enumerate(texts)]  # some turns do not fit
    generation, collect = GenerationConfig(max_new_tokens=7, temperature=temperature), CollectConfig(shard_size=2)
    found = open_cache(tmp_path, "toy", pair(), prompts, generation, oracle, collect)
    fill(found, pair(), prompts, generation, oracle, collect)
    before = contents(tmp_path)
    state = inspect_cache(found.folder)
    assert state.is_whole, list(verify_lines(state))
    table = found.load()
    assert (state.rows, state.total("skipped")) == (len(table), found.skipped()) and found.skipped() > 0
    assert state.total("nonzeros") == len(table.distributions.probs)
    assert state.tau == pytest.approx(dict(zip(table.block_sizes, table.tau.nanmean(0).tolist(), strict=True)))
    assert state.total("bytes") == sum(path.stat().st_size for path in found.folder.glob("*.parquet"))
    assert contents(tmp_path) == before


# ---- shards that are not there, or no longer


def test_missing_and_damaged_shards_are_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    found = made(tmp_path)
    found.path(0).unlink()
    found.path(2).write_bytes(found.path(2).read_bytes()[:-7])
    before = contents(tmp_path)
    state = inspect_cache(tmp_path)
    assert [shard.kind for shard in state.shards] == ["missing", "whole", "damaged"]
    first, *others = verify_lines(state)
    assert first == f"{tmp_path}: NOT whole; 1 of 3 shards whole, 1 missing, 1 damaged, 2 rows, 0 skipped"
    assert others[0] == "  shard-00000-of-00003.parquet is missing; collect makes it"
    assert others[1].startswith("  shard-00002-of-00003.parquet is damaged (") and "collect rebuilds it" in others[1]
    assert len(others) == 2 and contents(tmp_path) == before
    assert found.missing() == [0, 2]  # what collect will make


def test_a_cache_without_any_shard(tmp_path: Path) -> None:
    LabelCache(tmp_path, KEY, 5, 2)
    state = inspect_cache(tmp_path)
    assert (state.rows, state.kinds["missing"], state.is_whole) == (0, 3, False)
    assert all(np.isnan(list(state.tau.values())))


# ---- rows that cannot be, though they are as they were written

REFERENCE = replace(KEY, tau_convention="reference")
LOGITS, HIDDEN = replace(KEY, store_logits=True), replace(KEY, store_hidden=True)
PER_ROUND = replace(KEY, per_round=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"acceptance_lengths": [[3, 2], [4, 2]]}, "1 + its acceptance lengths is not the number of its output tokens"),
        ({"acceptance_lengths": [[3, 2], []]}, "1 + its acceptance lengths is not the number of its output tokens"),
        ({"acceptance_lengths": [[4, 1], [4, 1]]}, "an acceptance length is not between 1 and its block size"),
        ({"acceptance_lengths": [[3, 2, 0], [4, 1]]}, "an acceptance length is not between 1 and its block size"),
        ({"acceptance_lengths": [[3, 2]]}, "its block sizes are not [3, 4]"),
        ({"block_sizes": [3, 5]}, "its block sizes are not [3, 4]"),
        ({"block_sizes": [3]}, "its block sizes are not [3, 4]"),
        ({"output_tokens": [5] * 9}, "its output is longer than 8 tokens"),
        ({"output_tokens": []}, "output_tokens is empty"),
        ({"output_tokens": [5] * 5 + [64]}, "output_tokens leaves [0, 64)"),
        ({"prompt_tokens": [3, -1]}, "prompt_tokens leaves [0, 64)"),
        ({"distribution_ids": [7, 2, 64]}, "distribution_ids leaves [0, 64)"),
        ({"distribution_ids": [-1, 2, 7]}, "distribution_ids leaves [0, 64)"),
        ({"distribution_ids": [7, 2, 7]}, "a token is there twice"),
        ({"distribution_ids": [7, 2]}, "it has not as many probabilities as tokens"),
        ({"distribution_ids": [], "distribution_probs": []}, "distribution_ids is empty"),
        ({"distribution_probs": [0.5, 0.2, 0.3]}, "its probabilities are not sorted, falling"),
        ({"distribution_probs": [0.5, 0.25, 0.24]}, "its mass is not between 0.999 and 1"),
        ({"distribution_probs": [0.6, 0.25, 0.25]}, "its mass is not between 0.999 and 1"),
        ({"distribution_probs": [1.25, 0.0, -0.25]}, "a probability is not in (0, 1]"),
        ({"distribution_probs": [float("nan"), 0.25, 0.25]}, "a probability is not in (0, 1]"),
        ({"seed": 6}, "its seed is not 5"),
        ({"prompt_key": 1}, "its key is not that of its tokens"),
        ({"hidden": [1.0]}, "hidden is there"),
    ],
)
def test_a_row_that_cannot_be_is_told(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert inspect_cache(made(tmp_path / "good").folder).is_whole
    state = inspect_cache(made(tmp_path / "bad", shard_1=[row(2), row(3, **changes)]).folder)
    assert [shard.kind for shard in state.shards] == ["whole", "wrong", "whole"] and not state.is_whole
    line = list(verify_lines(state))[1]
    assert "shard-00001-of-00003.parquet is wrong (" in line and f"prompt 'p3': {words}" in line
    assert "remove it, then collect makes it again" in line
    assert made(tmp_path / "bad").missing() == []  # collect alone would not


@pytest.mark.parametrize(
    ("key", "good", "bad", "words"),
    [
        (LOGITS, {"logits": [0.0] * 64}, {}, "logits is missing"),
        (LOGITS, {"logits": [0.0] * 64}, {"logits": [0.0] * 63}, "it has not 64 logits"),
        (HIDDEN, {"hidden": [0.0] * 4}, {"hidden": [0.0] * 3}, "its hidden state is not as long as the others"),
        (PER_ROUND, {"acceptance_table": [1] * 10}, {"acceptance_table": [1] * 9}, "its acceptance table has not the "),
        (PER_ROUND, {"acceptance_table": [1] * 10}, {"acceptance_table": [1] * 9 + [0]}, "an entry of its acceptance "),
        (PER_ROUND, {"acceptance_table": [1] * 10}, {"acceptance_table": [1] * 9 + [2]}, "an entry of its acceptance "),
        (PER_ROUND, {"acceptance_table": [1] * 10}, {"acceptance_table": [9] + [1] * 9}, "an entry of its acceptance "),
        (REFERENCE, {"acceptance_lengths": [[3, 3], [4, 4]]}, {"acceptance_lengths": [[3, 1], [4, 4]]},
         "1 + its acceptance lengths is below the number of its output tokens"),
    ],
)  # fmt: skip
def test_what_only_some_keys_ask_for(
    tmp_path: Path, key: CacheKey, good: dict[str, Any], bad: dict[str, Any], words: str
) -> None:
    for name, last in (("good", good), ("bad", bad)):
        found = LabelCache(tmp_path / name, key, 2, 2)
        found.write(0, [row(0, **good), row(1, **last)], skipped=0, seconds=1.0, device="here")
    assert inspect_cache(tmp_path / "good").is_whole
    (shard,) = inspect_cache(tmp_path / "bad").shards
    assert shard.kind == "wrong" and f"prompt 'p1': {words}" in shard.problem


def test_several_rows_and_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockpilot.oracle.shards.ROW_GROUP_BYTES", 1)
    assert inspect_cache(made(tmp_path / "good").folder).is_whole
    state = inspect_cache(made(tmp_path / "bad", shard_1=[row(2), row(3, seed=1)]).folder)
    assert "prompt 'p3': its seed is not 5" in state.shards[1].problem
    monkeypatch.undo()
    state = inspect_cache(made(tmp_path / "both", shard_1=[row(2, seed=1), row(3, seed=1)]).folder)
    assert "prompt 'p2' and others: its seed is not 5" in state.shards[1].problem


# ---- rows against prompts


@pytest.mark.parametrize(
    ("names", "skipped", "whole"),
    [
        (["p2", "p3"], 0, True),
        (["p2"], 1, True),  # one prompt too long
        (["p2#0", "p2#1", "p3"], 0, True),
        (["p2#0"], 3, True),  # the second turn of one, and both turns of another
        ([], 2, True),
        (["p2"], 0, False),
        ([], 1, False),
        (["p2#0", "p2#1"], 0, False),
        (["p2", "p3", "p9"], 0, False),
    ],
)
def test_rows_are_counted_against_prompts(tmp_path: Path, names: list[str], skipped: int, whole: bool) -> None:
    state = inspect_cache(made(tmp_path, shard_1=[row(2, prompt_id=name) for name in names], skipped=skipped).folder)
    assert state.is_whole == whole
    assert whole or f"samples of {len({n[:2] for n in names})} prompts and skipped {skipped}" in state.shards[1].problem


def test_a_prompt_id_that_is_there_twice(tmp_path: Path) -> None:
    def lines(state: CacheState) -> list[str]:
        assert not state.is_whole
        return list(verify_lines(state))

    (_, across) = lines(inspect_cache(made(tmp_path / "across", shard_1=[row(0), row(3)]).folder))
    assert "1 prompt ids are there twice, such as 'p0' in shard-00000-of-00003" in across and "shard-00001-of" in across
    turns = [row(2, prompt_id="p2#0"), row(2, prompt_id="p2#0"), row(3)]
    (_, inside) = lines(inspect_cache(made(tmp_path / "inside", shard_1=turns).folder))
    assert "'p2#0' in shard-00001-of-00003.parquet and shard-00001-of-00003.parquet" in inside


def test_totals_that_do_not_fit_the_shards(tmp_path: Path) -> None:
    found = made(tmp_path)
    found.finish()
    assert inspect_cache(tmp_path).is_whole
    found.write(1, [row(2)], skipped=1, seconds=1.0, device="here")
    (problem,) = inspect_cache(tmp_path).problems
    assert "says that 0 samples were skipped, the shards say 1" in problem
    LabelCache.existing(tmp_path).finish()  # as collect does
    assert inspect_cache(tmp_path).is_whole


# ---- which caches


def test_caches_below_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("b/two", "a/one", "a/three"):
        made(tmp_path / name)
    assert find_caches(tmp_path) == [tmp_path / name for name in ("a/one", "a/three", "b/two")]
    assert find_caches(tmp_path / "a") == [tmp_path / "a/one", tmp_path / "a/three"]
    assert find_caches(tmp_path / "b/two") == [tmp_path / "b/two"]


def test_where_there_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no cache in .*empty or below; .*manifest\.json"):
        find_caches(tmp_path / "empty")
    for name in ("nowhere", "file"):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=rf"{name} is no folder"):
            find_caches(tmp_path / name)


@pytest.mark.parametrize(("version", "words"), [(1, "schema_version=1"), (3, "schema_version=3")])
def test_another_schema_version_is_told_with_both(tmp_path: Path, version: int, words: str) -> None:
    made(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 2', f'"schema_version": {version}'))
    for opening in (lambda: inspect_cache(tmp_path), lambda: LabelCache(tmp_path, KEY, 5, 2)):
        with pytest.raises(UserError, match=rf"{words}, .* reads and writes schema_version=2; collect again") as caught:
            opening()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"top_k": 0', '"top_k": "none"', "top_k"),
        ('"top_k": 0', '"top_kk": 0', "top_k"),
        ('"schema_version": 2', '"version": 2', "'schema_version' is missing"),
        ('"num_rows": 5', '"num_rows": -5', "num_rows"),
        ('"key": {', '"key": 3, "x": {', "cannot be read"),
    ],
)
def test_a_manifest_that_makes_no_sense(tmp_path: Path, old: str, new: str, words: str) -> None:
    made(tmp_path)
    path = tmp_path / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"manifest\.json cannot be read \(.*{words}|{words} \(") as caught:
        inspect_cache(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_shard_that_the_system_does_not_let_be_read(tmp_path: Path) -> None:
    found = made(tmp_path)
    found.path(1).unlink()
    found.path(1).mkdir()
    state = inspect_cache(tmp_path)
    assert state.shards[1].kind == "closed" and "Is a directory" in state.shards[1].problem
    assert "2 of 3 shards whole, 1 closed" in next(verify_lines(state))
