"""Where servers that come and go are found, and what an elastic fleet makes of them."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import AbsentServerError, WeightSyncError
from prefrl.generation.vllm.elastic import ElasticFleet, Members
from prefrl.generation.vllm.handshake import Requirements
from prefrl.generation.vllm.members import (
    ALIVE_SECONDS,
    RENEWED_SECONDS,
    Folder,
    Listed,
    Name,
    Registration,
    source_of,
)
from tests.unit.generation.scripted import A, B, ScriptedHttp, info
from tests.unit.generation.test_vllm_fleet import Servers, Weights

KEY, OTHER_KEY = "k" * 40, "o" * 40
URL = "http://10.0.0.5:8000"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registered(tmp_path: Path, clock: Clock) -> Registration:
    registration = Registration(tmp_path, URL, key=KEY, clock=clock)
    registration.renew()
    return registration


def test_a_server_is_found_while_it_renews_its_file(tmp_path: Path, clock: Clock, registered: Registration) -> None:
    folder = Folder(tmp_path, KEY, clock)
    assert folder.find().urls == [URL]
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    clock.now += RENEWED_SECONDS / 2
    registered.renew()
    assert file.stat().st_mtime_ns == written, "a sign of life is not written all the time"
    clock.now += ALIVE_SECONDS
    found = folder.find()
    assert found.urls == []
    assert f"{file.name}: the last sign of life of {URL} is from more than 30 s ago" in found.left_out[0]
    registered.renew()
    assert folder.find().urls == [URL]
    registered.leave()
    registered.leave()
    assert folder.find() == type(found)([], [])


def test_a_clock_that_is_wrong_is_told(tmp_path: Path, clock: Clock, registered: Registration) -> None:
    clock.now -= 100
    found = Folder(tmp_path, KEY, clock).find()
    assert "more than 30 s from now, so the clocks of the machines differ" in found.left_out[0]


def test_a_clock_that_is_set_back_does_not_end_the_signs_of_life(
    tmp_path: Path, clock: Clock, registered: Registration
) -> None:
    clock.now -= 3600
    registered.renew()
    assert Folder(tmp_path, KEY, clock).find().urls == [URL]


def test_machines_of_one_name_do_not_share_a_file(tmp_path: Path, clock: Clock, registered: Registration) -> None:
    other = Registration(tmp_path, "http://10.0.0.6:8000", key=KEY, clock=clock)
    other.renew()
    assert Folder(tmp_path, KEY, clock).find().urls == [URL, "http://10.0.0.6:8000"]
    other.leave()
    assert Folder(tmp_path, KEY, clock).find().urls == [URL]


def test_a_file_that_cannot_be_removed_does_not_keep_a_server_from_ending(
    tmp_path: Path, clock: Clock, registered: Registration
) -> None:
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    registered.leave()
    for _ in range(3):
        found = Folder(tmp_path, KEY, clock).find()
        assert (found.urls, len(found.left_out)) == ([], 1)


def test_a_server_of_another_version_is_left_out(tmp_path: Path, clock: Clock) -> None:
    payload = json.dumps({"url": URL, "host": "h", "pid": 1, "time": clock.now, "zone": "a"}).encode()
    seal = hmac.new(KEY.encode(), b"prefrl: a server of this fleet\n" + payload, hashlib.sha256).hexdigest()
    (tmp_path / "new\x1b[2J.json").write_bytes(payload + b"\n" + seal.encode())
    found = Folder(tmp_path, KEY, clock).find()
    assert found.urls == []
    assert found.left_out == [
        "new\\x1b[2J.json: is of another version of prefrl. Start the server with the trainer's version."
    ]


def change_url(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"10.0.0.5", b"10.0.0.6"))


def change_time(path: Path) -> None:
    sign, seal = path.read_text(encoding="utf-8").split("\n")
    path.write_text(f"{json.dumps(json.loads(sign) | {'time': 1e9})}\n{seal}", encoding="utf-8")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [change_url, change_time, cut, empty])
def test_what_was_not_written_with_the_key_is_no_server(
    damage: Any, tmp_path: Path, clock: Clock, registered: Registration
) -> None:
    (file,) = tmp_path.iterdir()
    damage(file)
    found = Folder(tmp_path, KEY, clock).find()
    assert (found.urls, len(found.left_out)) == ([], 1)
    assert "was not written by a server with the key of this run" in found.left_out[0]


def test_another_key_does_not_register(tmp_path: Path, clock: Clock, registered: Registration) -> None:
    assert Folder(tmp_path, OTHER_KEY, clock).find().urls == []
    assert KEY not in next(tmp_path.iterdir()).read_text(encoding="utf-8")


def test_pipes_and_links_are_not_opened(tmp_path: Path, clock: Clock, registered: Registration) -> None:
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    os.mkfifo(fleet / "pipe.json")
    (fleet / "link.json").symlink_to(next(tmp_path.glob("*.json")))
    found = Folder(fleet, KEY, clock).find()
    assert (found.urls, len(found.left_out)) == ([], 2)


def test_loopback_is_of_no_use_on_another_machine(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = Registration(tmp_path, "http://127.0.0.1:8000", key=KEY, clock=clock)
    registration.renew()
    assert Folder(tmp_path, KEY, clock).find().urls == ["http://127.0.0.1:8000"]
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    found = Folder(tmp_path, KEY, clock).find()
    assert found.urls == []
    assert "can only be reached on its own machine" in found.left_out[0]


def test_a_folder_that_does_not_exist_has_no_servers(tmp_path: Path) -> None:
    found = Folder(tmp_path / "none", KEY).find()
    assert (found.urls, found.left_out) == ([], [f"there is no folder {tmp_path / 'none'}"])
    too_long = tmp_path / ("a" * 300)
    assert Folder(too_long, KEY).find().left_out == [f"the folder {too_long} cannot be read: File name too long"]


def test_a_home_is_found_and_a_folder_with_spaces_is_one_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = source_of(["dir:~/a fleet"], key=KEY)
    assert source == Folder(tmp_path / "a fleet", KEY)
    assert source.options == f"--join '{tmp_path}/a fleet'"


def test_each_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str, port: int, type: int) -> list[Any]:
        if name != "engines":
            raise socket.gaierror(-2, "Name or service not known")
        addresses = [("10.0.0.7", port), ("10.0.0.6", port), ("10.0.0.7", port), ("fd00::1", port, 0, 0)]
        return [(socket.AF_INET, type, 6, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    source = source_of(["dns:engines:8001"], key="")
    assert source.find().urls == ["http://10.0.0.6:8001", "http://10.0.0.7:8001", "http://[fd00::1]:8001"]
    assert str(source) == "dns:engines:8001"
    found = Name("other", 1).find()
    assert (found.urls, found.left_out) == ([], ["'other' has no address: [Errno -2] Name or service not known"])


def test_sources_are_those_that_the_option_names(tmp_path: Path) -> None:
    assert source_of([f"dir:{tmp_path}"], key=KEY) == Folder(tmp_path, KEY)
    assert source_of([B, A], key=KEY).find().urls == [A, B]


class Fleeting(Servers):
    """Two servers of which a `Source` names those in `named`."""

    def __init__(self) -> None:
        super().__init__()
        self.named = [A, B]
        self.serves = {A: info(), B: info()}
        self.full: set[str] = set()  # they take no weights

    def answer(self, url: str, path: str, json: Any) -> Any:
        answer = super().answer(url, path, json)
        return answer if path != "/prefrl/info" else {name: getattr(self.serves[url], name) for name in answer}

    def send(self, servers: Any, weights: object, *, version: str) -> None:
        super().send({url: one for url, one in servers.items() if url not in self.full}, weights, version=version)
        if failed := self.full & servers.keys():
            self.versions |= dict.fromkeys(failed, "updating")
            raise WeightSyncError(f"{', '.join(failed)}: no memory")


@pytest.fixture
def servers() -> Fleeting:
    return Fleeting()


def fleet_of(servers: Fleeting, *, min_servers: int = 1, router: str | None = None) -> ElasticFleet:
    class Named(Listed):
        def find(self) -> Any:
            return Listed(servers.named).find()

    return ElasticFleet(
        Members(Named([A, B]), min_servers),
        router=router,
        http=ScriptedHttp(servers.answer),
        weight_sync=servers,
        requirements=Requirements("m", "X", 8, 4, 1, "t", has_adapters=False),
        server_timeout=0.3,
    )


@pytest.fixture
def fleet(servers: Fleeting) -> Iterator[ElasticFleet]:
    return fleet_of(servers)


def test_a_server_joins_between_two_syncs_and_gets_the_weights_first(fleet: ElasticFleet, servers: Fleeting) -> None:
    servers.named = [A]
    fleet.sync(Weights(), version=1)
    assert (fleet.addresses, servers.sent) == ([A], [{A}])
    servers.named = [A, B]
    assert fleet.addresses == [A], "not yet"
    fleet.sync(Weights(), version=1)
    assert (fleet.addresses, servers.sent) == ([A, B], [{A}, {B}])


def test_a_server_that_leaves_or_dies_is_forgotten_and_may_return(fleet: ElasticFleet, servers: Fleeting) -> None:
    fleet.sync(Weights(), version=1)
    servers.gone = {A}
    fleet.recover()
    assert (fleet.addresses, servers.forgotten) == ([B], [A])
    servers.named = [A]
    servers.gone = set()
    servers.versions[A] = "default"
    fleet.sync(Weights(), version=2)
    assert (fleet.addresses, servers.forgotten) == ([A], [A, B])
    assert servers.sent == [{A, B}, {A}]


def test_a_server_that_does_not_take_the_weights_is_set_aside_until_it_does(
    fleet: ElasticFleet, servers: Fleeting, caplog: pytest.LogCaptureFixture
) -> None:
    servers.full = {A}
    fleet.sync(Weights(), version=1)
    assert fleet.addresses == [B]
    assert f"{A}: no memory" in caplog.text
    servers.full = set()
    fleet.sync(Weights(), version=2)
    assert fleet.addresses == [A, B]


def test_a_server_whose_weights_another_run_replaces_is_told(servers: Fleeting) -> None:
    fleet = fleet_of(servers)
    servers.named = [A]
    send = servers.send

    def lose(lacking: Any, weights: object, *, version: str) -> None:
        send(lacking, weights, version=version)
        servers.versions[A] = "other:1"

    servers.send = lose  # type: ignore[method-assign]
    said = rf"0 servers have (?s:.*)\n  {A}: was sent the weights '\w+:1' and has 'other:1'\. Check whether another"
    with pytest.raises(AbsentServerError, match=said):
        fleet.sync(Weights(), version=1)


def test_a_dead_server_is_told_once(
    tmp_path: Path, clock: Clock, registered: Registration, servers: Fleeting, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleet_of(servers)
    folder = Folder(tmp_path, KEY, clock)
    fleet._source = folder
    monkey = Registration(tmp_path, A, key=KEY, clock=clock)
    for version in range(4):
        clock.now += 2 * ALIVE_SECONDS
        monkey.renew()
        fleet.sync(Weights(), version=version)
    assert fleet.addresses == [A]
    assert caplog.text.count(f"the last sign of life of {URL}") == 1


def test_weights_that_no_server_takes_are_an_error_at_once(servers: Fleeting) -> None:
    servers.full = {A, B}
    fleet = fleet_of(servers)
    fleet.server_timeout = 1000
    with pytest.raises(WeightSyncError, match="no memory"):
        fleet.sync(Weights(), version=1)
    assert not fleet.is_sending


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 9}, "size of the vocabulary is 9"),
        ({"max_model_len": 8}, "has max_model_len=8, but the servers"),
    ],
)
def test_a_server_that_does_not_fit_is_set_aside(
    changes: dict[str, int], said: str, fleet: ElasticFleet, servers: Fleeting, caplog: pytest.LogCaptureFixture
) -> None:
    servers.serves[B] = info(**changes)
    fleet.sync(Weights(), version=1)
    assert fleet.addresses == [A]
    assert caplog.text.count(said) == 1
    fleet.sync(Weights(), version=2)
    assert caplog.text.count(said) == 1, "it is not told at each sync"


def test_fewer_servers_than_needed_end_the_run(servers: Fleeting) -> None:
    fleet = fleet_of(servers, min_servers=2)
    servers.gone = {B}
    with pytest.raises(AbsentServerError, match=rf"1 servers have .* min_servers=2 .* 0\.3 s(?s:.*)\n  {B} is gone"):
        fleet.sync(Weights(), version=1)
    assert fleet.stats.wait_s > 0


def test_a_restart_is_counted(fleet: ElasticFleet, servers: Fleeting) -> None:
    fleet.sync(Weights(), version=1)
    servers.versions[A] = "default"
    fleet.sync(Weights(), version=2)
    assert (fleet.stats.restarts, servers.forgotten) == (1, [A])
    assert fleet.addresses == [A, B]


def test_a_router_gets_the_requests_and_the_engines_the_weights(servers: Fleeting) -> None:
    router = "http://router:1"
    fleet = fleet_of(servers, min_servers=2, router=router)
    fleet.sync(Weights(), version=1)
    assert servers.sent == [{A, B}]
    assert fleet.addresses == [router]
    assert fleet.engines(router) == [A, B]
    assert fleet.model_name(router) == "m"
