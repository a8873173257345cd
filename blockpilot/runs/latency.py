"""Costs of rounds for an evaluation: which latency profile it uses, and what follows from that and the labels.

Utility is tau(b) / round_seconds(b), tokens per second. A prompt's rounds are priced at one context, the middle of its
decode: the prompt and half its output, which is the same for every block size.

Shapes: N prompts, K candidate block sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.config import EvaluationConfig, project_path
from blockpilot.decoding import LatencyProfile
from blockpilot.decoding.latency import device_name, profile_path
from blockpilot.errors import UserError
from blockpilot.metrics import DecodedPrompt, RoundCosts, best_choice, best_fixed, speed_utility
from blockpilot.models import Pair
from blockpilot.oracle import LabelTable

log = logging.getLogger(__name__)


def find_profile(
    evaluation: EvaluationConfig, pair: Pair, block_sizes: Sequence[int], *, key: str = "evaluation.latency_profile"
) -> LatencyProfile | None:
    """The profile that ``evaluation.latency_profile`` means; says in one log line which it is.

    ``auto`` takes what is stored for this device and model; if that is of another target, drafter or dtype it is left
    alone with a warning. A file the user names is used on any device (with a warning: its costs are that device's), but
    for no other pair.

    Args:
        evaluation: the run's settings.
        pair: the pair that decodes.
        block_sizes: sizes that will need a cost.
        key: where the user chose it.

    Raises:
        UserError: the file cannot be read or was measured with another pair, or one of the sizes was not measured.
    """
    wanted, device = evaluation.latency_profile, device_name(pair.device)
    if wanted is None:
        return None
    if wanted == "auto":
        path = profile_path(project_path(evaluation.latency_dir), pair.name, device)
        if not path.exists():
            return None
    else:
        path = project_path(wanted)
    profile = LatencyProfile.load(path)
    difference = profile.difference(pair)
    if difference is not None and wanted == "auto":
        log.warning("no regret in speed: latency profile %s %s", path, difference)
        return None
    if difference is not None:
        raise UserError(f"{key}: {path} {difference}; measure with python -m blockpilot.profile")
    if profile.device != device:
        log.warning(
            "latency profile %s is of %s, this run is on %s: costs are the former's", path, profile.device, device
        )
    profile.require(block_sizes)
    log.info("costs of rounds by latency profile %s (%s)", path, profile.device)
    return profile


def contexts(table: LabelTable) -> Tensor:
    """Positions in the middle of each prompt's decode, float64 ``[N]``."""
    prompt_N = table.prompts.offsets.diff().double()
    # committed tokens are the same for every candidate: the output does not depend on the block size
    return prompt_N + (1 + table.committed_tokens[:, 0]) / 2


def round_seconds(table: LabelTable, profile: LatencyProfile) -> Tensor:
    """Seconds of a round of every candidate at every prompt's context, float64 ``[N, K]``."""
    return profile.round_seconds_of(table.block_sizes, contexts(table))


def utilities(table: LabelTable, profile: LatencyProfile) -> Tensor:
    """Tokens per second of every candidate, float64 ``[N, K]``; NaN without rounds."""
    return speed_utility(table.committed_tokens, table.rounds * round_seconds(table, profile))


def round_costs(
    decoded: Sequence[DecodedPrompt], baseline: str, table: LabelTable, profile: LatencyProfile
) -> RoundCosts:
    """What the rounds of all decodes but the baseline's cost, and the best candidates' tokens per second."""
    priced = [one for one in decoded if one.policy != baseline]
    used = sorted({size for one in priced for size in (*one.block_sizes, *(one.drafted_sizes or ()))})
    utility_NK = utilities(table, profile)
    best_N = utility_NK.gather(1, best_choice(utility_NK)[:, None])[:, 0]

    def by_prompt(seconds_NU: Tensor) -> dict[str, dict[int, float]]:
        rows = zip(table.prompt_ids, seconds_NU.tolist(), strict=True)
        return {prompt_id: dict(zip(used, row, strict=True)) for prompt_id, row in rows}

    return RoundCosts(
        seconds=by_prompt(profile.round_seconds_of(used, contexts(table))),
        best_utility=dict(zip(table.prompt_ids, best_N.tolist(), strict=True)),
        draft_seconds=by_prompt(profile.draft_seconds_of(used, contexts(table))),
    )


def speed_figures(table: LabelTable, profile: LatencyProfile | None, trained: int) -> dict[str, float]:
    """What the labels say of speed: the best single size in hindsight, and how much an oracle would gain over B.

    ``eval/best_fixed_speed`` is a block size; ``eval/oracle_speedup_over_always`` is the mean over prompts of the best
    candidate's tokens per second over those of B, as the profile predicts them.
    """
    if profile is None:
        return {}
    utility_NK = utilities(table, profile)
    best_N = utility_NK.gather(1, best_choice(utility_NK)[:, None])[:, 0]
    gain_N = best_N / utility_NK[:, table.block_sizes.index(trained)]
    return {
        "eval/best_fixed_speed": float(table.block_sizes[best_fixed(utility_NK)]),
        "eval/oracle_speedup_over_always": float(torch.nanmean(gain_N)),
    }
