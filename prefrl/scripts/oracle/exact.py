"""Exact expected gradients: the bias and noise of policy gradient estimators, computed without sampling.

A softmax policy over a few tokens has so few completions that all of them, and all batches of them, can be enumerated.
An expectation is then a finite sum, and the expected gradient of a loss is exact up to rounding:

    expected gradient = sum over batches b of mu(b) * gradient of loss(b)

where the sampler mu is the policy itself or another policy. It is compared with the gradients of objectives that are
written as sums over all completions and differentiated: the expected reward, the KL divergence, the entropy.

Shape letters besides the usual ones: `S` prefixes, `C` completions of all prompts, `D` parameters, `T` batches of `B`
rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal, Self

import torch
from torch import Tensor

from prefrl.losses.per_token import row_sums
from prefrl.losses.truncation import TokenTruncation, Truncation

END = 0  # the token that ends a completion
_BATCHES_PER_CALL = 100
_WHOLE = Truncation()

ObjectiveName = Literal[
    "reward",
    "kl",
    "forward_kl",
    "jensen_shannon",
    "token_kl",
    "reverse_token_kl",
    "token_variation",
    "entropy",
    "token_entropy",
]


@dataclass(frozen=True, slots=True)
class Tree:
    """Every completion of every prompt: its tokens up to and including the end token, or `length` tokens without one.

    Prefixes are numbered; prefixes of different prompts have different numbers. The tokens of all completions are laid
    end to end.
    """

    num_prompts: int
    num_tokens: int  # V
    length: int
    states: Tensor  # [sum of lengths] int64, the prefix that each token follows
    tokens: Tensor  # [sum of lengths] int64
    row_index: Tensor  # [sum of lengths] int64, in 0 .. C-1
    lengths: Tensor  # [C] int64
    prompts: Tensor  # [C] int64
    num_states: int  # S

    @property
    def num_completions(self) -> int:
        """C, the number of completions of all prompts."""
        return len(self.lengths)

    @classmethod
    def grow(cls, *, num_prompts: int, num_tokens: int, length: int) -> Self:
        """Enumerate all completions of up to `length` of V tokens, one of which ends them, for P prompts."""
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        rows: list[tuple[int, tuple[int, ...]]] = []
        open_prefixes: list[tuple[int, tuple[int, ...]]] = [(prompt, ()) for prompt in range(num_prompts)]
        for prompt, prefix in open_prefixes:  # the list grows during the loop
            numbers[prompt, prefix] = len(numbers)
            for token in range(num_tokens):
                longer = (prompt, (*prefix, token))
                is_whole = token == END or len(prefix) + 1 == length
                (rows if is_whole else open_prefixes).append(longer)
        tokens = [token for _, row in rows for token in row]
        states = [numbers[prompt, row[:position]] for prompt, row in rows for position in range(len(row))]
        lengths = torch.tensor([len(row) for _, row in rows])
        return cls(
            num_prompts=num_prompts,
            num_tokens=num_tokens,
            length=length,
            states=torch.tensor(states),
            tokens=torch.tensor(tokens),
            row_index=torch.arange(len(rows)).repeat_interleave(lengths),
            lengths=lengths,
            prompts=torch.tensor([prompt for prompt, _ in rows]),
            num_states=len(numbers),
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """Completions with rewards, and four policies with shared features: logits = features @ parameters.

    Prompts are equally likely. All numbers are float64.
    """

    tree: Tree
    features: Tensor  # [S, V, D]
    policy: Tensor  # [D] pi, the trained policy
    old: Tensor  # [D] the policy before the first update on these samples
    sampler: Tensor  # [D] mu, the policy that the samples come from
    reference: Tensor  # [D]
    rewards: Tensor  # [C]
    critic: Tensor  # [S] a critic's value of each prefix; need not be accurate
    sampled: Truncation = _WHOLE  # of the policies that sample, and of the objectives' policies
    scored: Truncation = _WHOLE  # of the log-probs that a loss reads

    def table(self, parameters: Tensor) -> Tensor:
        """[S, V] nats, log-probs of each token after each prefix; gradient flows."""
        return (self.features @ parameters).log_softmax(-1)

    def sampled_table(self, parameters: Tensor) -> Tensor:
        """[S, V] nats, log-probs of each token after each prefix in a sampler, about -1e20 for tokens that are cut."""
        table = self.table(parameters)
        likeliest = table.detach().argmax(1)
        return scored_table(table, likeliest, self.sampled)

    def completion_logprobs(self, parameters: Tensor) -> Tensor:
        """[C] nats, log-prob of each completion of its prompt; gradient flows."""
        tree = self.tree
        logprobs = self.sampled_table(parameters)[tree.states, tree.tokens]
        return row_sums(logprobs, torch.ones_like(tree.tokens, dtype=torch.bool), tree.row_index, tree.num_completions)

    def expectation(self, values: Tensor, parameters: Tensor) -> Tensor:
        """Scalar: E[values] under the policy with these parameters, mean over prompts; values [C]; gradient flows."""
        return (self.completion_logprobs(parameters).exp() * values).sum() / self.tree.num_prompts

    @cached_property
    def visits(self) -> Tensor:
        """[S] probability that the sampler visits each prefix, mean over prompts; constant."""
        return self._visits_of(self.completion_logprobs(self.sampler).exp())

    def _visits_of(self, weights: Tensor) -> Tensor:
        """[S] sum of the weights of the completions through each prefix, mean over prompts."""
        by_token = weights[self.tree.row_index] / self.tree.num_prompts
        return torch.zeros_like(self.critic).index_add(0, self.tree.states, by_token)

    @cached_property
    def jacobian(self) -> Tensor:
        """[S * V, D] gradient of each log-prob of the policy."""
        parameters = self.policy.clone().requires_grad_()
        rows = [torch.autograd.grad(x, parameters, retain_graph=True)[0] for x in self.table(parameters).flatten()]
        return torch.stack(rows)

    @cached_property
    def exact_critic(self) -> Tensor:
        """[S] the expected reward of completions that begin with each prefix, under the policy."""
        probabilities = self.completion_logprobs(self.policy).exp()
        return self._visits_of(probabilities * self.rewards) / self._visits_of(probabilities)

    @cached_property
    def greedy_rewards(self) -> Tensor:
        """[P] reward of each prompt's greedy completion under the old policy."""
        best = self.table(self.old).argmax(-1)[self.tree.states] == self.tree.tokens
        is_greedy = torch.ones(self.tree.num_completions, dtype=torch.long)
        is_greedy = is_greedy.scatter_reduce(0, self.tree.row_index, best.long(), "amin")
        rewards = self.rewards.new_zeros(self.tree.num_prompts)
        return rewards.index_add(0, self.tree.prompts, self.rewards * is_greedy)

    def moved(self, *, sampler: float = 0.0, old: float = 0.0) -> Self:
        """A copy whose sampler or old policy is moved away from the policy by these steps, in a fixed direction."""
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(len(self.policy), dtype=torch.float64, generator=generator)
        return self.replace(sampler=self.policy + sampler * direction, old=self.policy + old * direction)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


def make_problem(*, num_prompts: int, num_tokens: int, length: int, num_features: int | None, seed: int) -> Problem:
    """A random on-policy problem: the old policy and the sampler equal the policy.

    Args:
        num_prompts: P.
        num_tokens: V, including the end token.
        length: Maximum number of tokens of a completion.
        num_features: D, shared by all prefixes; None: a separate logit for each token after each prefix.
        seed: Determines all random numbers.
    """
    tree = Tree.grow(num_prompts=num_prompts, num_tokens=num_tokens, length=length)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    num_logits = tree.num_states * num_tokens
    if num_features is None:
        features = torch.eye(num_logits, dtype=torch.float64)
    else:
        features = random(num_logits, num_features) / num_features**0.5
    num_parameters = features.shape[1]
    policy = random(num_parameters)
    return Problem(
        tree=tree,
        features=features.view(tree.num_states, num_tokens, num_parameters),
        policy=policy,
        old=policy,
        sampler=policy,
        reference=policy + random(num_parameters),
        rewards=random(tree.num_completions) + 0.5,
        critic=random(tree.num_states),
    )


def scored_table(table: Tensor, tokens: Tensor, cuts: Truncation) -> Tensor:
    """[c, V] nats, log-probs after truncation, which keeps the tokens [c] in any case; gradient flows."""
    constant = table.detach()
    kept = TokenTruncation(cuts, None).kept(constant)
    return table if kept is None else kept.mask(constant, tokens).restrict(table.clone()).log_softmax(1)


def _token_kl(problem: Problem, first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of the token distributions, summed over tokens, mean over completions; visits constant."""
    divergence = (problem.table(first).exp() * (problem.table(first) - problem.table(second))).sum(-1)
    return (problem.visits * divergence).sum()


def _token_variation(problem: Problem, parameters: Tensor) -> Tensor:
    difference = problem.table(parameters).exp() - problem.table(problem.reference).exp()
    return (problem.visits * difference.abs().sum(-1)).sum()


def _kl(problem: Problem, parameters: Tensor) -> Tensor:
    log_ratio = problem.completion_logprobs(parameters) - problem.completion_logprobs(problem.reference)
    return problem.expectation(log_ratio, parameters)


def _forward_kl(problem: Problem, parameters: Tensor) -> Tensor:
    log_ratio = problem.completion_logprobs(problem.reference) - problem.completion_logprobs(parameters)
    return problem.expectation(log_ratio, problem.reference)


def _jensen_shannon(problem: Problem, parameters: Tensor) -> Tensor:
    ours, theirs = (problem.completion_logprobs(each).exp() for each in (parameters, problem.reference))
    mean = (ours + theirs) / 2
    return (ours * (ours / mean).log() + theirs * (theirs / mean).log()).sum() / 2 / problem.tree.num_prompts


def _token_entropy(problem: Problem, parameters: Tensor) -> Tensor:
    table = problem.table(parameters)
    return -(problem.visits * (table.exp() * table).sum(-1)).sum()


# All are means over prompts. For whole completions: E_pi[R], KL(pi || ref), H(pi). For the token distributions, summed
# over the sampler's prefixes, which stay fixed while the policy changes: KL(pi || ref), KL(ref || pi),
# sum_v |pi - ref|, H(pi).
OBJECTIVES: dict[ObjectiveName, Callable[[Problem, Tensor], Tensor]] = {
    "reward": lambda problem, parameters: problem.expectation(problem.rewards, parameters),
    "kl": _kl,
    "forward_kl": _forward_kl,
    "jensen_shannon": _jensen_shannon,
    "token_kl": lambda problem, parameters: _token_kl(problem, parameters, problem.reference),
    "reverse_token_kl": lambda problem, parameters: _token_kl(problem, problem.reference, parameters),
    "token_variation": _token_variation,
    "entropy": lambda problem, parameters: -problem.expectation(problem.completion_logprobs(parameters), parameters),
    "token_entropy": _token_entropy,
}


def exact_gradient(problem: Problem, objective: ObjectiveName) -> Tensor:
    """[D] gradient of an objective at the policy, from differentiating the sum over all completions."""
    parameters = problem.policy.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(OBJECTIVES[objective](problem, parameters), parameters)
    return gradient


@dataclass(frozen=True, eq=False)
class Samples:
    """The data that a trainer has of T batches, laid end to end: rows of different lengths, tokens of a row in order.

    A group is the completions of one prompt in one batch; a batch has B = P * G rows.
    """

    problem: Problem
    num_batches: int  # T
    group_size: int  # G
    completions: Tensor  # [T * B] int64, the completion of each row
    probabilities: Tensor  # [T] probability of each batch under the sampler
    leaf: Tensor  # [N, V] nats, the policy's log-probs of all tokens at each position, uncut; gradients are taken here

    @property
    def num_rows(self) -> int:
        """T * B, the number of rows."""
        return len(self.completions)

    @cached_property
    def lengths(self) -> Tensor:
        """[T * B] int64: number of tokens of each row."""
        return self.problem.tree.lengths[self.completions]

    @cached_property
    def row_index(self) -> Tensor:
        """[N] int64: the row of each token."""
        return torch.arange(self.num_rows).repeat_interleave(self.lengths)

    @cached_property
    def groups(self) -> Tensor:
        """[T * B] int64: the group of each row."""
        return torch.arange(self.num_rows) // self.group_size

    @cached_property
    def trainable(self) -> Tensor:
        """[N] bool: all True."""
        return torch.ones_like(self.row_index, dtype=torch.bool)

    @cached_property
    def is_last(self) -> Tensor:
        """[N] bool: whether a token is the last of its row."""
        return self.row_index != torch.cat([self.row_index[1:], self.row_index.new_tensor([-1])])

    @cached_property
    def batch_of_token(self) -> Tensor:
        """[N] int64: the batch of each token, in 0 .. T-1."""
        return self.row_index // (self.num_rows // self.num_batches)

    @cached_property
    def _source(self) -> Tensor:
        """[N] int64: the position of each token in the tree."""
        starts = self.lengths.cumsum(0) - self.lengths
        tree = self.problem.tree
        offsets = tree.lengths.cumsum(0) - tree.lengths
        return torch.arange(len(self.row_index)) + (offsets[self.completions] - starts)[self.row_index]

    @cached_property
    def states(self) -> Tensor:
        """[N] int64: the prefix that each token follows."""
        return self.problem.tree.states[self._source]

    @cached_property
    def tokens(self) -> Tensor:
        """[N] int64: token ids."""
        return self.problem.tree.tokens[self._source]

    @property
    def logprobs(self) -> Tensor:
        """[N] nats, log-probs under the policy; gradient flows."""
        return self._scored(self.leaf)

    def logprobs_of(self, parameters: Tensor) -> Tensor:
        """[N] nats, log-probs under the policy with these parameters; constant."""
        return self._scored(self.problem.table(parameters)[self.states])

    @property
    def sampling_logprobs(self) -> Tensor:
        """[N] nats, log-probs of the distribution that was sampled from."""
        return self.problem.sampled_table(self.problem.sampler)[self.states, self.tokens]

    def _scored(self, table: Tensor) -> Tensor:
        found = scored_table(table, self.tokens, self.problem.scored)
        return found.gather(1, self.tokens[:, None]).squeeze(1)

    @cached_property
    def rewards(self) -> Tensor:
        """[T * B] reward of each row."""
        return self.problem.rewards[self.completions]

    @cached_property
    def greedy(self) -> Tensor:
        """[T * B] reward of the greedy completion of each row's prompt."""
        return self.problem.greedy_rewards[self.problem.tree.prompts[self.completions]]

    @cached_property
    def values(self) -> Tensor:
        """[N] the critic's value of the prefix that each token follows."""
        return self.problem.critic[self.states]

    def part(self, first: int, past: int) -> Self:
        """The batches from `first` to before `past`, as a trainer sees them."""
        tokens = (self.batch_of_token >= first) & (self.batch_of_token < past)
        probabilities = self.probabilities[first:past]
        return dataclasses.replace(
            self,
            num_batches=len(probabilities),
            completions=self.completions.view(self.num_batches, -1)[first:past].flatten(),
            probabilities=probabilities,
            leaf=self.leaf[tokens],
        )


def every_batch(problem: Problem, *, group_size: int) -> Samples:
    """All batches of G completions for each prompt, each with its probability under the sampler.

    There are (completions of a prompt)^(P * G) of them.
    """
    tree = problem.tree
    of_prompt = [(tree.prompts == prompt).nonzero().squeeze(1).tolist() for prompt in range(tree.num_prompts)]
    rows = torch.tensor(list(product(*(of_prompt[p] for p in range(tree.num_prompts) for _ in range(group_size)))))
    samples = Samples(
        problem=problem,
        num_batches=len(rows),
        group_size=group_size,
        completions=rows.flatten(),
        probabilities=problem.completion_logprobs(problem.sampler)[rows].sum(1).exp(),
        leaf=torch.empty(0),
    )
    leaf = problem.table(problem.policy)[samples.states].requires_grad_()
    return dataclasses.replace(samples, leaf=leaf)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expectation and variance of the gradient of a loss over all batches."""

    mean: Tensor  # [D] expectation
    variance: float  # trace of the covariance


def estimate(samples: Samples, loss: Callable[[Samples], Tensor], *, stacked: bool = True) -> Estimate:
    """Expectation and variance of the gradient of a loss, over all batches.

    Args:
        samples: From `every_batch`.
        loss: The loss of each batch, [T] for T batches; it reads the policy through `Samples.logprobs` or `leaf`.
        stacked: Compute the loss of many batches in one call. This needs a loss in which groups do not affect each
            other; otherwise call it once for each batch.
    """
    # Sums over the tokens of a call are rounded relative to their size, so no call has too many of them.
    size = _BATCHES_PER_CALL if stacked else 1
    parts = [samples.part(first, first + size) for first in range(0, samples.num_batches, size)]
    losses = torch.cat([loss(part) for part in parts])
    (at_leaf,) = torch.autograd.grad(losses.sum(), samples.leaf)
    problem = samples.problem
    num_states, num_tokens = problem.tree.num_states, problem.tree.num_tokens
    place = samples.batch_of_token * num_states + samples.states
    # [T, S, V]: the gradient at the log-probs after each prefix, summed over the rows of a batch.
    by_state = at_leaf.new_zeros(samples.num_batches * num_states, num_tokens).index_add(0, place, at_leaf)
    gradients = by_state.view(samples.num_batches, -1) @ problem.jacobian
    mean = samples.probabilities @ gradients
    deviations = (gradients - mean).square().sum(1)
    return Estimate(mean=mean, variance=float(samples.probabilities @ deviations))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an expected gradient g compares with a true one, t."""

    bias: float  # |g - t| / |t|
    scale: float  # <g, t> / |t|^2: the multiple of t that is closest to g
    cosine: float  # of the angle between them; NaN where g is 0
    noise: float  # standard deviation of the estimate / |t|


def agreement(found: Estimate, target: Tensor) -> Agreement:
    """Compare an estimate with the gradient that it should have."""
    size, length = float(target.norm()), float(found.mean.norm())
    scale = float(found.mean @ target) / size**2
    # Rounding turns a gradient of 0 into about 1e-17, whose direction is meaningless.
    cosine = scale * size / length if length > 1e-12 * size else float("nan")
    return Agreement(
        bias=float((found.mean - target).norm()) / size, scale=scale, cosine=cosine, noise=found.variance**0.5 / size
    )
