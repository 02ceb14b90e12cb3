"""The optimizer of a run: its class, its parameter groups, and its two sets of weights if it is schedule-free.

Schedule-free optimizers train one set of weights and average them into another. The average is what is evaluated,
saved and used. The methods `train` and `eval` of such an optimizer put one set or the other into the model.

Source: Defazio et al. 2024, arXiv 2405.15682
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Trainer

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.options.optimizers import OPTIMIZERS
from prefrl.trainer.base.optimizers.by_name import added_arguments, named_optimizer, works_under
from prefrl.trainer.base.optimizers.muon import MuonWithAdamW, hidden_matrices

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, TrainingArguments

    from prefrl.trainer.base.config import BaseConfig

__all__ = [
    "averages_weights",
    "check_optimizer",
    "group_parameters",
    "optimizer_class",
    "regroup",
    "use_averaged_weights",
    "use_trained_weights",
]


def check_optimizer(args: BaseConfig, given: torch.optim.Optimizer | None, accelerator: Any) -> None:
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
        distributed.check_optimizer(accelerator, name, works_under(name))
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


def group_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, args: BaseConfig) -> None:
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
