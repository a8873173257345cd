"""Collection under kills, damage, full disks and company: always the rows of an undisturbed run, and none made twice.

Runs are the real :func:`blockpilot.runs.collect.collect` on the embedded pair, in processes forked from a server that
has loaded the libraries and nothing else; where the exit code or the printed line matters, the real command.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

from blockpilot.config import CONF_DIR, CollectRunConfig, to_dataclass
from blockpilot.errors import UserError
from blockpilot.models import Pair
from blockpilot.oracle import LabelCache
from blockpilot.runs.collect import collect
from blockpilot.runs.labels import Labels, read_sources

from .conftest import ROOT, Finished

Run = Callable[..., Finished]

# seven shards of at most two rows: five of tiny-train, two of tiny-test
SMALL = ["dataset.tiny.train.limit=9", "dataset.tiny.test.limit=4", "generation.max_new_tokens=6",
         "collect.shard_size=2", "oracle.radius=1", "device=cpu"]  # fmt: skip
SHARDS = 7
SEED = 20
KILLS = 20

needs_a_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")


def configured(cache_dir: Path, *overrides: str) -> CollectRunConfig:
    """What ``python -m blockpilot.collect OVERRIDES`` reads; they win over those of ``SMALL``."""
    return replace(composed(tuple(SMALL), overrides), cache_dir=str(cache_dir))


@cache
def composed(first: tuple[str, ...], then: tuple[str, ...]) -> CollectRunConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(compose("collect", [*first, *then]), CollectRunConfig)


@pytest.fixture(scope="session")
def server() -> ForkServerContext:
    """Forks processes that have the libraries and no thread of torch yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.integration.warm"])
    return context


def started(server: ForkServerContext, config: CollectRunConfig) -> BaseProcess:
    """A process that collects, with an output folder of its own."""
    output = tempfile.mkdtemp(prefix="run-", dir=Path(config.cache_dir).parent)
    process = server.Process(target=collect, args=(config, Path(output)))
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    process.join(200)
    return process.exitcode


# ---- what is on disk


def shards(cache_dir: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every shard."""
    found = sorted(cache_dir.rglob("shard-*.parquet"))
    return {str(path.relative_to(cache_dir)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def everything(cache_dir: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file and folder."""
    paths = [cache_dir, *cache_dir.rglob("*")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def rows(cache_dir: Path) -> dict[str, pa.Table]:
    """Every shard's rows, by its path."""
    found = sorted(cache_dir.rglob("shard-*.parquet"))
    return {str(path.relative_to(cache_dir)): pq.ParquetFile(path).read().replace_schema_metadata() for path in found}


def assert_complete(cache_dir: Path, whole: Path) -> None:
    """The rows of an undisturbed run, shard by shard, with nothing beside them."""
    there, expected = rows(cache_dir), rows(whole)
    assert there.keys() == expected.keys()
    assert all(there[name].equals(expected[name]) for name in expected)
    files = {str(path.relative_to(cache_dir)) for path in cache_dir.rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    for manifest in cache_dir.rglob("manifest.json"):
        assert "skipped_too_long" in manifest.read_text()


@pytest.fixture(scope="session")
def whole(server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caches of an undisturbed run; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    assert ended(started(server, configured(folder))) == 0
    assert len(shards(folder)) == SHARDS
    ids = [name for table in rows(folder).values() for name in table["prompt_id"].to_pylist()]
    assert len(ids) == len(set(ids)) >= 13
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(whole, tmp_path / "cache"))


# ---- kills


def test_killed_at_random_moments(server: ForkServerContext, whole: Path, tmp_path: Path) -> None:
    """Moments are spread from the first folder a run makes to its end."""
    moments, states, duration = random.Random(SEED), [], 0.0
    for attempt in range(10 * KILLS):
        cache_dir = tmp_path / f"run-{attempt}"
        config = configured(cache_dir)
        process = started(server, config)
        while not cache_dir.exists() and process.is_alive():
            time.sleep(0.0005)
        began = time.monotonic()
        process.join(moments.uniform(0, duration) if duration else None)
        moment = time.monotonic() - began
        process.kill()
        if ended(process) == 0:  # the first is to learn how long it takes; later ones may be faster
            duration = moment
            continue
        assert process.exitcode == -signal.SIGKILL
        before = shards(cache_dir)
        print(f"seed {SEED}: killed after {moment:.4f} of {duration:.4f} seconds with {len(before)} shards")
        assert ended(started(server, config)) == 0
        assert_complete(cache_dir, whole)
        # the rerun made those that were missing, and no other
        assert before.items() <= shards(cache_dir).items()
        states.append(len(before))
        if len(states) == KILLS:
            break
    assert len(states) == KILLS and len(set(states)) > 3, states


def test_killed_between_the_last_shard_and_the_end(copied: Path, whole: Path, tmp_path: Path) -> None:
    for manifest in copied.rglob("manifest.json"):
        content = json.loads(manifest.read_text())
        del content["skipped_too_long"], content["provenance"]["seconds"]
        manifest.write_text(json.dumps(content))
        (manifest.parent / f".manifest.json.{platform.node()}.{2**40}.0").touch()
    before = shards(copied)
    collect(configured(copied), tmp_path)
    assert_complete(copied, whole)
    assert shards(copied) == before


# ---- company


@pytest.mark.parametrize("shares", [("0/1", "0/1"), ("0/2", "1/2")], ids=" ".join)
def test_several_collectors_at_once(
    server: ForkServerContext, whole: Path, tmp_path: Path, shares: tuple[str, ...]
) -> None:
    for attempt in range(2):
        cache_dir = tmp_path / str(attempt)
        configs = [configured(cache_dir, f"collect.shard_index={share[0]}", f"collect.num_shards={share[2]}")
                   for share in shares]  # fmt: skip
        processes = [started(server, config) for config in configs]
        assert [ended(process) for process in processes] == [0] * len(shares)
        assert_complete(cache_dir, whole)


# ---- damage


def newest(cache_dir: Path) -> Path:
    return max(cache_dir.rglob("shard-*.parquet"), key=lambda path: path.stat().st_mtime_ns)


def opened(cache_dir: Path, pair: Pair) -> list[LabelCache]:
    config = configured(cache_dir)
    return Labels(config, pair, read_sources(config)).caches


def missing(caches: Sequence[LabelCache]) -> list[Path]:
    """Shards that a run would make now; what these caches have seen themselves does not count."""
    again = [LabelCache(c.folder, c.key, c.manifest["num_rows"], c.shard_size) for c in caches]
    return [cache.path(shard) for cache in again for shard in cache.missing()]


def assert_rebuilt(server: ForkServerContext, cache_dir: Path, whole: Path, damaged: Sequence[Path]) -> None:
    """A run makes these anew, and nothing else."""
    names = [str(path.relative_to(cache_dir)) for path in damaged]
    others = {name: state for name, state in shards(cache_dir).items() if name not in names}
    assert len(others) == SHARDS - len(names)
    assert ended(started(server, configured(cache_dir))) == 0
    assert_complete(cache_dir, whole)
    assert others.items() <= shards(cache_dir).items()


def test_the_newest_shard_cut_by_any_number_of_bytes(
    server: ForkServerContext, pair: Pair, copied: Path, whole: Path
) -> None:
    path, caches = newest(copied), opened(copied, pair)
    content = path.read_bytes()
    for cut in [*range(1, 65), len(content)]:
        path.write_bytes(content[: len(content) - cut])
        assert missing(caches) == [path], cut
    for cut in (1, 64, len(content)):
        path.write_bytes(content[: len(content) - cut])
        assert_rebuilt(server, copied, whole, [path])


def test_shards_damaged_in_many_ways(server: ForkServerContext, pair: Pair, copied: Path, whole: Path) -> None:
    caches = opened(copied, pair)
    first, second, third, fourth, fifth = paths = sorted(copied.rglob("*train*/shard-*.parquet"))
    content, places = second.read_bytes(), random.Random(SEED)
    for _ in range(40):  # in pages, headers and footer: a run must see it, or read what was written
        flipped, place = bytearray(content), places.randrange(len(content))
        flipped[place] ^= 1 << places.randrange(8)
        second.write_bytes(flipped)
        seen = missing(caches)
        assert seen == [second] or (seen == [] and caches[0].read().equals(opened(whole, pair)[0].read())), place
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 1
    second.write_bytes(flipped)
    shutil.copy(fifth, first)
    third.write_bytes(b"")
    fourth.unlink()
    assert missing(caches) == paths[:4]
    assert_rebuilt(server, copied, whole, paths[:4])


def test_a_folder_in_the_place_of_a_shard_is_told(
    server: ForkServerContext, copied: Path, whole: Path, tmp_path: Path
) -> None:
    path = newest(copied)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    before = everything(copied)
    with pytest.raises(UserError, match=rf"^cache_dir: {path} cannot be (read|written): Is a directory"):
        collect(configured(copied), tmp_path)
    assert everything(copied).keys() == before.keys() and (path / "notes.txt").read_text() == "mine"
    shutil.rmtree(path)
    assert_rebuilt(server, copied, whole, [path])


@pytest.mark.parametrize("damage", ["cut", "emptied", "folder", "other type", "other content"])
def test_a_damaged_manifest_is_told_and_costs_no_shard(copied: Path, whole: Path, tmp_path: Path, damage: str) -> None:
    manifest = next(copied.rglob("manifest.json"))
    text = manifest.read_text()
    manifest.unlink()
    if damage == "folder":
        manifest.mkdir()
    else:
        texts = {"cut": text[:-1], "emptied": "", "other type": "[1]", "other content": '{"key": {}, "num_rows": "x"}'}
        manifest.write_text(texts[damage])
    before = shards(copied)
    with pytest.raises(UserError) as caught:
        collect(configured(copied), tmp_path)
    assert f"cache manifest {manifest} cannot be read" in str(caught.value) and "\n" not in str(caught.value)
    # what the message says to do
    manifest.rmdir() if damage == "folder" else manifest.unlink()
    collect(configured(copied), tmp_path)
    assert_complete(copied, whole)
    assert shards(copied) == before


# ---- no room


@needs_a_full_device
def test_a_limit_on_file_size_is_told(run: Run, server: ForkServerContext, copied: Path, whole: Path) -> None:
    """As on a full disk: the system refuses the bytes of a shard behind its fourth kilobyte, and all of the log's."""
    path = newest(copied)
    path.unlink()
    before = everything(copied)
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));" \
              "runpy.run_module('blockpilot.collect', run_name='__main__')"  # fmt: skip
    done = run("-c", limited, *SMALL, f"cache_dir={copied}", "hydra.job_logging.handlers.file.filename=/dev/full",
               "hydra.output_subdir=null", quick=False, environment=[("OMP_NUM_THREADS", "1")])  # fmt: skip
    assert done.code == 2 and "Traceback" not in done.output and "Logging error" not in done.output, done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: cache_dir: {path} cannot be written: File too large;")
    assert everything(copied).keys() == before.keys()
    assert_rebuilt(server, copied, whole, [path])


# a disk of its own, in a namespace of its own: full, then larger
FULL_DISK = """
import shutil, subprocess, sys
from pathlib import Path
from blockpilot.errors import UserError
from tests.integration.test_cache_reliability import collect, configured, everything, shards

disk, result, output = map(Path, sys.argv[1:])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=28k", "tmpfs", str(disk)], check=True)
try:
    collect(configured(disk / "cache"), output)
except UserError as error:
    print("told:", error)
kept, files = shards(disk / "cache"), everything(disk / "cache")
print("kept:", len(kept), [name for name in files if "/." in name])
subprocess.run(["mount", "-o", "remount,size=8m", "tmpfs", str(disk)], check=True)
collect(configured(disk / "cache"), output)
print("unchanged:", kept.items() <= shards(disk / "cache").items())
shutil.copytree(disk / "cache", result)
"""


def may_mount(folder: Path) -> bool:
    command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def test_a_full_disk_is_told_and_keeps_what_it_has(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    if not may_mount(tmp_path / "disk"):
        pytest.skip("this system lets no test mount a file system")
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, tmp_path / "disk", tmp_path / "out",
         tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, kept, unchanged = [line for line in done.stdout.splitlines() if line.startswith(("told", "kept", "unch"))]
    assert told.startswith(f"told: cache_dir: {tmp_path / 'disk/cache'}/") and "/shard-" in told
    assert "cannot be written: No space left on device" in told
    assert kept in [f"kept: {count} []" for count in range(1, SHARDS)] and unchanged == "unchanged: True"
    assert_complete(tmp_path / "out", whole)


@needs_a_full_device
def test_an_output_folder_on_a_full_disk_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").symlink_to("/dev/full")
    done = run("-m", "blockpilot.collect")
    line, _hint = done.output.splitlines()
    assert done.code == 2
    assert line == f"error: hydra.run.dir: {tmp_path / 'run'} cannot be written: No space left on device"


@needs_a_full_device
def test_a_full_disk_is_told_before_the_job_begins_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run/.hydra").mkdir(parents=True)
    (tmp_path / "run/.hydra/hydra.yaml").symlink_to("/dev/full")
    done = run("-m", "blockpilot.collect")
    line, _hint = done.output.splitlines()
    assert done.code == 2
    assert line.startswith("error: hydra.run.dir: ") and line.endswith("cannot be written: No space left on device")


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_cache_dir_that_is_none(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    cache_dir = tmp_path / ("file" if place == "file" else "file/cache")
    with pytest.raises(UserError, match=rf"^cache_dir: {cache_dir}/\S* cannot be made: Not a directory$"):
        collect(configured(cache_dir), tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


# ---- interrupts


def test_an_interrupt_ends_with_one_line_and_loses_nothing(
    server: ForkServerContext, whole: Path, tmp_path: Path
) -> None:
    cache_dir = tmp_path / "cache"
    command = [sys.executable, "-m", "blockpilot.collect", *SMALL, f"cache_dir={cache_dir}",
               f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while not shards(cache_dir) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert "Traceback" not in output and "interrupted; labels and answers made so far are kept" in output
    before = shards(cache_dir)
    assert len(before) > 0
    assert not [path for path in cache_dir.rglob(".*")]
    assert ended(started(server, configured(cache_dir))) == 0
    assert_complete(cache_dir, whole)
    assert before.items() <= shards(cache_dir).items()
