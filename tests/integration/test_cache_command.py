"""The cache commands as a user runs them: what they print, what they answer with, and that looking changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from blockpilot.cache import main
from blockpilot.config import CollectConfig, GenerationConfig, OracleConfig
from blockpilot.models import Pair
from blockpilot.oracle import LabelCache, fill, open_cache
from blockpilot.prompts import PromptRow

from .conftest import ROOT

GENERATION, ORACLE = GenerationConfig(max_new_tokens=24), OracleConfig(radius=1)


@pytest.fixture(scope="module")
def writers(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Cache roots of two writers, each with its shards of the same two data sets, and of one who made all of it."""
    roots = [tmp_path_factory.mktemp(name) for name in ("first", "second", "alone")]
    for index, root in enumerate(roots):
        for name, count in (("tiny-train", 5), ("tiny-test", 3)):
            rows = [PromptRow(f"{name}{i}", "d", (f"Count from {i} to {i + 9}.",)) for i in range(count)]
            writer = CollectConfig(shard_size=2, num_shards=2 if index < 2 else 1, shard_index=index % 2)
            found = open_cache(root, name, pair, rows, GENERATION, ORACLE, writer)
            fill(found, pair, rows, GENERATION, ORACLE, writer)
    return roots


def caches(root: Path) -> list[LabelCache]:
    return [LabelCache.existing(path.parent) for path in sorted(root.rglob("manifest.json"))]


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blockpilot.cache", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_two_writers_folders_are_merged_verified_and_shown(
    writers: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, alone = writers
    before = contents(first) | contents(second)
    done = command("verify", first)
    assert done.returncode == 1 and done.stderr == ""
    test, *_, train = (line for line in done.stdout.splitlines() if line.startswith("/"))
    assert test == f"{caches(first)[0].folder}: NOT whole; 1 of 2 shards whole, 1 missing, 2 rows, 0 skipped"
    assert train.endswith("2 of 3 shards whole, 1 missing, 3 rows, 0 skipped")
    assert "  shard-00001-of-00002.parquet is missing; collect makes it" in done.stdout.splitlines()

    code, out, err = run(capsys, "merge", tmp_path / "all", first, second)
    assert (code, err) == (0, "") and [line.split(": ")[1] for line in out.splitlines()] == [
        f"{n} of {n} shards, {n} copied, 0 were there; complete" for n in (2, 3)
    ]
    assert contents(first) | contents(second) == before
    for ours, theirs in zip(caches(tmp_path / "all"), caches(alone), strict=True):
        assert ours.folder.relative_to(tmp_path / "all") == theirs.folder.relative_to(alone)
        assert ours.read().equals(theirs.read())

    before = contents(tmp_path / "all")
    code, out, err = run(capsys, "verify", tmp_path / "all")
    assert (code, err) == (0, "") and [line.split(": ")[1] for line in out.splitlines()] == [
        "whole; 2 of 2 shards whole, 3 rows, 0 skipped", "whole; 3 of 3 shards whole, 5 rows, 0 skipped",
    ]  # fmt: skip
    code, out, err = run(capsys, "show", tmp_path / "all")
    assert (code, err) == (0, "")
    for found in caches(tmp_path / "all"):
        table = found.load()
        tau = "  ".join(f"{b}: {t:.3f}" for b, t in zip(table.block_sizes, table.tau.mean(0), strict=True))
        assert str(found.folder) in out and tau in out
    for word in "bytes per row,non-zeros per row,temperature,pair.target,git_commit,seconds,float32".split(","):
        assert word in out
    assert contents(tmp_path / "all") == before


def test_damage_is_said_and_shown_and_repaired_by_a_merge(
    writers: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "merge", tmp_path / "all", *writers[:2])[0] == 0
    broken = caches(tmp_path / "all")[1]
    broken.path(1).write_bytes(broken.path(1).read_bytes()[:-30])
    broken.path(2).unlink()
    before = contents(tmp_path)
    code, out, err = run(capsys, "verify", tmp_path / "all", broken.folder)
    assert (code, err) == (1, "") and out.count(str(broken.folder)) == 1  # a cache given twice is looked at once
    assert "NOT whole; 1 of 3 shards whole, 1 missing, 1 damaged" in out
    assert "  shard-00001-of-00003.parquet is damaged (" in out and "collect rebuilds it" in out
    assert "  shard-00002-of-00003.parquet is missing; collect makes it" in out
    code, out, err = run(capsys, "show", broken.folder)
    assert (code, err) == (0, "") and "1 of 3 shards whole, 1 missing, 1 damaged" in out
    assert "is damaged (" in out and "is missing" in out and "mean tau" in out
    assert contents(tmp_path) == before

    code, out, err = run(capsys, "merge", broken.folder, caches(writers[0])[1].folder)
    assert (code, err) == (0, "") and "2 of 3 shards, 1 copied, 1 were there; still missing shard-00001-of" in out
    assert f"  {broken.path(1)} is damaged (" in out and "was not taken" in out
    assert run(capsys, "merge", tmp_path / "all", writers[1])[0] == 0
    assert run(capsys, "verify", tmp_path / "all")[0] == 0


def test_a_cache_that_cannot_be_opened_does_not_hide_the_others(
    writers: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "merge", tmp_path / "all", *writers[:2])
    old, good = caches(tmp_path / "all")
    path = old.folder / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    code, out, err = run(capsys, "verify", tmp_path / "all")
    assert (code, err) == (1, "") and f"{good.folder}: whole;" in out
    assert f"{old.folder}: NOT whole; cache {old.folder} has schema_version=1, " in out and "schema_version=2" in out
    code, out, err = run(capsys, "show", tmp_path / "all")
    assert code == 2 and str(good.folder) in out
    assert err.startswith("error: cache ") and "schema_version=1" in err and err.count("\n") == 1


def test_mistakes_are_answered_in_one_line(
    writers: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (("verify", tmp_path), "no cache in"),
        (("show", tmp_path / "nowhere"), "is no folder"),
        (("merge", tmp_path / "new", tmp_path), "no cache in"),
        (("merge", tmp_path / "new", *(found.folder for found in caches(writers[0]))), "has num_rows=5 and"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 2) and err.startswith("error: ") and words in err
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    code, out, err = run(capsys, "merge", tmp_path / "file/cache", writers[0])
    assert code == 2 and err.startswith("error: cache_dir: ") and "Not a directory" in err and err.count("\n") == 2
    for wrong in (["verify"], ["merge", "one"], ["remove", "x"], []):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
