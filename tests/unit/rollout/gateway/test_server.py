"""What clients do that are slow, broken, greedy or of another episode; and that nothing is left of a server."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from prefrl.rollout.gateway.formats import Client
from prefrl.rollout.gateway.server import COUNT, Gateway, Limits
from tests.patience import PATIENCE, before_a_deadline, wait_until
from tests.unit.rollout.gateway.served import Served

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "policy", "messages": MESSAGES}
KEYS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(Limits(body=100_000, header=4096, patience=PATIENCE)) as served:
        yield served


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=PATIENCE, trust_env=False) as web:
        yield web


def say(turn: int) -> str:
    return f"answer {turn}"


def ask(web: httpx.Client, client: Client, path: str = KEYS[0], **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {client.api_key}", **options.pop("headers", {})}
    return web.post(f"{client.root}{path}", headers=headers, **{"json": CHAT, **options})


def raw(client: Client, data: bytes) -> bytes:
    """What is answered to bytes, until the connection is closed."""
    with connected(client) as place:
        place.sendall(data)
        return rest(place)


def connected(client: Client) -> socket.socket:
    host, _, port = client.root.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def rest(place: socket.socket) -> bytes:
    answer = b""
    try:
        while part := place.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def request(client: Client, body: bytes, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"x-api-key: {client.api_key}", *more]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def test_a_key_opens_its_own_session_only(served: Served, web: httpx.Client) -> None:
    with served.session(lambda _: "one") as (one, of_one), served.session(lambda _: "two") as (two, of_two):
        assert one.api_key != two.api_key
        assert ask(web, two).json()["choices"][0]["message"]["content"] == "two"
        assert (len(of_one.turns), len(of_two.turns)) == (0, 1)
        name, signature = one.api_key.rsplit("-", 1)
        of_both = f"{name}-{two.api_key.rsplit('-', 1)[1]}"
        for key in (
            "",
            "sk-",
            "x",
            of_both,
            f"{name}-",
            signature,
            f"{one.api_key}0",
            one.api_key[:-1],
            "sk-\u00fc-x",
        ):
            refused = ask(web, one, headers={"authorization": f"Bearer {key}".strip().encode()})
            assert refused.status_code == 401, key
        assert (len(of_one.turns), len(of_two.turns)) == (0, 1)
    assert one.api_key not in repr(one)


def test_keys_are_compared_in_constant_time(
    served: Served, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *two: compared.append(two) or original(*two))
    with served.session(say) as (client, _):
        signature = client.api_key.rpartition("-")[2].encode()
        assert ask(web, client).status_code == 200
        assert ask(web, client, headers={"authorization": f"Bearer {client.api_key[:-1]}"}).status_code == 401
    assert compared == [(signature, signature), (signature, signature[:-1])]


def test_a_stored_answer_is_not_given_to_another_session(served: Served, web: httpx.Client) -> None:
    with served.session(lambda _: "one") as (one, _), served.session(lambda _: "two") as (two, of_two):
        ask(web, one)
        again = ask(web, two, headers={"x-stainless-retry-count": "1"})
        assert again.json()["choices"][0]["message"]["content"] == "two"
        assert len(of_two.turns) == 1


def test_nothing_tells_of_sessions(served: Served, web: httpx.Client) -> None:
    with served.session(say) as (client, _):
        headers = {"authorization": f"Bearer {client.api_key}"}
        for path in ("/", "/v1", "/v1/sessions", "/v1/responses", "/docs", "/openapi.json", "/metrics", "/health"):
            answer = web.get(f"{client.root}{path}", headers=headers)
            assert answer.status_code in (404, 405)
            assert client.api_key.rpartition("-")[2] not in answer.text


def test_after_its_episode_a_key_is_of_no_use(served: Served, web: httpx.Client) -> None:
    with served.session(say) as (client, session):
        pass
    for path in KEYS:
        assert ask(web, client, path, json={}).status_code == 410
    assert session.turns == []


def test_a_request_that_waits_is_told_that_the_episode_is_over(served: Served, web: httpx.Client) -> None:
    asked, answers = threading.Event(), []

    async def never() -> str:
        asked.set()
        await asyncio.sleep(10 * PATIENCE)
        return ""

    with served.session(lambda _: never()) as (client, session):
        thread = threading.Thread(target=lambda: answers.append(ask(web, client)))
        thread.start()
        assert asked.wait(PATIENCE)
    thread.join(PATIENCE)
    assert [answer.status_code for answer in answers] == [410]
    assert session.turns == []


@pytest.mark.parametrize(
    ("path", "options", "status", "message"),
    [
        (KEYS[0], {"content": b"{"}, 400, "the body is not JSON"),
        (KEYS[0], {"content": b"\xff\xfe"}, 400, "the body is not JSON"),
        (KEYS[0], {"content": b"[" * 90_000}, 400, "the body is not JSON"),
        (KEYS[0], {"content": b'{"messages": [{"role": "user", "content": "\\ud800"}]}'}, 400, "the body is not JSON"),
        (KEYS[0], {"content": b'{"temperature": 1' + b"0" * 400 + b"}"}, 400, "the body is not JSON: OverflowError"),
        (KEYS[0], {"json": []}, 400, "the body is not a JSON object"),
        (KEYS[0], {"json": {}}, 400, "messages=None: must be a JSON array"),
        (KEYS[1], {"json": {}}, 400, "input=None: must be a JSON array"),
        (KEYS[2], {"json": {"messages": []}}, 400, "messages: the last one must not be of the assistant"),
        (COUNT, {"json": {"messages": []}}, 400, "messages: there are none"),
        (KEYS[2], {"content": b"x" * 100_001}, 413, "a request may have at most 100000 bytes"),
        (KEYS[2], {"content": (b"x" * 50_000 for _ in range(3))}, 413, "a request may have at most 100000 bytes"),
        (
            "/v1/embeddings",
            {},
            404,
            "POST /v1/embeddings is not known: use POST /v1/chat/completions, /v1/responses, ",
        ),
        ("/v1/models", {}, 405, "POST /v1/models is not known: use POST /v1/chat/completions, /v1/responses, "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_told_what_is_wrong(
    path: str, options: Any, status: int, message: str, served: Served, web: httpx.Client
) -> None:
    with served.session(say) as (client, session):
        refused = ask(web, client, path, **options)
        assert refused.status_code == status
        assert refused.json()["error"]["message"].startswith(message)
        assert session.turns == []
        assert ask(web, client).status_code == 200  # on the same connection, where one may go on


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # the beginning of TLS
        b"GET / HTTP/9\r\n\r\n",
        b"\r\n\r\n\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 70_000,  # a header that does not end
    ],
    ids=["tls", "version", "zeros", "no host", "negative", "two lengths", "chunks", "header"],
)
def test_what_is_not_http_ends_its_own_connection_only(
    data: bytes, served: Served, web: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with served.session(say) as (client, _):
        answer = raw(client, data)
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 401", b"")
        assert ask(web, client).status_code == 200
    assert caplog.records == []


def test_models_are_those_of_both_providers(served: Served, web: httpx.Client) -> None:
    with served.session(say) as (client, _):
        url, headers = f"{client.base_url}/models", {"x-api-key": client.api_key}
        (model,) = web.get(url, headers=headers).json()["data"]
        assert web.get(f"{url}/policy", headers=headers).json() == model
        assert (model["id"], model["object"], model["type"]) == ("policy", "model", "model")
        assert web.get(f"{url}/gpt-9", headers=headers).status_code == 404
        assert web.get(url).status_code == 401
        of_anthropic = web.get(url, headers={"anthropic-version": "2023-06-01"}).json()
        assert of_anthropic["error"]["type"] == "authentication_error"
        assert ask(web, client, json={**CHAT, "model": "gpt-9"}).json()["model"] == "gpt-9"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: KEY\r\ncontent-length: 100\r\n\r\n{",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: KEY\r\n\r\nPOST",
    ],
    ids=["nothing", "header", "body", "second request"],
)
def test_a_client_that_is_slow_loses_its_connection(sent: bytes) -> None:
    with Served(Limits(patience=0.2)) as served, served.session(say) as (client, session), connected(client) as place:
        place.sendall(sent.replace(b"KEY", client.api_key.encode()))
        rest(place)  # or the test would time out
        assert session.turns == []


def test_a_client_that_sends_a_byte_now_and_then_loses_its_connection() -> None:
    with Served(Limits(patience=0.2)) as served, served.session(say) as (client, session), connected(client) as place:
        place.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")

        def is_closed() -> bool:
            try:
                place.sendall(b"a: b\r\n")
            except OSError:
                return True
            return False

        assert wait_until(is_closed)
        assert session.turns == []


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    # The answer repeats the metadata, which are more than the buffers of a connection.
    body = json.dumps({"input": "hi", "metadata": {"x": "y" * 12_000_000}}).encode()

    def attempt(seconds: float) -> bool | None:
        with Served(Limits(patience=seconds)) as served, served.session(say) as (client, session):
            with connected(client) as place:
                try:
                    place.sendall(request(client, body).replace(b"chat/completions", b"responses"))
                except OSError:
                    return None
                is_closed = wait_until(lambda: not served.num_connections)
            return is_closed if session.turns else None

    assert before_a_deadline(attempt)


def test_a_client_that_hangs_up_is_not_waited_for(served: Served, web: httpx.Client) -> None:
    asked, go_on = threading.Event(), asyncio.Event()

    async def late() -> str:
        asked.set()
        await go_on.wait()
        return "late"

    with served.session(lambda turn: late() if turn == 0 else "new") as (client, session):
        with connected(client) as place:
            place.sendall(request(client, json.dumps(CHAT).encode()))
            assert asked.wait(PATIENCE)
        assert wait_until(lambda: served.num_connections <= 1)  # that of `web`
        served.call(go_on.set)
        assert ask(web, client).json()["choices"][0]["message"]["content"] == "late"  # it asks again
        assert len(session.turns) == 1


def test_connections_and_requests_are_limited(web: httpx.Client) -> None:
    asked, go_on = threading.Semaphore(0), asyncio.Event()

    async def late() -> str:
        asked.release()
        await go_on.wait()
        return "late"

    with (
        Served(Limits(connections=3, requests=2)) as served,
        served.session(lambda _: late()) as (client, session),
        served.session(say) as (other, _),
        connected(client) as one,
        connected(client) as two,
    ):
        for number, place in enumerate((one, two)):
            body = {"messages": [{"role": "user", "content": str(number)}]}
            place.sendall(request(client, json.dumps(body).encode(), "connection: close"))
            assert asked.acquire(timeout=PATIENCE)
        refused = ask(web, client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert ask(web, other).status_code == 200  # others have places of their own
        assert raw(client, b"") == b""  # the fourth connection
        served.call(go_on.set)
        assert all(rest(place).startswith(b"HTTP/1.1 200") for place in (one, two))
        assert ask(web, client).status_code == 200
        assert len(session.turns) == 3


def test_requests_of_one_connection_are_answered_one_after_another(served: Served) -> None:
    with served.session(say) as (client, session), connected(client) as place:
        body = json.dumps(CHAT).encode()
        place.sendall(request(client, body) + request(client, body, "connection: close"))
        answer = rest(place)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b"answer 0") < answer.index(b"answer 1")
    assert len(session.turns) == 2


@pytest.mark.parametrize("path", KEYS)
def test_an_error_of_the_sampler_is_the_servers(path: str, served: Served, web: httpx.Client) -> None:
    body: dict[str, Any] = {"input": MESSAGES} if path == KEYS[1] else CHAT
    with served.session(lambda _: RuntimeError("no device")) as (client, _):
        failed = ask(web, client, path, json=body)
    assert failed.status_code == 500
    kind = "api_error" if path == KEYS[2] else "server_error"
    assert failed.json()["error"]["type"] == kind
    assert failed.json()["error"]["message"] == "the model did not answer: RuntimeError: no device"


def test_a_server_leaves_signals_and_logs_alone_and_nothing_open() -> None:
    def state() -> Any:
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        loggers = [logging.getLogger(name) for name in (None, "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")]
        logs = [(one.level, one.propagate, one.disabled, list(one.handlers)) for one in loggers]
        return signals, logs, sorted(os.listdir("/proc/self/fd")), sorted(one.name for one in threading.enumerate())

    async def never() -> str:
        await asyncio.sleep(10 * PATIENCE)
        return ""

    before = state()
    with Served() as served, served.session(lambda _: never()) as (client, _):
        idle, half, waiting = (connected(client) for _ in range(3))
        half.sendall(b"POST /v1/messages HTTP/1.1\r\n")
        waiting.sendall(request(client, json.dumps(CHAT).encode()))
        assert wait_until(lambda: served.num_connections == 3)
        assert state()[:2] == before[:2]
        served.close()  # while clients are there
        for place in (idle, half, waiting):
            assert rest(place) == b""
            place.close()

    def is_as_before() -> bool:
        now = state()  # what earlier tests have left may be gone by now
        return now[:2] == before[:2] and all(
            Counter(one) <= Counter(was) for one, was in zip(now[2:], before[2:], strict=True)
        )

    assert wait_until(is_as_before), (before, state())


def test_signals_are_left_alone_on_the_main_thread_too() -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def during() -> tuple[list[Any], list[Any]]:
        before, gateway = handlers(), Gateway()
        await gateway.start()
        try:
            return before, handlers()
        finally:
            await gateway.close()

    before, then = asyncio.run(during())
    assert then == before


def test_it_listens_on_one_address_of_this_machine_only(served: Served) -> None:
    with served.session(say) as (client, _):
        port = int(client.root.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=PATIENCE)
