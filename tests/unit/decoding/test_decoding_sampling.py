"""Noise, filters and draws: known answers, statistics, independence of batch, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from blockpilot.decoding.sampling import (
    GREEDY_BELOW,
    Sampling,
    counter_bits,
    draw_tokens,
    filtered_log_probs,
    gumbel_noise,
    philox,
    prompt_key,
    signed_prompt_key,
)
from blockpilot.errors import UserError

CPU = torch.device("cpu")

# kat_vectors of Random123, philox4x32-10
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    first, second = words(key)
    got = philox([torch.tensor([word]) for word in words(counter)], (first, second))
    assert [int(word) for word in got] == words(result)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 41])
def test_bits_are_philox_of_entry_position_prompt_and_seed(size: int) -> None:
    seed, key, position = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 7
    bits = counter_bits(seed, [key], [position], size, CPU)
    assert bits.shape == (1, size)
    for entry in range(size):
        counter = [torch.tensor([word]) for word in (entry // 4, position, 0x76543210, 0xFEDCBA98)]
        assert bits[0, entry] == philox(counter, (0x89ABCDEF, 0x01234567))[entry % 4]


def test_bits_depend_on_every_part_of_seed_key_and_position() -> None:
    base = counter_bits(5, [9], [3], 8, CPU)
    others = [
        counter_bits(5 + 2**32, [9], [3], 8, CPU),
        counter_bits(6, [9], [3], 8, CPU),
        counter_bits(5, [9 + 2**40], [3], 8, CPU),
        counter_bits(5, [10], [3], 8, CPU),
        counter_bits(5, [9], [4], 8, CPU),
    ]
    assert all((base != other).all() for other in others)


@given(
    rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 5000)), min_size=2, max_size=6),
    seed=st.integers(0, 2**64 - 1),
)
def test_noise_of_a_row_does_not_depend_on_the_other_rows(rows: list[tuple[int, int]], seed: int) -> None:
    keys, positions = [key for key, _ in rows], [position for _, position in rows]
    together = gumbel_noise(seed, keys, positions, 11, CPU)
    for index, (key, position) in enumerate(rows):
        assert torch.equal(together[index], gumbel_noise(seed, [key], [position], 11, CPU)[0])


def test_noise_of_an_entry_does_not_depend_on_the_vocabulary() -> None:
    assert torch.equal(gumbel_noise(0, [1], [2], 100, CPU)[:, :37], gumbel_noise(0, [1], [2], 37, CPU))


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(0, list(range(100)), [0] * 100, 2000, CPU).double()
    count = noise.numel()
    variance = math.pi**2 / 6
    # five standard errors; the kurtosis of a Gumbel variable is 5.4
    assert abs(noise.mean() - 0.5772156649) < 5 * math.sqrt(variance / count)
    assert abs(noise.var() - variance) < 5 * variance * math.sqrt(4.4 / count)
    assert noise.isfinite().all() and noise.dtype == torch.float64


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 2**32 - 1]])
    monkeypatch.setattr("blockpilot.decoding.sampling.counter_bits", lambda *_: ends)
    low, high = gumbel_noise(0, [0], [0], 2, CPU)[0].tolist()
    assert math.isfinite(low) and math.isfinite(high) and low < -3 and high > 20


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Upper tail of the chi-square statistic of ``counts`` under ``probs`` (cells of zero probability left out)."""
    kept = probs > 0
    expected = counts.sum() * probs[kept].double()
    statistic = ((counts[kept].double() - expected) ** 2 / expected).sum()
    degrees = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def test_p_value_of_known_cases() -> None:
    # two equal cells, 60 against 40: statistic 4, one degree of freedom, p = 0.0455
    assert p_value(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)


LOGITS = torch.tensor([1.0, 0.0, -0.5, 0.7])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.6, seed=3),
        Sampling(1.7, top_k=3),
        Sampling(1.0, top_p=0.8, seed=1),
        Sampling(0.9, top_p=0.75, top_k=3, seed=2),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(sampling: Sampling) -> None:
    number = 20_000
    draws = draw_tokens(LOGITS.expand(number, -1), sampling, list(range(number)), [5] * number)
    counts = draws.bincount(minlength=4)
    probs = filtered_log_probs(LOGITS[None], sampling)[0].softmax(-1)
    assert (counts[probs == 0] == 0).all()
    assert p_value(counts, probs) > 0.001
    wrong = (probs + 0.03 * torch.tensor([1.0, -1.0, 1.0, -1.0]) * (probs > 0)).clamp_min(0)
    assert p_value(counts, wrong / wrong.sum()) < 0.001


def test_draws_at_neighbouring_positions_are_independent() -> None:
    number = 20_000
    rows = LOGITS.expand(number, -1)
    keys = list(range(number))
    first = draw_tokens(rows, Sampling(1.0), keys, [0] * number)
    second = draw_tokens(rows, Sampling(1.0), keys, [1] * number)
    probs = LOGITS.softmax(-1)
    assert p_value((4 * first + second).bincount(minlength=16), torch.outer(probs, probs).flatten()) > 0.001


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-6, 0.99 * GREEDY_BELOW])
def test_temperatures_near_zero_are_greedy_whatever_the_filters(temperature: float) -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature, top_p=0.3, top_k=2, seed=4)
    assert sampling.greedy
    assert torch.equal(draw_tokens(logits, sampling, [0] * 50, [0] * 50), logits.argmax(-1))


def test_greedy_takes_the_lowest_id_on_exact_ties() -> None:
    assert draw_tokens(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), Sampling(0.0), [0], [0]).tolist() == [1]


def test_temperature_of_one_is_not_greedy() -> None:
    draws = draw_tokens(torch.zeros(200, 8), Sampling(1.0), list(range(200)), [0] * 200)
    assert not Sampling(GREEDY_BELOW).greedy
    assert len(draws.unique()) == 8


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": -1e-9}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.5}),
        ("top_p", {"top_p": -0.5}),
        ("top_p", {"top_p": math.nan}),
        ("top_k", {"top_k": -1}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"^{name}=.* is not allowed; expected") as caught:
        Sampling(**values)
    assert repr(values[name]) in str(caught.value)


def test_limits_themselves_are_allowed() -> None:
    Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=2**64 - 1)


def kept(log_probs: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in log_probs]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.2, [1]),
        (0.4, [1]),  # reached exactly
        (0.5, [1, 3]),  # the token that crosses the mass is in
        (0.71, [0, 1, 3]),
        (0.95, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_nucleus_is_the_smallest_set_that_reaches_the_mass(top_p: float, expected: list[int]) -> None:
    probs = torch.tensor([[0.2, 0.4, 0.1, 0.3]], dtype=torch.float64)
    # a hair above 0.4, so that the case of exact reach does not hang on fp32 rounding
    probs[0, 1] += 1e-6
    assert kept(filtered_log_probs(probs.log(), Sampling(1.0, top_p=top_p))) == [expected]


@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_nucleus_properties(logits: list[float], top_p: float) -> None:
    row = torch.tensor([logits])
    probs = row.softmax(-1)[0].double()
    inside = filtered_log_probs(row, Sampling(1.0, top_p=top_p))[0].isfinite()
    assert inside.any()
    assert probs[inside].sum() >= top_p - 1e-6
    assert probs[inside].sum() - probs[inside].min() <= top_p + 1e-6
    if not inside.all():
        assert probs[inside].min() >= probs[~inside].max()


def test_top_p_one_half_never_draws_outside_the_nucleus() -> None:
    logits = 2 * torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    ordered, order = logits.softmax(-1)[0].sort(descending=True)
    nucleus = set(order[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())
    draws = draw_tokens(logits.expand(4000, -1), Sampling(1.0, top_p=0.5), list(range(4000)), [0] * 4000)
    assert set(draws.tolist()) == nucleus


def test_top_k_keeps_all_tokens_tied_with_the_last() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert kept(filtered_log_probs(logits, Sampling(1.0, top_k=2))) == [[0, 2, 3]]
    assert kept(filtered_log_probs(logits, Sampling(1.0, top_k=1))) == [[0]]
    for off in (0, 5, 99):
        assert kept(filtered_log_probs(logits, Sampling(1.0, top_k=off))) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7])
@pytest.mark.parametrize("top_p", [0.35, 0.9, 1.0])
def test_filters_and_their_order_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(40, 25, generator=torch.Generator().manual_seed(2))
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    theirs = steps(torch.zeros(40, 1).long(), logits).softmax(-1)  # type: ignore[arg-type]
    ours = filtered_log_probs(logits, Sampling(temperature, top_p, top_k)).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs)


def test_filter_order_matters_in_a_case_worked_by_hand() -> None:
    # of 0.4 0.3 0.2 0.1, top-k 2 first leaves 4/7 and 3/7, and a mass of 0.5 is reached by the first alone;
    # top-p first would have needed two
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(filtered_log_probs(logits, Sampling(1.0, top_p=0.5, top_k=2))) == [[0]]
    assert kept(filtered_log_probs(logits, Sampling(1.0, top_p=0.5))) == [[0, 1]]
    # a temperature of 2 makes them 0.33 0.28 0.23 0.16: now a mass of 0.7 takes three, not two of 0.4 0.3 (0.7 - eps)
    assert kept(filtered_log_probs(logits, Sampling(2.0, top_p=0.69))) == [[0, 1, 2]]
    assert kept(filtered_log_probs(logits, Sampling(1.0, top_p=0.69))) == [[0, 1]]


def test_filters_work_in_fp32_on_half_precision_logits() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3)).bfloat16()
    sampling = Sampling(0.7, top_p=0.8)
    result = filtered_log_probs(logits, sampling)
    assert result.dtype == torch.float32
    assert torch.equal(result, filtered_log_probs(logits.float(), sampling))


@given(st.lists(st.integers(0, 200_000), max_size=8), st.lists(st.integers(0, 200_000), max_size=8))
def test_prompt_keys_tell_prompts_apart(one: list[int], other: list[int]) -> None:
    assert (prompt_key(one) == prompt_key(other)) == (one == other)
    assert 0 <= prompt_key(one) < 2**64
    assert -(2**63) <= signed_prompt_key(one) < 2**63
    assert signed_prompt_key(one) % 2**64 == prompt_key(one)


def test_prompt_keys_are_the_same_for_ever() -> None:
    # caches and trained policies hold these numbers
    assert prompt_key([1, 2, 3]) == int.from_bytes(bytes.fromhex("e2353910701f1c2a"), "little")
    assert prompt_key([1, 23]) != prompt_key([12, 3])


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.uint64, torch.tensor])
def test_whole_numbers_of_other_libraries(kind: Any) -> None:
    assert Sampling(1.0, top_k=kind(5), seed=kind(7)) == Sampling(1.0, top_k=5, seed=7)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    plain, other = (
        draw_tokens(logits, Sampling(1.0, top_k=k, seed=s), [1] * 4, range(4)) for k, s in ((5, 7), (kind(5), kind(7)))
    )
    assert plain.tolist() == other.tolist()


def test_real_numbers_of_other_libraries() -> None:
    half: Any = np.float32(0.5)
    given = Sampling(half, top_p=half)
    assert given == Sampling(0.5, top_p=0.5) and type(given.temperature) is float
    assert Sampling(np.int64(1), top_k=True) == Sampling(1.0, top_k=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^temperature=1000.*\.\.\. is not allowed; expected a number$"):
        Sampling(10**400)
