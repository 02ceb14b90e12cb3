"""Weights through memory that trainer and worker share, over the real group, each on a thread of its own.

`tests/windows.py` stands in for the step that shares a GPU's memory; tests/contract/test_gpu_window.py needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.generation.weights import device_memory, process_group, wire
from prefrl.generation.weights.transfer import GroupSync, Receiver, Transfer
from tests.patience import PATIENCE
from tests.unit.generation.scripted import ScriptedHttp, info
from tests.unit.generation.test_weight_sync import LOCAL, Weights, transfer_to
from tests.unit.generation.test_wire import KEY, Members, Named, assert_same, in_thread, mixed_weights
from tests.windows import Windows


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Windows:
    found = Windows(tmp_path)
    found.plug_in(monkeypatch)
    return found


@pytest.fixture
def members() -> Iterator[Members]:
    members = Members()
    yield members
    members.close()


def send(members: Members, weights: Any, *, bucket_bytes: int) -> int:
    """Bytes that passed through the window."""
    count = 0
    for message in wire.messages_through_window(weights, key=KEY, bucket_bytes=bucket_bytes):
        count += message.nbytes if isinstance(message, process_group.Turn) else 0
        members.trainer.broadcast(message)
    return count


@pytest.mark.parametrize("bucket_bytes", [50, 2**20])
def test_what_arrives_is_what_was_sent_and_the_window_is_given_back(
    windows: Windows, members: Members, bucket_bytes: int
) -> None:
    weights = [*mixed_weights(), ("columns", torch.arange(600.0).view(20, 30).T), ("none", torch.zeros(0, 3))]
    for transfer in range(1, 3):
        receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
        passed = send(members, weights, bucket_bytes=bucket_bytes)
        assert_same(receiving.result(timeout=PATIENCE), weights)
        assert passed >= sum(tensor.nbytes for _, tensor in weights)
        assert (len(windows.made), len(windows.attached)) == (transfer, transfer), "each is mapped once"
        assert windows.seen_at_the_end == [0] * transfer, "the worker still saw it"
        assert all(made() is None for made in windows.made)


def test_a_window_is_never_larger_than_a_bucket(
    windows: Windows, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return windows.allocate(size)

    monkeypatch.setattr(device_memory, "allocate", allocate)
    weights = [("large", torch.arange(10_000.0))]
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    send(members, weights, bucket_bytes=1000)
    assert_same(receiving.result(timeout=PATIENCE), weights)
    assert sizes == [1008], "the next multiple of 16"


def test_other_bytes_than_the_trainer_wrote_are_refused(
    windows: Windows, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "attach", lambda description: windows.attach(description).clone())  # stays old
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    sending = in_thread(lambda: send(members, [("a", torch.ones(100)), ("b", torch.zeros(100))], bucket_bytes=400))
    with pytest.raises(ValueError, match="is not what the trainer wrote"):
        receiving.result(timeout=PATIENCE)
    members.workers[0].close()
    with pytest.raises(RuntimeError):
        sending.result(timeout=PATIENCE)


def test_an_error_of_the_weights_reaches_the_worker_and_both_let_go(windows: Windows, members: Members) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3)
        yield "b", torch.ones(300)
        raise ArithmeticError("not gathered")

    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    with pytest.raises(ArithmeticError):
        send(members, weights(), bucket_bytes=64)
    with pytest.raises(ValueError, match="the trainer stopped sending: ArithmeticError: not gathered"):
        receiving.result(timeout=PATIENCE)


def test_transfers_share_a_group_and_are_counted_in_bytes(windows: Windows) -> None:
    received: list[Named] = []
    groups: list[process_group.Group] = []

    def answer(url: str, path: str, json: Any) -> None:
        if path == "/init_weight_transfer_engine":
            assert json["init_info"]["transport"] == "ipc"
            groups.append(process_group.join(process_group.Invitation(**json["init_info"]), worker=0))
        elif path == "/update_weights":
            received.append(wire.receive(groups[-1], bytes.fromhex(json["update_info"]["key"])))

    http = ScriptedHttp(answer)
    transfer, servers = transfer_to(http, LOCAL)
    sync = GroupSync("ipc")
    for _ in range(2):
        sync.send(transfer, servers, Weights())
    assert servers[0].error is None
    assert len(groups) == 1
    for one in received:
        assert_same(one, list(Weights()))
    counted = 2 * 2 * 16  # each of the weights takes 12 bytes and the next multiple of 16
    assert counted < transfer.bytes_sent < counted + 2000, "headers"
    servers[0].leave()
    groups[0].close()
    http.close()


def test_a_server_with_several_workers_is_not_invited(windows: Windows) -> None:
    http = ScriptedHttp(lambda *_: None)
    servers = [Receiver(LOCAL, info(num_workers=2))]
    weights = Weights()
    GroupSync("ipc").send(Transfer(http, known=servers, timeout=30.0), servers, weights)
    assert "it has 2 workers, but weight_sync='ipc' is for one, on one GPU. Set weight_sync='shm'" in str(
        servers[0].error
    )
    assert (weights.num_read, http.asked) == (0, [])
    http.close()
