"""Makes optimizers that HuggingFace's `optim` does not have, and passes on arguments that it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.optimization import Adafactor

from prefrl.errors import ConfigError
from prefrl.optional import MissingPackageError, is_installed, require
from prefrl.options.optimizers import NAMED_OPTIMIZER_RULES, OPTIMIZERS, NamedOptimizer, given_arguments
from prefrl.options.rules import apply
from prefrl.trainer.base.optimizers.muon import MuonWithAdamW

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = [
    "added_arguments",
    "added_keys",
    "check_made",
    "named_optimizer",
    "works_under",
]

OptimizerClass = Callable[..., torch.optim.Optimizer]


# What transformers' own optimizers take, but it does not pass on.
_ADDED: dict[str, tuple[OptimizerClass, tuple[str, ...]]] = {
    "adamw_torch": (torch.optim.AdamW, ("amsgrad",)),
    "adamw_torch_fused": (torch.optim.AdamW, ("amsgrad",)),
    "adagrad": (torch.optim.Adagrad, ("initial_accumulator_value",)),
    "adafactor": (Adafactor, ("scale_parameter", "clip_threshold", "decay_rate", "beta1")),
}


def _load(row: NamedOptimizer, name: str) -> OptimizerClass:
    """The class.

    Raises:
        ImportError: The package is not installed; the message says which extra brings it.
    """
    if row.class_name == "MuonWithAdamW":
        return MuonWithAdamW
    feature, library = f"optim={name!r}", cast("Any", torch.optim)
    if row.package == "bitsandbytes":
        library = require("bitsandbytes", extra="quantization", feature=feature).optim
    if row.package == "pytorch_optimizer":
        library = require("pytorch_optimizer", extra="optimizers", feature=feature)
    return cast("OptimizerClass", getattr(library, row.class_name))


def named_optimizer(args: TrainingArguments) -> tuple[OptimizerClass, dict[str, Any]]:
    """The class of an optimizer of `OPTIMIZERS`, and its arguments.

    Raises:
        ConfigError: `optim_args` has an unknown key, or cannot be read.
        ImportError: Its package is not installed.
    """
    name = str(args.optim)
    row = OPTIMIZERS[name]
    given = given_arguments(args.optim_args)
    apply(args, NAMED_OPTIMIZER_RULES)
    of_options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    read = {key: of_options[key] for key in row.reads}
    return _load(row, name), {"lr": args.learning_rate, **read, **row.defaults, **given, **row.fixed}


# Parts of the names of transformers' optimizers: those that need whole matrices, those with kernels for plain
# tensors alone, and one that makes its state before weights are partitioned.
_OF_MATRICES = ("adafactor", "galore", "apollo", "lomo", "stable_adamw")
_OF_BITSANDBYTES = ("bnb", "8bit", "paged", "lion", "ademamix")
_TOO_EARLY = "adagrad"


# Other parts of their names, the package that such an optimizer needs, and what pip installs.
_PACKAGES = {
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "adamw_torch_4bit": ("torchao", "prefrl[fp8]"),
    "adamw_torch_8bit": ("torchao", "prefrl[fp8]"),
    **dict.fromkeys(_OF_BITSANDBYTES, ("bitsandbytes", "prefrl[quantization]")),
}


def check_installed(name: str) -> None:
    """Refuse an optimizer of transformers whose package is missing.

    Raises:
        MissingPackageError: Says what to install.
    """
    if name in OPTIMIZERS:
        return  # the config has made it
    package, target = next((row for part, row in _PACKAGES.items() if part in name), (None, None))
    if package is not None and not is_installed(package):
        raise MissingPackageError(f"optim={name!r} needs {package}: pip install '{target}'")


def works_under(name: str) -> dict[str, bool]:
    """Whether an optimizer makes the update of one process under ZeRO and FSDP2."""
    if name in OPTIMIZERS:
        return {"ZeRO": OPTIMIZERS[name].elementwise, "FSDP2": OPTIMIZERS[name].fsdp2}
    if name == _TOO_EARLY:
        return {"ZeRO": False, "FSDP2": False}
    needs_matrices = any(part in name for part in _OF_MATRICES)
    needs_plain = any(part in name for part in _OF_BITSANDBYTES) and not name.startswith("adamw_torch")
    return {"ZeRO": not needs_matrices, "FSDP2": not (needs_matrices or needs_plain)}


def added_keys(name: str) -> tuple[str, ...]:
    """The keys of `optim_args` that are passed on to an optimizer of transformers in addition to its own."""
    return _ADDED[name][1] if name in _ADDED else ()


def added_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments of `added_keys` that are given.

    Raises:
        ConfigError: `optim_args` cannot be read.
    """
    keys = added_keys(str(getattr(args.optim, "value", args.optim)))
    return {key: value for key, value in given_arguments(args.optim_args).items() if key in keys} if keys else {}


def check_made(name: str, config: TrainingArguments) -> None:
    """Make the optimizer for one matrix, because its class checks values. Transformers' own only with added arguments.

    Raises:
        ConfigError: It does not take them.
        ImportError: Its package is not installed.
    """
    if name in OPTIMIZERS:
        cls, arguments = named_optimizer(config)
    elif added := added_arguments(config):
        cls, arguments = _ADDED[name][0], {"lr": config.learning_rate, **added}
        arguments |= {"relative_step": False} if name == "adafactor" else {}
    else:
        return
    given = given_arguments(config.optim_args)
    for key in given.keys() & arguments.keys():
        _check_type(cls, key, given[key])
    try:
        cls([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"optim={name!r} with optim_args={config.optim_args!r}: {error}") from error


_KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool,)),
    float: ("a number", (int, float)),
    str: ("a word", (str,)),
    tuple: ("numbers such as (0.9, 0.99)", (tuple,)),
}


def _check_type(cls: OptimizerClass, key: str, value: Any) -> None:
    """Reject a value that is of another kind than the default of the class; one of None is for a number."""
    default = inspect.signature(cls).parameters[key].default
    kind = type(default) if isinstance(default, bool | str | tuple) else float
    text, types = _KINDS[kind]
    if not isinstance(value, types) or (kind is float and isinstance(value, bool)):
        raise ConfigError(f"optim_args: {key}={value!r}: must be {text}.")
