"""Latency profiles: what is timed, what a file may hold, and what a look-up says."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.decoding import LatencyProfile, measure_latency
from blockpilot.decoding.latency import ROUNDS_IN_A_ROW, device_name, profile_path
from blockpilot.errors import UserError
from blockpilot.models import DrafterContext, Pair
from tests.toy import MASK, SPECIAL, ScriptedDrafter, make_pair, make_scripted_pair

DRAFT_PAUSE = 0.05


class SlowDrafter(ScriptedDrafter):
    """Takes its time, for so many calls."""

    slow_calls = math.inf

    def forward(
        self, embeddings_BQD: Tensor, positions_BQ: Tensor, context: DrafterContext, mask: Tensor | None = None
    ) -> Tensor:
        if len(self.calls) < self.slow_calls:
            time.sleep(DRAFT_PAUSE)
        return super().forward(embeddings_BQD, positions_BQ, context, mask)


def scripted(depth: int, slow: bool = False, **options: Any) -> tuple[Pair, ScriptedDrafter]:
    pair = make_scripted_pair(depth, **options)
    assert isinstance(pair.drafter, ScriptedDrafter)
    if slow:
        pair.drafter.__class__ = SlowDrafter
    return pair, pair.drafter


@pytest.fixture
def profile() -> LatencyProfile:
    """Two contexts, three block sizes; a round of 8 takes 4 ms after 100 tokens and 6 ms after 200."""
    draft = ((0.0, 0.001, 0.001), (0.0, 0.002, 0.002))
    verify = ((0.001, 0.002, 0.003), (0.001, 0.003, 0.004))
    rounds = ((0.001, 0.003, 0.004), (0.001, 0.005, 0.006))
    return LatencyProfile(
        device="CPU X, 2 threads",
        model="toy",
        pair={"target": "t", "drafter": "d", "dtype": "float32"},
        threads=2,
        torch="2",
        warmup=1,
        repeats=3,
        block_sizes=(1, 4, 8),
        contexts=(100, 200),
        draft_seconds=draft,
        verify_seconds=verify,
        round_seconds=rounds,
        round_seconds_low=rounds,
        round_seconds_high=rounds,
        acceptance_length=((1.0, 2.0, 3.0),) * 2,
    )


# ---- measuring


def test_every_cell_is_measured() -> None:
    pair, _ = scripted(2)
    turns: list[int] = []
    profile = measure_latency(pair, [5, 1, 3], [20, 8], warmup=1, repeats=3, advance=turns.append)
    assert (profile.block_sizes, profile.contexts) == ((1, 3, 5), (8, 20))
    assert (profile.model, profile.device, profile.warmup, profile.repeats) == ("toy", device_name(pair.device), 1, 3)
    assert profile.pair == {part: pair.identity[part] for part in ("target", "drafter", "dtype")}
    assert turns == [1] * (2 * 3 * 4)
    for row in range(2):
        assert profile.draft_seconds[row][0] == 0 and min(profile.draft_seconds[row][1:]) > 0
        assert min(profile.verify_seconds[row]) > 0 and min(profile.round_seconds_low[row]) > 0
        assert all(
            low <= middle <= high
            for low, middle, high in zip(
                profile.round_seconds_low[row],
                profile.round_seconds[row],
                profile.round_seconds_high[row],
                strict=True,
            )
        )
        # right for two drafts: 3 tokens a round where the block has room
        assert profile.acceptance_length[row] == (1.0, 3.0, 3.0)


def test_every_turn_starts_at_the_end_of_the_prompt_and_sizes_take_turns() -> None:
    pair, drafter = scripted(99)
    measure_latency(pair, [2, 3, 4], [10], warmup=0, repeats=3)
    # a turn: the draft pass alone, then rounds that commit the whole block
    expected = []
    for size in (2, 3, 4, 3, 4, 2, 4, 2, 3):
        expected += [(10, size), *((10 + size * i, size) for i in range(ROUNDS_IN_A_ROW))]
    assert drafter.calls == expected


def test_a_slow_drafter_shows_in_draft_and_round_alone() -> None:
    fast = measure_latency(scripted(1)[0], [1, 4], [12], warmup=1, repeats=3)
    slow = measure_latency(scripted(1, slow=True)[0], [1, 4], [12], warmup=1, repeats=3)
    assert slow.draft_seconds[0][1] >= DRAFT_PAUSE > slow.verify_seconds[0][1]
    assert slow.round_seconds[0][1] >= DRAFT_PAUSE > slow.round_seconds[0][0]
    assert fast.round_seconds[0][1] < slow.round_seconds[0][1]
    # a round is measured by itself, per round: not the sum of several
    assert slow.round_seconds[0][1] < 2 * DRAFT_PAUSE


def test_warm_up_does_not_count() -> None:
    found = []
    for warmup in (0, 2):
        pair, drafter = scripted(1, slow=True)
        assert isinstance(drafter, SlowDrafter)
        drafter.slow_calls = 2 * (1 + ROUNDS_IN_A_ROW)  # the first two turns
        found.append(measure_latency(pair, [4], [12], warmup=warmup, repeats=1))
    cold, warm = found
    assert cold.draft_seconds[0][0] >= DRAFT_PAUSE > warm.draft_seconds[0][0]
    assert cold.round_seconds[0][0] >= DRAFT_PAUSE > warm.round_seconds[0][0]


def test_the_prompt_is_ordinary_tokens_and_follows_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockpilot.decoding import latency

    seen: list[list[int]] = []
    real = latency.rounds_for
    monkeypatch.setattr(latency, "rounds_for", lambda pair, task: (seen.append(task.prompt_ids), real(pair, task))[1])
    for seed in (0, 0, 1):
        measure_latency(make_pair(), [1], [40], warmup=0, repeats=1, seed=seed)
    assert seen[0] == seen[1] != seen[2]
    assert all(len(prompt) == 40 and min(prompt) >= len(SPECIAL) and MASK not in prompt for prompt in seen)


def test_contexts_the_model_cannot_hold_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair(max_positions=64)
    with caplog.at_level("INFO"):
        profile = measure_latency(pair, [4], [16, 48, 49, 200], warmup=0, repeats=1)
    assert profile.contexts == (16, 48)
    assert caplog.text.count("contexts above 48 are left out: toy holds 64 positions") == 1
    with pytest.raises(UserError, match=r"contexts=\[49\].*at most 48.*toy holds 64 positions"):
        measure_latency(pair, [4], [49])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"block_sizes": []}, "block_sizes"),
        ({"block_sizes": [0, 2]}, "block_sizes"),
        ({"contexts": [0]}, "contexts"),
        ({"repeats": 0}, "repeats=0"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        measure_latency(make_pair(), **{"block_sizes": [2], "contexts": [8], **options})


# ---- looking up


@pytest.mark.parametrize(
    ("context", "milliseconds"), [(100, 4), (150, 5), (175, 5.5), (200, 6), (1, 4), (5000, 6)]
)  # fmt: skip
def test_look_up_is_linear_between_contexts_and_constant_outside(
    profile: LatencyProfile, context: int, milliseconds: float
) -> None:
    assert profile.round_seconds_at(8, context) == pytest.approx(milliseconds / 1000)
    assert profile.round_seconds_at(1, context) == pytest.approx(0.001)


def test_look_up_of_many(profile: LatencyProfile) -> None:
    found = profile.round_seconds_of([8, 4], torch.tensor([100, 150, 300]))
    assert found.tolist() == [pytest.approx(row) for row in ([0.004, 0.003], [0.005, 0.004], [0.006, 0.005])]


def test_an_unmeasured_size_names_what_to_run(profile: LatencyProfile) -> None:
    with pytest.raises(UserError) as caught:
        profile.round_seconds_at(6, 100)
    for words in ("block size 6", "[1, 4, 8]", "model=toy profile.block_sizes=[1,4,6,8]"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["target", "drafter", "dtype"])
def test_another_pair_is_told_naming_both(part: str) -> None:
    pair = make_pair()
    profile = measure_latency(pair, [1], [8], warmup=0, repeats=1)
    assert profile.difference(pair) is None
    other = dataclasses.replace(profile, pair={**profile.pair, part: "other"}, model="before")
    message = other.difference(pair)
    assert message is not None
    assert f"{part} other (before)" in message and f"{part} {pair.identity[part]} (toy)" in message


# ---- files


def test_a_saved_profile_is_the_same_when_loaded(profile: LatencyProfile, tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    profile.save(path)
    assert LatencyProfile.load(path) == profile
    measured = measure_latency(make_pair(), [1, 3], [8], warmup=0, repeats=2)
    measured.save(path)
    assert LatencyProfile.load(path) == measured


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", 2),
        ("device", None),
        ("pair", {"target": "t"}),
        ("threads", "2"),
        ("repeats", True),
        ("block_sizes", [4, 1, 8]),
        ("block_sizes", []),
        ("block_sizes", [1, 4]),
        ("contexts", [100, 100]),
        ("round_seconds", [[0.001, 0.003, 0.004]]),
        ("round_seconds", [[0.001, 0.003, 0.004], [0.001, 0.003]]),
        ("round_seconds", [[0.001, 0.003, 0.0], [0.001, 0.003, 0.004]]),
        ("verify_seconds", [[0.001, math.nan, 0.1], [0.001, 0.003, 0.004]]),
        ("verify_seconds", 3),
        ("draft_seconds", [[-1, 0.003, 0.1], [0.001, 0.003, 0.004]]),
        ("colour", "red"),
    ],
)
def test_a_wrong_key_is_told_with_its_file(profile: LatencyProfile, tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "a.json"
    profile.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: value}))
    with pytest.raises(UserError) as caught:
        LatencyProfile.load(path)
    # too few block sizes show as tables that do not fit
    told = "draft_seconds" if value == [1, 4] else key
    assert str(path) in str(caught.value) and told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_and_a_missing_or_broken_file(profile: LatencyProfile, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    profile.save(path)
    content = json.loads(path.read_text())
    for key in content:
        path.write_text(json.dumps({name: value for name, value in content.items() if name != key}))
        with pytest.raises(UserError, match=f"a.json: {key} is None"):
            LatencyProfile.load(path)
    for text in ("", "[1, 2]", "{"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"a\.json"):
            LatencyProfile.load(path)
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read"):
        LatencyProfile.load(tmp_path / "nowhere.json")


def test_names() -> None:
    assert profile_path("x", "qwen3-8b", "NVIDIA H200").as_posix() == "x/qwen3-8b-nvidia-h200.json"
    assert profile_path("x", "tiny", "AMD (R) a/b, 2 threads").name == "tiny-amd-r-a-b-2-threads.json"
    assert str(torch.get_num_threads()) in device_name(torch.device("cpu"))
