"""Policy gradients: shapes rewards, computes advantages and selects tokens of scored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from prefrl.losses.advantage.whitening import Moments, moments, whitened
from prefrl.losses.kl.estimators import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.reduce import row_sums
from prefrl.metrics import Mean
from prefrl.rollout.prefix import contested_prefix_lengths
from prefrl.rollout.reward_shaping import RunningMoments, shaped
from prefrl.rollout.selection import row_counts
from prefrl.trainer.online.learner import Learned
from prefrl.trainer.online.policy_objective import PolicyObjective, token_mean
from prefrl.trainer.online.sampling_correction import correct_sampling
from prefrl.trainer.online.token_selection import selected_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.metrics import Metric
    from prefrl.rewards.runner import RewardRunner
    from prefrl.trainer.base.scorer import Annotation
    from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig
    from prefrl.types import Rollout, TokenBatch

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
        self.estimator = ADVANTAGES[args.estimator]
        self.moments = RunningMoments() if args.shaping_params.normalize else None
        self.balancer: RewardBalancer | None = None
        self._names = rewards.names
        self._weights = torch.tensor(rewards.weights)
        if args.reward_balance is not None:
            if len(rewards.weights) < 2:
                raise ConfigError(
                    f"reward_balance={args.reward_balance!r} has no effect with one reward. Give several reward_funcs."
                )
            self.balancer = RewardBalancer(args.reward_balance, args.balance_params, reward_weights=rewards.weights)

    @property
    def needs(self) -> frozenset[Annotation]:
        """See `Learner`."""
        if not self.args.needs_scores_first:
            return frozenset()
        needs: set[Annotation] = {"old_logprobs", *self.objective.needs(is_first=True)}
        if self.args.top_entropy_quantile < 1:
            needs.add("entropies")
        if "log_collision" in self.estimator.needs:
            needs.add("log_collision")
        if "values" in self.estimator.needs:
            needs.add("values")
        return frozenset(needs)

    def advantages(
        self, batch: TokenBatch, rollouts: Sequence[Rollout], *, num_parts: int, step: int, over_ranks: bool
    ) -> Learned:
        """See `Learner`."""
        metrics: dict[str, Metric] = {}
        if self._kl_in_reward:
            kl = self._kl_of_tokens(batch)
            self.objective.observe_kl(kl, batch)
            metrics["kl"] = token_mean(kl, batch)
        rows = self._gathered(rollouts, batch, over_ranks=over_ranks)
        totals = self._shaped(rows)
        mine = slice(rows.start, rows.start + len(rollouts))
        counts = self._counts(rows, totals, step=step)
        batch = self._with_advantages(batch, rows, totals, counts > 0, metrics, over_ranks=over_ranks)
        batch = self._with_selection(batch, rollouts, totals[mine], step=step)
        if self.args.loss_params.positive_nll_coef is not None:
            is_good = torch.tensor([rollout.reward for rollout in rollouts]) > 0
            batch = batch.replace(nll_weights=(batch.trainable & is_good[batch.row_index]).float())
        return Learned(batch, self._parts(counts[mine].tolist(), num_parts), _row_means(batch), metrics)

    def _parts(self, repeats: list[int], num_parts: int) -> list[list[int]]:
        size = -(-len(repeats) // num_parts)
        rows = range(len(repeats))
        return [
            [row for row in rows[start : start + size] for _ in range(repeats[row])]
            for start in range(0, len(repeats), size)
        ]

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

    def _gathered(self, rollouts: Sequence[Rollout], batch: TokenBatch, *, over_ranks: bool) -> _Rows:
        penalties = self._kl_of_rows(batch).tolist() if self._takes_kl_from_rows else [0.0] * len(rollouts)
        mine = [
            (
                [float("nan") if value is None else value for value in rollout.rewards.values()],
                rollout.group,
                length,
                rollout.completion.finish_reason,
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

    @property
    def _takes_kl_from_rows(self) -> bool:
        return self._kl_in_reward and self.estimator.level == "row"

    @property
    def _kl_in_reward(self) -> bool:
        return self.args.kl_in == "reward" and self.args.beta > 0

    def _kl_of_tokens(self, batch: TokenBatch) -> Tensor:
        """[N] nats, estimated KL(policy || reference)."""
        assert batch.old_logprobs is not None
        assert batch.ref_logprobs is not None
        return KL_ESTIMATORS[self.args.kl_estimator].function(batch.old_logprobs, batch.ref_logprobs)

    def _kl_of_rows(self, batch: TokenBatch) -> Tensor:
        """[B] beta * KL, which is subtracted from the reward of each row."""
        per_row = row_sums(self._kl_of_tokens(batch), batch.trainable, batch.row_index, batch.num_rows)
        return self.objective.beta * per_row

    def _shaped(self, rows: _Rows) -> Tensor:
        """[B] total rewards after shaping, minus the KL penalties of rows."""
        totals = row_totals(rows.rewards, self._weights)
        has_no_group = self.estimator.level == "token"
        params = self.args.shaping_params
        return (
            shaped(totals, rows.finish_reasons, params, moments=self.moments, subtract_mean=has_no_group)
            - rows.penalties
        )

    def _counts(self, rows: _Rows, totals: Tensor, *, step: int) -> Tensor:
        """[B] how often each row is trained on."""
        args = self.args
        if args.rollout_selection is None:
            return torch.ones(len(totals), dtype=torch.long)
        return row_counts(
            totals, rows.groups, rule=args.rollout_selection, params=args.selection_params, seed=args.seed, step=step
        )

    # Advantages.

    def _with_advantages(
        self,
        batch: TokenBatch,
        rows: _Rows,
        totals: Tensor,
        is_kept: Tensor,
        metrics: dict[str, Metric],
        *,
        over_ranks: bool,
    ) -> TokenBatch:
        mine = slice(rows.start, rows.start + batch.num_rows)
        if self.estimator.level == "row":
            result = self._of_rows(rows, totals, is_kept, metrics)
            per_row = torch.zeros(len(totals), dtype=result.values.dtype).masked_scatter(is_kept, result.values)[mine]
            values, returns = per_row.float()[batch.row_index], None
        else:
            result = self._of_tokens(batch, rows.groups[mine], totals[mine])
            values, returns = result.values.float(), None if result.returns is None else result.returns.float()
        if self.args.normalize_advantages and self.estimator.whitened:
            has_reward = ~totals[mine].isnan()
            mask = batch.trainable & (has_reward & is_kept[mine])[batch.row_index]
            values = self._whitened(values, mask, over_ranks=over_ranks)
        clip_range = self.args.advantage_params.clip_range
        if clip_range is not None:
            low, high = clip_range
            values = clip_advantages(values, low=low, high=high)
        return batch.replace(advantages=values, returns=returns)

    def _whitened(self, values: Tensor, mask: Tensor, *, over_ranks: bool) -> Tensor:
        """[N] values with mean 0 and standard deviation 1 over the tokens of all ranks."""
        found = moments(values, mask)
        if over_ranks:
            sums = [found.total, found.square_total, found.count]
            found = Moments(*distributed.sum_over_ranks(sums, self.args.device))
        return whitened(
            values, mask, mean=found.mean, std=found.std, shift_mean=True, advantage_epsilon=ADVANTAGE_EPSILON
        )

    def _of_rows(self, rows: _Rows, totals: Tensor, is_kept: Tensor, metrics: dict[str, Metric]) -> Advantages:
        # Shaping collapses the K rewards into one total; without it, pass all K.
        is_shaped = self.args.shaping_params.has_effect or self._takes_kl_from_rows
        scored = ScoredRows(
            rewards=(totals[:, None].float() if is_shaped else rows.rewards)[is_kept],
            weights=torch.ones(1) if is_shaped else self._weights,
            groups=rows.groups[is_kept],
            lengths=rows.lengths[is_kept],
            greedy=rows.greedy[is_kept] if self.args.needs_greedy else None,
        )
        if self.balancer is None:
            result = self.estimator.function(scored, self.args.advantage_params)
        else:
            result = self._balanced(scored, self.balancer, metrics)
        if self.args.normalize_advantages and not self.estimator.whitened:
            return normalize_rows(result, advantage_epsilon=ADVANTAGE_EPSILON)
        return result

    def _balanced(self, scored: ScoredRows, balancer: RewardBalancer, metrics: dict[str, Metric]) -> Advantages:
        """Computes the advantages of each reward, [B, K], and combines them so that one backward pass is enough."""
        params = self.args.advantage_params
        each = [
            self.estimator.function(
                replace(scored, rewards=scored.rewards[:, k : k + 1], weights=torch.ones(1)), params
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

    def _of_tokens(self, batch: TokenBatch, groups: Tensor, totals: Tensor) -> Advantages:
        rewards = torch.zeros(batch.num_tokens)
        if self._kl_in_reward:
            rewards -= self.objective.beta * self._kl_of_tokens(batch)
        last = [0] * batch.num_rows
        for token, row in zip(batch.trainable_positions.tolist(), _rows_of(batch), strict=True):
            last[row] = token
        has_token = torch.tensor(batch.trainable_counts) > 0
        rewards.index_add_(0, torch.tensor(last)[has_token], totals.float()[has_token])
        scored = ScoredTokens(
            rewards=rewards,
            trainable=batch.trainable,
            row_index=batch.row_index,
            num_rows=batch.num_rows,
            groups=groups,
            values=batch.values,
            logprobs=batch.old_logprobs,
            log_collision=batch.log_collision,
            log_ratio=self._log_weights(batch),
        )
        return self.estimator.function(scored, self.args.advantage_params)

    def _log_weights(self, batch: TokenBatch) -> Tensor | None:
        """[N] log importance weights of the tokens, if sampling is corrected and the estimator uses them."""
        if not self.args.corrects_sampling or "log_collision" not in self.estimator.needs:
            return None
        assert batch.old_logprobs is not None
        return correct_sampling(self.args, batch, batch.old_logprobs).weights.log()

    # Selection of the tokens that have a policy loss.

    def _with_selection(
        self, batch: TokenBatch, rollouts: Sequence[Rollout], totals: Tensor, *, step: int
    ) -> TokenBatch:
        changes = selected_tokens(self.args, batch, rollouts, step=step)
        min_tokens = self.args.loss_params.min_filter_prefix_tokens
        if min_tokens is not None:
            lengths = contested_prefix_lengths(
                [rollout.completion.token_ids for rollout in rollouts],
                totals.tolist(),
                [rollout.group for rollout in rollouts],
                min_tokens=min_tokens,
            )
            places = torch.cat([torch.arange(length) for length in batch.response_lengths])
            is_own = (places >= torch.tensor(lengths)[batch.row_index]).float()
            changes["selection"] = is_own * changes["selection"] if "selection" in changes else is_own
        return batch.replace(**changes)


def _row_means(batch: TokenBatch) -> list[float]:
    """[B] mean advantage of each row's trainable tokens."""
    assert batch.advantages is not None
    sums = row_sums(batch.advantages, batch.trainable, batch.row_index, batch.num_rows)
    return [total / max(count, 1) for total, count in zip(sums.tolist(), batch.trainable_counts, strict=True)]


def _rows_of(batch: TokenBatch) -> list[int]:
    """[M] row of each trainable token."""
    rows: list[int] = batch.row_index[batch.trainable_positions].tolist()
    return rows
