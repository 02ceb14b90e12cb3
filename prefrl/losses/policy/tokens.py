"""Inputs and results of a policy loss, and the importance ratio at the level of tokens or of whole rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefrl.losses.checks import check_same_shape
from prefrl.losses.reduce import row_sums, trainable_per_row
from prefrl.options.policy import ImportanceLevel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "PolicyTokens", "TokenLoss"]

# Ratios without another bound are limited to e^20. That is far beyond what a policy can be trained on, and products
# with advantages and their gradients stay finite in every dtype but float16.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token and its statistics for logging."""

    loss: Tensor  # [N], gradient flows
    stats: dict[str, Tensor]  # [N] float each, constants; the caller averages them over trainable tokens


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """Response tokens of B rows, laid end to end. Tokens that are not trainable are not read, and their loss is 0.

    Raises:
        ValueError: Shapes differ.
    """

    logprobs: Tensor  # [N] nats, log pi; gradient flows
    old_logprobs: Tensor  # [N] nats, constants: log-probs before the first update from this generation batch
    advantages: Tensor  # [N], constants
    trainable: Tensor  # [N] bool: tokens that have a loss
    row_index: Tensor  # [N] int64: row of each token, in 0 .. B-1
    num_rows: int
    level: ImportanceLevel = "token"
    cov_tokens: Tensor | None = None  # [N] bool: tokens that clip_cov and kl_cov treat differently

    def __post_init__(self) -> None:
        """Check shapes, detach the constants, and set advantages to 0 where there is no loss."""
        optional = {} if self.cov_tokens is None else {"cov_tokens": self.cov_tokens}
        check_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            trainable=self.trainable,
            row_index=self.row_index,
            **optional,
        )
        object.__setattr__(self, "old_logprobs", self.old_logprobs.detach())
        object.__setattr__(self, "advantages", self.advantages.detach().where(self.trainable, 0.0))

    @property
    def trainable_logprobs(self) -> Tensor:
        """[N] nats: log pi; 0 where not trainable."""
        return self.logprobs.where(self.trainable, 0.0)

    @property
    def log_ratio(self) -> Tensor:
        """Log of the importance ratio pi / old at `level`, with d = log pi - log old of a token and sg = constant.

            token:           d
            sequence:        mean of d over the trainable tokens of the row: GSPO
            sequence_token:  sg[mean of d] + log pi - sg[log pi]: GSPO-token
            sequence_sum:    sum of d over the trainable tokens of the row, within -20 .. 20: ratio of the whole row

        All levels but `token` give every token of a row the same value. At `sequence` and `sequence_sum` the gradient
        of each of these values reaches all trainable tokens of the row; at `sequence_token` it reaches only its own
        token. If all advantages in a row are equal, the mean of its loss over tokens has the same gradient at
        `sequence` and `sequence_token`.

        Returns:
            [N] nats. Gradient flows, except where the sum is out of bounds. At level `token`, 0 where not trainable.

        Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 7 (sequence) and section 4.3 (sequence_token); Ahmadian
            et al. 2024 (RLOO), arXiv 2402.14740 (sequence_sum)
        """
        log_ratio = (self.logprobs - self.old_logprobs).where(self.trainable, 0.0)
        if self.level == "token":
            return log_ratio
        if self.level == "sequence_sum":
            sums = row_sums(log_ratio, self.trainable, self.row_index, self.num_rows)
            return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[self.row_index]
        means = self.row_means(log_ratio)
        if self.level == "sequence":
            return means[self.row_index]
        return means.detach()[self.row_index] + log_ratio - log_ratio.detach()

    def row_means(self, values: Tensor) -> Tensor:
        """[B] mean of [N] values over the trainable tokens of each row; 0 in rows without one. Gradient flows."""
        sums = row_sums(values, self.trainable, self.row_index, self.num_rows)
        return sums / trainable_per_row(self.trainable, self.row_index, self.num_rows).clamp(min=1).to(sums.dtype)
