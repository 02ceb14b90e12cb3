"""A chat endpoint on loopback."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Gets the text of the last message; returns the model's answer, or a status with a body.
Reply = Callable[[str], "str | tuple[int, str]"]


class Endpoint:
    """Answers like `reply`, each after `delay` seconds, and remembers what it was asked."""

    def __init__(self, reply: Reply, *, delay: float = 0.0, finish_reason: str = "stop") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self._at_once = 0
        lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.bodies.append(body)
                    endpoint.paths.append(self.path)
                    endpoint.keys.append(self.headers["Authorization"])
                    endpoint._at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint._at_once)
                time.sleep(delay)
                answer = reply(body["messages"][-1]["content"])
                with lock:
                    endpoint._at_once -= 1
                status, text = answer if isinstance(answer, tuple) else (200, said(answer, finish_reason))
                # A client that gave up meanwhile is no error here. A traceback would be one for others: the thread
                # that prints it parses its source, which CPython 3.11 must not do in two threads at once.
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def said(text: str | None, finish_reason: str = "stop") -> str:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]})
