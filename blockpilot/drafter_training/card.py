"""The model card of a trained drafter.

Knows figures; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Held-out prompts of one data set, at T = 0."""

    name: str
    samples: int
    output_tokens: int
    """Of all samples together."""
    tau: Mapping[int, float]
    """Mean over samples of the acceptance length, by block size."""


@dataclass(frozen=True)
class Learned:
    """Texts of one source at one temperature."""

    name: str
    texts: int
    answer_tokens: int


def card(
    target: str,
    trained: Mapping[str, Any],
    parameters: int,
    taps: Sequence[int],
    learned: Sequence[Learned],
    steps: int,
    seconds: float,
    measured: Sequence[Measured],
) -> str:
    """``README.md`` for the folder of a drafter.

    Args:
        target: name of the target it was trained for.
        trained: the settings of the training.
        parameters: of the drafter.
        taps: target layers it reads.
        learned: what it learned from.
        steps: optimizer steps taken.
        seconds: that these took, validations included.
        measured: held-out prompts; may be empty.
    """
    size = trained["block_size"]
    lines = [
        f"# A DFlash drafter for {target}",
        "",
        f"{trained['num_layers']} layers, {parameters:,} parameters, B = {size}; it reads the outputs of target layers "
        f"{', '.join(map(str, taps))} (from 0). Layout and keys are those of z-lab's DFlash checkpoints.",
        "",
        "## What it learned from",
        "",
        "The target's own answers (held-out texts for validation included):",
        "",
        "| source | texts | answer tokens |",
        "| --- | ---: | ---: |",
        *(f"| {one.name} | {one.texts:,} | {one.answer_tokens:,} |" for one in learned),
        f"| all | {sum(one.texts for one in learned):,} | {sum(one.answer_tokens for one in learned):,} |",
        "",
        f"{steps:,} optimizer steps, {seconds:,.0f} seconds on the machine that trained it.",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name} | `{value}` |" for name, value in trained.items() if name != "resume"),
    ]
    if measured:
        sizes = list(measured[0].tau)
        lines += [
            "",
            "## Acceptance length on held-out prompts",
            "",
            "tau (mean over samples of the tokens committed per round) at T = 0, by block size, by replay:",
            "",
            "| data set | samples | output tokens | " + " | ".join(f"b = {b}" for b in sizes) + " |",
            "| --- | ---: | ---: |" + " ---: |" * len(sizes),
            *(
                f"| {one.name} | {one.samples} | {one.output_tokens:,} | "
                + " | ".join(f"{one.tau[b]:.2f}" for b in sizes)
                + " |"
                for one in measured
            ),
        ]
    return "\n".join(lines) + "\n"
