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
    logits: Tensor | None
    """fp32 ``[V]``, raw, at the last prompt position; None where a cache did not store them."""
    hidden: Tensor | None
    """fp32 ``[D]``, input of the target's head at the last prompt position; None where a cache did not store it."""
    acceptance_table: Tensor | None = None
    """int64 ``[N - 1, K]``: tokens a round commits whose anchor is output token 0, 1, ..., N - 2, for every candidate;
    None where it was not asked for."""
    features: Tensor | None = None
    """``[len(prompt_ids) + N - 1, F]``: tapped hidden states before every anchor; None where they were not kept."""
    states: Tensor | None = None
    """``[N, D]``: input of the target's head that each output token was drawn from, the first of them ``hidden``; None
    where they were not kept."""

    @cached_property
    def tau(self) -> dict[int, float]:
        """Mean acceptance length per candidate; NaN without rounds."""
        return {b: sum(a) / len(a) if a else float("nan") for b, a in self.acceptance_lengths.items()}
