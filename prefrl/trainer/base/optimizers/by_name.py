"""Optimizers by name that HuggingFace's `optim` does not have, and arguments of its own that it does not pass on."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers.optimization import Adafactor

from prefrl.errors import ConfigError
from prefrl.optional import require
from prefrl.options.suggest import nearest
from prefrl.trainer.base.optimizers.muon import MuonWithAdamW

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = [
    "OPTIMIZERS",
    "REFUSED",
    "NamedOptimizer",
    "added_arguments",
    "added_keys",
    "check_made",
    "named_optimizer",
    "works_under",
]

OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer of a library.

    Args:
        package: Where its class is.
        class_name: Its class.
        decay: What `weight_decay` is: a term of the gradient, a factor of the weights, or not there.
        keys: What `optim_args` may set.
        reads: Options of HuggingFace that it reads: betas stands for adam_beta1 and adam_beta2, eps for adam_epsilon.
        fixed: Arguments that make it what its name says.
        defaults: Other defaults than those of the class.
        elementwise: Whether each number of a weight is updated by itself, so that ZeRO may cut weights anywhere.
        fsdp2: Whether it can update weights that FSDP2 has partitioned.
    """

    package: Literal["torch", "bitsandbytes", "pytorch_optimizer"]
    class_name: str
    decay: Literal["L2", "decoupled", "none"]
    keys: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("betas", "eps")
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    elementwise: bool = True
    fsdp2: bool = True

    def load(self, name: str) -> OptimizerClass:
        """The class.

        Raises:
            ImportError: The package is not installed; the message says which extra brings it.
        """
        if self.class_name == "MuonWithAdamW":
            return MuonWithAdamW
        feature, library = f"optim={name!r}", cast("Any", torch.optim)
        if self.package == "bitsandbytes":
            library = require("bitsandbytes", extra="quantization", feature=feature).optim
        if self.package == "pytorch_optimizer":
            library = require("pytorch_optimizer", extra="optimizers", feature=feature)
        return cast("OptimizerClass", getattr(library, self.class_name))


def _torch(class_name: str, decay: Literal["L2", "decoupled", "none"], *keys: str, **more: Any) -> NamedOptimizer:
    return NamedOptimizer("torch", class_name, decay, keys, **more)


def _bitsandbytes(class_name: str, decay: Literal["L2", "none"], *keys: str, **more: Any) -> NamedOptimizer:
    return NamedOptimizer("bitsandbytes", class_name, decay, (*keys, "min_8bit_size"), fsdp2=False, **more)


_DECOUPLES = "decoupled_weight_decay"
_EIGHT_BITS = {"optim_bits": 8}
_PAGED = {"is_paged": True}

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adam": _torch("Adam", "L2", "amsgrad", _DECOUPLES),
    "amsgrad": _torch("Adam", "L2", _DECOUPLES, fixed={"amsgrad": True}),
    "adadelta": _torch("Adadelta", "L2", "rho", "eps", reads=()),
    "adamax": _torch("Adamax", "L2"),
    "nadam": _torch("NAdam", "L2", "momentum_decay", _DECOUPLES),
    "radam": _torch("RAdam", "L2", _DECOUPLES),
    "rprop": _torch("Rprop", "none", "etas", "step_sizes", reads=(), fsdp2=False),
    "asgd": _torch("ASGD", "L2", "lambd", "alpha", "t0", reads=()),
    "muon": _torch(
        "MuonWithAdamW",
        "decoupled",
        *("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "adamw_lr"),
        elementwise=False,
    ),
    "lamb": NamedOptimizer(
        "pytorch_optimizer",
        "Lamb",
        "L2",
        ("grad_averaging", "rectify", "degenerated_to_sgd", "n_sma_threshold"),
        fixed={"weight_decouple": False},  # inside the trust ratio, as in the paper
        elementwise=False,
        fsdp2=False,
    ),
    "lars": NamedOptimizer(
        "pytorch_optimizer",
        "LARS",
        "L2",
        ("momentum", "dampening", "nesterov", "trust_coefficient"),
        reads=(),
        fixed={"foreach": False},  # whose operations are not there for weights that FSDP2 has partitioned
        elementwise=False,
    ),
    "soap": NamedOptimizer(
        "pytorch_optimizer",
        "SOAP",
        "decoupled",
        (
            *("betas", "eps", "shampoo_beta", "precondition_frequency", "max_precondition_dim", "merge_dims"),
            *("precondition_1d", "correct_bias", "normalize_gradient"),
        ),
        reads=(),
        elementwise=False,
        fsdp2=False,
    ),
    # bitsandbytes decouples the decay of its Adam, which makes it its AdamW.
    "adam_8bit": _bitsandbytes("Adam", "none", fixed=_EIGHT_BITS),
    "paged_adam": _bitsandbytes("Adam", "none", fixed=_PAGED),
    "paged_adam_8bit": _bitsandbytes("Adam", "none", fixed=_EIGHT_BITS | _PAGED),
    "sgd_8bit": _bitsandbytes("SGD", "L2", "momentum", reads=(), fixed=_EIGHT_BITS, defaults={"momentum": 0.9}),
    "adagrad_8bit": _bitsandbytes("Adagrad", "L2", "eps", reads=(), fixed=_EIGHT_BITS),
}

_NO_TRUST_RATIO = (
    "bitsandbytes has no 8-bit kernel of it for GPUs, and its kernel for CPUs leaves out the trust ratio. Set "
)
# Names that users of other libraries try, and what to do.
REFUSED: dict[str, str] = {
    "lbfgs": "it computes the loss several times in a step, through a closure; transformers' loop calls the optimizer "
    "with gradients alone. Set optim='soap' or optim='muon', which use more than a rate for each weight, too.",
    "lamb_8bit": f"{_NO_TRUST_RATIO}optim='lamb', or 'adamw_8bit' for states of 8 bits.",
    "lars_8bit": f"{_NO_TRUST_RATIO}optim='lars', or 'sgd_8bit' for states of 8 bits.",
    "ftrl": "it is for sparse linear models. Set optim='adagrad'.",
    "adamw": "transformers calls it 'adamw_torch_fused', or 'adamw_torch'.",
    "lion": "transformers calls it 'lion_32bit'.",
    "paged_lion": "transformers calls it 'paged_lion_32bit'.",
    "paged_adamw": "transformers calls it 'paged_adamw_32bit'.",
    "rmsprop_8bit": "transformers calls it 'rmsprop_bnb_8bit'.",
}
# What transformers' own optimizers take, but it does not pass on.
_ADDED: dict[str, tuple[OptimizerClass, tuple[str, ...]]] = {
    "adamw_torch": (torch.optim.AdamW, ("amsgrad",)),
    "adamw_torch_fused": (torch.optim.AdamW, ("amsgrad",)),
    "adagrad": (torch.optim.Adagrad, ("initial_accumulator_value",)),
    "adafactor": (Adafactor, ("scale_parameter", "clip_threshold", "decay_rate", "beta1")),
}


def named_optimizer(args: TrainingArguments) -> tuple[OptimizerClass, dict[str, Any]]:
    """The class of an optimizer of `OPTIMIZERS`, and its arguments.

    Raises:
        ConfigError: `optim_args` has an unknown key, or cannot be read.
        ImportError: Its package is not installed.
    """
    name = str(args.optim)
    row = OPTIMIZERS[name]
    given = _arguments(args.optim_args)
    for key, value in given.items():
        if key not in row.keys:
            remedy = nearest(key, row.keys) if row.keys else "It has none."
            raise ConfigError(f"optim_args: {key}={value!r} is no argument of optim={name!r}. {remedy}")
    of_options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    read = {key: of_options[key] for key in row.reads}
    return row.load(name), {"lr": args.learning_rate, **read, **row.defaults, **given, **row.fixed}


# Parts of the names of transformers' optimizers: those that need whole matrices, those with kernels for plain
# tensors alone, and one that makes its state before weights are partitioned.
_OF_MATRICES = ("adafactor", "galore", "apollo", "lomo", "stable_adamw")
_OF_BITSANDBYTES = ("bnb", "8bit", "paged", "lion", "ademamix")
_TOO_EARLY = "adagrad"


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
    return {key: value for key, value in _arguments(args.optim_args).items() if key in keys} if keys else {}


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
    given = _arguments(config.optim_args)
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


def _arguments(text: str | None) -> dict[str, Any]:
    """The values of `optim_args` by name: 'etas=(0.5, 1.2), nesterov=True'. Other words are texts."""
    if not text:
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
            return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(f"optim_args={text!r}: must be pairs such as 'momentum=0.9, nesterov=True'")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
    return ast.literal_eval(node)
