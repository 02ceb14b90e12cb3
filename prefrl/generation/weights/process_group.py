"""A private process group of a trainer and one server's workers, independent of torch's default group.

Plain torch, the same code on both sides; nothing is unpickled. The trainer is rank 0. It hosts the rendezvous, only on
the address from which it reaches the server, and over gloo only until the group is formed. Whoever reaches that port
in time can join: what is received through the group must be checked, as `wire.receive` does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
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
    Store,
    TCPStore,
)

# "ipc": one machine, over gloo; the weights themselves stay in a window of the device's memory, see `device_memory`.
GroupKind = Literal["nccl", "gloo", "ipc"]

HOST_DEVICE = torch.device("cpu")
_POLL_SECONDS = 0.0005
_CONNECT_SECONDS = 10.0  # less than a trainer that is started again takes to ask the server for something
_JOIN_POLL_SECONDS = 0.005
_ABORT_SECONDS = 1.0  # gloo takes microseconds
_ABORT_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """A message without content: the window that all members see changes hands, with this many bytes in it."""

    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a worker needs to join the group; the trainer sends it as `init_info`."""

    transport: GroupKind
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
        device: See `device_of`.
    """

    def __init__(
        self, invitation: Invitation, *, rank: int, store: TCPStore, address: str, device: torch.device
    ) -> None:
        self.device = device
        self.invitation = invitation
        self._store: TCPStore | None = None
        self._backend: Any
        if invitation.transport in ("gloo", "ipc"):
            self._backend = _gloo(store, rank, invitation, address)
        else:
            self._store = store  # NCCL may read it at any time
            self._backend = _nccl(PrefixStore(_prefix(invitation), store), rank, invitation)
        self._under_way: Any = None
        # NCCL connects in its first collective.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def start(self, message: Tensor | Turn) -> None:
        """Begin to send `message`, or on ranks above 0, to receive it in place."""
        if isinstance(message, Turn):
            self._under_way = self._backend.barrier()
            return
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
                raise TimeoutError(f"no data was sent or received for {self.invitation.timeout_s:g} s")
            time.sleep(pause)
            pause = _POLL_SECONDS
        self._under_way.wait()

    def broadcast(self, message: Tensor | Turn) -> None:
        """Send or receive `message`; see `wait`."""
        self.start(message)
        self.wait()

    def close(self) -> None:
        """Leave without waiting. The others notice at once or, if a message is being sent, when that ends."""
        backend, store, under_way = self._backend, self._store, self._under_way
        self._backend = self._store = self._under_way = None
        # NCCL keeps the GPU's memory of a group that is dropped without an end.
        if under_way is not None and (self.device != HOST_DEVICE or not under_way.is_completed()):
            is_aborted = threading.Event()
            arguments = (backend, store, under_way, is_aborted)
            threading.Thread(target=_abort, args=arguments, name="prefrl-group-end", daemon=True).start()
            # A program that ends while a daemon thread returns from torch into Python would be aborted.
            is_aborted.wait(_ABORT_SECONDS)


def device_of(transport: GroupKind) -> torch.device:
    """Where this process's messages are: with NCCL, on the current GPU of the calling thread; another has another."""
    return torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else HOST_DEVICE


class _Rendezvous(Store):
    """A TCP store that can be left: gloo keeps its store, and the port of the TCP store would stay open."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._store: Any = store

    def set(self, *arguments: Any) -> None:
        self._store.set(*arguments)

    def get(self, *arguments: Any) -> Any:
        return self._store.get(*arguments)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def leave(self) -> None:
        """Let go of the store. Its port is closed when nobody else in this process holds it."""
        self._store = None


def _prefix(invitation: Invitation) -> str:
    return f"prefrl/{invitation.tag}"


def _gloo(store: TCPStore, rank: int, invitation: Invitation, address: str) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs know only the newer of two names of `_Options`
    options = gloo._Options()
    options._timeout = timedelta(seconds=invitation.timeout_s + 1)  # so that `wait` reports a timeout first
    # By default, gloo uses the address that the host name resolves to, which others often cannot reach.
    options._devices = [gloo.create_device(hostname=address)]
    rendezvous = _Rendezvous(store)
    backend = gloo(PrefixStore(_prefix(invitation), rendezvous), rank, invitation.world_size, options)
    backend.barrier().wait()  # the others are connected, too, and need the rendezvous no more
    rendezvous.leave()
    return backend


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


def _abort(backend: Any, _store: Any, under_way: Any, is_aborted: threading.Event) -> None:
    """Abort the running message, and release the group when it has ended, at the end of this thread.

    gloo ends a message only at its deadline. Until then, the group's destructor would block all Python threads.
    """
    backend.abort()
    is_aborted.set()
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
        self, transport: GroupKind, host: str, port: int, *, num_workers: int, tag: str, timeout: float
    ) -> None:
        self._address = address_towards(host, port)
        self._device = device_of(transport)  # now: the thread that joins starts with the first GPU
        self._is_cancelled = False
        listener = _listen(self._address)
        self._store: Any = TCPStore(
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
        store, self._store = self._store, None
        return Group(invitation, rank=0, store=store, address=self._address, device=self._device)


def join(invitation: Invitation, *, worker: int) -> Group:
    """The worker's side of a rendezvous.

    Args:
        invitation: From the trainer.
        worker: Number of this worker among the workers of its server.

    Raises:
        RuntimeError: The trainer cannot be reached, or not all members arrived in time.
    """
    # The trainer listens before it invites: if it is gone, a longer wait would only block the server.
    patience = min(invitation.timeout_s, _CONNECT_SECONDS)
    store = TCPStore(
        invitation.host,
        invitation.port,
        is_master=False,
        timeout=timedelta(seconds=patience),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(seconds=invitation.timeout_s))
    rank = invitation.rank_offset + worker
    store.set(_arrival_key(invitation, rank), "")
    address = address_towards(invitation.host, invitation.port)
    return Group(invitation, rank=rank, store=store, address=address, device=device_of(invitation.transport))


def _arrival_key(invitation: Invitation, rank: int) -> str:
    return f"{_prefix(invitation)}/present/{rank}"


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
