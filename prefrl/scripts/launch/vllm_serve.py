"""`prefrl vllm-serve`: start an unmodified vLLM server that samples for prefrl's trainers and takes their weights.

And the server that a run starts, with this command: its command line, and what is refused before it starts.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import ipaddress
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError, only_on_linux
from prefrl.generation.server import KEY_VARIABLE, check_key, key_of_user
from prefrl.generation.vllm.members import Registration, url_of
from prefrl.options.fields import check_fields, opt, parse_json
from prefrl.options.names import unpinned_code
from prefrl.options.server_rules import DNS, FOLDER
from prefrl.scripts.arguments.launch import COLOCATE, LaunchArguments
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.launch.processes import Program, Supervisor

HOST = "127.0.0.1"  # of a server that a run starts
PORT = "vllm_server_port"  # the run's option
ELSEWHERE = "Start prefrl vllm-serve on a machine with Linux, and set vllm_server_host of the run: see docs/vllm.md."
_OLDEST_VLLM = (0, 32)
_PLUGIN = "prefrl"

# Flags that trainers rely on, whatever the options are.
CONTRACT = (
    "--enable-scale-out",  # token ids in and out: /inference/v1/generate
    *("--logprobs-mode", "processed_logprobs"),
    *("--max-logprobs", "-1"),
    *("--weight-transfer-config", '{"backend":"prefrl"}'),
    *("--middleware", "prefrl.generation.server.Guard"),
    "--disable-fastapi-docs",
    *("--disable-access-log-for-endpoints", "/health"),
)
# For a CPU build of vLLM. Its random generators cannot be rewound, so the engine dies when the prompt of a request
# with a seed is processed in several chunks. This also happens when a weight sync makes it process a request again.
CPU_FLAGS = ("--no-enable-chunked-prefill",)
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # pause, resume and weight transfer
_UNPICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_ROUTES_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # the only one that returns experts
_LORA_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

_IS_SET = "trainers rely on the value that this command gives"
_IS_HTTP = "trainers speak HTTP to host and port. Put a proxy in front of the server"
_ONE_SERVER = "trainers must reach all replicas through one address. Start one server for each group of GPUs instead"
_TOKENIZER = "trainers compare the server's tokenizer with their own"
# Flags of vLLM that are refused, and why.
REFUSED = {
    "api-key": f"everyone on the machine can read a command line. Set {KEY_VARIABLE} in the environment",
    "logprobs-mode": _IS_SET,
    "max-logprobs": _IS_SET,
    "weight-transfer-config": _IS_SET,
    "middleware": _IS_SET,
    "enable-scale-out": _IS_SET,
    "disable-fastapi-docs": _IS_SET,
    "enable-lora": "set --max_lora_rank instead",
    "skip-tokenizer-init": _TOKENIZER,
    "tokens-only": _TOKENIZER,
    "root-path": _IS_HTTP,
    "uds": _IS_HTTP,
    "grpc": _IS_HTTP,
    "grpc-port": _IS_HTTP,
    "ssl-keyfile": _IS_HTTP,
    "ssl-certfile": _IS_HTTP,
    "ssl-ca-certs": _IS_HTTP,
    "headless": _ONE_SERVER,
    "data-parallel-rank": _ONE_SERVER,
    "data-parallel-start-rank": _ONE_SERVER,
    "data-parallel-external-lb": _ONE_SERVER,
    "data-parallel-hybrid-lb": _ONE_SERVER,
    "data-parallel-multi-port-external-lb": _ONE_SERVER,
}
REFUSED_SHORT = frozenset({"-dpn", "-dpr", "-dpe", "-dph", "-dpm"})  # short flags of data parallelism

# The address for health checks of a server that listens on every address.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass
class ServeArguments:
    """What to serve, and where. Options that are None are left to vLLM."""

    model: str = dataclasses.field(metadata={"help": "Name of a model on the Hub, or a folder."})
    revision: str | None = opt(None, "Branch, tag or commit of the model on the Hub.")
    tensor_parallel_size: Annotated[int, Ge(1)] | None = opt(None, "Number of GPUs that share each layer.")
    data_parallel_size: Annotated[int, Ge(1)] | None = opt(
        None, "Number of replicas of the model behind the same address."
    )
    host: str = opt("127.0.0.1", f"Address to listen on. Any address other than a loopback one needs {KEY_VARIABLE}.")
    port: Annotated[int, Ge(1), Le(65535)] = opt(8000, "Port to listen on.")
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = opt(
        None, "Fraction of the GPU's memory for weights, activations and the key/value cache."
    )
    enable_sleep_mode: bool = opt(
        False, "Let a trainer on the same GPU put the server to sleep, which frees the memory: vllm_mode='colocate'."
    )
    dtype: str | None = opt(None, "Data type of the weights, such as bfloat16.")
    max_model_len: Annotated[int, Ge(1)] | None = opt(
        None, "Maximum number of tokens of prompt and completion together."
    )
    enable_prefix_caching: bool | None = opt(None, "Let prompts with a common prefix share its key/value cache.")
    enforce_eager: bool = opt(
        False, "Use no CUDA graphs and no compilation. The server then starts faster and generates more slowly."
    )
    kv_cache_dtype: str | None = opt(None, "Data type of the key/value cache, such as fp8.")
    trust_remote_code: bool = opt(False, "Run code that comes with the model.")
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] | None = opt(
        None, "How much the HTTP server logs."
    )
    speculative_config: dict[str, Any] | str | None = opt(
        None, "Settings of speculative decoding: a mapping in the YAML file. On the command line, give it as JSON."
    )
    max_lora_rank: Annotated[int, Ge(1)] | None = opt(
        None, "Accept LoRA adapters up to this rank from trainers. By default, only full weights are accepted."
    )
    enable_return_routed_experts: bool = opt(
        False,
        "Return the experts that a mixture chooses for each token, for trainers with router_replay. vLLM does so on "
        "GPUs, with prefix caching and without pipeline parallelism.",
    )
    start_timeout: Annotated[float, Gt(0)] = opt(1800.0, "Seconds within which the server must be ready.")
    health_timeout: Annotated[float, Gt(0)] = opt(
        120.0, "Seconds without an answer after which the server is stopped."
    )
    join: str | None = opt(
        None,
        "Folder in which the server registers when it is ready, for trainers with vllm_server_base_url='dir:FOLDER'. "
        "It is removed from there when it ends. Servers and trainers need the same key.",
    )
    dry_run: bool = opt(False, "Print the command and its environment variables without running it.")

    def __post_init__(self) -> None:
        check_fields(self)
        parse_json(self, "speculative_config")
        if self.join is not None and (not self.join or self.join.startswith((FOLDER, DNS)) or "://" in self.join):
            raise ConfigError(
                f"join={self.join!r}: must be a folder, such as /shared/fleet; trainers name it dir:/shared/fleet. "
                "Without it, the server does not register."
            )


def main(argv: Sequence[str]) -> int:
    """Start the server and watch it until a signal arrives. Options that are unknown here are passed on to vLLM."""
    parser = CommandParser(
        "vllm-serve",
        (ServeArguments,),
        "Serve a model to trainers, with vLLM. Options that are not listed here are passed on to `vllm serve`. "
        f"Clients must send the key in the environment variable {KEY_VARIABLE}; if it is not set, a random key is "
        "stored in a file that only you can read.",
    )
    (options,), forwarded = parser.parse_known(argv)
    flags = _flags_of_build()
    if flags:  # a build for CPUs refuses to sleep, and yet answers requests to do so
        options = dataclasses.replace(options, enable_sleep_mode=False)
    command = serve_command(options, [*flags, *forwarded])
    added = serve_environment(options, os.environ)
    if options.dry_run:
        print(shlex.join([*(f"{name}={value}" for name, value in added.items()), *command]))
        return 0
    _check_vllm()
    if options.enable_return_routed_experts and _flags_of_build():
        raise ConfigError(
            "enable_return_routed_experts=True: a CPU build of vLLM cannot return experts, because its Model Runner "
            "V2 needs Triton. Use a build for GPUs, or leave it out and set router_replay=False in the trainer."
        )
    warning = unpinned_code(options.model, options.revision) if options.trust_remote_code else None
    if warning is not None:
        print(f"prefrl vllm-serve: {warning}", file=sys.stderr)
    check_port(options.host, options.port)
    key = key_of_user(os.environ)
    registration = None
    if options.join is not None:
        registration = Registration(
            Path(os.path.expanduser(options.join)), url_of(_address(options.host), options.port), key=key
        )
    supervisor = Supervisor(
        command,
        {**os.environ, **added, KEY_VARIABLE: key},
        address=(_WILDCARDS.get(options.host, options.host), options.port),
        start_timeout=options.start_timeout,
        health_timeout=options.health_timeout,
        registration=registration,
    )
    ended_by = supervisor.run(
        when_ready=f"prefrl vllm-serve: {options.model} is ready on {url_of(options.host, options.port)}"
    )
    print(f"prefrl vllm-serve: ended by {ended_by.name}", file=sys.stderr)
    return 0


def serve_command(options: ServeArguments, forwarded: Sequence[str] = ()) -> list[str]:
    """The command line of vLLM's server.

    Raises:
        ConfigError: One of `forwarded` would break what trainers rely on.
    """
    _check_forwarded(forwarded)
    # -P: like the `vllm` command, it must not search the working directory for modules.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    for name, flag in FLAGS.items():
        value = getattr(options, name)
        if isinstance(value, bool):
            command += [f"--{flag}"] if value else [f"--no-{flag}"] if name == "enable_prefix_caching" else []
        elif value is not None:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    if options.max_lora_rank is not None:
        command.append("--enable-lora")
        if (options.data_parallel_size or 1) > 1:
            # By default vLLM starts one front end for each replica, and with several it refuses adapters at run time.
            command += ["--api-server-count", "1"]
    return [*command, *CONTRACT, *forwarded]


def serve_environment(options: ServeArguments, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of the server in addition to `environment`.

    Raises:
        ConfigError: The server would not be safe: there is no key where others need one, it is too short, a front end
            would not ask for it, or vLLM would unpickle what clients send.
    """
    key = environment.get(KEY_VARIABLE)
    if not key and not _is_loopback(options.host):
        raise ConfigError(
            f"host={options.host!r}: anyone who can reach the server could use and replace the model. Set "
            f"{KEY_VARIABLE} to a secret, here and for the trainer, or set host to '127.0.0.1'."
        )
    if key:
        check_key(key)
    if environment.get(_UNPICKLES, "0") != "0":
        raise ConfigError(f"{_UNPICKLES}: vLLM would run code that clients send as pickles. Unset it.")
    if environment.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        raise ConfigError("VLLM_USE_RUST_FRONTEND: vLLM's Rust front end does not check the key. Unset it.")
    added = _ENVIRONMENT | ({} if options.max_lora_rank is None else _LORA_ENVIRONMENT)
    if options.enable_return_routed_experts:
        added |= _ROUTES_ENVIRONMENT
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and _PLUGIN not in plugins.split(","):
        added["VLLM_PLUGINS"] = ",".join([name for name in plugins.split(",") if name] + [_PLUGIN])
    return added


# Our options by the name of vLLM's flag. vLLM's server has two log levels; like TRL's, ours is that of HTTP.
_OWN = frozenset({"model", "start_timeout", "health_timeout", "join", "dry_run"})
FLAGS = {
    field.name: "uvicorn-log-level" if field.name == "log_level" else field.name.replace("_", "-")
    for field in dataclasses.fields(ServeArguments)
    if field.name not in _OWN
}


def _check_forwarded(words: Sequence[str]) -> None:
    if words and not words[0].startswith("-"):
        raise ConfigError(f"unexpected argument {words[0]!r}: options are written as --name value")
    reasons = REFUSED | dict.fromkeys(("model", *FLAGS.values()), "write the option of prefrl in full")
    for word in words:
        if word in REFUSED_SHORT:
            raise ConfigError(f"{word}: cannot be given here: {_ONE_SERVER}.")
        if not word.startswith("--"):
            continue
        # vLLM accepts underscores, --name=value, --name.key value, --no-name, and any prefix of a name.
        given = word[2:].partition("=")[0].partition(".")[0].replace("_", "-")
        beginnings = (given, given.removeprefix("no-"))
        for flag, reason in reasons.items():
            if flag.startswith(beginnings):
                raise ConfigError(f"{word.partition('=')[0]}: vLLM's --{flag} cannot be given here: {reason}.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str) -> str:
    """Where trainers reach a server that listens on `host`."""
    if host not in _WILDCARDS:
        return host
    try:
        # Nothing is sent: the kernel only chooses the interface for an address of a documentation network.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("2001:db8::1" if ":" in host else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"host={host!r} with join: the address under which trainers reach this machine is not known "
            f"({error.strerror}). Set host to it."
        ) from error


def _flags_of_build() -> tuple[str, ...]:
    """`CPU_FLAGS` for a CPU build of vLLM, recognized by its version, as vLLM itself does."""
    return CPU_FLAGS if "cpu" in (_version_of_vllm() or "") else ()


def _version_of_vllm() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_vllm() -> None:
    remedy = (
        "Install it in the server's environment, with the trainer's version of prefrl: pip install 'prefrl[vllm]'."
    )
    found = _version_of_vllm()
    if found is None and sys.platform != "linux":
        raise only_on_linux("prefrl vllm-serve", ELSEWHERE)
    if found is None:
        raise ConfigError(f"vLLM is not installed for {sys.executable}. {remedy}")
    if tuple(int(number) for number in found.split(".")[:2]) < _OLDEST_VLLM:
        oldest = ".".join(map(str, _OLDEST_VLLM))
        raise ConfigError(f"vLLM {found} is too old: prefrl needs at least {oldest}. {remedy}")
    if _PLUGIN not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise ConfigError(
            "vLLM cannot find prefrl's plugin: prefrl is not installed, or the installed version does not have it. "
            f"{remedy}"
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port that is in use: vLLM would share it, and requests would reach either of the two servers.

    Raises:
        ConfigError: The port is in use, or it is not possible to listen on it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"host={host!r}, port={port}: cannot listen there: {error.strerror}. Set another."
        ) from error


def choose_port(port: int, *, is_given: bool) -> int:
    """`vllm_server_port`, or a free one if that is a default in use; ConfigError if it is given and in use."""
    try:
        check_port(HOST, port)
    except ConfigError as error:
        if is_given:
            raise ConfigError(
                f"{PORT}={port}: another program uses this port. Set another, or leave it out for a free one."
            ) from error
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            return int(probe.getsockname()[1])
    return port


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
