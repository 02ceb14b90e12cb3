"""Memory by part, and the least time of a step, from shapes and the speed of this machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import psutil
import torch
from rich.table import Table
from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.models.footprint import (
    Footprint,
    Weights,
    activations_of,
    cache_bytes,
    head_bytes,
    optimizer_bytes,
    outline_of,
    weights_of,
)
from prefrl.options.distillation import TeacherOptions
from prefrl.options.preference import ReferenceOptions
from prefrl.scripts.arguments.launch import LAUNCHED, ONLY_CHECK
from prefrl.scripts.checkup.dataset import Batches, row_lengths
from prefrl.scripts.checkup.findings import Section
from prefrl.scripts.checkup.parallel import footprint_of_process
from prefrl.scripts.checkup.subject import Subject
from prefrl.scripts.inputs import lora_of

_MIB, _GIB = 2**20, 2**30
_SECONDS = 0.1  # for which a speed is measured
_PRODUCTS = 8  # between two waits for a GPU, which would otherwise idle while the next product is launched
_UNLIMITED = 10**9  # tokens of a row, and rows
_IMPOSSIBLE = 1.5  # times the free memory: estimates are not exact, and other programs may end
_PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "cache")
# Parts that only a run on several processes has, and what they are called.
_OF_BACKEND = {"copies": "copies of the backend", "gathered": "whole parts of a layer"}
# Of a server on the device of training: what both need beside its share and the trainer's parts, such as contexts of
# CUDA and gaps between blocks; what it computes in; the largest share; and bytes of a weight, which vLLM loads in half
# precision unless it is told otherwise.
_CONTEXTS, _WORKSPACE, _MOST_SHARE, _SERVER_BYTES = 2 * _GIB, _GIB, 0.9, 2
_KNOWN_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # whose whole state is known to be on the device
# The largest part of the memory -> how to need less of it.
_REMEDIES = {
    "activations": "Set max_tokens_per_micro_batch, which does not change the update, or lower "
    "per_device_train_batch_size and the lengths of rows and completions",
    "cache": "Lower max_completion_length or the completions of a generation batch, or set use_vllm=True",
}
_REMEDY = "Train an adapter with use_peft=True, a smaller model, or partition the weights: see docs/distributed.md"


@dataclass(frozen=True)
class MicroBatch:
    """Tokens of a micro-batch.

    Args:
        num_rows: Rows of the dataset, or completions.
        num_fed: Tokens that go through the model.
        num_scored: Those of them whose log-probs are computed; 0 for a reward model.
        prompt: Tokens of a prompt, for the cache.
    """

    num_rows: int
    num_fed: int
    num_scored: int
    prompt: int


def check_resources(section: Section, subject: Subject, rows: datasets.Dataset, batches: Batches) -> None:
    """Show memory by part and time by phase, and warn if the memory is not there."""
    batch = large_micro_batch(subject, rows, batches)
    try:
        footprint = footprint_of(subject, batch)
        if subject.plan is not None:
            footprint = footprint_of_process(subject, subject.plan, footprint)
    except Exception as error:  # a model's own code that needs data, such as the routing of experts
        name = type(subject.model).__name__
        section.note(f"memory was not estimated: {name} cannot run on shapes without data ({type(error).__name__})")
    else:
        _show_memory(section, subject, footprint)
    of_step = batch.num_fed * batches.rows_per_step // batch.num_rows
    section.note(
        f"a large micro-batch has {batch.num_rows} rows and {batch.num_fed:,} tokens; a step of all processes has up "
        f"to about {of_step:,} tokens"
    )
    if subject.is_online and subject.config.weight_sync == "delta":
        section.note(
            f"weight_sync='delta' keeps a copy of the weights, of up to {_size(weights_of(subject.model).total)}, in "
            "the host memory of the first process and of each worker of a server; and with ZeRO-3 or FSDP2, one of "
            "its shard in that of each process"
        )
    _show_time(section, subject, batch, batches)


def check_memory(subject: Subject, rows: datasets.Dataset, batches: Batches) -> float | None:
    """Refuse a run that needs far more memory than is free.

    Returns:
        The share of the device for a server that is to be started on it; None: there is none, or it is given.

    Raises:
        ConfigError: Says how much is needed and free, and what to do.
    """
    shares_device = subject.is_online and subject.config.use_vllm and subject.shares_device
    if shares_device and LAUNCHED in os.environ and ONLY_CHECK not in os.environ:
        return None  # the server is awake and has its share; before it was started, all of this was checked
    try:
        footprint = footprint_of(subject, large_micro_batch(subject, rows, batches))
    except Exception:  # a model's own code that needs data: the doctor says that nothing was estimated
        pass
    else:
        if (problem := _shortage(subject, footprint)) is not None:
            raise ConfigError(problem)
    return _share_of_server(subject, rows, batches) if shares_device else None


def _shortage(subject: Subject, footprint: Footprint) -> str | None:
    """Why a run is impossible; None if it may be possible: sizes are found by trial, or parts are kept elsewhere."""
    config = subject.config
    is_elsewhere = subject.is_partitioned or "device_map" in (config.model_init_kwargs or {})
    if is_elsewhere or config.activation_offloading or config.sought:
        return None
    is_known = str(getattr(config.optim, "value", config.optim)) in _KNOWN_OPTIMIZERS
    least = footprint if is_known else replace(footprint, optimizer=0)
    free, place = _available(subject)
    if least.peak <= _IMPOSSIBLE * free or _is_for_elsewhere(subject):
        return None
    parts = {name: getattr(least, name) for name in _PARTS}
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"{_size(least.peak)} of memory are needed, of which {largest} {_size(parts[largest])}, but only "
        f"{_size(free)} are free {place}. {_REMEDIES.get(largest, _REMEDY)}."
    )


def _show_memory(section: Section, subject: Subject, footprint: Footprint) -> None:
    table = Table("memory of one process", "", box=None, header_style="dim")
    for name in _PARTS:
        words = "reference, teachers" if name == "reference" and subject.teachers else name
        table.add_row(words, _size(getattr(footprint, name)))
    for name, words in _OF_BACKEND.items():
        if getattr(footprint, name):
            table.add_row(words, _size(getattr(footprint, name)))
    table.add_row("peak, libraries not counted", _size(footprint.peak), style="bold")
    section.shown.append(table)
    count, (free, place) = int(subject.config.world_size), _available(subject)
    each = f" by each of {count} processes" if count > 1 else ""
    needed = footprint.peak * _processes_of_one_memory(subject)
    text = f"{_size(footprint.peak)} are needed{each}, {_size(free)} are free {place}"
    if (problem := _shortage(subject, footprint)) is not None:
        section.problem(problem)
    elif _is_for_elsewhere(subject):
        section.note(
            f"{_size(footprint.peak)} are needed{each}. This machine has no GPU to compare with: --device_memory 80 "
            "compares with 80 GiB"
        )
    else:
        (section.ok if needed < free else section.warn)(text)
    if subject.algorithm.name == "ppo":
        section.note("the critic is not counted; it needs as much as the policy")


def footprint_of(subject: Subject, batch: MicroBatch) -> Footprint:
    """Memory of one process that shares nothing."""
    config, model, adapter = subject.config, subject.model, lora_of(subject.script)
    weights = weights_of(subject.trained)
    autocast = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
    kept = activations_of(model, batch.num_fed, peft_config=adapter, autocast=autocast)
    head = head_bytes(model, batch.num_scored, device=config.device)
    is_cut = config.gradient_accumulation_steps > 1 or config.max_tokens_per_micro_batch is not None
    cache = 0
    if subject.is_online and not config.use_vllm:
        num_rows = batch.num_rows * config.micro_batches_per_generation
        cache = cache_bytes(model, num_rows=num_rows, num_tokens=batch.prompt + config.longest_completion)
    return Footprint(
        **_kept_between_steps(subject, weights),
        gradients=weights.trained,
        activations=kept.peak(head, checkpointed=bool(config.activation_checkpointing)),
        cache=cache,
        first_gradients=weights.trained if is_cut else weights.head,
    )


def _kept_between_steps(subject: Subject, weights: Weights) -> dict[str, int]:
    """Bytes that stay from step to step: of the weights, the optimizer and the models that are compared with."""
    config = subject.config
    keeps_copy = (
        _has_reference(config) or (_teaches_itself(config) and config.teacher_weights != "live")
    ) and not subject.has_adapter
    keeps_copy = keeps_copy and not getattr(config, "precompute_ref_log_probs", False)
    return {
        "weights": _stored(subject, weights.total),
        "optimizer": optimizer_bytes(weights, str(getattr(config.optim, "value", config.optim))),
        "reference": keeps_copy * weights.total + sum(weights_of(teacher).total for teacher in subject.teachers),
    }


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of a device that training shares with a server."""

    total: int
    free: int  # before either of them is there
    place: str
    kept: int  # by training while completions are sampled
    weights: int  # of the server
    row: int  # keys and values of the longest completion and its prompt

    @property
    def least(self) -> int:
        """What the server needs to sample one completion at a time."""
        return self.weights + self.row + _WORKSPACE

    @property
    def most(self) -> float:
        """The largest share of the device that the server can have."""
        left = (self.free - self.kept - _CONTEXTS) / self.total
        return min(math.floor(100 * left) / 100, _MOST_SHARE)

    def share(self, given: float | None) -> float:
        """The share of the device for the server.

        Args:
            given: By the user; None: what training leaves.

        Raises:
            ConfigError: Both do not fit.
        """
        fewest = math.ceil(100 * self.least / self.total) / 100
        figures = (
            f"training keeps {_size(self.kept)} between its steps, the server needs at least {_size(self.least)} "
            f"({_size(self.weights)} for weights, {_size(self.row)} for the cache of one completion, "
            f"{_size(_WORKSPACE)} to compute), libraries {_size(_CONTEXTS)}, and {_size(self.free)} are free "
            f"{self.place}"
        )
        if self.most < fewest:
            raise ConfigError(
                f"vllm_mode='colocate': {figures}. {_REMEDY}; or leave vllm and use_vllm out, so that the training "
                "process samples."
            )
        if given is not None and not fewest <= given <= self.most:
            raise ConfigError(
                f"vllm_gpu_memory_utilization={given}: must be from {fewest} to {self.most}, because {figures}. Leave "
                f"it out for {self.most}."
            )
        return self.most if given is None else given


def _share_of_server(subject: Subject, rows: datasets.Dataset, batches: Batches) -> float | None:
    memory, given = _shared_memory(subject, rows, batches), subject.config.vllm_gpu_memory_utilization
    share = None if memory is None else memory.share(given)
    return share if given is None else None


def show_share(section: Section, subject: Subject, rows: datasets.Dataset, batches: Batches) -> None:
    """Show who has how much of a device that training shares with a server."""
    memory = _shared_memory(subject, rows, batches)
    if memory is None:
        section.note("the server is on the CPU of training, where it keeps its memory while it sleeps")
        return
    share = memory.share(subject.config.vllm_gpu_memory_utilization)
    section.ok(
        f"the server gets {share:.2f} of the GPU's memory, {_size(share * memory.total)}, while it samples, and "
        f"training keeps {_size(memory.kept)} then; the server sleeps otherwise"
    )


def _shared_memory(subject: Subject, rows: datasets.Dataset, batches: Batches) -> SharedMemory | None:
    """What a training and a server on its device need; None: the device is a CPU, whose memory no sleep frees."""
    config, model, total = subject.config, subject.model, _device_memory(subject)
    if total is None:
        return None
    kept = _kept_between_steps(subject, weights_of(subject.trained))
    if subject.algorithm.name == "ppo":
        kept["critic"] = kept["weights"] + kept["optimizer"]
    if (reward := getattr(subject.script, "reward_model_name_or_path", None)) is not None:
        kept["reward"] = weights_of(outline_of(reward, is_classifier=True)).total
    length = large_micro_batch(subject, rows, batches).prompt + config.longest_completion
    row = cache_bytes(model, num_rows=1, num_tokens=length) // model.dtype.itemsize
    free, place = _available(subject)
    return SharedMemory(
        total=total,
        free=free,
        place=place,
        kept=sum(kept.values()),
        weights=_SERVER_BYTES * weights_of(model).count,
        row=_SERVER_BYTES * row,
    )


def _has_reference(config: Any) -> bool:
    return isinstance(config, ReferenceOptions) and config.beta > 0


def _teaches_itself(config: Any) -> bool:
    return isinstance(config, TeacherOptions) and config.teaches_itself


def _stored(subject: Subject, total: int) -> int:
    """Bytes of the weights as they are stored: quantized, all but embeddings and head have few bits."""
    bits = 4 if subject.script.load_in_4bit else 8 if subject.script.load_in_8bit else None
    if bits is None:
        return total
    embedding = subject.model.get_input_embeddings().weight
    outside = embedding.numel() * embedding.element_size()
    return int(outside + (total - outside) * bits / (8 * embedding.element_size()))


def large_micro_batch(subject: Subject, rows: datasets.Dataset, batches: Batches) -> MicroBatch:
    """Larger than most: its rows' lengths are the mean and two standard deviations of a sum of so many."""
    config, count = subject.config, batches.rows_per_micro_batch
    lengths = row_lengths(rows)
    prompts = lengths.pop("prompt_ids", np.zeros(len(rows), dtype=np.int64))
    limit = config.length_bound.max_length or _UNLIMITED
    if subject.is_online:
        prompts = np.minimum(prompts, limit)
        num_prompts = -(-count // config.num_generations)
        scored = count * config.longest_completion
        fed = scored + _large_sum(prompts, num_prompts)
    else:
        responses = sum(lengths.values())
        whole = np.minimum(prompts + responses, len(lengths) * limit)
        scored, fed = _large_sum(np.minimum(responses, whole), count), _large_sum(whole, count)
        if getattr(config, "packing", False):
            # Packs are full, unless there are too few rows for them.
            total = whole.mean() * (batches.num_rows or _UNLIMITED)
            fed = scored = int(min(count * int(config.max_length), total))
    budget = config.max_tokens_per_micro_batch
    if isinstance(budget, int) and fed > budget:
        count, scored, fed = max(count * budget // fed, 1), scored * budget // fed, budget
    return MicroBatch(count, fed, scored if subject.model.can_generate() else 0, int(prompts.max()))


def _large_sum(lengths: Any, count: int) -> int:
    most = count * float(lengths.max())
    return int(min(count * lengths.mean() + 2 * count**0.5 * lengths.std(), most))


def _is_for_elsewhere(subject: Subject) -> bool:
    """Whether it would run on GPUs that this machine lacks, and whose memory is not known."""
    config, plan = subject.config, subject.plan
    if plan is None or plan.device_memory is not None or int(config.world_size) == 1:
        return False
    return config.device.type == "cpu" and not config.use_cpu


def _processes_of_one_memory(subject: Subject) -> int:
    """Processes that share the memory of `_available`: those of a machine, if they run on its CPU."""
    plan, count = subject.plan, int(subject.config.world_size)
    if subject.config.device.type != "cpu" or (plan is not None and plan.device_memory is not None):
        return 1
    return -(-count // (1 if plan is None else plan.num_machines))


def _available(subject: Subject) -> tuple[int, str]:
    """Bytes that a process may need, and where they are."""
    plan = subject.plan
    if plan is not None and plan.device_memory is not None:
        return plan.device_memory, "on each device (device_memory)"
    device = subject.config.device
    if device.type != "cuda":
        return int(psutil.virtual_memory().available), "on this machine"
    place = f"on {torch.cuda.get_device_name(device)}"
    if int(subject.config.world_size) > torch.cuda.device_count():
        place += " of this machine; the devices of other machines are taken to have as much"
    return int(torch.cuda.mem_get_info(device)[0]), place


def _device_memory(subject: Subject) -> int | None:
    """Bytes of the device, whether they are free or not; None: it is a CPU."""
    device, plan = subject.config.device, subject.plan
    if plan is not None and plan.device_memory is not None:
        return plan.device_memory
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def least_seconds(subject: Subject, batch: MicroBatch, speed: float) -> dict[str, float]:
    """Seconds that the matrix products of a step take, which is the least for each phase.

    Sampling in this process is left out on a GPU, where it waits for weights and Python instead of products.
    """
    config, steps = subject.config, int(subject.config.gradient_accumulation_steps)
    seconds = {"training": products_of(subject, batch.num_fed, batch.num_scored) * steps / speed}
    if subject.is_online and not config.use_vllm and config.device.type == "cpu":
        body, embedding = _weights_in_products(subject.model)
        rows = batch.num_rows * config.micro_batches_per_generation
        sampling = config.longest_completion * 2 * rows * (body + embedding)
        seconds["sampling the longest completions"] = sampling / speed / config.steps_of_a_generation
    return seconds


def products_of(subject: Subject, num_fed: float, num_scored: float) -> float:
    """FLOPs of the matrix products of all passes over so many tokens, without attention."""
    config, own = subject.config, _weights_in_products(subject.model)
    passes = 3 + (_has_reference(config) or _teaches_itself(config)) + bool(config.activation_checkpointing)
    all_passes = [own] * passes + [_weights_in_products(teacher) for teacher in subject.teachers]
    return sum(2 * (inner * num_fed + head * num_scored) for inner, head in all_passes)


def _weights_in_products(model: PreTrainedModel) -> tuple[int, int]:
    """Weights of the layers, which every token meets, and of the head."""
    embedding = model.get_input_embeddings().weight.numel()
    return weights_of(model).count - embedding * (1 if model.config.tie_word_embeddings else 2), embedding


def _show_time(section: Section, subject: Subject, batch: MicroBatch, batches: Batches) -> None:
    config = subject.config
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else subject.model.dtype
    speed = products_per_second(config.device, dtype)
    phases = least_seconds(subject, batch, speed)
    seconds, parts = sum(phases.values()), ", ".join(f"{name} {time_of(value)}" for name, value in phases.items())
    total = "" if batches.num_steps is None else f", and all steps {time_of(seconds * batches.num_steps)}"
    section.note(
        f"a step takes at least {time_of(seconds)} ({parts}){total}: its matrix products alone at the "
        f"{speed / 1e9:,.0f} GFLOP/s that this machine reaches now. Small models, and sampling without vLLM, take "
        "many times as long"
    )


def products_per_second(
    device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP/s of a product of matrices."""
    size = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)

    def multiply(times: int) -> None:
        for _ in range(times):
            matrix @ matrix
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    multiply(1)  # loads the library
    started, count = clock(), 0
    while clock() < started + _SECONDS:
        multiply(_PRODUCTS)
        count += _PRODUCTS
    return float(2 * size**3 * count / (clock() - started))


def _size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def time_of(seconds: float) -> str:
    """In words."""
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
