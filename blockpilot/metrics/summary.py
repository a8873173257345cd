"""From real decodes of the same prompts under several policies to one line of figures per policy.

Knows what one decode reports; nothing of engines, models or how the lines are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.metrics import formulas

Interval = tuple[float, float]
"""Low and high end of a 95 % bootstrap interval over prompts."""


@dataclass(frozen=True)
class DecodedPrompt:
    """One prompt decoded under one policy."""

    policy: str
    prompt_id: str
    dataset: str
    block_sizes: tuple[int, ...]
    """Block size of each round; empty if the prefill token ended the output."""
    first_block_size: int
    """What the policy chose after prefill, used or not."""
    acceptance_lengths: tuple[int, ...]
    """Tokens committed by each round."""
    output_tokens: int
    """Tokens of the output, the prefill token included: 1 + the sum of the acceptance lengths."""
    decode_seconds: float
    """Seconds after prefill, the policy's own included."""
    policy_seconds: float
    """The part of ``decode_seconds`` spent in the policy."""
    prefill_seconds: float

    def __post_init__(self) -> None:
        """Checks that the rounds account for the output."""
        assert len(self.block_sizes) == len(self.acceptance_lengths), self
        assert self.output_tokens == 1 + sum(self.acceptance_lengths), self


@dataclass(frozen=True)
class RoundCosts:
    """What rounds cost by a latency profile, for regret in speed. Both mappings are by prompt id."""

    seconds: Mapping[str, Mapping[int, float]]
    """Seconds of a round of each block size a policy other than the baseline used, at the prompt's context."""
    best_utility: Mapping[str, float]
    """Highest tau(b) / round_seconds(b) over the candidates, from the labels; NaN without rounds."""

    def spent(self, one: DecodedPrompt) -> float:
        """Seconds of all rounds of a decode; equal rounds are multiplied, not added, so that equal choices tie."""
        costs = self.seconds[one.prompt_id]
        return sum(count * costs[size] for size, count in Counter(one.block_sizes).items())


@dataclass(frozen=True)
class PolicySummary:
    """Figures of one policy over the test prompts: NaN where undefined, None where not asked for."""

    policy: str
    num_prompts: int
    num_prompts_without_rounds: int
    """Prompts counted in ``num_prompts`` but left out of ``tau``, ``regret`` and ``headroom_captured``."""
    mean_block_size: float
    """Mean over prompts of the mean over the prompt's rounds."""
    tau: float
    tau_interval: Interval
    tau_pooled: float
    speedup: float
    """Over the baseline; above 1 is faster."""
    speedup_interval: Interval
    regret: float | None
    """Mean relative loss of tau against the best candidate; below 0 if the policy beats every candidate."""
    regret_interval: Interval | None
    headroom_captured: float | None
    headroom_captured_interval: Interval | None
    regret_speed: float | None = None
    """Like ``regret``, of tokens per second of the latency profile; the policy's own time is not in it."""
    regret_speed_interval: Interval | None = None


@dataclass(frozen=True)
class _Columns:
    """The decodes of one policy as float64 or int64 tensors ``[N]``, prompts in the common order."""

    committed_tokens: Tensor
    rounds: Tensor
    block_size_sum: Tensor
    decode_seconds: Tensor

    @property
    def tau(self) -> Tensor:
        return formulas.tau_per_prompt(self.committed_tokens, self.rounds)


def summarize(
    decoded: Sequence[DecodedPrompt],
    *,
    baseline: str,
    always: str,
    oracle: str | None = None,
    best_tau: Mapping[str, float] | None = None,
    costs: RoundCosts | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> list[PolicySummary]:
    """One summary per policy, in the order in which the policies first appear in ``decoded``.

    Args:
        decoded: every policy's decodes; each policy covers the same prompts, each once, in any order.
        baseline: the policy that is plain autoregressive decoding (b = 1); speedups are over it. It gets a line too,
            with tau and speedup 1 and without regret and headroom.
        always: the policy that always uses B; headroom captured is 0 there.
        oracle: the policy that uses each prompt's best candidate; headroom captured is 1 there. None: no such figures.
        best_tau: best tau of each prompt id over the candidates, from the labels; NaN without rounds. None: no regret.
        costs: what rounds cost. None: no regret in speed.
        samples: resamplings behind each interval.
        seed: seed of the resampling.
    """
    prompt_ids, rows = _aligned(decoded, baseline)
    columns = {policy: _columns(own) for policy, own in rows.items()}
    best_tau_N = None
    if best_tau is not None:
        best_tau_N = torch.tensor([best_tau[i] for i in prompt_ids], dtype=torch.float64)

    def estimate(statistic: Callable[..., Tensor], *arrays_N: Tensor) -> tuple[float, Interval]:
        interval = formulas.bootstrap_interval(statistic, *arrays_N, samples=samples, seed=seed)
        return float(statistic(*arrays_N)), interval

    base = columns[baseline]
    summaries = []
    for policy, own in columns.items():
        tau, tau_interval = estimate(_mean_tau, own.committed_tokens, own.rounds)
        speedup, speedup_interval = estimate(
            formulas.speedup, base.decode_seconds, base.committed_tokens, own.decode_seconds, own.committed_tokens
        )
        regret, regret_interval, headroom, headroom_interval = None, None, None, None
        regret_speed, regret_speed_interval = None, None
        if best_tau_N is not None and policy != baseline:
            regret, regret_interval = estimate(_mean, formulas.relative_loss(best_tau_N, own.tau))
        if costs is not None and policy != baseline:
            loss_N = _speed_loss(rows[policy], costs)
            regret_speed, regret_speed_interval = estimate(_mean, loss_N)
        if oracle is not None and policy != baseline:
            headroom, headroom_interval = estimate(
                formulas.headroom_captured, own.tau, columns[always].tau, columns[oracle].tau
            )
        summaries.append(
            PolicySummary(
                policy=policy,
                num_prompts=len(prompt_ids),
                num_prompts_without_rounds=int((own.rounds == 0).sum()),
                mean_block_size=float(_mean_tau(own.block_size_sum, own.rounds)),
                tau=tau,
                tau_interval=tau_interval,
                tau_pooled=float(formulas.pooled_tau(own.committed_tokens, own.rounds)),
                speedup=speedup,
                speedup_interval=speedup_interval,
                regret=regret,
                regret_interval=regret_interval,
                headroom_captured=headroom,
                headroom_captured_interval=headroom_interval,
                regret_speed=regret_speed,
                regret_speed_interval=regret_speed_interval,
            )
        )
    return summaries


def _aligned(decoded: Sequence[DecodedPrompt], baseline: str) -> tuple[list[str], dict[str, list[DecodedPrompt]]]:
    """Prompt ids in the baseline's order and every policy's decodes in that order."""
    by_policy: dict[str, dict[str, DecodedPrompt]] = {}
    for one in decoded:
        rows = by_policy.setdefault(one.policy, {})
        assert one.prompt_id not in rows, f"{one.policy} decoded {one.prompt_id} twice"
        rows[one.prompt_id] = one
    prompt_ids = list(by_policy[baseline])
    for policy, rows in by_policy.items():
        assert rows.keys() == by_policy[baseline].keys(), f"{policy} and {baseline} decoded different prompts"
    return prompt_ids, {policy: [rows[i] for i in prompt_ids] for policy, rows in by_policy.items()}


def _speed_loss(rows: Sequence[DecodedPrompt], costs: RoundCosts) -> Tensor:
    """Share of the best candidate's tokens per second that each decode gives away, float64 ``[N]``."""
    tokens_N = torch.tensor([sum(one.acceptance_lengths) for one in rows])
    seconds_N = torch.tensor([costs.spent(one) for one in rows], dtype=torch.float64)
    best_N = torch.tensor([costs.best_utility[one.prompt_id] for one in rows], dtype=torch.float64)
    return formulas.relative_loss(best_N, formulas.speed_utility(tokens_N, seconds_N))


def _columns(rows: Sequence[DecodedPrompt]) -> _Columns:
    return _Columns(
        committed_tokens=torch.tensor([sum(row.acceptance_lengths) for row in rows]),
        rounds=torch.tensor([len(row.acceptance_lengths) for row in rows]),
        block_size_sum=torch.tensor([sum(row.block_sizes) for row in rows]),
        decode_seconds=torch.tensor([row.decode_seconds for row in rows], dtype=torch.float64),
    )


def _mean_tau(committed_tokens: Tensor, rounds: Tensor) -> Tensor:
    return formulas.mean_tau(committed_tokens, rounds)[0]


def _mean(values: Tensor) -> Tensor:
    return values.nanmean(-1)
