"""Policy summaries against hand-worked figures."""

from __future__ import annotations

import dataclasses
import math

import pytest

from blockpilot.metrics.summary import DecodedPrompt, PolicySummary, summarize


def decode(policy: str, prompt_id: str, block_size: int, lengths: tuple[int, ...], seconds: float) -> DecodedPrompt:
    return DecodedPrompt(
        policy=policy,
        prompt_id=prompt_id,
        dataset="toy",
        block_sizes=(block_size,) * len(lengths),
        first_block_size=block_size,
        acceptance_lengths=lengths,
        output_tokens=1 + sum(lengths),
        decode_seconds=seconds,
        policy_seconds=0.0,
        prefill_seconds=1.0,
    )


DECODED = [
    decode("autoregressive", "a", 1, (1,) * 12, 12.0),
    decode("autoregressive", "b", 1, (1,) * 6, 6.0),
    decode("autoregressive", "c", 1, (), 0.0),
    decode("always", "a", 8, (4, 4, 4), 3.0),  # tau 4
    decode("always", "b", 8, (2, 2, 2), 3.0),  # tau 2
    decode("always", "c", 8, (), 0.0),
    decode("pilot", "c", 7, (), 0.0),  # in another order
    decode("pilot", "b", 6, (3, 3), 1.5),  # tau 3
    decode("pilot", "a", 8, (4, 4, 4), 3.0),  # tau 4
    decode("oracle", "a", 9, (6, 6), 2.5),  # tau 6
    decode("oracle", "b", 6, (3, 3), 1.5),  # tau 3
    decode("oracle", "c", 6, (), 0.0),
]
BEST_TAU = {"a": 6.0, "b": 3.0, "c": math.nan}


def summaries(**kwargs: object) -> dict[str, PolicySummary]:
    arguments = {"baseline": "autoregressive", "always": "always", "oracle": "oracle", "best_tau": BEST_TAU, **kwargs}
    return {summary.policy: summary for summary in summarize(DECODED, samples=200, **arguments)}  # type: ignore[arg-type]


def test_figures_of_each_policy() -> None:
    rows = summaries()
    assert list(rows) == ["autoregressive", "always", "pilot", "oracle"]
    assert all((row.num_prompts, row.num_prompts_without_rounds) == (3, 1) for row in rows.values())
    assert [row.tau for row in rows.values()] == [1, 3, 3.5, 4.5]
    assert [row.tau_pooled for row in rows.values()] == [1, 3, 18 / 5, 4.5]
    assert [row.mean_block_size for row in rows.values()] == [1, 8, 7, 7.5]
    assert [row.speedup for row in rows.values()] == [1, 3, 4, 4.5]
    assert rows["always"].regret == pytest.approx((2 / 6 + 1 / 3) / 2)
    assert rows["pilot"].regret == pytest.approx(1 / 6)
    assert rows["oracle"].regret == 0
    assert [rows[name].headroom_captured for name in ("always", "pilot", "oracle")] == pytest.approx([0, 1 / 3, 1])


def test_baseline_has_no_regret_and_an_exact_speedup() -> None:
    row = summaries()["autoregressive"]
    assert (row.speedup, row.speedup_interval) == (1.0, (1.0, 1.0))
    assert (row.regret, row.regret_interval, row.headroom_captured, row.headroom_captured_interval) == (None,) * 4


def test_intervals_hold_the_figure_and_are_paired() -> None:
    rows = summaries()
    for row in rows.values():
        assert row.tau_interval[0] <= row.tau <= row.tau_interval[1]
        assert row.speedup_interval[0] <= row.speedup <= row.speedup_interval[1]
    # always-B and the oracle score 0 and 1 on every resampling, which unpaired resampling would not give
    assert rows["always"].headroom_captured_interval == (0.0, 0.0)
    assert rows["oracle"].headroom_captured_interval == (1.0, 1.0)
    assert rows["pilot"].headroom_captured_interval == (0.0, 1.0)


def test_figures_not_asked_for_are_none() -> None:
    row = summaries(oracle=None, best_tau=None)["pilot"]
    assert (row.regret, row.headroom_captured, row.headroom_captured_interval) == (None, None, None)
    assert row.tau == 3.5


def test_only_prompts_without_rounds_give_nan() -> None:
    decoded = [decode(policy, "c", 8, (), 0.0) for policy in ("autoregressive", "always")]
    row = summarize(decoded, baseline="autoregressive", always="always", samples=10)[1]
    assert all(map(math.isnan, (row.tau, row.tau_pooled, row.speedup, row.mean_block_size, *row.tau_interval)))
    assert (row.num_prompts, row.num_prompts_without_rounds) == (1, 1)


def test_policies_must_cover_the_same_prompts_once() -> None:
    with pytest.raises(AssertionError, match="pilot and autoregressive decoded different prompts"):
        summarize(
            [one for one in DECODED if (one.policy, one.prompt_id) != ("pilot", "b")],
            baseline="autoregressive",
            always="always",
        )
    with pytest.raises(AssertionError, match="always decoded a twice"):
        summarize([*DECODED, DECODED[3]], baseline="autoregressive", always="always")


def test_a_decode_must_add_up() -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(DECODED[3], output_tokens=12)
