"""A dense decoder's forward pass without its module calls: the same weights, by reference, and fewer steps.

On small models, and on a GPU at batch 1, a round costs more in calls of modules than in arithmetic. Knows the layers
of Llama, Mistral, Qwen2 and Qwen3 as ``transformers`` builds them; whatever deviates from them (another class, a
hook, an adapter, a quantised linear) is left to the module's own forward. The formulas also serve the drafter, whose
layers are Qwen3's.

Shapes: B rows, Q new positions, D hidden size, H heads, K key/value heads, E head size, S slots seen, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
_FEW_ROWS = range(1, 20)
_LARGE = 1 << 16
_NARROW = 3072
"""Most numbers in a block of rows that is multiplied weight first."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angle at a position does not depend on how long the text is."""


class Linear:
    """Weight and bias of a linear layer, and the fastest way through them for a block of few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.tiles: Tensor | None = None
        size, width = self.weight.shape
        plain = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32
        if plain and size % _TILE == 0 and size * width >= _LARGE and self.weight.is_contiguous():
            self.tiles = self.weight.view(-1, _TILE, width).transpose(1, 2)

    @classmethod
    def of(cls, module: nn.Linear) -> Linear:
        """Of a module, whose tensors it shares."""
        return cls(module.weight, module.bias)

    def __call__(self, states: Tensor) -> Tensor:
        """``[..., width]`` to ``[..., size]``."""
        width = states.shape[-1]
        rows = states.numel() // width
        few = self.for_rows(rows)
        if few is None:
            return F.linear(states, self.weight, self.bias)
        product = few(states.reshape(rows, width)).reshape(*states.shape[:-1], -1)
        return product if self.bias is None else product.add_(self.bias)

    def for_rows(self, rows: int) -> Callable[[Tensor], Tensor] | None:
        """The fastest way for so many rows, by ``benchmarks/products.py``; None is torch's own."""
        if self.tiles is None or rows not in _FEW_ROWS:
            return None
        return self.weight_first if max(rows, 2) * self.weight.shape[1] <= _NARROW else self.in_tiles

    def weight_first(self, few: Tensor) -> Tensor:
        """The weight times the rows. A row goes in twice: once would be a product with a vector, a slower routine."""
        columns = (few if len(few) > 1 else few.repeat(2, 1)).T
        return torch.mm(self.weight, columns)[:, : len(few)].T.contiguous()

    def in_tiles(self, few: Tensor) -> Tensor:
        """Tile after tile of 32 outputs, whose weights fit the cache."""
        assert self.tiles is not None
        return torch.bmm(few.expand(len(self.tiles), -1, -1), self.tiles).transpose(0, 1).reshape(len(few), -1)


class Norm:
    """Root-mean-square norm: Zhang and Sennrich 2019, equation 4, computed in fp32."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.eps: float = module.variance_epsilon
        self.eps_tensor = torch.tensor(self.eps)

    def __call__(self, states: Tensor) -> Tensor:
        """Over the last dimension; shape and dtype stay."""
        return self.scaled(states, self.weight)

    def scaled(self, states: Tensor, weight: Tensor) -> Tensor:
        """With another weight than its own, broadcast over the last dimensions."""
        if states.dtype != torch.float32 or states.device.type != "cpu":
            return F.rms_norm(states, states.shape[-1:], eps=self.eps) * weight
        # on a CPU F.rms_norm is a longer chain of steps than this one
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps_tensor, length, length, value=1 / states.shape[-1]).rsqrt()
        return states * scale * weight


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
        mask = mask if mask.shape[-2] == 1 else mask.repeat_interleave(groups, dim=-2)
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


class DenseLayer:
    """The parameters of one decoder layer, as its formulas take them.

    Args:
        layer: a decoder layer with the parts of Llama's or Qwen's. Its tensors are shared, but for the head norms'
            weights (``E`` numbers each), which are stacked.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.query, self.key = Linear.of(attention.q_proj), Linear.of(attention.k_proj)
        self.value, self.output = Linear.of(attention.v_proj), Linear.of(attention.o_proj)
        self.gate, self.up, self.down = Linear.of(mlp.gate_proj), Linear.of(mlp.up_proj), Linear.of(mlp.down_proj)
        self.head_size: int = attention.head_dim
        self.scale: float = getattr(attention, "scaling", self.head_size**-0.5)
        self.head_counts = [len(linear.weight) // self.head_size for linear in (self.query, self.key)]
        self.query_norm = self.key_norm = None
        if hasattr(attention, "q_norm"):
            self.query_norm, self.key_norm = Norm(attention.q_norm), Norm(attention.k_norm)
            self.head_weights = torch.cat(self._head_weights())

    def restack(self) -> None:
        """Takes the head norms' weights as they are now: torch does not count what is written through ``.data``."""
        if self.query_norm is not None:
            with torch.inference_mode():
                torch.cat(self._head_weights(), out=self.head_weights)

    def _head_weights(self) -> list[Tensor]:
        assert self.query_norm is not None and self.key_norm is not None
        own = zip((self.query_norm, self.key_norm), self.head_counts, strict=True)
        return [norm.weight.expand(count, -1) for norm, count in own]

    def project(self, normed_BQD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``[B, Q, H, E]`` and keys, and values, both ``[B, K, Q, E]``."""
        # heads of both kinds side by side: norm and rotation are one chain of steps, not two
        queries, keys = self.query(normed_BQD), self.key(normed_BQD)
        heads = torch.cat([queries, keys], dim=-1).unflatten(-1, (-1, self.head_size))
        if self.query_norm is not None:
            heads = self.query_norm.scaled(heads, self.head_weights)
        rotated, keys = rotate(heads, cos, sin).split(self.head_counts, dim=2)
        values = self.value(normed_BQD).unflatten(-1, (-1, self.head_size))
        return rotated, keys.transpose(1, 2), values.transpose(1, 2)

    def keys_values(self, context_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of states that ask nothing, each ``[B, K, T, E]``."""
        keys = self.key(context_BTD).unflatten(-1, (-1, self.head_size))
        keys = rotate(keys if self.key_norm is None else self.key_norm(keys), cos, sin)
        values = self.value(context_BTD).unflatten(-1, (-1, self.head_size))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def finish(self, states_BQD: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: its output projection and the gated MLP, each added to what comes in."""
        states_BQD = states_BQD + self.output(attended)
        normed = self.mlp_norm(states_BQD)
        return states_BQD + self.down(F.silu(self.gate(normed)) * self.up(normed))


class LeanDecoder:
    """The decoder of a causal language model (all but its head).

    Args:
        model: one that :func:`supports` says yes to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = cast(Any, model.get_decoder())
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.layers = [DenseLayer(layer) for layer in decoder.layers]
        self.norm = Norm(decoder.norm)
        self.rotary = Rotary(decoder.rotary_emb)
        self.head = Linear.of(cast(nn.Linear, model.get_output_embeddings()))
        self._model = model
        self._seen = [(module, _state(module)) for module in model.modules()]
        self._kinds = {type(module) for module, _ in self._seen}

    @property
    def is_current(self) -> bool:
        """Whether the model is as it was: no part replaced, no weight moved or changed, nothing attached."""
        settings = _settings_allow(self._model) and all(map(_is_genuine, self._kinds))
        return settings and all(_state(module) == state for module, state in self._seen)

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
            queries, keys, values = layer.project(normed, cos, sin)
            keys, values = cache.update(keys, values, index)
            attended = attend(queries, keys, values, mask, causal, layer.scale)
            states = layer.finish(states, attended)
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
        and all(map(_is_genuine, {type(module) for module in model.modules()}))
        # a quantised or distributed weight is a tensor of its own kind in a plain linear
        and all(type(parameter) is nn.Parameter for parameter in model.parameters())
        and cast(Any, model.get_decoder()).rotary_emb.rope_type in ROPES
        and _settings_allow(model)
    )


def _settings_allow(model: PreTrainedModel) -> bool:
    """What the model looks up in its configuration at every pass."""
    config = model.config
    return config._attn_implementation == "sdpa" and config.num_hidden_layers == len(cast(Any, model).model.layers)


def _is_genuine(kind: type[nn.Module]) -> bool:
    """Whether a class's forward is its own: extensions to long texts patch whole classes, and a short check agrees."""
    return kind is nn.ModuleList or kind.forward.__module__ == kind.__module__


def _state(module: nn.Module) -> tuple[object, ...]:
    """All of a module that a lean forward relies on."""
    tensors = whereabouts([*module._parameters.values(), *module._buffers.values()])
    values = vars(module)
    numbers = values.get("scaling"), values.get("variance_epsilon")
    return type(module), _untouched(module), numbers, tensors, list(module._modules.values())


def whereabouts(parameters: Iterable[Tensor | None]) -> list[object]:
    """Changes when a tensor is moved, replaced or written to (as far as torch counts that)."""
    return [p if p is None else (p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]


def _untouched(module: nn.Module) -> bool:
    """Adapters and dispatchers replace the forward pass of an instance or hang a hook on it."""
    if "forward" in vars(module) or module._forward_pre_hooks:
        return False
    # a model that was once asked for its hidden states keeps hooks of transformers that do nothing until asked again
    return all(getattr(hook, "__module__", None) == _INERT for hook in module._forward_hooks.values())
