"""Importance weights for completions that another policy sampled, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights
from prefrl.metrics import EffectiveShare, Max, Mean, Metric, Min

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.options.rollout import CorrectionParams
    from prefrl.types import SampledBatch

__all__ = ["SamplingCorrection", "correct_sampling"]


@dataclass(frozen=True, slots=True)
class SamplingCorrection:
    """The importance weights of the tokens' losses, and metrics."""

    weights: Tensor  # [N], constants
    metrics: dict[str, Metric]


def correct_sampling(
    batch: SampledBatch, old_logprobs: Tensor, *, mode: str, params: CorrectionParams
) -> SamplingCorrection:
    """Importance weights pi / mu; see `losses.policy.off_policy`.

    Args:
        batch: The rows, which mu sampled.
        old_logprobs: [N] nats, of the trainer's policy pi before the first update from this generation batch.
        mode: A name in `OFF_POLICY_CORRECTIONS`.
        params: The bounds of the weights.
    """
    correction = OFF_POLICY_CORRECTIONS[mode]
    result = importance_weights(
        old_logprobs - batch.sampling_logprobs,
        batch.trainable,
        batch.row_index,
        batch.num_rows,
        level=correction.level,
        bound=correction.bound,
        low=params.clip_min,
        high=params.clip_max,
    )
    ratio = "sampling/importance_sampling_ratio"
    return SamplingCorrection(
        result.weights,
        {
            "sampling/sampling_logp_difference/mean": Mean(result.difference_sum, result.num_tokens),
            "sampling/sampling_logp_difference/max": Max(result.difference_max),
            f"{ratio}/min": Min(result.ratio_min),
            f"{ratio}/mean": Mean(result.ratio_sum, result.num_ratios),
            f"{ratio}/max": Max(result.ratio_max),
            "sampling/clipped_share": Mean(result.num_cut, result.num_ratios),
            "sampling/effective_sample_size": EffectiveShare(
                result.ratio_sum, result.ratio_square_sum, result.num_ratios
            ),
        },
    )
