"""What options change in the credit that tokens get: what is compared, which tokens learn, and of which reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.balance import RewardBalancer, gram, squared_weights
from prefrl.losses.advantage.estimators import Advantages, Moments, ScoredRows, ScoredTokens, moments, whitened
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.per_token import row_sums
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.tokens import covariance, token_keys
from prefrl.metrics import Mean, token_mean
from prefrl.options.policy_gradient import ScaleParams
from prefrl.rollout.batches import turn_index, turn_rewards
from prefrl.rollout.collect import prompt_seed
from prefrl.rollout.selection import contested_prefix_lengths

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.metrics import Metric
    from prefrl.rewards.runner import RewardRunner
    from prefrl.trainer.configs import PolicyGradientConfig
    from prefrl.trainer.online.policy_objective import PolicyObjective
    from prefrl.trainer.online.policy_terms import Compared
    from prefrl.trainer.scorer import Scores
    from prefrl.types import Rollout, SampledBatch, TokenBatch

# Added to standard deviations before dividing by them, as in TRL.
ADVANTAGE_EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class RewardedRows:
    """The rows of a generation batch on this rank, and the rewards of the rows of all ranks."""

    # Of this rank.
    batch: SampledBatch
    scores: Scores
    rollouts: Sequence[Rollout]
    kl: Tensor | None  # [N] weighted estimates of the KL that are subtracted from the reward; None: there are none
    # Of all ranks, B rows.
    rewards: Tensor  # [B, K] float32, NaN where there is no reward
    groups: Tensor  # [B] int64
    lengths: Tensor  # [B] number of trainable tokens
    finish_reasons: list[Any]  # [B]
    penalties: Tensor  # [B] weighted KL, subtracted from the reward
    greedy: Tensor  # [B] total reward of the greedy completion of the row's prompt, NaN if there is none
    mine: slice  # the rows of this rank among them
    step: int  # the first optimizer step that learns from them
    over_ranks: bool  # whether there are rows of other ranks
    metrics: dict[str, Metric] = field(default_factory=dict)


# Rewards.


class KLInReward:
    """Subtracts coef * KL(policy || reference or teacher) from the reward, of each token or summed over a row.

    Args:
        args: Options.
        compared: The reference, the teacher or both.
    """

    def __init__(self, args: PolicyGradientConfig, compared: Sequence[Compared]) -> None:
        self._compared = compared
        self._is_of_rows = ADVANTAGES[args.estimator].level == "row"

    def of_tokens(self, batch: SampledBatch, scores: Scores, metrics: dict[str, Metric]) -> Tensor:
        """[N] the weighted sum of their KL, constants; adds their metrics."""
        total = torch.zeros(batch.num_tokens)
        for each in self._compared:
            kl = KL_ESTIMATORS[each.estimator].function(scores.old_logprobs, getattr(scores, each.score))
            if each.adaptation is not None:
                each.adaptation.observe_kl(kl, batch)
            metrics[each.metric] = token_mean(kl, batch.trainable)
            total = total + each.coef() * kl
        return total

    def penalties(self, kl: Tensor, batch: SampledBatch) -> list[float]:
        """[B] what is subtracted from the reward of each row; 0 if it is subtracted from those of tokens."""
        if not self._is_of_rows:
            return [0.0] * batch.num_rows
        penalties: list[float] = row_sums(kl, batch.trainable, batch.row_index, batch.num_rows).tolist()
        return penalties


class BalancedEstimator:
    """Computes the advantages of each reward, and combines them so that one backward pass is enough.

    Args:
        args: Options.
        rewards: Gives the names and weights of the rewards.

    Raises:
        ConfigError: There is only one reward.
    """

    def __init__(self, args: PolicyGradientConfig, rewards: RewardRunner) -> None:
        if len(rewards.weights) < 2:
            raise ConfigError(
                f"reward_balance={args.reward_balance!r} has no effect with one reward. Use several reward_funcs."
            )
        assert args.reward_balance is not None
        self.balancer = RewardBalancer(args.reward_balance, args.balance_params, reward_weights=rewards.weights)
        self._estimate, self._params = ADVANTAGES[args.estimator].function, args.advantage_params
        self._reduction = POLICY_LOSSES[args.loss_type].reduction
        self._names = rewards.names

    def __call__(self, scored: ScoredRows, metrics: dict[str, Metric]) -> Advantages:
        """[B] combined advantages; adds the weights to the metrics."""
        each = [
            self._estimate(replace(scored, rewards=scored.rewards[:, k : k + 1], weights=torch.ones(1)), self._params)
            for k in range(scored.rewards.shape[1])
        ]
        advantages = torch.stack([result.values for result in each], 1)
        weights = self.balancer.weights(
            gram(advantages, squared_weights(scored.lengths, reduction=self._reduction)), scored.rewards
        )
        for name, weight in zip(self._names, weights, strict=True):
            metrics[f"reward_balance/{name}"] = Mean(float(weight), 1)
        return replace(each[0], values=(advantages.double() @ weights).to(advantages.dtype), totals=scored.totals())


# What gets an advantage, instead of a row.


class TurnCredit:
    """Advantages of the returns from each turn of an episode on, minus the KL penalties of these.

    Args:
        args: Options.
    """

    def __init__(self, args: PolicyGradientConfig) -> None:
        params = args.advantage_params
        self._discount = args.turn_discount
        is_scaled = isinstance(params, ScaleParams) and params.scale_rewards == "group"
        self._epsilon = params.advantage_epsilon if isinstance(params, ScaleParams) and is_scaled else None

    def __call__(self, rows: RewardedRows, totals: Tensor, is_kept: Tensor) -> Advantages:
        """[N] advantages of this rank's tokens.

        Args:
            rows: The rows.
            totals: [B] total rewards minus the penalties of rows, of all ranks.
            is_kept: [B] whether a row is trained on.
        """
        batch, index = rows.batch, turn_index(rows.rollouts)
        totals = totals.masked_fill(~is_kept, torch.nan)
        rewards, episodes = turn_rewards(rows.rollouts, (totals + rows.penalties)[rows.mine])
        if rows.kl is not None:
            rewards -= row_sums(rows.kl, batch.trainable, index, len(rewards)).double()
        values = turn_advantages(
            rewards, episodes, rows.groups[rows.mine], discount=self._discount, epsilon=self._epsilon
        )
        return Advantages(values=values[index], totals=totals)


class TokenCredit:
    """Advantages of an estimator of tokens, such as PPO's.

    Args:
        args: Options.
        objective: Has the correction of sampling.
    """

    def __init__(self, args: PolicyGradientConfig, objective: PolicyObjective) -> None:
        self._estimator, self._params = ADVANTAGES[args.estimator], args.advantage_params
        self._objective = objective
        self._rewards_turns = args.turn_credit == "return"
        self._corrects = objective.correction is not None and "log_collision" in self._estimator.needs

    def __call__(self, rows: RewardedRows, totals: Tensor, is_kept: Tensor) -> Advantages:
        """[N] advantages of this rank's tokens.

        Args:
            rows: The rows.
            totals: [B] total rewards of all ranks.
            is_kept: Not used, because such estimators need all rows.
        """
        batch, scores = rows.batch, rows.scores
        rewards = self._rewards_of_tokens(rows, totals[rows.mine])
        if rows.kl is not None:
            rewards = rewards - rows.kl
        log_ratio = None
        if self._corrects and self._objective.correction is not None:
            log_ratio = self._objective.correction.weights(batch, scores.old_logprobs)[0].log()
        scored = ScoredTokens(
            rewards=rewards,
            trainable=batch.trainable,
            row_index=batch.row_index,
            num_rows=batch.num_rows,
            groups=rows.groups[rows.mine],
            values=scores.found.get("values"),
            logprobs=scores.old_logprobs,
            log_collision=scores.found.get("log_collision"),
            log_ratio=log_ratio,
        )
        return self._estimator.function(scored, self._params)

    def _rewards_of_tokens(self, rows: RewardedRows, totals: Tensor) -> Tensor:
        """[N] total rewards, at the last trainable tokens of the rows or, where turns have rewards, of the turns."""
        batch, index, values = rows.batch, rows.batch.row_index, totals
        if self._rewards_turns:
            index, (values, _) = turn_index(rows.rollouts), turn_rewards(rows.rollouts, totals)
        positions = batch.trainable_positions
        last = torch.full((len(values),), -1).scatter_reduce(0, index[positions], positions, "amax")
        has_token = last >= 0
        return torch.zeros(batch.num_tokens).index_add(0, last[has_token], values.float()[has_token])


@dataclass(frozen=True, slots=True)
class Whitening:
    """Gives the advantages of tokens mean 0 and standard deviation 1 over the tokens of all ranks."""

    device: torch.device  # for the communication

    def __call__(self, values: Tensor, rows: RewardedRows, has_signal: Tensor) -> Tensor:
        """[N] the values, whitened.

        Args:
            values: [N] advantages.
            rows: The rows.
            has_signal: [B] which of this rank's rows count.
        """
        mask = rows.batch.trainable & has_signal[rows.batch.row_index]
        found = moments(values, mask)
        if rows.over_ranks:
            sums = [found.total, found.square_total, found.count]
            found = Moments(*distributed.sum_over_ranks(sums, self.device))
        return whitened(
            values, mask, mean=found.mean, std=found.std, shift_mean=True, advantage_epsilon=ADVANTAGE_EPSILON
        )


# The tokens that have a policy loss, among those of all ranks.


@dataclass(frozen=True, slots=True)
class HighEntropy:
    """Selects the share of trainable tokens with the highest entropy of the policy that sampled.

    Source: Wang et al. 2025, Beyond the 80/20 Rule, arXiv 2506.01939, eq. 6
    """

    share: float
    seed: int

    def __call__(self, rows: RewardedRows, totals: Tensor) -> Tensor:
        """[N] 1 for the tokens that have a policy loss, otherwise 0."""
        entropies, keys = _rounded(rows.scores.entropies), keys_of(self.seed, rows)
        (values, keys), mine = _gathered(rows.batch, entropies, keys)
        by_key = keys.argsort()
        order = by_key[values[by_key].argsort(descending=True, stable=True)]
        is_high = torch.zeros(len(values), dtype=torch.bool)
        is_high[order[: max(1, round(self.share * len(values)))]] = True
        return _spread(rows.batch, is_high[mine]).float()


@dataclass(frozen=True, slots=True)
class ContestedPrefixes:
    """Leaves out prefixes that completions of a prompt share although their rewards differ."""

    min_tokens: int

    def __call__(self, rows: RewardedRows, totals: Tensor) -> Tensor:
        """[N] 1 for the tokens that have a policy loss, otherwise 0; `totals` are [B] of all ranks."""
        lengths = contested_prefix_lengths(
            [rollout.sampled_ids for rollout in rows.rollouts],
            totals[rows.mine].tolist(),
            [rollout.group for rollout in rows.rollouts],
            min_tokens=self.min_tokens,
        )
        places = torch.tensor([place for length in rows.batch.row_lengths for place in range(length)])
        return (places >= torch.tensor(lengths)[rows.batch.row_index]).float()


class HighCovariance:
    """Selects the tokens that `clip_cov` or `kl_cov` treats differently.

    Args:
        args: Options.
    """

    def __init__(self, args: PolicyGradientConfig) -> None:
        self._select, self._params, self._seed = POLICY_LOSSES[args.loss_type].selection, args.loss_params, args.seed

    def __call__(self, rows: RewardedRows, advantages: Tensor) -> Tensor:
        """[N] True for these tokens; `advantages` are [N]."""
        assert self._select is not None
        old_logprobs, keys = _rounded(rows.scores.old_logprobs), keys_of(self._seed, rows)
        (logprobs, values, keys), mine = _gathered(rows.batch, old_logprobs, advantages, keys)
        every = torch.ones(len(logprobs), dtype=torch.bool)
        found = covariance(
            logprobs,
            values,
            every,
            mean_logprob=float(logprobs.double().mean()),
            mean_advantage=float(values.double().mean()),
        )
        return _spread(rows.batch, self._select(found, every, keys, self._params)[mine])


def keys_of(seed: int, rows: RewardedRows) -> Tensor:
    """[N] a random number for each token, which breaks ties. It does not depend on the rank that holds the token."""
    return token_keys(_row_seeds(rows.rollouts, seed=seed, step=rows.step), rows.batch.row_lengths)


def _rounded(values: Tensor) -> Tensor:
    """Round to 1e-4. Tokens after the same text then have equal values, whatever micro-batch they were computed in."""
    return (values.double() * 1e4).round() / 1e4


def _gathered(batch: TokenBatch, *values: Tensor) -> tuple[list[Tensor], slice]:
    """Values at the trainable tokens of all ranks, and the slice of them that is this rank's."""
    mine = [value[batch.trainable_positions].cpu().numpy() for value in values]
    parts = distributed.gather_objects(mine)
    start = sum(len(part[0]) for part in parts[: distributed.rank()])
    everyone = [torch.cat([torch.from_numpy(part[i]) for part in parts]) for i in range(len(values))]
    return everyone, slice(start, start + batch.num_trainable)


def _spread(batch: TokenBatch, values: Tensor) -> Tensor:
    """[N] from [M], False elsewhere."""
    return torch.zeros(batch.num_tokens, dtype=torch.bool).index_copy(0, batch.trainable_positions, values)


def _row_seeds(rollouts: Sequence[Rollout], *, seed: int, step: int) -> list[int]:
    """Seeds from the group of each row and its position in the group, so the rank that holds it does not matter."""
    places: dict[int, int] = {}
    seeds = []
    for rollout in rollouts:
        place = places.setdefault(rollout.group, 0)
        places[rollout.group] += 1
        seeds.append(prompt_seed(prompt_seed(seed, step, rollout.group), 0, place))
    return seeds
