"""The layout of the released checkpoint: what is written, what is read back, and what is refused."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockpilot.errors import UserError
from blockpilot.models import Pair, load_pair
from blockpilot.policies.dense_layout import export_dense, import_dense
from blockpilot.policies.predictor import PredictorPolicy, load_policy
from tests.toy import make_pair
from tests.unit.policies.test_policies_predictor import SIZES, make_policy, prefills


@pytest.fixture(scope="module")
def tiny() -> Pair:
    return load_pair("tiny", device="cpu")


def released(vocab_size: int, width: int = 24, depth: int = 2, outputs: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint as the authors' is: made by torch's layers alone."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, list[int]] = {}
    for i in range(depth):
        shapes |= {f"layers.{i}.weight": [width, width if i else vocab_size], f"layers.{i}.bias": [width]}
    shapes |= {"fc_out.weight": [outputs, width], "fc_out.bias": [outputs]}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def their_scores(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The network the layout stands for, written out: the first layer plain, the others added to their input."""
    weights, state = {name: tensor.double() for name, tensor in weights.items()}, inputs.double()
    depth = sum(name.startswith("layers.") for name in weights) // 2
    for i in range(depth):
        layer = nn.functional.linear(state, weights[f"layers.{i}.weight"], weights[f"layers.{i}.bias"])
        state = torch.relu(layer) + (state if i else 0)
    return nn.functional.linear(state, weights["fc_out.weight"], weights["fc_out.bias"])


def scores(policy: PredictorPolicy) -> Tensor:
    """In fp64, so that networks can be compared and not their rounding."""
    predictor = copy.deepcopy(policy.predictor).eval().double()
    with torch.no_grad():
        rows = [predictor(policy.extractor.from_logits(p.logits, p.hidden)) for p in prefills()]
    return torch.cat(rows)


def rounded(policy: PredictorPolicy) -> PredictorPolicy:
    """The policy with its weights rounded to bf16."""
    for parameter in policy.predictor.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    return policy


@pytest.mark.parametrize(("width", "depth"), [(24, 2), (16, 1), (8, 4)])
def test_a_released_file_gives_the_scores_of_its_network(tmp_path: Path, width: int, depth: int) -> None:
    pair = make_pair()  # B = 4, vocabulary of 64
    weights = released(64, width, depth)
    torch.save(weights, tmp_path / "model.pt")
    policy = import_dense(tmp_path / "model.pt", pair)
    assert policy.block_sizes == (2, 3, 4, 5, 6)
    expected = their_scores(weights, torch.stack([prefill.logits for prefill in prefills()]))
    torch.testing.assert_close(scores(policy), expected)
    chosen = [policy.choose(prefill) for prefill in prefills()]
    assert chosen == [SIZES[column] for column in expected.argmax(dim=-1).tolist()] and len(set(chosen)) > 1


def test_what_the_file_does_not_say_is_the_pairs(tmp_path: Path, tiny: Pair) -> None:
    torch.save(released(tiny.vocab_size), tmp_path / "model.pt")
    policy = import_dense(tmp_path / "model.pt", tiny)
    assert policy.block_sizes == (14, 15, 16, 17, 18) and policy.settings.k == 2
    assert (policy.trained_block_size, policy.best_fixed) == (16, 16)
    assert policy.extractor.kind == "logits" and len(policy.training_prompt_keys) == 0
    assert all(parameter.dtype == torch.float32 for parameter in policy.predictor.parameters())
    policy.check_pair(tiny)
    policy.save(tmp_path / "policy")
    assert load_policy(tmp_path / "policy", tiny).block_sizes == policy.block_sizes
    named = import_dense(tmp_path / "model.pt", tiny, [4, 8, 12, 16, 20], best_fixed=12)
    assert named.block_sizes == (4, 8, 12, 16, 20) and named.best_fixed == 12 and named.settings.k == 12


def test_round_trip_through_the_embedded_pair(tmp_path: Path, tiny: Pair) -> None:
    """Scores of an exported and imported policy are those of its weights rounded to bf16."""
    policy = make_policy(tiny, "logits", depth=3, width=32)
    before = scores_on(policy, tiny)
    export_dense(policy, tmp_path / "made" / "model.pt")
    again = import_dense(tmp_path / "made" / "model.pt", tiny, policy.block_sizes)
    assert torch.equal(scores_on(again, tiny), scores_on(rounded(policy), tiny))
    difference = (scores_on(again, tiny) - before).norm() / before.norm()
    assert 0 < difference < 2**-7  # bf16 keeps 8 bits


def scores_on(policy: PredictorPolicy, pair: Pair) -> Tensor:
    logits = 3 * torch.randn(20, pair.vocab_size, generator=torch.Generator().manual_seed(1))
    policy.predictor.eval()
    with torch.no_grad():
        return torch.cat([policy.predictor(policy.extractor.from_logits(row)) for row in logits])


@pytest.mark.parametrize("kind", ["probs", "log_probs"])
def test_sparse_inputs_can_be_exported_with_a_warning(tmp_path: Path, kind: str) -> None:
    pair = make_pair()
    policy = make_policy(pair, kind)
    with pytest.warns(UserWarning, match=f"its input is {kind}, not raw logits") as caught:
        export_dense(policy, tmp_path / "model.pt")
    assert len(caught) == 1
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert weights["layers.0.weight"].shape == (24, 64)
    again = import_dense(tmp_path / "model.pt", pair, SIZES, kind=kind)
    assert torch.equal(scores(again), scores(rounded(policy)))
    dense = torch.cat([policy.extractor.from_logits(p.logits).dense(64) for p in prefills()])
    torch.testing.assert_close(scores(again), their_scores(weights, dense))


def test_an_export_has_the_keys_and_the_dtype_of_the_released_file(tmp_path: Path) -> None:
    policy = make_policy(make_pair(), "logits")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_dense(policy, tmp_path / "model.pt")
    written, expected = torch.load(tmp_path / "model.pt", weights_only=True), released(64)
    assert {n: (t.shape, t.dtype) for n, t in written.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert (tmp_path / "model.pt").stat().st_size < 2 * sum(t.numel() for t in expected.values()) + 4096
    assert all(parameter.dtype == torch.float32 for parameter in policy.predictor.parameters())


@pytest.mark.parametrize("kind", ["topk", "stats", "hidden"])
def test_other_inputs_have_no_place_in_the_layout(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=rf"preprocess\.kind='{kind}' is not allowed; expected one of logits"):
        export_dense(make_policy(make_pair(), kind), tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_hidden_layers_without_a_residual_have_no_place_in_the_layout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"predictor\.residual=False"):
        export_dense(make_policy(make_pair(), "logits", residual=False), tmp_path / "model.pt")
    export_dense(make_policy(make_pair(), "logits", residual=False, depth=1), tmp_path / "model.pt")


class Code:
    """Runs a command when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def error_of(path: Path, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(UserError) as caught:
        import_dense(path, make_pair(), *arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({**released(64), "layers.9.bias": Code(tmp_path / "was here")}, tmp_path / "model.pt")
    message = error_of(tmp_path / "model.pt")
    assert str(tmp_path / "model.pt") in message and "code in a checkpoint is never run: refused" in message
    assert not (tmp_path / "was here").exists()
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert (tmp_path / "was here").exists()  # it would have


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "cannot be read" in error_of(tmp_path / "nowhere.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    assert "cannot be read" in error_of(tmp_path / "text.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    assert "cannot be read" in error_of(tmp_path / "empty.pt")
    torch.save(released(64), tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:3000])
    assert "cannot be read" in error_of(tmp_path / "cut.pt")
    for number, content in enumerate(
        ([1, 2], torch.ones(3), {"model": released(64)}, {"layers.0.weight": 3}, {3: torch.ones(3)})
    ):
        torch.save(content, tmp_path / f"{number}.pt")
        assert "is no state dict" in error_of(tmp_path / f"{number}.pt")


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    weights = released(64)
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    return weights


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fc_out.bias": None, "layers.1.bias": None}, ["missing layers.1.bias", "missing fc_out.bias"]),
        ({"norm.weight": torch.ones(3)}, ["unexpected norm.weight"]),
        ({"layers.7.weight": torch.ones(24, 24)}, ["unexpected layers.7.weight"]),
        ({"layers.0.weight": torch.ones(24, 65)}, ["layers.0.weight has shape [24, 65], expected [24, 64]"]),
        ({"layers.1.weight": torch.ones(24, 23)}, ["layers.1.weight has shape [24, 23], expected [24, 24]"]),
        ({"layers.0.weight": torch.ones(24)}, ["layers.0.weight has shape [24], expected [W, 64]"]),
        ({"fc_out.bias": torch.ones(4)}, ["fc_out.bias has shape [4], expected [5]"]),
        ({"fc_out.bias": torch.ones(5, dtype=torch.int64)}, ["fc_out.bias has dtype torch.int64"]),
        ({"fc_out.bias": torch.full((5,), torch.nan)}, ["fc_out.bias is not finite"]),
        ({"fc_out.bias": torch.ones(5).to_sparse()}, ["fc_out.bias is torch.sparse_coo on cpu"]),
        ({"fc_out.bias": torch.ones(5, device="meta")}, ["fc_out.bias is torch.strided on meta"]),
        ({name: None for name in released(64)}, ["missing layers.0.weight", "missing fc_out.weight"]),
    ],
)
def test_what_does_not_fit_is_listed(tmp_path: Path, changes: dict[str, Tensor | None], expected: list[str]) -> None:
    torch.save(changed(**changes), tmp_path / "model.pt")
    message = error_of(tmp_path / "model.pt")
    assert all(part in message for part in expected), message
    assert str(tmp_path / "model.pt") in message and "vocabulary of 64" in message


@pytest.mark.parametrize("sizes", [[2, 3, 4, 5], [2, 3, 4, 5, 5], [6, 5, 4, 3, 2], [0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 7]])
def test_candidates_that_do_not_fit_the_outputs(tmp_path: Path, sizes: list[int]) -> None:
    torch.save(released(64), tmp_path / "model.pt")
    assert f"block_sizes={sizes} is not allowed; expected 5 rising sizes" in error_of(tmp_path / "model.pt", sizes)


@pytest.mark.parametrize("outputs", [4, 7])  # no middle; from 1 up around B = 4
def test_outputs_that_do_not_lie_around_b_need_candidates(tmp_path: Path, outputs: int) -> None:
    torch.save(released(64, outputs=outputs), tmp_path / "model.pt")
    assert f"block_sizes=None is not allowed: {tmp_path / 'model.pt'} has {outputs} outputs" in error_of(
        tmp_path / "model.pt"
    )
    sizes = list(range(2, 2 + outputs))
    assert import_dense(tmp_path / "model.pt", make_pair(), sizes).block_sizes == tuple(sizes)


def test_a_file_without_outputs_and_a_best_size_that_is_none(tmp_path: Path) -> None:
    torch.save(released(64, outputs=0), tmp_path / "none.pt")
    assert "block_sizes=[] is not allowed" in error_of(tmp_path / "none.pt", [])
    torch.save(released(64), tmp_path / "model.pt")
    assert "best_fixed='4' is not allowed" in error_of(tmp_path / "model.pt", best_fixed="4")
    assert "best_fixed=0 is not allowed" in error_of(tmp_path / "model.pt", best_fixed=0)


def test_an_input_that_is_not_wide_cannot_be_imported(tmp_path: Path) -> None:
    torch.save(released(64), tmp_path / "model.pt")
    assert "kind='stats' is not allowed" in error_of(tmp_path / "model.pt", kind="stats")


def test_an_exported_policy_is_left_as_it_was(tmp_path: Path) -> None:
    policy = make_policy(make_pair(), "logits")
    before = scores(policy)
    export_dense(replace(policy), tmp_path / "model.pt")
    assert torch.equal(scores(policy), before)
