"""Policy gradients: shapes rewards, computes advantages and selects tokens of scored rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.losses.advantage.balance import RewardBalancer, gram, squared_weights
from prefrl.losses.advantage.estimators import (
    ADVANTAGES,
    Advantages,
    ScoredRows,
    ScoredTokens,
    clip_advantages,
    normalize_rows,
    row_totals,
)
from prefrl.losses.advantage.turns import turn_advantages
from prefrl.losses.advantage.whitening import Moments, moments, whitened
from prefrl.losses.kl.estimators import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.reduce import row_sums
from prefrl.metrics import Mean
from prefrl.options.advantage import ScaleParams
from prefrl.rollout.prefix import contested_prefix_lengths
from prefrl.rollout.reward_shaping import RunningMoments, shaped
from prefrl.rollout.rows import turn_index, turn_rewards
from prefrl.rollout.selection import row_counts
from prefrl.trainer.online.learner import Learned, rows_of_parts
from prefrl.trainer.online.policy_batch import PolicyBatch
from prefrl.trainer.online.policy_objective import PolicyObjective, token_mean
from prefrl.trainer.online.sampling_correction import correct_sampling
from prefrl.trainer.online.token_selection import cov_tokens, high_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.metrics import Metric
    from prefrl.rewards.runner import RewardRunner
    from prefrl.trainer.base.scorer import ScoreNeed, Scores
    from prefrl.trainer.online.config import PolicyGradientConfig
    from prefrl.types import Rollout, SampledBatch

__all__ = ["PolicyGradient"]

# Added to standard deviations before dividing by them, as in TRL.
ADVANTAGE_EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all ranks; those of this rank begin at `start`."""

    rewards: Tensor  # [B, K] float32, NaN where there is no reward
    groups: Tensor  # [B] int64
    lengths: Tensor  # [B] number of trainable tokens
    finish_reasons: list[Any]  # [B]
    penalties: Tensor  # [B] beta * KL, subtracted from the reward
    greedy: Tensor  # [B] total reward of the greedy completion of the row's prompt, NaN if there is none
    start: int


class PolicyGradient:
    """`Learner` of a policy loss that is weighted by advantages.

    Args:
        args: Options.
        rewards: Gives the names and weights of the rewards.

    Raises:
        ConfigError: `reward_balance` with one reward.
    """

    def __init__(self, args: PolicyGradientConfig, rewards: RewardRunner) -> None:
        self.args = args
        self.objective = PolicyObjective(args)
        self.loss_params = self.objective.loss_params
        self.estimator = ADVANTAGES[args.estimator]
        self._kl_in_reward = args.kl_in == "reward" and args.beta > 0
        self._takes_kl_from_rows = self._kl_in_reward and self.estimator.level == "row"
        self.advantage_params = args.advantage_params
        self.shaping = args.shaping_params
        self.moments = RunningMoments() if self.shaping.normalize else None
        self._select: Callable[..., Tensor] | None = None
        if args.rollout_selection is not None:
            self._select = partial(
                row_counts, rule=args.rollout_selection, params=args.selection_params, seed=args.seed
            )
        self.balancer: RewardBalancer | None = None
        self._names = rewards.names
        self._weights = torch.tensor(rewards.weights)
        if args.reward_balance is not None:
            if len(rewards.weights) < 2:
                raise ConfigError(
                    f"reward_balance={args.reward_balance!r} has no effect with one reward. Use several reward_funcs."
                )
            self.balancer = RewardBalancer(args.reward_balance, args.balance_params, reward_weights=rewards.weights)

    @property
    def needs(self) -> frozenset[ScoreNeed]:
        """See `Learner`."""
        if not self.args.needs_scores_first:
            return frozenset()
        needs: set[ScoreNeed] = {"old_logprobs", *self.objective.reference_needs}
        if self._kl_in_reward:
            needs.add("ref_logprobs")
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
        metrics: dict[str, Metric] = {}
        kl = self._kl_of_tokens(batch, scores, metrics)
        rows = self._gathered(rollouts, batch, kl, over_ranks=over_ranks)
        totals = self._shaped(rows)
        mine = slice(rows.start, rows.start + len(rollouts))
        counts = self._counts(rows, totals, step=step)
        is_kept = counts > 0
        critic: dict[str, Tensor] = {}
        if self.estimator.level == "row" and self.args.turn_credit == "return":
            totals = totals.masked_fill(~is_kept, torch.nan)
            values = self._of_turns(batch, rollouts, kl, rows, totals)
        elif self.estimator.level == "row":
            values = self._of_rows(rows, totals, is_kept, metrics)[mine].float()[batch.row_index]
        else:
            rewards = self._rewards_of_tokens(batch, rollouts, totals[mine]) - self.objective.beta * kl
            result = self._of_tokens(batch, scores, rewards, rows.groups[mine])
            values = result.values.float()
            if result.returns is not None:
                critic = {"values": scores.values, "returns": result.returns.float()}
        values = self._scaled(values, batch, (~totals.isnan() & is_kept)[mine], over_ranks=over_ranks)
        scale = self._loss_scale(batch, scores, rollouts, totals[mine].tolist(), step=step)
        ready = self.objective.stage.of(
            batch,
            advantages=values,
            loss_scale=scale,
            cov_tokens=cov_tokens(self.args, self.loss_params, batch, scores, values, rollouts, step=step),
            nll_weights=self._nll_weights(batch, rollouts),
            entropy_weights=batch.trainable * scale,
            old_logprobs=scores.get("old_logprobs"),
            entropies=scores.get("entropies"),
            **{name: scores.get(name) for name in self.objective.reference_needs},
            **critic,
        )
        repeats = counts[mine].tolist()
        parts = rows_of_parts(rollouts, self.args, num_parts=num_parts)
        parts = [[row for row in rows for _ in range(repeats[row])] for rows in parts]
        return Learned(ready, parts, _row_means(ready), metrics)

    def state_dict(self) -> dict[str, Any]:
        """The running moments and the state of the reward balance."""
        parts = {"moments": self.moments, "balance": self.balancer}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"])
        if self.balancer is not None:
            self.balancer.load_state_dict(state["balance"])

    # Rewards.

    def _gathered(self, rollouts: Sequence[Rollout], batch: SampledBatch, kl: Tensor, *, over_ranks: bool) -> _Rows:
        penalties = [0.0] * len(rollouts)
        if self._takes_kl_from_rows:
            sums = row_sums(kl, batch.trainable, batch.row_index, batch.num_rows)
            penalties = (self.objective.beta * sums).tolist()
        mine = [
            (
                [float("nan") if value is None else value for value in rollout.rewards.values()],
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
        return _Rows(
            rewards=torch.tensor(rewards, dtype=torch.float32),
            groups=torch.tensor(groups, dtype=torch.long),
            lengths=torch.tensor(lengths, dtype=torch.float32),
            finish_reasons=list(reasons),
            penalties=torch.tensor(kls, dtype=torch.float32),
            greedy=torch.tensor(greedy, dtype=torch.float32),
            start=start,
        )

    def _kl_of_tokens(self, batch: SampledBatch, scores: Scores, metrics: dict[str, Metric]) -> Tensor:
        """[N] nats, estimated KL(policy || reference) that the reward contains; adds its metric."""
        if not self._kl_in_reward:
            return torch.zeros(batch.num_tokens)
        kl = KL_ESTIMATORS[self.args.kl_estimator].function(scores.old_logprobs, scores.ref_logprobs)
        self.objective.observe_kl(kl, batch)
        metrics["kl"] = token_mean(kl, batch)
        return kl

    def _shaped(self, rows: _Rows) -> Tensor:
        """[B] total rewards after shaping, minus the KL penalties of rows."""
        totals = row_totals(rows.rewards, self._weights)
        has_no_group = self.estimator.level == "token"
        return (
            shaped(totals, rows.finish_reasons, self.shaping, moments=self.moments, subtract_mean=has_no_group)
            - rows.penalties
        )

    def _counts(self, rows: _Rows, totals: Tensor, *, step: int) -> Tensor:
        """[B] how often each row is trained on."""
        if self._select is None:
            return torch.ones(len(totals), dtype=torch.long)
        return self._select(totals, rows.groups, step=step)

    # Advantages.

    def _scaled(self, values: Tensor, batch: SampledBatch, has_signal: Tensor, *, over_ranks: bool) -> Tensor:
        """[N] advantages, whitened and clipped as the options say; `has_signal` is [B]."""
        if self.args.normalize_advantages and self.estimator.whitened:
            values = self._whitened(values, batch.trainable & has_signal[batch.row_index], over_ranks=over_ranks)
        clip_range = self.advantage_params.clip_range
        if clip_range is not None:
            low, high = clip_range
            values = clip_advantages(values, low=low, high=high)
        return values

    def _whitened(self, values: Tensor, mask: Tensor, *, over_ranks: bool) -> Tensor:
        """[N] values with mean 0 and standard deviation 1 over the tokens of all ranks."""
        found = moments(values, mask)
        if over_ranks:
            sums = [found.total, found.square_total, found.count]
            found = Moments(*distributed.sum_over_ranks(sums, self.args.device))
        return whitened(
            values, mask, mean=found.mean, std=found.std, shift_mean=True, advantage_epsilon=ADVANTAGE_EPSILON
        )

    def _of_rows(self, rows: _Rows, totals: Tensor, is_kept: Tensor, metrics: dict[str, Metric]) -> Tensor:
        """[B] advantages of the rows of all ranks; 0 for those that are not kept."""
        # Shaping collapses the K rewards into one total; without it, pass all K.
        is_shaped = not self.shaping.is_default or self._takes_kl_from_rows
        scored = ScoredRows(
            rewards=(totals[:, None].float() if is_shaped else rows.rewards)[is_kept],
            weights=torch.ones(1) if is_shaped else self._weights,
            groups=rows.groups[is_kept],
            lengths=rows.lengths[is_kept],
            greedy=rows.greedy[is_kept] if self.args.needs_greedy else None,
        )
        if self.balancer is None:
            result = self.estimator.function(scored, self.advantage_params)
        else:
            result = self._balanced(scored, self.balancer, metrics)
        if self.args.normalize_advantages and not self.estimator.whitened:
            result = normalize_rows(result, advantage_epsilon=ADVANTAGE_EPSILON)
        return torch.zeros(len(totals), dtype=result.values.dtype).masked_scatter(is_kept, result.values)

    def _balanced(self, scored: ScoredRows, balancer: RewardBalancer, metrics: dict[str, Metric]) -> Advantages:
        """Compute the advantages of each reward, [B, K], and combine them so that one backward pass is enough."""
        each = [
            self.estimator.function(
                replace(scored, rewards=scored.rewards[:, k : k + 1], weights=torch.ones(1)), self.advantage_params
            )
            for k in range(scored.rewards.shape[1])
        ]
        advantages = torch.stack([result.values for result in each], 1)
        reduction = POLICY_LOSSES[self.args.loss_type].reduction
        weights = balancer.weights(
            gram(advantages, squared_weights(scored.lengths, reduction=reduction)), scored.rewards
        )
        for name, weight in zip(self._names, weights, strict=True):
            metrics[f"reward_balance/{name}"] = Mean(float(weight), 1)
        return replace(each[0], values=(advantages.double() @ weights).to(advantages.dtype), totals=scored.totals())

    def _of_turns(
        self, batch: SampledBatch, rollouts: Sequence[Rollout], kl: Tensor, rows: _Rows, totals: Tensor
    ) -> Tensor:
        """[N] advantages of this rank's tokens: of the returns from their turns on, minus the KL penalties of these.

        Args:
            batch: The rows of this rank.
            rollouts: The rollouts of this rank.
            kl: [N] nats.
            rows: The rows of all ranks.
            totals: [B] total rewards minus the penalties of rows; NaN for rows that are not trained on.
        """
        params, index = self.advantage_params, turn_index(rollouts)
        mine = slice(rows.start, rows.start + len(rollouts))
        rewards, episodes = turn_rewards(rollouts, (totals + rows.penalties)[mine])
        if self._takes_kl_from_rows:
            rewards -= self.objective.beta * row_sums(kl, batch.trainable, index, len(rewards)).double()
        epsilon = None
        if isinstance(params, ScaleParams) and params.scale_rewards == "group":
            epsilon = params.advantage_epsilon
        values = turn_advantages(
            rewards,
            episodes,
            rows.groups[mine],
            discount=self.args.turn_discount,
            epsilon=epsilon,
        )
        return values.float()[index]

    def _rewards_of_tokens(self, batch: SampledBatch, rollouts: Sequence[Rollout], totals: Tensor) -> Tensor:
        """[N] total rewards, at the last trainable tokens of the rows or, where turns have rewards, of the turns."""
        index, values = batch.row_index, totals
        if self.args.turn_credit == "return":
            index, (values, _) = turn_index(rollouts), turn_rewards(rollouts, totals)
        positions = batch.trainable_positions
        last = torch.full((len(values),), -1).scatter_reduce(0, index[positions], positions, "amax")
        has_token = last >= 0
        return torch.zeros(batch.num_tokens).index_add(0, last[has_token], values.float()[has_token])

    def _of_tokens(self, batch: SampledBatch, scores: Scores, rewards: Tensor, groups: Tensor) -> Advantages:
        scored = ScoredTokens(
            rewards=rewards,
            trainable=batch.trainable,
            row_index=batch.row_index,
            num_rows=batch.num_rows,
            groups=groups,
            values=scores.get("values"),
            logprobs=scores.old_logprobs,
            log_collision=scores.get("log_collision"),
            log_ratio=self._log_weights(batch, scores),
        )
        return self.estimator.function(scored, self.advantage_params)

    def _log_weights(self, batch: SampledBatch, scores: Scores) -> Tensor | None:
        """[N] log importance weights of the tokens, if sampling is corrected and the estimator uses them."""
        params = self.objective.correction_params
        if params is None or "log_collision" not in self.estimator.needs:
            return None
        mode = self.args.vllm_importance_sampling_mode
        return correct_sampling(batch, scores.old_logprobs, mode=mode, params=params).weights.log()

    # The tokens that have a policy loss, and those whose likelihood is raised.

    def _loss_scale(
        self, batch: SampledBatch, scores: Scores, rollouts: Sequence[Rollout], totals: Sequence[float], *, step: int
    ) -> Tensor:
        """[N] factor on the policy loss: 0 for tokens that are not selected."""
        scale = torch.ones(batch.num_tokens)
        if self.args.top_entropy_quantile < 1:
            scale = high_entropy(self.args, batch, scores.entropies, rollouts, step=step)
        min_tokens = self.loss_params.min_filter_prefix_tokens
        if min_tokens is not None:
            lengths = contested_prefix_lengths(
                [rollout.sampled_ids for rollout in rollouts],
                totals,
                [rollout.group for rollout in rollouts],
                min_tokens=min_tokens,
            )
            places = torch.tensor([place for length in batch.row_lengths for place in range(length)])
            scale = (places >= torch.tensor(lengths)[batch.row_index]).float() * scale
        return scale

    def _nll_weights(self, batch: SampledBatch, rollouts: Sequence[Rollout]) -> Tensor:
        """[N] 1 at the trainable tokens of good responses; `PolicyObjective.prepared` scales it."""
        if self.loss_params.positive_nll_coef is None:
            return torch.zeros(batch.num_tokens)
        is_good = torch.tensor([rollout.reward for rollout in rollouts]) > 0
        return (batch.trainable & is_good[batch.row_index]).float()


def _row_means(batch: PolicyBatch) -> list[float]:
    """[B] mean advantage of each row's trainable tokens."""
    sums = row_sums(batch.advantages, batch.trainable, batch.row_index, batch.num_rows)
    return [total / max(count, 1) for total, count in zip(sums.tolist(), batch.trainable_counts, strict=True)]
