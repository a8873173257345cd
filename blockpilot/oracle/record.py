"""What the oracle knows of one prompt: the target's output and the acceptance lengths of every candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class OracleRecord:
    """Labels of one prompt."""

    prompt_ids: list[int]
    output_ids: list[int]
    """The target's output, the same for every block size."""
    acceptance_lengths: dict[int, list[int]]
    """Per candidate block size, one length per round; empty where the output is the prefill token alone."""
    logits: Tensor
    """fp32 ``[V]``, raw, at the last prompt position."""
    hidden: Tensor
    """fp32 ``[D]``, input of the target's head at the last prompt position."""

    @cached_property
    def tau(self) -> dict[int, float]:
        """Mean acceptance length per candidate; NaN without rounds."""
        return {b: sum(a) / len(a) if a else float("nan") for b, a in self.acceptance_lengths.items()}
