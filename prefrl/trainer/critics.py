"""PPO's critic as its options ask for it, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.errors import ConfigError
from prefrl.losses.policy import POLICY_LOSSES
from prefrl.losses.reduce import token_weights
from prefrl.losses.value import value_loss
from prefrl.metrics import ExplainedVariance, Metric
from prefrl.models.critic import Critic, HeadCritic, ModelCritic, value_model
from prefrl.models.modes import disable_dropout
from prefrl.trainer.objective import token_mean
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.trainer.ppo_config import PPOConfig
    from prefrl.types import TokenBatch

__all__ = ["critic_loss", "make_critic"]


def make_critic(args: PPOConfig, policy: PreTrainedModel, given: str | PreTrainedModel | None) -> Critic:
    """The critic that the options ask for.

    Args:
        args: Options.
        policy: The model that is trained.
        given: The user's `value_model`.

    Raises:
        ConfigError: `given` would have no effect, or cannot be a critic of this policy.
    """
    if args.critic == "head":
        if given is not None:
            raise ConfigError("value_model has no effect with critic='head'. Set critic='model', or remove it.")
        return HeadCritic(policy, detach_trunk=args.detach_trunk, plan=args.forward_plan)
    model = value_model(policy, given)
    disable_dropout(model)
    if args.activation_checkpointing:
        model.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
    return ModelCritic(model, plan=args.forward_plan)


def critic_loss(args: PPOConfig, batch: TokenBatch, values: Tensor) -> LossOutput:
    """vf_coef * value loss, weighed over tokens as the policy's loss is.

    Args:
        args: Options.
        batch: With the values of old and the returns.
        values: [N], gradient flows.
    """
    assert batch.values is not None
    assert batch.returns is not None
    token = value_loss(values, batch.values, batch.returns, cliprange_value=args.cliprange_value)
    reduction = POLICY_LOSSES[args.loss_type].reduction
    weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction=reduction)
    metrics: dict[str, Metric] = {name: token_mean(stat, batch) for name, stat in token.stats.items()}
    metrics["loss/value"] = token_mean(token.loss.detach(), batch)
    metrics["val/mean"] = token_mean(values.detach(), batch)
    metrics["val/explained_variance"] = ExplainedVariance.of(batch.returns, values, batch.trainable)
    return LossOutput(args.vf_coef * (weights * token.loss).sum(), metrics)
