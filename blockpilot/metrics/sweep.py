"""What the tau of every prompt at every block size says: the best single size, and what choosing per prompt could add.

Knows tau curves and choices; nothing of files, models or how the figures are shown. The same figures serve labels of
this project and sweeps that others published.

Shapes: N prompts, K block sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from blockpilot.errors import UserError
from blockpilot.metrics import formulas
from blockpilot.metrics.estimate import Estimate, PairedBootstrap


@dataclass(frozen=True)
class FixedSize:
    """One block size for all prompts."""

    block_size: int
    tau: Estimate
    gain: Estimate | None
    """Relative gain in mean tau over always-B, prompts paired; None for B itself, or where B has no labels."""


@dataclass(frozen=True)
class OracleGain:
    """The best of some candidates for each prompt: what no choice among them can exceed."""

    block_sizes: tuple[int, ...]
    radius: int | None
    """k, where the candidates are {B-k .. B+k}; None where they are all sizes and no such range."""
    tau: Estimate
    gain: Estimate | None
    """Relative gain in mean tau over always-B, prompts paired; None where B has no labels."""
    best_share: tuple[float, ...]
    """Share of the prompts for which each candidate is the best; the sizes of an exact tie share the prompt evenly."""
    tied_prompts: int
    """Prompts with more than one best candidate."""
    median_gap: float | None
    """Median over prompts of (best - second best) / best, 0 for a tie; None for a single candidate."""


@dataclass(frozen=True)
class Choice:
    """A block size chosen for each prompt."""

    candidates: tuple[int, ...]
    """All sizes no further from B than the furthest choice: what the choices are measured against."""
    tau: Estimate
    gain: Estimate | None
    """Relative gain in mean tau over always-B, prompts paired; None where B has no labels."""
    regret: Estimate
    """Mean over prompts of (best - chosen) / best, over ``candidates``."""
    best_prompts: int
    """Prompts whose choice is a best candidate."""


@dataclass(frozen=True)
class SweepSummary:
    """Figures of one set of prompts."""

    block_sizes: tuple[int, ...]
    trained: int
    num_prompts: int
    """Prompts behind every figure."""
    num_prompts_without_rounds: int
    """Prompts left out: without rounds there is no tau."""
    fixed: tuple[FixedSize, ...]
    best_fixed: int
    """The block size of the highest mean tau, the smallest on ties; picked on the prompts it is scored on."""
    oracles: tuple[OracleGain, ...]
    """By rising radius, all sizes last."""
    choice: Choice | None = None

    def fixed_at(self, block_size: int) -> FixedSize | None:
        """The line of one block size; None if it has no labels."""
        return next((one for one in self.fixed if one.block_size == block_size), None)


def summarize_sweep(
    tau_NK: Tensor,
    block_sizes: Sequence[int],
    trained: int,
    chosen_N: Tensor | None = None,
    *,
    samples: int = 2000,
    seed: int = 0,
) -> SweepSummary:
    """All figures of a sweep.

    Args:
        tau_NK: float64 ``[N, K]``; a row of NaN is a prompt without rounds.
        block_sizes: the K sizes, rising.
        trained: B; a sweep without it has no gains.
        chosen_N: block size chosen for each prompt, int64 ``[N]``, each one of ``block_sizes``.
        samples: resamplings behind each interval; all intervals resample the same prompts.
        seed: seed of the resampling.

    Raises:
        UserError: no prompt has rounds.
    """
    kept_N = ~tau_NK.isnan().any(1)
    if not kept_N.any():
        raise UserError(f"no figures by block size: none of the {len(tau_NK)} prompts has any rounds")
    sizes, tau_NK = tuple(block_sizes), tau_NK[kept_N].double()
    sets: dict[tuple[int, ...], int | None] = {window: k for k, window in windows(sizes, trained).items()}
    sets.setdefault(sizes, None)
    columns = {size: tau_NK[:, column] for column, size in enumerate(sizes)}
    of_sets = {own: torch.stack([columns[size] for size in own], 1) for own in sets}
    figures = {**columns, **{own: tau_NC.amax(1) for own, tau_NC in of_sets.items()}}
    scored = None
    if chosen_N is not None:
        scored = _score(tau_NK, sizes, trained, chosen_N[kept_N])
        figures |= {"chosen": scored.tau_N, "regret": scored.regret_N}
    means = _Means(figures, trained if trained in sizes else None, samples, seed)
    return SweepSummary(
        block_sizes=sizes,
        trained=trained,
        num_prompts=len(tau_NK),
        num_prompts_without_rounds=int((~kept_N).sum()),
        fixed=tuple(FixedSize(size, means.estimate(size), means.gain(size)) for size in sizes),
        best_fixed=sizes[formulas.best_fixed(tau_NK)],
        oracles=tuple(
            OracleGain(own, k, means.estimate(own), means.gain(own), *_ties(of_sets[own])) for own, k in sets.items()
        ),
        choice=None if scored is None else scored.summary(means),
    )


@dataclass(frozen=True)
class SequenceBound:
    """The best block size of every round: what no policy that decides again each round can exceed."""

    num_prompts: int
    utility: Estimate
    """Mean over prompts: tokens per round (tau), or per second."""
    gain_over_always: Estimate | None
    """Relative gain over always-B, prompts paired; None where B has no labels."""
    gain_over_oracle: Estimate
    """Relative gain over the best single size of each prompt."""


def summarize_bound(
    best_N: Tensor, utility_NK: Tensor, block_sizes: Sequence[int], trained: int, *, samples: int = 2000, seed: int = 0
) -> SequenceBound:
    """Figures of the best sequences of sizes.

    Args:
        best_N: utility of each prompt's best sequence, float64 ``[N]``; all prompts have rounds.
        utility_NK: of each single size, float64 ``[N, K]``.
        block_sizes: the K sizes.
        trained: B.
        samples: resamplings behind each interval.
        seed: seed of the resampling.
    """
    figures: dict[Hashable, Tensor] = {"best": best_N, "oracle": utility_NK.amax(1)}
    if trained in block_sizes:
        figures["always"] = utility_NK[:, list(block_sizes).index(trained)]
    gains = {base: _Means(figures, base, samples, seed) for base in figures if base != "best"}
    return SequenceBound(
        num_prompts=len(best_N),
        utility=gains["oracle"].estimate("best"),
        gain_over_always=gains["always"].gain("best") if "always" in gains else None,
        gain_over_oracle=cast(Estimate, gains["oracle"].gain("best")),
    )


def windows(block_sizes: Sequence[int], trained: int) -> dict[int, tuple[int, ...]]:
    """``{B-k .. B+k}`` for every k from 1 for which all of these sizes are there."""
    found, radius = {}, 1
    while set(window := tuple(range(trained - radius, trained + radius + 1))) <= set(block_sizes):
        found[radius] = window
        radius += 1
    return found


class _Means:
    """Means of named figures per prompt, and gains over one of them."""

    def __init__(self, figures: Mapping[Hashable, Tensor], base: Hashable | None, samples: int, seed: int) -> None:
        gains = {} if base is None else {("over", base, name): own - figures[base] for name, own in figures.items()}
        self.base = base
        self.sums = PairedBootstrap({**figures, **gains}, samples, seed)

    def estimate(self, name: Hashable) -> Estimate:
        return self.sums.mean(name)

    def gain(self, name: Hashable) -> Estimate | None:
        """Relative gain over the base, prompts paired; None for the base itself and where there is none."""
        if self.base is None or name == self.base:
            return None
        return self.sums.ratio(("over", self.base, name), self.base)


@dataclass(frozen=True)
class _Scored:
    """Choices beside the candidates they are measured against."""

    candidates: tuple[int, ...]
    tau_N: Tensor
    regret_N: Tensor
    best_prompts: int

    def summary(self, means: _Means) -> Choice:
        return Choice(
            self.candidates, means.estimate("chosen"), means.gain("chosen"), means.estimate("regret"), self.best_prompts
        )


def _score(tau_NK: Tensor, sizes: tuple[int, ...], trained: int, chosen_N: Tensor) -> _Scored:
    radius = int((chosen_N - trained).abs().max())
    candidates = tuple(size for size in sizes if abs(size - trained) <= radius)
    tau_NC = tau_NK[:, [sizes.index(size) for size in candidates]]
    column_N = torch.tensor([candidates.index(size) for size in chosen_N.tolist()])
    return _Scored(
        candidates,
        tau_N=tau_NC.gather(1, column_N[:, None])[:, 0],
        regret_N=formulas.regret_per_prompt(tau_NC, column_N),
        best_prompts=int(formulas.is_best(tau_NC, column_N).sum()),
    )


def _ties(tau_NC: Tensor) -> tuple[tuple[float, ...], int, float | None]:
    """Share of the prompts each candidate is best for, prompts with several, median gap to the second best."""
    gap = None
    if tau_NC.shape[1] > 1:
        first_N, second_N = tau_NC.topk(2, dim=1).values.unbind(1)
        gap = float(formulas.relative_loss(first_N, second_N).quantile(0.5))
    tied = int(((tau_NC == tau_NC.amax(1, keepdim=True)).sum(1) > 1).sum())
    return tuple(formulas.best_share(tau_NC).tolist()), tied, gap
