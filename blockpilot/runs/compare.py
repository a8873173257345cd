"""Real speculative decoding of the same prompts under several policies, side by side."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from blockpilot.config import EvaluationConfig, GenerationConfig
from blockpilot.decoding import BlockSizePolicy, Generation, LatencyProfile, generate
from blockpilot.metrics import DecodedPrompt, Estimate, PolicySummary, best_choice, summarize
from blockpilot.models import Pair
from blockpilot.oracle import LabelTable
from blockpilot.policies import FixedPolicy, OraclePolicy, RandomPolicy
from blockpilot.report import progress_bar
from blockpilot.runs.latency import round_costs

log = logging.getLogger(__name__)

AUTOREGRESSIVE = "autoregressive"
ORACLE = "oracle"
WARM_UP_PROMPTS = 2


def always(block_size: int) -> str:
    """Name of the policy that always uses B."""
    return f"always-{block_size}"


def compared_policies(
    pair: Pair, table: LabelTable, best_fixed: int | None, seed: int, **learned: BlockSizePolicy
) -> dict[str, BlockSizePolicy]:
    """The rows of the final table by name: what is given, what was learned, what is possible.

    Args:
        pair: gives B.
        table: labels of the prompts to be decoded, for the oracle; its candidates are random's too.
        best_fixed: the best single block size of the training prompts; None leaves the row out.
        seed: of random.
        learned: the policies in question.
    """
    fixed = {} if best_fixed is None else {"best-fixed": FixedPolicy(best_fixed)}
    return {
        AUTOREGRESSIVE: FixedPolicy(1),
        always(pair.block_size): FixedPolicy(pair.block_size),
        **fixed,
        "random": RandomPolicy(table.block_sizes, seed),
        **learned,
        ORACLE: OraclePolicy.from_table(table),
    }


def spread(table: LabelTable, count: int) -> LabelTable:
    """``count`` prompts evenly spaced over the table (all if it has fewer)."""
    count = min(count, len(table))
    return table.select([i * len(table) // count for i in range(count)])


def decode_policies(
    pair: Pair, table: LabelTable, policies: Mapping[str, BlockSizePolicy], generation: GenerationConfig, title: str
) -> list[DecodedPrompt]:
    """Decodes every prompt of ``table`` under every policy.

    The policies take turns on each prompt, in an order that rotates from prompt to prompt, so that whatever else the
    machine does hits them alike. The first prompts are decoded once before, unmeasured.
    """
    names = list(policies)
    decoded: list[DecodedPrompt] = []
    for index in range(min(WARM_UP_PROMPTS, len(table))):
        for policy in policies.values():
            _decode(pair, table.prompts.row(index), policy, generation)
    with progress_bar(title, len(table)) as advance:
        for index, (prompt_id, dataset) in enumerate(zip(table.prompt_ids, table.datasets, strict=True)):
            turn = index % len(names)
            results = {
                name: _decode(pair, table.prompts.row(index), policies[name], generation)
                for name in names[turn:] + names[:turn]
            }
            decoded += [_decoded(name, prompt_id, dataset, results[name]) for name in names]
            advance(1)
    return decoded


def _decode(pair: Pair, prompt_ids: Sequence[int], policy: BlockSizePolicy, generation: GenerationConfig) -> Generation:
    return generate(
        pair, prompt_ids, policy, max_new_tokens=generation.max_new_tokens, temperature=generation.temperature,
        top_p=generation.top_p, top_k=generation.top_k, seed=generation.seed,
    )  # fmt: skip


def _decoded(policy: str, prompt_id: str, dataset: str, out: Generation) -> DecodedPrompt:
    return DecodedPrompt(
        policy=policy,
        prompt_id=prompt_id,
        dataset=dataset,
        block_sizes=tuple(out.block_sizes),
        first_block_size=out.first_block_size,
        acceptance_lengths=tuple(out.acceptance_lengths),
        output_tokens=len(out.output_ids),
        decode_seconds=out.decode_seconds,
        policy_seconds=out.policy_seconds,
        prefill_seconds=out.prefill_seconds,
    )


def summarize_against(
    decoded: Sequence[DecodedPrompt],
    table: LabelTable,
    trained: int,
    evaluation: EvaluationConfig,
    seed: int,
    latency: LatencyProfile | None = None,
) -> list[PolicySummary]:
    """One line of figures per policy; regret and headroom are against the labels of ``table``.

    With a latency profile there is a regret in speed too.
    """
    best = table.tau.gather(1, best_choice(table.tau)[:, None])[:, 0]
    policies = {one.policy for one in decoded}
    return summarize(
        decoded,
        baseline=AUTOREGRESSIVE,
        always=always(trained),
        oracle=ORACLE if ORACLE in policies else None,
        best_tau=dict(zip(table.prompt_ids, best.tolist(), strict=True)),
        costs=None if latency is None else round_costs(decoded, AUTOREGRESSIVE, table, latency),
        samples=evaluation.bootstrap_samples,
        seed=seed,
    )


def label_agreement(decoded: Sequence[DecodedPrompt], table: LabelTable) -> float:
    """Share of decodes whose tokens and rounds are those of their label; 1 in fp32 unless two logits nearly tie."""
    rows = {prompt_id: index for index, prompt_id in enumerate(table.prompt_ids)}
    checked, agreed = 0, 0
    for one in decoded:
        if one.first_block_size in table.block_sizes and len(set(one.block_sizes)) <= 1:
            place = rows[one.prompt_id], table.block_sizes.index(one.first_block_size)
            label = (int(table.committed_tokens[place]), int(table.rounds[place]))
            checked += 1
            agreed += label == (sum(one.acceptance_lengths), len(one.acceptance_lengths))
    share = agreed / checked if checked else float("nan")
    if agreed < checked:
        log.warning("%d of %d decodes differ from their label in tokens or rounds", checked - agreed, checked)
    return share


def summarize_datasets(
    decoded: Sequence[DecodedPrompt],
    table: LabelTable,
    trained: int,
    evaluation: EvaluationConfig,
    seed: int,
    latency: LatencyProfile | None = None,
) -> dict[str, list[PolicySummary]]:
    """The lines of :func:`summarize_against` for each data set by itself; none where there is only one."""
    by_dataset: dict[str, list[DecodedPrompt]] = {}
    for one in decoded:
        by_dataset.setdefault(one.dataset, []).append(one)
    if len(by_dataset) < 2:
        return {}
    return {name: summarize_against(own, table, trained, evaluation, seed, latency) for name, own in by_dataset.items()}


def figures(summaries: Sequence[PolicySummary], policy: str, trained: int) -> dict[str, float]:
    """The ``eval/`` figures of one policy, next to always-B; those that have no value are left out."""
    by_name = {one.policy: one for one in summaries}
    own, fixed = by_name[policy], by_name[always(trained)]
    values = {
        "eval/tau": own.tau.value,
        "eval/tau_pooled": own.tau_pooled,
        **_ends("eval/tau_gain", own.tau_gain),
        "eval/speedup": _value(own.speedup),
        **_ends("eval/speed_gain", own.speed_gain),
        "eval/accuracy": own.accuracy,
        "eval/regret": _value(own.regret),
        "eval/regret_speed": _value(own.regret_speed),
        "eval/headroom_captured": _value(own.headroom_captured),
        "eval/tau_always": fixed.tau.value,
        "eval/tau_pooled_always": fixed.tau_pooled,
        "eval/speedup_always": _value(fixed.speedup),
        "eval/regret_always": _value(fixed.regret),
        "eval/regret_speed_always": _value(fixed.regret_speed),
    }
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _value(one: Estimate | None) -> float | None:
    return None if one is None else one.value


def _ends(name: str, one: Estimate | None) -> dict[str, float]:
    """A figure and both ends of its interval."""
    return {} if one is None else {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
