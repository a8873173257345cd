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
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from shared import machine, seconds, tiny_prompts
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

import blockpilot as bp
from blockpilot.config import PredictorConfig

Engine = Callable[[Sequence[int]], list[int]]
"""Prompt to output tokens."""

SECTIONS = ("tiny", "smollm2", "autoregressive", "policy", "memory")
MEMORY_RUNS = 3


@dataclass(frozen=True)
class Subject:
    """What is decoded: a pair, prompts, and when to stop."""

    pair: bp.Pair
    prompts: list[list[int]]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Figure:
    """One cell: a median with its quartiles, and what each engine did."""

    median: float
    low: float
    high: float
    ours: str
    peer: str


@dataclass(frozen=True)
class Speed:
    """A row that compares tokens per second."""

    section: str
    model: str
    block_size: int
    peer: str
    goal: float


SPEEDS = (
    Speed("tiny", "tiny", 16, "dflash", 2.0),
    *(Speed("tiny", "tiny", b, "dflash", 1.5) for b in (1, 4, 8)),
    *(Speed("smollm2", "smollm2", b, "dflash", 1.15) for b in (4, 8, 16)),
    *(Speed("autoregressive", model, 1, "transformers", 1.0) for model in ("tiny", "smollm2")),
)


# --- what is decoded


@cache
def subject(model: str, device: str, num_prompts: int) -> Subject:
    """``tiny``: the embedded pair. ``smollm2``: random weights in the shape of SmolLM2-135M. fp32 on a CPU, else bf16."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    if model == "tiny":
        pair = bp.load_pair("tiny", dtype=dtype, device=device)
        return Subject(pair, tiny_prompts(pair, num_prompts), 160, pair.stop_token_ids)
    pair = _smollm2(getattr(torch, dtype), device)
    prompt = torch.randint(pair.vocab_size, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    return Subject(pair, [prompt], 128, ())


def _smollm2(dtype: torch.dtype, device: str) -> bp.Pair:
    """SmolLM2-135M's shape and a two-layer drafter, B = 8; weights are normal with deviation 0.02, seeded."""
    from blockpilot.models import DFlashDrafter

    shape: dict[str, Any] = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=30, rms_norm_eps=1e-5))
    taps = {"mask_token_id": 0, "target_layer_ids": [1, 10, 19, 28]}
    drafter = DFlashDrafter(
        Qwen3Config(**shape, num_hidden_layers=2, block_size=8, num_target_layers=30, dflash_config=taps)
    )
    tokenizer = bp.load_pair("tiny", device="cpu").tokenizer  # a pair needs one; these prompts are token ids already
    return bp.load_pair(target=target.to(dtype), drafter=drafter.to(dtype), tokenizer=tokenizer, device=device)


# --- who decodes


def engine(name: str, given: Subject, block_size: int) -> Engine:
    """``blockpilot``, ``dflash`` or ``transformers`` on the pair of ``given``."""
    return {"blockpilot": _blockpilot, "dflash": _dflash, "transformers": _transformers}[name](given, block_size)


def _blockpilot(given: Subject, block_size: int) -> Engine:
    policy = bp.FixedPolicy(block_size)
    return lambda prompt: bp.generate(
        given.pair, prompt, policy, max_new_tokens=given.max_new_tokens, stop_token_ids=given.stop_token_ids
    ).output_ids


def _dflash(given: Subject, block_size: int) -> Engine:
    from dflash.model import DFlashDraftModel, dflash_generate

    drafter = DFlashDraftModel(given.pair.drafter.config)
    drafter.load_state_dict(given.pair.drafter.state_dict(), assign=True)
    drafter.to(given.pair.device).eval()  # type: ignore[arg-type]
    stops = list(given.stop_token_ids) or None

    def run(prompt: Sequence[int]) -> list[int]:
        ids: Any = torch.tensor([list(prompt)], device=given.pair.device)
        output: Any = dflash_generate(
            drafter, given.pair.target, ids, given.max_new_tokens, stops, block_size=block_size
        )
        return output[0, len(prompt) :].tolist()

    return run


def _transformers(given: Subject, block_size: int) -> Engine:
    assert block_size == 1, "generate of transformers is compared at b = 1"
    target: Any = given.pair.target
    options = {"do_sample": False, "use_cache": True, "max_new_tokens": given.max_new_tokens, "pad_token_id": 0}

    def run(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=given.pair.device)
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=list(given.stop_token_ids) or None, **options
        )
        return output[0, len(prompt) :].tolist()

    return run


# --- rows


def compare(row: Speed, given: Subject, repeats: int) -> Figure:
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
                totals[which] += seconds(lambda run=engines[which], p=prompt: run(p), given.pair.device)
        for which in (0, 1):
            rates[which].append(counts[which] / totals[which])
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    note = "" if equal == len(ours) else f", {equal} of {len(ours)} outputs equal"
    speeds = [f"{statistics.median(rate):.1f} tok/s" for rate in rates]
    return Figure(*_quartiles(ratios), speeds[0], speeds[1] + note)


def policy_share(given: Subject, repeats: int) -> Figure:
    """Percent of decode time a predictor of the paper's size, untrained, takes to choose the block size."""
    from blockpilot.learning import BlockSizePredictor, FeatureExtractor

    pair, settings, extractor = given.pair, PredictorConfig(), FeatureExtractor()
    sizes = range(max(2, pair.block_size - settings.k), pair.block_size + settings.k + 1)
    torch.manual_seed(0)
    predictor = BlockSizePredictor(
        extractor.input_size(pair.vocab_size, pair.hidden_size), sizes, sparse_input=extractor.is_sparse,
        depth=settings.depth, width=settings.width, dropout=settings.dropout, residual=settings.residual,
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
    return Figure(*_quartiles(shares), f"{statistics.median(choices):.2f} ms per prompt", "")


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return median, low, high


# --- memory


def memory(model: str, block_size: int, device: str, threads: int) -> tuple[Figure, Figure]:
    """Peak of the process, and its growth while decoding: ours over DFlash's."""
    peaks: list[list[float]] = []
    growths: list[list[float]] = []
    for _ in range(MEMORY_RUNS):
        pairs = [_in_new_process(name, model, block_size, device, threads) for name in ("blockpilot", "dflash")]
        peaks.append([peak for peak, _ in pairs])
        growths.append([growth for _, growth in pairs])
    return _memory_figure(peaks), _memory_figure(growths)


def _memory_figure(runs: list[list[float]]) -> Figure:
    ours, peer = (f"{statistics.median(column):.1f} MiB" for column in zip(*runs, strict=True))
    return Figure(*_quartiles([a / max(b, 1e-9) for a, b in runs]), ours, peer)


def _in_new_process(*arguments: Any) -> tuple[float, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, *arguments).result()


def _peak(name: str, model: str, block_size: int, device: str, threads: int) -> tuple[float, float]:
    """MiB at the peak of one decode, and above what was held before it. Runs in a process of its own."""
    torch.set_num_threads(threads)
    given = subject(model, device, 1)
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
        before = _status_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        run(given.prompts[0])
        peak = _status_mib("VmHWM")
    return peak, peak - before


def _status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


# --- the table


def table(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table, each as soon as it is measured."""
    yield "| what | peer | goal | CPU fp32 | reached | ours | peer's | GPU bf16 |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"

    def line(what: str, peer: str, goal: float, at_most: bool, figures: Sequence[Figure | None]) -> str:
        unit, sign = ("%", "<=") if not peer else ("x", "<=" if at_most else ">=")
        cells = [
            "not measured" if f is None else f"{f.median:.2f}{unit} ({f.low:.2f} to {f.high:.2f})" for f in figures
        ]
        shown = figures[0] or figures[1]
        assert shown is not None
        reached = "yes" if (shown.median <= goal if at_most else shown.median >= goal) else "no"
        values = [what, peer, f"{sign} {goal:g}{unit}", cells[0], reached, shown.ours, shown.peer, cells[1]]
        return "| " + " | ".join(values) + " |"

    def on_each(measure: Callable[[str], Any]) -> list[Any]:
        return [measure(device) if device in args.devices else None for device in ("cpu", "cuda")]

    for row in SPEEDS:
        if row.section in args.rows:
            figures = on_each(lambda d, row=row: compare(row, subject(row.model, d, args.prompts), args.repeats))
            yield line(f"{row.model}, b={row.block_size}: tokens/s", row.peer, row.goal, False, figures)
    if "policy" in args.rows:
        figures = on_each(lambda d: policy_share(subject("tiny", d, args.prompts), args.repeats))
        yield line("tiny: choosing b, share of decode time", "", 1.0, True, figures)
    for model in ("smollm2", "tiny") if "memory" in args.rows else ():
        both = on_each(lambda d, model=model: memory(model, 16, d, args.threads))
        for index, what in enumerate(("peak of the process", "growth while decoding")):
            figures = [None if pair is None else pair[index] for pair in both]
            yield line(f"{model}, b=16: memory, {what}", "dflash", 1.0, True, figures)


def profile(row: str, num_prompts: int) -> str:
    """Where our engine's CPU time goes on one prompt of ``MODEL:B``, by operator."""
    model, block_size = row.split(":")
    given = subject(model, "cpu", num_prompts)
    run = engine("blockpilot", given, int(block_size))
    run(given.prompts[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run(given.prompts[0])
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="of the embedded pair; smollm2 has one")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CPU, and GPU if any")
    parser.add_argument("--profile", metavar="MODEL:B", help="a profile of our engine instead, such as tiny:16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.devices = {"auto": ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)}.get(args.device, (args.device,))
    print(machine(("torch", "transformers", "dflash")))
    if args.profile:
        print(profile(args.profile, args.prompts))
        return
    print(f"T = 0; repeats: {args.repeats}; quartiles in brackets\n")
    for text in table(args):
        print(text, flush=True)


if __name__ == "__main__":
    main()
