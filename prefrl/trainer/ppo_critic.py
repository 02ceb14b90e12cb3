"""Creates PPO's critic from its options, and computes its loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.reduce import token_weights
from prefrl.losses.supervised import value_loss
from prefrl.metrics import ExplainedVariance, Metric
from prefrl.models.critic import Critic, HeadCritic, ModelCritic, value_model
from prefrl.models.load import arguments_for_other
from prefrl.models.modes import checkpoint_activations, disable_dropout
from prefrl.trainer.base.kernels import add_kernels
from prefrl.trainer.online.policy_terms import token_mean
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.trainer.online.policy_batch import CriticBatch
    from prefrl.trainer.ppo_config import PPOConfig

__all__ = [
    "attach_critic",
    "critic_loss",
    "make_critic",
    "refuse_reward_model",
    "save_gathered",
    "split_state",
]

# The name under which the critic is a part of the policy.
_NAME = "prefrl_critic"


def make_critic(args: PPOConfig, policy: PreTrainedModel, given: str | PreTrainedModel | None) -> Critic:
    """The critic that the options ask for.

    Args:
        args: Options.
        policy: The model that is trained.
        given: The user's `value_model`.

    Raises:
        ConfigError: `given` would have no effect, or cannot be a critic of this policy.
    """
    if given is not None and args.critic == "head":
        raise ConfigError("value_model has no effect with critic='head'. Leave critic out, or remove value_model.")
    if given is not None and args.detach_trunk:
        raise ConfigError("detach_trunk=True has no effect because value_model shares nothing with the policy")
    if given is None and args.critic != "model":
        return HeadCritic(policy, detach_trunk=args.detach_trunk, plan=args.forward_plan)
    arguments: dict[str, Any] | None = None
    if isinstance(given, str | Path):
        arguments = arguments_for_other(given, policy, cast("dict[str, Any] | None", args.model_init_kwargs))
    model = value_model(policy, given, model_init_kwargs=arguments)
    add_kernels(args, model)
    disable_dropout(model)
    if args.activation_checkpointing:
        checkpoint_activations(model, cast("dict[str, Any] | None", args.activation_checkpointing_kwargs))
    return ModelCritic(model, plan=args.forward_plan)


def refuse_reward_model(given: object, reward_funcs: object) -> None:
    """Reject a critic that is also a reward.

    Raises:
        ConfigError: The critic is one of the rewards.
    """
    sources = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if isinstance(given, torch.nn.Module) and any(source is given for source in sources):
        raise ConfigError("value_model is also in reward_funcs: training it would change the reward. Pass a copy.")


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
    metrics: dict[str, Metric] = {name: token_mean(stat, batch) for name, stat in token.stats.items()}
    metrics["loss/value"] = token_mean(token.loss.detach(), batch)
    metrics["val/mean"] = token_mean(values.detach(), batch)
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
