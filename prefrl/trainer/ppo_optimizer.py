"""The parameter groups of PPO's critic in the optimizer, and how its gradients are clipped."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prefrl.errors import ConfigError
from prefrl.options.fields import mapping_of
from prefrl.trainer.ppo_config import CRITIC_OPTIMIZER
from prefrl.trainer.scheduler import Scheduler, refresh

if TYPE_CHECKING:
    from prefrl.models.critic import Critic
    from prefrl.trainer.ppo_config import CriticOptimizer, PPOConfig

__all__ = ["add_critic_groups", "clip_apart", "set_decays", "warm_up_critic", "without_critic"]


def clip_apart(accelerator: Any, model: nn.Module, critic: Critic, args: PPOConfig) -> Any:
    """Clip the gradients of policy and critic, each to its own norm.

    Returns:
        The policy's norm before, but not finite if the critic's is not.
    """
    norm = accelerator.clip_grad_norm_(without_critic(model.parameters(), critic), args.max_grad_norm)
    limit = CRITIC_OPTIMIZER.of(args).max_grad_norm or args.max_grad_norm
    return norm + 0.0 * torch.nn.utils.clip_grad_norm_(critic.parameters(), limit)


def add_critic_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, critic: Critic, args: PPOConfig, *, decaying: Collection[str]
) -> list[float]:
    """Move the critic's parameters from the existing groups to new ones, the last, with options of their own.

    Args:
        optimizer: A new one. A group has parameters that decay, or others.
        model: The policy, with the critic in it.
        critic: The critic.
        args: Options.
        decaying: The names of the parameters that decay: not norms and biases.

    Returns:
        The weight decays of the other groups, the policy's, which come first.

    Raises:
        ConfigError: The optimizer has no such options, or an expression of `learning_rates` names the critic alone.
    """
    own, options = {id(parameter) for parameter in critic.parameters()}, CRITIC_OPTIMIZER.of(args)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _check_rates(args, [name for key, name in names.items() if key not in own])
    for key, option in (("betas", "adam_beta1"), ("betas", "adam_beta2"), ("eps", "adam_epsilon")):
        if getattr(options, option) is not None and not any(key in group for group in optimizer.param_groups):
            raise ConfigError(f"critic_optim_kwargs: optim={args.optim!r} does not read {option}. Leave it out.")
    groups = list(optimizer.param_groups)
    for group in groups:
        of_critic = [parameter for parameter in group["params"] if id(parameter) in own]
        group["params"] = without_critic(group["params"], critic)
        if of_critic:
            changed = _changed(group, options, decays=names[id(of_critic[0])] in decaying)
            optimizer.add_param_group({**group, **changed, "params": of_critic, "lr": args.critic_learning_rate})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return [group["weight_decay"] for group in groups if group["params"]]


def _check_rates(args: PPOConfig, names: list[str]) -> None:
    for pattern in mapping_of(args, "learning_rates"):
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"learning_rates: {pattern!r} is found only in names of the critic's parameters. Set "
                "critic_learning_rate instead."
            )


def _changed(group: Mapping[str, Any], options: CriticOptimizer, *, decays: bool) -> dict[str, Any]:
    """What the critic's options change in a parameter group."""
    changed: dict[str, Any] = {}
    if group.get("use_muon"):  # its eps is not Adam's
        options = replace(options, adam_epsilon=None)
    if "betas" in group:
        new = (options.adam_beta1, options.adam_beta2)
        changed["betas"] = tuple(old if beta is None else beta for beta, old in zip(new, group["betas"], strict=True))
    if "eps" in group and options.adam_epsilon is not None:
        changed["eps"] = options.adam_epsilon
    if decays and options.weight_decay is not None:
        changed["weight_decay"] = options.weight_decay
    return changed


def set_decays(optimizer: Any, scheduler: Any, weight_decays: Iterable[float], *, is_warmup: bool) -> None:
    """Set the weight decays of the policy for a step: 0 in the steps of `critic_warmup`.

    Args:
        optimizer: The groups of the policy come first.
        scheduler: May have a schedule of the weight decay.
        weight_decays: Those of the policy's groups at the start.
        is_warmup: Whether the policy does not learn in this step.
    """
    factor = scheduler.weight_decay_factor if isinstance(scheduler, Scheduler) else 1.0
    for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=False):
        group["weight_decay"] = 0.0 if is_warmup else weight_decay * factor


def warm_up_critic(scheduler: Any, args: PPOConfig, num_training_steps: int, *, first: int) -> Any:
    """Give the critic's learning rates the schedule with a warm-up of their own, if the options ask for it.

    Args:
        scheduler: A new one.
        args: Options.
        num_training_steps: Steps of the training.
        first: Index of the critic's first parameter group; it has all that follow.

    Returns:
        The scheduler.
    """
    warmup_steps = CRITIC_OPTIMIZER.of(args).warmup_steps
    if warmup_steps is None:
        return scheduler
    other = copy.copy(args)
    other.warmup_steps = warmup_steps
    factor = other.learning_rate_factor(num_training_steps)
    plateau = scheduler.plateau
    for index in range(first, len(scheduler.lr_lambdas)):
        scheduler.lr_lambdas[index] = factor if plateau is None else plateau.reduced(factor)
    refresh(scheduler)
    return scheduler


def without_critic(parameters: Iterable[nn.Parameter], critic: Critic) -> list[nn.Parameter]:
    """The parameters that are not the critic's."""
    own = {id(parameter) for parameter in critic.parameters()}
    return [parameter for parameter in parameters if id(parameter) not in own]
