"""The same prompts under several policies, side by side: by real speculative decoding, or by simulation."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from blockpilot.config import CollectConfig, EvaluationConfig, GenerationConfig
from blockpilot.decoding import BlockSizePolicy, Generation, LatencyProfile, generate
from blockpilot.decoding.sampling import signed_prompt_key
from blockpilot.metrics import DecodedPrompt, Estimate, PolicySummary, best_choice, summarize
from blockpilot.models import Pair
from blockpilot.oracle import LabelCache, LabelTable, OracleRecord, Simulation, simulate
from blockpilot.report import progress_bar
from blockpilot.runs.latency import round_costs
from blockpilot.runs.policies import AUTOREGRESSIVE, ORACLE, always

log = logging.getLogger(__name__)

WARM_UP_PROMPTS = 2


def run_policies(
    pair: Pair,
    table: LabelTable,
    policies: Mapping[str, BlockSizePolicy],
    caches: Sequence[LabelCache],
    evaluation: EvaluationConfig,
    generation: GenerationConfig,
    collect: CollectConfig,
) -> tuple[LabelTable, list[DecodedPrompt]]:
    """Test prompts under every policy, as ``evaluation.method`` says; returns those prompts and what came of them.

    Args:
        pair: target and drafter.
        table: labels of all test prompts.
        policies: the rows, by name.
        caches: hold these labels (and maybe others); a simulation goes along their outputs.
        evaluation, generation, collect: the run's settings.
    """
    if evaluation.method == "simulate":
        records = records_of(caches, table)
        return table, simulate_policies(pair, table, records, policies, collect.batch_size)
    shown = spread(table, evaluation.num_prompts)
    return shown, decode_policies(pair, shown, policies, generation, "decoding test prompts")


def records_of(caches: Iterable[LabelCache], table: LabelTable) -> list[OracleRecord]:
    """The caches' records of a table's prompts, in its order."""
    keys = table.prompt_keys.tolist()
    wanted, found = set(keys), {}
    for cache in caches:
        for record in cache.records():
            # a key is of the tokens, and so is what follows them
            if (key := signed_prompt_key(record.prompt_ids)) in wanted:
                found[key] = record
    return [found[key] for key in keys]


def simulate_policies(
    pair: Pair,
    table: LabelTable,
    records: Sequence[OracleRecord],
    policies: Mapping[str, BlockSizePolicy],
    batch_size: int,
) -> list[DecodedPrompt]:
    """What :func:`decode_policies` would find, without seconds.

    Args:
        pair: the pair that made the records.
        table: names of the prompts.
        records: theirs, in the same order.
        policies: each begins anew with every prompt, so each prompt has a copy and many are simulated together.
        batch_size: most prompts at once.
    """
    simulated: dict[str, list[Simulation]] = {}
    with progress_bar(f"simulating {len(records)} test prompts", len(policies), "policies") as advance:
        for name, policy in policies.items():
            own = [copy.copy(policy) for _ in records]
            simulated[name] = simulate(pair, records, own, batch_size=batch_size)
            advance(1)
    return [
        _row(name, prompt_id, dataset, simulated[name][index])
        for index, (prompt_id, dataset) in enumerate(zip(table.prompt_ids, table.datasets, strict=True))
        for name in policies
    ]


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
    with progress_bar(f"{title} under {len(policies)} policies", len(table)) as advance:
        for index, (prompt_id, dataset) in enumerate(zip(table.prompt_ids, table.datasets, strict=True)):
            turn = index % len(names)
            results = {
                name: _decode(pair, table.prompts.row(index), policies[name], generation)
                for name in names[turn:] + names[:turn]
            }
            decoded += [_row(name, prompt_id, dataset, results[name]) for name in names]
            advance(1)
    return decoded


def _decode(pair: Pair, prompt_ids: Sequence[int], policy: BlockSizePolicy, generation: GenerationConfig) -> Generation:
    return generate(
        pair, prompt_ids, policy, max_new_tokens=generation.max_new_tokens, temperature=generation.temperature,
        top_p=generation.top_p, top_k=generation.top_k, seed=generation.seed,
    )  # fmt: skip


def _row(policy: str, prompt_id: str, dataset: str, out: Generation | Simulation) -> DecodedPrompt:
    """One prompt under one policy; a simulation takes no seconds."""
    measured = isinstance(out, Generation)
    return DecodedPrompt(
        policy=policy,
        prompt_id=prompt_id,
        dataset=dataset,
        block_sizes=tuple(out.block_sizes),
        first_block_size=out.first_block_size,
        acceptance_lengths=tuple(out.acceptance_lengths),
        output_tokens=1 + sum(out.acceptance_lengths),
        decode_seconds=out.decode_seconds if measured else math.nan,
        policy_seconds=out.policy_seconds if measured else math.nan,
        prefill_seconds=out.prefill_seconds if measured else math.nan,
        drafted_sizes=tuple(out.drafted_sizes),
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
        if one.first_block_size in table.block_sizes and set(one.block_sizes) <= {one.first_block_size}:
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
