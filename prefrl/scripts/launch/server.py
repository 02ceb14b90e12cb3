"""The vLLM server that a run starts: its command line, and what is refused before it starts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefrl.errors import ConfigError, only_on_linux
from prefrl.scripts.arguments.launch import COLOCATE, LaunchArguments
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.launch.processes import Program
from prefrl.scripts.launch.vllm_serve import ELSEWHERE, HOST, PORT, ServeArguments, serve_command

_SHARE = "gpu_memory_utilization"  # of the server
# The values that vLLM accepts for its maximum LoRA rank.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_MISSING = "import importlib.util as u; print(*(name for name in ('vllm', 'prefrl') if u.find_spec(name) is None))"


@dataclass(frozen=True)
class ServerProgram(Program):
    """A vLLM server on this machine."""

    port: int
    start_timeout: float  # seconds within which it must answer, which it watches itself

    def with_share(self, share: str) -> ServerProgram:
        """The same with a share of its device's memory."""
        print(f"prefrl launch: the vLLM server gets {share} of the memory of the GPU", file=sys.stderr, flush=True)
        return dataclasses.replace(self, command=[*self.command, f"--{_SHARE}", share])


def plan_server(
    options: LaunchArguments, run: Mapping[str, Any], visible: Sequence[str], environment: Mapping[str, str]
) -> ServerProgram:
    """The program that starts the vLLM server.

    Raises:
        ConfigError: The options of the server cannot work.
    """
    gpus = options.server_gpus(visible)
    words = ["--model", run["model_name_or_path"], "--port", str(run[PORT])]
    words += server_words(run, len(gpus), options.vllm_args)
    serve = _check_server(words, gpus, run)
    python = options.server_python(environment)
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    command = [python, "-P", "-m", "prefrl.scripts.main", "vllm-serve", *words]
    return ServerProgram(command, devices, port=serve.port, start_timeout=serve.start_timeout)


def server_words(run: Mapping[str, Any], num_gpus: int, vllm_args: str | None) -> list[str]:
    """Options of `prefrl vllm-serve` for the model of a run, but its name, and the user's."""
    words = []
    if run["model_revision"] != "main":  # the default of both
        words += ["--revision", run["model_revision"]]
    if num_gpus > 1:
        words += ["--tensor_parallel_size", str(num_gpus)]
    if run["use_peft"] and run["weight_sync"] in (None, "adapter"):
        words += ["--max_lora_rank", str(_lora_rank(run))]
    if run["vllm_mode"] == COLOCATE:
        words += ["--enable_sleep_mode"]
        words += [f"--{_SHARE}", str(given)] if (given := run[f"vllm_{_SHARE}"]) is not None else []
    return [*words, *_split(vllm_args or "")]


def check_start(server: ServerProgram) -> None:
    """Refuse a server that could not start here.

    Raises:
        ConfigError: Its Python lacks vLLM or prefrl.
    """
    python = server.command[0]
    done = subprocess.run([python, "-P", "-c", _MISSING], capture_output=True, text=True)
    missing = done.stdout.split() if done.returncode == 0 else ["Python"]
    if "vllm" in missing and sys.platform != "linux":
        raise only_on_linux("a vLLM server", ELSEWHERE)
    if missing:
        raise ConfigError(
            f"vllm_python={python!r}: {' and '.join(missing)} not found there. Set vllm_python, or the variable "
            "PREFRL_VLLM_PYTHON, to the Python of an environment with vLLM and prefrl: see docs/vllm.md."
        )


def _lora_rank(run: Mapping[str, Any]) -> int:
    """The smallest maximum rank that vLLM accepts and that fits the adapters of the run."""
    pattern = run["lora_rank_pattern"] or {}
    largest = max([run["lora_r"], *(json.loads(pattern) if isinstance(pattern, str) else pattern).values()])
    return next((rank for rank in _LORA_RANKS if rank >= largest), largest)


def _split(vllm_args: str) -> list[str]:
    try:
        return shlex.split(vllm_args)
    except ValueError as error:
        raise ConfigError(f"vllm_args={vllm_args!r}: {error}. Write it as in a shell.") from error


def _check_server(words: Sequence[str], gpus: Sequence[str], run: Mapping[str, Any]) -> ServeArguments:
    """Before anything is started, refuse options that the server would refuse or that do not match the run."""
    parsed, forwarded = CommandParser("vllm-serve", (ServeArguments,), "").parse_known(words)
    serve: ServeArguments = parsed[0]
    serve_command(serve, forwarded)
    if (serve.host, serve.port) != (HOST, run[PORT]):
        raise ConfigError(
            f"vllm_args: host={serve.host!r} and port={serve.port} differ from the address that the run connects to, "
            f"{HOST} and {run[PORT]}. Remove them; vllm_server_port of the run sets the port of both."
        )
    _check_share(serve, run)
    size = (serve.tensor_parallel_size or 1) * (serve.data_parallel_size or 1)
    if gpus and size != len(gpus):
        raise ConfigError(
            f"vllm_args: tensor_parallel_size={serve.tensor_parallel_size} times "
            f"data_parallel_size={serve.data_parallel_size} is {size}, but vllm names {len(gpus)} GPUs"
        )
    return serve


def _check_share(serve: ServeArguments, run: Mapping[str, Any]) -> None:
    """Refuse what a server on the device of training must not have."""
    if run["vllm_mode"] != COLOCATE:
        return
    if getattr(serve, _SHARE) != run[f"vllm_{_SHARE}"]:
        raise ConfigError(
            f"vllm_args: {_SHARE}={getattr(serve, _SHARE)} with vllm_mode='colocate': set vllm_{_SHARE} of the run, "
            "which checks that training and the server fit."
        )
    if serve.speculative_config is not None:
        raise ConfigError(
            f"vllm_args: speculative_config={serve.speculative_config!r} with vllm_mode='colocate': the server "
            "forgets all weights when it sleeps, and the run sends those of the policy alone. Remove it."
        )
