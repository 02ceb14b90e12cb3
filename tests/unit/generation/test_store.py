"""Changes of weights through a folder or an object store: what is written, and what each server reads of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.spec import AbstractFileSystem

from prefrl.errors import ConfigError, WeightSyncError
from prefrl.generation.weights.delta import HostCopy
from prefrl.generation.weights.store import Link, follow
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Refused
from tests.unit.generation.scripted import A, B, ScriptedHttp, info
from tests.unit.generation.test_delta import Weights

PLACE = "memory://weights/run"
MEMORY = fsspec.filesystem("memory")


class Servers:
    """Servers that follow the messages in a store, as the plugin does."""

    def __init__(self) -> None:
        self.copies = {A: HostCopy(), B: HostCopy()}
        self.requests: Counter[str] = Counter()
        self.paths: list[str] = []  # that were named
        self.lost: list[str] = []  # servers that say yes to the next update and do nothing

    def __call__(self, url: str, path: str, json: Any) -> None:
        if path != "/update_weights":
            return
        self.requests[url] += 1
        if url in self.lost:
            self.lost.remove(url)
            return
        update = json["update_info"]
        self.paths.append(update["path"])
        try:
            follow(self.copies[url], update["path"], [Link(*link) for link in update["chain"]])
        except Exception as error:
            self.copies[url].clear()
            raise Refused(str(error), status=500) from error


@pytest.fixture
def servers() -> Servers:
    return Servers()


def sync_to(place: str, servers: Servers) -> Iterator[WeightSync]:
    http = ScriptedHttp(servers)
    sync = WeightSync(http, method="delta", folder=place, timeout=30.0, over="store")
    yield sync
    sync.close()
    http.close()


@pytest.fixture
def sync(servers: Servers) -> Iterator[WeightSync]:
    yield from sync_to(PLACE, servers)


def send(sync: WeightSync, weights: Any, *urls: str) -> None:
    sync.send({url: info() for url in urls}, weights, version="r:1")


def assert_have(servers: Servers, weights: Weights, *urls: str) -> None:
    for url in urls:
        have = servers.copies[url].weights
        assert have.keys() == weights.of.keys()
        assert all(torch.equal(tensor, weights.of[name]) for name, tensor in have.items())


def messages() -> list[str]:
    """The messages in the store, by their numbers."""
    return sorted({path.split("/")[-2] for path in MEMORY.find("/weights/run")})


def test_all_weights_are_written_once_and_a_server_that_comes_later_reads_what_is_there(tmp_path: Path) -> None:
    for place in (PLACE, str(tmp_path / "new" / "folder")):
        servers, weights, written = Servers(), Weights(), []
        for sync in sync_to(place, servers):
            for step in range(4):
                send(sync, weights, *([A, B] if step == 3 else [A]))
                assert_have(servers, weights, *servers.requests)
                written.append(sync.bytes_sent)
                weights.change(place=step)
        assert written[0] > 80_000
        assert max(written[1:]) < 1000
        assert servers.requests == {A: 4, B: 1}
    assert [*(tmp_path / "new" / "folder").iterdir()] == []
    assert messages() == []


def test_servers_hear_of_a_folder_by_its_whole_path(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have another working directory."""
    weights = Weights()
    monkeypatch.chdir(tmp_path)
    for sync in sync_to("weights", servers):
        send(sync, weights, A)
        assert [*(tmp_path / "weights").iterdir()]
        assert servers.paths
        assert all(path.startswith(f"{tmp_path}/weights/") for path in servers.paths)


def test_a_server_that_lost_messages_reads_them_with_the_next_one(
    servers: Servers, sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    send(sync, weights, A)
    for step in range(2):
        weights.change(place=step)
        servers.lost.append(A)
        send(sync, weights, A)
    weights.change("y")
    send(sync, weights, A)
    send(sync, weights, A)  # nothing has changed
    assert_have(servers, weights, A)
    assert servers.requests == {A: 5}
    assert not caplog.records


@pytest.mark.parametrize("fault", ["restarted", "flipped"])
def test_a_server_with_other_weights_begins_with_all_of_them_in_the_same_sync(
    fault: str, servers: Servers, sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    send(sync, weights, A, B)
    if fault == "restarted":
        servers.copies[A].clear()
    else:  # a bit of a weight that is about to be changed in another place
        servers.copies[A]._weights["x"][50, 50] *= -1
    weights.change()
    with caplog.at_level(logging.WARNING):
        send(sync, weights, A, B)
    assert_have(servers, weights, A, B)
    assert sync.bytes_sent < 1000
    is_told = [f"{A}: loading weights: " in record.message for record in caplog.records]
    assert is_told == ([] if fault == "restarted" else [True])


def test_files_that_are_not_the_trainers_are_not_loaded_and_written_anew(servers: Servers, sync: WeightSync) -> None:
    weights = Weights()
    send(sync, weights, A)
    (path,) = MEMORY.find("/weights/run")
    content = bytearray(MEMORY.cat_file(path))
    content[-1] ^= 1  # of a weight
    MEMORY.pipe_file(path, bytes(content))
    weights.change()
    with pytest.raises(
        WeightSyncError, match=f"{B}: loading weights: .*the weights there are not those of the trainer"
    ):
        send(sync, weights, B)
    assert servers.copies[B].fingerprint is None
    send(sync, weights, A, B)
    assert_have(servers, weights, A, B)
    assert messages() == ["000002"]


def test_another_message_in_place_of_the_trainers_is_not_loaded(servers: Servers) -> None:
    sender, other, weights = HostCopy(), HostCopy(), Weights()
    for number, copy in enumerate((sender, other)):
        message = dict(copy.changes(weights, dtype=None))
        MEMORY.pipe_file(f"/other/{number:06d}/000000.safetensors", torch_file(message))
        weights.change()
    assert sender.fingerprint is not None
    follow(HostCopy(), "memory://other", [Link(0, 1, sender.fingerprint)])
    with pytest.raises(ValueError, match=r"memory://other: the weights there are not those of the trainer"):
        follow(HostCopy(), "memory://other", [Link(1, 1, sender.fingerprint)])


def torch_file(message: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save(message)


def test_when_the_changes_are_as_large_all_weights_are_written_again_and_the_old_ones_deleted(
    servers: Servers, sync: WeightSync
) -> None:
    weights, kept, written = Weights(), [], []
    for step in range(8):
        weights.of["x"] += 1  # half of all
        send(sync, weights, A, *([B] if step > 5 else []))
        kept.append(messages())
        written.append(sync.bytes_sent)
    assert [len(numbers) for numbers in kept] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert kept[4] == ["000004"]
    assert [size > 80_000 for size in written] == [True, False, False, False] * 2
    assert_have(servers, weights, A, B)


def test_what_cannot_be_written_fails_the_sync_and_says_where(
    servers: Servers, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Weights()
    send(sync, weights, A)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(type(MEMORY), "pipe_file", full)
        with pytest.raises(
            WeightSyncError, match=f"sync_folder='{PLACE}': .* written there: OSError: quota exceeded.*a login"
        ):
            send(sync, weights, A)
    weights.change()
    send(sync, weights, A)
    assert_have(servers, weights, A)


def test_a_place_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync_folder='tape://a/prefrl-\w+': Protocol not known: tape"):
        next(sync_to("tape://a", Servers()))


class Buckets(AbstractFileSystem):
    """As s3fs and gcsfs show a store: whoever makes a folder makes its bucket, too. It lists nothing."""

    protocol = "buckets"
    buckets: ClassVar = {"mine"}
    files: ClassVar[dict[str, bytes]] = {}

    def exists(self, path: str, **_: Any) -> bool:
        return path in self.buckets

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.buckets.add(path.partition("/")[0])

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        if path.partition("/")[0] not in self.buckets:
            raise FileNotFoundError("no such bucket")
        self.files[path] = value

    def cat_file(self, path: str, **_: Any) -> bytes:
        return self.files[path]

    def rm(self, path: str, **_: Any) -> None:
        raise PermissionError("delete is not allowed")


@pytest.fixture(autouse=True)
def buckets() -> Iterator[None]:
    fsspec.register_implementation("buckets", Buckets, clobber=True)
    yield
    Buckets.files.clear()


def test_a_bucket_is_used_without_lists_and_one_that_is_not_there_is_not_made(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    for sync in sync_to("buckets://mine/run", servers):
        send(sync, weights, A)
        weights.change()
        send(sync, weights, A, B)
        assert_have(servers, weights, A, B)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "weights were not deleted: PermissionError: delete is not allowed"
    ]
    for sync in sync_to("buckets://mien/run", servers):
        with pytest.raises(
            WeightSyncError, match=r"sync_folder='buckets://mien/run': .*no such bucket\. Check whether"
        ):
            send(sync, weights, A)
    assert Buckets.buckets == {"mine"}


def test_a_server_says_which_file_it_cannot_read_and_why(servers: Servers) -> None:
    weights = Weights()
    for sync in sync_to("buckets://mine/run", servers):
        send(sync, weights, A)
        (path,) = Buckets.files
        del Buckets.files[path]
        with pytest.raises(WeightSyncError, match=f"{path}: the server cannot read it: KeyError.* has a login"):
            send(sync, weights, B)
        send(sync, weights, A, B)
        assert_have(servers, weights, A, B)
