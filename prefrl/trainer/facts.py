"""Facts of a training: what decides its updates, and what is said of it before its first step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import datasets
from transformers import TrainingArguments

from prefrl import distributed
from prefrl.errors import plain
from prefrl.models.adapters import is_peft_model
from prefrl.models.footprint import optimizer_bytes, weights_of
from prefrl.models.forward import plan_in_words
from prefrl.trainer.memory import free_memory
from prefrl.trainer.progress.history import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

    from prefrl.trainer.base_config import BaseConfig

# HuggingFace's options that decide the updates. Whatever else it has, changes where and how the same work is done.
_OF_HUGGINGFACE = frozenset({
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed", "dataloader_drop_last", "fp16", "learning_rate",
    "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "optim", "optim_args", "optim_target_modules", "seed",
    "train_sampling_strategy", "warmup_ratio", "warmup_steps", "weight_decay",
})  # fmt: skip
# These decide the updates only through a learning rate that depends on the length of training.
_LENGTH = frozenset({"max_steps", "num_train_epochs"})
# Rows of a dataset that are hashed.
_SAMPLED_ROWS = 64
# Keys of a model's config that do not describe its architecture. The ids become the tokenizer's when training begins.
_NOT_ARCHITECTURE = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def decisive_options(config: BaseConfig) -> dict[str, Any]:
    """The options that decide the updates, with JSON values, by name."""
    of_huggingface = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(config)} - of_huggingface - config.free_options()
    names = (_OF_HUGGINGFACE & of_huggingface) | own
    if config.depends_on_length:
        names |= _LENGTH | ({"stop_at_first_limit"} if config.stop_at_first_limit else set())
    options = {
        name: json.loads(json.dumps(getattr(config, name), default=lambda v: str(plain(v)))) for name in sorted(names)
    }
    # Other numbers of processes can make the same steps, unless the learning rate is scaled by them.
    return options if config.learning_rate_scaling == "constant" else {**options, "ranks": distributed.world_size()}


def model_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """The architecture of a model and of its adapters."""
    config = _digest(_without(model.config.to_dict(), _NOT_ARCHITECTURE))
    described = {"class": distributed.class_of(model).__name__, "config": config}
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping):
        described["adapters"] = _digest(
            {
                name: {
                    key: getattr(adapter, key, None) for key in ("peft_type", "r", "target_modules", "modules_to_save")
                }
                for name, adapter in adapters.items()
            }
        )
    return described


def data_fingerprint(dataset: Any, *, without: Collection[str]) -> dict[str, Any] | None:
    """The number of rows of a dataset, its columns, and a hash of rows at even distances; None: it is a stream.

    Args:
        dataset: A prepared dataset.
        without: Columns that do not count.
    """
    if not isinstance(dataset, datasets.Dataset):
        return None
    dataset = dataset.remove_columns([name for name in dataset.column_names if name in without])
    count = len(dataset)
    which = sorted({i * count // _SAMPLED_ROWS for i in range(_SAMPLED_ROWS)}) if count else []
    return {"rows": count, "columns": sorted(dataset.column_names), "hash": _digest([dataset[i] for i in which])}


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_sortable)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _sortable(value: Any) -> Any:
    """For `json.dumps`: what it does not know. The text of other objects may hold addresses."""
    return sorted(value) if isinstance(value, set | frozenset) else type(value).__name__


# What is said of it.


def facts_of(
    args: BaseConfig,
    policy: PreTrainedModel,
    ref_model: PreTrainedModel | None,
    state: TrainerState,
    rows: Any,
    *,
    algorithm: str,
) -> dict[str, str]:
    """The model, the data, the rows of a step, the number of steps, the plan and the memory, each in a few words.

    Args:
        args: Options.
        policy: The model that is trained.
        ref_model: The reference, if it is a model of its own.
        state: HuggingFace's state at the start of training.
        rows: The training set.
        algorithm: Its name.
    """
    start = f", from {state.global_step + 1:,} on" if state.global_step else ""
    return {
        "algorithm": algorithm,
        "model": f"{policy.name_or_path or type(policy).__name__}, {policy.dtype}".replace("torch.", ""),
        "weights": _weights(policy),
        "data": f"{len(rows):,} rows" if hasattr(rows, "__len__") else "a stream of rows",
        "a step": args.rows_in_words,
        "steps": f"{state.max_steps:,}{start}, at a learning rate of {args.learning_rate:g}",
        "forward plan": _plan(args, policy),
        "memory": _memory(args, policy, ref_model),
        "output": str(args.output_dir),
    }


def _weights(policy: PreTrainedModel) -> str:
    counts = [(distributed.shape_of(p).numel(), p.requires_grad) for p in policy.parameters()]
    trained, total = sum(n for n, trains in counts if trains), sum(n for n, _ in counts)
    if trained == total:
        return f"{quantity(total)}, all of them trained"
    where = " in an adapter" if is_peft_model(policy) else ""
    return f"{quantity(total)}, of which {quantity(trained)}{where} ({trained / max(total, 1):.2%}) are trained"


def _plan(args: BaseConfig, policy: PreTrainedModel) -> str:
    # Only the main process asks, and with several of them the self-check is a matter of all.
    return plan_in_words(policy, args.forward_plan) if distributed.num_processes() == 1 else args.forward_plan


def _memory(args: BaseConfig, policy: PreTrainedModel, ref_model: PreTrainedModel | None) -> str:
    """Bytes that do not depend on the rows, over all processes, and what is free on this one."""
    weights = weights_of(policy)
    parts = {
        "weights": weights.total,
        "gradients": weights.trained,
        "optimizer": optimizer_bytes(weights, str(getattr(args.optim, "value", args.optim))),
        "reference": 0 if ref_model is None else weights_of(ref_model).total,
    }
    named = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in parts.items() if size)
    return (
        f"{quantity(sum(parts.values()), 'B')} ({named}) and the activations; "
        f"{quantity(free_memory(args.device), 'B')} free on {args.device}"
    )
