"""prefrl's policy losses and advantage estimators in verl, whose registries get them under the names "prefrl_*".

verl imports this module in all of its processes if the environment variable VERL_USE_EXTERNAL_MODULES names it. Then

    actor_rollout_ref.actor.policy_loss.loss_mode: prefrl_cispo
    algorithm.adv_estimator: prefrl_rloo

select a loss and an estimator. Hyperparameters that verl has, such as clip_ratio_high, are verl's; the others have
prefrl's defaults. For other values, a module of your own registers names of its own:

    register_policy_loss("gspo_of_prefrl", "grpo", level="sequence")
    register_estimator("rloo_clipped", "rloo", clip_range=[-2.0, 2.0])

Left out: `clip_cov` and `kl_cov`, which select among the tokens of a whole generation batch (verl's own select within
a micro-batch); `gae`, `remax` and `optimal_token_baseline`, for which verl hands values, greedy rewards and
probabilities to its own estimators only; KL terms, which verl adds itself with `kl_loss_type`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est
from verl.trainer.ppo.core_algos import register_policy_loss as register_with_verl

from prefrl.errors import ConfigError
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.tensors import (
    TokenRows,
    advantages,
    estimator_params,
    loss_params,
    policy_loss,
    reduction_of,
)
from prefrl.options.policy import ImportanceLevel, Reduction

LOSSES = tuple(name for name, row in POLICY_LOSSES.items() if row.selection is None)
ESTIMATORS = tuple(name for name, row in ADVANTAGES.items() if not row.needs)

# What verl calls the reductions.
AGGREGATIONS: dict[Reduction, str] = {
    "token": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
# Hyperparameters that are options of verl, in `actor_rollout_ref.actor` and in `algorithm`.
_OF_ACTOR = {
    "epsilon": "clip_ratio_low",
    "epsilon_high": "clip_ratio_high",
    "delta": "clip_ratio_c",
    "temperature_pos": "tau_pos",
    "temperature_neg": "tau_neg",
}
_OF_ALGORITHM = {"gamma": "gamma"}


def register_policy_loss(name: str, loss_type: str, *, level: ImportanceLevel | None = None, **given: Any) -> None:
    """Register a policy loss with verl.

    Args:
        name: What `actor.policy_loss.loss_mode` calls it.
        loss_type: One of `LOSSES`.
        level: Level of the ratio; None: the first that the loss supports.
        **given: Hyperparameters, instead of verl's options and prefrl's defaults.

    Raises:
        ConfigError: verl cannot compute the loss, or there is no such loss, level or hyperparameter.
    """
    if loss_type in POLICY_LOSSES and loss_type not in LOSSES:
        raise ConfigError(
            f"loss_type={loss_type!r} with verl: it selects tokens of a whole generation batch, but verl's losses see "
            f"a micro-batch. Use one of {', '.join(LOSSES)}, or verl's own loss_mode={loss_type!r}."
        )
    mode = AGGREGATIONS[reduction_of(loss_type)]
    levels = POLICY_LOSSES[loss_type].levels  # type: ignore[index]  # `reduction_of` has looked it up
    level = levels[0] if level is None else level
    names = loss_params(loss_type, level, given).names()

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if loss_agg_mode != mode:
            raise ConfigError(
                f"loss_agg_mode={loss_agg_mode!r}: loss_mode={name!r} is {loss_type!r} of prefrl, whose mean is "
                f"{mode!r}. Set actor_rollout_ref.actor.loss_agg_mode={mode!r}."
            )
        if mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
            raise ConfigError(
                f"loss_scale_factor=None: loss_mode={name!r} divides by the maximum length of a response, and padding "
                "differs between micro-batches. Set actor_rollout_ref.actor.loss_scale_factor to that length."
            )
        of_verl = {ours: getattr(config, theirs) for ours, theirs in _OF_ACTOR.items() if ours in names}
        rows = TokenRows(response_mask.bool())
        found = policy_loss(loss_type, rows, log_prob, old_log_prob, advantages, level=level, **{**of_verl, **given})
        weighted = found.loss if rollout_is_weights is None else found.loss * rollout_is_weights
        total = agg_loss(weighted, rows.mask, loss_agg_mode, **config.global_batch_info)
        count = rows.trainable.sum().clamp(min=1)
        return total, {f"actor/{key}": float(values.sum() / count) for key, values in found.stats.items()}

    register_with_verl(name)(loss)


def register_estimator(name: str, estimator: str, **given: Any) -> None:
    """Register an advantage estimator with verl.

    Args:
        name: What `algorithm.adv_estimator` calls it.
        estimator: One of `ESTIMATORS`.
        **given: Hyperparameters, instead of verl's options and prefrl's defaults.

    Raises:
        ConfigError: verl cannot compute the estimator, or there is no such estimator or hyperparameter.
    """
    if estimator in ADVANTAGES and estimator not in ESTIMATORS:
        needed = ", ".join(sorted(ADVANTAGES[estimator].needs))
        raise ConfigError(
            f"estimator={estimator!r} with verl: it needs {needed}, which verl passes to its own estimators only. Use "
            f"one of {', '.join(ESTIMATORS)}, or verl's own adv_estimator={estimator!r}."
        )
    names = estimator_params(estimator, given).names()

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        config: Any = None,
        index: Sequence[Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        of_verl = {ours: getattr(config, theirs) for ours, theirs in _OF_ALGORITHM.items() if ours in names}
        if "scale_rewards" in names and not config.norm_adv_by_std_in_grpo:
            of_verl["scale_rewards"] = "none"
        rows = TokenRows(response_mask.bool())
        numbers: dict[Any, int] = {}
        uids = range(rows.num_rows) if index is None else index
        groups = torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], device=response_mask.device)
        rewards = token_level_rewards
        if ADVANTAGES[estimator].level == "row":
            rewards = (rewards * response_mask).sum(1)
        values = advantages(estimator, rows, rewards, groups, **{**of_verl, **given}).values
        return values, values

    register_adv_est(name)(estimate)


for _loss in LOSSES:
    register_policy_loss(f"prefrl_{_loss}", _loss)
for _estimator in ESTIMATORS:
    register_estimator(f"prefrl_{_estimator}", _estimator)
