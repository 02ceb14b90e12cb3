"""What decides the updates of a training: its algorithm, model, data and options."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import datasets
from transformers import TrainingArguments

from prefrl import distributed
from prefrl.printable import plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefrl.trainer.base_config import BaseConfig

__all__ = ["data_fingerprint", "decisive_options", "model_fingerprint"]

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
        names |= _LENGTH
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
