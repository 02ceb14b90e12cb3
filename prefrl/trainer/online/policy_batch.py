"""The batches that policy-gradient losses read: what their terms add to `ReadyBatch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl.types import ReadyBatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CriticBatch", "PolicyBatch"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyBatch(ReadyBatch):
    """The input of `PolicyObjective`."""

    cov_tokens: Tensor  # [N] bool: tokens that clip_cov and kl_cov treat differently; none for other losses
    nll_weights: Tensor  # [N] weights of the negative log-likelihood of good responses; 0 elsewhere
    entropy_weights: Tensor  # [N] weights of the entropy in its bonus; 0 for tokens without a policy loss
    entropies: Tensor | None = (
        None  # [N] nats, of the policy before the first update from this generation batch, if it was computed
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class CriticBatch(PolicyBatch):
    """The input of a policy loss and a critic's loss."""

    values: Tensor  # [N] of the critic before the first update from this generation batch
    returns: Tensor  # [N] the critic's regression targets
