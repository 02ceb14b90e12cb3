"""Options of every algorithm that say how its run is started: processes, and a vLLM server for this run."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, check_unset, opt
from prefrl.options.names import nearest
from prefrl.scripts.arguments.command import Given

# Folder of the accelerate configs that can be selected by name; examples/accelerate_configs links to it.
CONFIGS = Path(__file__).parents[1] / "launch" / "accelerate_configs"
AUTO, CPU = "auto", "cpu"  # values of `vllm` besides GPUs
COLOCATE = "colocate"  # the value of `vllm_mode` with which a server is on the device of training
# Environment variable of training processes that a launch starts: how many they are, on all machines together.
LAUNCHED = "PREFRL_NUM_PROCESSES"
# Environment variable of those that end before the model is loaded, when all has been checked. It names the file for
# the share of the device that a server can have.
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
        "names GPUs, and 'cpu' needs a build of vLLM for CPUs. Training uses the other GPUs. If there is only one, "
        "'auto' lets both share it, as vllm_mode='colocate' does.",
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
        if self.vllm is None:
            check_unset(self, "vllm_python", "vllm_args", because="no server is started", remedy="Set vllm.")

    def check_machines(self) -> None:
        """Refuse inconsistent numbers of machines and processes.

        Raises:
            ConfigError: They are inconsistent.
        """
        if self.num_machines is None:
            names = ("machine_rank", "main_process_ip")
            check_unset(self, *names, because="one machine trains", remedy="Set num_machines.")
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

    def placed(self, run: Mapping[str, Any], visible: Sequence[str]) -> LaunchArguments:
        """The options, with a place for the server instead of "auto".

        Args:
            run: The options of the run.
            visible: GPUs of this machine.

        Raises:
            ConfigError: There is a single GPU, and an option says that it is not shared; or one that is shared is not
                that of a single process.
        """
        if self.vllm != AUTO:
            return self
        if run["use_cpu"] or not visible:
            return dataclasses.replace(self, vllm=CPU)
        shares_device = run["vllm_mode"] == COLOCATE
        if shares_device and self.num_processes != 1 and (len(visible) > 1 or self.num_processes is not None):
            raise ConfigError(
                f"vllm_mode='colocate' with num_processes={self.num_processes} and {len(visible)} visible GPUs: one "
                "process and one server share a GPU. Set num_processes=1, or leave vllm_mode out; vllm='auto' then "
                "gives the server the last GPU."
            )
        if not shares_device and len(visible) == 1:
            raise ConfigError(
                f"vllm='auto' with vllm_mode={run['vllm_mode']!r}: one GPU is visible, but the server and training "
                "need one each. Leave vllm_mode out, so that they share it, or start `prefrl vllm-serve` on another "
                "machine and set vllm_server_host."
            )
        return dataclasses.replace(self, vllm=visible[0] if shares_device else visible[-1])

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


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """For each GPU that this process sees, the value that selects it in CUDA_VISIBLE_DEVICES."""
    import torch  # not needed for --help

    listed = environment.get("CUDA_VISIBLE_DEVICES")
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return listed.split(",")[:count] if listed else [str(i) for i in range(count)]


def with_mode(given: Given, options: LaunchArguments, visible: Sequence[str]) -> Given:
    """The options of a run; if it starts a server and there is a single GPU, both share it unless an option says no.

    Args:
        given: The options.
        options: How it is started.
        visible: GPUs of this machine.
    """
    if options.vllm != AUTO or given.values.get("use_cpu") or len(visible) != 1 or "vllm_mode" in given.values:
        return given
    return dataclasses.replace(given, values={**given.values, "vllm_mode": COLOCATE})


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
    shares_device = given.values.get("use_vllm") and given.values.get("vllm_mode") == COLOCATE
    if shares_device and "LOCAL_RANK" not in environment:
        asked.setdefault("vllm", AUTO)
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
            if shares_device and options.vllm != AUTO:
                raise ConfigError(
                    f"vllm={options.vllm!r} with vllm_mode='colocate': the server shares the device of training. "
                    "Remove one of them."
                )
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
