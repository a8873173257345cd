"""What the predictor's first layer costs: EmbeddingBag on the stored non-zeros against Linear on dense rows.

Prints one table of milliseconds per training step (N = 64, width 2048): forward and backward, then the optimizer.
``sparse gradient`` is EmbeddingBag with ``sparse=True`` and SparseAdam, which is not AdamW; it shows what the dense
gradient and the dense moments cost. Every row runs in a process of its own, so that peak memory is its own.

    python benchmarks/predictor.py [threads]
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockpilot.learning.features import Features
from blockpilot.learning.predictor import SparseLinear
from blockpilot.oracle.prefill import sparsify

NUM_PROMPTS, WIDTH, REPEATS = 64, 2048, 3
VOCAB_SIZES = (1447, 151_936)
ZIPF_EXPONENT = 2.5
"""Shape of the made-up distributions: p ~ rank ** -2.5, in an order of its own for each prompt."""


def _features(vocab_size: int) -> Features:
    generator = torch.Generator().manual_seed(0)
    zipf = torch.arange(1.0, vocab_size + 1).pow(-ZIPF_EXPONENT)
    shuffled = torch.stack([zipf[torch.randperm(vocab_size, generator=generator)] for _ in range(NUM_PROMPTS)])
    rows = sparsify(shuffled / zipf.sum(), tail_mass=1e-3)
    return Features(rows.probs, rows.offsets, rows.token_ids)


def _layer(kind: str, vocab_size: int, features: Features) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """The forward pass of one variant and its optimizer."""
    if kind == "Linear":
        dense, linear = features.dense(vocab_size), nn.Linear(vocab_size, WIDTH)
        return lambda: linear(dense), torch.optim.AdamW(linear.parameters(), fused=True)
    if kind == "EmbeddingBag":
        layer = SparseLinear(vocab_size, WIDTH)
        return lambda: layer(features), torch.optim.AdamW(layer.parameters(), fused=True)
    bag = nn.EmbeddingBag(vocab_size, WIDTH, mode="sum", sparse=True, include_last_offset=True)
    optimizer = torch.optim.SparseAdam(bag.parameters())
    return lambda: bag(features.token_ids, features.offsets, per_sample_weights=features.values), optimizer


def _measure(kind: str, vocab_size: int, threads: int) -> None:
    torch.set_num_threads(threads)
    features = _features(vocab_size)
    forward, optimizer = _layer(kind, vocab_size, features)
    passes, steps = [], []
    for _ in range(REPEATS + 1):
        optimizer.zero_grad()
        start = time.perf_counter()
        forward().square().mean().backward()
        middle = time.perf_counter()
        optimizer.step()
        passes.append(1e3 * (middle - start))
        steps.append(1e3 * (time.perf_counter() - middle))
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    stored = len(features.values) // NUM_PROMPTS
    figures = f"{statistics.median(passes[1:]):>11.1f} {statistics.median(steps[1:]):>12.1f} {peak_gib:>9.2f}"
    print(f"{vocab_size:>8} {stored:>12} {kind:<16} {figures}", flush=True)


def main() -> None:
    """Prints the table."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads()
    print(f"torch {torch.__version__}, CPU, {threads} thread(s), N={NUM_PROMPTS}, width {WIDTH}, median of {REPEATS}")
    columns = f"{'fwd+bwd ms':>11} {'optimizer ms':>12} {'peak GiB':>9}"
    print(f"{'vocab':>8} {'nonzeros/row':>12} {'first layer':<16} {columns}")
    for vocab_size in VOCAB_SIZES:
        for kind in ("EmbeddingBag", "sparse gradient", "Linear"):
            process = multiprocessing.get_context("spawn").Process(target=_measure, args=(kind, vocab_size, threads))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
