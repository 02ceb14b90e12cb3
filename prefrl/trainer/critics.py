"""PPO's critic as its options ask for it, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from prefrl.errors import ConfigError
from prefrl.losses.policy import POLICY_LOSSES
from prefrl.losses.reduce import token_weights
from prefrl.losses.value import value_loss
from prefrl.metrics import ExplainedVariance, Metric
from prefrl.models.critic import Critic, HeadCritic, ModelCritic, value_model
from prefrl.models.modes import disable_dropout, eval_mode
from prefrl.models.pieces import in_pieces
from prefrl.trainer.objective import token_mean
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.trainer.online_trainer import OnlineTrainer
    from prefrl.trainer.ppo_config import PPOConfig
    from prefrl.types import TokenBatch

__all__ = ["critic_loss", "make_critic", "policy_and_values", "refuse_reward_model"]


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
    arguments = cast("dict[str, Any] | None", args.model_init_kwargs) if isinstance(given, str) else None
    model = value_model(policy, given, model_init_kwargs=arguments)
    disable_dropout(model)
    if args.activation_checkpointing:
        model.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
    return ModelCritic(model, plan=args.forward_plan)


def refuse_reward_model(given: object, reward_funcs: object) -> None:
    """Refuse a critic that is a reward too.

    Raises:
        ConfigError: It is.
    """
    sources = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if isinstance(given, torch.nn.Module) and any(source is given for source in sources):
        raise ConfigError("value_model is also in reward_funcs: training it would change the reward. Give a copy.")


def policy_and_values(trainer: OnlineTrainer, batch: TokenBatch, *, critic: Critic, max_tokens: int) -> TokenBatch:
    """The batch with old log-probs and values of a critic that reads the policy's hidden states, from one pass.

    Args:
        trainer: Whose policy scores.
        batch: On the host.
        critic: One that has `wants`.
        max_tokens: Forward tokens in one pass.
    """

    def score(piece: TokenBatch) -> Tensor:
        scores = trainer.score(trainer.policy, piece, want=(*trainer.frozen_want, *critic.wants))
        values = critic.values(piece, hidden=scores.hidden)
        return torch.stack([scores.logprobs, values, *([] if scores.entropy is None else [scores.entropy])], 1)

    with trainer.account.scoring("old_policy", batch), eval_mode(trainer.policy), trainer.accelerator.autocast():
        columns = in_pieces(score, batch.to(trainer.args.device), max_tokens=max_tokens).to(batch.device)
    logprobs, values, *entropies = columns.unbind(1)
    return batch.replace(old_logprobs=logprobs, values=values, entropies=entropies[0] if entropies else None)


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
