"""BlockPilot's engine against its peers: ``python benchmarks/decode.py [--rows tiny ...]``; prints one table.

Peers are ``dflash_generate`` of the ``dflash`` package and, for b = 1, ``generate`` of ``transformers``. They run in
this process on the same weights: the target is one object, DFlash's drafter holds our drafter's tensors. T = 0.

Time is the whole call, prefill included, since DFlash tells its prefill apart on a GPU only. Both engines are warm and
take turns prompt by prompt, the first one alternating. A repeat is all prompts once; its ratio is the peer's seconds
over ours, and the table gives the median over repeats, quartiles in brackets. Outputs must be equal in fp32; in bf16
(the GPU column) widths round differently, so there the equal ones are counted.

Memory is measured on Linux alone, each engine in a process of its own: after a warm-up, the peak of one decode, whole
and above what was resident before it. Both processes load their weights through ``bp.load_pair``; what an engine
imports on top of that counts as its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from engines import Subject, engine, subject
from shared import CLOCKS, Clock, machine, quartiles, seconds, status_mib

import blockpilot as bp
from blockpilot.config import PredictorConfig, load_preset

MOST_MEMORY_RUNS = 3
"""Processes start slowly, and their peaks hardly differ."""


@dataclass(frozen=True)
class Figure:
    """A median with its quartiles, and what each engine did."""

    median: float
    low: float
    high: float
    ours: str
    peer: str


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    block_size: int
    what: str
    """``speed``, ``policy`` (the preset's width, or the paper's), ``peak memory`` or ``memory growth``."""
    peer: str
    goal: float

    @property
    def words(self) -> set[str]:
        """What ``--rows`` may name it by."""
        return {self.model, f"b={self.block_size}", *self.what.split(), self.peer} - {""}


ROWS = (
    Row("tiny", 16, "speed", "dflash", 2.0),
    *(Row("tiny", b, "speed", "dflash", 1.5) for b in (1, 4, 8)),
    *(Row("smollm2", b, "speed", "dflash", 1.15) for b in (4, 8, 16)),
    *(Row(model, 1, "speed", "transformers", 1.0) for model in ("tiny", "smollm2")),
    Row("tiny", 16, "policy", "", 1.0),
    Row("tiny", 16, "policy of the paper's width", "", 1.0),
    *(Row(m, 16, w, "dflash", 1.0) for m in ("smollm2", "tiny") for w in ("peak memory", "memory growth")),
)


# --- rows


def compare(row: Row, given: Subject, repeats: int, clock: Clock) -> Figure:
    """Ratio of tokens per second over the peer.

    Raises:
        RuntimeError: in fp32, the outputs differ.
    """
    engines = [engine(name, given, row.block_size) for name in ("blockpilot", row.peer)]
    ours, theirs = ([run(prompt) for prompt in given.prompts] for run in engines)  # warms both
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    if given.pair.target.dtype == torch.float32 and equal < len(ours):
        raise RuntimeError(f"{row}: {len(ours) - equal} of {len(ours)} outputs differ from the peer's")
    counts = [sum(map(len, outputs)) for outputs in (ours, theirs)]
    rates: list[list[float]] = [[], []]
    for repeat in range(repeats):
        totals = [0.0, 0.0]
        for index, prompt in enumerate(given.prompts):
            for which in ((0, 1), (1, 0))[(repeat + index) % 2]:
                totals[which] += seconds(lambda run=engines[which], p=prompt: run(p), given.pair.device, clock)
        for which in (0, 1):
            rates[which].append(counts[which] / totals[which])
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    note = "" if equal == len(ours) else f", {equal} of {len(ours)} outputs equal"
    speeds = [f"{statistics.median(rate):.1f} tok/s" for rate in rates]
    return Figure(*quartiles(ratios), speeds[0], speeds[1] + note)


def policy_share(given: Subject, repeats: int, width: int) -> Figure:
    """Percent of decode time a predictor of this width, untrained, takes to choose the block size."""
    from blockpilot.learning import BlockSizePredictor, FeatureExtractor

    pair, settings, extractor = given.pair, PredictorConfig(), FeatureExtractor()
    sizes = range(max(2, pair.block_size - settings.k), pair.block_size + settings.k + 1)
    torch.manual_seed(0)
    predictor = BlockSizePredictor(
        extractor.input_size(pair.vocab_size, pair.hidden_size), sizes, sparse_input=extractor.is_sparse,
        depth=settings.depth, width=width, dropout=settings.dropout, residual=settings.residual,
    )  # fmt: skip
    no_keys = torch.empty(0, dtype=torch.int64)
    policy = bp.PredictorPolicy(
        predictor.eval(), extractor, settings, pair.identity, pair.vocab_size, pair.hidden_size, pair.block_size,
        pair.block_size, no_keys,
    ).to(pair.device)  # fmt: skip
    shares, choices = [], []
    for repeat in range(repeats + 1):
        outs = [bp.generate(pair, prompt, policy, max_new_tokens=given.max_new_tokens) for prompt in given.prompts]
        if repeat == 0:
            continue  # warms
        shares.append(100 * sum(out.policy_seconds for out in outs) / sum(out.decode_seconds for out in outs))
        choices.append(1e3 * statistics.mean(out.policy_seconds for out in outs))
    return Figure(*quartiles(shares), f"{statistics.median(choices):.2f} ms per prompt", "")


# --- memory


@cache
def memory(
    model: str, block_size: int, device: str, threads: int, max_new_tokens: int | None, runs: int
) -> dict[str, Figure]:
    """Ours over DFlash's: the peak of the process, and how far it lies above what was held before decoding."""
    peaks: list[list[float]] = []
    growths: list[list[float]] = []
    for _ in range(runs):
        arguments = (model, block_size, device, threads, max_new_tokens)
        pairs = [_in_new_process(name, *arguments) for name in ("blockpilot", "dflash")]
        peaks.append([peak for peak, _ in pairs])
        growths.append([growth for _, growth in pairs])
    return {"peak memory": _memory_figure(peaks), "memory growth": _memory_figure(growths)}


def _memory_figure(runs: list[list[float]]) -> Figure:
    ours, peer = (f"{statistics.median(column):.1f} MiB" for column in zip(*runs, strict=True))
    return Figure(*quartiles([a / max(b, 1e-9) for a, b in runs]), ours, peer)


def _in_new_process(*arguments: Any) -> tuple[float, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, *arguments).result()


def _peak(
    name: str, model: str, block_size: int, device: str, threads: int, max_new_tokens: int | None
) -> tuple[float, float]:
    """MiB at the peak of one decode, and above what was held before it. Runs in a process of its own."""
    torch.set_num_threads(threads)
    given = subject(model, device, 1, max_new_tokens)
    run = engine(name, given, block_size)
    run(given.prompts[0][:8])  # thread pools and lazily made buffers belong to no decode
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        run(given.prompts[0])
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what the warm-up freed would hide what the decode takes
        before = status_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        run(given.prompts[0])
        peak = status_mib("VmHWM")
    return peak, peak - before


# --- the table


def measure(row: Row, device: str, args: argparse.Namespace) -> Figure:
    """The row's figure on one device."""
    if "memory" in row.words:
        runs = min(args.repeats, MOST_MEMORY_RUNS)
        return memory(row.model, row.block_size, device, args.threads, args.max_new_tokens, runs)[row.what]
    given = subject(row.model, device, args.prompts, args.max_new_tokens)
    if "policy" in row.what:
        fitted = load_preset("predictor/fit", row.model, PredictorConfig)
        return policy_share(given, args.repeats, (PredictorConfig() if "paper" in row.what else fitted).width)
    return compare(row, given, args.repeats, CLOCKS[args.clock])


def line(row: Row, cpu: Figure | None, gpu: Figure | None) -> str:
    """The row as Markdown."""
    unit, faster = "%" if "policy" in row.what else "x", row.what == "speed"
    cells = ["not measured" if f is None else f"{f.median:.2f}{unit} ({f.low:.2f} to {f.high:.2f})" for f in (cpu, gpu)]
    shown = cpu or gpu
    assert shown is not None
    reached = "yes" if (shown.median >= row.goal if faster else shown.median <= row.goal) else "no"
    values = [
        f"{row.model}, b={row.block_size}: {row.what}", row.peer, f"{'>=' if faster else '<='} {row.goal:g}{unit}",
        cells[0], reached, shown.ours, shown.peer, cells[1],
    ]  # fmt: skip
    return "| " + " | ".join(values) + " |"


def profile(row: str, max_new_tokens: int | None) -> str:
    """Where our engine's CPU time goes on one prompt of ``MODEL:B``, by operator."""
    model, block_size = row.split(":")
    given = subject(model, "cpu", 1, max_new_tokens)
    run = engine("blockpilot", given, int(block_size))
    run(given.prompts[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run(given.prompts[0])
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40)


def main() -> None:
    words = sorted(set().union(*(row.words for row in ROWS)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=words, default=[], metavar="WORD",
                        help=f"rows that have all of these words, out of: {', '.join(words)}")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="of the embedded pair; smollm2 has one")
    parser.add_argument("--max-new-tokens", type=int, help="default: 160, smollm2 128")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CPU, and GPU if any")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall",
                        help="cpu: seconds of this process alone, to compare CPU engines on a busy machine; "
                        "take --threads 1 with it, since threads that wait for each other count")  # fmt: skip
    parser.add_argument("--profile", metavar="MODEL:B", help="a profile of our engine instead, such as tiny:16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    devices = {"auto": ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)}.get(args.device, (args.device,))
    print(machine(("torch", "transformers", "dflash")))
    if args.profile:
        print(profile(args.profile, args.max_new_tokens))
        return
    repeats = f"{args.repeats} repeats (memory: at most {MOST_MEMORY_RUNS})"
    print(f"T = 0, {args.clock} clock; medians and quartiles of {repeats}\n")
    print("| what | peer | goal | CPU fp32 | reached | ours | peer's | GPU bf16 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        if set(args.rows) <= row.words:
            figures = [measure(row, device, args) if device in devices else None for device in ("cpu", "cuda")]
            print(line(row, *figures), flush=True)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
