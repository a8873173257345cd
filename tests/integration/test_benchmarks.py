"""The benchmarks run, compare what must be equal, and print a row for everything they were asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import QUICK_COLLECT, ROOT, Finished

ROWS = [
    *(f"tiny, b={b}: speed" for b in (16, 1, 4, 8, 1)),
    "tiny, b=16: policy",
    "tiny, b=16: policy of the paper's width",
    "tiny, b=16: peak memory",
    "tiny, b=16: memory growth",
]


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/decode.py", "--threads", "1", "--device", "cpu", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(find_spec("dflash") is None, reason="needs the dflash package")
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_decode_benchmark_prints_every_row() -> None:
    done = benchmark("--rows", "tiny", "--repeats", "1", "--prompts", "1", "--max-new-tokens", "24")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "---" not in line]
    assert header == ["what", "peer", "goal", "CPU fp32", "reached", "ours", "peer's", "GPU bf16"]
    assert [row[0] for row in rows] == ROWS
    assert [row[1] for row in rows] == [*["dflash"] * 4, "transformers", "", "", *["dflash"] * 2]
    for row in rows:
        found = re.fullmatch(r"(\d+\.\d\d)[x%] \((\d+\.\d\d) to (\d+\.\d\d)\)", row[3])
        assert found is not None, row
        median, low, high = map(float, found.groups())
        assert 0 < low <= median <= high
        goal = float(row[2].split()[1].rstrip("x%"))
        if abs(median - goal) > 0.005:  # the printed figure is rounded
            assert row[4] == ("yes" if (median > goal) == row[2].startswith(">=") else "no"), row
        assert row[7] == "not measured"


def test_profile_names_operators() -> None:
    done = benchmark("--profile", "tiny:4", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "aten::" in done.stdout and "Self CPU" in done.stdout


def rows_of(script: str, *arguments: str) -> list[list[str]]:
    """Cells of the table that a benchmark prints."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines][1:]


def test_oracle_benchmark_compares_labels_and_prints_every_row() -> None:
    rows = rows_of(
        "oracle.py", "--rows", "tiny", "--repeats", "1", "--prompts", "2", "--max-new-tokens", "12", "--threads", "1"
    )
    assert [row[:3] for row in rows] == [
        ["tiny", "replay over enumeration", ">= 10x"],
        ["tiny", "31 candidates over 7", "<= 4x"],
    ]
    for row in rows:
        ratio, ours, other = (float(re.split("[x ]", row[place])[0]) for place in (3, 5, 6))
        assert ratio > 0 and ours > 0 and other > 0 and row[4] in ("yes", "no")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_cache_benchmark_prints_its_goals() -> None:
    rows = rows_of("cache_reading.py", "--rows", "96", "--repeats", "1")
    goals = [row[2] for row in rows if row[2]]
    assert goals == [">= 20,000 rows/s", "<= 286 MiB"] * 2 + ["<= 20%"] * 3
    assert all(row[3] in ("yes", "no") for row in rows if row[2])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_learning_benchmark_compares_losses_and_prints_every_row() -> None:
    rows = rows_of(
        "learning.py", "--rows", "step", "steps", "choose", "overhead", "scale", "--repeats", "1", "--threads", "1",
        "--vocab-size", "4000", "--nonzeros", "100", "--width", "64", "--prompts", "1", "--max-new-tokens", "8",
        "--scale-prompts", "600", "--steps", "2",
    )  # fmt: skip
    kinds = ("probs", "log_probs", "logits", "topk", "stats", "hidden")
    expected = [
        "step, shared (", "step, shared: loss after it", "step, shared: peak memory", *["20 steps on new batches"] * 2,
        *["choose ("] * 2, *(f"overhead, {kind}, width {width}" for width in (2048, 256) for kind in kinds),
        *["scale: "] * 2,
    ]  # fmt: skip
    assert len(rows) == len(expected)
    assert all(row[0].startswith(name) for row, name in zip(rows, expected, strict=True))
    assert [row[1] for row in rows if row[1]] == [">= 10x", "<= 1e-4", "<= 0.5x", ">= 20x", ">= 20x"]
    for row in rows:
        assert (row[3] in ("yes", "no")) == bool(row[1]) and float(re.split("[x %]", row[2].replace(",", ""))[0]) >= 0
    before, after = (float(loss) for loss in rows[1][4].split(" -> "))
    assert after < before


def test_what_is_knowable_prints_a_line_for_everything(run: Callable[..., Finished], tmp_path: Path) -> None:
    kept = ("oracle.store_logits=true", "oracle.store_hidden=true", "oracle.latency_profile=null")
    done = run("-m", "blockpilot.collect", *QUICK_COLLECT, *kept, f"hydra.run.dir={tmp_path / 'run'}", quick=False)
    assert done.code == 0, done.output
    (train,), (test,) = ((tmp_path / "cache").glob(f"tiny-*/tiny-{split}-*") for split in ("train", "test"))
    prompts = [str(ROOT / f"data/prompts/tiny_{split}.jsonl") for split in ("train", "test")]
    command = [sys.executable, "benchmarks/knowable.py", str(train), str(test), "--prompts", *prompts]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert shown.returncode == 0, shown.stderr
    lines = [re.fullmatch(r"(\S.*?) +(-?[\d.]+)% +(-?\d+|nan)% \[.*\]", line) for line in shown.stdout.splitlines()]
    found = {one[1].split(" (")[0]: float(one[2]) for one in lines if one}
    assert list(found)[:6] == [
        "nothing: always-B", "best single size of training", "the family", "probs, kernel ridge",
        "log_probs, kernel ridge", "hidden, kernel ridge",
    ]  # fmt: skip
    assert all(0 <= regret < 100 for regret in found.values())


def test_products_benchmark_prints_every_way_and_the_one_taken() -> None:
    rows = rows_of(
        "products.py",
        "--shapes",
        "1024x256",
        "2048x256",
        "--rows",
        "1",
        "4",
        "20",
        "--repeats",
        "1",
        "--mebibytes",
        "4",
    )
    assert [row[:2] for row in rows] == [[s, str(count)] for s in ("1024x256", "2048x256") for count in (1, 4, 20)]
    ways = ("torch", "tiles", "weight first")
    taken = [ways[[cell.endswith("*") for cell in row[2:5]].index(True)] for row in rows]
    assert taken == ["weight first", "tiles", "torch", "tiles", "tiles", "torch"]
    assert all(float(row[5].removesuffix("x")) > 0 for row in rows)
