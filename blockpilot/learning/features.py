"""What the predictor reads: one view of the prefill, the same from a stored table and from live logits.

Knows the six views of ``preprocess.kind`` and their sizes; nothing of models, labels or training.

Shapes: N prompts, V vocabulary, D hidden size, K top_k, Z stored non-zeros in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.config import PreprocessConfig, require
from blockpilot.errors import UserError
from blockpilot.oracle.prefill import sparse_distributions
from blockpilot.oracle.table import Distributions, LabelTable

LOG_PROB_FLOOR = 1e-9
"""Probability that ``log_probs`` maps to 0, as it does dropped entries: below any token worth storing."""

STATS = ("entropy", "max", "margin", "top3_mass", "top5_mass", "top10_mass", "tail_mass", "log_count")
"""Columns of ``kind=stats``, in order."""


@dataclass(frozen=True)
class Features:
    """Predictor inputs of N prompts: dense rows, or sparse rows in CSR form.

    Sparse row ``i`` is a vector of the vocabulary's size holding ``values[offsets[i]:offsets[i + 1]]`` at
    ``token_ids`` of the same places, and zero elsewhere.
    """

    values: Tensor
    """float32 ``[N, input_size]`` if dense, ``[Z]`` if sparse."""
    offsets: Tensor | None = None
    """int64 ``[N + 1]`` if sparse."""
    token_ids: Tensor | None = None
    """int32 or int64 ``[Z]`` if sparse."""

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def select(self, indices: Tensor) -> Features:
        """The rows at ``indices`` (int64 ``[M]``), in that order, without per-row Python."""
        if self.offsets is None or self.token_ids is None:
            return Features(self.values[indices])
        rows = Distributions(self.offsets, self.token_ids, self.values, vocab_size=0).select(indices)
        return Features(rows.probs, rows.offsets, rows.token_ids)

    def to(self, device: torch.device | str) -> Features:
        """The same features on ``device``."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        token_ids = None if self.token_ids is None else self.token_ids.to(device)
        return Features(self.values.to(device), offsets, token_ids)

    def dense(self, input_size: int) -> Tensor:
        """float32 ``[N, input_size]``: the rows written out in full."""
        if self.offsets is None or self.token_ids is None:
            return self.values
        written = self.values.new_zeros(len(self), input_size)
        written[row_of_each_entry(self.offsets), self.token_ids] = self.values
        return written


@dataclass(frozen=True)
class FeatureExtractor:
    """One of six views of a prefill.

    ========= ====== ========== ============================================================
    kind      rows   input size value
    ========= ====== ========== ============================================================
    probs     sparse V          probability (the paper's text)
    log_probs sparse V          ``log(p / LOG_PROB_FLOOR)``, at least 0; dropped entries are 0
    logits    dense  V          raw logits (the authors' released code)
    topk      dense  top_k      largest probabilities, falling, then zeros
    stats     dense  8          see ``STATS``
    hidden    dense  D          last-layer hidden state of the last prompt position
    ========= ====== ========== ============================================================

    ``topk`` and ``stats`` do not depend on the vocabulary. All but ``logits`` and ``hidden`` read the truncated
    distribution, also at decode time, so ``tail_mass`` must be the one of the labels.
    """

    kind: str = "probs"
    """One of the kinds above."""
    top_k: int = 64
    """Number of probabilities of ``kind=topk``."""
    tail_mass: float = 1e-3
    """Probability mass dropped from a distribution, as ``oracle.tail_mass``."""

    def __post_init__(self) -> None:
        PreprocessConfig(self.kind, self.top_k)  # checks both
        require(0 <= self.tail_mass < 1, "preprocess.tail_mass", self.tail_mass, "a number in [0, 1)")

    @property
    def is_sparse(self) -> bool:
        """Whether the features come as sparse rows over the vocabulary."""
        return self.kind in ("probs", "log_probs")

    def input_size(self, vocab_size: int, hidden_size: int | None = None) -> int:
        """Length of one feature row.

        Raises:
            UserError: ``kind=hidden`` without a hidden size.
        """
        if self.kind == "hidden":
            if hidden_size is None:
                raise UserError("preprocess.kind='hidden' needs hidden_size, got None")
            return hidden_size
        return {"topk": self.top_k, "stats": len(STATS)}.get(self.kind, vocab_size)

    def from_table(self, table: LabelTable) -> Features:
        """Features of every prompt of a table.

        Raises:
            UserError: the table lacks the logits or hidden states this kind reads.
        """
        if self.kind in ("logits", "hidden"):
            dense = table.logits if self.kind == "logits" else table.hidden
            if dense is None:
                raise UserError(
                    f"preprocess.kind={self.kind!r} needs labels collected with oracle.store_{self.kind}=true"
                )
            return Features(dense.float())
        return self._from_distributions(table.distributions)

    def from_logits(self, logits_V: Tensor, hidden_D: Tensor | None = None) -> Features:
        """Features of one prompt at decode time, on the device of what they are made from.

        Args:
            logits_V: ``[V]``, logits at the last prompt position, temperature and filters not applied.
            hidden_D: ``[D]``, last-layer hidden state there; only ``kind=hidden`` reads it.

        Raises:
            UserError: ``kind=hidden`` without a hidden state.
        """
        if self.kind == "hidden":
            if hidden_D is None:
                raise UserError("preprocess.kind='hidden' needs the prefill's hidden state, got None")
            return Features(hidden_D.float()[None])
        if self.kind == "logits":
            return Features(logits_V.float()[None])
        return self._from_distributions(sparse_distributions(logits_V[None], self.tail_mass))

    def _from_distributions(self, rows: Distributions) -> Features:
        if self.kind == "probs":
            return Features(rows.probs, rows.offsets, rows.token_ids)
        if self.kind == "log_probs":
            return Features((rows.probs / LOG_PROB_FLOOR).log().clamp_min(0), rows.offsets, rows.token_ids)
        if self.kind == "topk":
            return Features(_leading_probs(rows, self.top_k))
        assert self.kind == "stats"
        return Features(_stats(rows))


def row_of_each_entry(offsets: Tensor) -> Tensor:
    """int64 ``[Z]``: the row each stored entry belongs to."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


def _leading_probs(rows: Distributions, count: int) -> Tensor:
    """float32 ``[N, count]``: each row's largest probabilities, zero-padded."""
    row = row_of_each_entry(rows.offsets)
    rank = torch.arange(len(row), device=row.device) - rows.offsets[row]
    leading = rows.probs.new_zeros(len(rows), count)
    inside = rank < count
    leading[row[inside], rank[inside]] = rows.probs[inside]
    return leading


def _stats(rows: Distributions) -> Tensor:
    """float32 ``[N, 8]``: the columns ``STATS``; entropy in nats over the stored entries."""
    row, probs = row_of_each_entry(rows.offsets), rows.probs.double()

    def sum_per_row(values: Tensor) -> Tensor:
        return values.new_zeros(len(rows)).index_add_(0, row, values)

    top = _leading_probs(rows, 10).double()
    columns = {
        "entropy": sum_per_row(-torch.special.xlogy(probs, probs)),
        "max": top[:, 0],
        "margin": top[:, 0] - top[:, 1],
        "top3_mass": top[:, :3].sum(dim=-1),
        "top5_mass": top[:, :5].sum(dim=-1),
        "top10_mass": top.sum(dim=-1),
        "tail_mass": (1 - sum_per_row(probs)).clamp_min(0),
        "log_count": rows.offsets.diff().clamp_min(1).double().log(),
    }
    assert tuple(columns) == STATS
    return torch.stack(list(columns.values()), dim=-1).float()
