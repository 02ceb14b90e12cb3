"""A KV cache that copies prompts to the rows that continue them, with memory allocated for all tokens to come."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

__all__ = ["keep_rows", "rows_of_cache", "sent"]


def rows_of_cache(cache: Cache, rows: Tensor, *, room: int, offloads: bool = False) -> Cache:
    """A cache with copies of some rows, which may repeat, and room for more tokens; the original is unchanged.

    Args:
        cache: The cache of the prompts.
        rows: [R] int64, positions in `cache`.
        room: Number of tokens to come in each row.
        offloads: Whether to keep the copies in host memory.
    """
    filled = copy.copy(cache)
    # Layers of other kinds (sliding windows, recurrent states) have a bounded size and can select rows themselves.
    filled.layers = [
        _RoomyLayer(layer, rows, room, offloads=offloads)
        if type(layer) is DynamicLayer
        else _rows_of_layer(layer, rows)
        for layer in cache.layers
    ]
    return filled


def sent(values: Sequence[object], device: torch.device) -> Tensor:
    """The values as a tensor of the device, for which the host does not wait."""
    return torch.tensor(values).to(device, non_blocking=True)


def keep_rows(cache: Cache, rows: Sequence[int], device: torch.device) -> None:
    """Keep only `rows`, in this order. A row that moves must come from behind all positions that remain."""
    index = sent(rows, device)
    for layer in cache.layers:
        if isinstance(layer, _RoomyLayer):
            layer.keep(rows)
        else:
            layer.reorder_cache(index)


class _RoomyLayer(DynamicLayer):
    """A layer's keys and values, with memory allocated for all tokens to come: new tokens are written in place.

    `DynamicLayer` copies the whole layer for every token. With offloading, the memory is on the host, and only what
    `update` returns is on the device.
    """

    def __init__(self, filled: DynamicLayer, rows: Tensor, room: int, *, offloads: bool) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._length = filled.get_seq_length()
        device = torch.device("cpu") if offloads else filled.keys.device
        rooms = []
        for state in (filled.keys, filled.values):
            _, heads, length, size = state.shape
            roomy = state.new_empty(len(rows), heads, length + room, size, device=device)
            roomy[:, :, :length] = state[rows]
            rooms.append(roomy)
        self._key_room, self._value_room = rooms
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; returns those of all tokens."""
        end = self._length + key_states.shape[-2]
        self._key_room[:, :, self._length : end] = key_states
        self._value_room[:, :, self._length : end] = value_states
        self._length = end
        self._show()
        return self.keys.to(key_states.device), self.values.to(value_states.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`; those that move are copied."""
        for room in (self._key_room, self._value_room):
            for place, row in enumerate(rows):
                if place != row:
                    room[place, :, : self._length] = room[row, :, : self._length]
        self._key_room, self._value_room = self._key_room[: len(rows)], self._value_room[: len(rows)]
        self._show()

    def _show(self) -> None:
        self.keys = self._key_room[:, :, : self._length]
        self.values = self._value_room[:, :, : self._length]


def _rows_of_layer(layer: CacheLayerMixin, rows: Tensor) -> CacheLayerMixin:
    copied = copy.copy(layer)
    # Recurrent states are in dictionaries, which the copy would share.
    vars(copied).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    copied.reorder_cache(rows)
    return copied
