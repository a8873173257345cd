"""The ``eval/`` figures and the figures by data set, worked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from blockpilot.config import EvaluationConfig
from blockpilot.metrics import DecodedPrompt
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists
from blockpilot.runs.compare import figures, summarize_against, summarize_datasets

EVALUATION = EvaluationConfig(bootstrap_samples=50)


@pytest.fixture
def table() -> LabelTable:
    """Two prompts of 6 tokens; tau of b = 2 and b = 4 is (3, 2) and (1.5, 2)."""
    return LabelTable(
        prompt_ids=("a", "b"),
        datasets=("math", "code"),
        prompt_keys=torch.arange(2),
        prompts=TokenLists.of([[1] * 10] * 2),
        block_sizes=(2, 4),
        committed_tokens=torch.tensor([[6, 6], [6, 6]]),
        rounds=torch.tensor([[2, 3], [4, 3]]),
        distributions=Distributions(torch.arange(3), torch.zeros(2, dtype=torch.int64), torch.ones(2), 8),
    )


def decode(policy: str, prompt_id: str, size: int, lengths: tuple[int, ...], seconds: float) -> DecodedPrompt:
    dataset = {"a": "math", "b": "code"}[prompt_id]
    sizes = (size,) * len(lengths)
    return DecodedPrompt(policy, prompt_id, dataset, sizes, size, lengths, 1 + sum(lengths), seconds, 0.0, 1.0)


DECODED = [
    decode("autoregressive", "a", 1, (1,) * 6, 6.0),
    decode("autoregressive", "b", 1, (1,) * 6, 6.0),
    decode("always-4", "a", 4, (2, 2, 2), 3.0),
    decode("always-4", "b", 4, (2, 2, 2), 3.0),
    decode("pilot", "a", 2, (3, 3), 2.0),
    decode("pilot", "b", 2, (2, 2, 1, 1), 2.0),
]


def test_figures_are_named_and_have_their_intervals(table: LabelTable) -> None:
    named = figures(summarize_against(DECODED, table, 4, EVALUATION, 0), "pilot", 4)
    assert named == pytest.approx(
        {
            "eval/tau": 2.25, "eval/tau_pooled": 2, "eval/tau_always": 2, "eval/tau_pooled_always": 2,
            "eval/tau_gain": 0.125, "eval/tau_gain_low": -0.25, "eval/tau_gain_high": 0.5,
            "eval/speedup": 3, "eval/speedup_always": 2,
            "eval/speed_gain": 0.5, "eval/speed_gain_low": 0.5, "eval/speed_gain_high": 0.5,
            "eval/accuracy": 0.5, "eval/regret": 0.125, "eval/regret_always": 1 / 6,
        }
    )  # fmt: skip


def test_figures_without_a_value_are_left_out(table: LabelTable) -> None:
    simulated = [dataclasses.replace(one, decode_seconds=math.nan) for one in DECODED]
    named = figures(summarize_against(simulated, table, 4, EVALUATION, 0), "pilot", 4)
    assert "eval/tau_gain" in named and not any("speed" in name for name in named)
    assert all(map(math.isfinite, named.values()))
    always = figures(summarize_against(DECODED, table, 4, EVALUATION, 0), "always-4", 4)
    assert always["eval/tau"] == 2 and not any("gain" in name for name in always)


def test_each_data_set_has_its_own_figures(table: LabelTable) -> None:
    by_dataset = summarize_datasets(DECODED, table, 4, EVALUATION, 0)
    assert list(by_dataset) == ["math", "code"]
    gains = {
        name: [one.tau_gain.value for one in rows if one.tau_gain is not None] for name, rows in by_dataset.items()
    }
    assert gains == {"math": [-0.5, 0.5], "code": [-0.5, -0.25]}
    assert all(one.num_prompts == 1 for rows in by_dataset.values() for one in rows)
    assert [rows[2].accuracy for rows in by_dataset.values()] == [1, 0]


def test_one_data_set_has_no_figures_beside_those_of_all(table: LabelTable) -> None:
    assert summarize_datasets([one for one in DECODED if one.dataset == "math"], table, 4, EVALUATION, 0) == {}
