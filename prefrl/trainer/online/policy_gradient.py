"""Policy gradients: from the rewards of completions to the advantages of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import Advantages, ScoredRows, clip_advantages, normalize_rows, row_totals
from prefrl.losses.per_token import row_sums
from prefrl.rollout.batches import rows_of_parts
from prefrl.rollout.reward_shaping import RunningMoments, shaped
from prefrl.rollout.selection import row_counts
from prefrl.trainer.online.credit import (
    ADVANTAGE_EPSILON,
    BalancedEstimator,
    ContestedPrefixes,
    HighCovariance,
    HighEntropy,
    KLInReward,
    RewardedRows,
    TokenCredit,
    TurnCredit,
    Whitening,
)
from prefrl.trainer.online.learner import Learned
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.trainer.online.policy_terms import PolicyBatch

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.metrics import Metric
    from prefrl.rewards.runner import RewardRunner
    from prefrl.trainer.configs import PolicyGradientConfig
    from prefrl.trainer.scorer import ScoreNeed, Scores
    from prefrl.types import Rollout, SampledBatch


class PolicyGradient:
    """`Learner` of a policy loss that is weighted by advantages.

    `advantages` is the algorithm. Without options, a step consists of `_gathered`, `row_totals`, `_of_rows` and
    `_batch_of`. What an option adds is made at construction, if the option is on.

    Args:
        args: Options.
        rewards: Gives the names and weights of the rewards.

    Raises:
        ConfigError: `reward_balance` with one reward, or an option of rewards without any.
    """

    def __init__(self, args: PolicyGradientConfig, rewards: RewardRunner) -> None:
        args.validate_rewards(rewards.names)
        self.args = args
        self.objective = PolicyObjective(args)
        self.estimator, self._params = ADVANTAGES[args.estimator], args.advantage_params
        self._weights = torch.tensor(rewards.weights or [1.0])  # without rewards, all are 0
        self._needs_greedy = args.needs_greedy
        is_of_rows = self.estimator.level == "row"
        # What happens to total rewards, [B] of all ranks, before they are compared.
        self._changes: list[Callable[[Tensor, RewardedRows], Tensor]] = []
        self.moments = RunningMoments() if args.shaping_params.normalize else None
        if not args.shaping_params.is_default:
            self._changes.append(partial(self._shaped, args.shaping_params, subtract_mean=not is_of_rows))
        self._kl = KLInReward(args, self.objective.in_reward) if self.objective.in_reward else None
        if self._kl is not None and is_of_rows:
            self._changes.append(lambda totals, rows: totals - rows.penalties)
        self._select: Callable[..., Tensor] | None = None
        if args.rollout_selection is not None:
            self._select = partial(
                row_counts, rule=args.rollout_selection, params=args.selection_params, seed=args.seed
            )
        self._balance = None if args.reward_balance is None else BalancedEstimator(args, rewards)
        # From total rewards to advantages of tokens.
        self._credit: Callable[[RewardedRows, Tensor, Tensor], Advantages] = self._of_rows
        if not is_of_rows:
            self._credit = TokenCredit(args, self.objective)
        elif args.turn_credit == "return":
            self._credit = TurnCredit(args)
        self._normalizes_rows = args.normalize_advantages and not self.estimator.whitened
        self._scalings: list[Callable[[Tensor, RewardedRows, Tensor], Tensor]] = []
        if args.normalize_advantages and self.estimator.whitened:
            self._scalings.append(Whitening(args.device))
        if self._params.clip_range is not None:
            low, high = self._params.clip_range
            self._scalings.append(lambda values, *_: clip_advantages(values, low=low, high=high))
        # The tokens that have a policy loss, and those that the loss treats differently.
        params = args.loss_params
        self._selections: list[Callable[[RewardedRows, Tensor], Tensor]] = []
        if args.top_entropy_quantile < 1:
            self._selections.append(HighEntropy(args.top_entropy_quantile, args.seed))
        if params.min_filter_prefix_tokens is not None:
            self._selections.append(ContestedPrefixes(params.min_filter_prefix_tokens))
        self._covariance = None if self.objective.policy_loss.selection is None else HighCovariance(args)
        self._imitates = params.positive_nll_coef is not None
        self.needs = self._find_needs()

    def _find_needs(self) -> frozenset[ScoreNeed]:
        """The scores that `advantages` reads."""
        if not self.args.needs_scores_first:
            return frozenset()
        needs: set[ScoreNeed] = {"old_logprobs", *self.objective.reference_needs}
        needs |= {compared.score for compared in self.objective.in_reward}
        if self.args.top_entropy_quantile < 1:
            needs.add("entropies")
        if "log_collision" in self.estimator.needs:
            needs.add("log_collision")
        if "values" in self.estimator.needs:
            needs.add("values")
        return frozenset(needs)

    def advantages(
        self,
        batch: SampledBatch,
        scores: Scores,
        rollouts: Sequence[Rollout],
        *,
        num_parts: int,
        step: int,
        over_ranks: bool,
    ) -> Learned[PolicyBatch]:
        """See `Learner`."""
        rows = self._gathered(batch, scores, rollouts, step=step, over_ranks=over_ranks)
        totals = row_totals(rows.rewards, self._weights)
        for change in self._changes:
            totals = change(totals, rows)
        counts = torch.ones(len(totals), dtype=torch.long)  # how often each row is trained on
        if self._select is not None:
            counts = self._select(totals, rows.groups, step=step)
        found = self._credit(rows, totals, counts > 0)
        values = found.values.float()
        for scale in self._scalings:
            values = scale(values, rows, (~totals.isnan() & (counts > 0))[rows.mine])  # rows that have an advantage
        parts = rows_of_parts(rollouts, self.args, num_parts=num_parts)
        if self._select is not None:
            repeats = counts[rows.mine].tolist()
            parts = [[row for row in part for _ in range(repeats[row])] for part in parts]
        sums = row_sums(values, batch.trainable, batch.row_index, batch.num_rows)
        means = [total / max(count, 1) for total, count in zip(sums.tolist(), batch.trainable_counts, strict=True)]
        return Learned(self._batch_of(rows, totals, values, found.returns), parts, means, rows.metrics)

    def _gathered(
        self, batch: SampledBatch, scores: Scores, rollouts: Sequence[Rollout], *, step: int, over_ranks: bool
    ) -> RewardedRows:
        """The rows of this rank, with the rewards of the rows of all ranks."""
        metrics: dict[str, Metric] = {}
        kl, penalties = None, [0.0] * len(rollouts)
        if self._kl is not None:
            kl = self._kl.of_tokens(batch, scores, metrics)
            penalties = self._kl.penalties(kl, batch)
        mine = [
            (
                [float("nan") if value is None else value for value in rollout.rewards.values()]
                or [float("nan") if rollout.has_failed else 0.0],
                rollout.group,
                length,
                rollout.finish_reason,
                penalty,
                rollout.greedy_reward,
            )
            for rollout, length, penalty in zip(rollouts, batch.trainable_counts, penalties, strict=True)
        ]
        everyone, start = distributed.gather_rows(mine, over_ranks=over_ranks)
        rewards, groups, lengths, reasons, kls, greedy = zip(*everyone, strict=True)
        return RewardedRows(
            batch=batch,
            scores=scores,
            rollouts=rollouts,
            kl=kl,
            rewards=torch.tensor(rewards, dtype=torch.float32),
            groups=torch.tensor(groups, dtype=torch.long),
            lengths=torch.tensor(lengths, dtype=torch.float32),
            finish_reasons=list(reasons),
            penalties=torch.tensor(kls, dtype=torch.float32),
            greedy=torch.tensor(greedy, dtype=torch.float32),
            mine=slice(start, start + len(rollouts)),
            step=step,
            over_ranks=over_ranks,
            metrics=metrics,
        )

    def _of_rows(self, rows: RewardedRows, totals: Tensor, is_kept: Tensor) -> Advantages:
        """Each token of this rank has the advantage of its row, compared with the kept rows of all ranks."""
        # What changes total rewards collapses the K rewards into one; otherwise, pass all K.
        scored = ScoredRows(
            rewards=(totals[:, None].float() if self._changes else rows.rewards)[is_kept],
            weights=torch.ones(1) if self._changes else self._weights,
            groups=rows.groups[is_kept],
            lengths=rows.lengths[is_kept],
            greedy=rows.greedy[is_kept] if self._needs_greedy else None,
        )
        if self._balance is None:
            found = self.estimator.function(scored, self._params)  # GRPO: (reward - mean) / (std + epsilon)
        else:
            found = self._balance(scored, rows.metrics)
        if self._normalizes_rows:
            found = normalize_rows(found, advantage_epsilon=ADVANTAGE_EPSILON)
        values = torch.zeros(len(totals), dtype=found.values.dtype).masked_scatter(is_kept, found.values)
        return Advantages(values=values[rows.mine].float()[rows.batch.row_index], totals=totals)

    def _batch_of(self, rows: RewardedRows, totals: Tensor, values: Tensor, returns: Tensor | None) -> PolicyBatch:
        """The rows of this rank, with all that their loss reads.

        Args:
            rows: The rows.
            totals: [B] total rewards of all ranks.
            values: [N] advantages.
            returns: [N] what a critic learns; None: there is none.
        """
        batch, scores = rows.batch, rows.scores
        scale, likelihood = torch.ones(batch.num_tokens), torch.zeros(batch.num_tokens)
        for select in self._selections:
            scale = select(rows, totals) * scale
        if self._imitates:  # good responses; `PolicyObjective.prepared` scales it
            is_good = torch.tensor([rollout.reward for rollout in rows.rollouts]) > 0
            likelihood = (batch.trainable & is_good[batch.row_index]).float()
        cov_tokens = torch.zeros(batch.num_tokens, dtype=torch.bool)
        if self._covariance is not None:
            cov_tokens = self._covariance(rows, values)
        critic = {} if returns is None else {"values": scores.values, "returns": returns.float()}
        return self.objective.stage.of(
            batch,
            advantages=values,
            loss_scale=scale,
            cov_tokens=cov_tokens,
            nll_weights=likelihood,
            entropy_weights=batch.trainable * scale,
            old_logprobs=scores.found.get("old_logprobs"),
            entropies=scores.found.get("entropies"),
            **{name: scores.found.get(name) for name in self.objective.kept_scores},
            **critic,
        )

    def _shaped(self, params: Any, totals: Tensor, rows: RewardedRows, *, subtract_mean: bool) -> Tensor:
        return shaped(totals, rows.finish_reasons, params, moments=self.moments, subtract_mean=subtract_mean)

    def state_dict(self) -> dict[str, Any]:
        """The running moments and the state of the reward balance."""
        moments = {} if self.moments is None else {"moments": self.moments.state_dict()}
        return moments if self._balance is None else {**moments, "balance": self._balance.balancer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"])
        if self._balance is not None:
            self._balance.balancer.load_state_dict(state["balance"])
