"""A proxy in front of a real server that lets some requests fail: real sockets, real answers, one thing wrong."""

from __future__ import annotations

import http.client
import json
import math
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

GENERATE = "/inference/v1/generate"
_WEIGHT_PATHS = (
    "/pause",
    "/update_weight_version",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
)

Forward = Callable[[], tuple[int, bytes]]
# Gets the request and what would forward it; answers, or does not.
Fault = Callable[["_Handler", Forward], None]


class Proxy:
    """Passes everything on to a server, except what was told to fail.

    Args:
        target: Base URL of the server.
        key: Sent instead of the client's.
    """

    def __init__(self, target: str, *, key: str | None = None) -> None:
        self.target = urlsplit(target)
        self.key = key
        self.requests: Counter[str] = Counter()  # by path
        self.last_body: dict[str, Any] = {}  # by path
        self.is_closing = threading.Event()
        self._faults: dict[str, tuple[Fault, float]] = {}  # by path, and how often
        self._lock = threading.Lock()
        self._start(port=0)
        self.port = self._listener.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def fail(self, path: str, fault: Fault, *, times: float = math.inf) -> None:
        """Let the next `times` requests to a path fail."""
        with self._lock:
            self._faults[path] = (fault, times)

    def heal(self) -> None:
        """Let nothing fail any more."""
        with self._lock:
            self._faults.clear()

    def take_fault(self, path: str) -> Fault | None:
        """What happens to a request to this path now; None: nothing. Counts it."""
        with self._lock:
            self.requests[path] += 1
            fault, times = self._faults.get(path, (None, 0))
            if fault is not None and times > 0:
                self._faults[path] = (fault, times - 1)
                return fault
        return None

    def stop(self) -> None:
        """Accept no connections any more, as a machine without the server."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def restart(self) -> None:
        """Accept connections again."""
        self._start(port=self.port)

    def _start(self, *, port: int) -> None:
        proxy = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.proxy = proxy
                super().setup()

        self._listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._listener.daemon_threads = True
        self._listener.block_on_close = False
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()


@contextmanager
def proxy_of(target: str, *, key: str | None = None) -> Iterator[Proxy]:
    proxy = Proxy(target, key=key)
    try:
        yield proxy
    finally:
        proxy.is_closing.set()
        proxy.stop()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = urlsplit(self.path).path
        self.body = self.proxy.last_body[path] = json.loads(body or b"null")
        fault = self.proxy.take_fault(path)
        try:
            if fault is None:
                self.answer(*self._forward(body))
            else:
                fault(self, lambda: self._forward(body))
        except ConnectionError:
            self.close_connection = True

    do_POST = do_GET

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def break_off(self) -> None:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise ConnectionAbortedError

    def _forward(self, body: bytes) -> tuple[int, bytes]:
        target = self.proxy.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=120)
        names = ("Authorization", "Content-Type")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        if self.proxy.key is not None:
            headers["Authorization"] = f"Bearer {self.proxy.key}"
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:  # the server is gone, so the client's connection breaks too
            self.break_off()
            raise
        finally:
            connection.close()

    def log_message(self, *args: object) -> None:
        """Nothing."""


def status(code: int, words: str) -> Fault:
    """An error, in the form of vLLM's."""
    return lambda handler, _: handler.answer(code, json.dumps({"error": {"message": words, "code": code}}).encode())


def second_door(proxy: Proxy) -> None:
    """Let a proxy be another way to a server that gets its weights through another proxy."""
    done = b'{"success": true}'
    for path in _WEIGHT_PATHS:
        proxy.fail(path, lambda handler, _: handler.answer(200, done))


def vanish(proxy: Proxy) -> None:
    """Let the server be gone until its client has noticed and waits for it, however long that takes."""
    for path, times in {"/resume": 1, "/weight_info": 1, "/health": 2}.items():
        proxy.fail(path, drop, times=times)


def drop(handler: _Handler, _: Forward) -> None:
    """The connection breaks before an answer."""
    handler.break_off()


def only_for(token_ids: list[int], fault: Fault) -> Fault:
    """A fault at one prompt."""

    def its_fault(handler: _Handler, forward: Forward) -> None:
        if handler.body["token_ids"] == token_ids:
            fault(handler, forward)
        else:
            handler.answer(*forward())

    return its_fault


def hang(handler: _Handler, _: Forward) -> None:
    """No answer, ever."""
    handler.proxy.is_closing.wait()


def dribble(handler: _Handler, forward: Forward) -> None:
    """The right answer, one byte a second."""
    code, body = forward()
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    for byte in body:
        handler.wfile.write(bytes([byte]))
        if handler.proxy.is_closing.wait(1):
            return


def change(edit: Callable[[Any], object]) -> Fault:
    """The right answer, edited in place."""

    def fault(handler: _Handler, forward: Forward) -> None:
        code, body = forward()
        answer = json.loads(body)
        edit(answer)
        handler.answer(code, json.dumps(answer).encode())

    return fault
