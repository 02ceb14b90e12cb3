"""Which requests the guard lets through. What it reports about a server is tested with a real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.generation.server import Guard

KEY = "a-secret"
RIGHT = [(b"authorization", b"Bearer a-secret")]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def ask(kind: str, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the application behind the guard was reached, and what the guard sent itself."""
    reached: list[Any] = []
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def receive() -> Any:
        raise AssertionError("nothing is read before it is known who asks")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": headers, "method": "GET"}
    asyncio.run(Guard(application)(scope, receive, send))
    return bool(reached), sent


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"a-secret")],
        [(b"authorization", b"Basic a-secret")],
        [(b"authorization", b"Bearer a-secre")],
        [(b"authorization", b"Bearer a-secret2")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer \xff")],
        [(b"authorization", b"Bearer wrong"), *RIGHT],
        [(b"x-api-key", b"a-secret")],
    ],
)
@pytest.mark.parametrize("path", ["/", "/pause", "/v1/completions", "/prefrl/info", "/health/", "/healthy", "/HEALTH"])
def test_nothing_passes_without_the_right_key(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    reached, sent = ask("http", path, headers)
    assert not reached
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 401
    assert KEY.encode() not in sent[1]["body"]


@pytest.mark.parametrize("path", ["/v1/realtime", "/health", "/ping"])
def test_a_websocket_needs_the_key_on_every_path(path: str) -> None:
    assert ask("websocket", path, []) == (False, [{"type": "websocket.close", "code": 1008}])
    assert ask("websocket", path, RIGHT) == (True, [])


@pytest.mark.parametrize("path", ["/", "/pause", "/v1/completions"])
def test_the_right_key_passes(path: str) -> None:
    assert ask("http", path, RIGHT) == (True, [])


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_open(path: str) -> None:
    assert ask("http", path, []) == (True, [])


def test_start_and_end_of_the_application_pass() -> None:
    assert ask("lifespan", "", []) == (True, [])


@pytest.mark.parametrize("unset", ["", None])
def test_no_server_starts_without_a_key(unset: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if unset is None:
        monkeypatch.delenv("VLLM_API_KEY")
    else:
        monkeypatch.setenv("VLLM_API_KEY", unset)
    with pytest.raises(ConfigError, match="VLLM_API_KEY: not set"):
        ask("http", "/health", [])
