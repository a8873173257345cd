"""From the target's logits after prefill to the sparse distribution that is stored and read.

Knows only tensors: the table of labels and the policies at decode time both come here, so a predictor sees the
same truncated distribution in training and in use. Knows nothing of models, files or features.

Shapes: N prompts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot.oracle.table import Distributions

FIRST_TOPK = 128
"""Most prefill distributions reach their mass within so many tokens, or a few times as many; topk of those is 20 times
faster than a sort."""


def sparse_distributions(logits_NV: Tensor, tail_mass: float) -> Distributions:
    """Softmax in fp32, then :func:`sparsify`.

    Args:
        logits_NV: ``[N, V]``, any floating dtype; temperature and filters not applied.
        tail_mass: probability mass that may be dropped, in [0, 1); 0 keeps every non-zero entry.
    """
    return sparsify(logits_NV.float().softmax(dim=-1), tail_mass)


def sparsify(probs_NV: Tensor, tail_mass: float) -> Distributions:
    """The smallest set of tokens per row with mass of at least ``1 - tail_mass``, sorted by falling probability.

    Equal probabilities are sorted, and cut, by rising token id. The kept probabilities are not rescaled, so the
    dropped mass can still be read off. A row never depends on the others.

    Args:
        probs_NV: float32 ``[N, V]``, rows summing to one up to rounding.
        tail_mass: probability mass that may be dropped, in [0, 1); 0 keeps every non-zero entry.
    """
    num_rows, vocab_size = probs_NV.shape
    single = _single_row(probs_NV, tail_mass) if num_rows == 1 and tail_mass > 0 else None
    if single is not None:
        return single
    counts, threshold = _cut(probs_NV, tail_mass)
    # Everything at or above the threshold, not topk's own indices: those are arbitrary among equal probabilities.
    rows, token_ids = (probs_NV >= threshold[:, None]).nonzero(as_tuple=True)
    probs = probs_NV[rows, token_ids]
    order = probs.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]

    candidates = torch.bincount(rows, minlength=num_rows)
    starts = candidates.cumsum(0) - candidates
    ranks = torch.arange(len(rows), device=rows.device) - starts[rows]
    kept = order[ranks < counts[rows]]  # ``rows`` is sorted, so it also names the row of each place in ``order``
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Distributions(offsets, token_ids[kept], probs[kept], vocab_size)


def _single_row(probs_1V: Tensor, tail_mass: float) -> Distributions | None:
    """The row of a decode, in a fraction of the steps; None where rounding leaves it short of the mass.

    Tokens below ``tail_mass / V`` have less than ``tail_mass`` together: the cut is among the others, which are few.
    """
    vocab_size = probs_1V.shape[-1]
    token_ids = (probs_1V[0] >= tail_mass / vocab_size).nonzero().squeeze(1)
    probs, order = probs_1V[0, token_ids].sort(descending=True, stable=True)
    count = int((probs.cumsum(dim=0, dtype=torch.float64) < 1.0 - tail_mass).sum()) + 1
    if count > len(probs):
        return None
    offsets = torch.tensor([0, count], device=probs_1V.device)
    return Distributions(offsets, token_ids[order[:count]], probs[:count], vocab_size)


def _cut(probs_NV: Tensor, tail_mass: float) -> tuple[Tensor, Tensor]:
    """How many entries each row keeps (int64 ``[N]``) and the smallest probability among them (``[N]``)."""
    nonzero = (probs_NV > 0).sum(dim=-1)
    if tail_mass == 0:
        return nonzero, probs_NV.masked_fill(probs_NV == 0, torch.inf).amin(dim=-1)
    wanted, width = 1.0 - tail_mass, probs_NV.shape[-1]
    k = min(FIRST_TOPK, width)
    while True:
        leading = probs_NV.topk(k, dim=-1).values if k < width else probs_NV.sort(dim=-1, descending=True).values
        # In fp64: fp32 sums of 150k terms are wrong by more than a small tail_mass.
        mass = leading.cumsum(dim=-1, dtype=torch.float64)
        if k == width or bool((mass[:, -1] >= wanted).all()):
            break
        k = min(8 * k, width)
    counts = (mass < wanted).sum(dim=-1) + 1
    counts = counts.minimum(nonzero)  # rounding can leave a whole row just short of the mass
    return counts, leading.gather(1, (counts - 1)[:, None]).squeeze(1)
