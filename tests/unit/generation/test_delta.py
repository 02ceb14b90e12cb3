"""Changes of weights instead of all weights: what is sent, what is refused, and what happens then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prefrl.errors import ConfigError, WeightSyncError
from prefrl.generation.weights.delta import Changes, DeltaSync, HostCopy, together
from prefrl.generation.weights.sync import WeightSync
from prefrl.generation.weights.transfer import Receiver
from prefrl.http import Refused
from tests.unit.generation.scripted import A, B, ScriptedHttp, info

Named = tuple[str, Tensor]


class Weights:
    """Two matrices and a vector in float32, of which `change` touches few elements."""

    has_adapter = is_quantized = False

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.of = {name: torch.randn(100, 100, generator=random) for name in ("x", "y")}
        self.of["norm"] = torch.randn(100, generator=random)
        self.num_read = 0

    def __iter__(self) -> Iterator[Named]:
        self.num_read += 1
        yield from self.of.items()

    def changes(self, rounded: Any, *, is_first: bool) -> Iterator[Named]:
        return iter(self)

    def change(self, name: str = "x", place: int = 17) -> None:
        self.of[name].view(-1)[place] += 1


class Servers:
    """What servers keep, as the plugin does, of the files that they are sent."""

    def __init__(self) -> None:
        self.copies: dict[str, HostCopy] = {A: HostCopy(), B: HostCopy()}
        self.have: dict[str, dict[str, Tensor]] = {}
        self.messages: list[tuple[str, list[str]]] = []
        self.lost: list[str] = []  # servers that say yes to the next update and do nothing
        self.broken: list[str] = []  # servers whose next update fails

    def __call__(self, url: str, path: str, json: Any) -> None:
        if path != "/update_weights":
            return
        if url in self.lost:
            self.lost.remove(url)
            return
        files = sorted(Path(json["update_info"]["path"]).iterdir())
        message = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.messages.append((url, sorted(name for name in message if name != "prefrl:delta")))
        try:
            if url in self.broken:
                self.broken.remove(url)
                raise ValueError("broken")
            self.copies[url].apply([message])
            self.have[url] = dict(self.copies[url].weights)
        except ValueError as error:
            self.copies[url].clear()
            raise Refused(str(error), status=500) from error


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def sync(servers: Servers, tmp_path: Path) -> Iterator[WeightSync]:
    http = ScriptedHttp(servers)
    sync = WeightSync(http, method="delta", folder=tmp_path, timeout=30.0, over="shm")
    yield sync
    sync.close()
    http.close()


def send(sync: WeightSync, weights: Any, *urls: str, dtype: str = "float32") -> None:
    sync.send({url: info(dtype=dtype) for url in urls}, weights, version="r:1")


def assert_has(servers: Servers, url: str, weights: Weights) -> None:
    assert servers.have[url].keys() == weights.of.keys()
    assert all(torch.equal(tensor, weights.of[name]) for name, tensor in servers.have[url].items())


ALL = ["norm", "x", "y"]
OF_X = ["prefrl:gaps:x", "prefrl:values:x"]


def test_all_weights_go_once_and_then_what_has_changed(servers: Servers, sync: WeightSync) -> None:
    weights = Weights()
    for step in range(3):
        send(sync, weights, A)
        assert_has(servers, A, weights)
        if step < 2:
            weights.change(place=step)
    send(sync, weights, A)
    assert [names for _, names in servers.messages] == [ALL, OF_X, OF_X, []]
    assert sync.bytes_sent < 200  # the fingerprints
    assert weights.num_read == 4


def test_a_tensor_with_many_changes_is_sent_as_a_whole(servers: Servers, sync: WeightSync) -> None:
    weights = Weights()
    send(sync, weights, A)
    weights.of["y"] += 1
    weights.change("x")
    send(sync, weights, A)
    assert_has(servers, A, weights)
    assert servers.messages[1] == (A, [*OF_X, "y"])


def test_matrices_are_rounded_as_the_server_would_and_small_steps_send_nothing(
    servers: Servers, sync: WeightSync
) -> None:
    weights = Weights()
    send(sync, weights, A, dtype="bfloat16")
    weights.of["x"] *= 1 + 1e-6
    send(sync, weights, A, dtype="bfloat16")
    assert all(torch.equal(servers.have[A][name], weights.of[name].bfloat16()) for name in ("x", "y"))
    assert torch.equal(servers.have[A]["norm"], weights.of["norm"])  # a model may keep a vector in float32
    changed = sum(map(len, (name for _, name in servers.messages[1:])))
    assert changed <= 2
    assert sync.bytes_sent < 1000


def test_a_server_that_comes_later_or_was_restarted_gets_all_weights_and_the_others_changes(
    servers: Servers, sync: WeightSync
) -> None:
    weights = Weights()
    send(sync, weights, A)
    weights.change()
    send(sync, weights, A, B)
    assert servers.messages[1:] == [(A, OF_X), (B, ALL)]
    assert weights.num_read == 2
    sync.forget(A)
    weights.change()
    send(sync, weights, A, B)
    assert servers.messages[3:] == [(B, OF_X), (A, ALL)]
    for url in (A, B):
        assert_has(servers, url, weights)


@pytest.mark.parametrize("fault", ["lost", "restarted", "broken", "flipped"])
def test_a_server_with_other_weights_gets_all_of_them_in_the_same_sync_with_one_warning(
    fault: str, servers: Servers, sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    send(sync, weights, A, B)
    weights.change(place=1)
    if fault == "lost":
        servers.lost.append(A)
        send(sync, weights, A, B)
        weights.change(place=2)
    elif fault == "restarted":
        servers.copies[A].clear()
    elif fault == "broken":
        servers.broken.append(A)
    else:  # a bit of a weight that is about to be changed in another place
        servers.copies[A]._weights["x"][50, 50] *= -1
    servers.messages.clear()
    with caplog.at_level(logging.WARNING):
        send(sync, weights, A, B)
    assert sorted(servers.messages) == [(A, ALL), (A, OF_X), (B, OF_X)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{A}: loading weights: " in caplog.text
    assert "All weights are sent again" in caplog.text
    weights.change(place=3)
    servers.messages.clear()
    send(sync, weights, A, B)
    assert sorted(servers.messages) == [(A, OF_X), (B, OF_X)]
    for url in (A, B):
        assert_has(servers, url, weights)


class Breaking:
    """A carrier of which the second message gets nowhere, and is not read."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Tensor]] = []

    def send(self, transfer: Any, servers: Any, weights: Any) -> None:
        if len(self.messages) == 1:
            servers[0].fail("sending weights", OSError("broken pipe"))
        self.messages.append({} if servers[0].error else {name: tensor.clone() for name, tensor in weights})


def test_a_server_whose_connection_breaks_before_all_was_read_gets_all_weights_in_the_same_sync() -> None:
    carrier, weights, server = Breaking(), Weights(), Receiver(A, info())
    sync = DeltaSync(carrier)  # type: ignore[arg-type]
    for _ in range(2):
        weights.change()
        sync.send(None, [server], weights)  # type: ignore[arg-type]
        assert server.error is None
    last = carrier.messages[2]
    assert sorted(last) == [*ALL[:1], "prefrl:delta", *ALL[1:]]
    assert all(torch.equal(last[name], tensor) for name, tensor in weights.of.items())


def test_a_server_that_refuses_all_weights_too_fails(servers: Servers, sync: WeightSync) -> None:
    weights = Weights()
    send(sync, weights, A)
    servers.broken += [A, A]
    with pytest.raises(WeightSyncError, match=r"weight_sync=delta.*\n.*loading weights: broken"):
        send(sync, weights, A)
    send(sync, weights, A)
    assert_has(servers, A, weights)
    assert servers.messages[-1] == (A, ALL)


def test_after_weights_could_not_be_read_all_are_sent(servers: Servers, sync: WeightSync) -> None:
    weights = Weights()
    send(sync, weights, A)

    class Broken(Weights):
        def __iter__(self) -> Iterator[Named]:
            yield "x", torch.zeros(100, 100)
            raise OSError("shard is gone")

    with pytest.raises(OSError, match="shard is gone"):
        send(sync, Broken(), A)
    weights.change()
    send(sync, weights, A)
    assert servers.messages[-1] == (A, ALL)
    assert_has(servers, A, weights)


def test_a_weight_that_is_sent_no_more_is_not_kept(servers: Servers, sync: WeightSync) -> None:
    weights = Weights()
    send(sync, weights, A)
    del weights.of["y"]
    send(sync, weights, A)
    assert_has(servers, A, weights)


def test_a_copy_tells_which_weights_a_message_has_changed() -> None:
    weights, sender, receiver = Weights(), HostCopy(), HostCopy()
    assert receiver.apply([dict(sender.changes(weights, dtype=None))]) == ["x", "y", "norm"]
    weights.change("y")
    weights.of["norm"] += 1
    assert receiver.apply([dict(sender.changes(weights, dtype=None))]) == ["y", "norm"]
    assert receiver.apply([dict(sender.changes(weights, dtype=None))]) == []
    assert dict(receiver.weights).keys() == weights.of.keys()


def test_weights_that_a_model_takes_together_are_loaded_together() -> None:
    groups = [{"q", "k", "v"}, {"v", "shared"}, {"gate", "up"}, {"norm"}, set[str]()]
    assert together(["q"], groups) == {"q", "k", "v", "shared"}
    assert together(["norm", "up"], groups) == {"norm", "gate", "up"}
    assert together(["in no group"], groups) == {"in no group"}
    assert together([], groups) == set()


@pytest.mark.parametrize(
    ("gaps", "values"),
    [([9], [1, 2]), ([9], []), ([100], [1]), ([255, 0], [1])],
    ids=["too many values", "too few", "behind the end", "far behind the end"],
)
def test_changes_of_another_tensor_are_refused(gaps: list[int], values: list[int]) -> None:
    tensor = torch.zeros(100, dtype=torch.bfloat16)
    changes = Changes(torch.tensor(gaps, dtype=torch.uint8), torch.tensor(values, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"changes do not fit 100 elements of torch\.bfloat16"):
        changes.apply(tensor)
    with pytest.raises(ValueError, match="do not fit"):
        Changes(torch.tensor([1], dtype=torch.uint8), torch.tensor([1], dtype=torch.int32)).apply(tensor)
    assert not tensor.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "delta"}, r"over=None: weight sync by 'delta' needs 'nccl', 'gloo', 'shm' or 'store'"),
        ({"method": "gloo", "over": "gloo"}, r"over='gloo': weight sync by 'gloo' needs None"),
        ({"method": "delta", "over": "shm"}, r"folder=None: weight sync by 'shm' needs a folder"),
        ({"method": "delta", "over": "store"}, r"folder=None: weight sync by 'store' needs a folder"),
    ],
)
def test_how_changes_are_sent_is_asked_for_there_and_only_there(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightSync(ScriptedHttp(lambda *_: None), folder=None, timeout=1.0, **options)
