"""What labels cost: ``python benchmarks/oracle.py [--rows tiny ...]``; prints one table.

Replay (trajectory decoding included) and enumeration run in one process on the same pair and prompts, and take turns; a
ratio is that of one turn, and the table gives the median over turns, quartiles in brackets. Their labels must be equal
round for round. ``smollm2`` is a random pair in the shape of SmolLM2-135M (see ``engines.py``) on short prompts. The
cache's own figures are printed by ``cache_reading.py``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from engines import Subject, subject
from shared import machine, quartiles, seconds

import blockpilot as bp

RADIUS = 3
LOCALITY = range(2, 33)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    what: str
    goal: str
    measure: Callable[[argparse.Namespace], Figure]

    @property
    def words(self) -> set[str]:
        """What ``--rows`` may name it by."""
        return {self.model, *self.what.split()}


@dataclass(frozen=True)
class Figure:
    """A median with its quartiles, whether it is good enough, and the two sides of it."""

    text: str
    reached: bool
    ours: str
    other: str


def over_enumeration(given: Subject, args: argparse.Namespace, goal: float) -> Figure:
    """Seconds of enumeration over seconds of replay, k = 3.

    Raises:
        RuntimeError: their labels differ.
    """
    sizes = range(given.pair.block_size - RADIUS, given.pair.block_size + RADIUS + 1)
    slow, fast, ratios = [], [], []
    labels: dict[str, list[bp.oracle.OracleRecord]] = {}

    def label(method: str) -> None:
        labels[method] = _label(getattr(bp.oracle, method), given, sizes)

    for _ in range(args.repeats):
        fast.append(seconds(lambda: label("replay"), given.pair.device))
        slow.append(seconds(lambda: label("enumerate"), given.pair.device))
        ratios.append(slow[-1] / fast[-1])
        if given.pair.target.dtype == torch.float32 and not _equal(labels["replay"], labels["enumerate"]):
            raise RuntimeError("replay and enumeration give different labels")
    return _figure(ratios, statistics.median(ratios) >= goal, fast, slow)


def more_candidates(given: Subject, args: argparse.Namespace, goal: float) -> Figure:
    """Seconds of a replay of 31 candidates (2..32) over those of 7."""
    few = range(given.pair.block_size - RADIUS, given.pair.block_size + RADIUS + 1)
    many_seconds, few_seconds, ratios = [], [], []
    for _ in range(args.repeats):
        few_seconds.append(seconds(lambda: _label(bp.oracle.replay, given, few), given.pair.device))
        many_seconds.append(seconds(lambda: _label(bp.oracle.replay, given, LOCALITY), given.pair.device))
        ratios.append(many_seconds[-1] / few_seconds[-1])
    return _figure(ratios, statistics.median(ratios) <= goal, many_seconds, few_seconds)


def _label(
    method: Callable[..., list[bp.oracle.OracleRecord]], given: Subject, sizes: Sequence[int]
) -> list[bp.oracle.OracleRecord]:
    return method(
        given.pair, given.prompts, sizes, max_new_tokens=given.max_new_tokens, stop_token_ids=given.stop_token_ids
    )


def _equal(some: list[bp.oracle.OracleRecord], others: list[bp.oracle.OracleRecord]) -> bool:
    return all(
        one.output_ids == other.output_ids and one.acceptance_lengths == other.acceptance_lengths
        for one, other in zip(some, others, strict=True)
    )


def _figure(ratios: Sequence[float], reached: bool, ours: Sequence[float], other: Sequence[float]) -> Figure:
    median, low, high = quartiles(ratios)
    sides = [f"{statistics.median(values):.2f} s" for values in (ours, other)]
    return Figure(f"{median:.2f}x ({low:.2f} to {high:.2f})", reached, *sides)


def _tiny(args: argparse.Namespace) -> Subject:
    return subject("tiny", args.device, args.prompts, args.max_new_tokens)


def _smollm2(args: argparse.Namespace) -> Subject:
    """16 prompts of 64 random tokens, 32 new tokens: enumeration takes minutes on a CPU."""
    one = subject("smollm2", args.device, 1, args.max_new_tokens or 32)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(one.pair.vocab_size, (min(16, args.prompts), 64), generator=generator).tolist()
    return Subject(one.pair, prompts, one.max_new_tokens, ())


ROWS = (
    Row("tiny", "replay over enumeration", ">= 10x", lambda args: over_enumeration(_tiny(args), args, 10)),
    Row("smollm2", "replay over enumeration", ">= 8x", lambda args: over_enumeration(_smollm2(args), args, 8)),
    Row("tiny", "31 candidates over 7", "<= 4x", lambda args: more_candidates(_tiny(args), args, 4)),
)


def main() -> None:
    words = sorted(set().union(*(row.words for row in ROWS)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=words, default=[], metavar="WORD",
                        help=f"rows that have all of these words, out of: {', '.join(words)}")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64, help="of the embedded pair; smollm2 has at most 16")
    parser.add_argument("--max-new-tokens", type=int, help="default: 160, smollm2 32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="fp32 on a CPU, bf16 on a GPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{machine()}; T = 0, {args.repeats} turns\n", flush=True)
    print("| model | what | goal | median (quartiles) | reached | ours | other |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for row in ROWS:
        if set(args.rows) <= row.words:
            figure = row.measure(args)
            reached = "yes" if figure.reached else "no"
            cells = (row.model, row.what, row.goal, figure.text, reached, figure.ours, figure.other)
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
