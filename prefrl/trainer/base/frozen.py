"""Scores of tokens without gradients: under the policy as it is now, and under its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.models.modes import eval_mode
from prefrl.models.reference import scores_in_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefrl.losses.logprobs import TokenScores, WantName
    from prefrl.models.reference import Reference
    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.step_account import StepAccount
    from prefrl.types import TokenBatch

__all__ = ["FrozenScores"]

# Tokens of a pass without gradients, which keeps the activations of one layer at a time, for each token of one that
# keeps them all: models have more layers than this.
_NO_GRAD_TOKENS = 4


@dataclass(frozen=True)
class FrozenScores:
    """What a trainer scores with."""

    args: BaseConfig
    accelerator: Any
    account: StepAccount
    policy: Callable[[], PreTrainedModel]  # without what a back-end puts around it

    def of_reference(
        self,
        reference: Reference,
        batch: TokenBatch,
        *,
        temperature: float,
        max_tokens: int | None,
        want: Sequence[WantName],
    ) -> TokenScores:
        """[N] scores under the reference, in passes of at most `max_tokens`; None: the budget of a micro-batch."""
        usable = nullcontext() if reference.own_model is not None else distributed.usable(self.policy())
        with self.account.scoring("reference", batch), self.accelerator.autocast(), usable:
            scores = reference.scores(
                batch.to(self.args.device),
                temperature=temperature,
                max_tokens=max_tokens or self.args.max_tokens_per_micro_batch,
                want=want,
            )
        return scores.to(batch.device)

    def of_policy(
        self, batch: TokenBatch, *, temperature: float, max_tokens: int | None, want: Sequence[WantName]
    ) -> TokenScores:
        """[N] scores under the policy, without dropout; see `of_reference`."""
        policy = self.policy()
        with (
            self.account.scoring("old_policy", batch),
            eval_mode(policy),
            self.accelerator.autocast(),
            distributed.usable(policy),
        ):
            scores = scores_in_pieces(
                policy,
                batch.to(self.args.device),
                temperature=temperature,
                max_tokens=max_tokens or self.args.max_tokens_per_micro_batch,
                plan=self.args.forward_plan,
                want=want,
            )
        return scores.to(batch.device)

    def budget(self, with_gradients: int) -> int:
        """Forward tokens that a pass without gradients may hold where the largest pass with gradients has so many."""
        # With these a training pass hardly keeps more activations than one without gradients.
        is_lean = self.args.activation_checkpointing or self.args.activation_offloading
        factor = 1 if is_lean else _NO_GRAD_TOKENS
        return factor * (self.args.max_tokens_per_micro_batch or with_gradients)
