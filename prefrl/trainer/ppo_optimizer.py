"""The parameter groups of PPO's critic in the optimizer, and how its gradients are clipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prefrl.errors import ConfigError
from prefrl.trainer.base.scheduler import Scheduler
from prefrl.trainer.ppo_config import CRITIC_OPTIMIZER

if TYPE_CHECKING:
    from prefrl.models.critic import Critic
    from prefrl.trainer.ppo_config import CriticOptimizer, PPOConfig

__all__ = ["add_critic_groups", "clip_apart", "set_weight_decays"]


def clip_apart(accelerator: Any, model: nn.Module, critic: Critic, args: PPOConfig) -> Any:
    """Clip the gradients of policy and critic, each to its own norm.

    Returns:
        The policy's norm before, but not finite if the critic's is not.
    """
    norm = accelerator.clip_grad_norm_(_without_critic(model.parameters(), critic), args.max_grad_norm)
    limit = CRITIC_OPTIMIZER.of(args).max_grad_norm or args.max_grad_norm
    return norm + 0.0 * torch.nn.utils.clip_grad_norm_(critic.parameters(), limit)


def add_critic_groups(
    optimizer: torch.optim.Optimizer, critic: Critic, args: PPOConfig, *, decaying: Collection[int]
) -> list[float]:
    """Move the critic's parameters from the existing groups to new ones, the last, with options of their own.

    Args:
        optimizer: A new one. A group has parameters that decay, or others.
        critic: The critic.
        args: Options.
        decaying: The ids of the parameters that decay: not norms and biases.

    Returns:
        The weight decays of the other groups, the policy's, which come first.

    Raises:
        ConfigError: The optimizer has no such options.
    """
    own, options = {id(parameter) for parameter in critic.parameters()}, CRITIC_OPTIMIZER.of(args)
    for key, option in (("betas", "adam_beta1"), ("betas", "adam_beta2"), ("eps", "adam_epsilon")):
        if getattr(options, option) is not None and not any(key in group for group in optimizer.param_groups):
            raise ConfigError(f"critic_optim_kwargs: optim={args.optim!r} does not read {option}. Leave it out.")
    groups = list(optimizer.param_groups)
    for group in groups:
        of_critic = [parameter for parameter in group["params"] if id(parameter) in own]
        group["params"] = _without_critic(group["params"], critic)
        if of_critic:
            changed = _changed(group, options, decays=id(of_critic[0]) in decaying)
            optimizer.add_param_group({**group, **changed, "params": of_critic, "lr": args.critic_learning_rate})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return [group["weight_decay"] for group in groups if group["params"]]


def set_weight_decays(
    optimizer: torch.optim.Optimizer, scheduler: Any, of_policy: Iterable[float], *, learns: bool
) -> None:
    """Set the weight decays of the policy's groups, which come first, for a step.

    Args:
        optimizer: Of policy and critic.
        scheduler: May change weight decays, too.
        of_policy: What `add_critic_groups` returned.
        learns: Whether the policy learns in this step; otherwise, it does not decay either.
    """
    factor = scheduler.weight_decay_factor if isinstance(scheduler, Scheduler) else 1.0
    for group, weight_decay in zip(optimizer.param_groups, of_policy, strict=False):
        group["weight_decay"] = weight_decay * factor if learns else 0.0


def _changed(group: Mapping[str, Any], options: CriticOptimizer, *, decays: bool) -> dict[str, Any]:
    """What the critic's options change in a parameter group."""
    changed: dict[str, Any] = {}
    if "betas" in group:
        new = (options.adam_beta1, options.adam_beta2)
        changed["betas"] = tuple(old if beta is None else beta for beta, old in zip(new, group["betas"], strict=True))
    if "eps" in group and options.adam_epsilon is not None:
        changed["eps"] = options.adam_epsilon
    if decays and options.weight_decay is not None:
        changed["weight_decay"] = options.weight_decay
    return changed


def _without_critic(parameters: Iterable[nn.Parameter], critic: Critic) -> list[nn.Parameter]:
    """The parameters that are not the critic's."""
    own = {id(parameter) for parameter in critic.parameters()}
    return [parameter for parameter in parameters if id(parameter) not in own]
