"""The wire protocol of weights: the messages that a trainer sends through its group with one server's workers.

The same code on both sides; nothing is unpickled. Rank 0, the trainer, sends buckets of tensors, each as

    length of the header    8 bytes, int64; 0 ends the transfer
    header                  JSON: names, dtypes and shapes of the bucket's tensors, or the error that ends the transfer
    seal                    32 bytes: keyed hash of all bytes of the transfer so far
    the tensors' bytes      each at the next multiple of 16, so that views of every dtype are aligned

Because each bucket has its own header, the trainer can read its weights once, in order, without a list of them.

The seals show that the bytes are those that the trainer sent, whoever has joined the group: their key is new for each
transfer, and travels in the authorized request for the update. Over NCCL the tensors' bytes stay on the GPUs, and
copying them to the host for the hash would take longer than sending them. There the seals cover only lengths and
headers: they keep out another sender, but do not show that bytes were changed on the way.

Two processes on one device share a window of its memory instead: the first header says where it is. The tensors' bytes
then pass through it in rounds. In each, the trainer fills the window and sends the sum of what is in it, as 64-bit
integers; the worker copies it, compares the sum of its copy, and gives the window back. After the end, it lets go of
the window before it gives it back for the last time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from prefrl.generation.weights import device_memory
from prefrl.generation.weights.process_group import HOST_DEVICE, Group, Turn

Named = tuple[str, Tensor]

BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 16  # bytes, the widest dtype
_HEADER_LIMIT = 256 * 2**20  # bytes; a larger length does not come from prefrl
_SEAL_BYTES = 32
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class _Header:
    """A description of a bucket's tensors, in order; or an `error` because of which the sender stops.

    The first one of a transfer through a window of device memory also has the window.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    error: str | None = None
    window: dict[str, Any] | None = None

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return [_DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in pairs]

    def offsets(self) -> tuple[list[int], int]:
        """The byte offset of each tensor, and the size of the bucket in bytes."""
        offsets, end = [], 0
        for size in self.sizes():
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offsets, end


def buckets(weights: Iterable[Named], *, bucket_bytes: int) -> Iterator[list[Named]]:
    """Consecutive tensors of at most `bucket_bytes` in total; a larger tensor has a bucket of its own."""
    bucket: list[Named] = []
    used = 0
    for name, tensor in weights:
        if bucket and used + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if bucket:
        yield bucket


def new_key() -> bytes:
    """A random key for the seals of one transfer."""
    return secrets.token_bytes(_SEAL_BYTES)


class _Seal:
    """The keyed hash of a transfer so far, of all bytes in host memory."""

    def __init__(self, key: bytes) -> None:
        if len(key) < _SEAL_BYTES:
            raise ValueError(f"the key of a transfer has {len(key)} bytes: must be {_SEAL_BYTES}")
        self._hash = hmac.new(key, digestmod=hashlib.sha256)

    def add(self, message: Tensor) -> None:
        """Add a message."""
        self._hash.update(message.numpy().data)

    def tensor(self) -> Tensor:
        """The seal of what was added so far."""
        return torch.frombuffer(bytearray(self._hash.digest()), dtype=torch.uint8)


def messages(
    weights: Iterable[Named], *, device: torch.device, key: bytes, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Tensor]:
    """The messages that rank 0 broadcasts, in order. Each message is valid until the next one is read.

    If reading `weights` fails, the receivers get the error message before the exception is raised.

    Args:
        weights: Read once, in order.
        device: That of the messages.
        key: See `new_key`.
        bucket_bytes: The most bytes of several tensors in one bucket.
    """
    seal = _Seal(key)
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    try:
        for bucket in buckets(weights, bucket_bytes=bucket_bytes):
            header = _header(bucket)
            offsets, total = header.offsets()
            if buffer.numel() < total:
                buffer = torch.empty(max(total, bucket_bytes), dtype=torch.uint8, device=device)
            for (_, tensor), start, size in zip(bucket, offsets, header.sizes(), strict=True):
                buffer[start : start + size].copy_(_bytes(tensor))
            yield from _header_messages(header, device, seal)
            if device == HOST_DEVICE:
                seal.add(buffer[:total])
            yield from _pieces(buffer[:total])
    except Exception as error:
        yield from _header_messages(_Header([], [], [], error=f"{type(error).__name__}: {error}"), device, seal)
        raise
    yield from _header_messages(None, device, seal)


def messages_through_window(
    weights: Iterable[Named], *, key: bytes, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Tensor | Turn]:
    """What `messages` is for a group of processes on one device: the tensors' bytes stay in its memory.

    Args:
        weights: Read once, in order.
        key: See `new_key`.
        bucket_bytes: Size of the window, and the most bytes of several tensors in one bucket.
    """
    seal = _Seal(key)
    window = device_memory.allocate(-(-bucket_bytes // _ALIGNMENT) * _ALIGNMENT)
    description: dict[str, Any] | None = device_memory.describe(window)
    try:
        for bucket in buckets(weights, bucket_bytes=bucket_bytes):
            header = replace(_header(bucket), window=description)
            description = None
            yield from _header_messages(header, HOST_DEVICE, seal)
            yield from _rounds(bucket, header, window, seal)
    except Exception as error:
        yield from _header_messages(_Header([], [], [], error=f"{type(error).__name__}: {error}"), HOST_DEVICE, seal)
        raise
    else:
        yield from _header_messages(None, HOST_DEVICE, seal)
        yield Turn()
    finally:
        del window
        device_memory.collect()


def _rounds(bucket: list[Named], header: _Header, window: Tensor, seal: _Seal) -> Iterator[Tensor | Turn]:
    offsets, total = header.offsets()
    for start in range(0, total, window.numel()):
        end = min(start + window.numel(), total)
        for (_, tensor), first, size in zip(bucket, offsets, header.sizes(), strict=True):
            low, high = max(first, start), min(first + size, end)
            if low < high:
                window[low - start : high - start].copy_(_bytes(tensor)[low - first : high - first])
        content = _sum(window[: end - start])  # waits until the window is filled
        seal.add(content)
        yield content
        yield Turn(end - start)


def _sum(content: Tensor) -> Tensor:
    """The sum of 64-bit integers, modulo 2^64, as eight bytes in host memory."""
    return content.view(torch.int64).sum().cpu().reshape(1).view(torch.uint8)


def _receive_rounds(group: Group, window: Tensor, total: int, seal: _Seal) -> Tensor:
    """The bytes of a bucket, on the device if its memory suffices."""
    target = torch.empty(total, dtype=torch.uint8, device=device_memory.place_for(total, near=window))
    for start in range(0, total, window.numel()):
        end = min(start + window.numel(), total)
        sent = _receive_bytes(group, 8)
        seal.add(sent)
        target[start:end].copy_(window[: end - start])
        if not torch.equal(_sum(target[start:end]), sent):  # which waits until they are copied
            raise ValueError(
                "weight_sync='ipc': what was read from the GPU's memory is not what the trainer wrote. Set "
                "weight_sync='shm'"
            )
        group.broadcast(Turn())
    return target


def receive(group: Group, key: bytes) -> list[Named]:
    """Receive all weights from rank 0 into host memory, or through a window into that of the device.

    Args:
        group: The group.
        key: That of the sender's `messages`.

    Raises:
        TimeoutError: The sender stopped sending.
        RuntimeError: The connection broke.
        ValueError: The sender stopped because of an error, the data do not follow the protocol, or a seal is wrong.
    """
    seal = _Seal(key)
    received: list[Named] = []
    window: Tensor | None = None
    while (header := _receive_header(group, seal)) is not None:
        if header.error is not None:
            raise ValueError(f"the trainer stopped sending: {header.error}")
        unknown = sorted(set(header.dtypes) - _DTYPES.keys())
        if unknown:
            raise ValueError(f"cannot receive tensors of the dtypes {unknown}; supported: {sorted(_DTYPES)}")
        offsets, total = header.offsets()
        if header.window is not None:
            window = device_memory.attach(header.window)
        if window is not None:
            buffer = _receive_rounds(group, window, total, seal)
        else:
            buffer = _receive_bytes(group, total)
            if group.device == HOST_DEVICE:
                seal.add(buffer)
        received.extend(_unpack(header, offsets, buffer))
    if window is not None:
        del window  # before the trainer drops it
        group.broadcast(Turn())
    return received


def _receive_header(group: Group, seal: _Seal) -> _Header | None:
    """The next header, or None at the end; its seal is checked, and therefore all bytes before it."""
    length = _receive_bytes(group, 8)
    num_bytes = int(length.view(torch.int64).item())
    if not 0 <= num_bytes <= _HEADER_LIMIT:
        raise ValueError(f"a header of {num_bytes} bytes: the sender is not a prefrl trainer")
    text = _receive_bytes(group, num_bytes)
    seal.add(length)
    seal.add(text)
    found = _receive_bytes(group, _SEAL_BYTES)
    if not hmac.compare_digest(found.numpy().tobytes(), seal.tensor().numpy().tobytes()):
        raise ValueError("the seal is wrong: these weights were changed in transit, or do not come from the trainer")
    return _Header(**json.loads(text.numpy().tobytes())) if num_bytes else None


def _header(bucket: list[Named]) -> _Header:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
    unknown = [f"{name}: {dtype}" for (name, _), dtype in zip(bucket, dtypes, strict=True) if dtype not in _DTYPES]
    if unknown:
        raise ValueError(f"cannot send {', '.join(unknown)}; supported dtypes: {sorted(_DTYPES)}")
    return _Header([name for name, _ in bucket], dtypes, [list(tensor.shape) for _, tensor in bucket])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _unpack(header: _Header, offsets: list[int], buffer: Tensor) -> Iterator[Named]:
    for name, dtype, shape, start, size in zip(
        header.names, header.dtypes, header.shapes, offsets, header.sizes(), strict=True
    ):
        yield name, buffer[start : start + size].view(_DTYPES[dtype]).view(shape)


def _header_messages(header: _Header | None, device: torch.device, seal: _Seal) -> Iterator[Tensor]:
    """Length, header and seal; None: the end of the transfer."""
    text = b"" if header is None else json.dumps(asdict(header)).encode()
    length = torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8)
    content = torch.tensor(bytearray(text), dtype=torch.uint8)
    seal.add(length)
    seal.add(content)
    yield length.to(device)
    yield from _pieces(content.to(device))
    yield seal.tensor().to(device)


def _pieces(message: Tensor) -> Iterator[Tensor]:
    """The parts in which a tensor is sent: one larger than a bucket takes several messages, each with its deadline."""
    for start in range(0, message.numel(), BUCKET_BYTES):
        yield message[start : start + BUCKET_BYTES]


def _receive_bytes(group: Group, size: int) -> Tensor:
    """Receive the next `size` bytes into host memory."""
    target = torch.empty(size, dtype=torch.uint8)
    for part in _pieces(target):
        message = part if group.device == part.device else torch.empty_like(part, device=group.device)
        group.broadcast(message)
        if message is not part:
            part.copy_(message)
    return target
