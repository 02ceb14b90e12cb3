"""The loss of policy-gradient trainers: policy loss, KL term, entropy bonus, and their adaptive coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from prefrl import distributed
from prefrl.losses.advantage.estimators import ADVANTAGES
from prefrl.losses.kl.estimators import KL_ESTIMATORS, importance_corrected
from prefrl.losses.kl.sequence import sequence_kl
from prefrl.losses.policy.losses import NEEDS_RATIO, POLICY_LOSSES
from prefrl.losses.policy.terms import off_policy_sequence_mask, positive_nll
from prefrl.losses.policy.tokens import PolicyTokens
from prefrl.losses.reduce import row_items, row_sums, token_weights
from prefrl.metrics import Max, Mean, Metric, Min, host
from prefrl.options.policy import SampledKLParams, SequenceKLParams
from prefrl.trainer.online.controllers import AdaptiveEntropy, AdaptiveKL
from prefrl.trainer.online.policy_batch import CriticBatch, PolicyBatch
from prefrl.trainer.online.sampling_correction import correct_sampling
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.scores import TokenScores, WantName
    from prefrl.trainer.base.scorer import ScoreNeed, Scores
    from prefrl.trainer.online.config import PolicyGradientConfig
    from prefrl.types import TokenBatch

__all__ = ["PolicyObjective", "token_mean"]


class PolicyObjective:
    """Sum over tokens of policy loss + beta * KL with the policy loss's token weights, minus an entropy bonus.

    After division by the items of the step the bonus is entropy_coef * (mean entropy of the tokens that have a policy
    loss), whatever the reduction of the loss.

    Args:
        args: Options.
    """

    splits_groups = True  # what compares the rows of a group is part of their advantages

    def __init__(self, args: PolicyGradientConfig) -> None:
        self.args = args
        if distributed.is_main():
            args.warn_of_lengths()
        self._has_kl = args.beta > 0 and args.kl_in == "loss"
        self._has_bonus = args.has_bonus
        self._has_critic = "values" in ADVANTAGES[args.estimator].needs
        self.stage: type[PolicyBatch] = CriticBatch if self._has_critic else PolicyBatch
        self.policy_loss = POLICY_LOSSES[args.loss_type]
        self.loss_params = args.loss_params
        self.correction_params = args.correction_params if args.corrects_sampling else None
        self.kl_params = kl = args.kl_params
        self.adaptive_kl = None if kl.target is None else AdaptiveKL(args.beta, target=kl.target, horizon=kl.horizon)
        self.adaptive_entropy = (
            AdaptiveEntropy(args.entropy_coef, args.entropy_params) if args.use_adaptive_entropy else None
        )
        # Sums of this optimizer step: KL, its tokens, its rows; entropy, its tokens.
        self._observed = torch.zeros(5, dtype=torch.float64)

    @property
    def beta(self) -> float:
        """Current weight of the KL term."""
        return self.args.beta if self.adaptive_kl is None else self.adaptive_kl.value

    @property
    def entropy_coef(self) -> float:
        """Current weight of the entropy bonus."""
        return self.args.entropy_coef if self.adaptive_entropy is None else self.adaptive_entropy.coef

    @property
    def want(self) -> tuple[WantName, ...]:
        """What a training pass computes in addition to log-probs."""
        # With weight 0 the gradient would be all zeros, at full cost, so do not ask for it.
        return ("entropy", "entropy_gradient") if self._entropy_weight != 0 else ("entropy",)

    @property
    def reference_needs(self) -> frozenset[ScoreNeed]:
        """The scores of the reference that the loss reads."""
        if not self._has_kl:
            return frozenset()
        if self.args.kl_estimator == "full":  # compares the whole distributions of policy and reference
            return frozenset({"ref_logprobs", "ref_hidden"})
        return frozenset({"ref_logprobs"})

    def has_gradient(self, batch: PolicyBatch) -> list[bool]:
        """See `Objective`; with some terms, even rows with zero advantage have a gradient."""
        args = self.args
        has_term = (
            self._has_kl or self._has_bonus or self._has_critic or self.loss_params.positive_nll_coef is not None
        )
        if has_term or args.loss_type == "kl_cov":
            return [True] * batch.num_rows
        sums = row_sums(batch.advantages.abs(), batch.trainable, batch.row_index, batch.num_rows)
        acts: list[bool] = (sums > 0).tolist()
        return acts

    def row_items(self, batch: PolicyBatch) -> Tensor:
        """Tokens, 1 or a constant for each row, as the reduction of the loss says."""
        reduction = self.policy_loss.reduction
        constant = self.args.longest_completion if reduction == "constant" else None
        return row_items(batch.trainable, batch.row_index, batch.num_rows, reduction=reduction, constant=constant)

    def prepared(self, batch: PolicyBatch, *, num_items: float) -> PolicyBatch:
        """See `Objective`; scales the weights of terms that are means over their own tokens: NLL and entropy."""
        own = {"nll_weights": batch.nll_weights} if self.loss_params.positive_nll_coef is not None else {}
        if self.args.bonus_has_own_count:
            own["entropy_weights"] = batch.entropy_weights
        if not own:
            return batch
        counts = [float(weights.sum()) for weights in own.values()]
        items, *counts = distributed.sum_over_ranks([num_items, *counts], self.args.device)
        scales = [items / max(count, 1.0) for count in counts]
        return batch.replace(**{name: own[name] * scale for name, scale in zip(own, scales, strict=True)})

    def ready(
        self,
        batch: PolicyBatch,
        score: Callable[[PolicyBatch, Collection[ScoreNeed]], Scores],
        *,
        is_first: bool,
    ) -> PolicyBatch:
        """See `Objective`; computes the scores that the advantages did not need."""
        if is_first:
            # The policy is still the one that sampled. Its fresh log-probs serve as old ones: ratios are exactly 1.
            batch = batch.replace(old_logprobs=None)
        needs: set[ScoreNeed] = set() if is_first or batch.old_logprobs is not None else {"old_logprobs"}
        if batch.ref_logprobs is None:
            needs |= self.reference_needs
        return batch.replace(**{str(name): found for name, found in score(batch, needs).found.items()})

    def visited(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """See `Objective`; these log-probs are the old ones of the later visits."""
        return batch if batch.old_logprobs is not None else batch.replace(old_logprobs=logprobs)

    def __call__(self, batch: PolicyBatch, scores: TokenScores) -> LossOutput:
        """The sum of the loss over a micro-batch.

        Args:
            batch: The rows.
            scores: Scores from a training pass, including those that `want` names.
        """
        args = self.args
        old_logprobs = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        # AIPO and VESPO use policy / sampler as their ratio, so they need no importance weights on top.
        is_behavior_ratio = self.correction_params is not None and args.loss_type in ("aipo", "vespo")
        behavior = batch.sampling_logprobs if is_behavior_ratio else None
        tokens = PolicyTokens(
            logprobs=scores.logprobs,
            old_logprobs=old_logprobs if behavior is None else behavior,
            advantages=batch.advantages,
            trainable=batch.trainable,
            row_index=batch.row_index,
            num_rows=batch.num_rows,
            level=args.importance_sampling_level,
            cov_tokens=batch.cov_tokens,
        )
        params = self.loss_params
        token = self.policy_loss.function(tokens, params)
        metrics = _stats(token.stats, batch) | {"entropy": token_mean(scores.entropy.detach(), batch)}
        per_token = token.loss
        if self.correction_params is not None:
            mode = args.vllm_importance_sampling_mode
            correction = correct_sampling(batch, old_logprobs, mode=mode, params=self.correction_params)
            per_token = per_token if is_behavior_ratio else correction.weights * per_token
            metrics |= correction.metrics
        if params.off_policy_mask_threshold is not None:
            kept = off_policy_sequence_mask(
                tokens, batch.sampling_logprobs, off_policy_mask_threshold=params.off_policy_mask_threshold
            )
            per_token = kept * per_token
            metrics["sampling/off_policy_masked_share"] = token_mean(1 - kept, batch)
        per_token = batch.loss_scale * per_token
        if self.adaptive_entropy is not None:
            self._observe(3, scores.entropy, batch.entropy_weights > 0)
        if batch.ref_logprobs is not None:
            kl = self._kl(batch, scores, old_logprobs, batch.ref_logprobs)
            per_token = per_token + self.beta * kl
            metrics["kl"] = token_mean(kl.detach(), batch)
            self.observe_kl(kl, batch)
        weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction=self.policy_loss.reduction)
        total = (weights * per_token).sum()
        if params.positive_nll_coef is not None:
            nll = positive_nll(tokens, batch.nll_weights > 0)
            total = total + params.positive_nll_coef * (batch.nll_weights * nll).sum()
        if self._has_bonus:
            metrics |= {"policy_loss": Mean(total.detach(), self.row_items(batch).sum())}
        if self._entropy_weight != 0:
            total = total - self._entropy_weight * (batch.entropy_weights * scores.entropy).sum()
        return LossOutput(total=total, metrics=metrics | self._weights_as_metrics())

    def metrics_without_pass(self, batch: PolicyBatch) -> dict[str, Metric]:
        """Metrics of rows with zero advantage, which are left out of the forward pass; on the host.

        For these rows, the statistics of the loss do not depend on the ratio, except for those in `NEEDS_RATIO`:
        nothing is clipped. The entropy is that of the policy before the first update, if it was computed. Otherwise
        -log p of the sampled token estimates it, because the mean of -log p over samples of p is the entropy of p.
        """
        if batch.num_rows == 0:
            return {}
        no_change = torch.zeros_like(batch.advantages)
        tokens = PolicyTokens(
            logprobs=no_change,
            old_logprobs=no_change,
            advantages=batch.advantages,
            trainable=batch.trainable,
            row_index=batch.row_index,
            num_rows=batch.num_rows,
            level=self.args.importance_sampling_level,
            cov_tokens=batch.cov_tokens,
        )
        stats = self.policy_loss.function(tokens, self.loss_params).stats
        metrics = _stats({name: values for name, values in stats.items() if name not in NEEDS_RATIO}, batch)
        entropies = -batch.sampling_logprobs if batch.entropies is None else batch.entropies
        metrics["entropy"] = token_mean(entropies, batch)
        return {name: host(metric) for name, metric in metrics.items()}

    def _kl(self, batch: PolicyBatch, scores: TokenScores, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[N] KL estimates in nats; gradient flows."""
        name = self.args.kl_estimator
        if name == "full":
            return scores.full_kl
        sampler = old_logprobs if self.correction_params is None else batch.sampling_logprobs
        log_ratio = (scores.logprobs - sampler).where(batch.trainable, 0.0)
        params = self.kl_params
        if isinstance(params, SequenceKLParams):
            return sequence_kl(
                scores.logprobs,
                ref_logprobs,
                log_ratio,
                batch.trainable,
                batch.row_index,
                batch.num_rows,
                params,
            )
        if isinstance(params, SampledKLParams) and params.bias_correction:
            return importance_corrected(scores.logprobs, ref_logprobs, log_ratio, kl_estimator=name)
        return KL_ESTIMATORS[name].function(scores.logprobs, ref_logprobs)

    @property
    def _entropy_weight(self) -> float:
        """Weight of the entropy in this step's loss. An adaptive weight changes only between steps."""
        return self.args.entropy_coef if self.adaptive_entropy is None else self.adaptive_entropy.value

    def _weights_as_metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        if self.adaptive_kl is not None:
            metrics["kl_coef"] = Mean(self.beta, 1)
        if self._has_bonus:
            metrics["entropy_coef"] = Mean(self.entropy_coef, 1)
        return metrics

    # Adaptive coefficients.

    def observe_kl(self, kl: Tensor, batch: TokenBatch) -> None:
        """Record the KL of these tokens, [N] nats, for the update at the end of the step."""
        if self.adaptive_kl is not None:
            self._observe(0, kl, batch.trainable)
            self._observed[2] += batch.num_rows

    def _observe(self, place: int, values: Tensor, counts: Tensor) -> None:
        """Add the sum and the number of those [N] values that count."""
        self._observed = self._observed.to(counts.device, non_blocking=True)
        self._observed[place] += values.detach().where(counts, 0.0).sum(dtype=torch.float64)
        self._observed[place + 1] += counts.sum()

    def end_step(self, device: torch.device) -> None:
        """Adapt the coefficients to the KL and entropy of all ranks in this optimizer step."""
        if self.adaptive_kl is None and self.adaptive_entropy is None:
            return
        observed = self._observed.tolist()
        self._observed = torch.zeros(5, dtype=torch.float64)
        kl, kl_tokens, rows, entropy, entropy_tokens = distributed.sum_over_ranks(observed, device)
        if not math.isfinite(kl + entropy):  # the step will not be applied
            return
        if self.adaptive_kl is not None and kl_tokens:
            self.adaptive_kl.update(kl / kl_tokens, num_completions=int(rows))
        if self.adaptive_entropy is not None and entropy_tokens:
            self.adaptive_entropy.update(entropy / entropy_tokens)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The state of the adaptive coefficients."""
        parts = {"kl": self.adaptive_kl, "entropy": self.adaptive_entropy}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` returned, between optimizer steps."""
        self._observed = torch.zeros(5, dtype=torch.float64)
        if self.adaptive_kl is not None:
            self.adaptive_kl.load_state_dict(state["kl"])
        if self.adaptive_entropy is not None:
            self.adaptive_entropy.load_state_dict(state["entropy"])


def token_mean(values: Tensor, batch: TokenBatch) -> Mean:
    """Mean of [N] values over trainable tokens."""
    return Mean((values * batch.trainable).sum(), batch.trainable.sum())


def _stats(stats: Mapping[str, Tensor], batch: TokenBatch) -> dict[str, Metric]:
    """Means over trainable tokens; for the shares of clipped tokens, also the extremes over rows."""
    metrics: dict[str, Metric] = {}
    weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction="sequence_mean")
    for name, values in stats.items():
        is_ratio = name.startswith("clip_ratio/")
        if name.endswith("_seq_mean"):
            metrics[name] = Mean((values * weights).sum(), weights.sum())  # the weights of a row sum to 1
        else:
            metrics[f"{name}_mean" if is_ratio else name] = token_mean(values, batch)
        if name in ("clip_ratio/low", "clip_ratio/high"):
            kind = Min if name.endswith("low") else Max
            shares = torch.zeros(batch.num_rows, device=batch.device)
            shares.index_add_(0, batch.row_index, (values * weights).float())
            metrics[f"{name}_{kind.__name__.lower()}"] = kind(shares.min() if kind is Min else shares.max())
    return metrics
