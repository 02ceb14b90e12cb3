"""Groups that finish late: what they were sampled by, which of them are dropped, and which batch learns from them.

A group is as late as its longest completion is long. The weights are updated once while it is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prefrl.losses.advantage import ADVANTAGES
from prefrl.scripts.oracle.exact import (
    Agreement,
    Problem,
    Samples,
    agreement,
    estimate,
    every_batch,
    exact_gradient,
    make_problem,
)
from prefrl.scripts.oracle.recipe import PerToken, Recipe, reinforce_loss, row_advantages, sampling_weights

LONGEST_KEPT = 2  # tokens, where longer groups are dropped
OfGroups = Callable[[Samples], Tensor]  # [T, P]


@dataclass(frozen=True)
class Late:
    """How training treats groups.

    Args:
        weights: Importance weights; None: there are none.
        kept: The probability that a group is kept. One that is not is sampled again, until it is.
        factor: Multiplies the loss of a group.
    """

    weights: PerToken | None
    kept: OfGroups | None = None
    factor: OfGroups | None = None

    def agreement(self, problem: Problem) -> Agreement:
        """REINFORCE with `rloo` advantages, against the gradient of the expected reward."""
        samples = every_batch(problem, group_size=2)
        if self.kept is not None:
            probabilities = samples.probabilities * self.kept(samples).prod(1)
            samples = replace(samples, probabilities=probabilities / probabilities.sum())
        row = ADVANTAGES["rloo"]
        advantages = row_advantages(lambda scored: row.function(scored, row.params()))
        recipe = Recipe(reinforce_loss, advantages, weights=self._factors)
        return agreement(estimate(samples, recipe), -exact_gradient(problem, "reward"))

    def _factors(self, samples: Samples) -> Tensor:
        values = torch.ones_like(samples.logprobs.detach()) if self.weights is None else self.weights(samples)
        if self.factor is None:
            return values
        return values * self.factor(samples).flatten()[samples.groups][samples.row_index]


def problem_of_versions(first: float, later: float) -> Problem:
    """Two prompts, two tokens, completions of at most 3, and two versions of the weights that sample them.

    Args:
        first: How far from the policy the weights are that sample the first token of each completion.
        later: How far those are that sample its other tokens.
    """
    problem = make_problem(num_prompts=2, num_tokens=2, length=3, num_features=None, seed=5)
    tree = problem.tree
    first_prefixes = tree.states[tree.lengths.cumsum(0) - tree.lengths]
    logits = problem.moved(sampler=later).sampler.view(-1, tree.num_tokens)  # after each prefix
    logits[first_prefixes] = problem.moved(sampler=first).sampler.view_as(logits)[first_prefixes]
    return problem.replace(sampler=logits.flatten())


def late_forms(first: float, later: float) -> dict[str, Late]:
    """What may be done with late groups, by name; the arguments are those of `problem_of_versions`."""
    exact = sampling_weights("sequence_truncate")
    return {
        "`wait`, `sequence` weights": Late(exact),
        "the same, as if the oldest version had sampled all tokens": Late(_as_if_sampled_by(first)),
        "the same, as if the newest version had sampled all tokens": Late(_as_if_sampled_by(later)),
        "`wait`, `token` weights": Late(sampling_weights("token_truncate")),
        "`wait`, no weights": Late(None),
        "dropped by length, the prompt is asked again (`drop`)": Late(exact, kept=_is_short),
        "the same, begun at a random time before the bound": Late(exact, kept=_is_in_time),
        "dropped by length, another prompt is asked": Late(exact, kept=_is_short, factor=_prompts_that_are_kept),
        "dropped by chance, the prompt is asked again": Late(exact, kept=lambda s: torch.full_like(_is_short(s), 0.5)),
        "`ready`, the batch of the group that finishes first": Late(exact, factor=lambda s: 2 * _is_first(s)),
        "`ready`, the batch of the other group": Late(exact, factor=lambda s: 2 * (1 - _is_first(s))),
        "`ready`, both batches": Late(exact, factor=lambda s: _is_first(s) + (1 - _is_first(s))),
    }


def _length(samples: Samples) -> Tensor:
    """[T, P] tokens of the longest completion of each group."""
    return samples.lengths.view(samples.num_batches, -1, samples.group_size).amax(2)


def _is_short(samples: Samples) -> Tensor:
    return (_length(samples) <= LONGEST_KEPT).double()


def _is_in_time(samples: Samples) -> Tensor:
    """[T, P] the probability that a group of 1, 2 or 3 tokens finishes before the bound: 1, 3/4 or 1/2."""
    return 1 - (_length(samples) - 1) / 4


def _is_first(samples: Samples) -> Tensor:
    """[T, P] 1 for the group that finishes before the other one, 0 for the other one, 1/2 if both finish at once."""
    own = _length(samples)
    other = own.flip(1)
    return (own < other).double() + (own == other).double() / 2


def _prompts_that_are_kept(samples: Samples) -> Tensor:
    """[T, P] how often the groups of a prompt are kept, relative to the mean over prompts."""
    problem = samples.problem
    tree, probabilities = problem.tree, problem.completion_logprobs(problem.sampler).exp()
    short = probabilities.where(tree.lengths <= LONGEST_KEPT, 0.0)
    kept = torch.zeros(tree.num_prompts, dtype=torch.float64).index_add(0, tree.prompts, short) ** samples.group_size
    return (kept / kept.mean()).expand(samples.num_batches, -1)


def _as_if_sampled_by(step: float) -> PerToken:
    """Sequence weights whose mu is one version of the weights, which sampled only some of the tokens."""

    def weights(samples: Samples) -> Tensor:
        wrong = samples.problem.replace(sampler=samples.problem.moved(sampler=step).sampler)
        return sampling_weights("sequence_truncate")(replace(samples, problem=wrong))

    return weights
