"""Pre-allocated key/value caches with an explicit length.

Rolling back is setting the length: nothing is copied, nothing concatenated. Knows the cache interface of
``transformers`` and nothing of what is decoded. The three classes differ in where a pass writes and what it sees.

Shapes: B rows, H key/value heads, E head size, Q new positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """One layer's buffers ``[B, H, capacity, E]``; where to write is the owner's business."""

    is_sliding = False
    is_croppable = False

    def __init__(self, owner: KVCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, size = key_states.shape
        batch, capacity = self.owner.batch, self.owner.capacity
        # zeros, not whatever was there: what a mask hides is still multiplied by 0, and 0 x NaN is NaN
        self.keys = key_states.new_zeros(batch, heads, capacity, size)
        self.values = value_states.new_zeros(batch, heads, capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self.owner.write(self.keys, key_states), self.owner.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class KVCache(Cache):
    """One row: the new positions are ``length .. length + Q - 1``.

    A forward pass writes behind ``length``; the caller then sets ``length`` to what it keeps.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.batch = 1
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def reserve(self, positions: int) -> None:
        """Makes room for so many positions; what is stored stays."""
        if positions <= self.capacity:
            return
        more = max(positions, self.capacity + self.capacity // 4) - self.capacity
        self.capacity += more
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            if layer.keys is not None and layer.values is not None:
                layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, 0, more))
                layer.values = torch.nn.functional.pad(layer.values, (0, 0, 0, more))

    def write(self, buffer: Tensor, new_BHQE: Tensor) -> Tensor:
        """Stores Q new positions and returns all that the queries may see, ``[B, H, length + Q, E]``."""
        end = self.length + new_BHQE.shape[2]
        assert end <= self.capacity, f"{end} positions in a cache of {self.capacity}"
        buffer[:, :, self.length : end] = new_BHQE
        return buffer[:, :, :end]


class RaggedKVCache(KVCache):
    """Rows of their own length: a row's position is also its slot, so nothing is padded on the left.

    Before a forward pass of some rows set ``rows`` (int64 ``[R]``), ``positions`` (int64 ``[R, Q]``) and ``length``
    (slots the pass may look at).
    """

    def __init__(self, num_layers: int, capacity: int, batch: int) -> None:
        super().__init__(num_layers, capacity)
        self.batch = batch
        self.rows: Tensor | None = None
        self.positions: Tensor | None = None

    def write(self, buffer: Tensor, new_BHQE: Tensor) -> Tensor:
        """Stores Q new positions of the rows in work and returns what they may look at, ``[R, H, length, E]``."""
        assert self.rows is not None and self.positions is not None
        buffer[self.rows[:, None], :, self.positions] = new_BHQE.transpose(1, 2)
        seen = buffer[:, :, : self.length]
        return seen if len(self.rows) == len(buffer) else seen[self.rows]

    def keep_rows(self, rows: Tensor) -> None:
        """Drops all rows but those at ``rows`` (int64), which become 0, 1, ..."""
        self.batch = len(rows)
        for layer in self.layers:
            assert isinstance(layer, _Layer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class StaticKVCache(KVCache):
    """One row whose new positions are known on the device only, so that a pass has one shape wherever it stands.

    A pass writes at ``positions`` (int64 ``[Q]``, rising by one) and sees the first ``window`` slots; which of them
    count is for a mask to say. ``length`` is the host's account and addresses nothing, except while ``positions``
    is None: then the cache works like its base class (prefill). Buffers keep their addresses until ``reserve`` has to
    make room.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(num_layers, capacity)
        self.positions: Tensor | None = None
        self.window = capacity

    def write(self, buffer: Tensor, new_BHQE: Tensor) -> Tensor:
        """Stores Q new positions and returns the window, ``[1, H, window, E]``."""
        if self.positions is None:
            return super().write(buffer, new_BHQE)
        buffer.index_copy_(2, self.positions, new_BHQE)
        return buffer[:, :, : self.window]
