"""The server of sessions: chat APIs over HTTP, on the event loop of the episodes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefrl.errors import EpisodeError, reason_of
from prefrl.rollout.gateway.chat import CHAT
from prefrl.rollout.gateway.formats import Event, RequestError, WireFormat
from prefrl.rollout.gateway.messages import MESSAGES
from prefrl.rollout.gateway.responses import RESPONSES
from prefrl.rollout.gateway.session import Session

logger = logging.getLogger(__name__)

FORMATS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
MODEL = "policy"
_LARGEST_BODY = 32 * 2**20  # bytes
_MAX_CONNECTIONS = 4096


@dataclass(frozen=True)
class Client:
    """What an agent needs to ask the policy."""

    root: str  # the URL without a path, as Anthropic's client takes it
    api_key: str  # of this episode
    model: str = MODEL
    credit: Callable[[float], None] | None = field(default=None, repr=False, compare=False)

    def reward(self, value: float) -> None:
        """Add to the reward of the policy's last turn. The episode's is the sum of these and what the agent returns.

        Args:
            value: `turn_credit` says what it means for the turns before.
        Raises:
            EpisodeError: The policy has not answered yet, or the value is not finite.
        """
        if self.credit is None:
            raise EpisodeError("client.reward: nothing is learned from this client's answers")
        self.credit(value)

    @property
    def base_url(self) -> str:
        """The URL as OpenAI's client takes it."""
        return f"{self.root}/v1"

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, str]:
        """Arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""
        return {"base_url": self.root, "api_key": self.api_key}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that clients read, and an identifier of the episode."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.api_key,
            "PREFRL_SESSION": hashlib.sha256(self.api_key.encode()).hexdigest()[:16],
        }


class Gateway:
    """Answers the requests of sessions, each of which has a key. It is only used on one event loop.

    Args:
        host: Address of this machine on which it listens.
        port: Its port; 0: a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._sessions: dict[bytes, Session] = {}  # by hash of the key, so that looking one up tells nothing of others
        self._server: uvicorn.Server | None = None
        self._work: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.url = ""

    async def start(self) -> None:
        """Listen, if it does not do so yet.

        Raises:
            OSError: The address cannot be used.
        """
        async with self._starting:
            if self._server is not None:
                return
            place = socket.create_server((self._host, self._port), backlog=_MAX_CONNECTIONS)
            app = Starlette(
                routes=[
                    *(Route(path, self._answer, methods=["POST"]) for path in FORMATS),
                    Route("/v1/models", self._models, methods=["GET"]),
                ],
                exception_handlers={404: _unknown, 405: _unknown},
            )
            config = uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", limit_concurrency=_MAX_CONNECTIONS
            )
            self._server = uvicorn.Server(config)
            self._work = asyncio.create_task(self._server.serve(sockets=[place]))
            while not self._server.started and not self._work.done():
                await asyncio.sleep(0.005)
            self.url = f"http://{self._host}:{place.getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None and self._work is not None:
            self._server.should_exit = self._server.force_exit = True
            with suppress(asyncio.CancelledError):
                await self._work
            self._server = None

    @contextmanager
    def serving(self, session: Session) -> Iterator[Client]:
        """Inside this context, the session's requests are answered."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[_hash(key)] = session
        try:
            yield Client(self.url, key, credit=session.credit)
        finally:
            session.is_over = True
            del self._sessions[_hash(key)]

    async def _answer(self, request: Request) -> Response:
        form = FORMATS[request.url.path]
        try:
            session = self._session(request)
            body = await _body(request)
            asked = form.read(body)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            reply = await session.answer(asked, is_retry=is_retry)
        except RequestError as error:
            return JSONResponse(form.error(error), status_code=error.status)
        except Exception as error:  # of the sampler; the episode's own error is told where it is played
            logger.debug("a request was not answered", exc_info=True)
            failed = RequestError(f"the model did not answer: {reason_of(error)}", status=500)
            return JSONResponse(form.error(failed), status_code=500)
        if body.get("stream"):
            return Response(b"".join(map(_encoded, form.events(reply, body))), media_type="text/event-stream")
        return JSONResponse(form.write(reply, body))

    def _session(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        digest = _hash(key)
        for known, session in self._sessions.items():
            if hmac.compare_digest(known, digest):
                return session
        raise RequestError("the key is unknown, or its episode is over", status=401, code="invalid_api_key")

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except RequestError as error:
            return JSONResponse(CHAT.error(error), status_code=error.status)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "prefrl"}
        return JSONResponse({"object": "list", "data": [model], "has_more": False})


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent.

    Raises:
        RequestError: It is too large, or something else.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _LARGEST_BODY:
            raise RequestError(f"a request may have at most {_LARGEST_BODY} bytes", status=413)
        parts.append(part)
    try:
        body = json.loads(b"".join(parts))
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


async def _unknown(request: Request, _: Exception) -> Response:
    error = RequestError(
        f"{request.method} {request.url.path} is not known: use POST {', '.join(FORMATS)}, or GET /v1/models",
        status=404,
    )
    form: WireFormat = MESSAGES if "anthropic-version" in request.headers else CHAT
    return JSONResponse(form.error(error), status_code=404)


def _encoded(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
