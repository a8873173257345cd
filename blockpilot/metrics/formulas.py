"""Every figure the project reports, as a pure function of tensors.

Knows tokens, rounds, seconds and utilities; nothing of models, policies, files or where the numbers come from.

Shapes: N prompts, K candidate block sizes, S bootstrap samples. A function that reduces over prompts does so over the
last dimension, so that ``[S, N]`` gives ``[S]``: one call serves a plain figure and all resamplings of it. Results are
float64. NaN means "no value" (a prompt without rounds has no tau) and is left out of every mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blockpilot.errors import UserError

_RESAMPLED_ELEMENTS = 1 << 22
"""Most elements of one resampled array held at a time by a bootstrap: 32 MiB in float64."""


def tau_per_prompt(committed_tokens: Tensor, rounds: Tensor) -> Tensor:
    """Mean acceptance length of each prompt.

    Equal ratios give equal floats (IEEE division rounds correctly), so ties between block sizes stay exact ties.

    Args:
        committed_tokens: sum of a prompt's acceptance lengths, any shape.
        rounds: number of its rounds, same shape.

    Returns:
        float64, same shape; NaN where there are no rounds.
    """
    return ratio(committed_tokens, rounds)


def mean_tau(committed_tokens: Tensor, rounds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over prompts of the per-prompt tau, the paper's figure (arXiv 2606.31315).

    Args:
        committed_tokens: ``[..., N]``.
        rounds: ``[..., N]``.

    Returns:
        tau: float64 ``[...]``; NaN if no prompt has rounds.
        num_prompts_without_rounds: int64 ``[...]``: prompts left out of it.
    """
    return tau_per_prompt(committed_tokens, rounds).nanmean(-1), (rounds == 0).sum(-1)


def pooled_tau(committed_tokens: Tensor, rounds: Tensor) -> Tensor:
    """All committed tokens over all rounds: each round weighs the same, so long outputs weigh more.

    Args:
        committed_tokens: ``[..., N]``.
        rounds: ``[..., N]``.

    Returns:
        float64 ``[...]``; NaN if there are no rounds at all.
    """
    return ratio(committed_tokens.sum(-1), rounds.sum(-1))


def speed_utility(committed_tokens: Tensor, seconds: Tensor) -> Tensor:
    """Tokens per second of the rounds: tau(b) / round_seconds(b) where a prompt's rounds all have one block size.

    Args:
        committed_tokens: sum of a prompt's acceptance lengths, any shape.
        seconds: sum of what its rounds cost by a latency profile, same shape; for one block size, rounds x seconds.

    Returns:
        float64, same shape; NaN where there are no rounds.
    """
    return ratio(committed_tokens, seconds)


def best_choice(utility_NK: Tensor) -> Tensor:
    """Column of the highest utility of each prompt; the first such column, the smallest block size, on ties.

    Args:
        utility_NK: ``[N, K]``, columns by rising block size.

    Returns:
        int64 ``[N]``. A row of NaN (a prompt without rounds) has no best column and gets 0: drop those rows.
    """
    return utility_NK.nan_to_num(nan=-torch.inf).argmax(1)


def best_fixed(utility_NK: Tensor) -> int:
    """The one column to use for every prompt: highest mean utility over prompts with rounds, the first on ties.

    Args:
        utility_NK: ``[N, K]``; NaN rows are prompts without rounds.

    Raises:
        UserError: no prompt has rounds.
    """
    mean_K = utility_NK.double().nanmean(0)
    if mean_K.isnan().any():
        raise UserError(f"no best fixed block size: none of the {len(utility_NK)} prompts has any rounds")
    return int(mean_K.argmax())


def regret_per_prompt(utility_NK: Tensor, choice_N: Tensor) -> Tensor:
    """Share of the best utility that a choice gives away: (best - chosen) / best.

    Args:
        utility_NK: ``[N, K]``, above 0 or a row of NaN.
        choice_N: int64 ``[N]``, column index of each prompt's choice.

    Returns:
        float64 ``[N]`` in [0, 1); NaN rows stay NaN.
    """
    return relative_loss(*_best_and_chosen(utility_NK, choice_N))


def relative_loss(best: Tensor, own: Tensor) -> Tensor:
    """(best - own) / best, the regret of one prompt; below 0 where ``own`` is no candidate and beats them all."""
    return (best - own) / best


def is_best(utility_NK: Tensor, choice_N: Tensor) -> Tensor:
    """Whether a choice reaches the best utility of its row; every column of an exact tie counts as right.

    Args:
        utility_NK: ``[N, K]``.
        choice_N: int64 ``[N]``, column index of each prompt's choice.

    Returns:
        bool ``[N]``; False in NaN rows, which callers drop.
    """
    best_N, chosen_N = _best_and_chosen(utility_NK, choice_N)
    return best_N == chosen_N


def best_share(utility_NK: Tensor) -> Tensor:
    """Share of the prompts for which each column is the best; the columns of an exact tie share the prompt evenly.

    Args:
        utility_NK: ``[N, K]`` without NaN.

    Returns:
        float64 ``[K]`` that sums to 1.
    """
    is_best_NK = (utility_NK == utility_NK.amax(1, keepdim=True)).double()
    return (is_best_NK / is_best_NK.sum(1, keepdim=True)).mean(0)


def headroom_captured(policy_tau: Tensor, always_tau: Tensor, oracle_tau: Tensor) -> Tensor:
    """Share of the way from always-B to the oracle that a policy covers.

    (mean policy - mean always) / (mean oracle - mean always), over the prompts with rounds. Negative if the policy
    loses to always-B. Differences are taken per prompt, so always picking B scores exactly 0 and the oracle exactly 1.

    Args:
        policy_tau: tau per prompt, ``[..., N]``; NaN without rounds, then in all three.
        always_tau: ``[..., N]``.
        oracle_tau: ``[..., N]``.

    Returns:
        float64 ``[...]``; NaN where the oracle is no better than always-B.
    """
    gain = (policy_tau.double() - always_tau).nansum(-1)
    headroom = (oracle_tau.double() - always_tau).nansum(-1)
    return share_of_headroom(gain, headroom)


def share_of_headroom(gain: Tensor, headroom: Tensor) -> Tensor:
    """``gain / headroom``, NaN where there is no headroom."""
    return ratio(gain, headroom)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Float64 quotient; NaN where the denominator is not above 0."""
    return torch.where(denominator > 0, numerator.double() / denominator.double(), torch.nan)


def speedup(baseline_seconds: Tensor, baseline_tokens: Tensor, seconds: Tensor, tokens: Tensor) -> Tensor:
    """How many times fewer seconds an output token takes than in the baseline, from totals over the same prompts.

    Seconds and tokens are those of the decode phase: the prefill and the one token it yields are in neither, a policy's
    own time is in ``seconds``.

    Args:
        baseline_seconds: decode seconds of plain autoregressive decoding, all prompts together, any shape.
        baseline_tokens: its output tokens less the prefill tokens, same shape.
        seconds: decode seconds, all prompts together, same shape.
        tokens: output tokens less the prefill tokens, same shape.

    Returns:
        float64, same shape; NaN if either side has no decode tokens or took no time.
    """
    return ratio(ratio(baseline_seconds, baseline_tokens), ratio(seconds, tokens))


def speed_gain(saved_seconds: Tensor, seconds: Tensor, more_tokens: Tensor, always_tokens: Tensor) -> Tensor:
    """Relative gain in tokens per second over always-B, from totals over the same prompts.

    (tokens / seconds) / (always_tokens / always_seconds) - 1, written with differences, so that it is exactly 0 where
    there are none. Seconds and tokens are as in :func:`speedup`; decoding is lossless, so there are rarely more tokens.

    Args:
        saved_seconds: always_seconds - seconds, any shape.
        seconds: decode seconds of the policy, same shape.
        more_tokens: tokens - always_tokens, same shape.
        always_tokens: decode tokens under always-B, same shape.

    Returns:
        float64, same shape; NaN without time or tokens.
    """
    return (1 + ratio(saved_seconds, seconds)) * (1 + ratio(more_tokens, always_tokens)) - 1


def bootstrap_interval(
    statistic: Callable[..., Tensor],
    *arrays_N: Tensor,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval over prompts (Efron and Tibshirani 1993, section 13.3).

    Prompts are drawn with replacement and all arrays are indexed with the same draw, so a comparison of two policies
    stays paired. The draws depend on ``seed`` alone; the global random state is neither read nor changed.

    Args:
        statistic: takes the resampled arrays, each ``[S, N]``, and returns ``[S]``; the functions of this module do.
        *arrays_N: one or more tensors ``[N]``, an entry per prompt.
        samples: number of resamplings.
        confidence: probability mass inside the interval.
        seed: seed of the resampling.

    Returns:
        (low, high). Resamplings on which the statistic is NaN are left out; both are NaN if that is all of them.
    """
    num_prompts = len(arrays_N[0])
    assert all(array.shape == (num_prompts,) for array in arrays_N), [array.shape for array in arrays_N]
    if num_prompts == 0:
        return torch.nan, torch.nan
    values = [
        statistic(*(array[drawn_SN.to(array.device)] for array in arrays_N))
        for drawn_SN in _resamplings(num_prompts, samples, seed)
    ]
    return percentile_interval(torch.cat(values), confidence)


def bootstrap_sums(values_NM: Tensor, samples: int = 2000, seed: int = 0) -> Tensor:
    """Sums over resampled prompts of many figures at once, by the same draws as :func:`bootstrap_interval`.

    Every figure that is a function of sums (a mean, a ratio of means) has its interval from the result, paired.

    Args:
        values_NM: M figures of each of N >= 1 prompts, without NaN.
        samples: number of resamplings S.
        seed: seed of the resampling.

    Returns:
        float64 ``[S, M]``.
    """
    num_prompts = len(values_NM)
    sums = []
    for drawn_SN in _resamplings(num_prompts, samples, seed):
        times_SN = torch.zeros(drawn_SN.shape, dtype=torch.float64)
        times_SN.scatter_add_(1, drawn_SN, torch.ones_like(times_SN))
        sums.append(times_SN @ values_NM.double())
    return torch.cat(sums)


def percentile_interval(values_S: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """The ends of the middle ``confidence`` of the values that are not NaN; both are NaN if none is left."""
    tail = (1 - confidence) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = values_S.double().cpu().nanquantile(ends).tolist()
    return low, high


def _resamplings(num_prompts: int, samples: int, seed: int) -> Iterator[Tensor]:
    """Prompts drawn with replacement, int64 ``[S, N]`` of as many samples as may be held at a time."""
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, _RESAMPLED_ELEMENTS // num_prompts)
    for start in range(0, samples, at_once):
        yield torch.randint(num_prompts, (min(at_once, samples - start), num_prompts), generator=generator)


def _best_and_chosen(utility_NK: Tensor, choice_N: Tensor) -> tuple[Tensor, Tensor]:
    """Highest and chosen utility of each row, float64 ``[N]``."""
    utility_NK = utility_NK.double()
    return utility_NK.amax(1), utility_NK.gather(1, choice_N[:, None]).squeeze(1)
