"""The vLLM server that is started for a run: what it runs, and what is refused before it starts."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from prefrl.errors import ConfigError
from prefrl.scripts.arguments.launch import LaunchArguments
from prefrl.scripts.launch.run import ServerProgram
from prefrl.scripts.launch.vllm_serve import ServeArguments, check_port, serve_command
from prefrl.scripts.parsing.command_parser import CommandParser

__all__ = ["check_start", "choose_port", "plan_server"]

# Defaults of the run's own options.
_HOST, _PORT = "127.0.0.1", "vllm_server_port"
# The values that vLLM accepts for its maximum LoRA rank.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_MISSING = "import importlib.util as u; print(*(name for name in ('vllm', 'prefrl') if u.find_spec(name) is None))"


def plan_server(
    options: LaunchArguments, run: Mapping[str, Any], visible: Sequence[str], environment: Mapping[str, str]
) -> ServerProgram:
    """The program that starts the vLLM server.

    Args:
        options: Where the server runs, and with which Python.
        run: The algorithm's options by name.
        visible: GPUs of this machine.
        environment: Environment variables of this process.

    Raises:
        ConfigError: The options of the server cannot work.
    """
    gpus = options.server_gpus(visible)
    words = ["--model", run["model_name_or_path"], "--port", str(run[_PORT])]
    if run["model_revision"] != "main":  # the default of both
        words += ["--revision", run["model_revision"]]
    if len(gpus) > 1:
        words += ["--tensor_parallel_size", str(len(gpus))]
    if run["use_peft"] and run["weight_sync"] in (None, "adapter"):
        words += ["--max_lora_rank", str(_lora_rank(run))]
    words += _split(options.vllm_args or "")
    serve = _check_server(words, gpus, run)
    python = options.server_python(environment)
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    command = [python, "-P", "-m", "prefrl.scripts.main", "vllm-serve", *words]
    return ServerProgram(command, devices, port=serve.port, start_timeout=serve.start_timeout)


def check_start(server: ServerProgram) -> None:
    """Refuse a server that could not start here.

    Raises:
        ConfigError: Its Python lacks vLLM or prefrl.
    """
    python = server.command[0]
    done = subprocess.run([python, "-P", "-c", _MISSING], capture_output=True, text=True)
    missing = done.stdout.split() if done.returncode == 0 else ["Python"]
    if missing:
        raise ConfigError(
            f"vllm_python={python!r}: {' and '.join(missing)} not found there. Set vllm_python, or the variable "
            "PREFRL_VLLM_PYTHON, to the Python of an environment with vLLM and prefrl: see docs/vllm.md."
        )


def choose_port(port: int, *, is_given: bool) -> int:
    """The port of the server: that of the option, or a free one if another program uses the default.

    Args:
        port: `vllm_server_port`.
        is_given: Whether it is more than the default.

    Raises:
        ConfigError: Another program uses a port that was given.
    """
    try:
        check_port(_HOST, port)
    except ConfigError as error:
        if is_given:
            raise ConfigError(
                f"{_PORT}={port}: another program uses this port. Set another, or leave it out for a free one."
            ) from error
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            return int(probe.getsockname()[1])
    return port


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
    if (serve.host, serve.port) != (_HOST, run[_PORT]):
        raise ConfigError(
            f"vllm_args: host={serve.host!r} and port={serve.port} differ from the address that the run connects to, "
            f"{_HOST} and {run[_PORT]}. Remove them; vllm_server_port of the run sets the port of both."
        )
    size = (serve.tensor_parallel_size or 1) * (serve.data_parallel_size or 1)
    if gpus and size != len(gpus):
        raise ConfigError(
            f"vllm_args: tensor_parallel_size={serve.tensor_parallel_size} times "
            f"data_parallel_size={serve.data_parallel_size} is {size}, but vllm names {len(gpus)} GPUs"
        )
    return serve
