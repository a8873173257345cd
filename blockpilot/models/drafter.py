"""The DFlash drafter: a block-diffusion model that fills a block of masks in one forward pass.

Knows its own weights, the context keys and values it keeps, and nothing of targets, caches on disk or acceptance
rules. State-dict keys and configuration keys are those of the published z-lab checkpoints;
:mod:`blockpilot.models.checkpoints` reads these and other layouts. Architecture: DFlash, arXiv 2602.06036.

Shapes: B prompts, T context positions, Q block positions, S keys a block attends to, D hidden size, H key/value heads,
E head size, F tapped features (number of tapped layers x D).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from blockpilot.models.checkpoints import check_finite, check_weights, read_checkpoint
from blockpilot.models.drafter_config import DrafterSettings, Sight
from blockpilot.models.lean import DenseLayer, Linear, Norm, Rotary, attend


@dataclass
class DrafterContext:
    """Projected keys and values of context positions, one pair per drafter layer.

    ``keys[layer]`` and ``values[layer]`` are ``[B, H, capacity, E]``, a slot for each position from 0 on; the first
    ``length`` are valid (or, for a batch of uneven prompts, as many as the caller's mask shows). What lies behind is
    scratch.
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

    def key_positions(self, positions_BQ: Tensor) -> Tensor:
        """Positions of what :meth:`join` returns for a block at ``positions``, int64 ``[B, S]``."""
        return torch.cat([self._slots(self.length, positions_BQ), positions_BQ], dim=1)

    @staticmethod
    def _slots(count: int, positions_BQ: Tensor) -> Tensor:
        return torch.arange(count, device=positions_BQ.device).expand(len(positions_BQ), -1)

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

    def key_positions(self, positions_BQ: Tensor) -> Tensor:
        """Those of the window's slots."""
        return self._slots(self.window, positions_BQ)


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

    def key_positions(self, positions_BQ: Tensor) -> Tensor:
        """The block's own, then the context's."""
        return torch.cat([positions_BQ, self._slots(self.length, positions_BQ)], dim=1)

    def _in_front(self, kept: Tensor, own: Tensor) -> Tensor:
        assert self.rows is not None
        width, end = own.shape[2], self.scratch + self.length
        if width > self.scratch:
            return torch.cat([own, kept[:, :, self.scratch : end].index_select(0, self.rows)], dim=2)
        joined = kept[:, :, self.scratch - width : end].index_select(0, self.rows)
        joined[:, :, :width] = own
        return joined


class DFlashAttention(nn.Module):
    """Weights of attention to the context and to the own block."""

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

    ``config`` is a ``Qwen3Config`` that also holds ``block_size``, ``num_target_layers`` and ``dflash_config`` with
    ``mask_token_id`` and ``target_layer_ids``. Embedding and head are the target's, unless the drafter has its own:
    ``embed_tokens`` (``own_embeddings``), and ``lm_head`` over ``draft_vocab_size`` draft tokens, of which token ``i``
    is the target's ``i + d2t[i]``.

    Raises:
        UserError: a DFlash key is missing from ``config`` or has a value it cannot have, or it asks for what this class
            does not do.
    """

    config_class = Qwen3Config
    base_model_prefix = "drafter"
    _no_split_modules: ClassVar[list[str]] = ["DFlashLayer"]
    _supports_sdpa = True
    d2t: Tensor | None

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        settings = DrafterSettings.of(config)
        self.block_size, self.mask_token_id = settings.block_size, settings.mask_token_id
        self.target_layer_ids, self.sights = settings.target_layer_ids, settings.sights
        self.layers = nn.ModuleList([DFlashLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        rows, vocab_size = settings.draft_vocab_size, config.vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size) if settings.own_embeddings else None
        self.lm_head = None if rows is None else nn.Linear(config.hidden_size, rows, bias=False)
        d2t = None if rows is None or rows == vocab_size else torch.zeros(rows, dtype=torch.int64)
        self.register_buffer("d2t", d2t)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()
        self._rotary: Rotary | None = None

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the library's own takes much that may unpickle or run code
        cls, folder: str | Path, *, dtype: torch.dtype | None = None
    ) -> DFlashDrafter:
        """A drafter from a local folder with ``config.json`` and safetensors, in any layout that is known.

        Args:
            folder: see :mod:`blockpilot.models.checkpoints`.
            dtype: of its weights; None takes them as they are stored.

        Raises:
            UserError: a file is missing or broken, its configuration cannot be used, or its weights do not fit it.
        """
        checkpoint = read_checkpoint(Path(folder))
        with torch.device("meta"):
            drafter = cls(checkpoint.config)
        check_weights(drafter.state_dict(), checkpoint.weights)
        weights = {
            name: weight.to(dtype) if weight.is_floating_point() else weight.to(torch.int64)
            for name, weight in checkpoint.weights.items()
        }
        check_finite(weights)
        drafter.load_state_dict(weights, assign=True)
        # its tables are no weights: what was made on the meta device holds nothing
        drafter.rotary_emb = Qwen3RotaryEmbedding(checkpoint.config)
        return drafter.eval()

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:  # type: ignore[override]
        """Writes a folder in the z-lab layout, which other engines read; ``options`` are those of ``transformers``."""
        super().save_pretrained(save_directory, **options)
        # the library names the class it saves, readers look for the published one
        self.config.architectures = ["DFlashDraftModel"]
        self.config.save_pretrained(save_directory)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of draft tokens, int64 of the same shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

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
                None allows the whole context and every block position. What a layer with a window or a causal one
                does not see is hidden besides.
        """
        weights = context.weights or DrafterWeights(self)
        # a block stands behind its context, so this is above every position
        end = context.capacity + embeddings_BQD.shape[1]
        cos, sin = self.rotary.at(positions_BQ, embeddings_BQD, end)
        # once, not in every layer
        masks = {sight: _added(sight, mask, positions_BQ, context, embeddings_BQD) for sight in set(self.sights)}
        states = embeddings_BQD
        for index, (layer, sight) in enumerate(zip(weights.layers, self.sights, strict=True)):
            normed = layer.input_norm(states)
            queries, keys, values = layer.project(normed, cos, sin)
            keys, values = context.join(index, keys, values)
            states = layer.finish(states, attend(queries, keys, values, masks[sight], False, layer.scale))
        return weights.norm(states)


def _added(
    sight: Sight, mask: Tensor | None, positions_BQ: Tensor, context: DrafterContext, like: Tensor
) -> Tensor | None:
    """What is added to the scores of a layer: 0 where attention is allowed, as low as can be elsewhere; None adds 0."""
    if not sight.is_all:
        seen = sight.seen(positions_BQ, context.key_positions(positions_BQ))
        mask = seen if mask is None else seen & mask
    if mask is None:
        return None
    # not -inf: padding may see nothing, and where a kernel has no softmax of that it would spoil the next layer
    return like.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(like.dtype).min)
