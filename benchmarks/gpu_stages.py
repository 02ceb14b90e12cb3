"""The stages of `benchmarks.gpu`. Each calls `record` with every figure as soon as it is there."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.held import memory_of_training
from benchmarks.report import measured_row
from benchmarks.worker import Library, Machine, Measurement, WorkerError, measure_one_by_one, prepare_environment
from benchmarks.workloads import CUDA_WORKLOADS, MODEL_1_5B, ModelSizes, Workload

if TYPE_CHECKING:
    from prefrl.types import TokenBatch

__all__ = ["doctor", "plans", "shared", "steps", "tests"]

Record = Callable[[dict[str, Any]], None]
ROOT = Path(__file__).parents[1]
TINY = ModelSizes(hidden_size=64, num_layers=2, ffn_size=128, vocab_size=512, num_heads=4, dtype="bfloat16")


def tests(record: Record, *, rehearses: bool) -> None:
    """Each test that is marked gpu: its outcome and seconds. Where there is no GPU, all are skipped."""
    import pytest

    class Recorder:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or not report.passed:
                found = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
                says = str(report.longrepr)[-2000:] if report.failed else ""
                record(found | dict(report.user_properties) | ({"problem": says} if says else {}))

    files = sorted({str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()})
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", *([] if rehearses else ["--forbid-skips"])]
    if importlib.util.find_spec("xdist") is not None and not rehearses:
        options += ["-n", str(max(1, 3 * len(os.sched_getaffinity(0)) // 4))]
    status = pytest.main([*options, *files], plugins=[Recorder()])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        record({"problem": f"pytest ended with {status!r}"})


def plans(record: Record, *, rehearses: bool) -> None:
    """Forward and backward pass of a group of completions, in bfloat16, by each plan with each attention kernel.

    Errors are those of log-probs and of the gradient, from the padded plan in float32, relative by norm.
    """
    from benchmarks.inputs import build_model

    device = "cpu" if rehearses else "cuda"
    sizes, prompt, response = (TINY, 8, 8) if rehearses else (replace(MODEL_1_5B, num_layers=14), 1024, 1024)
    batch = _group(sizes, prompt, response, num_rows=8).to(device)
    model = build_model(sizes, seed=0, device=device).train()
    exact = copy.deepcopy(model).float()
    truth = _scores(exact, batch, "padded")
    del exact
    for plan, kernel in [("padded", ""), *_plans_and_kernels()]:
        try:
            record({"plan": plan, "kernel": kernel} | _figures_of_plan(model, batch, plan, kernel, truth, device))
        except Exception:
            record({"plan": plan, "kernel": kernel, "problem": traceback.format_exc(limit=-4)[-2000:]})
        model.zero_grad(set_to_none=True)


def _plans_and_kernels() -> list[tuple[str, str]]:
    from prefrl.models.attention.interface import KERNELS

    # The first is for long sequences; the steps have one of them.
    return [(plan, kernel.name) for plan in ("packed", "shared_prefix") for kernel in KERNELS[1:]]


def _group(sizes: ModelSizes, prompt: int, response: int, *, num_rows: int) -> TokenBatch:
    from prefrl.types import TokenBatch

    generator = torch.Generator().manual_seed(0)
    ids = partial(torch.randint, 2, sizes.vocab_size, generator=generator)
    total = num_rows * response
    return TokenBatch(
        prompt_ids=ids((prompt,)),
        prompt_lengths=(prompt,),
        prompt_index=(0,) * num_rows,
        response_ids=ids((total,)),
        response_lengths=(response,) * num_rows,
        trainable=torch.ones(total, dtype=torch.bool),
        group_index=(0,) * num_rows,
    )


def _scores(model: Any, batch: TokenBatch, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a sum of them with weights that differ, of the layers in the middle."""
    from prefrl.models.forward import token_logprobs

    logprobs = token_logprobs(model, batch, plan=plan).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    layers = model.base_model.layers
    gradient = [weight.grad.float().flatten() for weight in layers[len(layers) // 2].parameters()]
    return logprobs.detach().float(), torch.cat(gradient)


def _figures_of_plan(
    model: Any, batch: TokenBatch, plan: str, kernel: str, truth: tuple[torch.Tensor, torch.Tensor], device: str
) -> dict[str, float]:
    is_cuda = device == "cuda"
    seconds = []
    with _only(kernel, must_serve=is_cuda):
        for _ in range(5):  # the first may compile
            model.zero_grad(set_to_none=True)
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            start = time.perf_counter()
            found = _scores(model, batch, plan)
            if is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if is_cuda else 0.0
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
    return {
        "ms": 1000 * statistics.median(seconds[1:]),
        "first_ms": 1000 * seconds[0],
        "mib": peak,
        "logprob_error": errors[0],
        "gradient_error": errors[1],
    }


@contextlib.contextmanager
def _only(name: str, *, must_serve: bool) -> Iterator[None]:
    """Flat attention has one kernel; padded rows do not use it."""
    from prefrl.models.attention import interface

    kernels = {kernel.name: kernel for kernel in interface.KERNELS}
    original = interface.choose_kernel

    def choose(inputs: interface.Inputs, layout: Any) -> interface.Kernel:
        kernel, last = kernels[name], interface.KERNELS[-1]
        chosen = original(inputs, layout, (kernel, last))
        if must_serve and chosen is not kernel:
            raise RuntimeError(f"{name} does not serve {inputs}")
        return chosen

    interface.choose_kernel = choose if name else original
    try:
        yield
    finally:
        interface.choose_kernel = original


def steps(record: Record, *, rehearses: bool, names: Sequence[str] | None = None) -> None:
    """Steps and generation of both libraries, one after the other: each has the device to itself."""
    device = "cpu" if rehearses else "cuda"
    workloads = [w for w in (_tiny_workloads() if rehearses else CUDA_WORKLOADS) if names is None or w.name in names]
    machine = Machine(device, tuple(sorted(os.sched_getaffinity(0))))
    found: dict[Library, Measurement | WorkerError] = {}
    with tempfile.TemporaryDirectory() as cache:
        prepare_environment(cache)
        for workload, library, outcome in measure_one_by_one(workloads, machine=machine):
            found[library] = outcome
            if len(found) == 2:
                record(asdict(measured_row(workload, found)))
                found = {}


def _tiny_workloads() -> list[Workload]:
    """The first of each task, with a tiny model and short rows."""
    firsts = {workload.task: workload for workload in reversed(CUDA_WORKLOADS)}.values()
    return [
        replace(w, model=TINY, lengths=tuple(max(2, n // 64) for n in w.lengths[:8]), prompt_length=16, turns=1)
        for w in firsts
        if "use_liger_kernel" not in w.options
    ]


def doctor(record: Record, *, rehearses: bool) -> None:
    """What `prefrl doctor` says of each kind of run, and what the run takes."""
    from benchmarks import doctor as measured
    from benchmarks.inputs import build_model
    from tests.assets import tiny_tokenizer

    device = "cpu" if rehearses else "cuda"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        model = build_model(TINY if rehearses else MODEL_1_5B, seed=0, device=device)
        model.save_pretrained("model")
        tiny_tokenizer().save_pretrained("model")
        del model
        for algorithm in measured.ALGORITHMS:
            gc.collect()
            try:
                record(measured.beside_each_other(algorithm, "model", device=device, scale=1 if rehearses else 16))
            except Exception:
                record({"algorithm": algorithm, "problem": traceback.format_exc(limit=-4)[-2000:]})


# What vLLM's log says of a sleep, and what becomes of it here.
_ASLEEP = re.compile(r"It took (?P<sleep_s>[\d.]+) seconds to fall asleep")
_AWAKE = re.compile(r"It took (?P<seconds>[\d.]+) seconds to wake up tags \['(?P<tag>\w+)'\]")
_FREED = re.compile(
    r"Sleep mode freed (?P<freed_gib>[\d.]+) GiB memory, (?P<held_gib>[\d.]+) GiB memory is still in use"
)
_LOGGED = {"time/weight_sync_s": "sync_s", "time/generation_s": "generation_s", "step_time": "step_s"}


def shared(record: Record, *, rehearses: bool, minutes: float = 8.0) -> None:
    """What training holds, and three steps of `prefrl grpo --vllm_mode colocate`: what sleeping frees and costs.

    The steps need vLLM.
    """
    from benchmarks.inputs import build_model
    from tests.assets import tiny_tokenizer

    end = time.monotonic() + 60 * (minutes - 1)
    # On a CPU, vLLM's attention knows no head smaller than 32.
    sizes = replace(TINY, hidden_size=128, ffn_size=256, dtype="float32") if rehearses else MODEL_1_5B
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_model(sizes, seed=0)
        model.save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        del model
        _record_held(record, folder / "model", rehearses=rehearses)
        if "PREFRL_VLLM_PYTHON" not in os.environ:
            record({"left_out": "vLLM: PREFRL_VLLM_PYTHON names the Python of an environment that has it"})
            return
        rows = "".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(64))
        (folder / "sums.jsonl").write_text(rows, encoding="utf-8")
        words = ["--model_name_or_path", "model", "--dataset_name", "sums.jsonl", "--reward_funcs", "numeric_reward"]
        words += ["--use_vllm", "--vllm_mode", "colocate", "--output_dir", "out", "--max_steps", "3"]
        words += ["--logging_steps", "1", "--save_strategy", "no", "--report_to", "none", "--optim", "adamw_torch"]
        words += ["--dtype", sizes.dtype]
        words += ["--max_completion_length", "16" if rehearses else "512", "--vllm_args", "--max_model_len 1024"]
        words += ["--use_cpu"] if rehearses else ["--per_device_train_batch_size", "32"]
        code, said = _ended_in_time(words, folder, seconds=end - time.monotonic())
        if code:
            record({"problem": said[-2000:] or f"the run ended with {code}"})
            return
        if share := re.search(r"gets ([\d.]+) of the memory", said):
            record({"share": float(share[1])})
        log = (folder / "out/vllm-server.log").read_text(encoding="utf-8")
        lines = (folder / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for found in lives(log, [json.loads(line) for line in lines]):
            record(found)


def _record_held(record: Record, model: Path, *, rehearses: bool) -> None:
    """What the doctor sets aside for contexts and gaps, beside what training takes of it."""
    from prefrl.scripts.checkup.resources import _CONTEXTS

    try:
        found = memory_of_training(model, device="cpu" if rehearses else "cuda")
    except Exception:
        record({"problem": traceback.format_exc(limit=-4)[-2000:]})
        return
    record({"set_aside": _CONTEXTS / 2**30} | {f"{name}_gib": round(value, 3) for name, value in found.items()})


def _ended_in_time(words: Sequence[str], folder: Path, *, seconds: float) -> tuple[int, str]:
    """The exit code of `prefrl grpo`, and what it says. After some time it is asked to end, with its server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "prefrl.scripts.main", "grpo", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.terminate()
        said = process.communicate()[1]
    return process.returncode, said


def lives(log: str, logged: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """For each step, what the server's log and the run's metrics say of it.

    The server falls asleep once before the first step, and after the completions of each step.
    """
    slept, freed = ([_figures(found) for found in pattern.finditer(log)] for pattern in (_ASLEEP, _FREED))
    woke: dict[str, list[float]] = {"weights": [], "kv_cache": []}
    for found in _AWAKE.finditer(log):
        woke[found["tag"]].append(float(found["seconds"]))
    steps = [entry for entry in logged if "time/weight_sync_s" in entry]
    return [
        {
            "step": entry["step"],
            **{ours: entry[name] for name, ours in _LOGGED.items()},
            "wake_weights_s": woke["weights"][number],
            "wake_cache_s": woke["kv_cache"][number],
            **slept[number + 1],
            **(freed[number + 1] if freed else {}),  # a build for CPUs frees nothing
        }
        for number, entry in enumerate(steps)
    ]


def _figures(found: re.Match[str]) -> dict[str, float]:
    return {name: float(value) for name, value in found.groupdict().items()}
