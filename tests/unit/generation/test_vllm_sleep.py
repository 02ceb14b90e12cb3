"""A server that shares the trainer's device: what it is asked for, in which order, and what a failure leaves.

`StandIn` answers in the place of vLLM's routes, with the memory that a GPU would have. The routes themselves are asked
in tests/vllm, of a build for CPUs, whose sleep frees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from prefrl.errors import GenerationError, WeightSyncError
from prefrl.generation.server import INFO_PATH
from prefrl.generation.vllm import fleet as code
from prefrl.generation.vllm.fleet import Fleet
from prefrl.generation.vllm.handshake import Requirements
from prefrl.generation.vllm.sleep import ASLEEP, Sleep
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http, Refused, Unreachable
from tests.unit.generation.scripted import A, info

WHOLE = {"weights", "kv_cache"}


class Killed(BaseException):
    """The trainer is killed before a request."""


class StandIn(Http):
    """One server and the requests to it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.memory = set(WHOLE)  # what is on the device
        self.weights: float | None = 0.0  # None: garbage
        self.version = "default"
        self.is_paused = False
        self.share: float | None = 0.4
        self.kills_before: int | None = None  # the number of a request
        self.fails: dict[str, Exception] = {}  # path -> raised once

    async def send(self, method: str, url: str, *, json: Any = None, **options: Any) -> Any:
        parts = urlsplit(url)
        if len(self.asked) == self.kills_before:
            raise Killed
        self.asked.append(parts.path + (f"?{parts.query}" if parts.query else ""))
        for path in [path for path in self.fails if self.asked[-1].startswith(path)]:
            raise self.fails.pop(path)
        return self.answer(parts.path, parts.query, json)

    def answer(self, path: str, query: str, json: Any) -> Any:
        match path:
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weight_version":
                self.version = json["new_version"]
            case "/sleep":
                self.memory, self.is_paused = set(), True
                self.weights = None if query == "level=2" else self.weights
            case "/wake_up":
                self.memory |= {query.removeprefix("tags=")} if query else WHOLE
                self.is_paused = self.is_paused and self.memory != WHOLE
                return {"status": "awake" if self.memory == WHOLE else "sleeping"}
            case "/is_sleeping":
                return {"is_sleeping": self.is_paused}
            case "/pause":
                self.is_paused = True
            case "/resume":
                assert self.memory == WHOLE, "it would compute with a cache that is not there"
                self.is_paused = False
            case "/update_weights":
                assert "weights" in self.memory
                (file,) = Path(json["update_info"]["path"]).iterdir()
                self.weights = float(load_file(file)["x"])
        return asdict(info(memory_share=self.share)) if path == INFO_PATH else None

    @property
    def samples_with(self) -> float | None:
        """The weights with which it would sample now."""
        assert self.memory == WHOLE
        assert not self.is_paused
        return self.weights


class Weights:
    """One weight, and an adapter."""

    is_quantized = False

    def __init__(self, value: float) -> None:
        self.value = value

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "x", torch.tensor(self.value)

    def base(self) -> Weights:
        return self

    def save_adapter(self, folder: Path) -> None:
        (folder / "adapter_model.safetensors").touch()

    def lead(self, task: Callable[[], None]) -> None:
        task()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_DEATH_SECONDS", 0.05)


@pytest.fixture
def server() -> Iterator[StandIn]:
    standing = StandIn()
    yield standing
    standing.close()


def trainer(server: StandIn, folder: Path, *, level: Any = 2, shares: bool = True) -> Fleet:
    """What a trainer has of the server. It may be one after another that was killed."""
    return Fleet(
        [A],
        http=server,
        weight_sync=WeightSync(
            server, method="shm" if level == 2 else "adapter", folder=folder, timeout=30.0, shares_device=shares
        ),
        requirements=Requirements("m", "X", 8, 4, 1, "t", has_adapters=level == 1, shares_device=shares),
        server_timeout=0.3,
        sleep=Sleep(server, level=level, timeout=30.0) if shares else None,
    )


LIFE = [
    *("/health", INFO_PATH, "/update_weight_version", "/sleep?level=2"),
    *("/wake_up?tags=weights", "/weight_info", "/pause?mode=keep&clear_cache=true", "/update_weight_version"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"),
    *("/update_weight_version", "/weight_info", "/wake_up?tags=kv_cache"),
]


def test_it_sleeps_until_weights_are_sent_and_has_no_cache_before_they_are_there(
    server: StandIn, tmp_path: Path
) -> None:
    fleet = trainer(server, tmp_path)
    fleet.rest()
    assert (server.memory, server.weights, server.version) == (set(), None, ASLEEP)
    fleet.sync(Weights(1.0), version=1)
    assert server.asked == LIFE
    assert (server.samples_with, server.version) == (1.0, fleet.version)
    server.asked.clear()
    fleet.rest()
    fleet.sync(Weights(1.0), version=1)  # the same ones, which it has discarded
    assert [path for path in server.asked if path != "/weight_info"] == [
        path for path in LIFE[2:] if path != "/weight_info"
    ]
    assert server.samples_with == 1.0


def test_weights_that_are_not_sent_anew_outlast_the_sleep(server: StandIn, tmp_path: Path) -> None:
    fleet = trainer(server, tmp_path, level=1)
    fleet.sync(Weights(1.0), version=1)
    server.asked.clear()
    fleet.rest()
    assert (server.memory, server.weights, server.version) == (set(), 1.0, fleet.version)
    fleet.sync(Weights(1.0), version=1)
    asked = [path for path in server.asked if path != "/weight_info"]
    assert asked == ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert server.samples_with == 1.0


def test_what_is_not_loaded_is_never_sampled_with_and_the_next_sync_goes_on(server: StandIn, tmp_path: Path) -> None:
    fleet = trainer(server, tmp_path)
    fleet.rest()
    server.fails["/update_weights"] = Refused("not finite", status=500)
    with pytest.raises(WeightSyncError, match="not finite"):
        fleet.sync(Weights(1.0), version=1)
    assert server.memory == {"weights"}
    assert server.is_paused
    fleet.sync(Weights(2.0), version=2)
    assert (server.samples_with, server.version) == (2.0, fleet.version)


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_share_that_is_not_free_is_told_with_what_to_do(server: StandIn, tmp_path: Path, tag: str) -> None:
    fleet = trainer(server, tmp_path)
    fleet.rest()
    server.fails[f"/wake_up?tags={tag}"] = Refused("CUDA Error: out of memory", status=500)
    with pytest.raises(GenerationError, match=r"does not wake up: .*out of memory.* a smaller vllm_gpu_memory_util"):
        fleet.sync(Weights(1.0), version=1)


def test_a_server_that_stays_asleep_is_an_error(server: StandIn, tmp_path: Path, monkeypatch: Any) -> None:
    fleet = trainer(server, tmp_path)
    monkeypatch.setattr(server, "answer", lambda path, query, json: {"status": "sleeping"})
    fleet.infos = {A: info(memory_share=0.4)}
    with pytest.raises(GenerationError, match=r"is not awake after it was woken: .*'sleeping'"):
        fleet._at_each(lambda sleep, url: sleep.wake(url, "kv_cache"))


def test_a_server_that_does_not_sleep_is_an_error(server: StandIn, tmp_path: Path) -> None:
    server.fails["/sleep"] = Refused("no", status=500)
    with pytest.raises(GenerationError, match=f"The vLLM server at {A} does not sleep: no"):
        trainer(server, tmp_path).rest()


def test_a_server_that_was_restarted_meanwhile_is_waited_for(server: StandIn, tmp_path: Path) -> None:
    fleet = trainer(server, tmp_path)
    fleet.sync(Weights(1.0), version=1)
    server.memory, server.weights, server.version = set(WHOLE), 0.0, "default"
    server.fails = {"/sleep": Unreachable("connection refused"), "/health": Unreachable("connection refused")}
    fleet.rest()
    assert server.memory == set()
    server.memory, server.is_paused, server.version = set(WHOLE), False, "default"
    server.fails = {"/wake_up": Unreachable("connection refused"), "/health": Unreachable("connection refused")}
    fleet.sync(Weights(2.0), version=2)
    assert (server.samples_with, fleet.stats.restarts) == (2.0, 1)


def test_a_server_that_answers_but_does_not_sleep_in_time_is_an_error(
    server: StandIn, tmp_path: Path, monkeypatch: Any
) -> None:
    fleet = trainer(server, tmp_path)
    answer = server.answer

    def overdue(path: str, query: str, json: Any) -> Any:
        if path == "/sleep":
            raise Unreachable("late")
        return answer(path, query, json)

    monkeypatch.setattr(server, "answer", overdue)
    with pytest.raises(GenerationError, match=f"the vLLM server at {A} is running, but does not answer: late"):
        fleet.rest()


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_trainer_was_killed_anywhere_the_next_one_samples_with_its_own_weights(
    server: StandIn, tmp_path: Path, level: int
) -> None:
    def live(value: float) -> None:
        fleet = trainer(server, tmp_path, level=level)
        for version in (1, 2):
            fleet.rest()
            fleet.sync(Weights(value), version=version)

    live(1.0)
    number = len(server.asked)
    for kills_before in range(number):
        server.asked.clear()
        server.kills_before = kills_before
        with pytest.raises(Killed):
            live(2.0)
        server.kills_before = None
        live(3.0)
        assert server.samples_with == 3.0


@pytest.mark.parametrize("level", [1, 2])
def test_a_trainer_on_another_device_wakes_what_was_left_asleep(server: StandIn, tmp_path: Path, level: int) -> None:
    trainer(server, tmp_path, level=level).rest()
    trainer(server, tmp_path, level=level, shares=False).sync(Weights(2.0), version=1)
    assert server.samples_with == 2.0
    server.asked.clear()
    trainer(server, tmp_path, level=level, shares=False).sync(Weights(3.0), version=1)
    assert "/wake_up" not in server.asked, "it was awake"
    assert server.samples_with == 3.0


def test_a_server_that_never_sleeps_is_refused_with_the_command_of_one_that_does(
    server: StandIn, tmp_path: Path
) -> None:
    server.share = None
    with pytest.raises(GenerationError, match=r"never sleeps, but vllm_mode='colocate' .* --enable_sleep_mode --gpu_"):
        trainer(server, tmp_path).rest()
    trainer(server, tmp_path, shares=False).sync(Weights(2.0), version=1)
    assert "/is_sleeping" not in server.asked
