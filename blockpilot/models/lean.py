"""A dense decoder's forward pass without its module calls: the same weights, by reference, and fewer steps.

On small models, and on a GPU at batch 1, a round costs more in calls of modules than in arithmetic. Knows the layers
of Llama, Mistral, Qwen2 and Qwen3 as ``transformers`` builds them; whatever deviates from them (another class, a
hook, an adapter, a quantised linear) is left to the module's own forward. The formulas also serve the drafter, whose
layers are Qwen3's.

Shapes: B rows, Q new positions, D hidden size, H heads, K key/value heads, E head size, S slots seen, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from blockpilot.models.kv_cache import KVCache

_TILE = 32
_TILED_ROWS = range(4, 20)
_TILED_FROM = 1 << 16
_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angle at a position does not depend on how long the text is."""


class Linear:
    """Weight and bias of a linear layer, and the fastest way through them for a block of few rows."""

    def __init__(self, module: nn.Linear) -> None:
        self.weight, self.bias = module.weight, module.bias
        self.tiles: Tensor | None = None
        size, width = self.weight.shape
        plain = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32
        if plain and size % _TILE == 0 and size * width >= _TILED_FROM and self.weight.is_contiguous():
            self.tiles = self.weight.view(-1, _TILE, width).transpose(1, 2)

    def __call__(self, states: Tensor) -> Tensor:
        """``[..., width]`` to ``[..., size]``."""
        if self.tiles is None:
            return F.linear(states, self.weight, self.bias)
        rows = states.numel() // states.shape[-1]
        if rows not in _TILED_ROWS:
            return F.linear(states, self.weight, self.bias)
        # From 4 rows on the matrix product repacks the whole weight before it multiplies, which costs as much again as
        # reading it. Tiles of 32 outputs go through the cache once: 1.2 to 1.4 times as fast from 4 to 14 rows, equal
        # up to 19 (SmolLM2's shapes, AVX-512).
        tiled = torch.bmm(states.reshape(1, rows, -1).expand(len(self.tiles), -1, -1), self.tiles)
        product = tiled.transpose(0, 1).reshape(*states.shape[:-1], -1)
        return product if self.bias is None else product.add_(self.bias)


class Norm:
    """Root-mean-square norm: Zhang and Sennrich 2019, equation 4, computed in fp32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.shape = weight.shape
        self.eps_tensor = torch.tensor(eps)

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Of a norm as ``transformers`` builds it."""
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, states: Tensor) -> Tensor:
        """Over the last dimension; shape and dtype stay."""
        if states.dtype != torch.float32 or states.device.type != "cpu":
            return F.rms_norm(states, self.shape, self.weight, self.eps)
        # on a CPU F.rms_norm is a chain of its own steps, at twice the time of this one
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps_tensor, length, length, value=1 / self.shape[0]).rsqrt()
        return states * scale * self.weight


class Rotary:
    """Cosines and sines of all positions, computed once by the model's own module and looked up afterwards."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tables: tuple[Tensor, Tensor] | None = None

    def at(self, positions_BQ: Tensor, like: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """``[B, Q, 1, E]`` each, the sine with the sign of the rotated half; ``end`` is above every position."""
        tables = self.tables
        if tables is None or len(tables[0]) < end or tables[0].dtype != like.dtype or tables[0].device != like.device:
            self.tables = tables = self._tables(1 << max(8, (end - 1).bit_length()), like)
        return tables[0][positions_BQ], tables[1][positions_BQ]

    def _tables(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # made in inference mode they could not be used in training
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self.module(like.new_empty(0), torch.arange(count, device=like.device)[None])
            half = sin.shape[-1] // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            return cos[0, :, None].contiguous(), sin[0, :, None].contiguous()


def rotate(states_BQHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021, equation 34) in the two-halves layout, ``[B, Q, H, E]``."""
    return torch.addcmul(states_BQHE * cos, states_BQHE.roll(states_BQHE.shape[-1] // 2, -1), sin)


def attend(
    queries_BQHE: Tensor, keys_BKSE: Tensor, values_BKSE: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Scaled dot-product attention with grouped heads, ``[B, Q, H * E]``."""
    rows, width, heads, size = queries_BQHE.shape
    groups = heads // keys_BKSE.shape[1]
    if mask is not None and groups > 1 and queries_BQHE.device.type == "cuda":
        # no fused kernel there takes grouped heads and a mask: a group's queries lie side by side instead
        queries = queries_BQHE.view(rows, width, -1, groups, size).transpose(1, 2).flatten(2, 3)
        mask = mask.repeat_interleave(groups, dim=-2)
        attended = F.scaled_dot_product_attention(queries, keys_BKSE, values_BKSE, attn_mask=mask, scale=scale)
        return attended.view(rows, -1, width, groups * size).transpose(1, 2).flatten(2)
    attended = F.scaled_dot_product_attention(
        queries_BQHE.transpose(1, 2),
        keys_BKSE,
        values_BKSE,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=groups > 1,
    )
    return attended.transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The parameters of one decoder layer."""

    input_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    head_size: int
    scale: float

    @classmethod
    def of(cls, layer: Any, scale: float | None = None) -> DenseLayer:
        """Of a decoder layer with the parts of Llama's or Qwen's, whose tensors it shares."""
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        return cls(
            Norm.of(layer.input_layernorm), Linear(attention.q_proj), Linear(attention.k_proj),
            Linear(attention.v_proj), Linear(attention.o_proj),
            Norm.of(attention.q_norm) if normed else None, Norm.of(attention.k_norm) if normed else None,
            Norm.of(layer.post_attention_layernorm), Linear(mlp.gate_proj), Linear(mlp.up_proj),
            Linear(mlp.down_proj), attention.head_dim, scale or attention.head_dim**-0.5,
        )  # fmt: skip

    def queries(self, normed_BQD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries, ``[B, Q, H, E]``."""
        queries = self.query(normed_BQD).unflatten(-1, (-1, self.head_size))
        return rotate(queries if self.query_norm is None else self.query_norm(queries), cos, sin)

    def keys_values(self, normed_BQD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each ``[B, K, Q, E]``."""
        keys = self.key(normed_BQD).unflatten(-1, (-1, self.head_size))
        values = self.value(normed_BQD).unflatten(-1, (-1, self.head_size))
        keys = rotate(keys if self.key_norm is None else self.key_norm(keys), cos, sin)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def mlp(self, normed_BQD: Tensor) -> Tensor:
        """Gated MLP, ``[B, Q, D]``."""
        return self.down(F.silu(self.gate(normed_BQD)) * self.up(normed_BQD))


class LeanDecoder:
    """The decoder of a causal language model (all but its head).

    Args:
        model: one that :func:`supports` says yes to.
        before: an earlier one of the same model, whose tables of angles are taken over.
    """

    def __init__(self, model: PreTrainedModel, before: LeanDecoder | None = None) -> None:
        decoder = cast(Any, model.get_decoder())
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.layers = [DenseLayer.of(layer, layer.self_attn.scaling) for layer in decoder.layers]
        self.norm = Norm.of(decoder.norm)
        known = before is not None and before.rotary.module is decoder.rotary_emb
        self.rotary = before.rotary if before is not None and known else Rotary(decoder.rotary_emb)

    def __call__(
        self, input_ids_BQ: Tensor, positions_BQ: Tensor, end: int, cache: KVCache, mask: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Hidden states after the final norm ``[B, Q, D]``, and the outputs of the layers in ``taps``.

        Args:
            input_ids_BQ: int64.
            positions_BQ: int64 ``[B, Q]``, or ``[Q]`` for one row.
            end: above every position.
            cache: takes the new keys and values, and says what the queries see.
            mask: added to the scores, broadcastable to ``[B, 1, Q, S]``; None lets a query see what precedes it
                (``S = Q``), or all where Q is 1.
            taps: layer indices.
        """
        states = F.embedding(input_ids_BQ, self.embedding)
        cos, sin = self.rotary.at(positions_BQ, states, end)
        causal = mask is None and states.shape[1] > 1
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            normed = layer.input_norm(states)
            queries = layer.queries(normed, cos, sin)
            keys, values = cache.update(*layer.keys_values(normed, cos, sin), index)
            attended = attend(queries, keys, values, mask, causal, layer.scale)
            states = states + layer.output(attended)
            states = states + layer.mlp(layer.mlp_norm(states))
            if index in taps:
                tapped[index] = states
        return self.norm(states), [tapped[index] for index in taps]


_FAMILIES = {
    getattr(family, f"{name}ForCausalLM"): {
        getattr(family, f"{name}{part}")
        for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    }
    for family, name in ((llama, "Llama"), (mistral, "Mistral"), (qwen2, "Qwen2"), (qwen3, "Qwen3"))
}
_PLAIN = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, type(ACT2FN["silu"])}
_INERT = "transformers.utils.output_capturing"


def supports(model: PreTrainedModel) -> bool:
    """Whether :class:`LeanDecoder` computes what ``model`` does: known classes in every place, nothing attached."""
    known = _FAMILIES.get(type(model), set()) | _PLAIN
    return (
        all(type(module) in known and _untouched(module) for module in model.modules())
        and model.config._attn_implementation == "sdpa"
        and cast(Any, model.get_decoder()).rotary_emb.rope_type in _ROPES
    )


def _untouched(module: nn.Module) -> bool:
    """Adapters and dispatchers replace the forward pass of an instance or hang a hook on it."""
    if "forward" in vars(module) or module._forward_pre_hooks:
        return False
    # a model that was once asked for its hidden states keeps hooks of transformers that do nothing until asked again
    return all(getattr(hook, "__module__", None) == _INERT for hook in module._forward_hooks.values())
