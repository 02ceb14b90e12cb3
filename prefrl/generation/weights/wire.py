"""The wire protocol of weights: a private process group of a trainer and one server's workers, and its messages.

Plain torch, the same code on both sides; nothing is unpickled. The trainer is rank 0. It hosts the rendezvous, only on
the address from which it reaches the server. It sends buckets of tensors, each as

    length of the header    8 bytes, int64; 0 ends the transfer
    header                  JSON: names, dtypes and shapes of the bucket's tensors, or the error that ends the transfer
    the tensors' bytes      each at the next multiple of 16, so that views of every dtype are aligned

Because each bucket has its own header, the trainer can read its weights once, in order, without a list of them.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports the stores without listing them
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

__all__ = [
    "BUCKET_BYTES",
    "HOST_DEVICE",
    "Group",
    "Invitation",
    "Host",
    "Named",
    "Transport",
    "buckets",
    "join",
    "messages",
    "receive",
]

Transport = Literal["nccl", "gloo"]
Named = tuple[str, Tensor]

BUCKET_BYTES = 64 * 2**20
HOST_DEVICE = torch.device("cpu")
_ALIGNMENT = 16  # bytes, the widest dtype
_HEADER_LIMIT = 256 * 2**20  # bytes; a larger length does not come from prefrl
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_POLL_SECONDS = 0.0005
_JOIN_POLL_SECONDS = 0.005
_ABORT_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a worker needs to join the group; the trainer sends it as `init_info`."""

    transport: Transport
    host: str
    port: int
    tag: str  # unique to this group, so that workers of an earlier group cannot join it
    world_size: int  # the trainer and all workers of the server
    timeout_s: float  # time limit of each wait
    rank_offset: int = 1  # the rank of the first worker

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Group:
    """A private process group, independent of torch's default group.

    Args:
        invitation: The group to join.
        rank: This process's rank; 0 for the trainer.
        store: The rendezvous store.
        address: Address of this machine, as the others see it.
    """

    def __init__(self, invitation: Invitation, *, rank: int, store: TCPStore, address: str) -> None:
        self.device = HOST_DEVICE
        self.invitation = invitation
        self._store: TCPStore | None = store
        prefixed = PrefixStore(f"prefrl/{invitation.tag}", store)
        self._backend: Any
        if invitation.transport == "gloo":
            self._backend = _gloo(prefixed, rank, invitation, address)
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self._backend = _nccl(prefixed, rank, invitation)
        self._under_way: Any = None
        # NCCL connects in its first collective.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def start(self, message: Tensor) -> None:
        """Begin to send `message`, or on ranks above 0, to receive it in place."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # Keep the only reference: connections stay open as long as it exists.
        self._under_way = self._backend.broadcast([message], options)

    def wait(self, *, check: Callable[[], None] | None = None) -> None:
        """Wait until the message of `start` is sent or received.

        Args:
            check: Called while waiting; an exception that it raises ends the wait.

        Raises:
            TimeoutError: It took longer than `timeout_s`.
            RuntimeError: The connection broke.
        """
        deadline = time.monotonic() + self.invitation.timeout_s
        pause = 0.0
        while not self._under_way.is_completed():
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was sent or received for {self.invitation.timeout_s:g} s")
            time.sleep(pause)
            pause = _POLL_SECONDS
        self._under_way.wait()

    def broadcast(self, message: Tensor) -> None:
        """Send or receive `message`; see `wait`."""
        self.start(message)
        self.wait()

    def close(self) -> None:
        """Leave without waiting. The others notice at once or, if a message is being sent, when that ends."""
        backend, store, under_way = self._backend, self._store, self._under_way
        self._backend = self._store = self._under_way = None
        if backend is not None and under_way is not None and not under_way.is_completed():
            arguments = (backend, store, under_way)
            threading.Thread(target=_abort, args=arguments, name="prefrl-group-end", daemon=True).start()


def _gloo(store: PrefixStore, rank: int, invitation: Invitation, address: str) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs know only the newer of two names of `_Options`
    options = gloo._Options()
    options._timeout = timedelta(seconds=invitation.timeout_s + 1)  # so that `wait` reports a timeout first
    # By default, gloo uses the address that the host name resolves to, which others often cannot reach.
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, invitation.world_size, options)


def _nccl(store: PrefixStore, rank: int, invitation: Invitation) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only builds with CUDA have it

    options = ProcessGroupNCCL.Options()
    # `wait` enforces deadlines: torch's own timeout would end the whole process, trainer or server.
    options._timeout = timedelta(days=365)
    quiet = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)  # the constructor reads them
    try:
        return ProcessGroupNCCL(store, rank, invitation.world_size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _abort(backend: Any, _store: Any, under_way: Any) -> None:
    """Abort the running message, and release the group when it has ended, at the end of this thread.

    gloo ends a message only at its deadline. Until then, the group's destructor would block all Python threads.
    """
    backend.abort()
    while not under_way.is_completed():
        time.sleep(_ABORT_POLL_SECONDS)


class Host:
    """The trainer's side of a rendezvous: it makes the invitation, and joins the group in the background.

    Args:
        transport: The communication backend.
        host: Host of the server.
        port: Port of the server.
        num_workers: Number of the server's workers.
        tag: Unique name of this group.
        timeout: Time limit of each wait, in seconds.
    """

    def __init__(
        self, transport: Transport, host: str, port: int, *, num_workers: int, tag: str, timeout: float
    ) -> None:
        self._address = address_towards(host, port)
        self._is_cancelled = False
        listener = _listen(self._address)
        self._store = TCPStore(
            self._address,
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # TCPStore would listen on all addresses
        )
        self.invitation = Invitation(
            transport=transport,
            host=self._address,
            port=self._store.port,
            tag=tag,
            world_size=1 + num_workers,
            timeout_s=timeout,
        )

    def join(self) -> Future[Group]:
        """Wait for the workers and form the group, on a separate thread: NCCL has no deadline for this."""
        return _in_background(self._join)

    def cancel(self) -> None:
        """Stop waiting for workers that have not arrived."""
        self._is_cancelled = True

    def _join(self) -> Group:
        invitation = self.invitation
        keys = [
            _arrival_key(invitation, invitation.rank_offset + worker) for worker in range(invitation.world_size - 1)
        ]
        deadline = time.monotonic() + invitation.timeout_s
        # Wait before the group is formed, because forming it cannot be interrupted.
        while not self._store.check(keys):
            if self._is_cancelled:
                raise RuntimeError("cancelled")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {len(keys)} workers arrived within {invitation.timeout_s:g} s")
            time.sleep(_JOIN_POLL_SECONDS)
        return Group(invitation, rank=0, store=self._store, address=self._address)


def join(invitation: Invitation, *, worker: int) -> Group:
    """The worker's side of a rendezvous.

    Args:
        invitation: From the trainer.
        worker: Number of this worker among the workers of its server.

    Raises:
        RuntimeError: The trainer cannot be reached, or not all members arrived in time.
    """
    store = TCPStore(
        invitation.host,
        invitation.port,
        is_master=False,
        timeout=timedelta(seconds=invitation.timeout_s),
        wait_for_workers=False,
    )
    rank = invitation.rank_offset + worker
    store.set(_arrival_key(invitation, rank), "")
    address = address_towards(invitation.host, invitation.port)
    return Group(invitation, rank=rank, store=store, address=address)


def _arrival_key(invitation: Invitation, rank: int) -> str:
    return f"prefrl/{invitation.tag}/present/{rank}"


def address_towards(host: str, port: int) -> str:
    """The numeric address of this machine from which packets to `host` are sent; this sends nothing."""
    family, kind, protocol, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _in_background(make: Callable[[], Group]) -> Future[Group]:
    """Run `make` on a thread that does not keep the program alive."""
    future: Future[Group] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="prefrl-group-join", daemon=True).start()
    return future


@dataclass(frozen=True, slots=True)
class _Header:
    """A description of a bucket's tensors, in order; or an `error` because of which the sender stops."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    error: str | None = None

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


def messages(weights: Iterable[Named], *, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Tensor]:
    """The messages that rank 0 broadcasts, in order. Each message is valid until the next one is read.

    If reading `weights` fails, the receivers get the error message before the exception is raised.
    """
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    try:
        for bucket in buckets(weights, bucket_bytes=bucket_bytes):
            header = _header(bucket)
            offsets, total = header.offsets()
            if buffer.numel() < total:
                buffer = torch.empty(max(total, bucket_bytes), dtype=torch.uint8, device=device)
            for (_, tensor), start, size in zip(bucket, offsets, header.sizes(), strict=True):
                buffer[start : start + size].copy_(_bytes(tensor))
            yield from _header_messages(header, device)
            yield from _pieces(buffer[:total])
    except Exception as error:
        yield from _header_messages(_Header([], [], [], error=f"{type(error).__name__}: {error}"), device)
        raise
    yield torch.zeros(8, dtype=torch.uint8, device=device)


def receive(group: Group) -> list[Named]:
    """Receive all weights from rank 0 into host memory.

    Raises:
        TimeoutError: The sender stopped sending.
        RuntimeError: The connection broke.
        ValueError: The sender stopped because of an error, or the data do not follow the protocol.
    """
    received: list[Named] = []
    while True:
        length = _receive_bytes(group, 8).view(torch.int64).item()
        if length == 0:
            return received
        if not 0 < length <= _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes: the sender is not a prefrl trainer")
        header = _Header(**json.loads(_receive_bytes(group, int(length)).numpy().tobytes()))
        if header.error is not None:
            raise ValueError(f"the trainer stopped sending: {header.error}")
        unknown = sorted(set(header.dtypes) - _DTYPES.keys())
        if unknown:
            raise ValueError(f"cannot receive tensors of the dtypes {unknown}; supported: {sorted(_DTYPES)}")
        offsets, total = header.offsets()
        received.extend(_unpack(header, offsets, _receive_bytes(group, total)))


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


def _header_messages(header: _Header, device: torch.device) -> Iterator[Tensor]:
    text = json.dumps(asdict(header)).encode()
    yield torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8).to(device)
    yield from _pieces(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device))


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
