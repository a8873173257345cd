"""The browsable list of prompts: of each its text, its tau curve, and what every policy did with it.

Knows what is shown and how it is rounded; no markup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blockpilot.report.run_files import Run
from blockpilot.report.table import NO_VALUE

MOST_PROMPTS = 400
"""A page with more would be slow on a phone; all of them are in ``prompts.parquet`` and ``decisions.parquet``."""
CURVE_WIDTH, CURVE_HEIGHT = 200, 60
MOST_LETTERS = 2000
"""Of a prompt's text."""


@dataclass(frozen=True)
class Point:
    """One candidate of a prompt."""

    block_size: int
    tau: str
    is_best: bool
    x: float
    y: float
    """Place in a drawing of ``CURVE_WIDTH`` by ``CURVE_HEIGHT``, y downwards."""


@dataclass(frozen=True)
class Choice:
    """What one policy did with a prompt."""

    policy: str
    block_size: int
    tau: str
    regret: str


@dataclass(frozen=True)
class Prompt:
    """An entry of the list."""

    prompt_id: str
    dataset: str
    text: str
    state: str
    """``best``, ``lost`` or, without rounds, ``none``: what became of the choice of the policy in question."""
    below_always: bool
    """Whether that policy did worse than always-B."""
    best: str
    """The best sizes, as text."""
    chosen: int
    regret: str
    points: tuple[Point, ...]
    choices: tuple[Choice, ...]


def prompt_entries(run: Run) -> list[Prompt]:
    """The prompts of the table, largest regret of the policy in question first; evenly spread where they are many."""
    own_N, loss_N = run.tau(run.about.policy), run.loss(run.about.policy).tolist()
    always_N = run.tau(run.about.always)
    order = sorted(range(len(loss_N)), key=lambda i: (math.isnan(loss_N[i]), -loss_N[i]))
    count = min(len(order), MOST_PROMPTS)
    order = [order[i * len(order) // count] for i in range(count)]
    outcomes = {p: (run.chosen(p), run.tau(p).tolist(), run.loss(p).tolist()) for p in run.choosing}
    tau_NK, chosen = run.curves.tau.tolist(), run.chosen(run.about.policy)
    entries = []
    for index in order:
        points = _points(run.curves.block_sizes, tau_NK[index])
        text = run.curves.texts[index].strip()
        nan = math.isnan(loss_N[index])
        entries.append(
            Prompt(
                prompt_id=run.curves.prompt_ids[index],
                dataset=run.curves.datasets[index],
                text=text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…",
                state="none" if nan else "best" if loss_N[index] <= 0 else "lost",
                below_always=bool(own_N[index] < always_N[index]),
                best=", ".join(str(point.block_size) for point in points if point.is_best) or NO_VALUE,
                chosen=chosen[index],
                regret=_percent(loss_N[index]),
                points=points,
                choices=tuple(
                    Choice(policy, sizes[index], _number(taus_N[index]), _percent(losses_N[index]))
                    for policy, (sizes, taus_N, losses_N) in outcomes.items()
                ),
            )
        )
    return entries


def _points(sizes: Sequence[int], tau_K: Sequence[float]) -> tuple[Point, ...]:
    """The curve in a box, its lowest point at the bottom; no points without rounds."""
    if any(map(math.isnan, tau_K)):
        return ()
    low, high = min(tau_K), max(tau_K)
    reach, width = high - low or 1.0, sizes[-1] - sizes[0] or 1
    return tuple(
        Point(
            block_size=size,
            tau=_number(tau),
            is_best=tau == high,
            x=round(CURVE_WIDTH * (size - sizes[0]) / width, 1),
            y=round(CURVE_HEIGHT * (high - tau) / reach, 1),
        )
        for size, tau in zip(sizes, tau_K, strict=True)
    )


def _number(value: float) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:.1%}"
