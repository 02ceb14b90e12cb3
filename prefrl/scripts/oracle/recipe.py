"""Recipes that the oracle measures: complete losses, assembled from the functions that the trainers use.

A recipe computes the loss of each batch as a trainer does: rewards become advantages, a policy loss uses them, samples
of another policy are importance-weighted, a KL term is added, and the token losses are reduced to one number.
A measurement is the expected gradient of one function, on-policy and off-policy, with everything else as simple as
possible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from prefrl.losses.advantage.estimators import (
    Advantages,
    ScoredRows,
    ScoredTokens,
    centered,
    group_count,
    moments,
    numbered,
    whitened,
)
from prefrl.losses.advantage.tokens import to_go
from prefrl.losses.per_token import item_count, row_sums, token_weights
from prefrl.losses.policy.losses import PolicyLoss, reinforce
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights
from prefrl.losses.policy.tokens import PolicyTokens, TokenLoss, covariance, covariance_sums
from prefrl.options.policy import ImportanceLevel, PolicyLossParams, Reduction
from prefrl.scripts.oracle.exact import (
    Agreement,
    ObjectiveName,
    Problem,
    Samples,
    agreement,
    estimate,
    every_batch,
    exact_gradient,
    make_problem,
)

# Maps batches to one value per token, [N]; constants, unless the value is a part of the loss.
PerToken = Callable[["Samples"], "Tensor"]


def whole_reward(samples: Samples) -> Tensor:
    """[N] the row's reward at each of its tokens: REINFORCE without a baseline."""
    return samples.rewards[samples.row_index]


def row_total(values: PerToken) -> PerToken:
    """[N] the row's sum of some values at each of its tokens; constant."""

    def totals(samples: Samples) -> Tensor:
        sums = row_sums(values(samples).detach(), samples.trainable, samples.row_index, samples.num_rows)
        return sums[samples.row_index]

    return totals


def row_advantages(function: Callable[[ScoredRows], Advantages], *, penalty: PerToken | None = None) -> PerToken:
    """Advantages of a row-level estimator at each token of the row.

    Args:
        function: The estimator, with its hyperparameters bound.
        penalty: [N] subtracted from the row's reward, such as a coefficient times a KL estimate.
    """

    def advantages(samples: Samples) -> Tensor:
        rewards = samples.rewards
        if penalty is not None:
            taken = penalty(samples).detach()
            rewards = rewards - row_sums(taken, samples.trainable, samples.row_index, samples.num_rows)
        scored = ScoredRows(
            rewards=rewards[:, None],
            weights=rewards.new_ones(1),
            groups=samples.groups,
            lengths=samples.lengths,
            greedy=samples.greedy,
        )
        return function(scored).values[samples.row_index]

    return advantages


def token_advantages(
    function: Callable[[ScoredTokens], Advantages],
    *,
    penalty: PerToken | None = None,
    is_weighted: bool = False,
) -> PerToken:
    """Advantages of a token-level estimator.

    Args:
        function: The estimator, with its hyperparameters bound.
        penalty: [N] subtracted from the token's reward.
        is_weighted: Pass the estimator the exact ratio of each row, which the loss will be multiplied by.
    """

    def advantages(samples: Samples) -> Tensor:
        rewards = samples.rewards[samples.row_index].where(samples.is_last, 0.0)
        if penalty is not None:
            rewards = rewards - penalty(samples).detach()
        old = samples.problem.table(samples.problem.old)[samples.states]
        log_weights = sampling_weights("sequence_truncate")(samples).log() if is_weighted else None
        scored = ScoredTokens(
            rewards=rewards,
            trainable=samples.trainable,
            row_index=samples.row_index,
            num_rows=samples.num_rows,
            groups=samples.groups,
            values=samples.values,
            logprobs=samples.logprobs_of(samples.problem.old),
            log_collision=(2 * old).logsumexp(1),
            log_ratio=log_weights,
        )
        return function(scored).values

    return advantages


def whiten(advantages: PerToken, *, advantage_epsilon: float) -> PerToken:
    """Advantages whitened to mean 0 and standard deviation 1 over the batch's tokens. Takes one batch at a time."""

    def result(samples: Samples) -> Tensor:
        assert samples.num_batches == 1, "statistics of a batch: measure with stacked=False"
        values = advantages(samples)
        seen = moments(values, samples.trainable)
        return whitened(
            values,
            samples.trainable,
            mean=seen.mean,
            std=seen.std,
            shift_mean=True,
            advantage_epsilon=advantage_epsilon,
        )

    return result


def sampling_weights(name: str, *, low: float | None = None, high: float | None = None) -> PerToken:
    """Importance weights old / mu of an off-policy correction."""
    row = OFF_POLICY_CORRECTIONS[name]

    def weights(samples: Samples) -> Tensor:
        problem = samples.problem
        log_ratio = samples.logprobs_of(problem.old) - samples.sampling_logprobs
        result = importance_weights(
            log_ratio,
            samples.trainable,
            samples.row_index,
            samples.num_rows,
            level=row.level,
            bound=row.bound,
            low=low,
            high=high,
        )
        return result.weights

    return weights


def reinforce_loss(tokens: PolicyTokens) -> TokenLoss:
    """`reinforce`, which has no hyperparameters."""
    return reinforce(tokens, PolicyLossParams())


def selection(row: PolicyLoss[Any], params: PolicyLossParams) -> Callable[[PolicyTokens], Tensor]:
    """The tokens of a batch that a policy loss selects for special treatment. Takes one batch at a time.

    The random keys are fixed numbers, one for each position in the batch.
    """
    select = row.selection
    assert select is not None

    def selected(tokens: PolicyTokens) -> Tensor:
        sums = covariance_sums(tokens.logprobs, tokens.advantages, tokens.trainable)
        covariances = covariance(
            tokens.logprobs,
            tokens.advantages,
            tokens.trainable,
            mean_logprob=float(sums.logprobs / sums.num_tokens),
            mean_advantage=float(sums.advantages / sums.num_tokens),
        )
        keys = torch.rand(len(covariances), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return select(covariances, tokens.trainable, keys, params)

    return selected


@dataclass(frozen=True)
class Recipe:
    """The loss to measure; calling it returns the loss of each batch, [T]."""

    policy: Callable[[PolicyTokens], TokenLoss]
    advantages: PerToken = whole_reward
    level: ImportanceLevel = "token"
    reduction: Reduction = "sequence_sum"
    constant: float | None = None  # for the reduction of that name
    selected: Callable[[PolicyTokens], Tensor] | None = None  # [N] tokens that the policy loss treats differently
    weights: PerToken | None = None  # factors on the policy loss
    term: PerToken | None = None  # added to the policy loss, such as a coefficient times a KL estimate

    def __call__(self, samples: Samples) -> Tensor:
        """[T] the loss of each batch; gradient flows to the policy's log-probs."""
        loss = self.policy(self.tokens(samples)).loss
        if self.weights is not None:
            loss = self.weights(samples) * loss
        if self.term is not None:
            loss = loss + self.term(samples)
        return reduced(loss, samples, reduction=self.reduction, constant=self.constant)

    def tokens(self, samples: Samples) -> PolicyTokens:
        """The input of the policy loss."""
        tokens = PolicyTokens(
            logprobs=samples.logprobs,
            old_logprobs=samples.logprobs_of(samples.problem.old),
            advantages=self.advantages(samples),
            trainable=samples.trainable,
            row_index=samples.row_index,
            num_rows=samples.num_rows,
            level=self.level,
        )
        return tokens if self.selected is None else replace(tokens, cov_tokens=self.selected(tokens))


def reduced(loss: Tensor, samples: Samples, *, reduction: Reduction, constant: float | None) -> Tensor:
    """[T] the loss of each batch, from the token losses [N]."""
    layout = (samples.trainable, samples.row_index, samples.num_rows)
    weights = token_weights(*layout, reduction=reduction, dtype=loss.dtype)
    totals = loss.new_zeros(samples.num_batches).index_add(0, samples.batch_of_token, weights * loss)
    return totals / _item_counts(samples, reduction, constant)


@functools.lru_cache(maxsize=16)
def _item_counts(samples: Samples, reduction: Reduction, constant: float | None) -> Tensor:
    """[T] the item count that the loss of each batch is divided by."""
    rows_of_batch = samples.num_rows // samples.num_batches
    counts = []
    for lengths in samples.lengths.view(samples.num_batches, rows_of_batch):
        row_index = torch.arange(rows_of_batch).repeat_interleave(lengths)
        trainable = torch.ones_like(row_index, dtype=torch.bool)
        counts.append(item_count(trainable, row_index, rows_of_batch, reduction=reduction, constant=constant))
    return torch.stack(counts).double()


def credit_of_turns(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> PerToken:
    """Advantages of turns that have a reward each, [N].

    The reward of a turn is the rise of the critic's value, which is 0 before the first turn and the row's reward after
    the last one. So the turns of a row have different rewards, which add up to the row's reward.

    Args:
        function: `function(rewards, episode_index, groups)`, with its hyperparameters bound; the rewards and the
            result are [N].
    """

    def advantages(samples: Samples) -> Tensor:
        before = samples.values.where(~samples.is_last.roll(1), 0.0)
        after = samples.values.roll(-1).where(~samples.is_last, samples.rewards[samples.row_index])
        return function(after - before, samples.row_index, samples.groups)

    return advantages


def centered_turns(rewards: Tensor, episode_index: Tensor, groups: Tensor) -> Tensor:
    """[U] sum over the turns from t on of: the reward minus the mean of the other episodes that reach that turn.

    An example of bias: the number of means that are subtracted depends on when the episode itself stops. A turn that
    no other episode reaches has no mean.

    Args:
        rewards: [U] of the turns of all episodes, laid end to end.
        episode_index: [U] int64, episode of each turn.
        groups: [B] int64, group of each episode.
    """
    turn = torch.arange(len(rewards)) - torch.searchsorted(episode_index, episode_index)
    same_turn = numbered(groups[episode_index] * len(rewards) + turn)
    count = group_count(rewards, same_turn)[same_turn]
    without_own = centered(rewards, same_turn) * count / (count - 1).clamp(min=1)
    return to_go(without_own.where(count > 1, rewards), episode_index, discount=1.0)


# How far the sampler's parameters are from the policy's, in a random direction of length sqrt(D).
STEPS = {"on-policy": 0.0, "small step": 0.2, "large step": 1.0}
KLPlacement = Literal["loss", "reward"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """How well an expected gradient agrees with the true one, for samples of one policy."""

    setting: str  # a name in `STEPS`
    agreement: Agreement

    @property
    def is_on_policy(self) -> bool:
        """Whether the samples come from the policy itself."""
        return STEPS[self.setting] == 0


def one_prompt() -> Problem:
    """A vocabulary of 3 tokens, completions of at most 2: 7 completions. All prefixes share the parameters."""
    return make_problem(num_prompts=1, num_tokens=3, length=2, num_features=5, seed=3)


def two_prompts() -> Problem:
    """A vocabulary of 2 tokens, completions of at most 2: 3 for each prompt. All prefixes share the parameters.

    Rewards are positive, as some estimators require.
    """
    problem = make_problem(num_prompts=2, num_tokens=2, length=2, num_features=4, seed=4)
    return problem.replace(rewards=problem.rewards.abs() + 0.1)


def silent(tokens: PolicyTokens) -> TokenLoss:
    """A policy loss of 0, to measure the gradient of an added term alone."""
    return TokenLoss(loss=0.0 * tokens.trainable_logprobs, stats={})


def measure_policy_loss(
    function: Callable[[PolicyTokens], TokenLoss], *, level: ImportanceLevel, reduction: Reduction
) -> list[Measurement]:
    """Compare the gradient of a policy loss whose advantages are the rewards with the gradient of -E[R].

    Off-policy, samples come from the old policy, which the ratio is relative to.

    Args:
        function: `function(tokens) -> TokenLoss`, with its hyperparameters bound.
        level: The level of the importance ratio.
        reduction: How token losses are reduced to one number; not `constant`.
    """
    recipe = Recipe(policy=function, level=level, reduction=reduction)
    problem = one_prompt()
    return [
        _measure(setting, problem.moved(sampler=step, old=step), recipe, objective="reward", sign=-1)
        for setting, step in STEPS.items()
    ]


def measure_advantages(
    function: Callable[..., Advantages], *, level: Literal["row", "token"], group_size: int
) -> list[Measurement]:
    """Compare the gradient of -A log pi with the gradient of -E[R], in batches of two prompts.

    Off-policy, each row is weighted by the exact ratio of its probabilities.
    """
    advantages = row_advantages(function) if level == "row" else token_advantages(function)
    recipe = Recipe(policy=reinforce_loss, advantages=advantages, weights=sampling_weights("sequence_truncate"))
    problem = two_prompts()
    return [
        _measure(setting, problem.moved(sampler=step), recipe, objective="reward", sign=-1, group_size=group_size)
        for setting, step in STEPS.items()
    ]


def measure_kl(
    function: Callable[[Tensor, Tensor], Tensor], *, placement: KLPlacement, reduction: Reduction
) -> list[Measurement]:
    """Compare the gradient of a KL estimate with that of the divergence.

    As a loss, it is compared with the divergence of each token's distributions given the prefix. As a part of the
    reward, it is compared with the divergence of whole completions. Off-policy, rewards are weighted by the exact
    ratio of each row; a loss gets no correction.
    """

    def value(samples: Samples) -> Tensor:
        return function(samples.logprobs, samples.logprobs_of(samples.problem.reference))

    objective: ObjectiveName = "token_kl"
    recipe = Recipe(policy=silent, reduction=reduction, term=value)
    if placement == "reward":
        objective, weights = "kl", sampling_weights("sequence_truncate")
        total = row_total(value)
        # The reward is minus the divergence, so the divergence is minimized.
        recipe = Recipe(policy=reinforce_loss, advantages=lambda s: -total(s), reduction=reduction, weights=weights)
    problem = one_prompt()
    return [
        _measure(setting, problem.moved(sampler=step), recipe, objective=objective, sign=1)
        for setting, step in STEPS.items()
    ]


def _measure(
    setting: str, problem: Problem, recipe: Recipe, *, objective: ObjectiveName, sign: int, group_size: int = 2
) -> Measurement:
    # A function under test may let batches affect each other, so each batch gets its own call.
    found = estimate(every_batch(problem, group_size=group_size), recipe, stacked=False)
    return Measurement(setting, agreement(found, sign * exact_gradient(problem, objective)))
