"""Code behind `device.type == "cuda"`, on GPUs that are not there, in a process whose GPU is not the first one."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention

from prefrl import ConfigError, GRPOConfig, SFTConfig
from prefrl.distributed import check_devices, processes
from prefrl.generation.vllm.sleep import Sleep
from prefrl.generation.weights import device_memory, process_group, sync, wire
from prefrl.models.adapters import _check_init
from prefrl.models.attention import interface, segments, varlen
from prefrl.models.attention.interface import Inputs, Kernel, choose_kernel
from prefrl.models.attention.segments import Layout
from prefrl.models.modes import of_products, seeded
from prefrl.options.fields import apply
from prefrl.options.run import LIGER_RULES, PROFILE_RULES, ProfileParams, check_device
from prefrl.options.server_rules import SHARED_DEVICE_RULES
from prefrl.rewards import call
from prefrl.rewards.confinement import own_randomness
from prefrl.rollout.episodes.threads import Worker
from prefrl.scripts import commands, sampling
from prefrl.scripts.arguments.launch import visible_gpus
from prefrl.scripts.arguments.model_config import get_kbit_device_map
from prefrl.scripts.checkup import resources
from prefrl.scripts.teacher import _Teacher
from prefrl.trainer.base_config import BaseConfig, check_precision
from prefrl.trainer.configs import OnlineConfig
from prefrl.trainer.features.guard import read_later
from prefrl.trainer.features.profile import StepProfiler
from prefrl.trainer.features.sizes import AutomaticSizes, EvaluationSize
from prefrl.trainer.memory import TrialMemory, free_memory
from prefrl.trainer.offline.rows import RunningMean
from prefrl.trainer.online.generators import _carrier_of_changes, sync_method
from prefrl.trainer.steps import LongBatch, StepAccount
from tests.assets import tiny_model, tiny_tokenizer
from tests.cuda_lines import lines_that_name_cuda, traced
from tests.gpus import COUNT, Gpus
from tests.patience import PATIENCE

OWN = torch.device("cuda", 3)
GIB = 2**30

# module:function -> why nothing reaches it here.
UNREACHED = {
    "generation.vllm.plugin:Engine.receive_weights": "it runs inside vLLM, and waits there for its GPU",
}
REACHED: dict[str, str] = {}  # module:function -> the test that reaches it

Test = TypeVar("Test", bound=FunctionType)


def reaches(*places: str) -> Callable[[Test], Test]:
    """Marks a test in which every line of these functions that names CUDA must run, and what it is a condition of."""

    def mark(test: Test) -> Test:
        REACHED.update(dict.fromkeys(places, test.__name__))
        return test

    return mark


@pytest.fixture(autouse=True)
def _reaches_its_lines(request: pytest.FixtureRequest) -> Iterator[None]:
    places = [place for place, test in REACHED.items() if test == request.node.originalname]
    with traced(places) if places else nullcontext({}) as missed:
        yield
    assert missed == {}


def test_every_line_that_names_cuda_is_in_a_function_that_a_test_reaches() -> None:
    found = lines_that_name_cuda().keys()
    assert REACHED.keys() | UNREACHED.keys() == found
    assert not REACHED.keys() & UNREACHED.keys()
    assert [place for place in found if place.endswith(":")] == []  # it would run when prefrl is imported


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Eight GPUs, of which this process has the fourth."""
    found = Gpus()
    found.plug_in(monkeypatch)
    torch.cuda.set_device(OWN)
    with found.mode:
        yield found


ON_ONE_DEVICE = {"knows_sizes": False, "server_urls": ["a"], "servers_are_local": True, "generation_mode": "sync"}


def options(**values: Any) -> Any:
    """A config with these values."""
    defaults: dict[str, Any] = {
        "device": OWN,
        "bf16": False,
        "fp16": False,
        "mixed_precision": "no",
        "torch_compile": False,
        "fp8": False,
    }
    defaults |= {"sought": frozenset(), "automatic": frozenset(), "activation_offloading": False}
    return SimpleNamespace(**defaults | values)


# Attention.


@reaches("models.attention.interface:choose_kernel")
def test_half_precision_is_for_the_variable_length_kernel_and_everything_for_blocks(gpus: Gpus) -> None:
    assert varlen.kernel() is not None
    for dtype, served in (
        (torch.bfloat16, [True, True]),
        (torch.float32, [False, True]),
        (torch.float64, [False] * 2),
    ):
        inputs = Inputs(OWN, dtype, 4, 2, 64, 64, scaling=None)
        assert [kernel.serves(inputs) for kernel in interface.KERNELS[1:3]] == served
        elsewhere = Inputs(torch.device("mps"), dtype, 4, 2, 64, 64, scaling=None)
        assert choose_kernel(elsewhere, Layout(((5, -1),))) is interface.KERNELS[-1]


@reaches("models.attention.interface:_has_fast_causal_attention")
def test_long_segments_are_for_half_precision_where_torch_has_a_faster_kernel(gpus: Gpus) -> None:
    for capability, dtype, size, is_served in (
        ((9, 0), torch.bfloat16, 128, True),
        ((10, 0), torch.float16, 64, True),
        ((8, 9), torch.bfloat16, 128, False),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 256, False),
    ):
        gpus.capability[3] = capability
        inputs = Inputs(OWN, dtype, 4, 2, size, size, scaling=None)
        assert interface.KERNELS[0].serves(inputs) is is_served


@reaches("models.attention.interface:_mistake")
def test_a_trial_runs_on_the_gpu_of_the_inputs_and_leaves_its_random_numbers_alone(gpus: Gpus) -> None:
    seen: set[Any] = set()
    before = [generator.get_state() for generator in gpus.generators]

    def attend(query: Any, *args: Any, **kwargs: Any) -> Any:
        seen.add(
            (threading.current_thread().name.startswith("prefrl-trial"), query.device, torch.cuda.current_device())
        )
        gpus.generators[3].seed()  # a compiler
        return segments.attend(query, *args, **kwargs)

    kernel = Kernel("new", attend, lambda inputs: True)
    inputs = Inputs(OWN, torch.float32, 4, 2, 8, 8, scaling=0.3)
    assert choose_kernel(inputs, Layout(((5, -1),)), (kernel, interface.KERNELS[-1])) is kernel
    assert seen == {(True, OWN, 3)}

    def broken(*args: Any, **kwargs: Any) -> Any:
        gpus[3].work(1.0)
        raise RuntimeError("no kernel image")

    kernel = Kernel("broken", broken, lambda inputs: True)
    assert choose_kernel(inputs, Layout(((5, -1),)), (kernel, interface.KERNELS[-1])) is interface.KERNELS[-1]
    assert (gpus[3].waits, gpus[0].waits) == (1, 0)  # for errors that come later
    assert all(torch.equal(g.get_state(), state) for g, state in zip(gpus.generators, before, strict=True))


@reaches("models.attention.segments:_visible", "models.attention.segments:attend")
def test_segments_are_given_to_the_kernels_of_cuda_as_they_take_them(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A causal bias instead of a mask where there is no window, and no grouped heads together with a mask."""
    given: list[tuple[type, int, bool]] = []

    def attend(query: Any, key: Any, value: Any, *, attn_mask: Any, enable_gqa: bool, **kwargs: Any) -> Any:
        given.append((type(attn_mask), key.size(1), enable_gqa))
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **kwargs)

    layout = Layout(((7, -1), (5, 0), (3, 0)))
    tensors = [torch.randn(1, heads, 15, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    for window, mask in ((None, CausalBias), (4, torch.Tensor)):
        expected = segments.attend(*tensors, layout, scaling=0.3, window=window)
        with monkeypatch.context() as patch:
            patch.setattr(segments, "scaled_dot_product_attention", attend)
            found = segments.attend(*(x.to(OWN) for x in tensors), layout, scaling=0.3, window=window)
        assert found.device == OWN
        torch.testing.assert_close(found.cpu(), expected)
        masked = [call for call in given if call[0] is not type(None)]
        assert [issubclass(kind, mask) for kind, *_ in masked[-2:]] == [True, True]
        assert {call[1:] for call in masked} == {(4, False)}
    assert (type(None), 2, True) in given  # a root has no mask and keeps its grouped heads


# Time and memory.


@reaches("trainer.steps:_device_mark", "trainer.steps:StepAccount.__init__")
def test_phases_are_as_long_as_the_gpu_works_on_them_and_are_read_when_they_have_come(gpus: Gpus) -> None:
    account = StepAccount(OWN, clock=lambda: 0.0)
    torch.cuda.set_device(5)  # by a reward, say
    for _ in range(2):
        account.start()
        with account.phase("forward"):
            gpus[3].work(2.0)
            gpus[5].work(100.0)
        gpus[3].work(1.0)
        account.finish()
    assert gpus[3].waits == 0
    logged = {name: metric.value() for name, metric in account.drain([]).items()}
    assert logged == {"time/other_s": 1.0, "time/forward_s": 2.0, "step_time": 3.0}
    assert (gpus[3].waits, gpus[5].waits) == (2, 0)


@reaches(
    "trainer.memory:free_memory",
    "trainer.memory:_used",
    "trainer.memory:_peak",
    "scripts.checkup.resources:_available",
    "scripts.checkup.resources:_device_memory",
)
def test_memory_is_that_of_the_own_gpu(gpus: Gpus) -> None:
    own = gpus[3]
    own.allocated, own.reserved, own.peak = 2 * GIB, 5 * GIB, 40 * GIB
    free = 76 * GIB + 3 * GIB  # what the allocator holds in reserve is free, too
    assert free_memory(OWN) == free
    memory = TrialMemory(OWN, share=0.5, trained=GIB, has_buckets=True)
    assert memory.load == 0  # an earlier peak does not count
    own.work(1.0, 10 * GIB)
    gpus[0].work(1.0, 70 * GIB)
    assert memory.load == pytest.approx(10 / (79 / 2 - 3))
    assert memory.load_of_gradients == pytest.approx(1 / (79 / 2 - 3))
    assert free_memory(torch.device("cuda", 5)) == 74 * GIB
    place = "on Pretend H300"
    subject: Any = SimpleNamespace(plan=None, config=options(world_size=COUNT))
    assert resources._available(subject) == (76 * GIB, place)
    subject.config.world_size += 1
    assert resources._device_memory(subject) == own.total
    others = " of this machine; the devices of other machines are taken to have as much"
    assert resources._available(subject) == (76 * GIB, place + others)
    subject.config.device = torch.device("cpu")
    assert resources._available(subject)[1] == "on this machine"


@reaches("generation.vllm.sleep:Sleep.wake")
def test_what_the_allocator_keeps_is_free_when_a_server_takes_its_share(gpus: Gpus) -> None:
    http: Any = SimpleNamespace(request=lambda *_, **__: gpus.note("asked") or {"status": "awake"})
    sleep = Sleep(http, level=2, timeout=1.0)
    sleep.wake("http://a:1", "weights")
    sleep.wake("http://a:1", "kv_cache")
    assert gpus.calls == [("empty_cache", 3), ("asked",)] * 2


@reaches("trainer.features.sizes:AutomaticSizes._search", "trainer.features.sizes:_wait")
def test_trials_time_the_gpu_and_give_its_memory_back(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = gpus[3]

    def run(batch: Any) -> None:
        own.work(0.1 + 0.1 * batch.num_rows)  # launched, and not waited for

    def long(num_rows: int) -> Any:
        batch: Any = SimpleNamespace(num_rows=num_rows, forward_tokens=lambda rows: 30)
        return nullcontext(LongBatch(batch, 30 * num_rows))

    sizes: dict[str, Any] = {"per_device_train_batch_size": "auto", "auto_size_kwargs": {"max_batch_size": 4}}
    args = SFTConfig(output_dir="x", report_to="none", use_cpu=True, gradient_accumulation_steps=1, **sizes)
    monkeypatch.setattr(SFTConfig, "device", OWN)
    search = AutomaticSizes(args, torch.nn.Linear(1, 1), long, run)
    search.clock = lambda: own.done  # what a clock of the host shows if nothing but the GPU takes time
    search.settle({}, num_rows=100)
    assert {trial.rows: pytest.approx(trial.speed) for trial in search.trials} == {1: 150, 2: 200, 4: 240}
    assert args.per_device_train_batch_size == 4
    assert gpus.calls == [("empty_cache", 3)]
    assert "4 rows" in capsys.readouterr().err


@reaches("trainer.features.sizes:EvaluationSize.settle")
def test_trials_of_evaluations_know_the_memory_of_the_gpu_and_give_it_back(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gpus[3]

    def evaluate(dataset: Any, rows: int) -> int:
        own.work(1.0, rows * 10 * GIB)
        return 30 * rows

    args = SFTConfig(output_dir="x", report_to="none", use_cpu=True, per_device_eval_batch_size="auto")
    monkeypatch.setattr(SFTConfig, "device", OWN)
    size = EvaluationSize(args, evaluate, lambda: 0)
    size.clock = lambda: own.done
    size.settle(range(200))  # more than a CPU would try
    assert [trial.rows for trial in size.trials] == [1, 2, 4]  # 8 rows need 80 GiB
    assert args.per_device_eval_batch_size == 4
    assert gpus.calls == [("empty_cache", 3)]


@reaches("scripts.checkup.resources:products_per_second.multiply")
def test_the_speed_of_products_is_that_of_the_gpu_without_its_first_call(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, num_products = gpus[3], 0

    def multiply(matrix: Any, _: Any) -> Any:
        nonlocal num_products
        assert (matrix.device, matrix.dtype, matrix.shape) == (OWN, torch.bfloat16, (4096, 4096))
        own.work(5.0 if num_products == 0 else 0.001)
        num_products += 1
        assert num_products < 10_000, "nobody waits for the GPU"

    ones = torch.ones(1).to(OWN, torch.bfloat16)
    monkeypatch.setattr(type(ones), "__matmul__", multiply, raising=False)
    speed = resources.products_per_second(OWN, torch.bfloat16, clock=lambda: own.done)
    assert speed == pytest.approx(2 * 4096**3 / 0.001)
    assert own.waits < num_products / 4


@reaches(
    "trainer.features.profile:StepProfiler._follow",
    "trainer.features.profile:StepProfiler._write",
    "trainer.features.profile:StepProfiler._end_trace",
)
def test_a_snapshot_of_memory_is_written_for_each_trace_and_recording_ends(gpus: Gpus, tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileParams(memory_snapshot=True, wait=0, active=1, repeat=2), tmp_path, is_traced=True)
    state = SimpleNamespace(max_steps=9, global_step=0)
    run: Any = SimpleNamespace(state=state)
    profiler.begin(run)
    for step in range(1, 6):
        num_calls = len(gpus.calls)
        state.global_step = step
        profiler.after_step(run)
        expected = {1: [("history",)], 2: [("history", None)], 3: [("history",)], 4: [("history", None)]}
        assert gpus.calls[num_calls:] == expected.get(step, [])
    profiler.ended(run)
    found = {path.name: path.read_text() for path in tmp_path.glob("*.pickle")}
    assert found == {f"steps-{step}-{step}-rank-0.memory.pickle": "GPU 3" for step in (2, 4)}


@reaches("options.run:_lacks_history")
def test_a_snapshot_needs_memory_with_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SFTConfig(output_dir="x", report_to="none", use_cpu=True, profile=True)
    config.profile_kwargs = {"memory_snapshot": True}
    monkeypatch.setattr(SFTConfig, "device", OWN)
    apply(config, PROFILE_RULES)
    monkeypatch.setattr(SFTConfig, "device", torch.device("mps"))
    with pytest.raises(ConfigError, match="this run is on the MPS"):
        apply(config, PROFILE_RULES)


@reaches("trainer.features.guard:read_later")
def test_numbers_are_read_when_their_own_gpu_has_them_and_not_later(gpus: Gpus) -> None:
    numbers = torch.tensor([[1.0, 2.0]]).to(OWN)
    gpus[3].work(2.0)
    torch.cuda.set_device(5)
    read = read_later(numbers)
    gpus[3].work(100.0)
    assert (gpus[3].waits, gpus[3].done) == (0, 0.0)
    assert read() == [[1.0, 2.0]]
    assert (gpus[3].waits, gpus[3].done) == (1, 2.0)


# Precision, and what a device does not have.


@reaches(
    "trainer.base_config:check_precision",
    "trainer.base_config:_warn_of_emulation",
    "trainer.base_config:_check_fp8",
)
def test_precision_is_asked_of_the_own_gpu(gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    gpus.capability[3] = (8, 0)
    check_precision(options(bf16=True))
    assert caplog.records == []
    with pytest.raises(ConfigError, match=r"fp8=True on Pretend H300: .* compute capability 8\.9"):
        check_precision(options(bf16=True, fp8=True))
    gpus.capability |= {0: (7, 5), 3: (8, 9)}
    with pytest.raises(ConfigError, match="fp8=True with bf16=False"):
        check_precision(options(fp8=True))
    check_precision(options(bf16=True))
    assert caplog.records == []
    gpus.capability |= {0: (9, 0), 3: (7, 5)}
    with caplog.at_level(logging.WARNING):
        check_precision(options(bf16=True))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("bf16=True on Pretend H300: it has no arithmetic in bfloat16")


@reaches("models.modes:of_products")
def test_products_are_as_coarse_as_the_gpu_makes_them(gpus: Gpus) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for name, dtype in (("ieee", torch.float32), ("tf32", torch.float16)):
            torch.backends.cuda.matmul.fp32_precision = name
            assert of_products(torch.float32, "cuda") == dtype
            assert of_products(torch.float32, "cpu") == torch.float32
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@reaches(
    "options.run:check_device",
    "options.run:_lacks_gpu",
    "trainer.configs:OnlineConfig.check_machine",
)
def test_what_a_mac_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = options(device=torch.device("mps"), sought=frozenset(["max_tokens_per_micro_batch"]), use_liger_kernel=True)
    with pytest.raises(ConfigError, match=r"max_tokens_per_micro_batch='auto' on MPS: .* Set a number"):
        check_device(mac)
    with pytest.raises(ConfigError, match="this run is on the MPS"):
        apply(mac, LIGER_RULES)
    monkeypatch.setattr(BaseConfig, "check_machine", lambda config: None)
    sampling = {
        use_vllm: type("Config", (OnlineConfig,), {"device": mac.device, "use_vllm": use_vllm})
        for use_vllm in (True, False)
    }
    object.__new__(sampling[True]).check_machine()
    with pytest.raises(ConfigError, match=r"use_vllm=False on MPS: .* float64.* Set use_cpu=True"):
        object.__new__(sampling[False]).check_machine()


def test_one_process_that_sees_several_gpus_is_refused(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SFTConfig(output_dir="x", report_to="none")
    assert config.device == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="8 GPUs are visible to one process: start one process for each GPU"):
        check_devices(config.n_gpu)
    assert SFTConfig(output_dir="x", report_to="none", use_cpu=True).n_gpu == 0
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_CPU=true, but this run is on cuda:0"):
        SFTConfig(output_dir="x", report_to="none")


@reaches("trainer.offline.rows:RunningMean.__init__")
def test_a_running_mean_has_the_precision_that_its_device_has(gpus: Gpus) -> None:
    assert RunningMean(OWN).value.dtype == torch.float64
    assert RunningMean(OWN).value.device == OWN
    assert RunningMean(torch.device("mps")).value.dtype == torch.float32


# Random numbers.


@reaches("models.modes:seeded")
def test_seeds_are_for_all_generators_in_use_and_leave_no_trace(gpus: Gpus) -> None:
    generators = [torch.default_generator, *gpus.generators]

    def draw() -> list[float]:
        return [float(torch.rand(1, generator=generator)) for generator in generators]

    before = [generator.get_state() for generator in generators]
    for context in (seeded, own_randomness):
        with context(7):
            first = draw()
        with context(7):
            assert draw() == first
        assert len(set(first)) == 1
        with context(8):
            assert draw() != first
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, before, strict=True))


def test_a_seed_does_not_start_cuda(gpus: Gpus) -> None:
    gpus.is_initialized = False
    before = gpus.generators[0].get_state()
    with seeded(7), own_randomness(3):
        torch.rand(1)
        assert torch.equal(gpus.generators[0].get_state(), before)  # nor is it asked after a fork, where it would fail
    assert not gpus.is_initialized


# Threads, processes and weights.


@reaches("distributed.processes:on_own_gpu", "distributed.processes:on_own_gpu.run")
def test_user_code_on_other_threads_has_the_gpu_of_its_process(gpus: Gpus) -> None:
    async def reward() -> int:
        return torch.cuda.current_device()

    plain = call.Call("plain", torch.cuda.current_device, {}, is_async=False)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.cuda.current_device).result() == 0
    assert call.EventLoopThread().submit(reward()).result(PATIENCE) == 3
    assert call._call_in_thread(plain, PATIENCE).result == 3
    worker = Worker()
    assert worker.submit(torch.cuda.current_device).result(PATIENCE) == 3
    worker.leave()
    gpus.is_initialized = False
    assert call._call_in_thread(plain, PATIENCE).result == 0
    assert not gpus.is_initialized  # by the thread


@reaches("generation.weights.process_group:device_of", "generation.weights.process_group:_nccl")
def test_weights_go_over_nccl_from_the_gpu_of_the_trainer_to_those_of_the_workers(gpus: Gpus) -> None:
    host = process_group.Host("nccl", "127.0.0.1", 9, num_workers=1, tag="tag", timeout=60.0)
    trainer = host.join()

    def receive() -> Any:
        torch.cuda.set_device(6)
        group = process_group.join(host.invitation, worker=0)
        received = wire.receive(group, key)
        group.close()
        return group.device, received

    key = wire.new_key()
    sent = [("a", torch.randn(5, 7).to(OWN)), ("b", torch.arange(3, dtype=torch.int16).to(OWN))]
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(receive)
        group = trainer.result(PATIENCE)
        assert group.device == OWN
        for message in wire.messages(sent, device=group.device, key=key):
            group.broadcast(message)
        device, received = worker.result(PATIENCE)
        group.close()
    for thread in threading.enumerate():
        if thread.name == "prefrl-group-end":
            thread.join(PATIENCE)
    assert device == torch.device("cuda", 6)
    assert [(name, value.device.type, value.tolist()) for name, value in received] == [
        (name, "cpu", value.tolist()) for name, value in sent
    ]
    calls = [call for call in gpus.calls if call[0] == "nccl"]
    assert sorted(calls) == [("nccl", rank, 2, 365, ["0", "0"]) for rank in (0, 1)]
    assert {call[1:] for call in gpus.calls if call[0] == "broadcast"} == {(0, 3), (1, 6)}
    assert sorted(call for call in gpus.calls if call[0] == "abort") == [("abort", 0), ("abort", 1)]


@reaches(
    "trainer.online.generators:_group_kind",
    "options.server_rules:_asks_for_nccl",
    "generation.weights.sync:_transport",
    "options.server_rules:_writes_no_files",
    "options.server_rules:_lacks_gpu",
)
def test_nccl_is_the_way_from_a_gpu(gpus: Gpus) -> None:
    asked: Any = options(weight_sync=None, shared_folder=None, vllm_mode="server")
    assert sync_method(asked, has_adapter=False) == "nccl"
    assert _carrier_of_changes(asked) == "nccl"
    asked.device = torch.device("cpu")
    assert sync_method(asked, has_adapter=False) == "gloo"
    asked.vllm_mode = "colocate"
    assert sync_method(asked, has_adapter=False) == "shm"
    asked.device = OWN
    assert _carrier_of_changes(asked) == "shm"
    for method, over in (("nccl", None), ("delta", "nccl")):
        shared = options(**ON_ONE_DEVICE, weight_sync=method, vllm_params=SimpleNamespace(delta_over=over))
        with pytest.raises(ConfigError, match="NCCL does not connect two processes on one GPU"):
            apply(shared, SHARED_DEVICE_RULES)
    with pytest.raises(ConfigError, match="is 'nccl', which needs a GPU"):
        GRPOConfig(output_dir="x", report_to="none", use_cpu=True, use_vllm=True, weight_sync="nccl")
    for method in ("nccl", "gloo", "ipc"):
        assert sync._transport(method, None, None)._backend == method  # type: ignore[attr-defined]


@reaches("generation.weights.device_memory:allocate")
@reaches("generation.weights.device_memory:attach", "generation.weights.device_memory:_uuid")
def test_a_window_is_described_for_json_and_mapped_on_the_own_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    window = device_memory.allocate(100)
    assert (window.device, window.dtype, window.numel()) == (OWN, torch.uint8, 100)
    names = (*device_memory._KNOWN, "storage_handle", "storage_size_bytes", "event_sync_required")
    reduced = (torch.Tensor, (100,), (1,), 0, torch.TypedStorage, torch.uint8, 3, b"\x00\xff", 128, True)

    def rebuild(**given: Any) -> Any:
        rebuilt.append(given)
        return window

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    rebuild.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    rebuilt: list[dict[str, Any]] = []
    monkeypatch.setattr(device_memory, "reduce_tensor", lambda tensor: (rebuild, reduced))
    monkeypatch.setattr(device_memory, "rebuild_cuda_tensor", rebuild)
    sent = json.loads(json.dumps(device_memory.describe(window)))
    assert device_memory.attach(sent) is window
    assert rebuilt == [dict(zip(names, reduced, strict=True)) | {"storage_cls": torch.UntypedStorage}]
    torch.cuda.set_device(5)
    with pytest.raises(ValueError, match="the trainer is on the GPU GPU-3, and this worker on GPU-5"):
        device_memory.attach(sent)


@reaches(
    "generation.weights.device_memory:place_for",
    "generation.weights.device_memory:collect",
)
def test_what_is_received_stays_on_the_gpu_if_its_memory_suffices(gpus: Gpus) -> None:
    window, own = torch.zeros(8, device=OWN), gpus[3]
    places = [device_memory.place_for(own.free - spare * GIB, near=window) for spare in (1, 2, 3)]
    assert places == [torch.device("cpu"), OWN, OWN]
    assert device_memory.place_for(10**15, near=torch.zeros(8)) == torch.device("cpu")
    device_memory.collect()
    gpus.is_initialized = False
    device_memory.collect()
    assert gpus.calls == [("ipc_collect", 3)]


@reaches("distributed.processes:_end_group")
def test_the_group_of_gpus_is_not_joined_at_the_end(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(processes, "is_distributed", lambda: True)
    for backend in ("nccl", "cpu:gloo,cuda:nccl", "gloo"):
        monkeypatch.setattr(processes.dist, "get_backend", lambda backend=backend: backend)
        monkeypatch.setattr(processes.dist, "destroy_process_group", lambda backend=backend: ended.append(backend))
        processes._end_group()
    assert ended == ["gloo"]


@reaches("models.adapters:_check_init")
def test_loftq_quantizes_on_a_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = SimpleNamespace(to_dict=lambda: {"init_lora_weights": "loftq"})  # a LoraConfig needs scipy for it
    _check_init(asked)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="on a GPU, and there is none"):
        _check_init(asked)


# Commands.


@reaches(
    "scripts.commands:_devices",
    "scripts.arguments.model_config:get_kbit_device_map",
    "scripts.arguments.launch:visible_gpus",
)
def test_commands_name_and_choose_gpus(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(commands, "_DRIVERS", ("/",))
    assert commands.env([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "- CUDA of torch: 13.0" in lines
    assert [line for line in lines if "GPU" in line] == [f"- GPU {i}: Pretend H{i}00, 80 GiB" for i in range(COUNT)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert commands.env([]) == 0
    assert "- GPU: Apple's, which torch calls mps" in capsys.readouterr().out.splitlines()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_kbit_device_map() == {"": 3}
    assert visible_gpus({}) == [str(number) for number in range(COUNT)]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ["GPU-a", "GPU-b"]


@reaches("scripts.teacher:_Teacher.of")
def test_a_teacher_is_asked_on_the_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = tiny_model(), list[Any]()
    monkeypatch.setattr(model, "to", used.append)
    asked: Any = SimpleNamespace(top_k=4, temperature=1.0, max_tokens_per_batch=8)
    assert _Teacher.of(model, tiny_tokenizer(), asked).model is model
    assert used == [torch.device("cuda")]


@reaches("scripts.sampling:Local.__init__")
def test_a_model_samples_on_the_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = torch.nn.Linear(2, 2)
    monkeypatch.setattr("prefrl.models.export.load_merged", lambda *_, **__: model)
    monkeypatch.setattr("prefrl.models.export.tokenizer_of_checkpoint", lambda *_: None)
    used: list[Any] = []
    monkeypatch.setattr("prefrl.generation.local.generator.LocalGenerator", lambda model, **_: used.append(model))
    monkeypatch.setattr(model, "to", lambda device: used.append(device))
    asked: Any = SimpleNamespace(dtype="auto", batch_size=2)
    sampling.Local(asked, "model", needs_template=False)
    assert used == [torch.device("cuda"), model]
