"""The DFlash drafter: a block-diffusion model that fills a block of masks in one forward pass.

Knows its own weights, the context keys and values it keeps, and nothing of targets, caches on disk or
acceptance rules. State-dict keys and configuration keys are those of the published z-lab checkpoints,
so those load unchanged. Architecture: DFlash, arXiv 2602.06036.

Shapes: B prompts, T context positions, Q block positions, D hidden size, H key/value heads, E head size,
F tapped features (number of tapped layers x D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from blockpilot.errors import UserError


@dataclass
class DrafterContext:
    """Projected keys and values of context positions, one pair per drafter layer.

    ``keys[layer]`` and ``values[layer]`` are ``[B, H, capacity, E]``; the first ``length`` positions are
    valid (or, for a batch of uneven prompts, as many as the caller's mask shows).
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0


class DFlashAttention(nn.Module):
    """Block positions attend to the context and, in both directions, to their own block."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, cast(int, config.num_key_value_heads)
        bias = config.attention_bias
        self.grouped = heads != kv_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def project_kv(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, D]`` to rotated keys and values, each ``[B, H, T, E]``."""
        keys = self.k_norm(self._heads(self.k_proj(states))).transpose(1, 2)
        values = self._heads(self.v_proj(states)).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
        return keys, values

    def forward(
        self, states_BQD: Tensor, keys_BHTE: Tensor, values_BHTE: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attention of block states over context keys and values and the block's own, ``[B, Q, D]``."""
        queries = self.q_norm(self._heads(self.q_proj(states_BQD))).transpose(1, 2)
        queries, _ = apply_rotary_pos_emb(queries, queries, cos, sin)
        block_keys, block_values = self.project_kv(states_BQD, cos, sin)
        attended = F.scaled_dot_product_attention(
            queries,
            torch.cat([keys_BHTE, block_keys], dim=2),
            torch.cat([values_BHTE, block_values], dim=2),
            attn_mask=mask,
            enable_gqa=self.grouped,
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class DFlashLayer(nn.Module):
    """Pre-norm attention and MLP, as in the target's family; the context enters un-normed by this layer."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, states: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Block states ``[B, Q, D]`` through attention and MLP."""
        states = states + self.self_attn(self.input_layernorm(states), keys, values, cos, sin, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class DFlashDrafter(PreTrainedModel):
    """The drafter of DFlash: target hidden states in, hidden states of a filled block out.

    It has neither embedding nor head: both are the target's. ``config`` is a ``Qwen3Config`` that also holds
    ``block_size``, ``num_target_layers`` and ``dflash_config`` with ``mask_token_id`` and ``target_layer_ids``.

    Raises:
        UserError: a DFlash key is missing from ``config``, or it asks for what this class does not do
            (sliding-window layers, causal blocks).
    """

    config_class = Qwen3Config
    base_model_prefix = "drafter"
    _no_split_modules: ClassVar[list[str]] = ["DFlashLayer"]
    _supports_sdpa = True

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.block_size = int(_required(config, "block_size"))
        self.mask_token_id = int(_required(config, "mask_token_id"))
        self.target_layer_ids = _target_layer_ids(config)
        _refuse_unsupported(config)
        self.layers = nn.ModuleList([DFlashLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    def _layers(self) -> list[DFlashLayer]:
        return cast(list[DFlashLayer], self.layers)

    def allocate(self, batch: int, capacity: int) -> DrafterContext:
        """An empty context for ``batch`` prompts of at most ``capacity`` positions, on this model's device."""
        config, weight = self.config, self.fc.weight
        head_dim = self._layers()[0].self_attn.head_dim
        shape = (batch, cast(int, config.num_key_value_heads), capacity, head_dim)
        keys = [weight.new_zeros(shape) for _ in self.layers]
        return DrafterContext(keys, [torch.zeros_like(k) for k in keys])

    def project_context(self, features_BTF: Tensor, positions_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Tapped target features ``[B, T, F]`` at ``positions`` to keys and values ``[B, H, T, E]`` per layer."""
        context_BTD = self.hidden_norm(self.fc(features_BTF.to(self.fc.weight.dtype)))
        cos, sin = self.rotary_emb(context_BTD, positions_BT)
        return [layer.self_attn.project_kv(context_BTD, cos, sin) for layer in self._layers()]

    def extend(self, context: DrafterContext, features_BTF: Tensor) -> None:
        """Append features of the next T positions to ``context``, in place."""
        start, end = context.length, context.length + features_BTF.shape[1]
        positions = torch.arange(start, end, device=features_BTF.device).expand(features_BTF.shape[0], -1)
        for index, (keys, values) in enumerate(self.project_context(features_BTF, positions)):
            context.keys[index][:, :, start:end] = keys
            context.values[index][:, :, start:end] = values
        context.length = end

    def forward(
        self, embeddings_BQD: Tensor, positions_BQ: Tensor, context: DrafterContext, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states ``[B, Q, D]`` of block positions (after the final norm, ready for the target's head).

        Args:
            embeddings_BQD: the target's input embeddings of ``[anchor, MASK, MASK, ...]``. Several blocks may
                stand side by side in Q if ``mask`` keeps them apart.
            positions_BQ: absolute position of each.
            context: keys and values of the positions before the anchors; read up to ``context.length``.
            mask: boolean, broadcastable to ``[B, 1, Q, length + Q]``, True where attention is allowed;
                None lets every query see the whole context and every block position.
        """
        cos, sin = self.rotary_emb(embeddings_BQD, positions_BQ)
        states = embeddings_BQD
        for index, layer in enumerate(self._layers()):
            keys = context.keys[index][:, :, : context.length]
            values = context.values[index][:, :, : context.length]
            states = layer(states, keys, values, cos, sin, mask)
        return self.norm(states)


def _dflash_value(config: Qwen3Config, key: str) -> Any:
    return (getattr(config, "dflash_config", None) or {}).get(key, getattr(config, key, None))


def _required(config: Qwen3Config, key: str) -> Any:
    value = _dflash_value(config, key)
    if value is None:
        raise UserError(
            f"drafter config has no '{key}' (looked at the top level and in dflash_config); "
            "a DFlash checkpoint's config.json must name it"
        )
    return value


def _target_layer_ids(config: Qwen3Config) -> list[int]:
    """``dflash_config.target_layer_ids``; where absent, DFlash's own even spread over the target's layers."""
    ids = _dflash_value(config, "target_layer_ids")
    if ids is not None:
        return [int(i) for i in ids]
    depth, count = int(_required(config, "num_target_layers")), config.num_hidden_layers
    if count == 1:
        return [depth // 2]
    first, last = 1, depth - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def _refuse_unsupported(config: Qwen3Config) -> None:
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        raise UserError(f"drafter config has layer_types {kinds}; supported: full_attention")
    if getattr(config, "is_causal", None):
        raise UserError("drafter config has is_causal=true; a DFlash block attends in both directions")
    for key in ("selector_rank", "conv_kernel_size", "final_logit_softcapping"):
        if _dflash_value(config, key) is not None:
            raise UserError(
                f"drafter config has '{key}', which is not supported; expected a DFlash (version 1) drafter"
            )
    for key in ("input_embedding_scale", "output_multiplier"):
        value = _dflash_value(config, key)
        if value not in (None, 1, 1.0):
            raise UserError(f"drafter config has {key}={value}, which is not supported; expected 1")
