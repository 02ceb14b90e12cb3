"""Launches that cannot do what is asked for are refused, and failed processes are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from transformers import BitsAndBytesConfig

from prefrl.distributed import check_backend, check_changed_layers, check_processes, check_quantized, launcher
from prefrl.distributed.launcher import first_failure, words_of
from prefrl.errors import ConfigError
from tests.patience import before_a_deadline

ROOT = Path(__file__).parents[3]


def failure(folder: Path, rank: int, exitcode: int, said: str | None = None, age: float = 0.0) -> ProcessFailure:
    """As torchrun makes it: with the error file of the process if it wrote one, `age` seconds ago."""
    path = folder / f"{rank}.json"
    if said is not None:
        information = {"py_callstack": "", "timestamp": "1"}
        path.write_text(json.dumps({"message": {"message": said, "extraInfo": information}}), encoding="utf-8")
        os.utime(path, (time.time() - age, time.time() - age))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))


def test_of_two_errors_in_one_second_the_earlier_is_told(tmp_path: Path) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer", age=0.1),
        1: failure(tmp_path, 1, 1, "ValueError: the cause", age=0.2),
        2: failure(tmp_path, 2, 1, "RuntimeError: Connection reset by peer", age=0.0),
    }
    rank, first = first_failure(failures)
    assert rank == 1
    assert words_of(first) == "ended with exit code 1; the others were ended, too. ValueError: the cause"


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-signal.SIGKILL, "was ended by SIGKILL (often because memory ran out)"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (3, "ended with exit code 3"),
    ],
)
def test_a_process_that_could_not_say_why_comes_before_those_that_miss_it(
    tmp_path: Path, exitcode: int, words: str
) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer"),
        1: failure(tmp_path, 1, -signal.SIGTERM),
        2: failure(tmp_path, 2, exitcode),
        3: failure(tmp_path, 3, -signal.SIGABRT),
    }
    rank, first = first_failure(failures)
    assert rank == 2
    assert words_of(first) == f"{words}; the others were ended, too."


def test_an_error_comes_before_a_process_group_that_gave_up(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, -signal.SIGABRT), 1: failure(tmp_path, 1, 1, "ValueError: the cause")}
    assert first_failure(failures)[0] == 1


WORKER = """
import os, sys, threading, time
from prefrl.distributed import launcher
launcher._LAST_SECONDS = float(sys.argv[1])
def fail():
    threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter would wait for it
    raise ValueError("the cause")
launcher.as_worker(fail)
"""


def test_a_worker_that_failed_leaves_its_error_and_ends_whatever_it_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": str(path)}

    def attempt(seconds: float) -> str | None:
        command = [sys.executable, "-c", WORKER, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 1
        error, timeout, _ = done.stderr.partition("Timeout (0:00:")
        assert timeout
        return error if error.rstrip().endswith("ValueError: the cause") else None  # it had no time to say so

    assert before_a_deadline(attempt).startswith("Traceback")
    assert json.loads(path.read_text(encoding="utf-8"))["message"]["message"] == "ValueError: the cause"


def test_a_worker_that_is_ended_while_it_writes_its_error_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr("json.dump", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        launcher.as_worker(lambda: 1 / 0)
    assert not path.exists()
    assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(path)


def arguments(**values: Any) -> SimpleNamespace:
    defaults = {"world_size": 2, "device": torch.device("cpu"), "fsdp": None, "deepspeed": None}
    return SimpleNamespace(**defaults | values)


def accelerator(
    found: DistributedType,
    device: str = "cuda",
    *,
    is_fsdp2: bool = False,
    mixed_precision: str = "no",
    min_num_params: int | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        distributed_type=found,
        device=torch.device(device),
        is_fsdp2=is_fsdp2,
        mixed_precision=mixed_precision,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(min_num_params=min_num_params)),
    )


TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}


@pytest.mark.parametrize(
    ("environment", "values"),
    [
        pytest.param({}, {"world_size": 1}, id="one process"),
        pytest.param(TORCHRUN, {}, id="two"),
        pytest.param({}, {}, id="two, of mpirun"),
        pytest.param({**TORCHRUN, "PREFRL_NUM_PROCESSES": "2"}, {}, id="two, of prefrl launch"),
        pytest.param({**TORCHRUN, **DEEPSPEED, "ACCELERATE_USE_CPU": "false"}, {}, id="DeepSpeed"),
        pytest.param({**TORCHRUN, "ACCELERATE_USE_CPU": "true"}, {}, id="CPU"),
    ],
)
def test_processes_that_train_together_may_train(environment: dict[str, str], values: dict[str, Any]) -> None:
    check_processes(arguments(**values), environment)


@pytest.mark.parametrize(
    ("environment", "values", "message"),
    [
        pytest.param(
            TORCHRUN,
            {"world_size": 1},
            r"WORLD_SIZE=2, but the process group has size 1: .* the same output_dir. "
            r".*Set use_cpu=True \(--use_cpu true\)",
            id="no GPU",
        ),
        pytest.param(
            {"WORLD_SIZE": "2", "RANK": "1"},
            {"world_size": 1, "device": torch.device("cuda", 0)},
            "WORLD_SIZE=2, but the process group has size 1: .* Start the processes with `prefrl launch`",
            id="no launcher",
        ),
        pytest.param(
            {"PREFRL_NUM_PROCESSES": "2"},
            {"world_size": 1},
            "num_processes=2, but accelerate started 1: .* MULTI_CPU .*--accelerate_config ddp",
            id="MULTI_CPU",
        ),
        pytest.param(
            {**TORCHRUN, "PREFRL_NUM_PROCESSES": "4"}, {}, "num_processes=4, but accelerate started 2", id="too few"
        ),
        pytest.param(
            {**TORCHRUN, **DEEPSPEED, "ACCELERATE_USE_CPU": "True"},
            {},
            "ACCELERATE_USE_CPU=true with DeepSpeed: .*use_cpu: false in the accelerate config, and use_cpu=True",
            id="DeepSpeed on accelerate's CPU",
        ),
        pytest.param(
            {**TORCHRUN, "ACCELERATE_USE_CPU": "1"},
            {"deepspeed": "d.json"},
            "ACCELERATE_USE_CPU=true",
            id="its config",
        ),
    ],
)
def test_processes_that_would_train_alone_are_refused(
    environment: dict[str, str], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_processes(arguments(**values), environment)


@pytest.mark.parametrize(
    ("environment", "values", "found"),
    [
        pytest.param({}, {}, accelerator(DistributedType.NO, "cpu"), id="one process"),
        pytest.param({}, {}, accelerator(DistributedType.MULTI_CPU, "cpu"), id="data parallel on CPUs"),
        pytest.param({}, {}, accelerator(DistributedType.MULTI_GPU), id="data parallel"),
        pytest.param(FSDP, {}, accelerator(DistributedType.FSDP, is_fsdp2=True), id="FSDP2"),
        pytest.param({}, {"fsdp": True}, accelerator(DistributedType.FSDP, "cpu", is_fsdp2=True), id="its config"),
        pytest.param(DEEPSPEED, {}, accelerator(DistributedType.DEEPSPEED, "cpu"), id="DeepSpeed"),
        pytest.param({"ACCELERATE_USE_FSDP": "false"}, {}, accelerator(DistributedType.MULTI_GPU), id="set to no"),
    ],
)
def test_a_backend_that_was_asked_for_may_train(
    environment: dict[str, str], values: dict[str, Any], found: SimpleNamespace
) -> None:
    check_backend(arguments(**values), environment, found)


@pytest.mark.parametrize(
    ("environment", "values", "found", "message"),
    [
        pytest.param(
            FSDP,
            {},
            accelerator(DistributedType.MULTI_CPU, "cpu"),
            "FSDP is requested, .* plain data parallelism on CPUs. .*--accelerate_config zero3",
            id="FSDP on CPUs",
        ),
        pytest.param(
            {},
            {"fsdp": True},
            accelerator(DistributedType.NO),
            "FSDP is requested, .* one process. .*`prefrl launch --accelerate_config fsdp2`",
            id="FSDP alone",
        ),
        pytest.param(FSDP, {}, accelerator(DistributedType.FSDP), "fsdp_version=1 .*fsdp_version: 2", id="FSDP1"),
        pytest.param(
            FSDP,
            {},
            accelerator(DistributedType.FSDP, is_fsdp2=True, min_num_params=1000),
            "min_num_params=1000: FSDP2 cannot be told by size",
            id="by size",
        ),
        pytest.param(
            {},
            {"deepspeed": "ds.json"},
            accelerator(DistributedType.MULTI_GPU),
            "DeepSpeed is requested, .* MULTI_GPU. Start it with `prefrl launch --accelerate_config zero3`",
            id="DeepSpeed that accelerate does not know of",
        ),
        pytest.param(DEEPSPEED, {}, accelerator(DistributedType.NO, "cpu"), "DeepSpeed is requested", id="alone"),
    ],
)
def test_a_backend_that_did_not_come_about_is_refused(
    environment: dict[str, str], values: dict[str, Any], found: SimpleNamespace, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_backend(arguments(**values), environment, found)


class Quantized(torch.nn.Module):
    """As transformers describes such a model."""

    is_quantized = True

    def __init__(self, storage: torch.dtype, *, bits: int = 4) -> None:
        super().__init__()
        options = {"bnb_4bit_quant_storage": storage} if bits == 4 else {}
        self.config = SimpleNamespace(
            quantization_config=BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **options)
        )
        self.weight = torch.nn.Parameter(torch.zeros(4, 1, dtype=storage), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.zeros(4, 1))


FSDP2 = accelerator(DistributedType.FSDP, is_fsdp2=True)
FSDP2_BF16 = accelerator(DistributedType.FSDP, is_fsdp2=True, mixed_precision="bf16")
ZERO_FP16 = accelerator(DistributedType.DEEPSPEED, mixed_precision="fp16")


@pytest.mark.parametrize(
    ("found", "model"),
    [
        pytest.param(
            accelerator(DistributedType.MULTI_GPU, mixed_precision="bf16"), Quantized(torch.float32), id="DDP"
        ),
        pytest.param(FSDP2, Quantized(torch.float32), id="FSDP2"),
        pytest.param(FSDP2, Quantized(torch.bfloat16), id="FSDP2, which casts nothing"),
        pytest.param(FSDP2_BF16, Quantized(torch.bfloat16), id="FSDP2 in bf16"),
        pytest.param(ZERO_FP16, Quantized(torch.uint8), id="DeepSpeed, integers"),
        pytest.param(ZERO_FP16, Quantized(torch.int8, bits=8), id="DeepSpeed, eight bits"),
        pytest.param(ZERO_FP16, Quantized(torch.float16), id="DeepSpeed in fp16"),
    ],
)
def test_quantized_weights_that_stay_what_they_are_may_be_trained_on(found: SimpleNamespace, model: Quantized) -> None:
    check_quantized(found, model)


@pytest.mark.parametrize(
    ("found", "model", "message"),
    [
        pytest.param(FSDP2, Quantized(torch.uint8), "uint8: FSDP2 .*quant_storage=torch.float32", id="integers"),
        pytest.param(FSDP2_BF16, Quantized(torch.uint8), "FSDP2 .*quant_storage=torch.bfloat16", id="integers, bf16"),
        pytest.param(FSDP2, Quantized(torch.int8, bits=8), "8 bits: FSDP2 .*load_in_4bit=True.*ZeRO-3", id="eight"),
        pytest.param(
            FSDP2_BF16, Quantized(torch.float32), "storage=torch.float32 with bf16.*=torch.bfloat16", id="cast"
        ),
        pytest.param(
            ZERO_FP16, Quantized(torch.float32), "storage=torch.float32 with fp16.*=torch.float16", id="ZeRO"
        ),
    ],
)
def test_quantized_weights_that_would_be_cast_or_not_shared_out_are_refused(
    found: SimpleNamespace, model: Quantized, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_quantized(found, model)


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_layers_may_change_unless_deepspeed_gathers_weights_inside_them(stage: int | None) -> None:
    config = {"zero_optimization": {"stage": stage}}
    plugin = None if stage is None else SimpleNamespace(deepspeed_config=config)
    found = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    check_changed_layers(found, option=None)
    if stage != 3:
        return check_changed_layers(found, option="fp8=True")
    with pytest.raises(ConfigError, match=r"fp8=True with DeepSpeed ZeRO-3: .* Use ZeRO-2"):
        check_changed_layers(found, option="fp8=True")


def test_megatron_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"MEGATRON_LM .* FSDP2"):
        check_processes(arguments(), {"ACCELERATE_USE_MEGATRON_LM": "true"})
