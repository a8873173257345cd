"""Runs a target: logits where they are needed, tapped hidden states, an explicit cache.

Knows the model interface of ``transformers``; nothing of drafters, block sizes or sampling.

Shapes: B rows, Q new positions, P positions whose logits are kept, V vocabulary, D hidden size,
F tapped features (number of tapped layers x D).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.errors import UserError
from blockpilot.models.kv_cache import KVCache, RaggedKVCache


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass gives."""

    logits: Tensor
    """``[B, P, V]``, as the model returns them."""
    hidden: Tensor
    """``[B, P, D]``: input of the head (after the final norm)."""
    features: Tensor | None
    """``[B, Q, F]``: outputs of the tapped layers side by side, or None where they were not asked for."""


class TargetRunner:
    """A target model together with the layers that are tapped.

    Hooks live only for the length of a call, so the user's model object is left as it was.

    Args:
        model: a causal language model with full attention in every layer.
        layer_ids: layers (from 0) whose outputs a drafter reads; layer ``i``'s output is ``hidden_states[i + 1]``.

    Raises:
        UserError: the model cannot roll back (sliding-window or recurrent layers), or a tapped layer does not exist.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.model = model
        self.layer_ids = tuple(layer_ids)
        self.layers = decoder_layers(model)
        self.head = cast(nn.Linear, model.get_output_embeddings())
        self.embedding = cast(nn.Embedding, model.get_input_embeddings())
        refuse_without_rollback(model)
        beyond = [i for i in self.layer_ids if not 0 <= i < len(self.layers)]
        if beyond:
            raise UserError(
                f"the drafter taps target layers {beyond}, the target has {len(self.layers)} layers (0 to "
                f"{len(self.layers) - 1}): drafter and target do not belong together"
            )
        # transformers 5.2x renamed the keyword; take the one this model declares
        names = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in names else "past_key_values"

    @property
    def device(self) -> torch.device:
        """Where inputs must be."""
        return self.embedding.weight.device

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one row."""
        return KVCache(len(self.layers), capacity)

    def new_ragged_cache(self, capacity: int, batch: int) -> RaggedKVCache:
        """An empty cache for ``batch`` rows of their own length."""
        return RaggedKVCache(len(self.layers), capacity, batch)

    def forward(self, input_ids_1Q: Tensor, cache: KVCache, *, keep: int = 0, tap: bool = True) -> TargetOutput:
        """Runs Q new positions behind ``cache.length``; the caller sets the new length.

        Args:
            input_ids_1Q: int64 ``[1, Q]``.
            cache: grown by the keys and values of the new positions.
            keep: logits of the last ``keep`` positions; 0 keeps all.
            tap: whether ``features`` are wanted.
        """
        start = cache.length
        positions = torch.arange(start, start + input_ids_1Q.shape[1], device=input_ids_1Q.device)[None]
        return self._run(input_ids_1Q, cache, positions, None, keep, tap)

    def forward_ragged(
        self, input_ids_RQ: Tensor, cache: RaggedKVCache, rows_R: Tensor, positions_RQ: Tensor, *, keep: int = 0
    ) -> TargetOutput:
        """Runs Q positions of R rows of ``cache``, each row at its own positions."""
        cache.rows, cache.positions = rows_R, positions_RQ
        cache.length = int(positions_RQ.max()) + 1
        slots = torch.arange(cache.length, device=positions_RQ.device)
        mask = (slots <= positions_RQ[..., None])[:, None]
        return self._run(input_ids_RQ, cache, positions_RQ, self._explicit_mask(mask), keep, True)

    def _explicit_mask(self, mask: Tensor) -> Tensor:
        kind = self.model.config._attn_implementation
        if kind == "sdpa":
            return mask
        if kind == "eager":
            low = torch.finfo(self.embedding.weight.dtype).min
            return torch.zeros(mask.shape, dtype=self.embedding.weight.dtype, device=mask.device).masked_fill(
                ~mask, low
            )
        raise UserError(
            f"model.attention={kind!r} cannot decode a batch of uneven prompts; expected one of sdpa, eager"
        )

    def _run(
        self, input_ids: Tensor, cache: KVCache, positions: Tensor, mask: Tensor | None, keep: int, tap: bool
    ) -> TargetOutput:
        with self._capture(tap) as captured:
            output = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_key: cache},
            )
        features = torch.cat([captured[i] for i in self.layer_ids], dim=-1) if tap else None
        return TargetOutput(output.logits, captured["hidden"], features)

    @contextmanager
    def _capture(self, tap: bool) -> Iterator[dict[int | str, Tensor]]:
        captured: dict[int | str, Tensor] = {}

        def keep_output(index: int):
            def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
                captured[index] = output if isinstance(output, Tensor) else output[0]

            return hook

        def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            captured["hidden"] = args[0]

        handles = [self.head.register_forward_pre_hook(keep_input)]
        if tap:
            handles += [self.layers[i].register_forward_hook(keep_output(i)) for i in set(self.layer_ids)]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's list of decoder layers.

    Raises:
        UserError: there is none where ``transformers`` keeps it.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"{type(model).__name__} has no list of decoder layers; expected a decoder-only language model")
    return layers


def refuse_without_rollback(model: PreTrainedModel) -> None:
    """Rejected drafts must be forgotten: only layers with full attention can.

    Raises:
        UserError: the configuration has sliding-window or recurrent layers; the message names them.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        kinds = ["sliding_attention"]
    other = sorted(set(kinds or []) - {"full_attention"})
    if other:
        raise UserError(
            f"{type(model).__name__} has {', '.join(other)} layers, which cannot forget rejected tokens; "
            "expected full_attention in every layer"
        )
