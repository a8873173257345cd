"""Labels by replay against labels by enumeration, on the embedded pair: ``python benchmarks/replay.py``.

Pairs of runs in one process, taking turns; prints the median seconds of each and the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from shared import seconds, tiny_prompts

import blockpilot as bp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pair = bp.load_pair("tiny")
    prompts = tiny_prompts(pair, args.prompts)
    print(f"{len(prompts)} prompts, 160 new tokens, T = 0, fp32, {torch.get_num_threads()} threads, {pair.device}")
    print("| candidates | enumerate s | replay s | ratio |\n| --- | --- | --- | --- |")
    for sizes in (range(14, 19), range(13, 20)):
        bp.oracle.replay(pair, prompts[:2], sizes, max_new_tokens=160)  # warm
        slow, fast = [], []
        for _ in range(args.repeats):
            slow.append(seconds(lambda sizes=sizes: bp.oracle.enumerate(pair, prompts, sizes, max_new_tokens=160)))
            fast.append(seconds(lambda sizes=sizes: bp.oracle.replay(pair, prompts, sizes, max_new_tokens=160)))
        ratio = statistics.median(a / b for a, b in zip(slow, fast, strict=True))
        medians = f"{statistics.median(slow):.2f} | {statistics.median(fast):.2f}"
        print(f"| {sizes[0]}..{sizes[-1]} | {medians} | {ratio:.1f}x |")


if __name__ == "__main__":
    main()
