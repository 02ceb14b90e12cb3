"""Who gets weights, and what is known of servers that were restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from prefrl.errors import GenerationError, WeightSyncError
from prefrl.generation.server import INFO_PATH, ServerInfo
from prefrl.generation.vllm import fleet as code
from prefrl.generation.vllm.fleet import Fleet
from prefrl.generation.vllm.handshake import PROBE_SECONDS, Requirements
from prefrl.http import Overdue, Unreachable
from tests.unit.generation.scripted import A, B, ScriptedHttp, info


class Servers:
    """Two servers, and a weight sync that reaches them."""

    def __init__(self) -> None:
        self.versions = {A: "default", B: "default"}
        self.sent: list[set[str]] = []
        self.forgotten: list[str] = []
        self.gone: set[str] = set()
        self.error: Exception | None = None
        self.dies: str | None = None  # in the next `send`, and is back at once
        self.keeps = True

    def answer(self, url: str, path: str, json: Any) -> Any:
        if url in self.gone:
            raise Unreachable(f"{url} is gone")
        return {"/health": None, INFO_PATH: asdict(info()), "/weight_info": {"weight_version": self.versions[url]}}[
            path
        ]

    def send(self, servers: Mapping[str, ServerInfo], weights: object, *, version: str) -> None:
        self.sent.append(set(servers))
        if self.dies is not None:
            self.versions[self.dies], self.dies = "default", None
            raise WeightSyncError("broken pipe")
        if self.error is not None:
            raise self.error
        if self.keeps:
            self.versions |= dict.fromkeys(servers, version)

    def forget(self, url: str) -> None:
        self.forgotten.append(url)

    def model_name(self, info: ServerInfo) -> str:
        return info.model


class Weights:
    def lead(self, task: Callable[[], None]) -> None:
        task()


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def fleet(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(code, "_DEATH_SECONDS", 0.05)
    http = ScriptedHttp(servers.answer)
    requirements = Requirements("m", "X", 8, 4, 1, "t", has_adapters=False)
    yield Fleet([A, B], http=http, weight_sync=servers, requirements=requirements, server_timeout=0.3)
    http.close()


def test_only_servers_that_lack_a_version_get_it(fleet: Fleet, servers: Servers) -> None:
    assert not fleet.has_weights
    fleet.sync(Weights(), version=1)
    fleet.sync(Weights(), version=1)
    assert fleet.has_weights
    assert servers.sent == [{A, B}]
    assert set(servers.versions.values()) == {fleet.version} == {f"{fleet.run}:1"}
    servers.versions[B] = "updating"
    fleet.sync(Weights(), version=1)
    assert servers.sent[1:] == [{B}]
    assert (servers.forgotten, fleet.stats.restarts, fleet.model_name(A)) == ([], 0, "m")


def test_a_server_that_was_restarted_is_counted_forgotten_and_gets_the_weights(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    assert fleet.stats.restarts == 0, "a server that never had weights"
    servers.versions[A] = "default"
    fleet.recover()
    assert servers.sent == [{A, B}, {A}]
    assert (servers.forgotten, fleet.stats.restarts) == ([A], 1)


def test_after_invalidate_an_equal_step_is_another_version(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    before = fleet.version
    fleet.invalidate()
    fleet.sync(Weights(), version=1)
    assert fleet.version != before
    assert servers.sent == [{A, B}] * 2
    assert servers.forgotten == [A, B]


def test_a_server_that_lives_and_does_not_take_the_weights_is_an_error_at_once(fleet: Fleet, servers: Servers) -> None:
    servers.error = WeightSyncError("no memory")
    with pytest.raises(WeightSyncError, match="no memory"):
        fleet.sync(Weights(), version=1)
    assert servers.sent == [{A, B}]
    assert not fleet.is_sending


def test_a_server_that_was_restarted_while_weights_were_sent_gets_them_again(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    servers.dies = A
    fleet.sync(Weights(), version=2)
    assert servers.sent == [{A, B}] * 3
    assert (servers.forgotten, fleet.stats.restarts) == ([A], 1)


def test_a_server_that_does_not_come_back_is_an_error(fleet: Fleet, servers: Servers) -> None:
    fleet.sync(Weights(), version=1)
    servers.gone = {A}
    with pytest.raises(GenerationError, match=rf"{A} did not answer within 0\.3 s"):
        fleet.sync(Weights(), version=2)
    assert fleet.stats.wait_s > 0


def test_a_server_that_is_slow_to_tell_its_weights_is_waited_for(
    fleet: Fleet, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.server_timeout = 2 * PROBE_SECONDS
    send = ScriptedHttp.send

    async def slow(http: ScriptedHttp, method: str, url: str, *, timeout: float, **options: Any) -> Any:
        if url.endswith("/weight_info") and timeout <= PROBE_SECONDS:
            raise Overdue("late")
        return await send(http, method, url, timeout=timeout, **options)

    monkeypatch.setattr(ScriptedHttp, "send", slow)
    servers.versions = dict.fromkeys((A, B), f"{fleet.run}:1")
    fleet.sync(Weights(), version=1)
    assert servers.sent == [], "their versions are not known"


def test_weights_that_do_not_stay_are_an_error(fleet: Fleet, servers: Servers) -> None:
    servers.keeps = False
    with pytest.raises(WeightSyncError, match="were sent 3 times, but the server does not have them"):
        fleet.sync(Weights(), version=1)
    assert len(servers.sent) == 3


def test_servers_without_weights_cannot_be_recovered(fleet: Fleet) -> None:
    with pytest.raises(GenerationError, match="call sync first"):
        fleet.recover()
