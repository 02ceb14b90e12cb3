"""A sandbox that is a server: what it is asked, and what it may answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.sandbox import AssertionTest, InputOutputTest, RemoteSandbox, SandboxLimits, Verdict, protocol

TEST = InputOutputTest("1", "2")
Answer = tuple[int, Any]


class Server:
    """Answers what it was told to, one after another, the last one for ever."""

    def __init__(self) -> None:
        self.requests: list[tuple[str | None, dict[str, Any]]] = []
        self.answers: list[Answer] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.headers["Authorization"], body))
                status, answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/run"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(protocol, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.delenv("PREFRL_SANDBOX_KEY", raising=False)
    server = Server()

    def answering(*answers: Answer) -> Server:
        server.answers = list(answers)
        return server

    yield answering
    server.http.shutdown()
    server.http.server_close()


def test_a_test_is_one_request_with_the_key_of_the_environment(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve((200, {"passed": True}), (200, {"passed": False, "reason": "slow"}))
    sandbox = RemoteSandbox(server.url, SandboxLimits(wall_s=2.0))
    assert sandbox.check("python", "x", TEST) == Verdict(True)
    monkeypatch.setenv("PREFRL_SANDBOX_KEY", "sesame")
    assert sandbox.check("python", "y", AssertionTest("assert y")) == Verdict(False, "slow")
    (no_key, first), (key, second) = server.requests
    assert (no_key, key) == (None, "Bearer sesame")
    assert (first["language"], first["code"], first["test"]) == ("python", "x", {"input": "1", "output": "2"})
    assert first["limits"]["wall_s"] == 2.0
    assert second["test"] == {"code": "assert y"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"passed": 1}), "answered .*allowed is an object with `passed`"),
        ((200, {"exit_code": 0}), "allowed is an object with `passed`"),
        ((200, []), "allowed is an object with `passed`"),
        ((200, b"passed"), "is not JSON"),
        ((200, b'"' + b"x" * 2**17), "more than 65536 bytes"),
        ((401, {"error": "who are you?"}), "answered 401: who are you"),
        ((503, {}), "answered 503"),
    ],
)
def test_other_answers_are_errors_and_say_nothing_about_the_completion(
    answer: Answer, message: str, serve: Callable[..., Server]
) -> None:
    server = serve(answer)
    with pytest.raises(RewardError, match=message):
        RemoteSandbox(server.url).check("python", "x", TEST)
    assert len(server.requests) == (3 if answer[0] == 503 else 1)


def test_a_server_that_is_busy_is_asked_again(serve: Callable[..., Server]) -> None:
    server = serve((503, {}), (429, {}), (200, {"passed": True}))
    assert RemoteSandbox(server.url).check("python", "x", TEST).passed


@pytest.mark.parametrize("answer", [(200, {"passed": True}), (200, {"passed": False}), (404, {})])
def test_a_server_that_does_not_judge_is_refused_before_training(answer: Answer, serve: Callable[..., Server]) -> None:
    with pytest.raises(ConfigError, match="sandbox server"):
        RemoteSandbox(serve(answer).url).setup()


def test_a_server_that_judges_is_accepted(serve: Callable[..., Server]) -> None:
    RemoteSandbox(serve((200, {"passed": True}), (200, {"passed": False})).url).setup()


@pytest.mark.parametrize("url", ["127.0.0.1:80", "file:///etc/passwd", "http://", "http://key@host/"])
def test_urls_that_are_none_or_hold_a_key(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        RemoteSandbox(url)
