"""What the benchmarks share: the embedded pair's prompts, a stopwatch, and the line that names the machine."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

import blockpilot as bp
from blockpilot.config import ROOT

Clock = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def tiny_prompts(pair: bp.Pair, count: int) -> list[list[int]]:
    """The first ``count`` single-turn test prompts of the embedded pair, encoded."""
    lines = (ROOT / "data/prompts/tiny_test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if len(row["turns"]) == 1][:count]
    return [pair.encode(row["turns"]) for row in rows]


def seconds(work: Callable[[], object], device: torch.device | None = None, clock: Clock = time.perf_counter) -> float:
    """Seconds of ``work``; on a GPU, until all it asked for is done."""
    synchronize = torch.cuda.synchronize if device is not None and device.type == "cuda" else lambda: None
    synchronize()
    began = clock()
    work()
    synchronize()
    return clock() - began


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return median, low, high


def status_mib(field: str) -> float:
    """``VmRSS``, ``VmHWM`` or the like of this process, in MiB; Linux alone."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def machine(packages: Sequence[str] = ("torch", "transformers")) -> str:
    """Processor, threads, load, GPU if any, versions and date, in one line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    parts = [
        f"{model}, {torch.get_num_threads()} of {os.cpu_count()} threads, load {os.getloadavg()[0]:.1f}",
        *gpu,
        *(f"{name} {version(name)}" for name in packages),
        date.today().isoformat(),
    ]
    return "; ".join(parts)
