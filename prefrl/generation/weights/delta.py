"""Weights as what has changed since the last transfer: lossless, and checked against a hash of all weights.

After a step of a small learning rate, few weights differ in the low precision of a server. Trainer and servers keep a
copy of the weights in host memory, and a message has, for each tensor with changes,

    prefrl:gaps:NAME      uint8, the distances between changed elements; see `Changes`
    prefrl:values:NAME    their new values, as integers
    NAME                  instead of both, the whole tensor if it is smaller

and at its end `prefrl:delta`, JSON with two fingerprints: `base`, of the weights that the changes belong to (null: the
message has all weights), and `result`. A message is a list of named tensors, so that every `Transport` can carry it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from prefrl.distributed import Differences
    from prefrl.generation.base import WeightSource
    from prefrl.generation.weights.transfer import FileSync, GroupSync, Receiver, Transfer
    from prefrl.generation.weights.wire import Named

logger = logging.getLogger(__name__)

_GAPS, _VALUES, _END = "prefrl:gaps:", "prefrl:values:", "prefrl:delta"
_FAR = 255  # in `Changes.gaps`: go on so many elements, without a change
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_HASH_THREADS = 8


@dataclass(frozen=True, slots=True)
class Changes:
    """The elements of a tensor that differ from those of another one.

    A byte below 255 in `gaps` is the distance to the next change, the first one counted from element 0. A byte of 255
    is a distance without a change at its end.
    """

    gaps: Tensor  # uint8
    values: Tensor  # integers of the elements' width, because comparing floats would miss NaN and -0.0

    @classmethod
    def between(cls, old: Tensor, new: Tensor) -> Changes | None:
        """What makes `new` of `old`, which has its shape and dtype; None if `new` as a whole has fewer bytes."""
        before, after = _integers(old), _integers(new)
        differs = before != after
        if int(differs.count_nonzero()) * (1 + new.element_size()) >= new.nbytes:
            return None
        places = differs.nonzero()[:, 0]
        return cls.of(places, after[places], new)

    @classmethod
    def of(cls, places: Tensor, values: Tensor, new: Tensor) -> Changes | None:
        """Changes at increasing places, which lead to `new`; None if `new` as a whole has fewer bytes."""
        gaps = places.diff(prepend=places.new_zeros(1))
        num_far = gaps // _FAR
        encoded = gaps.new_full((len(gaps) + int(num_far.sum()),), _FAR, dtype=torch.uint8)
        encoded[(num_far + 1).cumsum(0) - 1] = (gaps % _FAR).to(torch.uint8)
        changes = cls(encoded, values)
        return changes if changes.nbytes < new.nbytes else None

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.gaps.nbytes + self.values.nbytes

    def apply(self, tensor: Tensor) -> None:
        """Change `tensor`, which is contiguous, in place.

        Raises:
            ValueError: The changes are not of this tensor.
        """
        elements = _integers(tensor)
        places = self.gaps.cumsum(0, dtype=torch.int64)[self.gaps != _FAR]
        fits = self.values.dtype == elements.dtype and self.values.shape == places.shape
        if not fits or (len(places) and int(places[-1]) >= len(elements)):
            raise ValueError(f"{len(places)} changes do not fit {len(elements)} elements of {tensor.dtype}")
        elements[places] = self.values


def _integers(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


class HostCopy:
    """A copy of all weights in host memory; `fingerprint` is a hash of it, None while it is incomplete."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._hashes: dict[str, bytes] = {}
        self.fingerprint: str | None = None

    def clear(self) -> None:
        """Let go of the weights."""
        self._weights, self._hashes, self.fingerprint = {}, {}, None

    def changes_of(self, source: WeightSource, *, dtype: torch.dtype | None) -> Iterator[Named]:
        """The message that brings a copy like this one to the weights of a source; see `changes`."""
        rounded = partial(_rounded, target=dtype)
        return self.changes(source.changes(rounded, is_first=self.fingerprint is None), dtype=dtype)

    def changes(
        self, weights: Iterable[tuple[str, Tensor | Differences]], *, dtype: torch.dtype | None
    ) -> Iterator[Named]:
        """The message that brings a copy like this one to `weights`, which are read once, in order.

        This copy follows as the message is read, and is complete when all weights have been read.

        Args:
            weights: The weights from now on, or what differs from those of this copy.
            dtype: What wider weights are rounded to, as a server would do. Vectors are not: a model may keep some in
                float32, and they are small.
        """
        base, before = self.fingerprint, self._weights if self.fingerprint else {}
        self._weights, self.fingerprint = {}, None
        changed = []
        for name, tensor in weights:
            old = before.pop(name, None)
            if isinstance(tensor, Tensor):
                self._weights[name] = new = _on_host(tensor, dtype)
                parts = list(_parts(name, old, new))
            else:
                assert old is not None, name
                self._weights[name] = old
                parts = list(_changed(name, old, tensor))
            if parts:
                changed.append(name)
            yield from parts
        self._seal(changed)
        yield self._end(base)

    def whole(self) -> Iterator[Named]:
        """The message that brings any copy to this one."""
        yield from self._weights.items()
        yield self._end(None)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All weights, which change with the next message."""
        return self._weights

    def apply(self, messages: Iterable[Mapping[str, Tensor]]) -> list[str]:
        """Follow messages, each of which belongs to the weights that the one before leads to.

        Returns:
            The names of the weights that they have changed.

        Raises:
            ValueError: A message is for other weights than these, or the last does not have the result that it should
                have.
        """
        changed: dict[str, None] = {}
        result = self.fingerprint
        for message in messages:
            facts = json.loads(message[_END].numpy().tobytes())
            if facts["base"] is None:
                self.clear()
                changed = {}
            elif facts["base"] != result:
                raise ValueError("these are changes of other weights than this server has")
            self.fingerprint, result = None, facts["result"]
            changed |= dict.fromkeys(self._take(message))
        self._seal([*changed])
        if self.fingerprint != result:
            raise ValueError("the weights with these changes are not those of the trainer: their hashes differ")
        return [*changed]

    def _take(self, message: Mapping[str, Tensor]) -> Iterator[str]:
        """Change the weights; yields their names."""
        for name, tensor in message.items():
            if name.startswith(_GAPS):
                changed = name.removeprefix(_GAPS)
                Changes(tensor, message[_VALUES + changed]).apply(self._weights[changed])
                yield changed
            elif not name.startswith((_VALUES, _END)):
                self._weights[name] = tensor.clone()  # what was received belongs to a large buffer, or to a file
                yield name

    def _seal(self, changed: Sequence[str]) -> None:
        """Hash the weights that have changed, and thereby all."""
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            self._hashes.update(zip(changed, pool.map(_hash, map(self._weights.__getitem__, changed)), strict=True))
        whole = hashlib.sha256()
        for name in sorted(self._weights):
            whole.update(f"{len(name)} {name} ".encode() + self._hashes[name])
        self.fingerprint = whole.hexdigest()

    def _end(self, base: str | None) -> Named:
        facts = json.dumps({"base": base, "result": self.fingerprint})
        return _END, torch.tensor(bytearray(facts.encode()), dtype=torch.uint8)


def together(changed: Iterable[str], groups: Sequence[Set[str]]) -> set[str]:
    """`changed`, and all that can only be loaded with it: what shares a group with it, directly or through others."""
    found, more = set[str](), set(changed)
    while more:
        found |= more
        more = set[str]().union(*(group for group in groups if not group.isdisjoint(more))) - found
    return found


def is_delta(message: Mapping[str, Tensor]) -> bool:
    """Whether it is a message of a `HostCopy`."""
    return _END in message


def _rounded(dtype: torch.dtype, num_dims: int, *, target: torch.dtype | None) -> torch.dtype:
    """`target` if that is narrower and the weight is a matrix of floats."""
    is_rounded = target is not None and num_dims > 1 and dtype.is_floating_point and target.itemsize < dtype.itemsize
    return target if target is not None and is_rounded else dtype


def _on_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A rounded copy in host memory."""
    chosen = _rounded(tensor.dtype, tensor.dim(), target=dtype)
    return tensor.detach().to("cpu", chosen, copy=True, memory_format=torch.contiguous_format)


def _parts(name: str, old: Tensor | None, new: Tensor) -> Iterator[Named]:
    """What a message has of one tensor."""
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        yield name, new
    elif not torch.equal(_integers(old), _integers(new)):
        yield from _encoded(name, Changes.between(old, new), new)


def _encoded(name: str, changes: Changes | None, new: Tensor) -> Iterator[Named]:
    if changes is None:
        yield name, new
    else:
        yield _GAPS + name, changes.gaps
        yield _VALUES + name, changes.values


def _changed(name: str, tensor: Tensor, differences: Differences) -> Iterator[Named]:
    """What a message has of one tensor, which is changed in place."""
    if len(differences.places):
        _integers(tensor)[differences.places] = differences.values
        changes = Changes.of(differences.places, differences.values, tensor)
        yield from _encoded(name, changes, tensor)


def _hash(tensor: Tensor) -> bytes:
    facts = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(facts + _integers(tensor).view(torch.uint8).numpy().data).digest()


class DeltaSync:
    """A `Transport` that sends changes by another one, and all weights to servers that have not the last ones.

    Args:
        carrier: Sends the messages.
    """

    adapter_name: str | None = None

    def __init__(self, carrier: FileSync | GroupSync) -> None:
        self._carrier = carrier
        self._copy = HostCopy()

    def send(self, transfer: Transfer, servers: Sequence[Receiver], weights: WeightSource) -> None:
        """Send the changes. A server that does not take them gets all weights in the same transfer."""
        live = [server for server in servers if server.error is None]
        if not live:
            return
        current = [server for server in live if server.copy is not None and server.copy == self._copy.fingerprint]
        if not current:
            self._copy.clear()  # then the changes are all weights
        message = self._copy.changes_of(weights, dtype=dtype_of(live))
        self._carrier.send(transfer, current or live, message)
        behind = [server for server in live if server not in current] if current else []
        for server in current:
            if server.error is not None:
                logger.warning("%s. All weights are sent again.", server.error)
                server.error = None
                behind.append(server)
        if behind:
            for _ in message:  # reading stopped if all others had failed
                pass
            self._carrier.send(transfer, behind, self._copy.whole())
        for server in live:
            server.copy = self._copy.fingerprint


def dtype_of(servers: Sequence[Receiver]) -> torch.dtype | None:
    """What all of them compute with; None: they differ."""
    names = {server.info.dtype for server in servers}
    found = getattr(torch, names.pop()) if len(names) == 1 else None
    return found if isinstance(found, torch.dtype) else None
