"""Options of advantages: hyperparameters of estimators and of balancing, and what else is known without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import opt
from prefrl.options.params import Params, hyperparameters
from prefrl.options.rules import Rule, ascending, example, when

__all__ = [
    "AdvantageParams",
    "BALANCE_PARAMS",
    "BaselineParams",
    "DiscountParams",
    "ESTIMATOR_FACTS",
    "EstimatorFacts",
    "FamoParams",
    "GaeParams",
    "GpgParams",
    "GradnormParams",
    "GrpoParams",
    "ParetoParams",
    "RewardScale",
    "ScaleParams",
    "UncertaintyParams",
]

RewardScale = Literal["group", "batch", "none"]


@hyperparameters
class AdvantageParams(Params):
    """Hyperparameters that go with every estimator."""

    clip_range: list[float] | None = opt(
        None, "Clip advantages to this range: smallest value (<= 0) and largest value (>= 0); None: no clipping."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        ascending("clip_range", example("grpo", advantage_kwargs={"clip_range": [1.0]})),
        when(
            lambda p: p.clip_range is not None and not p.clip_range[0] <= 0 <= p.clip_range[1],
            "clip_range={clip_range}: must contain 0, as in [-5, 5]",  # or rows without a reward would have a gradient
            example("grpo", advantage_kwargs={"clip_range": [1.0, 2.0]}),
        ),
    )


@hyperparameters
class ScaleParams(AdvantageParams):
    """What centered rewards are divided by; hyperparameters of `grpo_passk`."""

    scale_rewards: RewardScale = opt("group", "Divide by the standard deviation of the group, the batch, or nothing.")
    advantage_epsilon: Annotated[float, Ge(0)] = opt(1e-4, "Added to standard deviations before dividing by them.")


@hyperparameters
class GrpoParams(ScaleParams):
    """Hyperparameters of `grpo`."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = opt(
        "sum_then_normalize", "Several rewards: take their weighted sum first, or normalize each first (GDPO)."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.multi_objective_aggregation == "normalize_then_sum" and p.scale_rewards != "group",
            "scale_rewards={scale_rewards!r} has no effect with multi_objective_aggregation='normalize_then_sum', "
            "which normalizes by group and then by batch. Use scale_rewards='group'.",
            example(
                "grpo",
                scale_rewards="none",
                advantage_kwargs={"multi_objective_aggregation": "normalize_then_sum"},
            ),
        ),
    )


@hyperparameters
class GpgParams(AdvantageParams):
    """Hyperparameters of `gpg`."""

    f_norm: Annotated[float, Gt(0)] = opt(1.0, "Advantages are divided by this; 1 in the paper.")


@hyperparameters
class DiscountParams(AdvantageParams):
    """Hyperparameters of `reinforce_plus_plus`."""

    gamma: Annotated[float, Ge(0), Le(1)] = opt(1.0, "Discount factor of rewards, per token.")


@hyperparameters
class GaeParams(DiscountParams):
    """Hyperparameters of `gae`."""

    lam: Annotated[float, Ge(0), Le(1)] = opt(
        0.95,
        "0: the advantage is the one-step TD error, with the critic's bias; 1: it uses all later rewards, with their "
        "variance.",
    )


@hyperparameters
class BaselineParams(AdvantageParams):
    """Hyperparameters of `optimal_token_baseline`."""

    zero_tail: bool = opt(
        True,
        "No baseline at positions that only one completion of a prompt reaches. False: the completion is its own "
        "baseline there, so its advantage is 0.",
    )


@hyperparameters
class UncertaintyParams(Params):
    """Hyperparameters of `uncertainty`."""

    rate: Annotated[float, Gt(0), Le(1)] = opt(0.1, "Step size of the log-scales.")


@hyperparameters
class GradnormParams(Params):
    """Hyperparameters of `gradnorm`."""

    alpha: Annotated[float, Ge(0)] = opt(1.5, "How strongly rewards that lag behind are favored.")
    rate: Annotated[float, Gt(0), Le(1)] = opt(0.1, "Step size of the log-weights.")


@hyperparameters
class FamoParams(Params):
    """Hyperparameters of `famo`."""

    rate: Annotated[float, Gt(0)] = opt(1.0, "Step size of the logits.")
    decay: Annotated[float, Ge(0)] = opt(0.001, "Decay of the logits; rate * decay must be below 1.")

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.rate * p.decay >= 1,
            "rate={rate} * decay={decay}: must be below 1. Lower one of them.",
            example("grpo", reward_balance="famo", balance_kwargs={"decay": 1.0}),
        ),
    )


@hyperparameters
class ParetoParams(Params):
    """Hyperparameters of `pareto`."""

    smoothing: Annotated[float, Gt(0)] = opt(0.5, "Smoothing of the maximum; smaller is closer to it.")


@dataclass(frozen=True)
class EstimatorFacts:
    """What is known of an advantage estimator without its function, which is in `prefrl.losses.advantage`."""

    params: type[AdvantageParams]
    level: Literal["row", "token"]
    source: str
    whitened: bool = False  # the caller whitens the result over the trainable tokens of all ranks
    needs: frozenset[str] = frozenset()  # optional fields of `ScoredRows` or `ScoredTokens` that it requires


ESTIMATOR_FACTS: dict[str, EstimatorFacts] = {
    "grpo": EstimatorFacts(GrpoParams, "row", "Shao et al. 2024, arXiv 2402.03300, section 4.1.2"),
    "rloo": EstimatorFacts(AdvantageParams, "row", "Ahmadian et al. 2024, arXiv 2402.14740"),
    "reinforce_plus_plus_baseline": EstimatorFacts(
        AdvantageParams, "row", "Hu et al. 2025, arXiv 2501.03262", whitened=True
    ),
    "remax": EstimatorFacts(AdvantageParams, "row", "Li et al. 2023, arXiv 2310.10505", needs=frozenset({"greedy"})),
    "opo": EstimatorFacts(AdvantageParams, "row", "Hao et al. 2025, arXiv 2505.23585"),
    "gpg": EstimatorFacts(GpgParams, "row", "Chu et al. 2025, arXiv 2504.02546"),
    "grpo_passk": EstimatorFacts(ScaleParams, "row", "Tang et al. 2025, arXiv 2503.19595"),
    "maxrl": EstimatorFacts(AdvantageParams, "row", "Tajwar et al. 2026, arXiv 2602.02710"),
    "gae": EstimatorFacts(
        GaeParams,
        "token",
        "Schulman et al. 2015, arXiv 1506.02438, eq. 16",
        whitened=True,
        needs=frozenset({"values"}),
    ),
    "reinforce_plus_plus": EstimatorFacts(DiscountParams, "token", "Hu et al. 2025, arXiv 2501.03262", whitened=True),
    "optimal_token_baseline": EstimatorFacts(
        BaselineParams,
        "token",
        "Li et al. 2026, arXiv 2602.07078",
        needs=frozenset({"logprobs", "log_collision"}),
    ),
}

# The hyperparameters of each method of `reward_balance`.
BALANCE_PARAMS: dict[str, type[Params]] = {
    "fixed": Params,
    "log_transform": Params,
    "uncertainty": UncertaintyParams,
    "gradnorm": GradnormParams,
    "famo": FamoParams,
    "nash": Params,
    "pareto": ParetoParams,
}
