"""Weights through a window of device memory: two processes on one GPU, of which the second stands in for a server.

`PYTHONPATH=. python3 -m pytest -n 0 -m gpu tests/contract/test_gpu_window.py` prints what 1 GB takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prefrl.errors import WeightSyncError
from prefrl.generation.weights import device_memory
from prefrl.generation.weights.sync import WeightSync
from prefrl.models.export import PolicyWeights
from tests.assets import tiny_model
from tests.patience import PATIENCE
from tests.unit.generation.scripted import ScriptedHttp, info
from tests.window_server import WindowServer, digests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

URL = "http://127.0.0.1:1"
MIB, GB = 2**20, 10**9
Start = Callable[..., WindowServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers, which end with the test."""
    servers: list[WindowServer] = []

    def begin(**options: Any) -> WindowServer:
        servers.append(WindowServer(**options))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def sync_to(server: WindowServer) -> WeightSync:
    return WeightSync(server.http, method="ipc", folder=None, timeout=PATIENCE, shares_device=True)


def qwen(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    return tiny_model(**sizes).to(device="cuda", dtype=dtype)


class _Weights:
    """Tensors by name, as a source of weights."""

    is_quantized = has_adapter = False

    def __init__(self, tensors: dict[str, torch.Tensor], before_last: Callable[[], object] = lambda: None) -> None:
        self.tensors, self._before_last = tensors, before_last

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        *most, last = self.tensors.items()
        yield from most
        self._before_last()
        yield last


def weights_of(tensors: dict[str, torch.Tensor], *, before_last: Callable[[], object] = lambda: None) -> Any:
    """A source of these tensors."""
    return _Weights(tensors, before_last)


@pytest.fixture(params=["blocks", "expandable segments"])
def allocator(request: pytest.FixtureRequest) -> Iterator[None]:
    """How torch allocates in this process."""
    expands = request.param == "expandable segments"
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expands}")
    yield
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings:FutureWarning")
@pytest.mark.usefixtures("allocator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_server_has_the_bits_of_the_trainer_after_each_sync(dtype: torch.dtype, start: Start) -> None:
    server, model = start(), qwen(dtype)
    sync = sync_to(server)
    for step in range(3):
        sync.send({URL: info()}, PolicyWeights(model), version=str(step))
        assert server.received["digests"] == digests(PolicyWeights(model))
        assert server.received["devices"] == {"cuda:0"}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * (1 + step))
    assert server.http.paths(URL).count("/init_weight_transfer_engine") == 1
    sync.close()


def test_a_tensor_larger_than_the_window_and_one_with_its_columns_first_arrive_whole(start: Start) -> None:
    server = start()
    generator = torch.Generator("cuda").manual_seed(0)
    large = torch.randint(0, 255, (200 * MIB + 7,), dtype=torch.uint8, device="cuda", generator=generator)
    weights = weights_of(
        {"a": large[:5], "large": large, "columns": large[: 70 * MIB].view(7 * MIB, 10).T, "none": large[:0]}
    )
    sync = sync_to(server)
    sync.send({URL: info()}, weights, version="0")
    assert server.received["digests"] == digests(weights)
    assert sync.bytes_sent > 270 * MIB
    sync.close()


def test_a_server_without_room_on_the_device_receives_into_host_memory(start: Start) -> None:
    server, model = start(spare=2**50), qwen()
    sync = sync_to(server)
    sync.send({URL: info()}, PolicyWeights(model), version="0")
    assert server.received["devices"] == {"cpu"}
    assert server.received["digests"] == digests(PolicyWeights(model))
    sync.close()


def test_both_processes_give_all_memory_back(start: Start) -> None:
    server = start()
    weights = weights_of({str(i): torch.ones(32 * MIB, device="cuda") for i in range(4)})  # 512 MiB
    sync = sync_to(server)
    before = torch.cuda.memory_allocated()
    for step in range(4):
        sync.send({URL: info()}, weights, version=str(step))
        assert server.ask("allocated") < MIB
        assert torch.cuda.memory_allocated() == before
    sync.close()


def test_a_server_that_dies_in_the_middle_is_reported_and_the_next_gets_everything(start: Start) -> None:
    first, second = start(), start()
    tensors = {str(i): torch.full((16 * MIB,), float(i), device="cuda") for i in range(4)}
    sync = sync_to(first)
    with pytest.raises(WeightSyncError, match="gone"):
        sync.send({URL: info()}, weights_of(tensors, before_last=first.process.kill), version="0")
    sync.close()
    sync = sync_to(second)
    sync.send({URL: info()}, weights_of(tensors), version="1")
    assert second.received["digests"] == digests(tensors.items())
    sync.close()


def test_a_window_on_another_gpu_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_uuid", lambda device: "of-another")
    server, model = start(), qwen()
    sync = sync_to(server)
    with pytest.raises(WeightSyncError, match="the trainer is on the GPU of-another, and this worker on"):
        sync.send({URL: info()}, PolicyWeights(model), version="0")
    sync.close()


def test_what_1_gb_takes_beside_files(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    """No figure decides: it is printed."""
    weights = weights_of({str(i): torch.rand(GB // 80, device="cuda").bfloat16() for i in range(40)})
    figures: dict[str, list[float]] = {"window, device": [], "window, host": [], "files": []}
    for name, spare in {"window, device": None, "window, host": 2**50}.items():
        server = start(spare=spare, hashes=False)
        sync = sync_to(server)
        for step in range(5):
            sync.send({URL: info()}, weights, version=str(step))
            assert sync.bytes_sent >= GB
            figures[name].append(sync.seconds)
        sync.close()

    def load(url: str, path: str, json: Any) -> None:
        if path == "/update_weights":
            loaded = [load_file(file) for file in sorted(Path(json["update_info"]["path"]).iterdir())]
            assert sum(tensor.nbytes for tensors in loaded for tensor in tensors.values()) == GB

    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    http = ScriptedHttp(load)
    files = WeightSync(http, method="shm", folder=folder, timeout=PATIENCE, shares_device=True)
    for step in range(3):
        files.send({URL: info()}, weights, version=str(step))
        figures["files"].append(files.seconds)
    files.close()
    http.close()
    with capsys.disabled():
        for name, seconds in figures.items():
            first, *rest = seconds
            print(f"\n1 GB, {name}: {first:.3f} s at first, then {statistics.median(rest):.3f} s", end="")
            record_property(name, seconds)
        print()
