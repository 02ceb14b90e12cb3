"""Options of policy-gradient losses: the loss, its entropy terms, and its KL term."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsOption, KwargsValue
from prefrl.options.policy import (
    EntropyParams,
    ImportanceLevel,
    KLParams,
    LossType,
    PolicyLossParams,
    SampledKLParams,
    SequenceKLParams,
)
from prefrl.options.policy_rules import kl_part
from prefrl.trainer.base.options.reference import ReferenceOptions

__all__ = ["ENTROPY", "KL", "LOSS", "EntropyOptions", "KLEstimate", "KLOptions", "PolicyLossOptions"]

logger = logging.getLogger(__name__)

KLEstimate = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full", "sequence"]

LOSS: KwargsOption[PolicyLossParams] = KwargsOption(
    "loss_kwargs",
    "Hyperparameters of the loss.",
    switch="loss_type",
    choices={name: row.params for name, row in POLICY_LOSSES.items()},
    own_options=("epsilon", "epsilon_high", "delta"),
)
ENTROPY: KwargsOption[EntropyParams] = KwargsOption(
    "entropy_kwargs",
    "Hyperparameters of the adaptive weight of the entropy bonus.",
    switch="use_adaptive_entropy",
    choices={True: EntropyParams},
)
KL: KwargsOption[KLParams] = KwargsOption(
    "kl_kwargs",
    "Hyperparameters of the KL term.",
    switch="kl_part",
    label="kl_estimator",
    choices={**dict.fromkeys(KL_ESTIMATORS, SampledKLParams), "full": KLParams, "sequence": SequenceKLParams},
    off="beta=0.0: there is no KL term. Set beta > 0.",
)


@dataclass
class PolicyLossOptions:
    """The policy loss."""

    loss_type: LossType = opt(
        "dapo",
        "The loss and how it is averaged. With PPO's clipped surrogate: grpo, mean over sequences of token means; "
        "dapo and bnpo, mean over all tokens of the step; dr_grpo, sum over tokens / (number of sequences * "
        "max_completion_length); luspo, mean over sequences of token sums. See docs/losses.md for the others.",
    )
    importance_sampling_level: ImportanceLevel = opt(
        "token",
        "Level of the ratio. token: one for each token. sequence: one for each sequence, from its mean log-ratio "
        "(GSPO). sequence_token: the same value, but each token has its own gradient (GSPO-token). sequence_sum: one "
        "for each sequence, from its summed log-ratio (RLOO).",
    )
    epsilon: Annotated[float, Ge(0)] = opt(
        0.2,
        "Clip the ratio to at least 1 - epsilon; from 1 on, there is no lower bound. dppo: how far a probability may "
        "fall (epsilon_high: rise).",
    )
    epsilon_high: Annotated[float, Ge(0)] | None = opt(
        None, "Clip the ratio to at most 1 + epsilon_high; None: same as epsilon. DAPO uses 0.28."
    )
    delta: Annotated[float, Gt(0)] | None = opt(
        None,
        "Upper bound of the ratio where epsilon does not clip it, for two-sided (dual) clipping; must be above "
        "1 + epsilon_high. Called clip_ratio_c in verl, lower_bound_ratio in cosmos-rl.",
    )
    loss_kwargs: KwargsValue = opt(None, LOSS.help)

    @property
    def loss_params(self) -> PolicyLossParams:
        """The hyperparameters of the chosen loss."""
        return LOSS.of(self)

    @property
    def levels(self) -> tuple[ImportanceLevel, ...]:
        """The levels of the ratio that the chosen loss supports."""
        return POLICY_LOSSES[self.loss_type].levels

    def warn_of_lengths(self) -> None:
        """Warn if the ratio of a sequence counts once for each of its tokens."""
        reduction = POLICY_LOSSES[self.loss_type].reduction
        if self.importance_sampling_level in ("sequence", "sequence_token") and reduction in ("token", "constant"):
            logger.warning(
                "importance_sampling_level=%r with loss_type=%r: this loss is a sum over tokens, so a sequence counts "
                "as often as it has tokens. loss_type='grpo' counts each sequence once, as in GSPO.",
                *(self.importance_sampling_level, self.loss_type),
            )


@dataclass
class EntropyOptions:
    """The entropy bonus, and the selection of tokens by entropy."""

    entropy_coef: Annotated[float, Ge(0)] = opt(
        0.0, "Weight of the entropy bonus, the mean entropy of a token; if adaptive, the initial weight."
    )
    use_adaptive_entropy: bool = opt(
        False, "Adapt entropy_coef after each step to keep the entropy at a target; no bonus above the target."
    )
    entropy_kwargs: KwargsValue = opt(None, ENTROPY.help)
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = opt(
        1.0,
        "Compute the policy loss only on this share of the tokens of a generation batch: those with the highest "
        "entropy. Below 1, the batch needs an additional forward pass.",
    )

    @property
    def entropy_params(self) -> EntropyParams:
        """The hyperparameters of the adaptive weight."""
        return ENTROPY.of(self)


@dataclass
class KLOptions(ReferenceOptions):
    """The KL term and the reference model, which the policy is kept close to."""

    kl_estimator: KLEstimate = opt(
        "k3",
        "Estimator of the policy's KL from the reference, per token: Schulman's k1, k2 or k3, or abs; with +, the "
        "same value with the gradient of k2. full: the KL of the full distributions. sequence: also exact for samples "
        "of another policy, and includes the effect of a token on later tokens.",
    )
    kl_in: Literal["loss", "reward"] = opt(
        "loss", "Whether beta * KL is added to the loss or subtracted from the reward."
    )
    kl_kwargs: KwargsValue = opt(None, KL.help)

    @property
    def kl_part(self) -> str | None:
        """The estimator of the KL term; None: there is no term."""
        return kl_part(self)

    @property
    def kl_params(self) -> KLParams:
        """The hyperparameters of the KL term; the defaults if there is none."""
        return KL.of(self) if self.beta > 0 else KLParams()
