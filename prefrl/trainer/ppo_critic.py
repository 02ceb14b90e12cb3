"""PPO's critic: how it is made, its loss, its parameter groups in the optimizer, and how its gradients are clipped."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.losses.per_token import token_weights
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.supervised import value_loss
from prefrl.metrics import ExplainedVariance, Metric, token_mean
from prefrl.models.critic import Critic, HeadCritic, ModelCritic, value_model
from prefrl.models.load import arguments_for_other
from prefrl.models.modes import checkpoint_activations, disable_dropout
from prefrl.options.algorithms import CriticOptimizer
from prefrl.options.fields import mapping_of
from prefrl.trainer.configs import PPOConfig
from prefrl.trainer.online.policy_terms import CriticBatch
from prefrl.trainer.parts import Run
from prefrl.trainer.scheduler import Scheduler, refresh
from prefrl.types import LossOutput

# The name under which the critic is a part of the policy.
_NAME = "prefrl_critic"


def make_critic(run: Run, args: PPOConfig, given: str | PreTrainedModel | None) -> Critic:
    """The critic that the options ask for.

    Args:
        run: The training, with the policy.
        args: Options.
        given: The user's `value_model`.

    Raises:
        ConfigError: `given` would have no effect, or cannot be a critic of this policy.
    """
    policy = run.policy
    if args.value_model_name_or_path is not None:
        if given is not None:
            raise ConfigError(
                f"value_model_name_or_path={args.value_model_name_or_path!r} and the argument value_model: both name "
                "the critic. Remove one of them."
            )
        given = args.value_model_name_or_path
    if given is not None and args.critic == "head":
        raise ConfigError("value_model has no effect with critic='head'. Leave critic out, or remove value_model.")
    if given is None and args.critic != "model":
        return HeadCritic(policy, detach_trunk=args.detach_trunk, plan=args.forward_plan)
    arguments: dict[str, Any] | None = None
    if isinstance(given, str | Path):
        arguments = arguments_for_other(given, policy, cast("dict[str, Any] | None", args.model_init_kwargs))
    model = value_model(policy, given, model_init_kwargs=arguments)
    run.parts.tell("made", run, model, "critic")
    disable_dropout(model)
    if args.activation_checkpointing:
        checkpoint_activations(model, cast("dict[str, Any] | None", args.activation_checkpointing_kwargs))
    return ModelCritic(model, plan=args.forward_plan)


def refuse_reward_model(given: object, **rewards: object) -> None:
    """Reject a critic that is also a reward.

    Args:
        given: The critic.
        rewards: The trainer's arguments that are rewards, by name.

    Raises:
        ConfigError: The critic is one of the rewards.
    """
    for name, value in rewards.items():
        sources = value if isinstance(value, list) else [value]
        if isinstance(given, torch.nn.Module) and any(source is given for source in sources):
            raise ConfigError(f"value_model is also in {name}: training it would change the reward. Pass a copy.")


def critic_loss(args: PPOConfig, batch: CriticBatch, values: Tensor) -> LossOutput:
    """vf_coef * value loss, with the same token weights as the policy loss.

    Args:
        args: Options.
        batch: Rows with old values and returns.
        values: [N], gradient flows.
    """
    token = value_loss(values, batch.values, batch.returns, cliprange_value=args.cliprange_value)
    reduction = POLICY_LOSSES[args.loss_type].reduction
    weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction=reduction)
    metrics: dict[str, Metric] = {name: token_mean(stat, batch.trainable) for name, stat in token.stats.items()}
    metrics["loss/value"] = token_mean(token.loss.detach(), batch.trainable)
    metrics["val/mean"] = token_mean(values.detach(), batch.trainable)
    metrics["val/explained_variance"] = ExplainedVariance.of(batch.returns, values, batch.trainable)
    return LossOutput(args.vf_coef * (weights * token.loss).sum(), metrics)


def attach_critic(policy: PreTrainedModel, critic: Critic) -> None:
    """Make the critic a submodule of the policy that `save_pretrained` and `PolicyWeights` leave out."""
    policy.add_module(_NAME, critic.module)
    names = [f"{_NAME}.{name}" for name in critic.module.state_dict()]
    policy._keys_to_ignore_on_save = [*(policy._keys_to_ignore_on_save or ()), *names]


# The critic is part of the trained model, but is saved to a folder of its own, `critic`.


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into the policy's weights and the critic's, the latter under the critic's own names."""
    prefix = f"{_NAME}."
    policy = {name: value for name, value in state.items() if not name.startswith(prefix)}
    return policy, {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def save_gathered(critic: Critic, folder: Path, *, writes: bool) -> None:
    """Write the critic, whose weights may be partitioned, into a checkpoint. All ranks must call it.

    Args:
        critic: The critic.
        folder: The checkpoint.
        writes: Whether this process writes.
    """
    state = distributed.whole_on_host(critic.module.state_dict(keep_vars=True), keep=writes)
    if writes:
        critic.save(folder / "critic", state)


def clip_apart(accelerator: Any, model: nn.Module, critic: Critic, args: PPOConfig) -> Any:
    """Clip the gradients of policy and critic, each to its own norm.

    Returns:
        The policy's norm before, but not finite if the critic's is not.
    """
    norm = accelerator.clip_grad_norm_(without_critic(model.parameters(), critic), args.max_grad_norm)
    limit = args.critic_params.max_grad_norm or args.max_grad_norm
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
    own, options = {id(parameter) for parameter in critic.parameters()}, args.critic_params
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
    warmup_steps = args.critic_params.warmup_steps
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
