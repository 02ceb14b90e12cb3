"""Keywords of online configs that set keys of mappings: TRL's names, and options of prefrl 0.0.

Constructors of configs and the command line accept them. A keyword at its default counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import json_mapping
from prefrl.trainer.base.options.flat_names import FlatName

__all__ = ["FLAT_NAMES", "OnlineNames", "PolicyGradientNames"]


def _target(controller: str) -> float | None:
    if controller not in ("fixed", "adaptive"):
        raise ConfigError(f"kl_controller={controller!r}: must be 'fixed' or 'adaptive'")
    return 0.1 if controller == "adaptive" else None


def _schema(value: Any) -> Any:
    return json_mapping(value, "vllm_guided_decoding_json") if isinstance(value, str) else value


def _trl(option: str, key: str | None = None) -> FlatName:
    return FlatName(option, key, is_deprecated=False)


FLAT_NAMES: Mapping[str, FlatName] = {
    # TRL's names.
    "sapo_temperature_pos": _trl("loss_kwargs", "temperature_pos"),
    "sapo_temperature_neg": _trl("loss_kwargs", "temperature_neg"),
    "vespo_k_pos": _trl("loss_kwargs", "k_pos"),
    "vespo_lambda_pos": _trl("loss_kwargs", "lambda_pos"),
    "vespo_k_neg": _trl("loss_kwargs", "k_neg"),
    "vespo_lambda_neg": _trl("loss_kwargs", "lambda_neg"),
    "off_policy_mask_threshold": _trl("loss_kwargs", "off_policy_mask_threshold"),
    "entropy_coef_min": _trl("entropy_kwargs", "min"),
    "entropy_coef_max": _trl("entropy_kwargs", "max"),
    "entropy_coef_delta": _trl("entropy_kwargs", "delta"),
    "entropy_target": _trl("entropy_kwargs", "target"),
    "multi_objective_aggregation": _trl("advantage_kwargs", "multi_objective_aggregation"),
    "use_bias_correction_kl": _trl("kl_kwargs", "bias_correction"),
    "vllm_importance_sampling_clip_min": _trl("vllm_importance_sampling_kwargs", "clip_min"),
    "vllm_importance_sampling_clip_max": _trl("vllm_importance_sampling_kwargs", "clip_max"),
    "reward_clip_range": _trl("reward_shaping_kwargs", "clip_range"),
    "missing_eos_penalty": _trl("reward_shaping_kwargs", "missing_eos_penalty"),
    "vllm_structured_outputs_regex": _trl("vllm_guided_decoding_regex"),
    # Deprecated, to be removed in 0.2.
    "aipo_rho": FlatName("loss_kwargs", "rho"),
    "clip_cov_ratio": FlatName("loss_kwargs", "ratio", only_with=("loss_type", "clip_cov")),
    "clip_cov_lb": FlatName("loss_kwargs", "lb"),
    "clip_cov_ub": FlatName("loss_kwargs", "ub"),
    "kl_cov_ratio": FlatName("loss_kwargs", "ratio", only_with=("loss_type", "kl_cov")),
    "kl_cov_coef": FlatName("loss_kwargs", "coef"),
    "positive_nll_coef": FlatName("loss_kwargs", "positive_nll_coef"),
    "min_filter_prefix_tokens": FlatName("loss_kwargs", "min_filter_prefix_tokens"),
    "f_norm": FlatName("advantage_kwargs", "f_norm"),
    "zero_tail": FlatName("advantage_kwargs", "zero_tail"),
    "advantage_clip_range": FlatName("advantage_kwargs", "clip_range"),
    "kl_weight_cap": FlatName("kl_kwargs", "weight_cap"),
    "kl_target": FlatName("kl_kwargs", "target"),
    "kl_controller": FlatName("kl_kwargs", "target", convert=_target, is_fallback=True),
    "kl_horizon": FlatName("kl_kwargs", "horizon"),
    "uncertainty_rate": FlatName("balance_kwargs", "rate", only_with=("reward_balance", "uncertainty")),
    "gradnorm_alpha": FlatName("balance_kwargs", "alpha"),
    "gradnorm_rate": FlatName("balance_kwargs", "rate", only_with=("reward_balance", "gradnorm")),
    "famo_rate": FlatName("balance_kwargs", "rate", only_with=("reward_balance", "famo")),
    "famo_decay": FlatName("balance_kwargs", "decay"),
    "pareto_smoothing": FlatName("balance_kwargs", "smoothing"),
    "num_selected": FlatName("selection_kwargs", "num_selected"),
    "rollout_resampling": FlatName("rollout_selection", None),
    "rollout_resampling_power": FlatName("selection_kwargs", "power"),
    "dynamic_sampling_max_tries": FlatName("dynamic_sampling_kwargs", "max_tries"),
    "filter_reward_metric": FlatName("dynamic_sampling_kwargs", "reward_metric"),
    "curriculum_band": FlatName("curriculum_kwargs", "band"),
    "curriculum_reward_bounds": FlatName("curriculum_kwargs", "reward_bounds"),
    "curriculum_floor": FlatName("curriculum_kwargs", "floor"),
    "curriculum_momentum": FlatName("curriculum_kwargs", "momentum"),
    "stop_properly_penalty_coef": FlatName("reward_shaping_kwargs", "stop_properly_penalty_coef"),
    "normalize_rewards": FlatName("reward_shaping_kwargs", "normalize"),
    "vllm_request_timeout": FlatName("vllm_kwargs", "request_timeout"),
    "vllm_guided_decoding_json": FlatName("vllm_kwargs", "guided_json", convert=_schema),
    "vllm_guided_decoding_grammar": FlatName("vllm_kwargs", "guided_grammar"),
    "weight_sync_folder": FlatName("vllm_kwargs", "sync_folder"),
    "weight_sync_timeout": FlatName("vllm_kwargs", "sync_timeout"),
}


@dataclass
class OnlineNames:
    """Keywords that every online config accepts; `FLAT_NAMES` has the key that each one sets."""

    reward_clip_range: InitVar[list[float] | None] = None
    missing_eos_penalty: InitVar[float | None] = None
    vllm_structured_outputs_regex: InitVar[str | None] = None
    vllm_importance_sampling_clip_min: InitVar[float | None] = None
    vllm_importance_sampling_clip_max: InitVar[float | None] = 3.0  # None is a valid value: no bound
    stop_properly_penalty_coef: InitVar[float | None] = None
    normalize_rewards: InitVar[bool | None] = None
    dynamic_sampling_max_tries: InitVar[int | None] = None
    filter_reward_metric: InitVar[str | None] = None
    curriculum_band: InitVar[list[float] | None] = None
    curriculum_reward_bounds: InitVar[list[float] | None] = None
    curriculum_floor: InitVar[float | None] = None
    curriculum_momentum: InitVar[float | None] = None
    vllm_request_timeout: InitVar[float | None] = None
    vllm_guided_decoding_json: InitVar[dict[str, Any] | str | None] = None
    vllm_guided_decoding_grammar: InitVar[str | None] = None
    weight_sync_folder: InitVar[str | None] = None
    weight_sync_timeout: InitVar[float | None] = None


@dataclass
class PolicyGradientNames:
    """Keywords that every policy-gradient config accepts; `FLAT_NAMES` has the key that each one sets."""

    sapo_temperature_pos: InitVar[float | None] = None
    sapo_temperature_neg: InitVar[float | None] = None
    vespo_k_pos: InitVar[float | None] = None
    vespo_lambda_pos: InitVar[float | None] = None
    vespo_k_neg: InitVar[float | None] = None
    vespo_lambda_neg: InitVar[float | None] = None
    off_policy_mask_threshold: InitVar[float | None] = None
    entropy_coef_min: InitVar[float | None] = None
    entropy_coef_max: InitVar[float | None] = None
    entropy_coef_delta: InitVar[float | None] = None
    entropy_target: InitVar[float | None] = None
    multi_objective_aggregation: InitVar[str | None] = None
    use_bias_correction_kl: InitVar[bool | None] = None
    aipo_rho: InitVar[float | None] = None
    clip_cov_ratio: InitVar[float | None] = None
    clip_cov_lb: InitVar[float | None] = None
    clip_cov_ub: InitVar[float | None] = None
    kl_cov_ratio: InitVar[float | None] = None
    kl_cov_coef: InitVar[float | None] = None
    positive_nll_coef: InitVar[float | None] = None
    min_filter_prefix_tokens: InitVar[int | None] = None
    f_norm: InitVar[float | None] = None
    zero_tail: InitVar[bool | None] = None
    advantage_clip_range: InitVar[list[float] | None] = None
    kl_weight_cap: InitVar[float | None] = None
    kl_target: InitVar[float | None] = None
    kl_controller: InitVar[str | None] = None  # after kl_target, which takes precedence
    kl_horizon: InitVar[int | None] = None
    uncertainty_rate: InitVar[float | None] = None
    gradnorm_alpha: InitVar[float | None] = None
    gradnorm_rate: InitVar[float | None] = None
    famo_rate: InitVar[float | None] = None
    famo_decay: InitVar[float | None] = None
    pareto_smoothing: InitVar[float | None] = None
    num_selected: InitVar[int | None] = None
    rollout_resampling: InitVar[str | None] = None
    rollout_resampling_power: InitVar[float | None] = None
