"""An evaluation's costs of rounds: which profile it takes, and the figures that follow, worked by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from blockpilot.config import EvaluationConfig
from blockpilot.decoding import LatencyProfile, measure_latency
from blockpilot.decoding.latency import profile_path
from blockpilot.errors import UserError
from blockpilot.metrics import DecodedPrompt
from blockpilot.models import Pair
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists
from blockpilot.runs.compare import figures, summarize_against
from blockpilot.runs.latency import contexts, find_profile, round_costs, speed_figures, utilities
from tests.toy import make_drafter, make_pair

# ---- which profile


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair()


@pytest.fixture(scope="module")
def measured(pair: Pair) -> LatencyProfile:
    return measure_latency(pair, [1, 3, 4], [8], warmup=0, repeats=1)


def stored(folder: Path, profile: LatencyProfile) -> Path:
    path = profile_path(folder, "toy", profile.device)
    profile.save(path)
    return path


def test_auto_takes_what_is_stored_for_this_device_and_says_so(
    pair: Pair, measured: LatencyProfile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto = EvaluationConfig(latency_dir=str(tmp_path))
    assert auto.latency_profile == "auto"
    assert find_profile(auto, pair, (3, 4)) is None
    stored(tmp_path, dataclasses.replace(measured, device="another"))
    assert find_profile(auto, pair, (3, 4)) is None
    assert caplog.text == ""
    path = stored(tmp_path, measured)
    with caplog.at_level("INFO"):
        assert find_profile(auto, pair, (3, 4)) == measured
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert find_profile(dataclasses.replace(auto, latency_profile=None), pair, (3, 4)) is None


def test_another_pair_is_left_alone_or_refused(
    measured: LatencyProfile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path, measured)
    target = make_pair().target
    other = make_pair(target=target, drafter=make_drafter(target, seed=9))
    assert find_profile(EvaluationConfig(latency_dir=str(tmp_path)), other, (3, 4)) is None
    both = (f"drafter {measured.pair['drafter']}", f"drafter {other.identity['drafter']}")
    assert all(words in caplog.text for words in both)
    with pytest.raises(UserError) as caught:
        find_profile(EvaluationConfig(latency_profile=str(path)), other, (3, 4))
    assert all(words in str(caught.value) for words in (*both, str(path), "evaluation.latency_profile"))


def test_a_file_of_another_device_is_used_with_a_warning(
    pair: Pair, measured: LatencyProfile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gpu.json"
    dataclasses.replace(measured, device="GPU Y").save(path)
    found = find_profile(EvaluationConfig(latency_profile=str(path)), pair, (3, 4))
    assert found is not None and found.device == "GPU Y"
    assert "GPU Y" in caplog.text and measured.device in caplog.text


def test_sizes_it_lacks_and_files_that_are_not_there_are_told(
    pair: Pair, measured: LatencyProfile, tmp_path: Path
) -> None:
    stored(tmp_path, measured)
    with pytest.raises(UserError, match=r"block size 5 .*python -m blockpilot\.profile model=toy"):
        find_profile(EvaluationConfig(latency_dir=str(tmp_path)), pair, (4, 5))
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        find_profile(EvaluationConfig(latency_profile=str(tmp_path / "none.json")), pair, (3, 4))


# ---- what follows


@pytest.fixture
def table() -> LabelTable:
    """Three prompts of 10 tokens; tau of b = 2 and b = 4 is (2, 3), (1.5, 2), and the last has no rounds."""
    return LabelTable(
        prompt_ids=("a", "b", "c"),
        datasets=("toy",) * 3,
        prompt_keys=torch.arange(3),
        prompts=TokenLists.of([[1] * 10] * 3),
        block_sizes=(2, 4),
        committed_tokens=torch.tensor([[6, 6], [6, 6], [0, 0]]),
        rounds=torch.tensor([[3, 2], [4, 3], [0, 0]]),
        distributions=Distributions(torch.arange(4), torch.zeros(3, dtype=torch.int64), torch.ones(3), 8),
    )


def profile_of(two: tuple[float, float], four: tuple[float, float]) -> LatencyProfile:
    """Seconds of a round of b = 2 and b = 4, behind 0 (really 1) and 27 tokens."""
    rounds = tuple(zip(two, four, strict=True))
    return LatencyProfile(
        "X", "toy", {"target": "t", "drafter": "d", "dtype": "float32"}, 1, "2", 0, 1, (2, 4), (1, 26),
        rounds, rounds, rounds, rounds, rounds, rounds,
    )  # fmt: skip


FLAT = profile_of((1.0, 1.0), (2.0, 2.0))


def decode(policy: str, prompt_id: str, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> DecodedPrompt:
    return DecodedPrompt(
        policy, prompt_id, "toy", sizes, sizes[0] if sizes else 4, lengths, 1 + sum(lengths), 1.0, 0.0, 1.0
    )


DECODED = [
    decode("autoregressive", "a", (1,) * 6, (1,) * 6),
    decode("autoregressive", "b", (1,) * 6, (1,) * 6),
    decode("autoregressive", "c", (), ()),
    decode("always-4", "a", (4, 4), (3, 3)),
    decode("always-4", "b", (4, 4, 4), (2, 2, 2)),
    decode("always-4", "c", (), ()),
    decode("pilot", "a", (2, 4, 2), (2, 2, 2)),  # changes within the prompt: 6 tokens in 1 + 2 + 1 seconds
    decode("pilot", "b", (2, 2, 2, 2), (2, 2, 1, 1)),
    decode("pilot", "c", (), ()),
]


def test_a_prompts_context_is_the_middle_of_its_decode(table: LabelTable) -> None:
    # 10 + (1 + 6) / 2 positions, where the seconds of b = 2 are halfway between 1 (at 1) and 2.6 (at 26)
    assert contexts(table).tolist() == [13.5, 13.5, 10.5]
    utility = utilities(table, profile_of((1.0, 2.6), (2.0, 2.0)))
    assert utility[0].tolist() == pytest.approx([2 / 1.8, 3 / 2])
    assert bool(utility[2].isnan().all())


def test_regret_in_speed_by_hand(table: LabelTable) -> None:
    rows = summarize_against(DECODED, table, 4, EvaluationConfig(bootstrap_samples=50), 0, FLAT)
    by_name = {row.policy: row for row in rows}
    # tokens per second of b = 2 and b = 4: a (2, 1.5), b (1.5, 1): by tau 4 is better everywhere, by speed 2
    assert by_name["autoregressive"].regret_speed is None
    always, pilot = by_name["always-4"], by_name["pilot"]
    assert always.regret is not None and always.regret_speed is not None and pilot.regret_speed is not None
    assert always.regret.value == 0
    assert always.regret_speed.value == pytest.approx(((2 - 1.5) / 2 + (1.5 - 1) / 1.5) / 2)
    assert pilot.regret_speed.value == pytest.approx(((2 - 6 / 4) / 2 + 0) / 2)
    # drawn with replacement: twice b, twice a
    assert (pilot.regret_speed.low, pilot.regret_speed.high) == pytest.approx((0, 0.25))
    named = figures(rows, "pilot", 4)
    assert named["eval/regret_speed"] == pilot.regret_speed.value
    assert named["eval/regret_speed_always"] == always.regret_speed.value


def test_labels_alone_give_the_best_size_and_the_oracles_gain(table: LabelTable) -> None:
    named = speed_figures(table, FLAT, 4)
    assert named == {
        "eval/best_fixed_speed": 2.0,
        "eval/oracle_speedup_over_always": pytest.approx((4 / 3 + 3 / 2) / 2),
    }
    # where a round costs the same for every size, the best size is the one best in tau and nothing is gained
    free = profile_of((1.0, 1.0), (1.0, 1.0))
    assert speed_figures(table, free, 4) == {"eval/best_fixed_speed": 4.0, "eval/oracle_speedup_over_always": 1.0}
    assert speed_figures(table, None, 4) == {}


def test_without_a_profile_there_is_no_such_figure(table: LabelTable) -> None:
    rows = summarize_against(DECODED, table, 4, EvaluationConfig(bootstrap_samples=50), 0)
    assert [row.regret_speed for row in rows] == [None] * 3
    assert not any("regret_speed" in name for name in figures(rows, "pilot", 4))


def test_the_best_choice_has_no_regret_however_many_rounds(table: LabelTable) -> None:
    tenths = profile_of((0.1, 0.1), (0.3, 0.3))
    six = dataclasses.replace(table, rounds=torch.full((3, 2), 6), committed_tokens=torch.full((3, 2), 6))
    costs = round_costs(DECODED, "autoregressive", six, tenths)
    best = decode("best", "b", (2,) * 6, (1,) * 6)
    assert sum([0.1] * 6) != 6 * 0.1  # what adding would do
    assert 6 / costs.spent(best) == costs.best_utility["b"]


def test_a_round_that_drafts_more_than_it_verifies_pays_for_both(table: LabelTable) -> None:
    # whole rounds of 2 and 4 cost 1 and 2 seconds, their draft passes 0.25 and 0.75: drafting 4 and verifying 2 costs
    # 1 - 0.25 + 0.75 = 1.5, twice that and a whole round of 4 are 5 seconds
    drafts = dataclasses.replace(FLAT, draft_seconds=((0.25, 0.75), (0.25, 0.75)))
    trimmed = dataclasses.replace(decode("trimming", "a", (2, 2, 4), (2, 2, 2)), drafted_sizes=(4, 4, 4))
    costs = round_costs([trimmed], "autoregressive", table, drafts)
    assert costs.spent(trimmed) == pytest.approx(5)
    assert costs.spent(dataclasses.replace(trimmed, drafted_sizes=(2, 2, 4))) == pytest.approx(4)


def test_a_size_that_only_a_policy_used_needs_a_cost_too(table: LabelTable) -> None:
    wide = [*DECODED, *(decode("wide", one.prompt_id, (7,), (6,)) for one in DECODED[:2]), decode("wide", "c", (), ())]
    with pytest.raises(UserError, match="block size 7"):
        summarize_against(wide, table, 4, EvaluationConfig(bootstrap_samples=50), 0, FLAT)
