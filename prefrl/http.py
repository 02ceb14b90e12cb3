"""HTTP requests, each with a deadline and a limit for its answer, on a separate thread; whether the Hub answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from json import loads
from typing import Any, TypeVar

from prefrl.errors import printable, reason_of

try:  # installed with huggingface_hub: httpx2 from its version 2 on, httpx before
    import httpx2 as httpx
except ImportError:  # pragma: no cover - depends on the installed huggingface_hub
    import httpx  # type: ignore[no-redef]

T = TypeVar("T")
# Status codes of gateways and vLLM while the server behind them is down, starting or too busy.
_NOT_THERE = frozenset({429, 502, 503, 504})
# A host that is down does not refuse connections: it does not answer at all.
_CONNECT_SECONDS = 10.0
_SHOWN_CHARACTERS = 2000
_ANSWER_BYTES = 2**20


class HttpError(Exception):
    """A request failed; the message names the request and its URL, and its control characters are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, max_characters=_SHOWN_CHARACTERS))


class Unreachable(HttpError):
    """The server is not reachable: no connection, a broken connection, or a gateway's status code says so."""


class Overdue(HttpError):
    """The deadline passed before the answer was complete."""


class Refused(HttpError):
    """The server answered with an error.

    Args:
        message: The request and the server's error message.
        status: HTTP status, 4xx or 5xx.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """JSON requests, each with a deadline. Thread-safe.

    Each request opens a new connection: vLLM closes connections after an error, and a closed connection looks like a
    server that died. Proxies from the environment are not used and redirects are not followed, so that only the server
    receives the key.

    Args:
        key: Sent as a bearer token; None: no key is sent.
    """

    def __init__(self, *, key: str | None = None) -> None:
        self._key = key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prefrl-http", daemon=True)
        self._thread.start()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @property
    def has_key(self) -> bool:
        """Whether requests carry a key."""
        return bool(self._key)

    def request(self, method: str, url: str, **options: Any) -> Any:
        """Send a request and wait for its JSON answer, or None if the answer has no body; see `send`."""
        return self.submit(self.send(method, url, **options)).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the request thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def send(
        self,
        method: str,
        url: str,
        *,
        timeout: float,
        json: Any = None,
        with_key: bool = True,
        max_bytes: int = _ANSWER_BYTES,
    ) -> Any:
        """Send one request and read its whole answer.

        Args:
            method: "GET" or "POST".
            url: The full URL.
            timeout: Seconds from now to the last byte of the answer.
            json: The request body.
            with_key: Whether to send the key.
            max_bytes: The most bytes that the body of the answer may have. Reading stops there.

        Returns:
            The JSON of the answer, or None if it has no body.

        Raises:
            Unreachable: The server is not reachable.
            Overdue: The answer was not complete in time.
            Refused: The server answered with an error, with too many bytes, or with a body that is not JSON.
        """
        headers = {"Accept-Encoding": "identity"}
        if self._key and with_key:
            headers["Authorization"] = f"Bearer {self._key}"
        what = f"{method} {url}"
        try:
            async with (
                asyncio.timeout(timeout),
                self._client.stream(method, url, json=json, headers=headers) as answer,
            ):
                status, body = answer.status_code, await _body(answer, what, max_bytes)
        except TimeoutError as error:
            raise Overdue(f"{what}: no complete answer within {timeout:g} s") from error
        except (httpx.TransportError, OSError) as error:
            raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
        if status in _NOT_THERE:
            raise Unreachable(f"{what}: answered {status}: {_text(body)}")
        if status != 200:
            raise Refused(f"{what}: answered {status}: {_reason(body)}", status=status)
        if not body:
            return None
        try:
            return loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{what}: the answer is not JSON: {_text(body)!r}", status=status) from error

    def close(self) -> None:
        """Cancel pending requests and stop the thread."""
        if self._loop.is_closed():
            return
        self.submit(self._cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._client.aclose()


async def _body(answer: Any, what: str, max_bytes: int) -> bytes:
    """The body of an answer, as it was sent."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":  # nothing else was asked for, and a few bytes could decompress to gigabytes
        raise Refused(f"{what}: the answer is compressed ({encoding!r})", status=answer.status_code)
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > max_bytes:
            raise Refused(f"{what}: the answer has more than {max_bytes} bytes", status=answer.status_code)
    return bytes(body)


def _text(body: bytes) -> str:
    return body[:_SHOWN_CHARACTERS].decode(errors="replace")


def _reason(body: bytes) -> str:
    """The message of a vLLM error, or the text."""
    try:
        answer = loads(body)
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        return _text(body)


@cache
def unreachable_hub(url: str) -> str | None:
    """Why the Hub at `url` does not answer, in one attempt; None: it does, with whatever status."""
    from huggingface_hub import get_session

    try:
        get_session().head(url, timeout=_CONNECT_SECONDS)
    except (httpx.HTTPError, OSError) as error:
        return f"{url} does not answer ({reason_of(error)})"
    return None
