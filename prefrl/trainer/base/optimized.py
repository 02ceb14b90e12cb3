"""A trainer with optimizers, learning rates, schedules and penalties that HuggingFace's lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Trainer

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.options.optimizers import OPTIMIZERS
from prefrl.trainer.base.optimizers.by_name import added_arguments, named_optimizer, works_under
from prefrl.trainer.base.optimizers.muon import MuonWithAdamW, hidden_matrices
from prefrl.trainer.base.scheduler import WatchPlateau, own_scheduler

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, TrainingArguments

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["OptimizedTrainer", "regroup"]


class OptimizedTrainer(Trainer):
    """HuggingFace's loop with the optimizers of `OPTIMIZERS`, rates by name, schedules, penalties, clipping by value.

    Args:
        args: Options.
        arguments: See HuggingFace's `Trainer`.
    """

    args: BaseConfig
    lr_scheduler: Any

    def __init__(self, *, args: BaseConfig, **arguments: Any) -> None:
        super().__init__(args=args, **arguments)
        name = str(getattr(args.optim, "value", args.optim))
        if self.optimizer is None:
            distributed.check_optimizer(self.accelerator, name, works_under(name))
            saves_state = args.save_strategy != "no" and not args.save_only_model
            if name == "sgd" and saves_state and not self.get_optimizer_cls_and_kwargs(args)[1].get("momentum"):
                distributed.check_state_read(self.accelerator, name)
            if name in OPTIMIZERS or args.learning_rates:
                distributed.check_chooses_optimizer(self.accelerator, "optim and learning_rates")
        elif args.learning_rates:
            raise ConfigError(
                f"learning_rates={args.learning_rates!r} has no effect on the optimizer in optimizers=. Give it "
                "parameter groups with these rates, or choose it by name with optim."
            )
        for option in args.set_on_gradients:
            distributed.check_gradients_seen(self.accelerator, option)
        if args.reduces_on_plateau:
            self.add_callback(WatchPlateau(args.plateau_params.metric))

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple[Any, Any]:
        """HuggingFace's hook: the class of the optimizer and its arguments."""
        if args.optim in OPTIMIZERS:
            return named_optimizer(args)
        found, arguments = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return found, arguments | added_arguments(args)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """HuggingFace's optimizer, with parameter groups for Muon and for `learning_rates`.

        Raises:
            ConfigError: An expression in `learning_rates` matches no parameter.
        """
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new:
            self.group_parameters(optimizer, self.model if model is None else model)
        return optimizer

    def group_parameters(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Give a new optimizer parameter groups for Muon and for `learning_rates`."""
        if isinstance(optimizer, MuonWithAdamW):
            matrices, settings = {id(p) for p in hidden_matrices(model)}, optimizer.muon_settings
            regroup(optimizer, lambda parameter: settings if id(parameter) in matrices else {})
        if self.args.learning_rates:
            rates = _rates(cast("dict[str, float]", self.args.learning_rates), model)
            regroup(optimizer, lambda parameter: {"lr": rates[id(parameter)]} if id(parameter) in rates else {})

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """HuggingFace's hook."""
        own = own_scheduler(self.args, self.lr_scheduler, optimizer or self.optimizer, num_training_steps)
        if own is not None:
            self.lr_scheduler, self._created_lr_scheduler = own, True
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """HuggingFace's hook, called with the gradients of a step, unless `max_grad_norm` is 0."""
        self.add_penalty(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> Any:
        """HuggingFace's hook, called right before the update, with the norm before clipping or None."""
        if grad_norm is None:
            self.add_penalty(model)
        norm = super()._get_grad_norm(model, grad_norm)
        if self.args.max_grad_value is not None:
            limit = self.args.max_grad_value
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-limit, limit)
        return norm

    def penalized(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters in the penalty of a step."""
        return model.parameters()

    @torch.no_grad()
    def add_penalty(self, model: nn.Module) -> None:
        """Add the gradient of `regularization_type` to the gradients of a step: c sign(w), 2 c w, or both."""
        kind = self.args.regularization_type
        if kind is None:
            return
        weight = self.args.regularization_lambda * distributed.loss_scale(self.accelerator)
        for parameter in self.penalized(model):
            if parameter.grad is None:
                continue
            if kind != "l2":
                parameter.grad.add_(parameter.sign(), alpha=weight)
            if kind != "l1":
                parameter.grad.add_(parameter, alpha=2.0 * weight)


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
