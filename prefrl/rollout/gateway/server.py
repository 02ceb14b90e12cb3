"""The server of sessions: chat APIs over HTTP, on the event loop of the episodes.

What it guards against is an agent, a program that may be written by a model: one that sends too much, too slowly or
nothing, or asks with the key of another episode. Nothing that an agent does ends the server or the other episodes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from prefrl.errors import reason_of
from prefrl.rollout.gateway.chat import CHAT
from prefrl.rollout.gateway.formats import MODEL, Asked, Client, EpisodeOver, Event, Reply, RequestError, WireFormat
from prefrl.rollout.gateway.messages import MESSAGES
from prefrl.rollout.gateway.responses import RESPONSES
from prefrl.rollout.gateway.session import Session

logger = logging.getLogger(__name__)

FORMATS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
COUNT = "/v1/messages/count_tokens"  # as Anthropic's clients ask before they send a conversation


@dataclass(frozen=True)
class Limits:
    """What a client may take."""

    body: int = 16 * 2**20  # bytes of a request: a conversation of a million tokens
    header: int = 64 * 2**10  # bytes
    # Seconds for which a connection may be idle. Twice that may pass until a request has come or an answer been read.
    # Clients drop idle connections sooner, so that none is closed while a request is on its way.
    patience: float = 60.0
    connections: int = 4096  # of all clients together, and never more than half of the files that may be open
    requests: int = 256  # that a session may wait for at the same time


class Gateway:
    """Answers the requests of sessions, each of which has a key. It is only used on one event loop.

    Args:
        host: Address of this machine on which it listens.
        port: Its port; 0: a free one.
        limits: Of clients.
        model: The only model that it lists.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None, model: str = MODEL
    ) -> None:
        self._host, self._port, self._model = host, port, model
        self._limits = limits or Limits()
        # A key is a name and its signature: one that was never given is told from one whose episode is over, and the
        # time that looking it up takes says nothing of others.
        self._secret = secrets.token_bytes(32)
        self.sessions: dict[str, Session] = {}  # by name
        self._num_open: dict[str, int] = {}  # requests that wait for an answer, by name of the session
        self._server: _Server | None = None
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
            is_v6 = ":" in self._host
            family = socket.AF_INET6 if is_v6 else socket.AF_INET
            place = socket.create_server((self._host, self._port), family=family, backlog=1024)
            self._server = _Server(self._app(), self._limits)
            self._work = asyncio.create_task(self._server.serve(sockets=[place]))
            while not self._server.started and not self._work.done():
                await asyncio.sleep(0.005)
            host = f"[{self._host}]" if is_v6 else self._host
            self.url = f"http://{host}:{place.getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        async with self._starting:
            if self._server is not None and self._work is not None:
                self._server.end()
                await self._work
                self._server = None

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    @contextmanager
    def serving(self, session: Session) -> Iterator[Client]:
        """Inside this context, the session's requests are answered."""
        name = secrets.token_hex(16)
        self.sessions[name] = session
        try:
            yield Client(self.url, f"sk-{name}-{self._signature(name)}", credit=session.credit)
        finally:
            session.is_over = True
            del self.sessions[name]

    def _signature(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), "sha256").hexdigest()

    def _app(self) -> Starlette:
        return Starlette(routes=self.routes(), exception_handlers={HTTPException: _unknown})

    def routes(self) -> list[Route]:
        """What it answers."""
        routes = [Route(path, self._answer, methods=["POST"]) for path in (*FORMATS, COUNT)]
        models = [Route(path, self._models, methods=["GET"]) for path in ("/v1/models", "/v1/models/{id:path}")]
        return [*routes, *models]

    async def _answer(self, request: Request) -> Response:
        form = FORMATS.get(request.url.path, MESSAGES)
        try:
            name = self.name_of(request)
            with self._counted(name):
                body = await self.body_of(request)
                asked = form.read(body)
                session = self._session(name)
                if request.url.path == COUNT:
                    return JSONResponse({"input_tokens": await session.num_tokens(asked)})
                is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
                reply = await _while_connected(request, session, asked, is_retry)
                await self.answered(session)
        except RequestError as error:
            return refusal(form, error)
        except Exception as error:  # of the sampler; the episode's own error is told where it is played
            logger.debug("a request was not answered", exc_info=True)
            return refusal(form, RequestError(f"the model did not answer: {reason_of(error)}", status=500))
        if body.get("stream"):
            return Response(b"".join(map(_encoded, form.events(reply, body))), media_type="text/event-stream")
        return JSONResponse(form.write(reply, body))

    async def answered(self, session: Session) -> None:
        """Called when a session has an answer, before that is sent."""

    def name_of(self, request: Request) -> str:
        """The name of the session whose key a request has.

        Raises:
            RequestError: It has no key that was ever given.
        """
        name, _, signature = key_of(request).removeprefix("sk-").partition("-")
        if not hmac.compare_digest(self._signature(name).encode(), signature.encode()):
            raise RequestError("the key is unknown: use client.api_key", status=401, code="invalid_api_key")
        return name

    def _session(self, name: str) -> Session:
        if name not in self.sessions:
            raise EpisodeOver
        return self.sessions[name]

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """Count a request among those of its session that wait for an answer.

        Raises:
            RequestError: There are too many, or the session is over.
        """
        limit, number = self._limits.requests, self._num_open.get(name, 0)
        if max(number, self._session(name).num_open) >= limit:  # the latter also has those of clients that hung up
            text = f"an episode may wait for {limit} answers at the same time"
            raise RequestError(text, status=429, code="rate_limit_exceeded")
        self._num_open[name] = number + 1
        try:
            yield
        finally:
            self._num_open[name] -= 1
            if not self._num_open[name]:
                del self._num_open[name]

    async def _models(self, request: Request) -> Response:
        """The only model, with the fields of both OpenAI and Anthropic."""
        model = self._model
        wanted = request.path_params.get("id", model)
        try:
            self._session(self.name_of(request))
            if wanted != model:
                raise RequestError(f"model {wanted!r:.200}: the only one is {model!r}", status=404)
        except RequestError as error:
            return refusal(_form_of(request), error)
        began = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
        about = {"id": model, "object": "model", "type": "model", "display_name": model, "owned_by": "prefrl", **began}
        if "id" in request.path_params:
            return JSONResponse(about)
        ends = {"first_id": model, "last_id": model, "has_more": False}
        return JSONResponse({"object": "list", "data": [about], **ends})

    async def body_of(self, request: Request) -> dict[str, Any]:
        """The JSON object that was sent.

        Raises:
            RequestError: It is too large, or something else.
        """
        return await _body(request, self._limits.body)


def key_of(request: Request) -> str:
    """The key that a request has, as OpenAI's or Anthropic's clients send it; empty: it has none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = request.headers.get("x-api-key", "")
    return key.strip()


async def _while_connected(request: Request, session: Session, asked: Asked, is_retry: bool) -> Reply:
    """The answer of a session, which is told if the client hangs up before.

    Raises:
        RequestError: It cannot be answered, or nobody waits for it any more.
    """
    answer = asyncio.ensure_future(session.answer(asked, is_retry=is_retry))
    hung_up = asyncio.ensure_future(request.receive())  # returns nothing else, since the body has been read
    try:
        await asyncio.wait({answer, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise RequestError("the client has hung up", status=499)
    finally:
        answer.cancel()
        hung_up.cancel()


async def _body(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object that was sent.

    Raises:
        RequestError: It is too large, or something else.
    """
    too_large = RequestError(f"a request may have at most {limit} bytes", status=413)
    if int(request.headers.get("content-length", "0")) > limit:  # h11 lets only digits through
        raise too_large
    whole = bytearray()
    async for part in request.stream():
        whole += part
        if len(whole) > limit:
            raise too_large
    try:
        body = json.loads(whole, parse_int=_integer)
        if b"\\ud" in whole.lower():  # half of a character, which no tokenizer takes
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {reason_of(error)}") from error
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def _integer(digits: str) -> int:
    """A number that a float can be, so that any number of a request can be compared with its bounds."""
    float(value := int(digits))
    return value


def _form_of(request: Request) -> WireFormat:
    return MESSAGES if "anthropic-version" in request.headers else CHAT


def refusal(form: WireFormat, error: RequestError) -> Response:
    """An error, as a format tells it."""
    return JSONResponse(form.error(error), status_code=error.status)


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = f"{request.method} {request.url.path:.200} is not known: use POST {', '.join(FORMATS)}, or GET /v1/models"
    return refusal(_form_of(request), RequestError(text, status=status))


def _encoded(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class _Server(uvicorn.Server):
    """A server inside another program, whose signals and logs it leaves alone."""

    def __init__(self, app: Starlette, limits: Limits) -> None:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num_files != resource.RLIM_INFINITY:  # the rest is for the training, such as its checkpoints
            limits = replace(limits, connections=min(limits.connections, num_files // 2))

        def connection(**kwargs: Any) -> _Connection:
            return _Connection(limits, **kwargs)

        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]  # it is only called
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=limits.header,
            timeout_keep_alive=max(1, round(limits.patience)),
        )
        super().__init__(config)

    def capture_signals(self) -> Any:
        """Nothing is captured."""
        return nullcontext()

    def end(self) -> None:
        """Let `serve` return, without waiting for any client."""
        for listener in self.servers:
            listener.close()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        self.should_exit = self.force_exit = True


# Of connections: what an agent sends is no matter for the log, a defect of the server is.
_of_connections = logging.Logger("prefrl.rollout.gateway.connections", logging.ERROR)


class _Connection(H11Protocol):
    """A connection whose client has a limited time to send a request and to read the answer."""

    def __init__(self, limits: Limits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.logger = self.access_logger = _of_connections
        self.access_log = False
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`, as all that follows."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Begin to count the time when the client is to do something, and stop when it has done so."""
        is_asked = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if is_asked and not self.flow.write_paused:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(2 * self._limits.patience, self.transport.abort)
