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
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from blockpilot.errors import UserError
from blockpilot.models.lean import DenseLayer, Linear, Norm, Rotary, attend


@dataclass
class DrafterContext:
    """Projected keys and values of context positions, one pair per drafter layer.

    ``keys[layer]`` and ``values[layer]`` are ``[B, H, capacity, E]``; the first ``length`` positions are
    valid (or, for a batch of uneven prompts, as many as the caller's mask shows). What lies behind is scratch.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0
    weights: DrafterWeights | None = None
    """The drafter's, as they were when the context was made; without them a pass takes them as they are."""

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.keys[0].shape[2]

    def store(self, layer: int, keys_BHTE: Tensor, values_BHTE: Tensor) -> None:
        """Keeps what belongs at the T positions from ``length`` on; the caller then sets ``length``."""
        end = self.length + keys_BHTE.shape[2]
        self.keys[layer][:, :, self.length : end] = keys_BHTE
        self.values[layer][:, :, self.length : end] = values_BHTE

    def join(self, layer: int, keys_BHQE: Tensor, values_BHQE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values a block attends to: the context's and its own, each ``[B, H, length + Q, E]``.

        The block's are put into the scratch behind the context where there is room and no gradient is wanted.
        """
        end = self.length + keys_BHQE.shape[2]
        if end <= self.capacity and not torch.is_grad_enabled():
            self.store(layer, keys_BHQE, values_BHQE)
            return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
        keys, values = self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]
        return torch.cat([keys, keys_BHQE], dim=2), torch.cat([values, values_BHQE], dim=2)

    def reserve(self, positions: int) -> None:
        """Makes room for so many positions; what is stored stays."""
        more = positions - self.capacity
        if more > 0:
            self.keys = [torch.nn.functional.pad(keys, (0, 0, 0, more)) for keys in self.keys]
            self.values = [torch.nn.functional.pad(values, (0, 0, 0, more)) for values in self.values]


@dataclass
class StaticContext(DrafterContext):
    """A context of one prompt whose end only the device knows, so that a pass has one shape wherever it stands.

    Set ``positions`` (int64 ``[Q]``) to where a pass writes; it sees the first ``window`` slots, and a mask must say
    which of them count. With ``positions`` None it works like its base class (prefill).
    """

    positions: Tensor | None = None
    window: int = 0

    def store(self, layer: int, keys_BHTE: Tensor, values_BHTE: Tensor) -> None:
        """Keeps what belongs at ``positions``."""
        if self.positions is None:
            return super().store(layer, keys_BHTE, values_BHTE)
        self.keys[layer].index_copy_(2, self.positions, keys_BHTE)
        self.values[layer].index_copy_(2, self.positions, values_BHTE)
        return None

    def join(self, layer: int, keys_BHQE: Tensor, values_BHQE: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the block's keys and values at ``positions`` and shows the window."""
        self.store(layer, keys_BHQE, values_BHQE)
        return self.keys[layer][:, :, : self.window], self.values[layer][:, :, : self.window]


@dataclass
class SharedContext(DrafterContext):
    """Contexts of many prompts that never grow, each read by any number of rows of a pass.

    ``keys[layer]`` and ``values[layer]`` are ``[P, H, scratch + longest, E]``. :meth:`select` says what a pass reads.
    """

    scratch: int = 0
    """Slots in front of each context: a row's copy of them and of what follows takes the block's own keys there."""
    rows: Tensor | None = None

    @property
    def longest(self) -> int:
        """Positions there is room for in each prompt."""
        return self.capacity - self.scratch

    def put(self, layer: int, prompt: int, keys_HTE: Tensor, values_HTE: Tensor) -> None:
        """Keeps the keys and values of a prompt's first T positions."""
        places = slice(self.scratch, self.scratch + keys_HTE.shape[1])
        self.keys[layer][prompt, :, places], self.values[layer][prompt, :, places] = keys_HTE, values_HTE

    def select(self, prompts_R: Tensor, length: int) -> None:
        """Sets what the next pass reads: of each row's prompt (int64) the first ``length`` positions."""
        self.rows, self.length = prompts_R, length

    def join(self, layer: int, keys_BHQE: Tensor, values_BHQE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values a pass attends to: its own, then the context's, each ``[R, H, Q + length, E]``."""
        return self._in_front(self.keys[layer], keys_BHQE), self._in_front(self.values[layer], values_BHQE)

    def _in_front(self, kept: Tensor, own: Tensor) -> Tensor:
        assert self.rows is not None
        width, end = own.shape[2], self.scratch + self.length
        if width > self.scratch:
            return torch.cat([own, kept[:, :, self.scratch : end].index_select(0, self.rows)], dim=2)
        joined = kept[:, :, self.scratch - width : end].index_select(0, self.rows)
        joined[:, :, :width] = own
        return joined


class DFlashAttention(nn.Module):
    """Weights of attention to the context and, in both directions, to the own block."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, cast(int, config.num_key_value_heads)
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)


class DFlashLayer(nn.Module):
    """Weights of pre-norm attention and MLP, as in the target's family; the context enters un-normed by this layer."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DrafterWeights:
    """A drafter's weights, by reference, in the form the formulas take them."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self.layers = [DenseLayer(layer) for layer in drafter.layers]
        self.fuse = Linear.of(drafter.fc)
        self.hidden_norm, self.norm = Norm(drafter.hidden_norm), Norm(drafter.norm)

    def restack(self) -> None:
        """Takes the head norms as they are now; see :meth:`DenseLayer.restack`."""
        for layer in self.layers:
            layer.restack()

    def context(
        self, features_BTF: Tensor, positions_BT: Tensor, end: int, rotary: Rotary
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context positions per layer; see :meth:`DFlashDrafter.project_context`."""
        context_BTD = self.hidden_norm(self.fuse(features_BTF.to(self.fuse.weight.dtype)))
        cos, sin = rotary.at(positions_BT, context_BTD, end)
        return [layer.keys_values(context_BTD, cos, sin) for layer in self.layers]


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
        self._rotary: Rotary | None = None

    @property
    def rotary(self) -> Rotary:
        """Angles of all positions."""
        if self._rotary is None:
            self._rotary = Rotary(self.rotary_emb)
        return self._rotary

    def allocate(self, batch: int, capacity: int) -> DrafterContext:
        """An empty context for ``batch`` prompts of at most ``capacity`` positions, on this model's device."""
        keys, values = self._empty(batch, capacity)
        return DrafterContext(keys, values, weights=DrafterWeights(self))

    def allocate_static(self, capacity: int) -> StaticContext:
        """An empty context for one prompt, whose buffers keep their addresses."""
        keys, values = self._empty(1, capacity)
        return StaticContext(keys, values, weights=DrafterWeights(self), window=capacity)

    def allocate_shared(self, prompts: int, longest: int, widest: int) -> SharedContext:
        """Empty contexts for so many prompts of at most ``longest`` positions; blocks above ``widest`` are slower."""
        keys, values = self._empty(prompts, widest + longest)
        return SharedContext(keys, values, weights=DrafterWeights(self), scratch=widest)

    def _empty(self, batch: int, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
        size = self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads
        shape = (batch, cast(int, self.config.num_key_value_heads), capacity, size)
        keys, values = ([self.fc.weight.new_zeros(shape) for _ in self.layers] for _ in range(2))
        return keys, values

    def project_context(self, features_BTF: Tensor, positions_BT: Tensor, end: int) -> list[tuple[Tensor, Tensor]]:
        """Tapped target features ``[B, T, F]`` at ``positions`` to keys and values ``[B, H, T, E]`` per layer.

        Args:
            features_BTF: side by side, in the order of ``target_layer_ids``.
            positions_BT: int64, all below ``end``.
            end: above every position (what the host may know when only the device knows the positions).
        """
        return DrafterWeights(self).context(features_BTF, positions_BT, end, self.rotary)

    def extend(self, context: DrafterContext, features_BTF: Tensor) -> None:
        """Append features of the next T positions to ``context``, in place."""
        start, end = context.length, context.length + features_BTF.shape[1]
        positions = torch.arange(start, end, device=features_BTF.device)[None]
        self.extend_at(context, features_BTF, positions, end)
        context.length = end

    def extend_at(self, context: DrafterContext, features_BTF: Tensor, positions_BT: Tensor, end: int) -> None:
        """Store what belongs at ``positions``, all below ``end``; the length is left to the caller."""
        weights = context.weights or DrafterWeights(self)
        for index, (keys, values) in enumerate(weights.context(features_BTF, positions_BT, end, self.rotary)):
            context.store(index, keys, values)

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
        weights = context.weights or DrafterWeights(self)
        # a block stands behind its context, so this is above every position
        end = context.capacity + embeddings_BQD.shape[1]
        cos, sin = self.rotary.at(positions_BQ, embeddings_BQD, end)
        if mask is not None and mask.dtype == torch.bool:
            # once, not in every layer
            mask = embeddings_BQD.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        states = embeddings_BQD
        for index, layer in enumerate(weights.layers):
            normed = layer.input_norm(states)
            queries, keys, values = layer.project(normed, cos, sin)
            keys, values = context.join(index, keys, values)
            states = layer.finish(states, attend(queries, keys, values, mask, False, layer.scale))
        return weights.norm(states)


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
