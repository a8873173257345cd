"""A predictor in the layout of the checkpoint that the paper's authors released (arXiv 2606.31315), to and fro.

The file is a bf16 state dict of ``torch.save`` with a weight and a bias for each of ``layers.0`` (Linear(V, W)),
``layers.1``, ... (Linear(W, W)) and ``fc_out`` (Linear(W, K)). It reads ``h = relu(layers.0(x))``, then
``h = h + relu(layers.i(h))``, then ``fc_out(h)``. The released one has W = 2048, two layers, K = 5 for the block sizes
14 to 18, and raw logits as x. Nothing of this but the weights is in the file: neither block sizes nor what x is. The
authors' code computes in bf16; here the same weights compute in fp32.

Shapes: V vocabulary, W width, K candidate block sizes.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.config import PredictorConfig, require
from blockpilot.errors import UserError, integer, integers
from blockpilot.learning import BlockSizePredictor, FeatureExtractor
from blockpilot.models.pair import Pair
from blockpilot.policies.predictor import PredictorPolicy

WIDE_KINDS = ("logits", "probs", "log_probs")
"""Inputs with one number per token of the vocabulary, as the layout has it."""


def export_dense(policy: PredictorPolicy, path: str | Path) -> None:
    """Writes the policy's weights, rounded to bf16, in the authors' layout.

    The scale of standardised inputs goes into the first layer. Warns of what the file cannot say: that the policy does
    not read raw logits, which the authors' code would feed it, or that it keeps B unless ``min_gain`` is exceeded.

    Raises:
        UserError: the layout has no place for what the policy reads, or for hidden layers without a residual.
    """
    kind, settings = policy.extractor.kind, policy.settings
    require(kind in WIDE_KINDS, "preprocess.kind", kind, f"one of {', '.join(WIDE_KINDS)} in the authors' layout")
    plain = settings.depth > 1 and not settings.residual
    require(not plain, "predictor.residual", settings.residual, "true: the authors' layout adds a layer to its input")
    if kind != "logits":
        warnings.warn(f"the authors' layout does not say that its input is {kind}, not raw logits", stacklevel=2)
    if settings.min_gain is not None:
        warnings.warn(f"the authors' layout does not know predictor.min_gain={settings.min_gain}", stacklevel=2)
    own = {name: tensor.detach() for name, tensor in policy.predictor.named_parameters()}
    own = {name: tensor for name, tensor in own.items() if not name.startswith("first.")}
    own["first.weight"], own["first.bias"] = policy.predictor.first.on_raw_inputs()
    weights = {_their_name(name): tensor.to("cpu", torch.bfloat16) for name, tensor in own.items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def import_dense(
    path: str | Path,
    pair: Pair,
    block_sizes: Sequence[int] | None = None,
    *,
    kind: str = "logits",
    tail_mass: float = 1e-3,
    best_fixed: int | None = None,
) -> PredictorPolicy:
    """A policy from a file in the authors' layout. Tensors alone are read from it; code in it is refused.

    The weights are kept in fp32, on the pair's device. Which prompts they were trained on is not known, so the
    policy cannot refuse to be tested on them.

    Args:
        path: the file.
        pair: whose prefills it is to read.
        block_sizes: the K candidates, in the order of the outputs; by default those around the pair's B.
        kind: what it reads, ``logits``, ``probs`` or ``log_probs``.
        tail_mass: probability mass dropped from what ``probs`` and ``log_probs`` read.
        best_fixed: best single block size of its training prompts; by default the pair's B.

    Raises:
        UserError: the file cannot be read, its tensors are not those of the layout or of this pair's vocabulary, or
            the candidates do not fit its outputs.
    """
    require(kind in WIDE_KINDS, "kind", kind, f"one of {', '.join(WIDE_KINDS)}")
    weights = _read(Path(path))
    depth = _check(weights, pair.vocab_size, Path(path))
    width, outputs = len(weights["layers.0.weight"]), len(weights["fc_out.weight"])
    sizes = _candidates(block_sizes, outputs, pair.block_size, Path(path))
    radius = max(abs(size - pair.block_size) for size in sizes)
    settings = PredictorConfig(k=radius, depth=depth, width=width, standardize=False)
    fixed = pair.block_size if best_fixed is None else integer("best_fixed", best_fixed)
    require(fixed >= 1, "best_fixed", fixed, "a block size of at least 1, or None")
    extractor = FeatureExtractor(kind, tail_mass=tail_mass)
    with torch.device("meta"):  # weights are taken from the file, not drawn first
        predictor = BlockSizePredictor(
            pair.vocab_size, sizes, sparse_input=extractor.is_sparse, depth=depth, width=width,
            dropout=settings.dropout, residual=True,
        )  # fmt: skip
    if extractor.is_sparse:
        weights["layers.0.weight"] = weights["layers.0.weight"].T
    own = {name: weights[_their_name(name)].float().contiguous() for name, _ in predictor.named_parameters()}
    untouched = {"mean": 0.0, "scale": 1.0, "gains": 0.0, "temperature": 1.0}
    own |= {name: torch.full(b.shape, untouched[name.split(".")[-1]]) for name, b in predictor.named_buffers()}
    predictor.load_state_dict(own, assign=True)
    policy = PredictorPolicy(
        predictor.eval(), extractor, settings, pair.identity, pair.vocab_size, pair.hidden_size, pair.block_size,
        fixed, torch.empty(0, dtype=torch.int64),
    )  # fmt: skip
    return policy.to(pair.device)


def _their_name(name: str) -> str:
    """``first.weight`` is their ``layers.0.weight``, ``hidden.0.bias`` their ``layers.1.bias``, ``head`` ``fc_out``."""
    part, *index, leaf = name.split(".")
    place = {"first": "layers.0", "head": "fc_out"}.get(part) or f"layers.{int(index[0]) + 1}"
    return f"{place}.{leaf}"


def _read(path: Path) -> dict[str, Tensor]:
    """The file's tensors, mapped into memory."""
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} holds more than tensors, and code in a checkpoint is never run: refused") from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read as a file of torch.save: {reason}") from error
    named = isinstance(loaded, Mapping) and all(isinstance(name, str) for name in loaded)
    if not named or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise UserError(f"{path} is no state dict: expected tensors named layers.0.weight, ..., fc_out.bias")
    return dict(loaded)


def _check(weights: Mapping[str, Tensor], vocab_size: int, path: Path) -> int:
    """Number of layers, once all keys, shapes and values are right."""
    found = [int(match[1]) for name in weights if (match := re.fullmatch(r"layers\.(\d+)\.(?:weight|bias)", name))]
    # a stray high number is one unexpected key, not a thousand missing ones
    depth = next(i for i in range(len(found) + 2) if i not in found) or 1
    first, last = weights.get("layers.0.weight"), weights.get("fc_out.weight")
    width = first.shape[0] if first is not None and first.dim() == 2 else "W"
    outputs = last.shape[0] if last is not None and last.dim() == 2 else "K"
    expected: dict[str, list[int | str]] = {}
    for i in range(depth):
        expected |= {f"layers.{i}.weight": [width, width if i else vocab_size], f"layers.{i}.bias": [width]}
    expected |= {"fc_out.weight": [outputs, width], "fc_out.bias": [outputs]}
    wrong = [f"missing {name}" for name in expected if name not in weights]
    wrong += [f"unexpected {name}" for name in weights if name not in expected]
    for name, shape in expected.items():
        if name in weights and list(weights[name].shape) != shape:
            wrong.append(f"{name} has shape {list(weights[name].shape)}, expected [{', '.join(map(str, shape))}]")
        elif name in weights and not weights[name].is_floating_point():
            wrong.append(f"{name} has dtype {weights[name].dtype}, expected a floating one")
        elif name in weights and (weights[name].layout != torch.strided or weights[name].is_meta):
            wrong.append(f"{name} is {weights[name].layout} on {weights[name].device}, expected numbers written out")
        elif name in weights and not bool(torch.isfinite(weights[name].float()).all()):
            wrong.append(f"{name} is not finite")
    if wrong:
        raise UserError(f"{path} is not in the authors' layout for a vocabulary of {vocab_size}: {'; '.join(wrong)}")
    return depth


def _candidates(block_sizes: Sequence[int] | None, outputs: int, trained: int, path: Path) -> tuple[int, ...]:
    """The block size of each output."""
    if block_sizes is None:
        lowest = trained - outputs // 2
        if outputs % 2 == 0 or lowest < 2:
            raise UserError(f"block_sizes=None is not allowed: {path} has {outputs} outputs, which do not lie evenly "
                            f"around {trained} from 2 up; name them")  # fmt: skip
        return tuple(range(lowest, lowest + outputs))
    sizes = integers("block_sizes", block_sizes)
    rising = sorted(set(sizes)) == sizes
    allowed = f"{outputs} rising sizes of at least 1, one for each output of {path}"
    require(len(sizes) == outputs > 0 and rising and sizes[0] >= 1, "block_sizes", sizes, allowed)
    return tuple(sizes)
