"""torchmetrics wrappers: batches add up to the formula on the concatenation, alone, together and after a reset."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from blockpilot.metrics import formulas
from blockpilot.metrics.modules import (
    ChoiceMetric,
    ChoicePooledTau,
    ChoiceRegret,
    ChoiceTau,
    HeadroomCaptured,
    TieAwareAccuracy,
)

Labels = tuple[Tensor, Tensor, Tensor]


def labels(num_prompts: int, seed: int) -> Labels:
    """Random labels for 4 candidates; about a fifth of the prompts has no rounds."""
    generator = torch.Generator().manual_seed(seed)
    rounds_NK = torch.randint(1, 9, (num_prompts, 4), generator=generator)
    rounds_NK[torch.rand(num_prompts, generator=generator) < 0.2] = 0
    tokens_NK = rounds_NK * torch.randint(1, 5, (num_prompts, 4), generator=generator)
    return tokens_NK, rounds_NK, torch.randint(0, 4, (num_prompts,), generator=generator)


def chosen(values_NK: Tensor, choice_N: Tensor) -> Tensor:
    return torch.stack([row[choice] for row, choice in zip(values_NK, choice_N, strict=True)])


def expected_tau(tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> Tensor:
    return formulas.mean_tau(chosen(tokens_NK, choice_N), chosen(rounds_NK, choice_N))[0]


def expected_pooled(tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> Tensor:
    return formulas.pooled_tau(chosen(tokens_NK, choice_N), chosen(rounds_NK, choice_N))


def expected_regret(tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> Tensor:
    return formulas.regret_per_prompt(formulas.tau_per_prompt(tokens_NK, rounds_NK), choice_N).nanmean()


def expected_accuracy(tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> Tensor:
    right_N = formulas.is_best(formulas.tau_per_prompt(tokens_NK, rounds_NK), choice_N)
    return right_N[rounds_NK[:, 0] > 0].double().mean()


def expected_headroom(tokens_NK: Tensor, rounds_NK: Tensor, choice_N: Tensor) -> Tensor:
    tau_NK = formulas.tau_per_prompt(tokens_NK, rounds_NK)
    return formulas.headroom_captured(chosen(tau_NK, choice_N), tau_NK[:, 2], tau_NK.amax(1))


CASES: dict[str, tuple[Callable[[], ChoiceMetric], Callable[..., Tensor]]] = {
    "tau": (ChoiceTau, expected_tau),
    "tau_pooled": (ChoicePooledTau, expected_pooled),
    "regret": (ChoiceRegret, expected_regret),
    "accuracy": (TieAwareAccuracy, expected_accuracy),
    "headroom_captured": (lambda: HeadroomCaptured(always_column=2), expected_headroom),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_add_up_to_the_formula_and_reset_starts_over(name: str) -> None:
    build, formula = CASES[name]
    metric = build()
    batches = [labels(size, seed) for seed, size in enumerate((7, 1, 30))]
    for batch in batches:
        metric.update(*batch)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    result = metric.compute()
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(formula(*whole).item(), rel=1e-12)
    assert result.item() != pytest.approx(formula(*batches[-1]).item(), rel=1e-6)
    metric.reset()
    metric.update(*batches[-1])
    assert metric.compute().item() == pytest.approx(formula(*batches[-1]).item(), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_but_prompts_without_rounds_is_nan(name: str) -> None:
    metric = CASES[name][0]()
    assert math.isnan(metric.compute())
    zeros = torch.zeros(3, 4, dtype=torch.int64)
    metric.update(zeros, zeros, torch.zeros(3, dtype=torch.int64))
    assert math.isnan(metric.compute())


def test_headroom_is_nan_when_always_b_is_best_everywhere() -> None:
    metric = HeadroomCaptured(always_column=0)
    metric.update(torch.tensor([[8, 6]]), torch.tensor([[2, 2]]), torch.tensor([1]))
    assert math.isnan(metric.compute())


def test_collection_keeps_the_metrics_apart() -> None:
    """A first batch on which states of different metrics have equal values must not make them share states."""
    collection = MetricCollection({name: build() for name, (build, _) in CASES.items()})
    first = (torch.tensor([[1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 1]]), torch.tensor([0]))
    batches = [first, labels(20, 5), labels(9, 6)]
    for batch in batches:
        collection.update(*batch)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    results = collection.compute()
    for name, (_, formula) in CASES.items():
        assert results[name].item() == pytest.approx(formula(*whole).item(), rel=1e-12), name
    collection.reset()
    collection.update(*batches[1])
    for name, value in collection.compute().items():
        assert value.item() == pytest.approx(CASES[name][1](*batches[1]).item(), rel=1e-12), name


@pytest.mark.parametrize("name", CASES)
def test_forward_returns_the_batch_and_keeps_the_total(name: str) -> None:
    build, formula = CASES[name]
    metric = build()
    batches = [labels(11, 1), labels(23, 2)]
    for batch in batches:
        assert metric(*batch).item() == pytest.approx(formula(*batch).item(), rel=1e-12)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    assert metric.compute().item() == pytest.approx(formula(*whole).item(), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_states_of_two_processes_merge(name: str) -> None:
    build, formula = CASES[name]
    batches, parts = [labels(11, 1), labels(23, 2)], [build(), build()]
    for part, batch in zip(parts, batches, strict=True):
        part.update(*batch)
    parts[0].merge_state(parts[1])
    whole = tuple(torch.cat(columns) for columns in zip(*batches, strict=True))
    assert parts[0].compute().item() == pytest.approx(formula(*whole).item(), rel=1e-12)
