"""The loss of policy-gradient trainers: the policy loss, and the terms that options add."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from prefrl import distributed
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.per_token import row_items, row_sums, token_weights
from prefrl.losses.policy.losses import NEEDS_RATIO, POLICY_LOSSES
from prefrl.losses.policy.tokens import PolicyTokens
from prefrl.metrics import Max, Mean, Metric, Min, host, token_mean
from prefrl.options.policy import KL_PARAMS
from prefrl.trainer.online.policy_terms import (
    Adaptation,
    AdaptiveEntropy,
    AdaptiveKL,
    Compared,
    CriticBatch,
    EntropyBonus,
    KLTerm,
    LikelihoodTerm,
    LossPass,
    LossTerm,
    OffPolicyMask,
    PolicyBatch,
    SamplingCorrection,
)
from prefrl.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.per_token import TokenScores, WantName
    from prefrl.trainer.configs import PolicyGradientConfig
    from prefrl.trainer.scorer import ScoreNeed, Scores
    from prefrl.types import TokenBatch


class PolicyObjective:
    """Sum over tokens of policy loss + beta * KL + teacher_kl_coef * KL of the teacher, minus an entropy bonus.

    The KL terms have the token weights of the policy loss.

    After division by the items of the step the bonus is entropy_coef * (mean entropy of the tokens that have a policy
    loss), whatever the reduction of the loss.

    Args:
        args: Options.
    """

    splits_groups = True  # what compares the rows of a group is part of their advantages

    def __init__(self, args: PolicyGradientConfig) -> None:
        if distributed.is_main():
            args.warn_of_lengths()
        self.args = args
        self.policy_loss = POLICY_LOSSES[args.loss_type]
        self.loss_params = params = args.loss_params
        has_critic = "values" in ADVANTAGES[args.estimator].needs
        self.stage: type[PolicyBatch] = CriticBatch if has_critic else PolicyBatch
        self.adaptation = _adaptation(args)
        in_loss, self.in_reward = self._compared(args)
        self.correction = SamplingCorrection(args) if args.corrects_sampling else None
        self.bonus = EntropyBonus(args, self.row_items, self.adaptation) if args.has_bonus else None
        mask, likelihood = params.off_policy_mask_threshold, params.positive_nll_coef
        self.token_terms: list[LossTerm] = [
            *([] if self.correction is None else [self.correction]),
            *([] if mask is None else [OffPolicyMask(mask)]),
            *(KLTerm(args, compared) for compared in in_loss),
        ]
        self.sum_terms: list[LossTerm] = [
            *([] if likelihood is None else [LikelihoodTerm(likelihood)]),
            *([] if self.bonus is None else [self.bonus]),
        ]
        # Weights of terms that are means over their own tokens.
        self._own_counts = [
            *(["nll_weights"] if likelihood is not None else []),
            *(["entropy_weights"] if args.bonus_has_own_count else []),
        ]
        # With these, even rows with zero advantage have a gradient.
        self._all_act = bool(in_loss) or has_critic or bool(self.sum_terms) or args.loss_type == "kl_cov"
        # The scores of reference and teacher that the loss reads. "full" compares whole distributions.
        full: list[ScoreNeed] = ["ref_hidden"] if any(each.estimator == "full" for each in in_loss) else []
        self.reference_needs: frozenset[ScoreNeed] = frozenset([*(each.score for each in in_loss), *full])
        # Those in a batch: also what only the reward reads, if it is recorded.
        in_reward = {each.score for each in self.in_reward} if args.journal_tokens else set()
        self.kept_scores: frozenset[ScoreNeed] = self.reference_needs | in_reward

    def _compared(self, args: PolicyGradientConfig) -> tuple[list[Compared], list[Compared]]:
        """The models that the policy is compared with in the loss, and those in the reward."""
        in_loss: list[Compared] = []
        in_reward: list[Compared] = []
        if args.beta > 0:
            how = args.kl_estimator, args.kl_params, lambda: self.beta, self.adaptation
            (in_reward if args.kl_in == "reward" else in_loss).append(Compared("ref_logprobs", "kl", *how))
        if args.teacher_kl_coef > 0:
            name, is_in_reward = args.teacher_kl_params.name, args.teacher_kl_params.in_reward
            how = name, KL_PARAMS[name](), lambda: args.teacher_kl_coef, None
            (in_reward if is_in_reward else in_loss).append(Compared("teacher_logprobs", "teacher_kl", *how))
        return in_loss, in_reward

    @property
    def beta(self) -> float:
        """Current weight of the reference's KL term."""
        adaptive = None if self.adaptation is None else self.adaptation.kl
        return self.args.beta if adaptive is None else adaptive.value

    @property
    def want(self) -> tuple[WantName, ...]:
        """What a training pass computes in addition to log-probs."""
        # With weight 0 the gradient would be all zeros, at full cost, so do not ask for it.
        has_gradient = self.bonus is not None and self.bonus.value != 0
        return ("entropy", "entropy_gradient") if has_gradient else ("entropy",)

    def has_gradient(self, batch: PolicyBatch) -> list[bool]:
        """See `Objective`."""
        if self._all_act:
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
        if not self._own_counts:
            return batch
        own: dict[str, Tensor] = {name: getattr(batch, name) for name in self._own_counts}
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
        needs: set[ScoreNeed] = set() if is_first or batch.old_logprobs is not None else {"old_logprobs"}
        needs |= {need for need in self.reference_needs if getattr(batch, need) is None}
        found: dict[str, Tensor | None] = {}
        if needs:
            found |= {str(name): values for name, values in score(batch, needs).found.items()}
        if is_first:
            # The policy is still the one that sampled. Its fresh log-probs serve as old ones: ratios are exactly 1.
            found["old_logprobs"] = None
        return batch.replace(**found)

    def visited(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """See `Objective`; these log-probs are the old ones of the later visits."""
        return batch if batch.old_logprobs is not None else batch.replace(old_logprobs=logprobs)

    def __call__(self, batch: PolicyBatch, scores: TokenScores) -> LossOutput:
        """The sum of the loss over a micro-batch.

        Args:
            batch: The rows.
            scores: Scores from a training pass, including those that `want` names.
        """
        old_logprobs = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        is_behavior_ratio = self.correction is not None and self.correction.is_ratio_of_loss
        tokens = self._tokens(batch, scores.logprobs, batch.sampling_logprobs if is_behavior_ratio else old_logprobs)
        token_loss = self.policy_loss.function(tokens, self.loss_params)
        metrics = _stats(token_loss.stats, batch) | {"entropy": token_mean(scores.entropy.detach(), batch.trainable)}
        seen = LossPass(batch, scores, tokens, old_logprobs, metrics)
        per_token = batch.loss_scale * token_loss.loss
        for term in self.token_terms:
            per_token = term(per_token, seen)
        weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction=self.policy_loss.reduction)
        total = (weights * per_token).sum()
        for term in self.sum_terms:
            total = term(total, seen)
        if self.adaptation is not None and self.adaptation.kl is not None:
            metrics["kl_coef"] = Mean(self.beta, 1)
        if self.bonus is not None:
            metrics["entropy_coef"] = Mean(self.bonus.coef, 1)
        return LossOutput(total=total, metrics=metrics, logprobs=scores.logprobs.detach())

    def metrics_without_pass(self, batch: PolicyBatch) -> dict[str, Metric]:
        """Metrics of rows with zero advantage, which are left out of the forward pass; on the host.

        For these rows, the statistics of the loss do not depend on the ratio, except for those in `NEEDS_RATIO`:
        nothing is clipped. The entropy is that of the policy before the first update, if it was computed. Otherwise
        -log p of the sampled token estimates it, because the mean of -log p over samples of p is the entropy of p.
        """
        no_change = torch.zeros_like(batch.advantages)
        stats = self.policy_loss.function(self._tokens(batch, no_change, no_change), self.loss_params).stats
        metrics = _stats({name: values for name, values in stats.items() if name not in NEEDS_RATIO}, batch)
        entropies = -batch.sampling_logprobs if batch.entropies is None else batch.entropies
        metrics["entropy"] = token_mean(entropies, batch.trainable)
        return {name: host(metric) for name, metric in metrics.items()}

    def _tokens(self, batch: PolicyBatch, logprobs: Tensor, old_logprobs: Tensor) -> PolicyTokens:
        return PolicyTokens(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=batch.advantages,
            trainable=batch.trainable,
            row_index=batch.row_index,
            num_rows=batch.num_rows,
            level=self.args.importance_sampling_level,
            cov_tokens=batch.cov_tokens,
        )

    def end_step(self, device: torch.device) -> None:
        """See `Objective`."""
        if self.adaptation is not None:
            self.adaptation.end_step(device)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The state of the adaptive coefficients."""
        return {} if self.adaptation is None else self.adaptation.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` returned, between optimizer steps."""
        if self.adaptation is not None:
            self.adaptation.load_state_dict(state)


def _adaptation(args: PolicyGradientConfig) -> Adaptation | None:
    """What adapts the weights of KL and entropy; None: both are constant."""
    params = args.kl_params
    kl = None if params.target is None else AdaptiveKL(args.beta, target=params.target, horizon=params.horizon)
    entropy = AdaptiveEntropy(args.entropy_coef, args.entropy_params) if args.use_adaptive_entropy else None
    return None if kl is None and entropy is None else Adaptation(kl, entropy)


def _stats(stats: Mapping[str, Tensor], batch: TokenBatch) -> dict[str, Metric]:
    """Means over trainable tokens; for the shares of clipped tokens, also the extremes over rows."""
    metrics: dict[str, Metric] = {}
    weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction="sequence_mean")
    for name, values in stats.items():
        is_ratio = name.startswith("clip_ratio/")
        if name.endswith("_seq_mean"):
            metrics[name] = Mean((values * weights).sum(), weights.sum())  # the weights of a row sum to 1
        else:
            metrics[f"{name}_mean" if is_ratio else name] = token_mean(values, batch.trainable)
        if name in ("clip_ratio/low", "clip_ratio/high"):
            kind = Min if name.endswith("low") else Max
            shares = torch.zeros(batch.num_rows, device=batch.device)
            shares.index_add_(0, batch.row_index, (values * weights).float())
            metrics[f"{name}_{kind.__name__.lower()}"] = kind(shares.min() if kind is Min else shares.max())
    return metrics
