"""Reads a folder with a drafter, in any published layout, as this project's configuration and weights.

Knows files and layouts; nothing of how a drafter computes. Only JSON and safetensors are read: no code that lies in a
folder runs, and nothing is unpickled. A further layout is one more entry of ``LAYOUTS``.

The common form is the z-lab layout: a ``Qwen3Config`` that also holds ``block_size``, ``num_target_layers`` and
``dflash_config`` with ``mask_token_id`` and ``target_layer_ids``. Two keys are added where a drafter has more than its
layers: ``draft_vocab_size`` (a head of its own, of so many rows) and ``own_embeddings``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from blockpilot.errors import UserError, brief, integer, integers
from blockpilot.models.drafter_config import check_layer_types

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LISTED = 8
"""Most names an error lists; the others are counted."""


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's configuration and weights in the common form; weights are of the dtype they were stored in."""

    config: Qwen3Config
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """One way to write a drafter down."""

    name: str
    mark: str
    """What its ``config.json`` is known by, in words."""
    matches: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[dict[str, Any], Collection[str]], dict[str, Any]]
    """``config.json`` and the names of the weights to the values of the common form."""
    left_out: frozenset[str] = frozenset()
    """Weights that drafting does not need."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """The drafter in ``folder``.

    Raises:
        UserError: a file is missing or broken, the layout is not known, or it asks for what is not supported.
    """
    raw = read_json(folder / "config.json")
    weights = read_weights(folder)
    layout = detect(raw)
    values = layout.convert(raw, weights.keys())
    check_layer_types(values.get("layer_types"))
    config = _made(Qwen3Config, values)
    if "d2t" in weights:
        _check_vocabulary(weights["d2t"], weights.get("t2d"), config.vocab_size)
    return Checkpoint(config, {name: weight for name, weight in weights.items() if name not in layout.left_out})


def detect(raw: Mapping[str, Any]) -> Layout:
    """The layout of a ``config.json``.

    Raises:
        UserError: it is none of ``LAYOUTS``; the message says what was seen and what is supported.
    """
    for layout in LAYOUTS:
        if layout.matches(raw):
            return layout
    told = ("architectures", "model_type", "speculators_model_type")
    seen = ", ".join(f"{key}={brief(raw[key])}" for key in told if key in raw) or f"only keys {brief(sorted(raw))}"
    known = "; ".join(f"{layout.name} ({layout.mark})" for layout in LAYOUTS)
    raise UserError(f"config.json is of no known drafter layout: it has {seen}; supported: {known}")


# ---- files


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {file.name} in {file.parent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds {brief(content)}; expected an object of keys and values")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files a folder's weights lie in.

    Raises:
        UserError: there are none; pickled weights do not stand in for them.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        reason = f" (it has {listing(pickles)}, but a pickle can run code and is never loaded)" if pickles else ""
        raise UserError(f"there is no {WEIGHTS} in {folder}{reason}; expected weights as safetensors")
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from weights to files")
    names = sorted(set(shards.values()))
    # a name with a path in it would reach out of the folder
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing or not names:
        raise UserError(f"{folder / INDEX} names files that are not in its folder: {listing(missing)}")
    return [folder / name for name in names]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name.

    Raises:
        UserError: there are no safetensors, or one of the files is broken.
    """
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file} is truncated or no safetensors file: {one_line(error)}") from None
    return weights


def check_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Whether ``found`` is what a model with the state dict ``expected`` can be filled with.

    Raises:
        UserError: names are missing or unexpected, or tensors are of another shape or kind (whole or floating).
    """
    wrong = [
        f"{name} {_described(tensor)} instead of {_described(expected[name])}"
        for name, tensor in found.items()
        if name in expected and _described(tensor) != _described(expected[name])
    ]
    complaints = [
        f"{len(names)} {what}: {listing(sorted(names))}"
        for what, names in (
            ("missing keys", expected.keys() - found.keys()),
            ("unexpected keys", found.keys() - expected.keys()),
            ("keys of another shape or kind", wrong),
        )
        if names
    ]
    if complaints:
        raise UserError(f"its weights do not fit its config.json: {'; '.join(complaints)}")


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Whether every weight is a number, in the dtype it is used in.

    Raises:
        UserError: some are not: a damaged file, or values beyond what the dtype holds.
    """
    wrong = [f"{name} ({weight.dtype})" for name, weight in weights.items() if not _is_finite(weight)]
    if wrong:
        raise UserError(f"its weights hold NaN or infinite values: {listing(wrong)}; expected finite numbers")


def _is_finite(tensor: Tensor) -> bool:
    # a sum passes on what is not finite and needs no copy; of numbers of one byte torch has no sum
    wide = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    return math.isfinite(float(wide.sum(dtype=torch.float64)))


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}{'' if tensor.is_floating_point() else ' of whole numbers'}"


def listing(names: Iterable[str]) -> str:
    """Names on one line: the first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def one_line(error: Exception) -> str:
    """The kind and the text of an error of a library, whose text may have many lines."""
    return brief(error) if not str(error) else " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    try:
        return kind.from_dict(values)
    except Exception as error:  # a configuration class has its own errors, of several lines: the last has the value
        raise UserError(
            f"config.json cannot be used: {(str(error).splitlines() or [repr(error)])[-1].strip()}"
        ) from None


# ---- z-lab


def _is_zlab(raw: Mapping[str, Any]) -> bool:
    architectures = raw.get("architectures")
    # DFlashDrafter: what this project wrote before it saved under the published name
    named = isinstance(architectures, list) and {"DFlashDraftModel", "DFlashDrafter"} & {*map(str, architectures)}
    return bool(named) or (architectures is None and "dflash_config" in raw)


def _from_zlab(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The same values. ``auto_map`` names code in the folder, which is not run; ``model_type`` is its target's."""
    values = {key: value for key, value in raw.items() if key not in ("auto_map", "model_type")}
    if not isinstance(values.get("dflash_config", {}), dict | None):
        raise UserError(f"dflash_config={brief(values['dflash_config'])} is not allowed; expected keys and values")
    shared = values.get("draft_vocab_size") == values.get("vocab_size") and "lm_head.weight" not in names
    if shared or values.get("draft_vocab_size") is None:
        values.pop("draft_vocab_size", None)
    return values


# ---- speculators

_DECODERS: dict[str, type[PreTrainedConfig]] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
"""Whose defaults stand for what a ``transformer_layer_config`` leaves out: it is saved without its defaults."""
_DECODER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "rope_parameters", "attention_bias", "layer_types", "sliding_window",
)  # fmt: skip
_OF_VARIANTS: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dflash",), "sample_from_anchor": (False,), "shift_label": (False,),
}  # fmt: skip


def _from_speculators(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The values of ``DFlashSpeculatorConfig`` in z-lab's terms.

    Source: vllm-project/speculators, ``models/dflash/config.py`` and ``convert/dflash/converter.py``. There a layer id
    is an index into ``hidden_states``, whose entry 0 is the embeddings' output; z-lab reads ``hidden_states[id + 1]``.
    So ``target_layer_ids`` are ``aux_hidden_state_layer_ids`` less one, as in vLLM's ``update_dflash``. Of its layers
    only those with a sliding window are causal inside a block, and where ``sliding_window_non_causal`` is absent (it
    is newer than the format) they are not, again as in ``update_dflash``. A window counts from each query, as when
    such a checkpoint is served; its training counts it from the anchor.
    """
    if raw["speculators_model_type"] != "dflash":
        raise UserError(
            f"speculators_model_type={brief(raw['speculators_model_type'])} is not supported; expected dflash"
        )
    for key, allowed in _OF_VARIANTS.items():
        if raw.get(key) not in (None, *allowed):
            raise UserError(f"{key}={brief(raw[key])} is not supported; expected {allowed[0]!r}")
    decoder = _decoder_values(raw.get("transformer_layer_config"))
    if raw.get("target_hidden_size") not in (None, decoder["hidden_size"]):
        raise UserError(
            f"target_hidden_size={brief(raw['target_hidden_size'])} is not supported; expected the drafter's own "
            f"hidden_size, {decoder['hidden_size']}"
        )
    rows = raw.get("draft_vocab_size")
    rows = decoder["vocab_size"] if rows is None else integer("draft_vocab_size", rows)
    values = decoder | {
        "architectures": ["DFlashDraftModel"],
        "block_size": raw.get("block_size"),
        "dflash_config": {
            "mask_token_id": raw.get("mask_token_id"),
            "target_layer_ids": _tapped_layers(raw.get("aux_hidden_state_layer_ids")),
        },
        # what is not its own is its target's, whatever a default says
        "tie_word_embeddings": False,
    }
    both_ways = raw.get("sliding_window_non_causal", True)
    if not isinstance(both_ways, bool):
        raise UserError(f"sliding_window_non_causal={brief(both_ways)} is not allowed; expected true or false")
    if both_ways and "sliding_attention" in (decoder["layer_types"] or ()):
        values["is_causal"] = False
    if rows != decoder["vocab_size"] or "lm_head.weight" in names:
        values["draft_vocab_size"] = rows
    if "embed_tokens.weight" in names:
        values["own_embeddings"] = True
    return values


def _decoder_values(layer: object) -> dict[str, Any]:
    if not isinstance(layer, dict):
        raise UserError(f"transformer_layer_config={brief(layer)} is not allowed; expected keys and values")
    kind = layer.get("model_type", "qwen3")
    if kind not in _DECODERS:
        raise UserError(
            f"transformer_layer_config.model_type={brief(kind)} is not supported; expected one of {listing(_DECODERS)}"
        )
    config = _made(_DECODERS[kind], {key: value for key, value in layer.items() if key != "auto_map"})
    values = {key: getattr(config, key, None) for key in _DECODER_KEYS}
    return values | {"use_sliding_window": values["sliding_window"] is not None}


def _tapped_layers(ids: object) -> list[int]:
    if ids is None:
        raise UserError("config.json has no 'aux_hidden_state_layer_ids'; expected the list of tapped layers")
    listed = integers("aux_hidden_state_layer_ids", ids)
    if not listed or min(listed) < 1:
        raise UserError(
            f"aux_hidden_state_layer_ids={brief(listed)} is not supported; expected ids from 1, the output of the "
            "target's first layer (0 is that of its embeddings)"
        )
    return [index - 1 for index in listed]


def _check_vocabulary(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> None:
    """Whether draft ids lead into the target's vocabulary, each to its own token."""
    if d2t.is_floating_point() or d2t.dim() != 1:
        return  # told with all that is of a wrong shape or kind
    ids = torch.arange(len(d2t)) + d2t
    outside, twice = int(((ids < 0) | (ids >= vocab_size)).sum()), len(ids) - len(ids.unique())
    if outside or twice:
        raise UserError(
            f"d2t leads {outside} draft tokens out of the vocabulary of {vocab_size} and {twice} to one that another "
            "leads to; expected target id = draft id + d2t[draft id]"
        )
    if t2d is not None and not torch.equal(t2d.flatten().nonzero()[:, 0], ids.sort().values):
        raise UserError(f"t2d and d2t ({len(d2t)} tokens) name different sets of target tokens")


LAYOUTS = (
    Layout(
        "speculators", "speculators_model_type: dflash", lambda raw: "speculators_model_type" in raw, _from_speculators,
        # the first repeats d2t; the others are the target's, for training
        frozenset({"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}),
    ),
    Layout("z-lab", "architectures: [DFlashDraftModel], or dflash_config", _is_zlab, _from_zlab),
)  # fmt: skip
"""In the order they are tried: a speculators checkpoint may name z-lab's architecture too."""
