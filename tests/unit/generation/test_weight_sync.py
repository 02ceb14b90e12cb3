"""The parts of a weight sync, each alone. That servers compute with what arrives is proved in tests/vllm."""

from __future__ import annotations

import gc
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prefrl.errors import WeightSyncError
from prefrl.generation.weights import process_group, wire
from prefrl.generation.weights.sync import UPDATING, WeightSync
from prefrl.generation.weights.transfer import (
    ADAPTER,
    AdapterSync,
    FileSync,
    GroupSync,
    PrivateFolder,
    Receiver,
    Transfer,
)
from prefrl.http import Overdue, Refused, Unreachable
from tests.unit.generation.scripted import A, B, ScriptedHttp, info

LOCAL = "http://127.0.0.1:1"


class Weights:
    """Two weights, and an adapter of four bytes."""

    is_quantized = False
    has_adapter = True

    def __init__(self, *names: str) -> None:
        self.names = names or ("x", "y")
        self.num_read = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate(self.names):
            self.num_read += 1
            yield name, torch.full((3,), float(number))

    def base(self) -> Weights:
        return self

    def save_adapter(self, folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"1234")


def transfer_to(http: ScriptedHttp, *urls: str) -> tuple[Transfer, list[Receiver]]:
    servers = [Receiver(url, info()) for url in urls]
    return Transfer(http, known=servers, timeout=30.0), servers


def test_a_folder_is_private_and_ends_with_its_owner_or_when_it_is_removed(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "new")
    assert not list(tmp_path.iterdir()), "made before it is needed"
    first = folder.make("weights-").parent
    assert first == folder.path
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    folder.remove()
    assert not first.exists()
    second = folder.path
    assert second.exists()
    del folder
    gc.collect()
    assert not second.exists()


def test_files_are_there_while_servers_load_them_and_gone_before_the_update_is_finished(tmp_path: Path) -> None:
    loaded: dict[str, Any] = {}
    folder = PrivateFolder(tmp_path)

    def answer(url: str, path: str, json: Any) -> None:
        if path == "/update_weights":
            (file,) = Path(json["update_info"]["path"]).iterdir()
            loaded[url] = load_file(file)
        if path == "/finish_weight_update":
            assert not list(folder.path.iterdir())

    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, A, B)
    FileSync(folder).send(transfer, servers, Weights())
    assert [server.error for server in servers] == [None, None]
    for url in (A, B):
        assert http.paths(url) == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        assert loaded[url]["y"].tolist() == [1.0] * 3
    assert transfer.bytes_sent == 2 * 12
    http.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_files_hold_the_weights_of_a_cuda_device(tmp_path: Path) -> None:
    loaded: dict[str, torch.Tensor] = {}

    def answer(url: str, path: str, json: Any) -> None:
        if path == "/update_weights":
            (file,) = Path(json["update_info"]["path"]).iterdir()
            loaded.update(load_file(file))

    rows = torch.arange(12.0).view(3, 4)
    weights = [("rows", rows.cuda()), ("columns", rows.cuda().T), ("half", rows.cuda().bfloat16())]
    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, A)
    FileSync(PrivateFolder(tmp_path)).send(transfer, servers, weights)
    assert servers[0].error is None
    assert set(loaded) == {name for name, _ in weights}
    assert all(torch.equal(loaded[name], weight.cpu()) for name, weight in weights)
    http.close()


def test_a_name_that_comes_twice_is_no_file_and_an_error_of_each_server(tmp_path: Path) -> None:
    http = ScriptedHttp(lambda *_: None)
    transfer, servers = transfer_to(http, A, B)
    FileSync(PrivateFolder(tmp_path)).send(transfer, servers, Weights("x", "y", "x"))
    assert [str(server.error) for server in servers] == [
        f"{url}: loading weights: sent more than once: x" for url in (A, B)
    ]
    assert not http.asked
    http.close()


@pytest.mark.parametrize("make", [lambda folder: FileSync(PrivateFolder(folder)), lambda _: GroupSync("gloo")])
def test_weights_are_not_read_for_servers_that_have_failed(make: Any, tmp_path: Path) -> None:
    http = ScriptedHttp(lambda *_: None)
    transfer, servers = transfer_to(http, LOCAL)  # it could be invited to a group
    servers[0].fail("pausing", OSError("gone"))
    weights = Weights()
    make(tmp_path).send(transfer, servers, weights)
    assert (weights.num_read, http.asked) == (0, [])
    http.close()


def test_the_base_of_an_adapter_goes_once_and_adapters_that_are_still_read_stay(tmp_path: Path) -> None:
    http = ScriptedHttp(lambda *_: None)
    folder = PrivateFolder(tmp_path)
    sync, weights = AdapterSync(folder), Weights()
    transfer, servers = transfer_to(http, A, B)
    sync.send(transfer, servers, weights)
    assert transfer.bytes_sent == 2 * 12 + 4
    again = Transfer(http, known=servers, timeout=30.0)
    sync.send(again, servers[:1], weights)
    assert (weights.num_read, again.bytes_sent) == (2, 4)
    first, second = servers[1].adapter, servers[0].adapter
    assert {first, second} == set(folder.path.iterdir())
    sync.send(Transfer(http, known=servers, timeout=30.0), servers, weights)
    assert {servers[0].adapter} == set(folder.path.iterdir())
    http.close()


def test_a_server_without_adapters_is_left_out(tmp_path: Path) -> None:
    http = ScriptedHttp(lambda *_: None)
    servers = [Receiver(A, info(max_lora_rank=None)), Receiver(B, info())]
    AdapterSync(PrivateFolder(tmp_path)).send(Transfer(http, known=servers, timeout=30.0), servers, Weights())
    assert "the server takes no adapters" in str(servers[0].error)
    assert (servers[1].error, http.paths(A)) == (None, [])
    http.close()


def test_a_group_is_joined_once_and_brings_the_weights() -> None:
    received: list[list[wire.Named]] = []
    groups: list[process_group.Group] = []
    keys: list[str] = []

    def answer(url: str, path: str, json: Any) -> None:
        if path == "/init_weight_transfer_engine":
            groups.append(process_group.join(process_group.Invitation(**json["init_info"]), worker=0))
        elif path == "/update_weights":
            keys.append(json["update_info"]["key"])
            received.append(wire.receive(groups[-1], bytes.fromhex(keys[-1])))

    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, LOCAL)
    sync = GroupSync("gloo")
    for _ in range(2):
        sync.send(transfer, servers, Weights())
    assert servers[0].error is None
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert http.paths(LOCAL) == ["/init_weight_transfer_engine", *update, *update]
    assert len(groups) == 1
    assert keys[0] != keys[1], "what was recorded in one transfer could be played again in the next"
    assert [[(name, tensor.tolist()) for name, tensor in one] for one in received] == [
        [("x", [0.0] * 3), ("y", [1.0] * 3)]
    ] * 2
    servers[0].leave()
    groups[0].close()
    http.close()


def test_a_server_that_does_not_join_a_group_fails_with_its_own_message() -> None:
    def answer(url: str, path: str, json: Any) -> None:
        raise Refused("no such backend", status=500)

    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, LOCAL)
    weights = Weights()
    GroupSync("gloo").send(transfer, servers, weights)
    assert str(servers[0].error) == f"{LOCAL}: forming the process group: no such backend"
    assert weights.num_read == 0
    http.close()


def test_a_connection_that_breaks_before_the_server_says_why_has_its_message() -> None:
    groups: list[process_group.Group] = []

    def answer(url: str, path: str, json: Any) -> None:
        if path == "/init_weight_transfer_engine":
            groups.append(process_group.join(process_group.Invitation(**json["init_info"]), worker=0))
        elif path == "/update_weights":
            groups.pop().close()
            time.sleep(0.5)
            raise Refused("not finite: x", status=500)

    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, LOCAL)
    GroupSync("gloo").send(transfer, servers, Weights())
    assert str(servers[0].error) == f"{LOCAL}: sending weights: not finite: x"
    assert servers[0].group is None
    http.close()


def test_an_invitation_of_a_trainer_that_is_gone_does_not_block_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    invitation = process_group.Invitation("gloo", "127.0.0.1", port, "tag", world_size=2, timeout_s=600.0)
    with pytest.raises(RuntimeError, match="connect"):
        process_group.join(invitation, worker=0)  # which would otherwise take ten minutes


def test_an_update_that_a_dead_trainer_left_is_ended_first() -> None:
    refusals = [Refused("an update is already active", status=400)]

    def answer(url: str, path: str, json: Any) -> None:
        if path == "/start_weight_update" and refusals:
            raise refusals.pop()

    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, A)
    transfer.for_each(servers, "starting", transfer.start_update)
    assert http.paths(A) == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
    http.close()


@pytest.mark.parametrize(
    ("error", "resumes"), [(Unreachable("gone"), 0), (Overdue("late"), 1), (Refused("broken", status=500), 1)]
)
def test_a_server_that_may_have_paused_is_resumed_and_the_others_get_the_weights(
    error: Exception, resumes: int, tmp_path: Path
) -> None:
    versions: dict[str, list[str]] = {A: [], B: []}

    def answer(url: str, path: str, json: Any) -> None:
        if (url, path) == (A, "/pause"):
            raise error
        if path == "/update_weight_version":
            versions[url].append(json["new_version"])

    http = ScriptedHttp(answer)
    sync = WeightSync(http, method="shm", folder=tmp_path, timeout=30.0)
    with pytest.raises(WeightSyncError, match=rf"'r:1' failed for 1 of 2 servers .*\n{A}: pausing: {error}"):
        sync.send({A: info(), B: info()}, Weights(), version="r:1")
    assert http.paths(A) == ["/pause"] + ["/resume"] * resumes
    assert versions == {A: [], B: [UPDATING, "r:1"]}
    assert sync.bytes_sent == 2 * 12
    sync.close()
    assert not list(tmp_path.iterdir())
    http.close()


def test_servers_hear_of_a_folder_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have another working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("weights", "~/weights"):
        paths: list[Path] = []

        def note(_: str, path: str, json: Any, paths: list[Path] = paths) -> None:
            if path == "/update_weights":
                paths.append(Path(json["update_info"]["path"]))

        http = ScriptedHttp(note)
        sync = WeightSync(http, method="shm", folder=folder, timeout=30.0)
        sync.send({A: info()}, Weights(), version="r:1")
        assert [path.is_relative_to(tmp_path / "weights") for path in paths] == [True]
        sync.close()
        http.close()


def test_a_server_that_keeps_its_prefix_cache_has_old_weights(tmp_path: Path) -> None:
    http = ScriptedHttp(lambda _, path, __: {"success": False} if path == "/reset_prefix_cache" else None)
    sync = WeightSync(http, method="shm", folder=tmp_path, timeout=30.0)
    with pytest.raises(
        WeightSyncError, match=r"clearing the prefix cache: .*its cache still belongs to the old weights"
    ):
        sync.send({A: info()}, Weights(), version="r:1")
    assert http.paths(A)[-2:] == ["/reset_prefix_cache", "/resume"]
    sync.close()
    http.close()


def test_a_server_that_was_forgotten_gets_the_base_of_its_adapter_again(tmp_path: Path) -> None:
    http = ScriptedHttp(lambda *_: None)
    sync = WeightSync(http, method="adapter", folder=tmp_path, timeout=30.0)
    sizes = []
    for step in range(3):
        sync.send({A: info()}, Weights(), version=f"r:{step}")
        sizes.append(sync.bytes_sent)
        if step == 1:
            sync.forget(A)
    assert sizes == [28, 4, 28]
    assert sync.model_name(info()) == ADAPTER
    sync.close()
    http.close()


def test_what_reading_the_weights_raises_is_raised_and_servers_go_on(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("shard is gone")
        yield

    http = ScriptedHttp(lambda *_: None)
    sync = WeightSync(http, method="shm", folder=tmp_path, timeout=30.0)
    with pytest.raises(OSError, match="shard is gone"):
        sync.send({A: info()}, broken(), version="r:1")
    assert http.paths(A) == ["/pause", "/update_weight_version", "/resume"]
    sync.close()
    http.close()
