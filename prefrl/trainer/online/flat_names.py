"""Keywords of online configs that set keys of mappings: options of TRL's configs.

Constructors of configs and the command line accept them. A keyword at its default counts as not given.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from prefrl.options.flat_names import flat

__all__ = ["OnlineNames", "PolicyGradientNames"]


@dataclass
class OnlineNames:
    """Keywords that every online config accepts."""

    reward_clip_range: InitVar[list[float] | None] = flat("reward_shaping_kwargs", "clip_range")
    missing_eos_penalty: InitVar[float | None] = flat("reward_shaping_kwargs", "missing_eos_penalty")
    vllm_structured_outputs_regex: InitVar[str | None] = flat("vllm_guided_decoding_regex")
    vllm_importance_sampling_clip_min: InitVar[float | None] = flat("vllm_importance_sampling_kwargs", "clip_min")
    vllm_importance_sampling_clip_max: InitVar[float | None] = flat(
        "vllm_importance_sampling_kwargs", "clip_max", default=3.0
    )


@dataclass
class PolicyGradientNames:
    """Keywords that every policy-gradient config accepts."""

    sapo_temperature_pos: InitVar[float | None] = flat("loss_kwargs", "temperature_pos")
    sapo_temperature_neg: InitVar[float | None] = flat("loss_kwargs", "temperature_neg")
    vespo_k_pos: InitVar[float | None] = flat("loss_kwargs", "k_pos")
    vespo_lambda_pos: InitVar[float | None] = flat("loss_kwargs", "lambda_pos")
    vespo_k_neg: InitVar[float | None] = flat("loss_kwargs", "k_neg")
    vespo_lambda_neg: InitVar[float | None] = flat("loss_kwargs", "lambda_neg")
    off_policy_mask_threshold: InitVar[float | None] = flat("loss_kwargs", "off_policy_mask_threshold")
    entropy_coef_min: InitVar[float | None] = flat("entropy_kwargs", "min")
    entropy_coef_max: InitVar[float | None] = flat("entropy_kwargs", "max")
    entropy_coef_delta: InitVar[float | None] = flat("entropy_kwargs", "delta")
    entropy_target: InitVar[float | None] = flat("entropy_kwargs", "target")
    multi_objective_aggregation: InitVar[str | None] = flat("advantage_kwargs", "multi_objective_aggregation")
    use_bias_correction_kl: InitVar[bool | None] = flat("kl_kwargs", "bias_correction")
