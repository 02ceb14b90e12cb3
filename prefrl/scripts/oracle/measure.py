"""The expected gradient of one function, on-policy and off-policy, with everything else as simple as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prefrl.losses.policy.losses import PolicyTokens, TokenLoss
from prefrl.options.policy import ImportanceLevel
from prefrl.scripts.oracle.exact import (
    Agreement,
    ObjectiveName,
    Problem,
    agreement,
    estimate,
    every_batch,
    exact_gradient,
    make_problem,
)
from prefrl.scripts.oracle.recipe import (
    Recipe,
    reinforce_loss,
    row_advantages,
    row_total,
    sampling_weights,
    token_advantages,
)

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.advantage.estimators import Advantages
    from prefrl.options.policy import Reduction
    from prefrl.scripts.oracle.exact import Samples

__all__ = [
    "STEPS",
    "KLPlacement",
    "Measurement",
    "measure_advantages",
    "measure_kl",
    "measure_policy_loss",
    "one_prompt",
    "silent",
    "two_prompts",
]

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

    Args:
        function: `function(scored) -> Advantages`, with its hyperparameters bound.
        level: Whether it takes `ScoredRows` or `ScoredTokens`.
        group_size: Completions of each prompt.
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

    Args:
        function: `function(logprobs, ref_logprobs) -> [N]`.
        placement: See above.
        reduction: How token losses are reduced to one number; not `constant`.
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
