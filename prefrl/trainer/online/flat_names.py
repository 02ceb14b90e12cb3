"""Keywords of online configs that set keys of mappings: options of TRL's configs.

Constructors of configs and the command line accept them. A keyword at its default counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass

from prefrl.trainer.base.options.flat_names import FlatName

__all__ = ["FLAT_NAMES", "OnlineNames", "PolicyGradientNames"]


FLAT_NAMES: Mapping[str, FlatName] = {
    "sapo_temperature_pos": FlatName("loss_kwargs", "temperature_pos"),
    "sapo_temperature_neg": FlatName("loss_kwargs", "temperature_neg"),
    "vespo_k_pos": FlatName("loss_kwargs", "k_pos"),
    "vespo_lambda_pos": FlatName("loss_kwargs", "lambda_pos"),
    "vespo_k_neg": FlatName("loss_kwargs", "k_neg"),
    "vespo_lambda_neg": FlatName("loss_kwargs", "lambda_neg"),
    "off_policy_mask_threshold": FlatName("loss_kwargs", "off_policy_mask_threshold"),
    "entropy_coef_min": FlatName("entropy_kwargs", "min"),
    "entropy_coef_max": FlatName("entropy_kwargs", "max"),
    "entropy_coef_delta": FlatName("entropy_kwargs", "delta"),
    "entropy_target": FlatName("entropy_kwargs", "target"),
    "multi_objective_aggregation": FlatName("advantage_kwargs", "multi_objective_aggregation"),
    "use_bias_correction_kl": FlatName("kl_kwargs", "bias_correction"),
    "vllm_importance_sampling_clip_min": FlatName("vllm_importance_sampling_kwargs", "clip_min"),
    "vllm_importance_sampling_clip_max": FlatName("vllm_importance_sampling_kwargs", "clip_max"),
    "reward_clip_range": FlatName("reward_shaping_kwargs", "clip_range"),
    "missing_eos_penalty": FlatName("reward_shaping_kwargs", "missing_eos_penalty"),
    "vllm_structured_outputs_regex": FlatName("vllm_guided_decoding_regex", None),
}


@dataclass
class OnlineNames:
    """Keywords that every online config accepts; `FLAT_NAMES` has the key that each one sets."""

    reward_clip_range: InitVar[list[float] | None] = None
    missing_eos_penalty: InitVar[float | None] = None
    vllm_structured_outputs_regex: InitVar[str | None] = None
    vllm_importance_sampling_clip_min: InitVar[float | None] = None
    vllm_importance_sampling_clip_max: InitVar[float | None] = 3.0  # None is a valid value: no bound


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
