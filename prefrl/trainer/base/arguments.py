"""Checks the arguments of every trainer's constructor before anything is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import PushToHubMixin
from transformers.utils.quantization_config import QuantizationConfigMixin

from prefrl.errors import ConfigError, DataError
from prefrl.registry import REGISTRY

__all__ = ["DATA", "check_arguments", "check_dataset", "default_output_dir", "named"]

# The positional parameters after `args` of trainers on a fixed dataset, in TRL's order.
DATA = ("data_collator", "train_dataset", "eval_dataset", "processing_class")


class _Algorithm(Protocol):
    """A trainer."""

    algorithm: str


def _is_model(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | nn.Module)


def _is_rewards(value: Any) -> bool:
    return isinstance(value, list | tuple) or _is_model(value) or callable(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


# Argument -> test for a value that is not None, and the words of the error message for what it must be.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_model, "a name, a path or a model"),
    "ref_model": (_is_model, "a name, a path, a model or None"),
    "reward_funcs": (_is_rewards, "a reward or a list of them: functions, and reward models or their names"),
    "processing_class": (
        lambda value: isinstance(value, PreTrainedTokenizerBase | ProcessorMixin),
        "a tokenizer or processor of transformers or None",
    ),
    "callbacks": (lambda value: isinstance(value, list | tuple), "a list of callbacks or None"),
    "optimizers": (_is_pair, "a pair of optimizer and scheduler, each of which may be None"),
    "peft_config": (lambda value: isinstance(value, PushToHubMixin), "a config of peft, such as LoraConfig, or None"),
    "quantization_config": (
        lambda value: isinstance(value, QuantizationConfigMixin),
        "a quantization config of transformers, such as BitsAndBytesConfig, or None",
    ),
}
_REQUIRED = ("model", "reward_funcs")


def check_arguments(trainer: type[_Algorithm], arguments: Mapping[str, Any]) -> None:
    """Reject constructor arguments of the wrong kind, such as those passed in the wrong position.

    Args:
        trainer: The class whose constructor was called.
        arguments: The arguments by name, in the order of the constructor. The first wrong one is reported.

    Raises:
        ConfigError: An argument is of the wrong kind.
        DataError: A dataset argument is not a dataset, or holds several where one is needed.
    """
    for name, value in arguments.items():
        if name == "args":
            _check_config(trainer, value)
        elif name == "data_collator" and value is not None:
            raise _error(trainer, name, value, "None, the trainer lays out batches itself")
        elif name in ("train_dataset", "eval_dataset"):
            check_dataset(name, value, takes_several=name == "eval_dataset")
        elif name in _ARGUMENTS and (value is not None or name in _REQUIRED):
            is_right, allowed = _ARGUMENTS[name]
            if not is_right(value):
                raise _error(trainer, name, value, allowed)


def named(trainer: type[_Algorithm], data: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, for a constructor that also takes those of `DATA` by position.

    Raises:
        TypeError: There are too many positional arguments, or one is given twice.
    """
    if len(data) > len(DATA):
        raise TypeError(f"too many positional arguments: the order is {_order(trainer)}. Pass the others by name.")
    by_position = dict(zip(DATA, data, strict=False))
    twice = [name for name in by_position if name in arguments]
    if twice:
        raise TypeError(f"{twice[0]} is passed both by position and by name: the order is {_order(trainer)}")
    return {**by_position, **arguments}


def check_dataset(name: str, dataset: Any, *, takes_several: bool = False) -> None:
    """Reject a value that is not a dataset.

    Args:
        name: The argument's name, for the error message.
        dataset: The value: one dataset or None.
        takes_several: Whether a mapping of names to datasets is allowed, too.

    Raises:
        DataError: The value is a mapping where one dataset is needed, or is not a dataset at all.
    """
    if isinstance(dataset, Mapping) and takes_several:
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part)
    elif isinstance(dataset, Mapping):
        names = list(dataset)
        example = "train" if "train" in names or not names else names[0]
        raise DataError(
            f"{name} is a {type(dataset).__name__} with the splits {', '.join(map(repr, names)) or 'none'}: must be "
            f"one dataset. Choose a split: {name}=ds[{example!r}]"
        )
    elif dataset is not None and not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise DataError(
            f"{name} is a {type(dataset).__name__}: must be a datasets.Dataset or IterableDataset"
            f"{', or several by name' if takes_several else ''}. Make one of a list of rows by "
            "datasets.Dataset.from_list(rows)"
        )


def _check_config(trainer: type[_Algorithm], value: Any) -> None:
    config_class = REGISTRY[trainer.algorithm].load_config()
    if value is not None and not isinstance(value, config_class):
        raise _error(trainer, "args", value, f"{config_class.__name__}(...) or None")


def _error(trainer: type[_Algorithm], name: str, value: Any, allowed: str) -> ConfigError:
    given = "None" if value is None else type(value).__name__
    order = f"The order is {_order(trainer)}; arguments can be given by name, too."
    return ConfigError(f"{name}={given}: must be {allowed}. {order}")


def _order(trainer: type[_Algorithm]) -> str:
    """The signature of prefrl's own constructor, for messages; a user's subclass may have a different one."""
    ours = next(cls for cls in trainer.__mro__ if cls.__module__.startswith("prefrl."))
    names: list[str] = []
    for parameter in inspect.signature(ours).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += DATA
    return f"{ours.__name__}({', '.join(names)})"


def default_output_dir(model: object, suffix: str) -> str:
    """The output folder of a run without `args`: `<model name>-<suffix>`."""
    name = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "name_or_path", "")
    return f"{Path(name).name or type(model).__name__}-{suffix}"
