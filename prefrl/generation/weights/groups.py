"""Sending all weights through process groups, one for each server."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prefrl.generation.weights import process_group, wire
from prefrl.http import HttpError

if TYPE_CHECKING:
    from prefrl.generation.weights.transfer import Server, Transfer

__all__ = ["GroupSync"]

# Extra seconds to wait for the server's error message after a failure.
_MESSAGE_SECONDS = 10.0


class GroupSync:
    """A `Transport` that sends all weights through process groups, which stay open between transfers.

    Args:
        backend: The communication backend of the groups.
    """

    adapter_name: str | None = None

    def __init__(self, backend: process_group.Transport) -> None:
        self._backend = backend

    def send(self, transfer: Transfer, servers: Sequence[Server], weights: Iterable[wire.Named]) -> None:
        """Broadcast all weights. They are read once; reading stops when all servers have failed."""
        self._join(transfer, [server for server in servers if server.error is None and server.group is None])
        transfer.for_each(servers, "starting", transfer.start_update)
        live = {server: server.group for server in servers if server.error is None and server.group is not None}
        key = wire.new_key()
        for server in live:
            _begin_request(transfer, server, "/update_weights", {"update_info": {"key": key.hex()}})
        device = next((group.device for group in live.values()), process_group.HOST_DEVICE)
        messages = wire.messages(weights, device=device, key=key)
        while any(server.error is None for server in live) and (message := next(messages, None)) is not None:
            transfer.bytes_sent += message.nbytes
            _broadcast(transfer, live, message)
        for server in live:
            if server.error is None:
                with _failures(server, "loading weights"):
                    _finish_request(server)
        transfer.for_each(servers, "finishing", transfer.finish_update)

    def _join(self, transfer: Transfer, servers: Sequence[Server]) -> None:
        """Form new groups with servers."""
        joining: dict[Server, tuple[process_group.Host, Future[process_group.Group]]] = {}
        for server in servers:
            try:
                host = self._invite(transfer, server)
            except (OSError, RuntimeError) as error:
                server.fail("opening a port for the process group", error)
                continue
            joining[server] = (host, host.join())
            _begin_request(transfer, server, "/init_weight_transfer_engine", {"init_info": host.invitation.as_json()})
        for server, (host, future) in joining.items():
            with _failures(server, "forming the process group"):
                server.group = _await_group(transfer, server, future)
                _finish_request(server)
            host.cancel()

    def _invite(self, transfer: Transfer, server: Server) -> process_group.Host:
        parts = urlsplit(server.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return process_group.Host(
            self._backend,
            parts.hostname or "",
            port,
            num_workers=server.info.num_workers,
            tag=secrets.token_hex(8),
            timeout=transfer.timeout,
        )


def _broadcast(transfer: Transfer, groups: Mapping[Server, process_group.Group], message: Any) -> None:
    """Send one message to all servers that have not failed."""
    for server, group in groups.items():
        if server.error is None:
            with _failures(server, "sending weights"):
                _check(transfer, server)  # `wait` does not check if the message arrives at once
                group.start(message)
    for server, group in groups.items():
        if server.error is None:
            with _failures(server, "sending weights"):
                group.wait(check=partial(_check, transfer, server))


def _await_group(transfer: Transfer, server: Server, joining: Future[process_group.Group]) -> process_group.Group:
    while not wait([joining], timeout=0.01).done:
        _check(transfer, server)
    return joining.result()


def _check(transfer: Transfer, server: Server) -> None:
    """Raise if a wait for the server must end: it answered with an error, or the deadline has passed."""
    if server.answer is not None and server.answer.done():
        server.answer.result()
    transfer.check_deadline()


def _begin_request(transfer: Transfer, server: Server, path: str, json: Any) -> None:
    """Begin a request that the server answers only when its part of the work is done."""
    server.answer = transfer.http.submit(transfer.post(server, path, json, grace=_MESSAGE_SECONDS))


def _finish_request(server: Server, *, timeout: float | None = None) -> None:
    """Wait for the answer to the running request."""
    answer, server.answer = server.answer, None
    if answer is not None:
        answer.result(timeout)


@contextmanager
def _failures(server: Server, doing: str) -> Iterator[None]:
    """Leave out a server that fails, and record its own error message: a broken connection says little."""
    try:
        yield
    except HttpError as error:
        server.fail(doing, error)
    except (RuntimeError, TimeoutError) as error:
        reason: Exception = error
        try:
            _finish_request(server, timeout=_MESSAGE_SECONDS)
        except HttpError as answered:
            reason = answered
        except TimeoutError:
            pass
        server.fail(doing, reason)
