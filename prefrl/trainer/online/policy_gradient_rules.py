"""Which options of policy-gradient trainers exclude each other because of what their hyperparameters say.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect
from prefrl.trainer.online.rules import GenerationRules

__all__ = ["PolicyGradientRules"]


class PolicyGradientRules(GenerationRules):
    """Checks of the options that advantages and losses connect; a base of policy-gradient configs.

    These configs also know `estimator`, `of_tokens` (whether it gives each token its own advantage), `needs_greedy`,
    `reduction` (how the loss is averaged), and the hyperparameters: `loss_params`, `entropy_params`, `kl_params`,
    `advantage_params`, `selection_params` and `shaping_params`.
    """

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """See `GenerationRules.needs_whole_batch`."""
        options, needs = self._all, super().needs_whole_batch
        if options.normalize_advantages:
            needs["normalize_advantages=True"] = "Set it to False."
        if options.top_entropy_quantile < 1:
            needs[f"top_entropy_quantile={options.top_entropy_quantile}"] = "Set it to 1."
        if options.loss_type in ("clip_cov", "kl_cov"):
            needs[f"loss_type={options.loss_type!r}"] = "Use another loss."
        if self.bonus_has_own_count:
            bonus = f"entropy_coef={options.entropy_coef}" if options.entropy_coef else "use_adaptive_entropy=True"
            if options.reduction != "token":
                needs[f"{bonus} and loss_type={options.loss_type!r}"] = "Use loss_type='dapo', or no entropy bonus."
            else:
                needs[f"{bonus} and a selection of tokens"] = "Remove one of them."
        if self._scale == "batch":
            needs["scale_rewards='batch'"] = "Use scale_rewards='group'."
        if self._normalizes_each_reward:
            needs["multi_objective_aggregation='normalize_then_sum'"] = (
                "Use multi_objective_aggregation='sum_then_normalize'."
            )
        if options.estimator == "gpg":
            needs["advantage_estimator='gpg'"] = "Use another estimator."
        resamples = options.rollout_selection in ("pow", "max_min", "max_random")
        given = {
            "rollout_selection": options.rollout_selection if resamples else None,
            "loss_kwargs: positive_nll_coef": options.loss_params.positive_nll_coef,
            "reward_balance": options.reward_balance,
        }
        return needs | {f"{name}={value!r}": "Remove it." for name, value in given.items() if value is not None}

    @property
    def has_bonus(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return bool(self._all.entropy_coef > 0 or self._all.use_adaptive_entropy)

    @property
    def bonus_has_own_count(self) -> bool:
        """Whether the bonus is a mean over something else than the items that the loss is divided by."""
        options = self._all
        selects = options.top_entropy_quantile < 1 or options.loss_params.min_filter_prefix_tokens is not None
        return self.has_bonus and (selects or options.reduction != "token")

    @property
    def _scale(self) -> str | None:
        params = self._all.advantage_params
        return params.scale_rewards if "scale_rewards" in params.names() else None

    @property
    def _normalizes_each_reward(self) -> bool:
        params = self._all.advantage_params
        has_choice = "multi_objective_aggregation" in params.names()
        return has_choice and params.multi_objective_aggregation == "normalize_then_sum"

    @property
    def _on_totals(self) -> str | None:
        """An option that applies to the total rewards of completions, as text; None: none is set."""
        options = self._all
        given = {
            "reward_shaping_kwargs": not options.shaping_params.is_default,
            f"reward_balance={options.reward_balance!r}": options.reward_balance is not None,
            "normalize_advantages=True": options.normalize_advantages,
            "scale_rewards='batch'": self._scale == "batch",
            "multi_objective_aggregation='normalize_then_sum'": self._normalizes_each_reward,
        }
        return next((name for name, is_set in given.items() if is_set), None)

    def validate_hyperparameters(self) -> None:
        """Reject hyperparameters, and options that decide how rewards become advantages, that exclude each other.

        Raises:
            ConfigError: Names the options, their values and what to do.
        """
        self._validate_entropy()
        self._validate_kl_params()
        if self._all.reward_balance is not None:
            self._validate_balance()
        if self._normalizes_each_reward:
            self._validate_normalized_rewards()
        self._validate_selection()
        self._validate_credit()

    def _validate_entropy(self) -> None:
        """An initial weight has to be between the bounds of the adaptive weight."""
        options = self._all
        if options.use_adaptive_entropy:
            weight, bounds = options.entropy_coef, options.entropy_params
            if not bounds.min <= weight <= bounds.max:
                raise ConfigError(
                    f"entropy_coef={weight}: must be from min {bounds.min} to max {bounds.max} of entropy_kwargs"
                )

    def _validate_kl_params(self) -> None:
        options = self._all
        params = options.kl_params if options.kl_in == "reward" and options.beta > 0 else None
        if params is not None and "bias_correction" in params.names() and params.bias_correction:
            raise ConfigError(
                "kl_kwargs: bias_correction=True has no effect because kl_in='reward': the ratio of the policy loss "
                "already weights the whole reward. Leave it False."
            )
        if options.kl_estimator == "sequence" and options.reduction == "sequence_mean":
            raise ConfigError(
                f"kl_estimator='sequence' with loss_type={options.loss_type!r}: it weights sequences by 1 / length, "
                "but the KL of a sequence is a sum over its tokens. Use a loss that sums or averages over all tokens."
            )

    def _validate_balance(self) -> None:
        options = self._all
        if options.of_tokens:
            raise ConfigError(
                f"reward_balance={options.reward_balance!r} with token-level advantages ({options.estimator}): only "
                "advantages of completions are computed for each reward. Use GRPO or RLOO."
            )
        if not options.shaping_params.is_default or options.kl_in == "reward" or options.needs_greedy:
            raise ConfigError(
                f"reward_balance={options.reward_balance!r} weights the advantages of each reward, but "
                "kl_in='reward', reward_shaping_kwargs and a greedy baseline apply to the total reward. Remove them."
            )
        if options.reward_balance != "fixed" and min(options.reward_weights or [1.0]) < 0:
            raise ConfigError(
                f"reward_weights={options.reward_weights}: reward_balance={options.reward_balance!r} needs weights "
                ">= 0. Change the sign of the reward, or use 'fixed'."
            )

    def _validate_normalized_rewards(self) -> None:
        options = self._all
        if not options.shaping_params.is_default or options.kl_in == "reward":
            raise ConfigError(
                "multi_objective_aggregation='normalize_then_sum' normalizes each reward, but kl_in='reward' and "
                "reward_shaping_kwargs change the total. Use 'sum_then_normalize', or remove these."
            )
        if options.reward_balance is not None:
            raise ConfigError(
                f"multi_objective_aggregation='normalize_then_sum' with reward_balance={options.reward_balance!r}: "
                "both determine how rewards are combined. Remove one of them."
            )

    def _validate_selection(self) -> None:
        """The number of selected completions may not be missing, or select all of them."""
        options = self._all
        size, params = options.num_generations, None if options.rollout_selection is None else options.selection_params
        if params is None or "num_selected" not in params.names():
            return
        if (params.num_selected or size) >= size:
            raise ConfigError(
                f"selection_kwargs: num_selected={params.num_selected}: must be below num_generations={size} with "
                f"rollout_selection={options.rollout_selection!r}"
            )

    def _validate_credit(self) -> None:
        """Turns cannot have rewards of their own in all combinations."""
        options = self._all
        if options.turn_credit == "episode" or options.of_tokens:
            check_no_effect(
                name="turn_discount",
                value=options.turn_discount,
                unset=1.0,
                because="it discounts only with turn_credit='return' and advantages of completions",
                remedy="Set turn_credit='return'; for advantages of tokens set gamma in advantage_kwargs.",
            )
            return
        if options.estimator not in ("grpo", "rloo"):
            raise ConfigError(
                f"turn_credit='return' with advantage_estimator={options.estimator!r}: returns are compared with the "
                "mean of the other episodes, as only 'grpo', 'rloo' and estimators of tokens allow. Use one of these."
            )
        if self._on_totals is not None:
            raise ConfigError(
                f"turn_credit='return' with {self._on_totals}: that applies to the total reward, but each turn has "
                "its own. Remove one of the two."
            )
