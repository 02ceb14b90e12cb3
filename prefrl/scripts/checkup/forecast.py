"""Where the time of an online step goes on other numbers of devices, from costs that were measured or are assumed.

With F FLOPs of training and scoring passes at f FLOP/s, C completions of m tokens on average and at most l, D devices
that train and S servers, which spend d seconds on a decoding step and t more on each of its tokens:

    training    T = F / (D f), or 3 w B / n if that is more: for each of B micro-batches, the w bytes of the weights
                are gathered twice and their gradients reduced once, at n bytes/s
    tokens      k = t C m / S
    generation  d l + k     a batch that has the servers for itself

    sync        generation + T
    overlap     max(generation, T)
    async       max(T, s)   with the s that solves  d l / (1 - k / s) = (a + 1) s - T

In mode "async", a step of s seconds asks for the batch of the step that is a steps later, and then waits for its own.
So a batch has (a + 1) s - T seconds from its request to the training that needs it: that is the right side. The left
side is what it takes beside the others, whose tokens take the share k / s of the servers' time.

To each of them, the transfer of the weights and the rest of the step are added. It is assumed that these costs hold
for any number of completions on a server, and that a step has the same batch on all numbers of devices. Whether the
model fits into their memory is not looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import datasets
import numpy as np
from rich.table import Table

from prefrl.errors import ConfigError
from prefrl.models.footprint import weights_of
from prefrl.run.folder import read_identity, read_metrics
from prefrl.scripts.checkup.dataset import Batches, row_lengths
from prefrl.scripts.checkup.findings import Section
from prefrl.scripts.checkup.resources import products_of, time_of
from prefrl.scripts.checkup.subject import Subject
from prefrl.scripts.parsing.yaml_file import load_yaml

Mode = Literal["sync", "overlap", "async"]  # `generation_mode`
MODES: tuple[Mode, ...] = get_args(Mode)
_REST = ("optimizer", "reward", "other")


@dataclass(frozen=True)
class Costs:
    """What a step costs.

    Args:
        flops: FLOP/s that a device reaches in training and scoring passes.
        decode_step: Seconds of a decoding step of a server, whatever it decodes.
        decode_token: Seconds that each sampled token takes in addition.
        mean_length: Tokens of a completion on average.
        longest: Tokens of the longest completion of a batch; None: `max_completion_length`.
        weights: Seconds of a weight transfer to the servers.
        rest: Seconds of a step for optimizer, rewards and all else.
        network: Bytes/s of a device when weights are gathered and gradients reduced; None: each device has them.
        devices_per_server: Devices of a server.
    """

    flops: float
    decode_step: float
    decode_token: float
    mean_length: float
    longest: float | None = None
    weights: float = 0.0
    rest: float = 0.0
    network: float | None = None
    devices_per_server: int = 1

    @classmethod
    def read(cls, places: Sequence[str]) -> Costs:
        """From the folders of measured runs, or from one YAML file of assumptions.

        Raises:
            ConfigError: A run does not hold what is needed, or the file has other keys or values.
        """
        files = [place for place in places if Path(place).is_file()]
        if files and len(places) > 1:
            raise ConfigError(f"costs={list(places)}: give one file of costs, or folders of runs.")
        return cls._of_file(files[0]) if files else cls._of_runs([Path(place) for place in places])

    @classmethod
    def _of_file(cls, file: str) -> Costs:
        content = load_yaml(Path(file), f"costs={file!r}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if not isinstance(content, dict) or not needed <= content.keys() <= fields.keys():
            raise ConfigError(
                f"costs={file!r}: must have the keys {', '.join(sorted(needed))}, and may have "
                f"{', '.join(sorted(fields.keys() - needed))}."
            )
        for name, value in content.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"costs={file!r}: {name}: {value!r} is not a number of at least 0.")
            if not value and name in ("flops", "mean_length", "network", "devices_per_server"):
                raise ConfigError(f"costs={file!r}: {name}: must be more than 0.")
        return cls(**content)

    @classmethod
    def _of_runs(cls, folders: Sequence[Path]) -> Costs:
        steps = [step for folder in folders for step in _steps_of(folder)]
        flops = sum(step["perf/flops"] for step in steps)
        seconds = sum(step["perf/flops"] / (step["perf/tflops_per_s"] * 1e12) for step in steps)
        generation = np.array([step["time/generation_s"] for step in steps])
        sizes = np.array([[step["completions/max_length"], step["sampled"]] for step in steps])
        most = max(step["completions"] for step in steps)
        is_cut_off = any(step.get("completions/clipped_ratio", 1.0) for step in steps)
        longest = fmean(step["completions/max_length"] for step in steps if step["completions"] == most)
        return cls(
            flops / seconds,
            *_nonnegative(sizes, generation),
            mean_length=float(sum(sizes[:, 1])) / sum(step["completions"] for step in steps),
            longest=None if is_cut_off else longest,
            weights=_mean(steps, ["weight_sync"]),
            rest=_mean(steps, _REST),
        )


@dataclass(frozen=True)
class Work:
    """What a step does.

    Args:
        flops: FLOPs of its training and scoring passes on all devices.
        completions: That it learns from.
        longest: Tokens of the longest one.
        mean_length: Tokens on average.
        weight_bytes: Of the model.
        micro_batches: Forward and backward passes of a device.
    """

    flops: float
    completions: int
    longest: float
    mean_length: float
    weight_bytes: int = 0
    micro_batches: int = 1


def forecast(
    work: Work, costs: Costs, *, trainers: int, servers: int, mode: Mode = "sync", ahead: int = 1
) -> dict[str, float]:
    """Seconds of a step and of its phases.

    Args:
        work: What it does.
        costs: What that takes.
        trainers: Devices that train.
        servers: That sample; they may be the devices that train, in mode "sync".
        mode: See the module.
        ahead: Generation batches that `max_staleness` allows to be requested ahead, in mode "async".

    Returns:
        generation, weights, training, rest, and step, which is less than their sum where they overlap.
    """
    training = work.flops / (trainers * costs.flops)
    if costs.network is not None and trainers > 1:
        training = max(training, 3 * work.weight_bytes * work.micro_batches / costs.network)
    tokens = costs.decode_token * work.completions * work.mean_length / servers
    batch = costs.decode_step * work.longest + tokens
    generation, step = {
        "sync": (batch, batch + training),
        "overlap": (batch, max(batch, training)),
        "async": _ahead_of_training(batch, tokens, training, ahead),
    }[mode]
    return {
        "generation": generation,
        "weights": costs.weights,
        "training": training,
        "rest": costs.rest,
        "step": step + costs.weights + costs.rest,
    }


def _ahead_of_training(batch: float, tokens: float, training: float, ahead: int) -> tuple[float, float]:
    """What a batch takes beside others, and the step, in mode "async": see the module."""
    steps, held = batch - tokens, ahead + 1  # seconds of decoding steps; batches that may be on a server
    half = (training + held * tokens + steps) / 2
    step = max(training, (half + math.sqrt(half**2 - held * tokens * training)) / held)
    return max(batch, steps * step / (step - tokens) if step > tokens else 0.0), step


def best_split(work: Work, costs: Costs, devices: int, mode: Mode, *, ahead: int = 1) -> tuple[int, dict[str, float]]:
    """The number of servers with which a step takes least, and its forecast.

    Raises:
        ConfigError: The devices do not suffice for a server and a device that trains.
    """
    most = (devices - 1) // costs.devices_per_server
    if most < 1:
        raise ConfigError(
            f"{devices} devices do not suffice for a server of {costs.devices_per_server} and a trainer."
        )
    found = {
        servers: forecast(
            work, costs, trainers=devices - servers * costs.devices_per_server, servers=servers, mode=mode, ahead=ahead
        )
        for servers in range(1, most + 1)
    }
    servers = min(found, key=lambda count: found[count]["step"])
    return servers, found[servers]


def _steps_of(folder: Path) -> Iterator[dict[str, float]]:
    """The numbers of each step but the first, in which libraries are loaded.

    Raises:
        ConfigError: It is not an online run with what is needed.
    """
    where, identity = f"costs={str(folder)!r}", read_identity(folder)
    if identity is None:
        raise ConfigError(f"{where}: is neither a file nor the folder of a run, which has a run.json.")
    sizes: Mapping[str, Any] = identity.decisive
    if "prompts_per_generation" not in sizes:
        raise ConfigError(f"{where}: is not a run that samples completions.")
    if sizes["steps_of_a_generation"] != 1 or sizes["generation_mode"] != "sync":
        raise ConfigError(
            f"{where}: measure with generation_mode='sync' and one optimizer step for each generation batch."
        )
    completions = sizes["prompts_per_generation"] * sizes["num_generations"]
    needed = ("perf/flops", "perf/tflops_per_s", "time/generation_s", "completions/max_length")
    steps = [row for row in read_metrics(folder) if row.get("step", 0) > 1 and all(row.get(name) for name in needed)]
    if not steps:
        raise ConfigError(f"{where}: has no second step with the metrics {', '.join(needed)}. Measure with log_flops.")
    for step in steps:
        yield {**step, "completions": completions, "sampled": completions * step["completions/mean_length"]}


def _nonnegative(sizes: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Seconds of a decoding step and of a token that explain what was measured, neither of them below 0."""
    both, _, rank, _ = np.linalg.lstsq(sizes, seconds)
    if rank == sizes.shape[1] and min(both) >= 0:
        return float(both[0]), float(both[1])
    # One of them explains all: the one that does it better, or tokens if the sizes were the same in all steps.
    alone = [float(size @ seconds / (size @ size)) for size in sizes.T]
    errors = [float(np.square(size * cost - seconds).sum()) for size, cost in zip(sizes.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] < errors[1] * (1 - 1e-6) else (0.0, alone[1])


def _mean(steps: Sequence[Mapping[str, float]], phases: Sequence[str]) -> float:
    return sum(step.get(f"time/{phase}_s") or 0.0 for step in steps for phase in phases) / len(steps)


_OTHER_SIZES = (8, 64, 512)  # of devices, beside those of the run


def show_forecast(section: Section, subject: Subject, rows: datasets.Dataset, batches: Batches, costs: Costs) -> None:
    """Where the time of a step goes, here and on other numbers of devices.

    Raises:
        ConfigError: The run does not sample completions, or samples them for several steps at once.
    """
    config = subject.config
    if not subject.is_online:
        raise ConfigError("costs: are those of runs that sample completions. Leave it out.")
    if config.steps_of_a_generation != 1:
        raise ConfigError(
            f"costs: this run takes {config.steps_of_a_generation} optimizer steps on each generation batch, and only "
            "runs that take one are forecast. Leave costs out, or num_iterations, steps_per_generation and "
            "generation_batch_size."
        )
    work = work_of(subject, rows, batches, costs)
    here, ahead = forecast_of(subject, work, costs), _ahead(config)
    parts = ", ".join(f"{name} {time_of(here[name])}" for name in here if name != "step" and here[name])
    section.note(f"a step takes about {time_of(here['step'])} ({parts})")
    table = Table("devices", *MODES, title="a step, and the servers among them")
    for count in _OTHER_SIZES:
        if count > costs.devices_per_server:
            found = [best_split(work, costs, count, each, ahead=ahead) for each in MODES]
            table.add_row(str(count), *(f"{time_of(seconds['step'])} ({number})" for number, seconds in found))
    section.shown.append(table)


def forecast_of(subject: Subject, work: Work, costs: Costs) -> dict[str, float]:
    """`forecast` with the processes, the servers and the mode of a run."""
    config, devices = subject.config, int(subject.config.world_size)
    servers = len(config.server_urls) if config.use_vllm else devices
    return forecast(work, costs, trainers=devices, servers=servers, mode=config.generation_mode, ahead=_ahead(config))


def _ahead(config: Any) -> int:
    if config.generation_mode != "async":  # which alone reads it
        return 1
    # With order='ready', half as many batches are requested ahead, and steps take as long.
    return max(int(config.max_staleness), 1)


def work_of(subject: Subject, rows: datasets.Dataset, batches: Batches, costs: Costs) -> Work:
    """What a step does whose prompts and completions are of mean length."""
    config, completions = subject.config, batches.rows_per_step
    longest = float(config.longest_completion)
    if costs.longest is not None and not config.ignore_eos:
        longest = min(costs.longest, longest)
    mean_length = longest if config.ignore_eos else min(costs.mean_length, longest)
    prompts = np.minimum(row_lengths(rows)["prompt_ids"], config.length_bound.max_length or np.inf)
    scored = completions * mean_length
    return Work(
        flops=products_of(subject, scored + completions / config.num_generations * float(prompts.mean()), scored),
        completions=completions,
        longest=longest,
        mean_length=mean_length,
        weight_bytes=weights_of(subject.model).total,
        micro_batches=int(config.gradient_accumulation_steps),
    )
