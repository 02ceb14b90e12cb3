"""The learner as a library: losses, advantages, KL terms and log-probs for a training loop of your own.

What is listed here is stable. Nothing of it needs a `Trainer`; docs/library.md has examples.
"""

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.kl import KL_ESTIMATORS, full_kl
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.tensors import (
    SummedLoss,
    TokenRows,
    advantages,
    covariance_tokens,
    kl,
    policy_loss,
    reduction_of,
    row_advantages,
    sampling_weights,
    summed,
)
from prefrl.models.forward import token_logprobs
from prefrl.trainer.online.learner import Learned, Learner, Objective
from prefrl.types import LossOutput, TokenBatch

__all__ = [
    "ADVANTAGES",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "Learned",
    "Learner",
    "LossOutput",
    "Objective",
    "SummedLoss",
    "TokenBatch",
    "TokenRows",
    "advantages",
    "covariance_tokens",
    "full_kl",
    "kl",
    "policy_loss",
    "reduction_of",
    "row_advantages",
    "sampling_weights",
    "summed",
    "token_logprobs",
]
