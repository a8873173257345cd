"""From real decodes of the same prompts under several policies to one line of figures per policy.

Knows what one decode reports; nothing of engines, models or how the lines are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockpilot.metrics import formulas
from blockpilot.metrics.estimate import Estimate, PairedBootstrap


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
    drafted_sizes: tuple[int, ...] | None = None
    """Positions drafted in each round, of which ``block_sizes`` were verified; None: as many."""

    def __post_init__(self) -> None:
        """Checks that the rounds account for the output."""
        if self.drafted_sizes is None:
            object.__setattr__(self, "drafted_sizes", self.block_sizes)
        assert len(self.block_sizes) == len(self.acceptance_lengths) == len(self.drafted_sizes or ()), self
        assert self.output_tokens == 1 + sum(self.acceptance_lengths), self


@dataclass(frozen=True)
class RoundCosts:
    """What rounds cost by a latency profile, for regret in speed. Both mappings are by prompt id."""

    seconds: Mapping[str, Mapping[int, float]]
    """Seconds of a round of each block size a policy other than the baseline used, at the prompt's context."""
    best_utility: Mapping[str, float]
    """Highest tau(b) / round_seconds(b) over the candidates, from the labels; NaN without rounds."""
    draft_seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """The draft pass's part of ``seconds``, for rounds that draft more than they verify."""

    def spent(self, one: DecodedPrompt) -> float:
        """Seconds of all rounds of a decode; equal rounds are multiplied, not added, so that equal choices tie.

        A round that drafts d and verifies v costs what one of v costs, with the draft pass of d in place of v's.
        """
        costs, total = self.seconds[one.prompt_id], 0.0
        for (verified, drafted), count in Counter(zip(one.block_sizes, one.drafted_sizes or (), strict=True)).items():
            seconds = costs[verified]
            if drafted != verified:
                draft = self.draft_seconds[one.prompt_id]
                seconds += draft[drafted] - draft[verified]
            total += count * seconds
        return total


@dataclass(frozen=True)
class PolicySummary:
    """Figures of one policy over the test prompts: NaN where undefined, None where not asked for or not measured.

    All intervals are over the same resampled prompts, so what compares two policies is paired.
    """

    policy: str
    num_prompts: int
    num_prompts_without_rounds: int
    """Prompts counted in ``num_prompts`` but without a tau: left out of all that is made of tau."""
    mean_block_size: float
    """Mean over prompts of the mean over the prompt's rounds."""
    tau: Estimate
    tau_pooled: float
    tau_gain: Estimate | None
    """Mean difference in tau to always-B, relative to always-B's mean; None for always-B itself."""
    speedup: Estimate | None
    """Over the baseline; above 1 is faster. None without measured seconds."""
    speed_gain: Estimate | None
    """Relative gain in measured tokens per second over always-B, the policy's own time included. None for always-B
    itself and without measured seconds."""
    accuracy: float | None
    """Share of the prompts on which the policy reaches the best candidate's tau. Any of several best ones is right, and
    so is a policy that decides every round and exceeds them."""
    regret: Estimate | None
    """Mean relative loss of tau against the best candidate; below 0 if the policy beats every candidate."""
    regret_speed: Estimate | None
    """Like ``regret``, of tokens per second of the latency profile; the policy's own time is not in it."""
    headroom_captured: Estimate | None
    choices: Mapping[int, int]
    """How many prompts the policy chose each block size for, after prefill; sizes rising."""


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
        decoded: every policy's decodes; each policy covers the same prompts, each once, in any order. Seconds are NaN
            where nothing was measured.
        baseline: the policy that is plain autoregressive decoding (b = 1); speedups are over it. It gets a line too,
            with tau and speedup 1 and without regret, accuracy and headroom.
        always: the policy that always uses B; gains are over it, and headroom captured is 0 there.
        oracle: the policy that uses each prompt's best candidate; headroom captured is 1 there. None: no such figures.
        best_tau: best tau of each prompt id over the candidates, from the labels; NaN without rounds. None: no regret
            and no accuracy.
        costs: what rounds cost. None: no regret in speed.
        samples: resamplings behind each interval.
        seed: seed of the resampling.
    """
    prompt_ids, rows = _aligned(decoded, baseline)
    best_tau_N = None
    if best_tau is not None:
        best_tau_N = torch.tensor([best_tau[i] for i in prompt_ids], dtype=torch.float64)
    columns = {
        # plain decoding is what block sizes are compared with, not a choice of one: it has nothing to lose
        policy: _Columns.of(own, *((None, None) if policy == baseline else (best_tau_N, costs)))
        for policy, own in rows.items()
    }
    figures = _Figures(columns, baseline, always, oracle, samples, seed)
    return [figures.summary(policy, Counter(one.first_block_size for one in own)) for policy, own in rows.items()]


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


@dataclass(frozen=True)
class _Columns:
    """What one policy did with each prompt: ``[N]`` tensors, prompts in the common order; NaN without rounds."""

    tokens: Tensor
    rounds: Tensor
    tau: Tensor
    mean_block_size: Tensor
    seconds: Tensor | None
    """None where not measured."""
    loss: Tensor | None
    """Relative loss of tau against the best candidate; None without labels and for the baseline."""
    speed_loss: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[DecodedPrompt], best_tau_N: Tensor | None, costs: RoundCosts | None) -> _Columns:
        tokens_N = torch.tensor([sum(row.acceptance_lengths) for row in rows])
        rounds_N = torch.tensor([len(row.acceptance_lengths) for row in rows])
        seconds_N = torch.tensor([row.decode_seconds for row in rows], dtype=torch.float64)
        tau_N = formulas.tau_per_prompt(tokens_N, rounds_N)
        return cls(
            tokens=tokens_N,
            rounds=rounds_N,
            tau=tau_N,
            mean_block_size=formulas.ratio(torch.tensor([sum(row.block_sizes) for row in rows]), rounds_N),
            seconds=None if seconds_N.isnan().any() else seconds_N,
            loss=None if best_tau_N is None else formulas.relative_loss(best_tau_N, tau_N),
            speed_loss=None if costs is None else _speed_loss(rows, costs),
        )


class _Figures:
    """The figures of all policies, from one set of resampled prompts."""

    def __init__(self, columns: Mapping[str, _Columns], baseline: str, always: str, oracle: str | None,
                 samples: int, seed: int) -> None:  # fmt: skip
        self.columns, self.baseline, self.always, self.oracle = columns, baseline, always, oracle
        numbers: dict[Hashable, Tensor] = {}
        base = columns[always]
        for policy, own in columns.items():
            numbers |= {
                ("tau", policy): own.tau,
                ("more tau", policy): own.tau - base.tau,
                ("tokens", policy): own.tokens,
                ("more tokens", policy): own.tokens - base.tokens,
            }
            if own.seconds is not None:
                numbers["seconds", policy] = own.seconds
            if own.seconds is not None and base.seconds is not None:
                numbers["saved seconds", policy] = base.seconds - own.seconds
            if own.loss is not None:
                numbers["loss", policy] = own.loss
            if own.speed_loss is not None:
                numbers["speed loss", policy] = own.speed_loss
        self.known = numbers.keys()
        self.sums = PairedBootstrap(numbers, samples, seed)

    def summary(self, policy: str, choices: Mapping[int, int]) -> PolicySummary:
        own = self.columns[policy]
        return PolicySummary(
            policy=policy,
            num_prompts=len(own.rounds),
            num_prompts_without_rounds=int((own.rounds == 0).sum()),
            mean_block_size=float(own.mean_block_size.nanmean()),
            tau=self.sums.mean(("tau", policy)),
            tau_pooled=float(formulas.pooled_tau(own.tokens, own.rounds)),
            tau_gain=None if policy == self.always else self.sums.ratio(("more tau", policy), ("tau", self.always)),
            speedup=self._speedup(policy),
            speed_gain=self._speed_gain(policy),
            accuracy=_share_without_loss(own.loss),
            regret=self._mean(("loss", policy)),
            regret_speed=self._mean(("speed loss", policy)),
            headroom_captured=self._headroom(policy),
            choices=dict(sorted(choices.items())),
        )

    def _mean(self, name: Hashable) -> Estimate | None:
        return self.sums.mean(name) if name in self.known else None

    def _headroom(self, policy: str) -> Estimate | None:
        if self.oracle is None or policy == self.baseline:
            return None
        return self.sums.ratio(("more tau", policy), ("more tau", self.oracle))

    def _speedup(self, policy: str) -> Estimate | None:
        names = [(name, one) for one in (self.baseline, policy) for name in ("seconds", "tokens")]
        if not self.known >= set(names):
            return None
        return self.sums.estimate(lambda total: formulas.speedup(*map(total, names)))

    def _speed_gain(self, policy: str) -> Estimate | None:
        if policy == self.always or ("saved seconds", policy) not in self.known:
            return None
        names = [("saved seconds", policy), ("seconds", policy), ("more tokens", policy), ("tokens", self.always)]
        return self.sums.estimate(lambda total: formulas.speed_gain(*map(total, names)))


def _share_without_loss(loss_N: Tensor | None) -> float | None:
    """Share of the prompts with a loss that lose nothing; a loss is exactly 0 where two tau are the same."""
    return None if loss_N is None else float((loss_N[~loss_N.isnan()] <= 0).double().mean())
