"""AdamW on touched rows: the formula, what stands still, what is saved, and what memory it takes."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import blockpilot.learning.optimizer as optimizer_module
from blockpilot.learning import BlockSizePredictor, Features
from blockpilot.learning.optimizer import LazyAdamW
from blockpilot.oracle.prefill import sparse_distributions

V, W = 60, 16


def rows_of(count: int, seed: int = 0, vocab_size: int = V) -> Features:
    generator = torch.Generator().manual_seed(seed)
    rows = sparse_distributions(4 * torch.randn(count, vocab_size, generator=generator), tail_mass=0.05)
    return Features(rows.probs, rows.offsets, rows.token_ids)


def make_predictor(seed: int = 0) -> BlockSizePredictor:
    torch.manual_seed(seed)
    return BlockSizePredictor(V, [3, 4, 5], sparse_input=True, width=W, dropout=0.0)


def loss_of(predictor: BlockSizePredictor, seed: int, count: int = 6) -> Tensor:
    features, best = rows_of(count, seed), torch.arange(count) % 3
    return nn.functional.cross_entropy(predictor(features), best)


def train(predictor: BlockSizePredictor, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = loss_of(predictor, seed)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(predictor: BlockSizePredictor) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in predictor.parameters()])


def sparse_gradient(parameter: nn.Parameter, rows: list[int], values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, parameter.shape, check_invariants=True)


@pytest.mark.parametrize("chunk", [1, 3 * W, 10**6])  # rows at a time: one, three, all
def test_rows_in_every_gradient_are_updated_as_by_adamw(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is in the first step and all later ones has torch's AdamW as its peer; others stand still."""
    monkeypatch.setattr(optimizer_module, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    lazy = nn.Parameter(torch.randn(10, W, dtype=torch.float64))
    touched = [7, 1, 3, 8]
    peer = nn.Parameter(lazy.detach()[touched].clone())
    before = lazy.detach().clone()
    settings = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = LazyAdamW([lazy], **settings), torch.optim.AdamW([peer], **settings)
    for _ in range(4):
        peer.grad = torch.randn_like(peer)
        lazy.grad = sparse_gradient(lazy, touched, peer.grad)
        ours.step()
        theirs.step()
        torch.testing.assert_close(lazy.detach()[touched], peer.detach())
    untouched = [row for row in range(10) if row not in touched]
    assert torch.equal(lazy.detach()[untouched], before[untouched])


def test_a_row_that_comes_late_and_one_that_pauses_by_hand() -> None:
    """One number per row: every step written out from the paper's formula, with the parameter's count of steps."""
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-8, 0.5
    parameter = nn.Parameter(torch.ones(3, 1, dtype=torch.float64))
    optimizer = LazyAdamW([parameter], lr, (beta1, beta2), eps, decay)
    weight, first, second = [1.0] * 3, [0.0] * 3, [0.0] * 3
    steps = ({0: 1.0, 1: -2.0}, {0: 0.5}, {0: 3.0, 1: 1.0, 2: 4.0})  # row 1 pauses, row 2 comes late
    for count, gradients in enumerate(steps, start=1):
        for row, gradient in gradients.items():
            weight[row] -= lr * decay * weight[row]
            first[row] = beta1 * first[row] + (1 - beta1) * gradient
            second[row] = beta2 * second[row] + (1 - beta2) * gradient**2
            weight[row] -= lr * (first[row] / (1 - beta1**count)) / ((second[row] / (1 - beta2**count)) ** 0.5 + eps)
        values = torch.tensor(list(gradients.values()), dtype=torch.float64)[:, None]
        parameter.grad = sparse_gradient(parameter, list(gradients), values)
        optimizer.step()
        torch.testing.assert_close(parameter.detach()[:, 0], torch.tensor(weight, dtype=torch.float64))


def test_dense_parameters_are_adamws() -> None:
    ours, theirs = (BlockSizePredictor(V, [3, 4], sparse_input=False, width=W, dropout=0.0) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    rows = Features(torch.randn(5, V, generator=torch.Generator().manual_seed(0)))
    pairs = ((ours, LazyAdamW(ours.parameters())), (theirs, torch.optim.AdamW(theirs.parameters(), fused=True)))
    for _ in range(3):
        for predictor, optimizer in pairs:
            optimizer.zero_grad()
            predictor(rows).square().sum().backward()
            optimizer.step()
    assert torch.equal(weights(ours), weights(theirs))


def test_a_training_step_is_that_of_linear_and_adamw() -> None:
    """Loss before and after one step, against nn.Linear on the dense rows with torch's AdamW."""
    sparse = make_predictor()
    dense = BlockSizePredictor(V, [3, 4, 5], sparse_input=False, width=W, dropout=0.0)
    state = sparse.state_dict()
    first = {"first.weight": sparse.first.weight.detach().T, "first.mean": torch.zeros(V), "first.scale": torch.ones(V)}
    dense.load_state_dict(first | {name: t for name, t in state.items() if name != "first.table.weight"})
    features, best = rows_of(6), torch.arange(6) % 3
    assert features.offsets is not None and len(features.values) < 6 * V
    given = ((sparse, features), (dense, Features(features.dense(V))))
    losses = []
    for predictor, rows in given:
        kind = LazyAdamW if predictor is sparse else torch.optim.AdamW
        optimizer = kind(predictor.parameters(), lr=1e-2)
        before = nn.functional.cross_entropy(predictor(rows), best)
        before.backward()
        optimizer.step()
        losses.append((before.item(), nn.functional.cross_entropy(predictor(rows), best).item()))
    (before, after), expected = losses
    assert (before, after) == pytest.approx(expected, rel=1e-5)
    assert after < before - 1e-3


def test_the_order_of_rows_and_their_repetition_do_not_matter() -> None:
    values = torch.randn(4, W, generator=torch.Generator().manual_seed(0))
    results = []
    for rows, given in (([2, 5], torch.stack([values[0] + values[2], values[1] + values[3]])), ([2, 5, 2, 5], values),
                        ([5, 2, 5, 2], values[[1, 0, 3, 2]])):  # fmt: skip
        parameter = nn.Parameter(torch.ones(8, W))
        parameter.grad = sparse_gradient(parameter, rows, given)
        LazyAdamW([parameter]).step()
        results.append(parameter.detach())
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_and_are_cleared(set_to_none: bool) -> None:
    halves, whole = make_predictor(), make_predictor()
    split, joint = LazyAdamW(halves.parameters(), lr=1e-2), LazyAdamW(whole.parameters(), lr=1e-2)
    for seed in range(0, 6, 2):
        split.zero_grad(set_to_none=set_to_none)
        joint.zero_grad(set_to_none=set_to_none)
        for part in (seed, seed + 1):
            (loss_of(halves, part) / 2).backward()
        ((loss_of(whole, seed) + loss_of(whole, seed + 1)) / 2).backward()
        split.step()
        joint.step()
    torch.testing.assert_close(weights(halves), weights(whole))
    assert not torch.allclose(weights(halves), weights(make_predictor()))


def test_a_closure_computes_the_gradients() -> None:
    with_closure, without = make_predictor(), make_predictor()
    optimizer = LazyAdamW(with_closure.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(with_closure, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == train(without, LazyAdamW(without.parameters()), range(1))[0]
    assert torch.equal(weights(with_closure), weights(without))


def test_saved_and_loaded_it_continues_exactly(tmp_path: Path) -> None:
    straight = make_predictor()
    straight_losses = train(straight, LazyAdamW(straight.parameters(), lr=1e-2), range(10))
    first = make_predictor()
    optimizer = LazyAdamW(first.parameters(), lr=1e-2)
    train(first, optimizer, range(5))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    kept = copy.deepcopy(optimizer.state_dict())
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    second = make_predictor(seed=1)
    second.load_state_dict(saved["model"])
    resumed = LazyAdamW(second.parameters(), lr=0.5)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["lr"] == 1e-2
    torch.testing.assert_close(resumed.state_dict()["state"], kept["state"], rtol=0, atol=0)
    assert train(second, resumed, range(5, 10)) == straight_losses[5:]
    assert torch.equal(weights(second), weights(straight))
    train(first, optimizer, range(5, 10))  # having been saved changes nothing
    assert torch.equal(weights(first), weights(straight))


def test_touched_rows_alone_are_saved(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(50_000, W))
    optimizer = LazyAdamW([parameter])
    for rows in ([9, 4], [4, 40_000]):
        parameter.grad = sparse_gradient(parameter, rows, torch.ones(2, W))
        optimizer.step()
    (state,) = optimizer.state_dict()["state"].values()
    assert state["rows"].tolist() == [4, 9, 40_000] and state["step"] == 2
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (3, W)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 10_000


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_parameter_keeps_its_kind_of_gradient(sparse_first: bool) -> None:
    parameter = nn.Parameter(torch.zeros(5, W))
    gradients: list[Callable[[], Tensor]] = [
        lambda: sparse_gradient(parameter, [1], torch.ones(1, W)),
        lambda: torch.ones(5, W),
    ]
    optimizer = LazyAdamW([parameter])
    first, second = gradients if sparse_first else gradients[::-1]
    parameter.grad = first()
    optimizer.step()
    parameter.grad = second()
    with pytest.raises(RuntimeError, match="gradients so far"):
        optimizer.step()


def test_an_empty_gradient_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(5, W))
    parameter.grad = sparse_gradient(parameter, [], torch.empty(0, W))
    LazyAdamW([parameter]).step()
    assert torch.equal(parameter.detach(), torch.ones(5, W))


RESIDENT = """
import re, sys, torch
from pathlib import Path
from torch import nn
from blockpilot.learning.optimizer import LazyAdamW

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

V, W = 100_000, 512  # 195 MiB
parameter = nn.Parameter(torch.zeros(V, W))
optimizer = LazyAdamW([parameter])
generator = torch.Generator().manual_seed(0)

def step(rows):
    parameter.grad = torch.sparse_coo_tensor(rows.sort().values[None], torch.ones(len(rows), W), (V, W))
    optimizer.step()
    parameter.grad = None

step(torch.tensor([0]))  # loads what a step needs
before = resident()
for _ in range(20):
    step(torch.randperm(V, generator=generator)[:100])
few = resident() - before
step(torch.arange(V))
print(few, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_moments_of_untouched_rows_take_no_memory() -> None:
    """2,000 rows at random places hold 8 MiB of moments; all rows 391 MiB."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    few, everything = map(float, done.stdout.split())
    assert few < 32
    assert everything > 391
