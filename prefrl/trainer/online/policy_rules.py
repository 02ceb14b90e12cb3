"""Which options of policy-gradient losses exclude each other, and those of one algorithm.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, check_unset, plain_value
from prefrl.trainer.base.optimizers.table import check_decay
from prefrl.trainer.base.options.schedule_rules import takes_warmup

__all__ = [
    "check_group",
    "check_kl",
    "check_level",
    "check_pairs",
    "check_ppo",
    "check_ratio",
    "check_reinforce_plus_plus",
    "check_rloo",
    "kl_part",
    "name_scale",
]


def kl_part(config: Any) -> str | None:
    """The estimator of the KL term; None: there is no term."""
    return str(config.kl_estimator) if config.beta > 0 else None


def check_level(config: Any, levels: Collection[str]) -> None:
    """Reject a level of the ratio that the chosen loss does not support.

    Args:
        config: Options of the loss.
        levels: Those that it supports.

    Raises:
        ConfigError: Names both options.
    """
    if config.importance_sampling_level not in levels:
        raise ConfigError(
            f"importance_sampling_level={config.importance_sampling_level!r} with loss_type={config.loss_type!r}: "
            f"this loss supports {' and '.join(map(repr, sorted(levels)))}."
        )


def check_kl(config: Any) -> None:
    """Reject options of a KL term that is off, and places that the estimator does not support.

    Raises:
        ConfigError: Names the options and what to do.
    """
    if config.beta == 0:
        check_unset(config, "kl_estimator", "kl_in", because="beta=0.0: there is no KL term", remedy="Set beta > 0.")
    if config.kl_estimator == "full" and config.sync_ref_model:
        raise ConfigError(
            "kl_estimator='full' with sync_ref_model=True: it keeps hidden states of the reference, which become "
            "outdated when the reference moves. Use another estimator, or leave sync_ref_model False."
        )
    if config.kl_in == "reward" and config.kl_estimator not in ("k1", "abs", "k2", "k3"):
        raise ConfigError(
            f"kl_estimator={config.kl_estimator!r} with kl_in='reward': a reward has no gradient, so only its value "
            "counts. Use 'k1' (unbiased), 'k2', 'k3' or 'abs'."
        )


def check_ratio(config: Any, *, of_tokens: bool) -> None:
    """Reject ratios of rows with advantages of tokens.

    Args:
        config: Options of a policy-gradient trainer.
        of_tokens: Whether the advantage estimator gives each token its own advantage.

    Raises:
        ConfigError: Names the options and what to do.
    """
    of_rows = config.importance_sampling_level in ("sequence", "sequence_sum") or config.loss_type in ("gmpo", "vespo")
    if of_rows and of_tokens:
        raise ConfigError(
            f"importance_sampling_level={config.importance_sampling_level!r}, loss_type={config.loss_type!r} with "
            f"token-level advantages ({config.estimator}): a ratio of whole sequences gives every token's gradient "
            "the mean of their advantages. Use level 'token' or 'sequence_token', and another loss."
        )


def name_scale(config: Any) -> None:
    """Give `scale_rewards` the name of its value: True means "group", False "none"."""
    if isinstance(config.scale_rewards, bool):
        config.scale_rewards = "group" if config.scale_rewards else "none"


def check_group(config: Any) -> None:
    """Reject groups of GRPO without a second completion, and generation that its estimator does not support.

    Raises:
        ConfigError: Names the options and what to do.
    """
    if config.num_generations < 2 and config.advantage_estimator != "remax":
        raise ConfigError(
            f"num_generations={config.num_generations}: group advantages need at least 2 completions of a prompt. "
            "Set num_generations>=2."
        )
    if config.advantage_estimator == "remax" and config.generation_mode != "sync":
        raise ConfigError(
            f"generation_mode={config.generation_mode!r} with advantage_estimator='remax': its greedy completions "
            "are requested together with the others. Use generation_mode='sync'."
        )


def check_rloo(config: Any) -> None:
    """Reject groups of RLOO without a second completion.

    Raises:
        ConfigError: Says what to do.
    """
    if config.num_generations < 2:
        raise ConfigError(
            f"num_generations={config.num_generations}: a completion is compared with the others of its prompt. Set "
            "num_generations>=2."
        )


def check_reinforce_plus_plus(config: Any) -> None:
    """Reject a baseline of REINFORCE++ that there is not.

    Raises:
        ConfigError: Says what to do.
    """
    if config.advantage_estimator == "reinforce_plus_plus_baseline" and config.num_generations < 2:
        raise ConfigError(
            f"num_generations={config.num_generations}: advantage_estimator='reinforce_plus_plus_baseline' "
            "compares the completions of a prompt. Set num_generations>=2."
        )


def check_ppo(config: Any) -> None:
    """Reject options of the critic that have no effect, and a policy that never learns.

    Raises:
        ConfigError: Names the options and what to do.
    """
    if config.critic == "model":
        because = "critic='model' shares nothing with the policy"
        check_unset(config, "detach_trunk", because=because, remedy="Use critic='head'.")
    if 0 < config.max_steps <= config.critic_warmup:
        raise ConfigError(
            f"critic_warmup={config.critic_warmup}: must be below max_steps={config.max_steps}, or the policy never "
            "learns"
        )
    _check_critic(config)


def _check_critic(config: Any) -> None:
    critic, optim, schedule = (
        config.critic_params,
        str(plain_value(config.optim)),
        plain_value(config.lr_scheduler_type),
    )
    check_decay(optim, "critic_optim_kwargs: weight_decay", critic.weight_decay)
    if critic.max_grad_norm is not None and config.max_grad_norm == 0:
        raise ConfigError(
            "critic_optim_kwargs: max_grad_norm has no effect because max_grad_norm=0 turns clipping off. Set "
            "max_grad_norm to a norm that the policy's gradients do not reach, such as 1e9."
        )
    if critic.warmup_steps is not None and not takes_warmup(schedule):
        raise ConfigError(
            f"critic_optim_kwargs: warmup_steps={critic.warmup_steps} has no effect because lr_scheduler_type="
            f"{schedule!r} does not read it. Choose another schedule, such as 'constant_with_warmup'."
        )
    if config.critic_warmup and optim == "asgd":
        raise ConfigError(
            f"critic_warmup={config.critic_warmup} with optim='asgd', which also shrinks weights without gradients, "
            "such as the policy's. Set critic_warmup=0, or choose another optimizer."
        )


def check_pairs(config: Any) -> None:
    """Reject what pairs of online DPO cannot be made of.

    Raises:
        ConfigError: Names the options and what to do.
    """
    if config.use_vllm and config.generation_mode == "async":
        raise ConfigError(
            "generation_mode='async': online DPO does not correct for samples of older weights. Use 'sync' or "
            "'overlap'."
        )
    if config.num_generations < 2:
        raise ConfigError(
            f"num_generations={config.num_generations}: a pair needs at least 2 completions of a prompt. Set "
            "num_generations>=2."
        )
    check_no_effect(
        name="vllm_importance_sampling_correction",
        value=bool(config.vllm_importance_sampling_correction),
        unset=False,
        because="pairs are trained on like those of a dataset",
        remedy="Leave it None.",
    )
