"""Files of a cache, one step after the other: killed, interrupted or out of space at each of them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockpilot.errors import UserError
from blockpilot.oracle import CacheKey, CacheRow, LabelCache
from blockpilot.oracle.files import remove_leftovers, write_whole

KEY = CacheKey(
    pair={"target": "t"}, prompts="0" * 64, block_sizes=(3, 4), vocab_size=64, max_new_tokens=8, temperature=0.0,
    top_p=1.0, top_k=0, seed=0, stop_token_ids=(3,), tail_mass=1e-3, store_logits=False, store_hidden=False,
    tau_convention="committed",
)  # fmt: skip

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


def collect(folder: Path) -> LabelCache:
    """Everything a run does with a cache, without the models: opened, its missing shards written, finished."""
    cache = LabelCache(folder, KEY, 3, 2)
    for shard in cache.missing():
        rows = [CacheRow(f"p{i}", i, "d", [i], [5] * 8, [3, 4], [[2, 1], [3]], [9], [0.5], 0)
                for i in cache.rows_of(shard)]  # fmt: skip
        cache.write(shard, rows, skipped=0, seconds=1.0, device="cpu")
    cache.finish()
    return cache


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".*")]


def shards(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*.parquet")}


# ---- a fault at every step

# what Python tells its audit hooks before it does it; opening counts where it is for writing
CHANGES = ("os.mkdir", "open", "os.link", "os.rename", "os.remove")


def before_every_change(folder: Path, step: Callable[[str], None]) -> None:
    """Calls ``step(what)`` before every change of a file under ``folder``, until this process ends."""
    sync = os.fsync

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and not reads and str(folder) in str(arguments[0]):
            step(event)

    def fsync(handle: int) -> None:
        step("fsync")
        sync(handle)

    os.fsync = fsync
    sys.addaudithook(look)


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a process that does ``work``: 0, 2 for an error told in one line, 130 for an interrupt."""

    def run() -> None:
        try:
            work()
        except UserError as error:
            told = ["cache_dir: ", "No space left on device"]
            sys.exit(2 if all(words in str(error) for words in told) and "\n" not in str(error) else 3)
        except KeyboardInterrupt:
            sys.exit(130)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def steps_of_a_run(root: Path) -> list[str]:
    """What a run changes, in order."""
    log = root / "log"

    def note(what: str) -> None:
        with log.open("a") as file:
            file.write(f"{what}\n")

    def work() -> None:
        before_every_change(root / "counted", note)
        collect(root / "counted/cache")

    assert in_child(work) == 0
    return log.read_text().splitlines()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted() -> None:
    raise KeyboardInterrupt


def out_of_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@needs_fork
@pytest.mark.parametrize(("fault", "code"), [(killed, -signal.SIGKILL), (interrupted, 130), (out_of_space, 2)])
def test_a_fault_at_any_step_loses_the_shard_in_progress_alone(
    tmp_path: Path, fault: Callable[[], None], code: int
) -> None:
    whole = collect(tmp_path / "whole").read()
    steps = steps_of_a_run(tmp_path)
    assert set(steps) == {*CHANGES, "fsync"} and len(steps) > 15
    # on disk before it has its name, and the name on disk before the next file
    for place, what in enumerate(steps):
        assert what not in ("os.link", "os.rename") or steps[place - 1] == "fsync" == steps[place + 2]
    for place, what in enumerate(steps):
        if fault is out_of_space and what == "os.remove":
            continue  # this needs no space
        folder, passed = tmp_path / f"at-{place}/cache", []

        def step(found: str, place: int = place, passed: list[str] = passed) -> None:
            passed.append(found)
            if len(passed) == place + 1:
                fault()

        def work(folder: Path = folder, step: Callable[[str], None] = step) -> None:
            before_every_change(folder.parent, step)
            collect(folder)

        assert in_child(work) == code, (place, what)
        assert fault is not out_of_space or hidden(folder) == []
        there = shards(folder)
        cache = collect(folder)
        assert cache.read().equals(whole), (place, what)
        assert there.items() <= shards(folder).items() and len(shards(folder)) == 2
        assert hidden(folder) == [], (place, what)
        assert cache.manifest["provenance"]["seconds"] == 2.0


# ---- pieces


def test_pieces_of_writers_that_run_stay(tmp_path: Path) -> None:
    node = platform.node()
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_whole(tmp_path / "shard-0", lambda file: file.write(b"1"))
    running = [f".shard-1.{node}.{os.getppid()}.0", f".shard-1.{node}x.{gone.pid}.0", ".shard-1.parquet", "manifest"]
    ended = [f".shard-1.{node}.{gone.pid}.0", f".manifest.json.{node}.{gone.pid}.0", f".shard-1.{node}.{2**70}.0",
             f".shard-1.{node}.{os.getpid()}.0"]  # fmt: skip
    for name in running + ended:
        (tmp_path / name).touch()
    mine = []
    write_whole(tmp_path / "shard-2", lambda file: mine.append(remove_leftovers(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["shard-0", "shard-2", *running])


def test_the_faster_writer_wins_where_that_is_asked_for(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", lambda file: file.write(b"first"), keep_existing=True)
    write_whole(tmp_path / "file", lambda file: file.write(b"second"), keep_existing=True)
    assert (tmp_path / "file").read_bytes() == b"first"
    write_whole(tmp_path / "file", lambda file: file.write(b"third"))
    assert (tmp_path / "file").read_bytes() == b"third"
    assert hidden(tmp_path) == []


def test_a_folder_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(UserError, match=r"^cache_dir: .*/file cannot be written: Is a directory; what was stored"):
        write_whole(tmp_path / "file", lambda file: file.write(b"1"))
    assert hidden(tmp_path) == []


# ---- permissions


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may reach; files in it that are not for others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        folder = Path(name) / "cache"
        collect(folder)
        for path in [folder, *folder.iterdir()]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
        folder.chmod(0o755)


def told_to_another_user(folder: Path, tmp_path: Path) -> str:
    """What the error of a run says that is no administrator's; empty if there is none."""

    def run() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            collect(folder)
        except UserError as error:
            os.write(answer, str(error).encode())

    answer = os.open(tmp_path / "answer", os.O_WRONLY | os.O_CREAT)
    assert in_child(run) == 0
    os.close(answer)
    return (tmp_path / "answer").read_text()


@needs_fork
def test_a_finished_cache_needs_no_right_to_write(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o555)
    assert told_to_another_user(folder, tmp_path) == ""


@needs_fork
def test_a_folder_that_takes_no_file(folder: Path, tmp_path: Path) -> None:
    (folder / "shard-00001-of-00002.parquet").unlink()
    folder.chmod(0o555)
    told = told_to_another_user(folder, tmp_path)
    assert told.startswith(f"cache_dir: {folder}/shard-00001-of-00002.parquet cannot be written: Permission denied;")
    assert "\n" not in told


@needs_fork
@pytest.mark.parametrize("name", ["shard-00000-of-00002.parquet", "manifest.json"])
def test_a_file_that_may_not_be_read_is_told_and_not_made_anew(folder: Path, tmp_path: Path, name: str) -> None:
    before = shards(folder)
    (folder / name).chmod(0)
    told = told_to_another_user(folder, tmp_path)
    assert told.startswith("cache_dir: ") and told.endswith(f"{folder}/{name} cannot be read: Permission denied")
    assert shards(folder) == before


@needs_fork
def test_a_folder_that_may_not_be_entered(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0)
    assert told_to_another_user(folder, tmp_path) == f"cache_dir: {folder} cannot be made: Permission denied"
