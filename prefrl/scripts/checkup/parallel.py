"""What each of many processes needs and does, from their number alone: memory, what divides, files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import datasets

from prefrl.distributed import Partition, check_heads, names_in_checkpoint
from prefrl.models.footprint import optimizer_bytes, weights_of
from prefrl.trainer.online.prompts import prompts_per_generation

if TYPE_CHECKING:
    from torch import nn

    from prefrl.models.footprint import Footprint
    from prefrl.scripts.checkup.dataset import Batches
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.subject import LaunchPlan, Subject

_UNEVEN = 1.05  # times an equal part, which is not worth a word
_SMALL_FILES = 20  # of process 0: options, tokenizer, states of callbacks, ...
_MANY_FILES = 10_000
_STORAGE = 10**9  # bytes per second that one process reads from a disk that machines share
_FLOAT_BYTES = 4
_DIVIDED = {
    0: "weights, gradients and the optimizer's state, whole",
    1: "weights and gradients, whole, and its part of the optimizer's state",
    2: "weights, whole, and its part of gradients and of the optimizer's state",
    3: "its part of weights, gradients and the optimizer's state",
}


def footprint_of_process(subject: Subject, plan: LaunchPlan, whole: Footprint) -> Footprint:
    """The memory of the process that holds the largest part, from that of one that holds everything.

    DeepSpeed keeps a copy of the trained weights in float32, and two bytes of each weight with bf16 or fp16. DDP keeps
    gradients a second time, in buckets. Of the largest layer, a process may hold the whole gradient, a buffer that
    reduces it, and the gathered weights. Activations are not divided.
    """
    partition, config = plan.partition, subject.config
    parameters = list(subject.trained.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    all_share, share = (partition.share(p.shape for p in some) for some in (parameters, trained))
    is_half = partition.is_deepspeed and (config.bf16 or config.fp16)
    narrow = 2 / subject.model.dtype.itemsize if is_half else 1.0
    of_weights = all_share if partition.stage == 3 else 1.0
    of_gradients, of_state = (share if partition.stage >= stage else 1.0 for stage in (2, 1))
    state, copies = float(whole.optimizer), 0.0
    if partition.is_deepspeed:
        state *= _FLOAT_BYTES / subject.model.dtype.itemsize
        copies = float(_FLOAT_BYTES * num_trained)
    elif partition.stage == 0 and partition.num_processes > 1:
        copies = float(whole.gradients)
    on_device = 0.0 if partition.is_offloaded and config.device.type != "cpu" else 1.0
    weights = whole.weights * narrow
    return replace(
        whole,
        weights=int(weights * of_weights * on_device),
        gradients=int(whole.gradients * narrow * of_gradients),
        optimizer=int(state * of_state * on_device),
        reference=int(whole.reference * narrow * of_weights),
        first_gradients=int(whole.first_gradients * narrow * of_gradients),
        copies=int(copies * of_state * on_device),
        gathered=int(_gathered(subject, partition) * narrow),
        cache=whole.cache + int(weights * (partition.stage == 3 and whole.cache > 0)),
    )


def _gathered(subject: Subject, partition: Partition) -> int:
    """Bytes of the largest layer that a process of several may hold as a whole, in the dtype of the weights."""
    if partition.num_processes == 1:
        return 0
    kinds = set(subject.model._no_split_modules or ())
    layers = [module for module in subject.trained.modules() if type(module).__name__ in kinds]
    groups = [list(layer.parameters()) for layer in layers] + [[p] for p in subject.trained.parameters()]
    copies = 1 + (partition.stage >= 2)
    trained = max(_bytes(p for p in group if p.requires_grad) for group in groups)
    return copies * trained + (partition.stage == 3) * max(map(_bytes, groups))


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def check_parallelism(section: Section, subject: Subject, plan: LaunchPlan, batches: Batches, evaluated: Any) -> None:
    """Say what each process holds and does.

    Raises:
        ConfigError: Teams cannot divide the attention heads.
    """
    partition = plan.partition
    section.ok(
        f"{partition.num_processes:,} processes with {partition.backend}; each holds {_DIVIDED[partition.stage]}, and "
        "the activations of its own rows"
    )
    _check_shares(section, subject, plan)
    check_heads(subject.model.config, partition.team_size)
    if subject.is_online:
        _check_prompts(section, subject, plan, batches)
    else:
        _check_rows(section, subject, plan, batches)
    _check_evaluation(section, plan, evaluated)
    if subject.config.save_strategy != "no":
        _check_checkpoint(section, subject, plan)


def _check_shares(section: Section, subject: Subject, plan: LaunchPlan) -> None:
    partition = plan.partition
    share = partition.share(parameter.shape for parameter in subject.trained.parameters()) * partition.num_parts
    if partition.stage == 3 and share > _UNEVEN:
        section.note(
            f"weights do not divide evenly: process 0 holds {share:.2f} times an equal part, because tensors are "
            "small for so many processes"
        )


def _check_prompts(section: Section, subject: Subject, plan: LaunchPlan, batches: Batches) -> None:
    config, ranks = subject.config, plan.num_ranks
    prompts = prompts_per_generation(config)
    most, rest = divmod(prompts, ranks)
    if prompts < ranks:
        text = f"a generation batch has {prompts:,} prompts for {ranks:,} processes: {ranks - prompts:,} ask for none"
        if config.use_vllm:
            section.note(text)
        else:
            section.warn(
                f"{text}, and wait while the others sample. Raise per_device_train_batch_size or "
                "steps_per_generation, or lower num_generations."
            )
    elif rest:
        section.note(
            f"{prompts:,} prompts of a generation batch for {ranks:,} processes: {rest:,} sample {most + 1}, and the "
            f"others {most}"
        )
    if batches.num_rows is not None and batches.num_rows % prompts:
        section.note(
            f"{batches.num_rows % prompts:,} of {batches.num_rows:,} prompts do not fill a generation batch, and are "
            "left out in each epoch"
        )
    if (num_files := config.journal_keep * ranks) > _MANY_FILES:
        section.note(
            f"the folder completions will have {num_files:,} files, one for each of {config.journal_keep} generation "
            "batches and each process. journal_keep lowers that"
        )


def _check_rows(section: Section, subject: Subject, plan: LaunchPlan, batches: Batches) -> None:
    ranks, rows, of_step = plan.num_ranks, batches.num_rows, batches.rows_per_step
    if rows is None:
        if ranks > 1:
            section.warn(
                f"each process reads and tokenizes the {of_step:,} rows of all processes in each step, because the "
                "dataset is a stream. Give a dataset that is not streamed."
            )
        return
    rest = rows % of_step
    if subject.config.dataloader_drop_last:
        if rows < of_step:
            section.problem(
                f"a step takes {of_step:,} rows, the dataset has {rows:,}, and dataloader_drop_last=True leaves out "
                "incomplete steps: there is no step. Lower per_device_train_batch_size or num_processes."
            )
        elif rest:
            section.note(f"{rest:,} of {rows:,} rows do not fill a step, and are left out in each epoch")
    elif rows < of_step:
        section.warn(
            f"a step takes {of_step:,} rows, but the dataset has {rows:,}: each step is the whole dataset"
            f"{_without(rows, ranks)}"
        )
    elif 0 < rest < ranks:
        section.note(f"the last step of an epoch has {rest:,} rows{_without(rest, ranks)}")


def _without(rows: int, ranks: int) -> str:
    return f", and {ranks - rows:,} of {ranks:,} processes have no row" if rows < ranks else ""


def _check_evaluation(section: Section, plan: LaunchPlan, evaluated: Any) -> None:
    parts = evaluated if isinstance(evaluated, Mapping) else {"eval_dataset": evaluated}
    for name, part in parts.items():
        if isinstance(part, datasets.Dataset) and len(part) < plan.num_ranks:
            section.note(f"{name} has {len(part):,} rows{_without(len(part), plan.num_ranks)} to evaluate")


def _check_checkpoint(section: Section, subject: Subject, plan: LaunchPlan) -> None:
    config, partition = subject.config, plan.partition
    of_main, divided, share = _checkpoint_bytes(subject, plan)
    names = (
        []
        if config.save_only_model
        else names_in_checkpoint(partition, 0, step=1, has_rollouts=subject.is_online, is_bf16=bool(config.bf16))
    )
    of_each = f", and each process up to {_size(int(divided * share))} in {', '.join(names)}" if names else ""
    section.ok(
        f"a checkpoint has about {len(names) * partition.num_processes + _SMALL_FILES:,} files and "
        f"{_size(of_main + divided)}: process 0 writes {_size(of_main)}{of_each}"
    )
    seconds = (of_main + divided) / _STORAGE
    if names and seconds > config.ddp_timeout:
        section.warn(
            f"a run that resumes from it waits until process 0 has read all of it, which takes {seconds:,.0f} s at 1 "
            f"GB/s, but the others wait for at most ddp_timeout={config.ddp_timeout} s. Raise ddp_timeout."
        )


def _checkpoint_bytes(subject: Subject, plan: LaunchPlan) -> tuple[int, int, float]:
    """Bytes that process 0 writes for all, those that are divided among processes, and the largest part of these."""
    config, partition = subject.config, plan.partition
    weights = weights_of(subject.trained)
    saved = weights.trained if subject.has_adapter else weights.total
    state = optimizer_bytes(weights, str(getattr(config.optim, "value", config.optim)))
    if partition.is_deepspeed:  # in float32, and with its copy of the weights
        state = state * _FLOAT_BYTES // subject.model.dtype.itemsize + _FLOAT_BYTES * weights.num_trained
    has_state = not config.save_only_model and config.checkpoint_params.save_optimizer
    whole = 0 if partition.saves_parts and not config.checkpoint_params.export_weights else saved
    if not has_state:
        return whole, 0, 0.0
    share = partition.share(parameter.shape for parameter in subject.trained.parameters() if parameter.requires_grad)
    if partition.is_deepspeed:  # which also writes weights itself, whole or divided
        of_deepspeed = 0 if partition.stage == 3 else saved
        return whole + of_deepspeed, state + (saved if partition.stage == 3 and partition.saves_parts else 0), share
    if partition.stage == 0:
        return whole + state, 0, 0.0
    return (whole, saved + state, share) if partition.saves_parts else (whole + saved + state, 0, 0.0)


def _size(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
