"""The optimizer of a run: its class, its parameter groups, and its two sets of weights if it is schedule-free.

Schedule-free optimizers train one set of weights and average them into another. The average is what is evaluated,
saved and used. The methods `train` and `eval` of such an optimizer put one set or the other into the model.

Source: Defazio et al. 2024, arXiv 2405.15682
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import Trainer
from transformers.optimization import Adafactor

from prefrl import distributed
from prefrl.errors import ConfigError, MissingPackageError, is_installed, require
from prefrl.options.fields import apply
from prefrl.options.optimizers import NAMED_OPTIMIZER_RULES, OPTIMIZERS, NamedOptimizer, given_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

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


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon on the parameter groups in which `use_muon` is set, torch's AdamW on the others.

    Muon replaces the momentum of a matrix by the nearest semi-orthogonal matrix, computed by Newton-Schulz iterations.
    With `adjust_lr_fn="match_rms_adamw"`, an update has the size of AdamW's, so that both share a learning rate.

    Args:
        params: Parameter groups.
        lr: Learning rate of both.
        adamw_lr: Learning rate of AdamW; None: `lr`.
        weight_decay: Decoupled, of both.
        betas: Of AdamW.
        eps: Of AdamW.
        momentum: Of Muon.
        nesterov: Of Muon.
        ns_steps: Newton-Schulz iterations of Muon.
        adjust_lr_fn: How Muon's rate depends on the shape of a matrix: "match_rms_adamw" or "original".

    Source: Jordan 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982.
    """

    def __init__(  # noqa: PLR0913 - the arguments of two optimizers
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        one = [torch.nn.Parameter(torch.zeros(2, 2))]
        of_muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self._muon = torch.optim.Muon(one, lr=lr, weight_decay=weight_decay, **of_muon)  # type: ignore[arg-type]
        self._adamw = torch.optim.AdamW(one, lr=lr if adamw_lr is None else adamw_lr, betas=betas, eps=eps)
        own = {key: value for key, value in self._muon.defaults.items() if key != "weight_decay"}
        self.muon_settings = {**own, "use_muon": True}  # of a group of hidden matrices
        super().__init__(params, {**self._adamw.defaults, "weight_decay": weight_decay, "use_muon": False})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both, each on its parameter groups."""
        loss = None if closure is None else closure()
        for optimizer, uses_muon in ((self._muon, True), (self._adamw, False)):
            optimizer.state = self.state
            optimizer.param_groups = [group for group in self.param_groups if group["use_muon"] == uses_muon]
            optimizer.step()  # type: ignore[no-untyped-call]
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of a model that are neither embeddings nor heads: those that Muon is for.

    Args:
        model: A model of transformers, which may hold a critic.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    heads = {id(p) for module in model.modules() for p in _head_of(module)}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and min(parameter.shape) > 1 and id(parameter) not in embeddings | heads
    ]


def _head_of(module: nn.Module) -> list[nn.Parameter]:
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return [] if head is None else list(head.parameters())


def check_optimizer_of_run(args: Any, given: torch.optim.Optimizer | None, accelerator: Any) -> None:
    """Refuse an optimizer that the backend cannot run, or that has no use for an option.

    Args:
        args: Options.
        given: The user's, if there is one.
        accelerator: The trainer's.

    Raises:
        ConfigError: See above.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if given is None:
        distributed.check_works_under(accelerator, name, works_under(name))
        saves_state = args.save_strategy != "no" and not args.save_only_model
        if name == "sgd" and saves_state and not optimizer_class(args)[1].get("momentum"):
            distributed.check_state_read(accelerator, name)
        if name in OPTIMIZERS or args.learning_rates:
            distributed.check_chooses_optimizer(accelerator, "optim and learning_rates")
    elif args.learning_rates:
        raise ConfigError(
            f"learning_rates={args.learning_rates!r} has no effect on the optimizer in optimizers=. Give it "
            "parameter groups with these rates, or choose it by name with optim."
        )
    for option in args.set_on_gradients:
        distributed.check_gradients_seen(accelerator, option)


def optimizer_class(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer that the options ask for, and its arguments."""
    if args.optim in OPTIMIZERS:
        return named_optimizer(args)
    found, arguments = Trainer.get_optimizer_cls_and_kwargs(args, model)
    return found, arguments | added_arguments(args)


def group_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, args: Any) -> None:
    """Give a new optimizer parameter groups for Muon and for `learning_rates`.

    Raises:
        ConfigError: An expression in `learning_rates` matches no parameter.
    """
    if isinstance(optimizer, MuonWithAdamW):
        matrices, settings = {id(p) for p in hidden_matrices(model)}, optimizer.muon_settings
        regroup(optimizer, lambda parameter: settings if id(parameter) in matrices else {})
    if args.learning_rates:
        rates = _rates(cast("dict[str, float]", args.learning_rates), model)
        regroup(optimizer, lambda parameter: {"lr": rates[id(parameter)]} if id(parameter) in rates else {})


def regroup(optimizer: torch.optim.Optimizer, settings: Callable[[torch.Tensor], Mapping[str, Any]]) -> None:
    """Split the parameter groups of a new optimizer by the settings that their parameters should have.

    Args:
        optimizer: Has no state yet.
        settings: What is different for a parameter from its group.
    """
    groups = []
    for group in optimizer.param_groups:
        parts: list[tuple[Mapping[str, Any], list[torch.Tensor]]] = []
        for parameter in group["params"]:
            own = settings(parameter)
            members = next((members for found, members in parts if found == own), None)
            if members is None:
                members = []
                parts.append((own, members))
            members.append(parameter)
        groups += [{**group, **own, "params": members} for own, members in parts]
    optimizer.param_groups = groups


def _rates(rates: Mapping[str, float], model: nn.Module) -> dict[int, float]:
    """The learning rate of each trained parameter that a pattern names, by the parameter's id."""
    named = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in rates:
        if not any(re.search(pattern, name) for name in named):
            raise ConfigError(
                f"learning_rates: {pattern!r} matches no name of a trained parameter. The names look like "
                f"{', '.join(list(named)[:3])}."
            )
    first = {name: next((p for p in rates if re.search(p, name)), None) for name in named}
    return {named[name]: rates[pattern] for name, pattern in first.items() if pattern is not None}


def discard_state(optimizer: Any) -> None:
    """Let an optimizer go on as a new one would, with its parameter groups and learning rates as they are."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)  # where some of pytorch-optimizer count


def averages_weights(optimizer: Any) -> bool:
    """Whether an optimizer, or the one that accelerate wrapped, has two sets of weights."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None))


def use_averaged_weights(optimizer: Any) -> None:
    """Put the averaged weights into the model, if the optimizer has two sets."""
    if averages_weights(optimizer):
        optimizer.eval()


def use_trained_weights(optimizer: Any) -> None:
    """Put the weights that are trained into the model, if the optimizer has two sets."""
    if averages_weights(optimizer):
        optimizer.train()
