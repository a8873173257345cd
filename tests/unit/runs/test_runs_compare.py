"""The final table's decodes: by real decoding and by simulation the same, under the policies that were asked for."""

from __future__ import annotations

import math

import pytest

from blockpilot.config import (
    CollectConfig,
    EvaluationConfig,
    GenerationConfig,
    OracleConfig,
    PolicyConfig,
    preset_names,
)
from blockpilot.errors import UserError
from blockpilot.metrics import DecodedPrompt
from blockpilot.models import Pair
from blockpilot.oracle import LabelCache, LabelTable, concatenate, fill, open_cache
from blockpilot.policies import ConfidencePolicy, EmaPolicy, FixedPolicy
from blockpilot.policies.per_round import PerRoundPolicy
from blockpilot.prompts import PromptRow
from blockpilot.runs.compare import figures, label_agreement, records_of, run_policies, summarize_against
from blockpilot.runs.policies import BUILDERS, Known, block_sizes_of, compared_policies, row_name
from tests.toy import make_scripted_pair, word
from tests.unit.policies.test_policies_per_round import by_first_unit

GENERATION = GenerationConfig(max_new_tokens=24)
ORACLE = OracleConfig(radius=2)
ROWS = ["best_fixed", "random", "ema", "confidence", "per_round", "oracle"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_scripted_pair(lambda p: p * 5 % 7, noise=0.8)


@pytest.fixture(scope="module")
def caches(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[LabelCache]:
    """Two, in shards of two rows; neither stores logits or hidden states."""
    folder, made = tmp_path_factory.mktemp("cache"), []
    for name, first in (("one", 9), ("two", 30)):
        rows = tuple(PromptRow(f"{name}{i}", name, (f"{word(first + 3 * i)} {word(first)}",)) for i in range(5))
        collect = CollectConfig(shard_size=2)
        made.append(open_cache(folder, name, pair, rows, GENERATION, ORACLE, collect))
        fill(made[-1], pair, rows, GENERATION, ORACLE, collect)
    return made


@pytest.fixture(scope="module")
def table(caches: list[LabelCache]) -> LabelTable:
    """All prompts but one, in an order of their own."""
    return concatenate([cache.load() for cache in caches]).select([7, 0, 3, 9, 8, 1, 2, 4, 6])


@pytest.fixture(scope="module")
def known(pair: Pair, table: LabelTable) -> Known:
    # by the sign of a hidden unit, which changes along a text
    return Known(pair, table, seed=1, best_fixed=3, predictor=by_first_unit().predictor)


def test_records_have_the_tables_order(caches: list[LabelCache], table: LabelTable) -> None:
    records = records_of(caches, table)
    assert [record.prompt_ids for record in records] == [table.prompts.row(i) for i in range(9)]
    for index, record in enumerate(records):
        counts = [len(record.acceptance_lengths[b]) for b in table.block_sizes]
        assert counts == table.rounds[index].tolist()


def test_simulation_finds_what_decoding_finds(
    pair: Pair, caches: list[LabelCache], table: LabelTable, known: Known
) -> None:
    policies = compared_policies(ROWS, known)
    assert len(policies) == 9
    results: dict[str, list[DecodedPrompt]] = {}
    for method in ("decode", "simulate"):
        evaluation = EvaluationConfig(method=method, policies=ROWS, num_prompts=len(table))
        shown, results[method] = run_policies(pair, table, policies, caches, evaluation, GENERATION, CollectConfig())
        assert shown.prompt_ids == table.prompt_ids
    assert len(results["decode"]) == len(results["simulate"]) == 9 * 9
    for ours, theirs in zip(results["simulate"], results["decode"], strict=True):
        for name in ("policy", "prompt_id", "dataset", "block_sizes", "drafted_sizes", "first_block_size",
                     "acceptance_lengths", "output_tokens"):  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, name)
        assert math.isnan(ours.decode_seconds) and theirs.decode_seconds > 0
    # every rule did something of its own
    by_policy = {name: tuple(one.block_sizes for one in results["decode"] if one.policy == name) for name in policies}
    assert len(set(by_policy.values())) == len(policies)
    assert label_agreement(results["simulate"], table) == 1

    tables = {
        method: summarize_against(decoded, table, pair.block_size, EvaluationConfig(bootstrap_samples=50), 0)
        for method, decoded in results.items()
    }
    for ours, theirs in zip(tables["simulate"], tables["decode"], strict=True):
        assert (ours.policy, ours.tau, ours.regret) == (theirs.policy, theirs.tau, theirs.regret)
        assert ours.headroom_captured == theirs.headroom_captured
        assert ours.speedup is None and theirs.speedup is not None
    ours, theirs = (figures(tables[method], "ema", pair.block_size) for method in ("simulate", "decode"))
    missing = theirs.keys() - ours.keys()
    assert {"eval/speedup", "eval/speedup_always"} <= missing and all("/speed" in name for name in missing)
    assert all(ours[name] == theirs[name] for name in ours)


def test_decoding_takes_some_prompts_and_simulation_all(
    pair: Pair, caches: list[LabelCache], table: LabelTable
) -> None:
    for method, count in (("decode", 2), ("simulate", 9)):
        evaluation = EvaluationConfig(method=method, num_prompts=2)
        policies = {"fixed-3": FixedPolicy(3)}
        shown, decoded = run_policies(pair, table, policies, caches, evaluation, GENERATION, CollectConfig())
        assert len(shown) == len(decoded) == count


def test_a_trimmed_round_is_not_compared_with_a_label(table: LabelTable) -> None:
    size = table.block_sizes[-1]
    own = (int(table.committed_tokens[0, -1]), int(table.rounds[0, -1]))
    tokens, rounds = own
    lengths = (tokens - rounds + 1, *[1] * (rounds - 1))

    def decoded(verified: int, lengths: tuple[int, ...]) -> DecodedPrompt:
        return DecodedPrompt(
            "p", table.prompt_ids[0], "d", (verified,) * len(lengths), size, lengths, 1 + sum(lengths), 1.0, 0.0, 1.0,
            (size,) * len(lengths),
        )  # fmt: skip

    assert label_agreement([decoded(size, lengths)], table) == 1
    assert label_agreement([decoded(size, (*lengths, 1))], table) == 0
    assert math.isnan(label_agreement([decoded(size - 1, (*lengths, 1))], table))


# ---- which policies


def test_every_yaml_has_a_builder_and_every_builder_a_yaml() -> None:
    assert sorted(BUILDERS) == preset_names("policy")


@pytest.mark.parametrize(
    ("names", "question", "rows"),
    [
        (["best_fixed", "random", "oracle"], None, ["best_fixed", "random", "predictor", "oracle"]),
        (["oracle", "ema"], PolicyConfig("fixed", block_size=7), ["ema", "fixed-7", "oracle"]),
        (["oracle", "ema"], PolicyConfig("ema"), ["ema", "oracle"]),
        (["random", "oracle"], PolicyConfig("oracle"), ["random", "oracle"]),
        ([], PolicyConfig("per_round"), ["per_round"]),
        (["confidence"], PolicyConfig("fixed"), ["confidence", "fixed-4"]),
    ],
)
def test_rows_and_their_order(known: Known, names: list[str], question: PolicyConfig | None, rows: list[str]) -> None:
    assert list(compared_policies(names, known, question)) == ["autoregressive", "always-4", *rows]


def test_settings_come_from_the_yaml_and_those_of_the_policy_in_question_from_the_user(known: Known) -> None:
    rows = compared_policies(["ema", "confidence", "per_round", "best_fixed"], known)
    ema, confidence, per_round = rows["ema"], rows["confidence"], rows["per_round"]
    assert isinstance(ema, EmaPolicy) and ema.block_sizes == (2, 3, 4, 5, 6) and ema.alpha == 0.2
    assert (ema.update_interval, ema.down_hysteresis, ema.block_sizes[ema.start]) == (5, -0.25, 4)
    assert confidence == ConfidencePolicy(4, 0.4) and rows["best_fixed"] == FixedPolicy(3)
    assert isinstance(per_round, PerRoundPolicy) and per_round.predictor is known.predictor
    asked = PolicyConfig("ema", tiers=[2, 9], start=9, alpha=0.5, warmup_rounds=3, update_interval=2,
                         down_hysteresis=-1.0, up_hysteresis=1.0)  # fmt: skip
    ema = compared_policies(["ema"], known, asked)["ema"]
    assert isinstance(ema, EmaPolicy) and ema.block_sizes == (2, 9) and ema.start == 1
    assert (ema.alpha, ema.warmup_rounds, ema.update_interval) == (0.5, 3, 2)
    assert (ema.down_hysteresis, ema.up_hysteresis) == (-1.0, 1.0)
    asked = PolicyConfig("confidence", block_size=6, threshold=0.7)
    assert compared_policies([], known, asked)["confidence"] == ConfidencePolicy(6, 0.7)


def test_per_round_is_left_out_without_a_trained_policy(
    pair: Pair, table: LabelTable, caplog: pytest.LogCaptureFixture
) -> None:
    rows = compared_policies(["per_round", "random"], Known(pair, table, 0), PolicyConfig("fixed"))
    assert list(rows) == ["autoregressive", "always-4", "random", "fixed-4"]
    assert "per_round is left out" in caplog.text


def test_sizes_whose_rounds_need_a_price() -> None:
    assert block_sizes_of(["random", "oracle"], PolicyConfig("fixed", block_size=7), 4) == [7]
    assert block_sizes_of(["confidence"], PolicyConfig("ema", tiers=[2, 9]), 4) == [1, 2, 3, 4, 9]
    assert block_sizes_of([], PolicyConfig("ema"), 4) == []
    assert row_name(PolicyConfig("fixed"), 16) == "fixed-16"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvaluationConfig(method="guess"), "evaluation.method='guess' is not allowed; expected one of decode"),
        (lambda: EvaluationConfig(policies=["best-fixed"]), "evaluation.policies='best-fixed' is not allowed"),
        (lambda: EvaluationConfig(policies=["fixed"]), "evaluation.policies='fixed' is not allowed"),
        (lambda: EvaluationConfig(policies=["ema", "ema"]), "evaluation.policies=.* expected every name once"),
        (lambda: PolicyConfig("emma"), "policy.name='emma' is not allowed; expected one of best_fixed, confidence"),
        (lambda: PolicyConfig(alpha=0.0), "policy.alpha=0.0 is not allowed"),
        (lambda: PolicyConfig(threshold=1.5), "policy.threshold=1.5 is not allowed"),
        (lambda: PolicyConfig(tiers=[0]), r"policy.tiers=\[0\] is not allowed"),
        (lambda: PolicyConfig(start=0), "policy.start=0 is not allowed"),
        (lambda: PolicyConfig(warmup_rounds=-1), "policy.warmup_rounds=-1 is not allowed"),
        (lambda: PolicyConfig(update_interval=0), "policy.update_interval=0 is not allowed"),
        (lambda: PolicyConfig(up_hysteresis=float("inf")), "policy.up_hysteresis=inf is not allowed"),
    ],
)
def test_values_that_are_refused(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
