"""Tensors through a process group of two or three members, each on a thread of its own."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.generation.weights import process_group, wire
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[3]
TAG = "test"
KEY = wire.new_key()
Named = list[tuple[str, torch.Tensor]]


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Members:
    """A trainer's group and those of its workers."""

    def __init__(self, *, num_workers: int = 1, timeout: float = 20.0) -> None:
        host = process_group.Host("gloo", "127.0.0.1", 9, num_workers=num_workers, tag=TAG, timeout=timeout)
        trainer = host.join()
        workers = [in_thread(lambda i=i: process_group.join(host.invitation, worker=i)) for i in range(num_workers)]
        self.trainer = trainer.result(timeout=PATIENCE)
        self.workers = [worker.result(timeout=PATIENCE) for worker in workers]

    def close(self) -> None:
        for group in (self.trainer, *self.workers):
            group.close()

    def send(self, weights: Named, **options: Any) -> None:
        for message in wire.messages(weights, device=self.trainer.device, **{"key": KEY} | options):
            self.trainer.broadcast(message)


@pytest.fixture
def members() -> Iterator[Members]:
    members = Members()
    yield members
    members.close()


def mixed_weights() -> Named:
    """Every width next to every other one, sizes that are no multiple of any, nothing, and a scalar."""
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float64, torch.bool, torch.float32, torch.uint8, torch.int64, torch.float16]
    shapes = [(3,), (5, 7), (), (0, 4), (1, 1, 13)]
    return [
        (f"{dtype}{shape}", (torch.rand(shape, generator=generator) * 200).to(dtype))
        for shape in shapes
        for dtype in dtypes
    ]


def assert_same(received: Named, sent: Named) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, got), (_, wanted) in zip(received, sent, strict=True):
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_what_arrives_is_what_was_sent_bit_for_bit_and_in_order(members: Members, bucket_bytes: int) -> None:
    weights = mixed_weights()
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    members.send(weights, bucket_bytes=bucket_bytes)
    assert_same(receiving.result(timeout=PATIENCE), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bucket_bytes", [100, 2**20])
def test_weights_of_a_cuda_device_arrive_bit_for_bit(members: Members, bucket_bytes: int) -> None:
    weights = mixed_weights()
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    members.send([(name, tensor.cuda()) for name, tensor in weights], bucket_bytes=bucket_bytes)
    assert_same(receiving.result(timeout=PATIENCE), weights)


def test_all_workers_receive_and_a_group_serves_many_transfers() -> None:
    members = Members(num_workers=2)
    try:
        for step in range(3):
            weights = [
                (name, tensor + step if tensor.dtype != torch.bool else tensor) for name, tensor in mixed_weights()
            ]
            receiving = [in_thread(lambda worker=worker: wire.receive(worker, KEY)) for worker in members.workers]
            members.send(weights)
            for future in receiving:
                assert_same(future.result(timeout=PATIENCE), weights)
    finally:
        members.close()


def test_views_that_are_not_contiguous_and_tensors_larger_than_a_message(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BUCKET_BYTES", 1000)
    weights = [("transposed", torch.arange(600.0).view(20, 30).T), ("part", torch.arange(40)[3:30:2])]
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    members.send(weights, bucket_bytes=1000)
    assert_same(receiving.result(timeout=PATIENCE), weights)


def test_buckets_are_closed_before_they_overflow_and_a_large_tensor_stands_alone() -> None:
    sizes = {"a": 16, "b": 40, "c": 40, "d": 500, "e": 1, "f": 1}  # bytes; each takes the next multiple of 16
    weights = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()]
    cut = [[name for name, _ in bucket] for bucket in wire.buckets(weights, bucket_bytes=64)]
    assert cut == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_weights_are_read_once_while_they_are_sent() -> None:
    read: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            read.append(i)
            yield f"w{i}", torch.zeros(100, dtype=torch.uint8)

    sent = wire.messages(weights(), device=torch.device("cpu"), key=KEY, bucket_bytes=100)
    next(sent)
    assert read == [0, 1]  # the second one shows that the first bucket is full
    assert len(list(sent)) == 4 * 4 - 1 + 2  # length, header, seal and bytes of each bucket; the end and its seal
    assert read == [0, 1, 2, 3]


def test_the_receiver_is_told_why_the_sender_gave_up(members: Members) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.zeros(3)
        raise RuntimeError("no memory for the second layer")

    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    with pytest.raises(RuntimeError, match="second layer"):
        members.send(weights())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the trainer stopped sending: RuntimeError: no memory for the second layer"):
        receiving.result(timeout=PATIENCE)


def test_dtypes_that_cannot_be_sent_are_named(members: Members) -> None:
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    with pytest.raises(ValueError, match="phases: complex64"):
        members.send([("phases", torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="stopped sending"):
        receiving.result(timeout=PATIENCE)


@pytest.mark.parametrize("length", [-1, 2**62])
def test_noise_is_refused_before_memory_is_taken_for_it(members: Members, length: int) -> None:
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    members.trainer.broadcast(torch.tensor([length]).view(torch.uint8))
    with pytest.raises(ValueError, match="not a prefrl trainer"):
        receiving.result(timeout=PATIENCE)


def receive_or_leave(group: process_group.Group, key: bytes) -> Named:
    try:
        return wire.receive(group, key)
    except ValueError:
        group.close()
        raise


@pytest.mark.parametrize("key", [wire.new_key(), None], ids=["another key", "the key of the transfer before"])
def test_weights_of_a_stranger_are_refused(members: Members, key: bytes | None) -> None:
    receiving = in_thread(lambda: receive_or_leave(members.workers[0], wire.new_key()))
    with suppress(RuntimeError):  # the receiver leaves
        members.send([("w", torch.full((3,), 666.0))], key=key or KEY)
    with pytest.raises(ValueError, match="the seal is wrong"):
        receiving.result(timeout=PATIENCE)


# length, header, seal and bytes of two buckets; the end and its seal
@pytest.mark.parametrize("number", [n for n in range(10) if n % 4])
def test_one_bit_that_changes_on_the_way_is_noticed_before_the_weights_are_returned(
    members: Members, number: int
) -> None:
    receiving = in_thread(lambda: receive_or_leave(members.workers[0], KEY))
    weights = [("v", torch.ones(3)), ("w", torch.ones(3))]
    with suppress(RuntimeError):  # the receiver leaves
        for position, message in enumerate(
            wire.messages(weights, device=process_group.HOST_DEVICE, key=KEY, bucket_bytes=1)
        ):
            changed = message.clone()
            changed[0] ^= position == number
            members.trainer.broadcast(changed)
    with pytest.raises(ValueError, match="the seal is wrong"):
        receiving.result(timeout=PATIENCE)


def test_a_transfer_without_a_key_is_refused(members: Members) -> None:
    with pytest.raises(ValueError, match="has 0 bytes: must be 32"):
        wire.receive(members.workers[0], b"")


def test_a_silent_sender_is_waited_for_no_longer_than_the_timeout() -> None:
    members = Members(timeout=PATIENCE)
    worker = members.workers[0]
    worker.invitation = replace(worker.invitation, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="no data was sent or received for 1 s"):
        wire.receive(worker, KEY)
    assert 1.0 <= time.monotonic() - started < PATIENCE / 2
    members.close()


def test_a_member_that_leaves_ends_the_wait_of_the_others(members: Members) -> None:
    receiving = in_thread(lambda: wire.receive(members.workers[0], KEY))
    time.sleep(0.1)  # usually it waits by now; it is told of the end in any case
    members.trainer.close()
    with pytest.raises(RuntimeError):  # a wait until the deadline ends in a TimeoutError
        receiving.result(timeout=PATIENCE)


def test_leaving_never_waits_and_may_be_repeated() -> None:
    members = Members(timeout=PATIENCE)
    members.trainer.start(torch.zeros(2**26, dtype=torch.uint8))  # more than the sockets hold: nobody receives it
    pauses = [time.monotonic()]
    members.trainer.close()
    members.trainer.close()
    (leaving,) = (thread for thread in threading.enumerate() if thread.name == "prefrl-group-end")
    while leaving.is_alive():  # what ends in the background stops nothing here either
        time.sleep(0.01)
        pauses.append(time.monotonic())
        if pauses[-1] - pauses[0] > 1:  # now the message breaks; otherwise it would end at its deadline
            members.workers[0].close()
    assert max(after - before for before, after in itertools.pairwise(pauses)) < PATIENCE / 4
    members.close()


def test_what_the_check_raises_ends_a_wait(members: Members) -> None:
    def check() -> None:
        raise LookupError("the server said no")

    members.trainer.start(torch.zeros(2**26, dtype=torch.uint8))
    with pytest.raises(LookupError, match="said no"):
        members.trainer.wait(check=check)


def test_nobody_to_meet_is_an_error_within_the_timeout() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    invitation = process_group.Invitation("gloo", "127.0.0.1", port, TAG, 2, 1.0)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        process_group.join(invitation, worker=0)
    assert time.monotonic() - started < PATIENCE  # torch's own is 300 s


def test_a_trainer_alone_gives_up_within_the_timeout() -> None:
    host = process_group.Host("gloo", "127.0.0.1", 9, num_workers=1, tag=TAG, timeout=1.0)
    with pytest.raises(TimeoutError, match="not all of 1 workers arrived within 1 s"):
        host.join().result(timeout=PATIENCE)


def test_a_trainer_stops_waiting_for_workers_when_told() -> None:
    host = process_group.Host("gloo", "127.0.0.1", 9, num_workers=2, tag=TAG, timeout=60.0)
    joining = host.join()
    in_thread(lambda: process_group.join(host.invitation, worker=0))  # one comes, which is not all
    with pytest.raises(FutureTimeout):
        joining.result(timeout=0.3)
    host.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        joining.result(timeout=30)


def test_a_program_ends_well_with_a_group_that_is_closed_open_or_busy() -> None:
    program = """
        import os, torch
        from tests.unit.generation.test_wire import Members
        for end in ("close()", "__class__", "start(torch.zeros(2**26, dtype=torch.uint8)) or g.close()"):
            child = os.fork()
            if child == 0:
                members = Members()
                g = members.trainer
                eval(f"g.{end}")
                break  # this program ends, too
            assert os.waitpid(child, 0)[1] == 0, end
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, timeout=300, capture_output=True
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_the_rendezvous_of_a_local_server_listens_on_loopback_alone() -> None:
    host = process_group.Host("gloo", "localhost", 8000, num_workers=1, tag=TAG, timeout=20.0)
    assert host.invitation.host in ("127.0.0.1", "::1")
    with socket.create_connection((host.invitation.host, host.invitation.port), timeout=20):
        pass
    elsewhere = "127.0.0.2" if host.invitation.host == "127.0.0.1" else "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((elsewhere, host.invitation.port), timeout=20)


def test_the_rendezvous_ends_when_all_members_are_connected() -> None:
    members = Members(num_workers=3)
    address = (members.trainer.invitation.host, members.trainer.invitation.port)
    with pytest.raises(ConnectionRefusedError):  # noqa: PT012 - it is closed within moments
        for _ in range(1000):
            socket.create_connection(address, timeout=20).close()
            time.sleep(0.05)
    members.close()


def test_groups_with_other_tags_do_not_meet() -> None:
    host = process_group.Host("gloo", "127.0.0.1", 9, num_workers=1, tag="new", timeout=1.0)
    joining = host.join()
    stale = process_group.Invitation(**(host.invitation.as_json() | {"tag": "old"}))
    with pytest.raises(RuntimeError):
        process_group.join(stale, worker=0)
    with pytest.raises(TimeoutError, match="not all of 1 workers arrived"):
        joining.result(timeout=PATIENCE)
