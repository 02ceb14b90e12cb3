"""`prefrl watch`: the page about a run, kept up to date, on this machine's loopback interface."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from annotated_types import Ge, Lt

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, opt
from prefrl.scripts.command import command
from prefrl.scripts.report.command import RunArguments
from prefrl.scripts.report.page import page

__all__ = ["LivePage", "main", "serve"]

_LOOPBACK = "127.0.0.1"
_WATCHED = ("*.json", "*.jsonl", "checkpoint-*", "nan-step-*", "completions", "evaluations")


@dataclass
class WatchArguments(RunArguments):
    """The runs, and the address of the page."""

    port: Annotated[int, Ge(0), Lt(2**16)] = opt(8765, "Port of the page; 0: any free one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)


@command(
    "watch",
    WatchArguments,
    about="Show a run in the browser, while it trains or later. Only this machine can open the page, with the address "
    "that is printed: it contains a random token, which keeps out other users. "
    "Example: prefrl watch runs/a",
    takes_config=False,
    positional=("run", "other"),
)
def main(options: WatchArguments) -> int:
    """Serve the page until Ctrl-C."""
    live = LivePage(options.folders())
    live.current()
    with serve(live, options.port) as server:
        print(f"http://{_LOOPBACK}:{server.server_port}{live.path}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class LivePage:
    """The page of today's files: it is made anew when a file has changed.

    Args:
        folders: `output_dir` of one run, or of two.

    Attributes:
        path: The page's path on the server, with a random token: the page shows prompts and completions, and every
            user of the machine can reach the port.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.path = f"/?token={secrets.token_urlsafe(32)}"
        self._folders = list(folders)
        self._lock = Lock()  # guards what follows
        self._stamp = ""
        self._page = b""

    def current(self) -> tuple[str, bytes]:
        """The page and its tag, which changes with it.

        Raises:
            ConfigError: A folder is not that of a run, or not any more.
        """
        with self._lock:
            stamp = _stamp_of(self._folders)
            if stamp != self._stamp:
                self._page = page(self._folders, is_live=True).encode()
                self._stamp = stamp
            return f'"{self._stamp}"', self._page


def serve(live: LivePage, port: int) -> ThreadingHTTPServer:
    """A server of the page on the loopback interface; it serves once `serve_forever` is called.

    Raises:
        ConfigError: The port is taken.
    """
    try:
        return ThreadingHTTPServer((_LOOPBACK, port), partial(_Handler, live))
    except OSError as error:
        raise ConfigError(f"port={port}: {error.strerror}. Choose another one with --port, or 0.") from error


class _Handler(BaseHTTPRequestHandler):
    """Answers the browser on this machine that has the token."""

    def __init__(self, live: LivePage, *arguments: Any) -> None:
        self._live = live
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page; nothing if the browser has it already."""
        # A site whose name resolves to this machine could read the page otherwise.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_LOOPBACK, "localhost"):
            self.send_error(403, "only for this machine")
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        if not hmac.compare_digest(self.path.encode(), self._live.path.encode()):
            self.send_error(403, "open the address that prefrl watch printed: it ends with a token")
            return
        try:
            tag, body = self._live.current()
        except ConfigError:
            self.send_error(503, "the folder of the run is gone")
            return
        if self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            self.end_headers()
            return
        self.send_response(200)
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body)), "ETag": tag}
        headers |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print no line for each request."""


def _stamp_of(folders: Sequence[Path]) -> str:
    """A hash of the sizes and times of the files that the page is made of."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for pattern in _WATCHED for path in folder.glob(pattern)):
            try:
                about = path.stat()
            except OSError:
                continue
            found.update(f"{path}{about.st_mtime_ns}{about.st_size}\n".encode())
    return found.hexdigest()[:16]
