"""What a product of few rows costs on a CPU: in tiles, the weight first, and as torch does it; fp32.

    python benchmarks/products.py [--shapes 576x1536 ...] [--rows 1 2 4 8 16] [--repeats 9]

Shapes are width x outputs, by default SmolLM2-135M's; only large ones have a choice (``models/lean.py``). So many
weights of a shape take turns that none is in a cache, as in a forward pass. Cells are medians of milliseconds; ``*``
marks the way that ``models/lean.py`` takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from shared import machine, seconds
from torch import Tensor, nn
from torch.nn import functional as F

from blockpilot.models.lean import Linear

SMOLLM2 = ["576x576", "576x1536", "1536x576", "2880x576", "576x49152"]
WARM_UP_TURNS = 3

Product = Callable[[Tensor], Tensor]


def ways(linear: Linear) -> dict[str, Product]:
    """The three products, by name."""
    return {
        "torch": lambda few: F.linear(few, linear.weight),
        "tiles": linear.in_tiles,
        "weight first": linear.weight_first,
    }


def taken(linear: Linear, rows: int) -> str:
    """The way that ``linear`` itself takes."""
    return next((name for name, product in ways(linear).items() if product == linear.for_rows(rows)), "torch")


def milliseconds(linears: list[Linear], few: Tensor, repeats: int) -> dict[str, float]:
    """Median milliseconds of a product, the ways taking turns."""
    spent: dict[str, list[float]] = {}
    for turn in range(WARM_UP_TURNS + repeats):
        for name in ways(linears[0]):
            took = seconds(lambda name=name: [ways(linear)[name](few) for linear in linears])
            if turn >= WARM_UP_TURNS:
                spent.setdefault(name, []).append(took / len(linears) * 1e3)
    return {name: statistics.median(values) for name, values in spent.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SMOLLM2)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--mebibytes", type=int, default=256, help="of weights that take turns")
    parser.add_argument("--repeats", type=int, default=9)
    wanted = parser.parse_args()
    print("| shape | rows | torch | tiles | weight first | taken over torch |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in wanted.shapes:
        width, size = map(int, shape.split("x"))
        count = max(1, wanted.mebibytes * 2**20 // (4 * width * size))
        linears = [Linear.of(nn.Linear(width, size, bias=False)) for _ in range(count)]
        for rows in wanted.rows:
            took = milliseconds(linears, torch.randn(rows, width), wanted.repeats)
            own = taken(linears[0], rows)
            cells = [f"{value:.3f}{' *' if name == own else ''}" for name, value in took.items()]
            print("|", " | ".join([shape, str(rows), *cells, f"{took['torch'] / took[own]:.2f}x"]), "|")
    print(f"\n{machine()}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
