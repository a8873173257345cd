"""Runs a target: logits where they are needed, tapped hidden states, an explicit cache.

Knows the model interface of ``transformers``; nothing of drafters, block sizes or sampling. A dense decoder of a
known family runs without its module calls (:mod:`blockpilot.models.lean`), checked once against the model's own
forward; everything else runs as the model does.

Shapes: B rows, Q new positions, P positions whose logits are kept, V vocabulary, D hidden size,
F tapped features (number of tapped layers x D).
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.errors import UserError
from blockpilot.models.kv_cache import KVCache, RaggedKVCache, StaticKVCache
from blockpilot.models.lean import LeanDecoder, supports

log = logging.getLogger(__name__)


_TOLERANCE, _HALF_TOLERANCE = 1e-4, 0.05
"""Largest difference of lean and own forward, as a share of the largest value."""


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
        lean: whether a lean forward may stand in for the model's own where there is one.

    Raises:
        UserError: the model cannot roll back (sliding-window or recurrent layers), or a tapped layer does not exist.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int], *, lean: bool = True) -> None:
        self.model = model
        self.lean = lean
        self.decoder: LeanDecoder | None = None
        """The lean forward of the prompt at hand."""
        self._agrees: dict[torch.dtype, bool] = {}
        self.layer_ids = tuple(layer_ids)
        refuse_without_rollback(model.config, type(model))
        self._look()
        beyond = [i for i in self.layer_ids if not 0 <= i < len(self.layers)]
        if beyond:
            raise UserError(
                f"the drafter taps target layers {beyond}, the target has {len(self.layers)} layers (0 to "
                f"{len(self.layers) - 1}): drafter and target do not belong together"
            )
        # transformers 5.2x renamed the keyword; take the one this model declares
        names = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in names else "past_key_values"

    def _look(self) -> None:
        """Where the model's parts are now: users replace them between prompts."""
        self.layers = decoder_layers(self.model)
        self.head = cast(nn.Linear, self.model.get_output_embeddings())
        self.embedding = cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def device(self) -> torch.device:
        """Where inputs must be."""
        return self.embedding.weight.device

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one row."""
        self.refresh()
        return KVCache(len(self.layers), capacity)

    def new_ragged_cache(self, capacity: int, batch: int) -> RaggedKVCache:
        """An empty cache for ``batch`` rows of their own length."""
        self.refresh()
        return RaggedKVCache(len(self.layers), capacity, batch)

    def new_static_cache(self, capacity: int) -> StaticKVCache:
        """An empty cache for one row, for :meth:`forward_static`; it keeps its addresses from prompt to prompt."""
        return StaticKVCache(len(self.layers), capacity)

    def forward(self, input_ids_1Q: Tensor, cache: KVCache, *, keep: int = 0, tap: bool = True) -> TargetOutput:
        """Runs Q new positions behind ``cache.length``; the caller sets the new length.

        Args:
            input_ids_1Q: int64 ``[1, Q]``.
            cache: grown by the keys and values of the new positions.
            keep: logits of the last ``keep`` positions; 0 keeps all.
            tap: whether ``features`` are wanted.
        """
        return self._forward(self.decoder, input_ids_1Q, cache, keep, tap)

    def _forward(
        self, decoder: LeanDecoder | None, input_ids_1Q: Tensor, cache: KVCache, keep: int, tap: bool
    ) -> TargetOutput:
        start, width = cache.length, input_ids_1Q.shape[1]
        positions = torch.arange(start, start + width, device=self.device)[None]
        mask = None
        if decoder is not None and start > 0 and width > 1:
            # what transformers builds for its own forward: block position i sees the slots up to start + i
            mask = self.embedding.weight.new_full((width, start + width), -torch.inf).triu_(start + 1)
        return self._run(decoder, input_ids_1Q, cache, positions, start + width, mask, keep, tap)

    def forward_ragged(
        self, input_ids_RQ: Tensor, cache: RaggedKVCache, rows_R: Tensor, positions_RQ: Tensor, *, keep: int = 0,
        tap: bool = True,
    ) -> TargetOutput:  # fmt: skip
        """Runs Q positions of R rows of ``cache``, each row at its own positions."""
        cache.rows, cache.positions = rows_R, positions_RQ
        cache.length = int(positions_RQ.max()) + 1
        slots = torch.arange(cache.length, device=positions_RQ.device)
        mask = self.additive((slots <= positions_RQ[..., None])[:, None])
        return self._run(self.decoder, input_ids_RQ, cache, positions_RQ, cache.length, mask, keep, tap)

    def forward_static(
        self, input_ids_1Q: Tensor, cache: StaticKVCache, positions_Q: Tensor, *, tap: bool = True
    ) -> TargetOutput:
        """Runs Q positions that only the device knows: no value is read back, so the pass can be captured.

        Needs a lean forward (see :meth:`refresh`).
        """
        assert self.decoder is not None, "only a lean forward can be captured"
        cache.positions = positions_Q
        mask = self.additive(torch.arange(cache.window, device=self.device) <= positions_Q[:, None])
        return self._run(self.decoder, input_ids_1Q, cache, positions_Q[None], cache.capacity, mask, 0, tap)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The target's input embeddings."""
        return self.embedding(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head, ``[..., D]`` to ``[..., V]``."""
        return self.head(hidden) if self.decoder is None else self.decoder.head(hidden)

    def additive(self, mask: Tensor) -> Tensor:
        """0 where attention is allowed, as low as can be elsewhere."""
        kind = self.model.config._attn_implementation
        if kind not in ("sdpa", "eager"):
            raise UserError(
                f"model.attention={kind!r} cannot decode a batch of uneven prompts; expected one of sdpa, eager"
            )
        # not -inf: a row of nothing but -inf has no softmax, and the models' own masks avoid it too
        weight = self.embedding.weight
        return weight.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(weight.dtype).min)

    def _run(
        self, decoder: LeanDecoder | None, input_ids: Tensor, cache: KVCache, positions: Tensor, end: int,
        mask: Tensor | None, keep: int, tap: bool,
    ) -> TargetOutput:  # fmt: skip
        if decoder is None:
            return self._run_module(input_ids, cache, positions, mask, keep, tap)
        hidden, tapped = decoder(input_ids, positions, end, cache, mask, self.layer_ids if tap else ())
        kept = hidden[:, -keep:]
        return TargetOutput(decoder.head(kept), kept, torch.cat(tapped, dim=-1) if tap else None)

    def _run_module(
        self, input_ids: Tensor, cache: KVCache, positions: Tensor, mask: Tensor | None, keep: int, tap: bool
    ) -> TargetOutput:
        with self._capture(tap) as captured:
            output = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=keep,
                return_dict=True,
                **{self._cache_key: cache},
            )
        features = torch.cat([captured[i] for i in self.layer_ids], dim=-1) if tap else None
        return TargetOutput(output.logits, captured["hidden"], features)

    def refresh(self) -> bool:
        """Decides for the next prompt whether there is a lean forward: hooks and adapters come and go, weights move.

        Making a cache does so too.
        """
        if self.decoder is not None and self.lean and self.decoder.is_current:
            for layer in self.decoder.layers:
                layer.restack()
            return True
        self._look()
        if not self.lean or not supports(self.model):
            self.decoder = None
            return False
        decoder = LeanDecoder(self.model)
        dtype = self.embedding.weight.dtype
        if dtype not in self._agrees:
            self._agrees[dtype] = self._gives_the_same(decoder)
            if not self._agrees[dtype]:
                log.warning("%s runs its own forward: the lean one gives other logits", type(self.model).__name__)
        self.decoder = decoder if self._agrees[dtype] else None
        return self._agrees[dtype]

    @torch.inference_mode()
    def _gives_the_same(self, decoder: LeanDecoder) -> bool:
        """Both forwards on a made-up text, in two passes as decoding makes them: logits and tapped states."""
        weight = self.embedding.weight
        tokens = torch.arange(11, device=weight.device)[None] * 7919 % weight.shape[0]
        found: list[list[Tensor]] = []
        # not by way of self.decoder: an interrupt, or another thread, must not find it unchecked
        for one in (None, decoder):
            cache = KVCache(len(self.layers), tokens.shape[1])
            first = self._forward(one, tokens[:, :7], cache, 0, True)
            cache.length = 7
            second = self._forward(one, tokens[:, 7:], cache, 0, True)
            assert first.features is not None and second.features is not None
            found.append([first.logits, second.logits, first.features, second.features])
        tolerance = _HALF_TOLERANCE if weight.element_size() == 2 else _TOLERANCE
        return all(
            bool((lean - own).abs().max() <= tolerance * own.abs().max()) for own, lean in zip(*found, strict=True)
        )

    @contextmanager
    def _capture(self, tap: bool) -> Iterator[dict[int | str, Tensor]]:
        captured: dict[int | str, Tensor] = {}
        # the modules are shared: a pass of another thread goes through the same hooks
        owner = threading.get_ident()

        def keep_output(index: int):
            def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
                if threading.get_ident() == owner:
                    captured[index] = output if isinstance(output, Tensor) else output[0]

            return hook

        def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if threading.get_ident() == owner:
                captured["hidden"] = args[0]

        handles: list[RemovableHandle] = []
        try:
            handles.append(self.head.register_forward_pre_hook(keep_input))
            for index in set(self.layer_ids) if tap else ():
                handles.append(self.layers[index].register_forward_hook(keep_output(index)))
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


def refuse_without_rollback(config: PretrainedConfig, kind: type[PreTrainedModel]) -> None:
    """Rejected drafts must be forgotten: only layers with full attention can.

    Args:
        config: the model's own.
        kind: the model's class.

    Raises:
        UserError: it has sliding-window or recurrent layers; the message names the model and them.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None and getattr(text, "sliding_window", None) is not None:
        kinds = ["sliding_attention"]
    other = sorted(set(kinds or []) - {"full_attention"})
    if text.model_type == "mistral" and text.sliding_window is not None:
        other = ["sliding_attention"]  # it slides whatever its layer_types say
    if not other and getattr(kind, "_is_stateful", False):
        other = ["recurrent"]
    if other:
        raise UserError(
            f"{kind.__name__} has {', '.join(other)} layers, which cannot forget rejected tokens; expected "
            f"full_attention in every layer of a target (this one's model_type is {text.model_type})"
        )
