"""Options of every algorithm that say how its run is started: processes, and a vLLM server for this run."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, check_no_effect, opt
from prefrl.options.names import nearest
from prefrl.scripts.arguments.command import Given

# Folder of the accelerate configs that can be selected by name; examples/accelerate_configs links to it.
CONFIGS = Path(__file__).parents[1] / "launch" / "accelerate_configs"
AUTO, CPU = "auto", "cpu"  # values of `vllm` besides GPUs
# Environment variable of training processes that a launch starts: how many they are, on all machines together.
LAUNCHED = "PREFRL_NUM_PROCESSES"
# Environment variable of those that end before the model is loaded, when all has been checked.
ONLY_CHECK = "PREFRL_ONLY_CHECK"
_GPU = r"(?:\d+|(?:GPU|MIG)-[\w-]+)"
_GPUS = re.compile(rf"{_GPU}(?:\s*,\s*{_GPU})*")


@dataclass
class ProcessArguments:
    """How many processes train, where, and with which backend."""

    num_processes: Annotated[int, Ge(1), Le(1_000_000)] | None = opt(
        None,
        "Start this many training processes, on all machines together. By default, the command "
        "trains in its own process; with other launch options, it starts one process per training GPU, or a single "
        "one on a CPU.",
    )
    accelerate_config: str | None = opt(
        None,
        "Backend: single, ddp, zero1, zero2, zero3, zero3_offload, fsdp2 or a config file. The file is accelerate's. "
        "The default is single for one process, and ddp for several.",
    )
    num_machines: Annotated[int, Ge(1)] | None = opt(
        None, "Number of machines to train on. Run the command on each of them. The default is 1."
    )
    machine_rank: Annotated[int, Ge(0)] | None = opt(None, "Number of this machine, starting at 0.")
    main_process_ip: str | None = opt(None, "Address or host name of machine 0 that all machines can reach.")
    main_process_port: Annotated[int, Ge(1), Le(65535)] | None = opt(
        None,
        "Port on machine 0 for the rendezvous of processes. The default is a free port, or 29500 with several "
        "machines.",
    )


@dataclass
class LaunchArguments(ProcessArguments):
    """How many processes train, and the vLLM server of algorithms that sample completions."""

    vllm: str | None = opt(
        None,
        "Start a vLLM server for this run and sample on it. 'auto' uses the last GPU (or the CPU with use_cpu), '6,7' "
        "names GPUs, and 'cpu' needs a build of vLLM for CPUs. Training uses the other GPUs.",
        needs=["use_vllm"],
    )
    vllm_python: str | None = opt(
        None,
        "Python interpreter of the environment in which vLLM is installed. The default is the environment variable "
        "PREFRL_VLLM_PYTHON, or else the current interpreter.",
        needs=["use_vllm", "vllm"],
    )
    vllm_args: str | None = opt(
        None,
        "More options of prefrl vllm-serve for that server, in quotes, such as '--max_model_len 4096'.",
        needs=["use_vllm", "vllm"],
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.vllm is not None and self.vllm not in (AUTO, CPU) and not _GPUS.fullmatch(self.vllm.strip()):
            raise ConfigError(f"vllm={self.vllm!r}: must be auto, cpu, or the GPUs of the server, such as 6,7")
        for name in ("vllm_python", "vllm_args"):
            if self.vllm is None:
                check_no_effect(
                    name=name,
                    value=getattr(self, name),
                    unset=None,
                    because="no server is started",
                    remedy="Set vllm.",
                )

    def check_machines(self) -> None:
        """Refuse inconsistent numbers of machines and processes.

        Raises:
            ConfigError: They are inconsistent.
        """
        if self.num_machines is None:
            for name in ("machine_rank", "main_process_ip"):
                check_no_effect(
                    name=name,
                    value=getattr(self, name),
                    unset=None,
                    because="one machine trains",
                    remedy="Set num_machines.",
                )
        machines, rank, processes = self.num_machines or 1, self.machine_rank, self.num_processes
        if machines == 1:
            return
        if rank is None or processes is None or self.main_process_ip is None:
            given = f"machine_rank={rank}, num_processes={processes}, main_process_ip={self.main_process_ip}"
            raise ConfigError(f"num_machines={machines} with {given}: set all three on each machine")
        if rank >= machines:
            raise ConfigError(f"machine_rank={rank}: must be below num_machines={machines}")
        if processes % machines:
            raise ConfigError(
                f"num_processes={processes}: counts the processes of all machines, and must be a multiple of "
                f"num_machines={machines}"
            )
        if self.vllm is not None:
            raise ConfigError(
                f"vllm={self.vllm!r} with num_machines={machines}: only this machine could reach the server. Start "
                "`prefrl vllm-serve` on a separate machine and set vllm_server_host, as examples/grpo_vllm.slurm does."
            )

    def server_python(self, environment: Mapping[str, str]) -> str:
        """The Python that runs the server; ConfigError if it is no program."""
        python = self.vllm_python or environment.get("PREFRL_VLLM_PYTHON") or sys.executable
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"vllm_python={python!r}: is not a program. Set it to the Python of the environment with vLLM."
            )
        return python

    def server_gpus(self, visible: Sequence[str]) -> list[str]:
        """The GPUs of the server; none if there is no server, or if it runs on the CPU.

        Args:
            visible: GPUs of this machine.

        Raises:
            ConfigError: One of them is not there, or is named twice.
        """
        if self.vllm is None or self.vllm == CPU:
            return []
        gpus = [gpu.strip() for gpu in self.vllm.split(",")]
        if len(set(gpus)) < len(gpus):
            raise ConfigError(f"vllm={self.vllm!r}: names a GPU twice")
        for gpu in gpus:
            if gpu not in visible:
                seen = f"GPUs {','.join(visible)} are visible" if visible else "no GPU is visible"
                raise ConfigError(f"vllm={self.vllm!r}: there is no GPU {gpu!r}, {seen}. Write numbers such as 6,7.")
        return gpus


def launch_options(given: Given, environment: Mapping[str, str]) -> LaunchArguments | None:
    """How the run is to be started; None: this process trains.

    Args:
        given: The options of the run.
        environment: Environment variables of this process.

    Raises:
        ConfigError: Options contradict each other, or another launcher has started this process.
    """
    names = [field.name for field in dataclasses.fields(LaunchArguments)]
    asked = {name: given.values[name] for name in names if given.values.get(name) is not None}
    if not asked or LAUNCHED in environment:
        return None
    if "LOCAL_RANK" in environment:
        name, value = next(iter(asked.items()))
        raise ConfigError(
            f"{name}={value!r}: would start processes, but torchrun or accelerate has already started this one. "
            "Remove it, or start the command directly."
        )
    with given.locating():
        options = LaunchArguments(**asked)
        if options.vllm is not None:
            _check_address(options.vllm, given)
            options.server_python(environment)
    return options


def _check_address(vllm: str, given: Given) -> None:
    """Refuse a run that names a server besides the one that is started for it."""
    for name, own in (("vllm_server_base_url", None), ("vllm_server_host", "127.0.0.1")):
        value = given.values.get(name, own)
        if value != own:
            raise ConfigError(
                f"vllm={vllm!r}: would start a server, but {name}={value!r} names another one. Remove one of them."
            )


def config_file(name: str | None) -> Path | None:
    """The accelerate config with a name; the name may also be the path of a file. None: there is no name.

    Raises:
        ConfigError: There is no such config.
    """
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    if name is None or name in known:
        return None if name is None else known[name]
    if not Path(name).is_file():
        raise ConfigError(
            f"accelerate_config={name!r}: is neither a file nor the name of a config. {nearest(name, known)}"
        )
    return Path(name)
