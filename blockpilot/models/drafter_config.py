"""What a drafter's configuration says: DFlash's own keys, checked, and what each of its layers sees.

Knows the keys, at the top level or in ``dflash_config``, as ``dflash`` 0.1.0 and vLLM read them; nothing of weights.

Shapes: B prompts, Q block positions, S keys a block attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import Qwen3Config

from blockpilot.config import LARGEST_BLOCK
from blockpilot.errors import UserError, brief, integer, integers
from blockpilot.models.lean import ROPES

LAYER_TYPES = ("full_attention", "sliding_attention")
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "sliding_window", "draft_vocab_size",
)  # fmt: skip
_OF_DFLASH_2 = ("selector_rank", "conv_kernel_size", "final_logit_softcapping")
_NEUTRAL = {"input_embedding_scale": 1, "output_multiplier": 1, "use_swa": False, "attention_sink_bias": False}
"""Keys with the one value that a drafter of this package does not have to know."""


@dataclass(frozen=True)
class Sight:
    """Which keys a layer's queries see, by how far apart their positions are. As in ``dflash`` 0.1.0's attention mask.

    A plain DFlash layer sees everything before and in its block. A causal one does not look behind a query, and a
    window of W sees the distances below W, on both sides where it is not causal.
    """

    window: int | None = None
    causal: bool = False

    @property
    def is_all(self) -> bool:
        """Whether nothing is hidden, so that no mask is needed."""
        return self.window is None and not self.causal

    def seen(self, queries_BQ: Tensor, keys_BS: Tensor) -> Tensor:
        """Boolean ``[B, 1, Q, S]`` of the positions of queries and keys."""
        behind = queries_BQ[:, :, None] - keys_BS[:, None]
        seen = behind >= 0 if self.causal or self.window is None else behind > -self.window
        return (seen if self.window is None else seen & (behind < self.window))[:, None]


@dataclass(frozen=True)
class DrafterSettings:
    """What a drafter needs to know besides the widths of its layers."""

    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    """Tapped layers of the target, from 0; layer ``i``'s output is ``hidden_states[i + 1]``."""
    sights: list[Sight]
    """One per layer."""
    draft_vocab_size: int | None
    """Rows of its own head; None where the target's serves."""
    own_embeddings: bool

    @classmethod
    def of(cls, config: Qwen3Config) -> DrafterSettings:
        """Those of a configuration.

        Raises:
            UserError: a key is missing, has a value it cannot have, or asks for what is not supported.
        """
        settings = cls(
            block_size=integer("block_size", _required(config, "block_size")),
            mask_token_id=integer("mask_token_id", _required(config, "mask_token_id")),
            target_layer_ids=_target_layer_ids(config),
            sights=_sights(config),
            draft_vocab_size=getattr(config, "draft_vocab_size", None),
            own_embeddings=bool(getattr(config, "own_embeddings", False)),
        )
        if not 2 <= settings.block_size <= LARGEST_BLOCK:
            raise UserError(
                f"drafter config has block_size={settings.block_size}; expected a whole number of 2 to {LARGEST_BLOCK}"
            )
        _check_sizes(config)
        _refuse_unsupported(config)
        return settings


def check_layer_types(kinds: object) -> None:
    """Whether a configuration's ``layer_types`` are such as a drafter may have.

    Raises:
        UserError: one of them is not, or they are no list.
    """
    if kinds is None:
        return
    if not isinstance(kinds, list):
        raise UserError(f"layer_types={brief(kinds)} is not allowed; expected a list")
    others = sorted({str(kind) for kind in kinds} - {*LAYER_TYPES})
    if others:
        raise UserError(f"layer_types has {brief(others)}; supported: {', '.join(LAYER_TYPES)}")


def _value(config: Qwen3Config, key: str) -> Any:
    return (getattr(config, "dflash_config", None) or {}).get(key, getattr(config, key, None))


def _required(config: Qwen3Config, key: str) -> Any:
    value = _value(config, key)
    if value is None:
        raise UserError(
            f"drafter config has no '{key}' (looked at the top level and in dflash_config); "
            "a DFlash checkpoint's config.json must name it"
        )
    return value


def _target_layer_ids(config: Qwen3Config) -> list[int]:
    """``dflash_config.target_layer_ids``; where absent, DFlash's own even spread over the target's layers."""
    ids = _value(config, "target_layer_ids")
    if ids is not None:
        return integers("target_layer_ids", ids)
    depth, count = integer("num_target_layers", _required(config, "num_target_layers")), config.num_hidden_layers
    return spread_taps(depth, count)


def spread_taps(depth: int, count: int) -> list[int]:
    """DFlash's even spread of ``count`` tapped layers over a target of ``depth`` layers, second to third from last."""
    if count == 1:
        return [depth // 2]
    first, last = 1, depth - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def _sights(config: Qwen3Config) -> list[Sight]:
    """What each layer sees: causal are those that ``is_causal`` says, without it those with a sliding window.

    Source: ``dflash`` 0.1.0 (``Qwen3DFlashAttention``); ``dflash_config.causal`` is vLLM's name of the same switch.
    """
    kinds = getattr(config, "layer_types", None)
    check_layer_types(kinds)
    kinds = kinds or ["full_attention"] * config.num_hidden_layers
    if len(kinds) != config.num_hidden_layers:
        raise UserError(f"drafter config has {len(kinds)} layer_types for num_hidden_layers={config.num_hidden_layers}")
    slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and config.sliding_window is None:
        raise UserError(
            "drafter config has layer_types with sliding_attention but no window; expected sliding_window and "
            "use_sliding_window: true"
        )
    key = "causal" if getattr(config, "is_causal", None) is None else "is_causal"
    causal = _value(config, key)
    if causal is not None and not isinstance(causal, bool):
        raise UserError(f"drafter config has {key}={brief(causal)}; expected true, false or null")
    return [Sight(config.sliding_window if one else None, one if causal is None else causal) for one in slides]


def _check_sizes(config: Qwen3Config) -> None:
    for key in _SIZES:
        value = _value(config, key)
        if value is not None and integer(key, value) < 1:
            raise UserError(f"drafter config has {key}={value}; expected a whole number of at least 1")
    heads, kv_heads = config.num_attention_heads, cast(int, config.num_key_value_heads)
    if heads % kv_heads:
        raise UserError(
            f"drafter config has num_attention_heads={heads}, no multiple of num_key_value_heads={kv_heads}"
        )


def _refuse_unsupported(config: Qwen3Config) -> None:
    rope = config.rope_parameters or {}
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta", 1.0)
    if kind not in ROPES:
        raise UserError(f"drafter config has rope_type={brief(kind)}; supported: {', '.join(ROPES)}")
    if not isinstance(theta, int | float) or not 0 < theta < float("inf"):
        raise UserError(f"drafter config has rope_theta={brief(theta)}; expected a number above 0")
    if config.hidden_act != "silu":
        raise UserError(f"drafter config has hidden_act={brief(config.hidden_act)}; supported: silu")
    for key in _OF_DFLASH_2:
        if _value(config, key) is not None:
            raise UserError(
                f"drafter config has '{key}', which is not supported; expected a DFlash (version 1) drafter"
            )
    for key, neutral in _NEUTRAL.items():
        value = _value(config, key)
        if value is not None and value != neutral:
            raise UserError(f"drafter config has {key}={brief(value)}, which is not supported; expected {neutral!r}")
