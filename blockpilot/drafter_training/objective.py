"""The DFlash objective: fill masked blocks behind random anchors of known texts.

Knows the drafter's forward pass and the target's embedding and head, which are frozen; nothing of files, targets'
forward passes or loops.

Shapes: R texts, T context positions, A anchors per text, S = B block positions, F tapped features, D hidden size,
V vocabulary, K soft labels per position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockpilot.models.drafter import DFlashDrafter, DrafterContext

NO_TOKEN = -100
"""Stands behind a text's end: no label."""


@dataclass(frozen=True)
class TextBatch:
    """Prompts with the target's answers, padded on the right, and what the target computed over them."""

    tokens_RT: Tensor
    """int64; ``NO_TOKEN`` behind a text's end, at least ``B`` of them behind the longest."""
    prompt_lengths_R: Tensor
    """int64."""
    lengths_R: Tensor
    """int64: tokens of prompt and answer."""
    features_RTF: Tensor
    """Tapped hidden states; T may be shorter than that of the tokens, but covers all that precedes an anchor."""
    soft_ids_RTK: Tensor | None = None
    """int64: the target's most likely tokens at each position of ``tokens_RT``; None without soft labels."""
    soft_probs_RTK: Tensor | None = None
    """Their probabilities, 0 where nothing is known."""

    def to(self, device: torch.device) -> TextBatch:
        """The batch with all tensors on ``device``."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class BlockLoss:
    """What one batch gives; sums, so that batches can be added up."""

    loss: Tensor
    """The objective, a scalar with gradients."""
    right_S: Tensor
    """Drafts equal to the text, at each place behind the anchor, ``[B - 1]``."""
    counted_S: Tensor
    """Drafts that have a label, ``[B - 1]``."""


def draw_anchors(
    prompt_lengths_R: Tensor, lengths_R: Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Anchors without repeats among the answer's tokens that have a successor.

    Args:
        prompt_lengths_R, lengths_R: as in :class:`TextBatch`.
        count: A, most anchors per text.
        generator: of the draw, on the CPU.

    Returns:
        positions int64 ``[R, A]``, and which of them are anchors: a short answer has fewer.
    """
    spans_R = (lengths_R - 1 - prompt_lengths_R).clamp(min=0).cpu()
    widest = max(int(spans_R.max()), count)
    scores = torch.rand(len(spans_R), widest, generator=generator)
    scores = scores.masked_fill(torch.arange(widest) >= spans_R[:, None], -1.0)
    best = scores.topk(count, dim=1)
    valid = (best.values >= 0).to(lengths_R.device)
    places = best.indices.to(lengths_R.device).masked_fill(~valid, 0)
    return prompt_lengths_R[:, None] + places, valid


def block_states(
    drafter: DFlashDrafter, embedding: nn.Module, batch: TextBatch, anchors_RA: Tensor
) -> tuple[Tensor, Tensor]:
    """The drafter's states of masked blocks that stand side by side, each behind its own context.

    A block sees the context strictly before its anchor and, in both directions, itself (DFlash, arXiv 2602.06036,
    section 4).

    Returns:
        states ``[R, A, B - 1, D]`` of the masks, and their positions in the text, int64 ``[R, A, B - 1]``.
    """
    size, device = drafter.block_size, anchors_RA.device
    rows, count = anchors_RA.shape
    width = batch.features_RTF.shape[1]
    positions = anchors_RA[:, :, None] + torch.arange(size, device=device)
    block = torch.full_like(positions, drafter.mask_token_id)
    block[:, :, 0] = batch.tokens_RT.gather(1, anchors_RA).clamp(min=0)
    sees = torch.arange(width, device=device) < anchors_RA.repeat_interleave(size, dim=1)[:, :, None]
    same = torch.arange(count, device=device).repeat_interleave(size)
    same = (same[:, None] == same).expand(rows, -1, -1)
    context_positions = torch.arange(width, device=device).expand(rows, -1)
    keys, values = zip(*drafter.project_context(batch.features_RTF, context_positions, width), strict=True)
    states = drafter(
        embedding(block.flatten(1)),
        positions.flatten(1),
        DrafterContext(list(keys), list(values), width),
        torch.cat([sees, same], dim=2)[:, None],
    )
    return states.view(rows, count, size, -1)[:, :, 1:], positions[:, :, 1:]


def dflash_loss(
    drafter: DFlashDrafter,
    embedding: nn.Module,
    head_VD: Tensor,
    batch: TextBatch,
    anchors_RA: Tensor,
    valid_RA: Tensor | None = None,
    *,
    decay: float,
    soft_weight: float = 0.0,
    occurring_only: bool = False,
) -> BlockLoss:
    """Cross-entropy of masked blocks (DFlash, arXiv 2602.06036, section 4).

    The token ``j`` places behind the anchor weighs ``exp(-(j - 1) / decay)``: an early error costs the rest of the
    block.

    Args:
        drafter: the one that learns.
        embedding: the target's input embedding.
        head_VD: weight of the target's head.
        batch: texts; with ``soft_weight`` above 0 they need soft labels.
        anchors_RA: positions of anchors.
        valid_RA: which of them count; None counts all.
        decay: in tokens; the paper's 7 for B = 16.
        soft_weight: share of the loss that is cross-entropy against the target's own distribution (its most likely
            tokens, renormalised) instead of the text.
        occurring_only: compare with the tokens that occur as labels in the batch, instead of the whole vocabulary. A
            fraction of the work; the drafter never learns that other tokens are unlikely, beyond what it was
            initialised with.
    """
    states, positions = block_states(drafter, embedding, batch, anchors_RA)
    last = batch.tokens_RT.shape[1] - 1
    flat = positions.clamp(max=last).flatten(1)
    labels = batch.tokens_RT.gather(1, flat).view_as(positions)
    labels = labels.masked_fill(positions > last, NO_TOKEN)
    if valid_RA is not None:
        labels = labels.masked_fill(~valid_RA[:, :, None], NO_TOKEN)
    known = labels != NO_TOKEN
    states_ND, labels_N = states[known], labels[known]
    soft = None
    if soft_weight > 0:
        assert batch.soft_ids_RTK is not None and batch.soft_probs_RTK is not None
        rows = torch.arange(len(labels), device=labels.device)[:, None, None].expand_as(positions)[known]
        soft = batch.soft_ids_RTK[rows, positions[known]], batch.soft_probs_RTK[rows, positions[known]].float()
    if occurring_only:
        wanted = labels_N if soft is None else torch.cat([labels_N, soft[0].flatten()])
        occurring, inverse = wanted.unique(return_inverse=True)
        head_VD = head_VD[occurring]
        labels_N, inverse = inverse[: len(labels_N)], inverse[len(labels_N) :]
        soft = None if soft is None else (inverse.view_as(soft[0]), soft[1])
    logits_NV = F.linear(states_ND, head_VD.to(states_ND.dtype)).float()
    losses_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
    if soft is not None:
        ids_NK, probs_NK = soft
        mass_N = probs_NK.sum(dim=1)
        towards = logits_NV.logsumexp(dim=1) - (logits_NV.gather(1, ids_NK) * probs_NK).sum(dim=1) / mass_N.clamp(
            min=1e-9
        )
        losses_N = torch.where(mass_N > 0, torch.lerp(losses_N, towards, soft_weight), losses_N)
    places = torch.arange(positions.shape[2], device=labels.device).expand_as(positions)[known]
    weights_N = torch.exp(-places / decay)
    right = logits_NV.argmax(dim=1) == labels_N
    counts = [torch.bincount(places[of], minlength=positions.shape[2]) for of in (right, torch.ones_like(right))]
    return BlockLoss((losses_N * weights_N).sum() / weights_N.sum().clamp(min=1e-9), *counts)
