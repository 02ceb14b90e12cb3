"""Every request ends in time, with its answer or with an error that names the request and the server."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from prefrl.http import Http, Overdue, Refused, Unreachable, unreachable_hub
from prefrl.models.modes import hub_or_cache
from tests.patience import PATIENCE

Handle = Callable[[BaseHTTPRequestHandler], None]
is_over = threading.Event()  # of the test


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http(key="sesame")
    yield http
    http.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Handle], str]]:
    """`serve(handle)` gives the URL of a server that answers like that."""
    servers: list[ThreadingHTTPServer] = []
    is_over.clear()

    def start(handle: Handle) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # offers to keep connections

            def do_GET(self) -> None:
                with suppress(ConnectionError):  # a client that gave up; see `rewards/endpoint.py`
                    handle(self)

            do_POST = do_GET

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.block_on_close = True, False
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    is_over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(status: int, body: bytes, **headers: str) -> Handle:
    def handle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return handle


def echo(request: BaseHTTPRequestHandler) -> None:
    body = request.rfile.read(int(request.headers.get("Content-Length") or 0)).decode()
    told = {"method": request.command, "path": request.path, "key": request.headers.get("Authorization"), "body": body}
    answer(200, json.dumps(told).encode())(request)


def silence(request: BaseHTTPRequestHandler) -> None:
    is_over.wait()


def test_a_request_carries_its_body_and_the_key_unless_told_otherwise(
    http: Http, serve: Callable[[Handle], str]
) -> None:
    url = serve(echo)
    told = http.request("POST", f"{url}/a?b=1", timeout=PATIENCE, json={"n": [1, 2]})
    assert (told["method"], told["path"], told["key"]) == ("POST", "/a?b=1", "Bearer sesame")
    assert json.loads(told["body"]) == {"n": [1, 2]}
    assert http.request("GET", url, timeout=PATIENCE, with_key=False)["key"] is None
    assert http.has_key
    stranger = Http(key=None)
    assert stranger.request("GET", url, timeout=PATIENCE)["key"] is None
    assert not stranger.has_key
    stranger.close()


def test_proxies_of_the_environment_are_not_used(
    serve: Callable[[Handle], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    http = Http(key="sesame")
    assert http.request("GET", serve(echo), timeout=PATIENCE)["path"] == "/"
    http.close()


def test_a_redirect_is_not_followed_with_the_key(http: Http, serve: Callable[[Handle], str]) -> None:
    asked: list[str] = []

    def thief(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        echo(request)

    url = serve(answer(307, b"", Location=serve(thief)))
    with pytest.raises(Refused, match="answered 307") as error:
        http.request("POST", url, timeout=PATIENCE, json={})
    assert error.value.status == 307
    assert asked == []


def test_an_answer_without_a_body_is_none(http: Http, serve: Callable[[Handle], str]) -> None:
    assert http.request("GET", serve(answer(200, b"")), timeout=PATIENCE) is None


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, b'{"error": {"message": "max_tokens is 0", "code": 400}}', "answered 400: max_tokens is 0"),
        (401, b'{"error": "Unauthorized"}', "answered 401: Unauthorized"),
        (422, b'{"detail": "no"}', "answered 422: {'detail': 'no'}"),
        (500, b"Internal Server Error", "answered 500: Internal Server Error"),
        (200, b"<html>", "the answer is not JSON: '<html>'"),
    ],
)
def test_an_error_has_the_words_and_the_status_of_the_server(
    status: int, body: bytes, words: str, http: Http, serve: Callable[[Handle], str]
) -> None:
    url = serve(answer(status, body))
    with pytest.raises(Refused) as error:
        http.request("GET", f"{url}/x", timeout=PATIENCE)
    assert str(error.value) == f"GET {url}/x: {words}"
    assert error.value.status == status


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("declares_length", [True, False])
def test_an_answer_that_is_too_large_is_not_read_to_its_end(
    status: int, declares_length: bool, http: Http, serve: Callable[[Handle], str]
) -> None:
    chunk, sent = b"[" * 2**16, []

    def flood(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header(*(("Content-Length", str(2**30)) if declares_length else ("Connection", "close")))
        request.end_headers()
        with suppress(OSError):  # the client has left
            while len(sent) < 2**14:
                request.wfile.write(chunk)
                sent.append(chunk)

    with pytest.raises(Refused, match="the answer has more than 100000 bytes"):
        http.request("GET", serve(flood), timeout=PATIENCE, max_bytes=100_000)
    assert len(sent) < 2**10


def test_a_compressed_answer_is_refused_unread(http: Http, serve: Callable[[Handle], str]) -> None:
    asked: list[str | None] = []

    def bomb(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Accept-Encoding"])
        answer(200, gzip.compress(b"0" * 2**24), **{"Content-Encoding": "gzip"})(request)

    with pytest.raises(Refused, match=r"the answer is compressed \('gzip'\)"):
        http.request("GET", serve(bomb), timeout=PATIENCE)
    assert asked == ["identity"]


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_is_nested_too_deeply_is_refused(
    status: int, http: Http, serve: Callable[[Handle], str]
) -> None:
    with pytest.raises(Refused, match=r"\[\[\["):
        http.request("GET", serve(answer(status, b"[" * 100_000)), timeout=PATIENCE)


def test_what_a_server_says_gives_the_terminal_no_commands(http: Http, serve: Callable[[Handle], str]) -> None:
    with pytest.raises(Refused) as error:
        http.request("GET", serve(answer(500, "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e".encode())), timeout=PATIENCE)
    assert str(error.value).endswith(r"answered 500: \x1b]52;c;ZXZpbA==\x07\x9b2J\u202e")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_not_ready_is_unreachable(status: int, http: Http, serve: Callable[[Handle], str]) -> None:
    with pytest.raises(Unreachable, match=f"answered {status}: starting"):
        http.request("GET", serve(answer(status, b"starting")), timeout=PATIENCE)


def test_nobody_there_is_unreachable(http: Http) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"GET {url}: ConnectError"):
            http.request("GET", url, timeout=PATIENCE)


def test_a_connection_that_breaks_is_unreachable(http: Http, serve: Callable[[Handle], str]) -> None:
    def break_off(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "100")
        request.end_headers()
        request.wfile.write(b"{")
        request.close_connection = True

    with pytest.raises(Unreachable, match="RemoteProtocolError"):
        http.request("GET", serve(break_off), timeout=PATIENCE)


def dribble(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000000")
    request.end_headers()
    with suppress(ConnectionError):  # the client has left
        while not is_over.wait(0.1):
            request.wfile.write(b" ")


@pytest.mark.parametrize("handle", [silence, dribble], ids=["nothing", "a byte now and then"])
def test_an_answer_is_waited_for_until_its_deadline(
    handle: Handle, http: Http, serve: Callable[[Handle], str]
) -> None:
    started = time.monotonic()
    with pytest.raises(Overdue, match=r"no complete answer within 0\.5 s"):
        http.request("GET", serve(handle), timeout=0.5)
    assert 0.5 <= time.monotonic() - started < PATIENCE


def test_a_server_that_closes_its_connections_is_not_taken_for_a_dead_one(
    http: Http, serve: Callable[[Handle], str]
) -> None:
    connections: list[object] = []

    def close_after_an_error(request: BaseHTTPRequestHandler) -> None:
        connections.append(request.client_address)
        answer(500 if len(connections) % 2 else 200, b"{}")(request)

    url = serve(close_after_an_error)
    for _ in range(5):
        with pytest.raises(Refused):
            http.request("GET", url, timeout=PATIENCE)
        assert http.request("GET", url, timeout=PATIENCE) == {}
    assert len(set(connections)) == 10, "a connection was used again"


def test_requests_run_at_the_same_time(http: Http, serve: Callable[[Handle], str]) -> None:
    everybody = threading.Barrier(8, timeout=PATIENCE)

    def wait(request: BaseHTTPRequestHandler) -> None:
        everybody.wait()
        echo(request)

    url = serve(wait)
    work = [http.submit(http.send("GET", f"{url}/{number}", timeout=PATIENCE)) for number in range(8)]
    assert [one.result()["path"] for one in work] == [f"/{number}" for number in range(8)]


def test_closing_breaks_off_what_is_under_way(serve: Callable[[Handle], str]) -> None:
    http = Http()
    has_arrived = threading.Event()

    def notice(request: BaseHTTPRequestHandler) -> None:
        has_arrived.set()
        silence(request)

    work = http.submit(http.send("GET", serve(notice), timeout=10 * PATIENCE))
    assert has_arrived.wait(PATIENCE)
    started = time.monotonic()
    http.close()
    assert time.monotonic() - started < PATIENCE
    assert work.cancelled()
    http.close()


@pytest.mark.parametrize("answers", [True, False])
def test_without_the_hub_a_name_is_looked_up_in_the_cache_alone(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("prefrl.http.unreachable_hub", lambda url: None if answers else f"{url} does not answer")
    (tmp_path / "tinychat").mkdir()
    seen = []

    def load() -> None:
        seen.append(constants.HF_HUB_OFFLINE)
        raise OSError("of the library")

    with pytest.raises(OSError, match=r"library|does not answer") as error, hub_or_cache("tinychatt"):
        load()
    assert seen == [not answers]
    assert not constants.HF_HUB_OFFLINE
    if answers:
        assert str(error.value) == "of the library"
    else:
        remedy = "does not answer. Did you mean 'tinychat'. Give the path .* HF_HOME .* HF_ENDPOINT"
        assert re.search(remedy, str(error.value))


def test_a_path_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prefrl.http.unreachable_hub", lambda _: pytest.fail("asked"))
    (tmp_path / "tinychat").mkdir()
    with hub_or_cache("tinychat"):
        assert constants.is_offline_mode() == constants.HF_HUB_OFFLINE
    for name, remedy in (("./tinychatt", "Did you mean 'tinychat'?"), ("runs/a/model", "Check the path.")):
        with pytest.raises(FileNotFoundError, match=re.escape(remedy)), hub_or_cache(name):
            pytest.fail("loaded")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "does not answer (ConnectError" in str(unreachable_hub(url))
        assert unreachable_hub(url) is unreachable_hub(url)
