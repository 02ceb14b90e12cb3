"""A prompt's keys and values, copied to the rows that go on from it, with room for the tokens to come."""

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

__all__ = ["keep_rows", "rows_of_cache"]


def rows_of_cache(cache: Cache, rows: Tensor, *, room: int, offloads: bool = False) -> Cache:
    """A cache with copies of some rows, which may repeat, and room for more tokens; the original stays as it is.

    Args:
        cache: Of the prompts.
        rows: [R] int64, places in `cache`.
        room: Tokens to come in each row.
        offloads: Keep the copies in host memory.
    """

    def copied(layer: CacheLayerMixin) -> CacheLayerMixin:
        if type(layer) is DynamicLayer:
            return _RoomyLayer(layer, rows, room, offloads=offloads)
        # Layers of other kinds (sliding windows, recurrent states) have a bounded size and know how to select rows.
        return _rows_of_layer(layer, rows)

    filled = copy.copy(cache)
    filled.layers = [copied(layer) for layer in cache.layers]
    return filled


def keep_rows(cache: Cache, rows: Sequence[int], device: torch.device) -> None:
    """Only `rows` stay, in that order. A row that changes its place comes from behind the last place that is left."""
    index = torch.tensor(rows, device=device)
    for layer in cache.layers:
        if isinstance(layer, _RoomyLayer):
            layer.keep(rows)
        else:
            layer.reorder_cache(index)


class _RoomyLayer(DynamicLayer):
    """A layer's keys and values in memory that has room for all tokens to come: a new token is written in place.

    `DynamicLayer` copies the whole layer for every token. Where it offloads, the memory is the host's, and only what
    `update` returns is on the device.
    """

    def __init__(self, filled: DynamicLayer, rows: Tensor, room: int, *, offloads: bool) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._length = filled.get_seq_length()
        device = torch.device("cpu") if offloads else filled.keys.device
        self._key_room, self._value_room = (
            _with_room(state, rows, room, device) for state in (filled.keys, filled.values)
        )
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens behind those that are here; returns all."""
        end = self._length + key_states.shape[-2]
        self._key_room[:, :, self._length : end] = key_states
        self._value_room[:, :, self._length : end] = value_states
        self._length = end
        self._show()
        return self.keys.to(key_states.device), self.values.to(value_states.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Only `rows` stay; of these, the ones that change their place are copied."""
        for room in (self._key_room, self._value_room):
            for place, row in enumerate(rows):
                if place != row:
                    room[place, :, : self._length] = room[row, :, : self._length]
        self._key_room, self._value_room = self._key_room[: len(rows)], self._value_room[: len(rows)]
        self._show()

    def _show(self) -> None:
        self.keys = self._key_room[:, :, : self._length]
        self.values = self._value_room[:, :, : self._length]


def _with_room(state: Tensor, rows: Tensor, room: int, device: torch.device) -> Tensor:
    _, heads, length, size = state.shape
    roomy = state.new_empty(len(rows), heads, length + room, size, device=device)
    roomy[:, :, :length] = state[rows]
    return roomy


def _rows_of_layer(layer: CacheLayerMixin, rows: Tensor) -> CacheLayerMixin:
    copied = copy.copy(layer)
    copied.reorder_cache(rows)
    return copied
