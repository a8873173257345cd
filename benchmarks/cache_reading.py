"""What the label cache costs: bytes on disk, rows per second into CSR batches, memory while iterating.

    python benchmarks/cache_reading.py [--rows 20000] [--target FOLDER --prompts FILE ...] [--keep FOLDER] [--layouts]

The rows are made up: shuffled token ids (nothing to gain from their order) and a softmax of normal logits, cut to a
given number of non-zeros; everything else is small beside them. Files are read right after they were written, so from
the page cache. Memory is measured on Linux alone, in a process of its own: the peak of resident memory while iterating
(pages of mapped files included) less what was resident before the cache was opened.

``--target FOLDER --prompts FILE`` adds the bytes of real distributions: a local language model after the prefill of the
first turns in a JSONL file (rows with ``turns``).

``--layouts`` writes one shard in several Parquet layouts instead, and prints bytes per row and rows per second of each.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from shared import machine, status_mib
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.oracle import CacheKey, CacheRow, LabelCache, sparse_distributions
from blockpilot.oracle import shards as shard_files

QWEN3_VOCAB, SMOLLM2_VOCAB = 151_936, 49_152
SHARD_SIZE, BATCH = 256, 64
BLOCK_SIZES = tuple(range(13, 20))
OUTPUT_TOKENS = 160
LOGIT_SCALE = 2.5
"""Standard deviation of the made-up logits."""


@dataclass(frozen=True)
class Goals:
    """What is asked of it."""

    rows_per_second: float = 20_000
    growth_mib: float = 300e6 / 2**20
    """300 MB."""
    share_of_dense: float = 0.2
    """Of the dense logits in fp16, at a vocabulary of 49,152."""


# --- a cache of made-up rows


def make_cache(
    folder: Path, rows: int, vocab_size: int, nonzeros: int, shard_size: int = SHARD_SIZE, tail_mass: float = 1e-3
) -> LabelCache:
    """A complete cache of ``rows`` prompts with ``nonzeros`` stored probabilities each."""
    key = CacheKey(
        pair={"target": "made up"}, prompts="0" * 64, block_sizes=BLOCK_SIZES, vocab_size=vocab_size,
        max_new_tokens=OUTPUT_TOKENS, temperature=0.0, top_p=1.0, top_k=0, seed=0, stop_token_ids=(0,),
        tail_mass=tail_mass, store_logits=False, store_hidden=False, tau_convention="committed",
    )  # fmt: skip
    cache = LabelCache(folder, key, rows, shard_size)
    generator = np.random.default_rng(0)
    for shard in range(cache.num_shards):
        made = [made_up_row(index, generator, vocab_size, nonzeros) for index in cache.rows_of(shard)]
        cache.write(shard, made, skipped=0, seconds=0.0, device="none")
    return cache


def made_up_row(index: int, generator: np.random.Generator, vocab_size: int, nonzeros: int) -> CacheRow:
    """A prompt of 100 tokens, its labels along an output of 160 tokens, and one distribution."""
    weights = np.exp(LOGIT_SCALE * generator.standard_normal(nonzeros))
    prompt = generator.integers(0, vocab_size, 100, dtype=np.int32)
    arrays: dict[str, Any] = {
        "prompt_tokens": prompt,
        "output_tokens": generator.integers(0, vocab_size, OUTPUT_TOKENS, dtype=np.int32),
        "acceptance_lengths": [_lengths(generator, b) for b in BLOCK_SIZES],
        "distribution_ids": generator.choice(vocab_size, nonzeros, replace=False).astype(np.int32),
        "distribution_probs": np.sort(weights / weights.sum())[::-1].astype(np.float32),
    }
    return CacheRow(
        prompt_id=f"made-up-{index}", prompt_key=signed_prompt_key(prompt.tolist()), dataset="made-up",
        block_sizes=list(BLOCK_SIZES), seed=0, **arrays,
    )  # fmt: skip


def real_cache(folder: Path, target: Path, prompts: Path, count: int) -> tuple[LabelCache, int, float]:
    """Rows with the distributions of a real model; also its vocabulary, and the mean number of non-zeros."""
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target).eval()
    texts = [json.loads(line)["turns"][0] for line in prompts.read_text(encoding="utf-8").splitlines()[:count]]
    vocab_size, generator, rows = int(model.config.vocab_size), np.random.default_rng(0), []
    for index, text in enumerate(texts):
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            kept = sparse_distributions(model(**encoded).logits[:, -1], 1e-3)
        made = made_up_row(index, generator, vocab_size, 1)
        rows.append(
            dataclasses.replace(
                made, distribution_ids=kept.token_ids.int().numpy(), distribution_probs=kept.probs.numpy()
            )
        )
    cache = make_cache(folder, 0, vocab_size, 1)
    cache = LabelCache(folder / "real", dataclasses.replace(cache.key, prompts="1" * 64), len(rows), len(rows))
    cache.write(0, rows, skipped=0, seconds=0.0, device="none")
    return cache, vocab_size, float(np.mean([len(row.distribution_ids) for row in rows]))


def _lengths(generator: np.random.Generator, block_size: int) -> np.ndarray:
    """Acceptance lengths that come to all tokens but the first."""
    ends = np.minimum(np.cumsum(generator.integers(1, block_size + 1, OUTPUT_TOKENS)), OUTPUT_TOKENS - 1)
    return np.diff(np.unique(ends), prepend=0).astype(np.int16)


def bytes_per_row(cache: LabelCache) -> float:
    """Bytes of the shards over all rows."""
    paths = [cache.path(shard) for shard in range(cache.num_shards)]
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    return sum(path.stat().st_size for path in paths) / rows


# --- time and memory


def iterate(cache: LabelCache, batch: int = BATCH) -> int:
    """Goes through a cache in CSR batches; the number of rows."""
    return sum(len(labels) for labels in cache.batches(batch))


def load(cache: LabelCache) -> int:
    """Loads a cache whole; the number of rows."""
    return len(cache.load())


def rows_per_second(cache: LabelCache, read: Callable[[LabelCache], int], repeats: int) -> list[float]:
    """One rate per repeat, after one that does not count."""
    rates = []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        rows = read(cache)
        if repeat:
            rates.append(rows / (time.perf_counter() - began))
    return rates


def memory_growth(folder: Path, read: Callable[[LabelCache], int]) -> float:
    """MiB that reading a cache takes on top of what its process held before; ``read`` is one of this module."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_growth, folder, read).result()


def _growth(folder: Path, read: Callable[[LabelCache], int]) -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    read(LabelCache.existing(folder))
    return status_mib("VmHWM") - before


# --- Parquet layouts


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Options of ``pyarrow.parquet.write_table`` to choose from, the chosen ones first."""
    chosen = shard_files.PARQUET_OPTIONS
    yield "zstd, split bytes (chosen)", chosen
    yield "zstd, split bytes, level 9", chosen | {"compression_level": 9}
    yield "lz4, split bytes", chosen | {"compression": "lz4"}
    yield "snappy, split bytes", chosen | {"compression": "snappy"}
    yield "none, split bytes", chosen | {"compression": "none"}
    yield "zstd, plain", chosen | {"column_encoding": None}
    yield "none, plain", chosen | {"column_encoding": None, "compression": "none"}
    delta = cast(dict, chosen["column_encoding"]) | {"distribution_ids.list.element": "DELTA_BINARY_PACKED"}
    yield "zstd, ids as differences", chosen | {"column_encoding": delta}
    yield "zstd, dictionaries everywhere", chosen | {"column_encoding": None, "use_dictionary": True}


def layout_table(folder: Path, repeats: int) -> Iterator[str]:
    """A line per layout, for one shard of ``SHARD_SIZE`` rows."""
    generator = np.random.default_rng(0)
    table = shard_files.table_of([made_up_row(i, generator, QWEN3_VOCAB, 2000) for i in range(SHARD_SIZE)])
    yield "| layout | bytes per row | rows/s | rows/s, one thread |"
    yield "| --- | --- | --- | --- |"
    for name, options in layouts():
        path = folder / "layout.parquet"
        pq.write_table(table, path, **options)
        rates = [_shard_rate(path, repeats, threads) for threads in (True, False)]
        cells = " | ".join(f"{rate:,.0f}" for rate in (path.stat().st_size / SHARD_SIZE, *rates))
        yield f"| {name} | {cells} |"


def _shard_rate(path: Path, repeats: int, threads: bool) -> float:
    rates = []
    for _ in range(3 * repeats):
        began = time.perf_counter()
        pq.read_table(path, memory_map=True, use_threads=threads)
        rates.append(SHARD_SIZE / (time.perf_counter() - began))
    return statistics.median(rates)


# --- the table


def report(folder: Path, rows: int, repeats: int) -> Iterator[str]:
    """The figures as lines of a table; the caches are made in ``folder`` unless they are there."""
    goals = Goals()
    yield "| what | figure | goal | reached |"
    yield "| --- | --- | --- | --- |"
    for shard_size in (SHARD_SIZE, rows):
        cache = make_cache_once(folder / f"wide-{rows}-{shard_size}", rows, QWEN3_VOCAB, 2000, shard_size)
        what = f"{rows:,} rows, 2,000 of {QWEN3_VOCAB:,} tokens, {shard_size:,} rows a shard"
        yield f"| {what}: bytes per row | {bytes_per_row(cache):,.0f} | | |"
        for name, read in (("iterating", iterate), ("loading whole", load)):
            rate, growth = statistics.median(rows_per_second(cache, read, repeats)), memory_growth(cache.folder, read)
            fast, small = (rate >= goals.rows_per_second, growth <= goals.growth_mib)
            iterating = read is iterate
            yield _line(f"{what}: {name}", f"{rate:,.0f} rows/s", ">= 20,000 rows/s" if iterating else "", fast)
            yield _line(f"{what}: {name}", f"{growth:,.0f} MiB more", "<= 286 MiB" if iterating else "", small)
    yield from _made_up_sizes(folder, goals)


def real_report(folder: Path, target: Path, prompts: Sequence[Path], count: int) -> Iterator[str]:
    """Bytes of real distributions as further lines of the table."""
    for path in prompts:
        cache, vocab_size, nonzeros = real_cache(folder / path.stem, target, path, count)
        size, share = bytes_per_row(cache), bytes_per_row(cache) / (2 * vocab_size)
        what = (
            f"{target.name}, {path.stem}, {nonzeros:,.0f} of {vocab_size:,} tokens: bytes per row, share of dense fp16"
        )
        yield _line(what, f"{size:,.0f}, {share:.1%}", "<= 20%", share <= Goals().share_of_dense)


def _made_up_sizes(folder: Path, goals: Goals) -> Iterator[str]:
    dense = 2 * SMOLLM2_VOCAB
    for nonzeros in (500, 2000, 3500):
        small = make_cache_once(folder / f"small-{nonzeros}", 512, SMOLLM2_VOCAB, nonzeros, SHARD_SIZE)
        size = bytes_per_row(small)
        what = f"{nonzeros:,} of {SMOLLM2_VOCAB:,} tokens: bytes per row, share of dense fp16 logits"
        yield _line(what, f"{size:,.0f}, {size / dense:.1%}", "<= 20%", size <= goals.share_of_dense * dense)


def make_cache_once(folder: Path, rows: int, vocab_size: int, nonzeros: int, shard_size: int) -> LabelCache:
    """:func:`make_cache`, or the complete cache that an earlier run left in ``folder``."""
    if (folder / "manifest.json").exists():
        cache = LabelCache.existing(folder)
        if not cache.missing():
            return cache
    return make_cache(folder, rows, vocab_size, nonzeros, shard_size)


def _line(what: str, figure: str, goal: str, reached: bool) -> str:
    return f"| {what} | {figure} | {goal} | {('yes' if reached else 'no') if goal else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layouts", action="store_true", help="compare Parquet layouts instead")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the caches there, and use those that are")
    parser.add_argument("--target", type=Path, metavar="FOLDER", help="a local causal language model")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="JSONL files for --target")
    parser.add_argument("--count", type=int, default=64, help="prompts of each file")
    args = parser.parse_args()
    print(machine(("torch", "pyarrow")) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        place = args.keep or Path(folder)
        for line in (
            layout_table(Path(folder), args.repeats) if args.layouts else report(place, args.rows, args.repeats)
        ):
            print(line, flush=True)
        if args.target is not None:
            for line in real_report(Path(folder), args.target, args.prompts, args.count):
                print(line, flush=True)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
