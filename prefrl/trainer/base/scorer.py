"""Computes the scores of tokens: all forward passes of the policy, the reference and the critic over a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from prefrl import distributed
from prefrl.models.forward import token_logprobs
from prefrl.models.modes import eval_mode
from prefrl.models.no_grad import in_pieces
from prefrl.models.reference import scores_in_pieces
from prefrl.models.scoring import inside, packed, unpacked

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefrl.losses.logprobs import TokenScores, WantName
    from prefrl.models.critic import Critic
    from prefrl.models.reference import Reference
    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.base.step_account import StepAccount
    from prefrl.types import TokenBatch

__all__ = ["Annotation", "Scorer"]

# Fields of a batch that no-grad passes fill.
Annotation = Literal["old_logprobs", "entropies", "log_collision", "values", "ref_logprobs", "ref_hidden"]

_OF_REFERENCE: frozenset[Annotation] = frozenset({"ref_logprobs", "ref_hidden"})

# A no-grad pass keeps the activations of one layer at a time, so it may hold this many times more tokens than a
# training pass, which keeps those of all layers.
_NO_GRAD_TOKENS = 4


@dataclass
class Scorer:
    """Scores batches under a trainer's models. Log-probs are at the temperature that completions are sampled with."""

    args: BaseConfig
    accelerator: Any
    account: StepAccount
    policy: Callable[[], PreTrainedModel]  # without the backend's wrapper
    reference: Reference | None = None
    critic: Critic | None = None

    # With gradients.

    def scores(self, model: nn.Module, batch: TokenBatch, want: Sequence[WantName]) -> TokenScores:
        """[N] scores of the response tokens under `model`: the policy, with or without the backend's wrapper."""
        return token_logprobs(
            model,
            batch,
            temperature=self.args.scoring_temperature,
            want=want,
            plan=self.args.forward_plan,
            reference_logits=None if self.reference is None or batch.ref_hidden is None else self.reference.logits,
        )

    def scores_and_values(
        self, model: nn.Module, batch: TokenBatch, critic: Critic, want: Sequence[WantName]
    ) -> tuple[TokenScores, Tensor]:
        """[N] scores of the policy and [N] values of the critic, in one forward call of the model."""

        def task() -> dict[str, Tensor]:
            scores = self.scores(model, batch, (*want, *critic.wants))
            values = critic.values(batch, hidden=scores.hidden)
            return packed(replace(scores, hidden=None), values=values)

        full_kl = () if self.reference is None or batch.ref_hidden is None else ("full_kl",)
        scores, (values,) = unpacked(inside(model, task), {*want, *full_kl}, "values")
        return scores, values

    # Without gradients. All ranks must call these, even those without rows.

    def annotate(self, batch: TokenBatch, needs: Collection[Annotation], *, rows_per_pass: int) -> TokenBatch:
        """Fill the fields in `needs` that the batch lacks: at most one pass of the policy and one of the reference.

        Args:
            batch: The rows to score, on the host.
            needs: Fields to fill. Those of the policy are computed with its current weights, without dropout.
            rows_per_pass: Rows in a training pass; see `budget`.
        """
        missing = {name for name in needs if getattr(batch, name) is None}
        max_tokens = self.budget(batch.largest_chunk(rows_per_pass))
        if missing - _OF_REFERENCE:
            batch = self._with_policy(batch, missing - _OF_REFERENCE, max_tokens=max_tokens)
        if missing & _OF_REFERENCE:
            want: tuple[WantName, ...] = ("hidden",) if "ref_hidden" in missing else ()
            scores = self.of_reference(batch, max_tokens=max_tokens, want=want)
            batch = batch.replace(ref_logprobs=scores.logprobs, ref_hidden=scores.hidden)
        return batch

    def _with_policy(self, batch: TokenBatch, fields: Collection[Annotation], *, max_tokens: int) -> TokenBatch:
        want: list[WantName] = ["entropy"] if "entropies" in fields else []
        if "values" in fields:
            assert self.critic is not None
            return self._with_values(batch, self.critic, want, max_tokens=max_tokens)
        want += ["log_collision"] if "log_collision" in fields else []
        scores = self.of_policy(batch, max_tokens=max_tokens, want=want)
        found = {"old_logprobs": scores.logprobs, "entropies": scores.entropy, "log_collision": scores.log_collision}
        return batch.replace(**{name: found[name] for name in fields})

    def _with_values(
        self, batch: TokenBatch, critic: Critic, want: Sequence[WantName], *, max_tokens: int
    ) -> TokenBatch:
        """Old log-probs and values from a single pass, because the critic may read the policy's hidden states."""
        policy = self.policy()

        def score(piece: TokenBatch) -> Tensor:
            scores, values = self.scores_and_values(policy, piece, critic, want)
            return torch.stack([scores.logprobs, values, *([] if scores.entropy is None else [scores.entropy])], 1)

        with self.account.scoring("old_policy", batch), eval_mode(policy), self.accelerator.autocast():
            columns = in_pieces(policy, score, batch.to(self.args.device), max_tokens=max_tokens).to(batch.device)
        logprobs, values, *entropies = columns.unbind(1)
        return batch.replace(old_logprobs=logprobs, values=values, entropies=entropies[0] if entropies else None)

    def of_reference(
        self, batch: TokenBatch, *, max_tokens: int | None = None, want: Sequence[WantName] = ()
    ) -> TokenScores:
        """[N] scores under the reference, in passes of at most `max_tokens` tokens; None: the token budget."""
        assert self.reference is not None
        usable = nullcontext() if self.reference.own_model is not None else distributed.usable(self.policy())
        with self.account.scoring("reference", batch), self.accelerator.autocast(), usable:
            scores = self.reference.scores(
                batch.to(self.args.device),
                temperature=self.args.scoring_temperature,
                max_tokens=max_tokens or self.args.max_tokens_per_micro_batch,
                want=want,
            )
        return scores.to(batch.device)

    def of_policy(
        self, batch: TokenBatch, *, max_tokens: int | None = None, want: Sequence[WantName] = ()
    ) -> TokenScores:
        """[N] scores under the current policy, without dropout; see `of_reference`."""
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
                temperature=self.args.scoring_temperature,
                max_tokens=max_tokens or self.args.max_tokens_per_micro_batch,
                plan=self.args.forward_plan,
                want=want,
            )
        return scores.to(batch.device)

    def reference_logprobs(self, batch: TokenBatch, *, max_tokens: int | None = None) -> Tensor:
        """[N] log-probs of `of_reference`."""
        return self.of_reference(batch, max_tokens=max_tokens).logprobs

    def policy_logprobs(self, batch: TokenBatch, *, max_tokens: int | None = None) -> Tensor:
        """[N] log-probs of `of_policy`."""
        return self.of_policy(batch, max_tokens=max_tokens).logprobs

    def budget(self, with_gradients: int) -> int:
        """Most forward tokens of a no-grad pass, if the largest training pass has `with_gradients` of them."""
        # With either option, a training pass keeps hardly more activations than a no-grad pass.
        is_lean = self.args.activation_checkpointing or self.args.activation_offloading
        factor = 1 if is_lean else _NO_GRAD_TOKENS
        return factor * (self.args.max_tokens_per_micro_batch or with_gradients)
