"""Forms of distillation that the oracle compares: the losses of prefrl, and those of other libraries.

The gradient of a form is compared with that of a divergence of whole completions. The functions under test are those
of prefrl; only what other libraries do differently is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prefrl.losses.advantage.tokens import reinforce_plus_plus, to_go
from prefrl.losses.kl import completion_kl, divergence, full_kl, k1, sequence_kl
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.top_logprobs import TopLogprobs
from prefrl.options.policy import SequenceKLParams
from prefrl.options.policy_gradient import DiscountParams
from prefrl.scripts.oracle.exact import ObjectiveName, Problem, Samples, make_problem
from prefrl.scripts.oracle.recipe import PerToken, Recipe, reinforce_loss, sampling_weights, silent, token_advantages

CLAMP = 0.5  # nats, bound of the log-ratio: so low that these small problems reach it
TOP_K = 2  # tokens that a truncated teacher keeps, of the four of the vocabulary


@dataclass(frozen=True, slots=True)
class Form:
    """A loss that distills, and the divergence of whole completions that it is compared with."""

    name: str
    recipe: Recipe
    objective: ObjectiveName = "kl"
    reads_group: bool = False  # whether the completions of a prompt affect each other


def problems() -> list[Problem]:
    """Four tokens, completions of up to three: 40 of them. Rewards are 0. All prefixes share twelve parameters."""
    made = [make_problem(num_prompts=1, num_tokens=4, length=3, num_features=12, seed=seed) for seed in range(4)]
    return [problem.replace(rewards=torch.zeros_like(problem.rewards)) for problem in made]


SAMPLERS: dict[str, Callable[[Problem], Problem]] = {
    "student": lambda problem: problem,
    "other": lambda problem: problem.moved(sampler=1.0),
    "teacher": lambda problem: problem.replace(sampler=problem.reference),
}


def reference(samples: Samples) -> Tensor:
    """[N] nats, log-probs of the sampled tokens under the teacher."""
    return samples.logprobs_of(samples.problem.reference)


def log_ratio(samples: Samples) -> Tensor:
    """[N] nats, log-probs of the sampled tokens under the policy minus those under the sampler; gradient flows."""
    return samples.logprobs - samples.logprobs_of(samples.problem.sampler)


def of_tokens(samples: Samples, *, beta: float) -> Tensor:
    """[N] nats, the divergence of the distributions at each token."""
    return divergence(samples.leaf, _teacher(samples), beta=beta)


def full(samples: Samples) -> Tensor:
    """[N] nats, the reverse KL of the distributions at each token."""
    return full_kl(samples.leaf, _teacher(samples))


def later_tokens(samples: Samples) -> Tensor:
    """[N] nats, the reverse KL of completions; a group of one row has no baseline."""
    groups, longest = samples.groups.tolist(), samples.problem.tree.length
    return completion_kl(full(samples), log_ratio(samples), samples.trainable, samples.row_index, groups, longest)


def sequence(samples: Samples, *, cap: float | None = None) -> Tensor:
    """[N] nats, the reverse KL of completions, estimated from the sampled tokens."""
    layout = (samples.trainable, samples.row_index, samples.num_rows)
    params = SequenceKLParams(weight_cap=cap)
    return sequence_kl(samples.logprobs, reference(samples), log_ratio(samples), *layout, params)


def _teacher(samples: Samples) -> Tensor:
    """[N, V] nats, the teacher's log-probs of all tokens."""
    return samples.problem.table(samples.problem.reference)[samples.states]


def _sampled(samples: Samples) -> Tensor:
    return k1(samples.logprobs, reference(samples))


def _sampled_by_sampler(samples: Samples) -> Tensor:
    """The log-ratio of the policy that sampled to the teacher."""
    return k1(samples.logprobs_of(samples.problem.sampler), reference(samples))


def _later_sampled(samples: Samples) -> Tensor:
    """[N] nats, the reverse KL at each token, and the log-ratios of later tokens as its credit; with token ratios."""
    log_ratios = _sampled(samples).detach()
    later = to_go(log_ratios, samples.row_index, discount=1.0) - log_ratios
    return sampling_weights("token_truncate")(samples) * (full(samples) + later * samples.logprobs)


def _clamped(samples: Samples) -> Tensor:
    return _sampled(samples).clamp(-CLAMP, CLAMP)


def of_kept(samples: Samples, *, beta: float, k: int) -> Tensor:
    """[N] nats, the divergence from the teacher's k likeliest tokens and one bucket of all others."""
    logprobs, ids = _teacher(samples).topk(k)
    head = Head(torch.eye(samples.leaf.size(1), dtype=torch.float64))  # log-probs are logits, too
    reference = TopLogprobs(ids, logprobs, beta)
    scores = chunked_logprobs(samples.leaf, samples.tokens, head, temperature=1.0, want=(), reference=reference)
    return scores.divergence


def _kept_only(samples: Samples) -> Tensor:
    """[N] nats, the terms of the forward KL for the teacher's likeliest tokens; the others are left out."""
    teacher, kept = _teacher(samples).topk(TOP_K)
    return (teacher.exp() * (teacher - samples.leaf.gather(1, kept))).sum(1)


def _in_reward(penalty: PerToken, *, gamma: float, ratio: Literal["token", "sequence"]) -> Recipe:
    """REINFORCE with minus the penalty of a token as its reward, weighted by the ratio of the token or of the row."""
    credit = token_advantages(lambda scored: reinforce_plus_plus(scored, DiscountParams(gamma=gamma)), penalty=penalty)
    return Recipe(reinforce_loss, credit, weights=sampling_weights(f"{ratio}_truncate"))


def _loss(value: PerToken) -> Recipe:
    return Recipe(silent, term=value)


FORMS: tuple[Form, ...] = (
    Form("`later_tokens: true`", _loss(later_tokens), reads_group=True),
    Form("`later_tokens: true`, no baseline", _loss(later_tokens)),
    Form("`later_tokens: false`", _loss(full)),
    Form("`sequence`", _loss(sequence)),
    Form("own token in full, later ones sampled", _loss(_later_sampled)),
    Form("`k1` in the reward", _in_reward(_sampled, gamma=1.0, ratio="sequence")),
    Form("`k1` in the reward, `gamma=0`", _in_reward(_sampled, gamma=0.0, ratio="token")),
    Form("`k1` of the sampler, `gamma=0`", _in_reward(_sampled_by_sampler, gamma=0.0, ratio="token")),
    Form("`k1` clamped, `gamma=0`", _in_reward(_clamped, gamma=0.0, ratio="token")),
    Form("`beta: 0`", _loss(functools.partial(of_tokens, beta=0.0)), "forward_kl"),
    Form("`beta: 0`, top 4 of 4", _loss(functools.partial(of_kept, beta=0.0, k=4)), "forward_kl"),
    Form("`beta: 0`, top 2 and a tail", _loss(functools.partial(of_kept, beta=0.0, k=TOP_K)), "forward_kl"),
    Form("`beta: 1`, top 2 and a tail", _loss(functools.partial(of_kept, beta=1.0, k=TOP_K))),
    Form("top 2 without a tail", _loss(_kept_only), "forward_kl"),
    Form("`beta: 0.5`", _loss(functools.partial(of_tokens, beta=0.5)), "jensen_shannon"),
)
