"""prefrl's policy losses and advantage estimators in torchtitan's reinforcement learning, as parts of its config.

    trainer=PolicyTrainer.Config(loss=PolicyLoss.Config(loss_type="cispo", hyperparameters={"epsilon_high": 4.0}), ...)
    rollouter=AlphabetSortRollouter.Config(advantage=AdvantageEstimator.Config(estimator="rloo"), ...)

torchtitan packs sequences end to end, does not say where one ends, and divides by the number of tokens, so that only
losses of `of_tokens.LOSSES` are possible. There are no log-probs of a reference, so there is no KL term. Advantages
are computed for one group at a time: estimators that compare groups, or need a greedy completion, are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import BaseLoss, compute_logprobs
from torchtitan.config import CompileConfig, Configurable

from prefrl.errors import ConfigError
from prefrl.integrations.of_tokens import check_loss, token_losses
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.tensors import row_advantages

# Estimators that compare the completions of one prompt, and nothing else.
ESTIMATORS = ("grpo", "rloo", "opo", "grpo_passk", "maxrl")


class PolicyLoss(BaseLoss):
    """A policy loss.

    Args:
        config: Which.
        compile_config: Not used.

    Raises:
        ConfigError: torchtitan cannot compute the loss, or there is no such loss or hyperparameter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Which loss."""

        loss_type: str = "dapo"
        """One of `of_tokens.LOSSES`."""

        hyperparameters: dict[str, Any] = field(default_factory=dict)
        """Of the loss."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        check_loss("torchtitan", config.loss_type, config.hyperparameters)
        self.loss_type, self.hyperparameters = config.loss_type, config.hyperparameters

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch divided by the tokens of the step, and its metrics, which are summed.

        Args:
            logits: [B, L, V] of the trained policy.
            labels: [B, L] the next tokens.
            global_valid_tokens: Tokens of the step that have a loss; None: the sum is not divided.
            generator_logprobs: [B, L] nats, of the policy that sampled. Where one is not finite, there is no loss.
            advantages: [B, L].
            loss_mask: [B, L] bool.
        """
        logprobs, entropy = compute_logprobs(logits, labels, return_entropy=True)
        mask = loss_mask & torch.isfinite(generator_logprobs)
        _, found = token_losses(self.loss_type, mask, logprobs, generator_logprobs, advantages, self.hyperparameters)
        count = 1 if global_valid_tokens is None else max(global_valid_tokens, 1)
        loss = found.loss.sum() / count
        metrics = {f"loss/{name}": values.sum() / count for name, values in found.stats.items()}
        metrics |= {"loss/mean": loss.detach(), "trainer/entropy/mean": (entropy * mask).sum() / count}
        return loss, metrics


class AdvantageEstimator(Configurable):
    """An advantage estimator of rollouts that share a prompt.

    Args:
        config: Which.

    Raises:
        ConfigError: torchtitan cannot compute the estimator, or there is no such estimator or hyperparameter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Which estimator."""

        estimator: str = "grpo"
        """One of `ESTIMATORS`."""

        hyperparameters: dict[str, Any] = field(default_factory=dict)
        """Of the estimator."""

    def __init__(self, config: Config) -> None:
        name, given = config.estimator, config.hyperparameters
        if name in ADVANTAGES and name not in ESTIMATORS:
            raise ConfigError(
                f"estimator={name!r} with torchtitan: it needs more than the rewards of one group. Allowed are "
                f"{', '.join(ESTIMATORS)}."
            )
        is_of_batch = given.get("scale_rewards") == "batch" or "multi_objective_aggregation" in given
        if is_of_batch or "clip_range" in given:
            raise ConfigError(
                f"hyperparameters={given!r} with torchtitan: it passes one total reward and one group at a time, so "
                "that scale_rewards='batch', multi_objective_aggregation and clip_range cannot act. Remove them."
            )
        self.estimator, self.hyperparameters = name, given
        self([])  # rejects what is not known

    def __call__(self, group: Any) -> list[float]:
        """The advantage of each rollout, in the order of the group."""
        rollouts = getattr(group, "rollouts", group)
        rewards = [float("nan") if each.reward is None else each.reward for each in rollouts]
        lengths = [sum(len(turn.completion_token_ids) for turn in each.turns) for each in rollouts]
        found = row_advantages(
            self.estimator,
            torch.tensor(rewards, dtype=torch.float64),
            torch.zeros(len(rewards), dtype=torch.long),
            torch.tensor(lengths, dtype=torch.float32),
            **self.hyperparameters,
        )
        values: list[float] = found.values.tolist()
        return values
