"""The tables of docs/oracle.md: the expected gradient of every loss, advantage, KL estimate and correction.

The numbers come from small problems with random rewards and policies. A bias of 0 holds for any problem; other numbers
show how large a bias can be, not how large it is elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import Advantages
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.losses.kl import (
    KL_ESTIMATORS,
    importance_corrected,
)
from prefrl.losses.policy.losses import POLICY_LOSSES, PolicyLoss
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.losses.policy.tokens import PolicyTokens, TokenLoss
from prefrl.losses.truncation import Truncation
from prefrl.options.params import Params
from prefrl.options.policy import LossType, Reduction
from prefrl.scripts.oracle.distillation import (
    FORMS,
    SAMPLERS,
    Form,
    full,
    later_tokens,
    log_ratio,
    problems,
    reference,
    sequence,
)
from prefrl.scripts.oracle.exact import (
    Agreement,
    ObjectiveName,
    Problem,
    Samples,
    agreement,
    estimate,
    every_batch,
    exact_gradient,
)
from prefrl.scripts.oracle.late import late_forms, problem_of_versions
from prefrl.scripts.oracle.recipe import (
    STEPS,
    PerToken,
    Recipe,
    centered_turns,
    credit_of_turns,
    one_prompt,
    reinforce_loss,
    row_advantages,
    row_total,
    sampling_weights,
    selection,
    silent,
    token_advantages,
    two_prompts,
    whiten,
)

# Hyperparameters that differ from their defaults, so that the small problem reaches the bounds; by the name of the
# loss or estimator. All losses that have an epsilon_high get the same one.
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "aipo": {"rho": 1.2},
    "kl_cov": {"ratio": 0.3, "coef": 0.1},
    "clip_cov": {"ratio": 0.3, "lb": 0.0},
    "gae": {"lam": 1.0},
}
EPSILON_HIGH = 0.28
P = TypeVar("P", bound=Params)
_NO_CLIP = {"epsilon": 1.0, "epsilon_high": 1e6}
# Smaller values are 0 up to rounding.
_ZERO = 1e-10


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table: a name, and a cell for each of the other headings."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableOfLines:
    """A table of the docs."""

    headings: tuple[str, ...]  # of the name column and of the cells
    lines: Callable[[], Iterator[Line]]

    def markdown(self) -> str:
        """The table as Markdown."""
        rows = [self.headings, ("---",) * len(self.headings), *((line.name, *line.cells) for line in self.lines())]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _agree(
    problem: Problem, recipe: Recipe, *, objective: ObjectiveName = "reward", group_size: int = 2, stacked: bool = True
) -> Agreement:
    sign = -1 if objective == "reward" else 1  # losses minimize minus the reward
    found = estimate(every_batch(problem, group_size=group_size), recipe, stacked=stacked)
    return agreement(found, sign * exact_gradient(problem, objective))


def _number(value: float) -> str:
    """Format with two digits: more would depend on the machine's rounding."""
    return "0" if abs(value) < _ZERO else f"{value:.2g}"


def _bias(found: Agreement) -> str:
    return _number(found.bias)


def _cosine(found: Agreement) -> str:
    return _decimals(found.cosine)


def _decimals(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"  # no minus before a zero


def _three(found: Agreement) -> tuple[str, ...]:
    """Scale, the bias in direction that no rescaling removes, and noise."""
    bent = max(0.0, 1 - found.cosine**2) ** 0.5
    # The square root amplifies rounding errors, so the threshold is larger than `_ZERO`.
    return _number(found.scale), "0" if bent < 1e-6 else _number(bent), _number(found.noise)


def params_of(name: str, kind: type[P], **changes: Any) -> P:
    """The hyperparameters of a loss or an estimator in the tables."""
    high = {"epsilon_high": EPSILON_HIGH} if "epsilon_high" in kind.names() else {}
    return kind(**{**high, **HYPERPARAMETERS.get(name, {}), **changes})


def _policy(name: str, row: PolicyLoss[Any], **changes: Any) -> Callable[[PolicyTokens], TokenLoss]:
    params = params_of(name, row.params, **changes)
    return lambda tokens: row.function(tokens, params)


def _estimator(name: str, **changes: Any) -> Callable[[Any], Advantages]:
    row = ADVANTAGES[name]
    params = params_of(name, row.params, **changes)
    return lambda scored: row.function(scored, params)


def _advantages(name: str, **changes: Any) -> PerToken:
    level = ADVANTAGES[name].level
    return (row_advantages if level == "row" else token_advantages)(_estimator(name, **changes))


# Name in the table, estimator, changed hyperparameters, and whether it uses statistics of the whole batch.
_ESTIMATORS: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("`rloo`", "rloo", {}, False),
    ("`grpo`, `scale_rewards=none`", "grpo", {"scale_rewards": "none"}, False),
    ("`grpo`, `scale_rewards=group`", "grpo", {"scale_rewards": "group"}, False),
    ("`grpo`, `scale_rewards=batch`", "grpo", {"scale_rewards": "batch"}, True),
    ("`grpo`, `normalize_then_sum`", "grpo", {"multi_objective_aggregation": "normalize_then_sum"}, True),
    ("`remax`", "remax", {}, False),
    ("`opo`", "opo", {}, False),
    ("`gpg`", "gpg", {}, True),
    ("`grpo_passk`, `scale_rewards=none`", "grpo_passk", {"scale_rewards": "none"}, False),
    ("`maxrl`", "maxrl", {}, False),
    ("`reinforce_plus_plus_baseline`", "reinforce_plus_plus_baseline", {}, False),
    ("`reinforce_plus_plus`", "reinforce_plus_plus", {}, False),
    ("`reinforce_plus_plus`, `gamma=0.9`", "reinforce_plus_plus", {"gamma": 0.9}, False),
    ("`gae`, any critic", "gae", {}, False),
    ("`gae`, `lam=0.9`, wrong critic", "gae", {"lam": 0.9}, False),
    ("`optimal_token_baseline`", "optimal_token_baseline", {}, False),
)


def advantage_lines() -> Iterator[Line]:
    """Advantages with REINFORCE: on-policy, and off-policy weighted by the exact ratio of rows."""
    problem = two_prompts()
    yield Line("the reward itself", _advantage_cells(problem, Recipe(reinforce_loss), stacked=True))
    for name, estimator, changes, is_of_batch in _ESTIMATORS:
        recipe = Recipe(reinforce_loss, _advantages(estimator, **changes))
        yield Line(name, _advantage_cells(problem, recipe, stacked=not is_of_batch))
    recipe = Recipe(reinforce_loss, token_advantages(_estimator("optimal_token_baseline"), is_weighted=True))
    yield Line("`optimal_token_baseline`, given the weights", _advantage_cells(problem, recipe, stacked=True))
    true = replace(problem, critic=problem.exact_critic)
    for lam in (0.0, 1.0):
        recipe = Recipe(reinforce_loss, _advantages("gae", lam=lam))
        yield Line(f"`gae`, `lam={lam:g}`, true critic", _advantage_cells(true, recipe, stacked=True))
    for name in ("reinforce_plus_plus_baseline", "reinforce_plus_plus", "gae"):
        recipe = Recipe(reinforce_loss, whiten(_advantages(name), advantage_epsilon=1e-8))
        yield Line(f"`{name}`, whitened", _advantage_cells(problem, recipe, stacked=False))


def _advantage_cells(problem: Problem, recipe: Recipe, *, stacked: bool) -> tuple[str, ...]:
    away = problem.moved(sampler=STEPS["large step"])
    weighted = replace(recipe, weights=sampling_weights("sequence_truncate"))
    off_policy = _agree(away, weighted, stacked=stacked)
    on_policy = _agree(problem, recipe, stacked=stacked)
    return _bias(on_policy), *_three(on_policy), _bias(off_policy)


def turn_lines() -> Iterator[Line]:
    """Advantages of turns with REINFORCE, on-policy: each token is a turn with a reward of its own."""
    credits = {
        "`rloo`, the reward of the episode at all of its turns": _advantages("rloo"),
        "`turn_advantages`": credit_of_turns(functools.partial(turn_advantages, discount=1.0)),
        "`turn_advantages`, `discount=0.9`": credit_of_turns(functools.partial(turn_advantages, discount=0.9)),
        "rewards centered at each turn, then summed": credit_of_turns(centered_turns),
    }
    for name, credit in credits.items():
        found = _agree(one_prompt(), Recipe(reinforce_loss, credit))
        yield Line(name, (_bias(found), *_three(found)))


def policy_lines() -> Iterator[Line]:
    """Policy losses with the reward as advantage, for samples of an old policy at growing distances."""
    named: dict[Any, list[LossType]] = {}
    for name, row in POLICY_LOSSES.items():
        named.setdefault(row.function, []).append(name)
    for names in named.values():
        text = ", ".join(f"`{name}`" for name in names)
        for level in dict.fromkeys(level for name in names for level in POLICY_LOSSES[name].levels):
            yield _policy_line(text, names[0], level)
    without: tuple[tuple[LossType, dict[str, Any]], ...] = (
        ("grpo", _NO_CLIP),
        ("cispo", _NO_CLIP),
        ("aipo", {"rho": 1e6}),
    )
    for name, changes in without:
        for level in ("token", "sequence_sum"):
            yield _policy_line(f"`{name}` without bounds", name, level, **changes)


def _policy_line(text: str, name: LossType, level: Any, **changes: Any) -> Line:
    row = POLICY_LOSSES[name]
    select = None if row.selection is None else selection(row, params_of(name, row.params))
    recipe = Recipe(_policy(name, row, **changes), level=level, reduction=_whole_rows(row, level), selected=select)
    found = [
        _agree(one_prompt().moved(sampler=step, old=step), recipe, stacked=select is None) for step in STEPS.values()
    ]
    far = found[-1]
    return Line(text, (f"`{level}`", *map(_bias, found), _cosine(far), _number(far.noise)))


def _whole_rows(row: PolicyLoss[Any], level: str) -> Reduction:
    """The reduction that counts each row once: a mean for surrogates with a row ratio at every token, else a sum."""
    is_surrogate = row.function is POLICY_LOSSES["grpo"].function or row.function is POLICY_LOSSES["sapo"].function
    return "sequence_mean" if level == "sequence_sum" and is_surrogate else "sequence_sum"


def reduction_lines() -> Iterator[Line]:
    """Reductions of REINFORCE with the reward as advantage, on-policy."""
    for reduction in ("sequence_sum", "constant", "token", "sequence_mean"):
        recipe = Recipe(reinforce_loss, reduction=reduction, constant=3.0 if reduction == "constant" else None)
        found = _agree(two_prompts(), recipe)
        yield Line(f"`{reduction}`" + (" of 3" if reduction == "constant" else ""), (_bias(found), *_three(found)))


def correction_lines() -> Iterator[Line]:
    """Off-policy corrections of REINFORCE with `rloo` advantages, for samples of a policy that is not the old one."""
    yield Line("none", _correction_cells(None))
    for bounds in ({}, {"high": 1.2}, {"low": 0.8, "high": 1.2}):
        for name, row in OFF_POLICY_CORRECTIONS.items():
            if not bounds and row.bound == "mask":
                continue  # without bounds the two are the same
            words = ", ".join(f"{side} {value:g}" for side, value in bounds.items()) or "no bounds"
            label = name.removesuffix("_truncate") if not bounds else name
            yield Line(f"`{label}`, {words}", _correction_cells(sampling_weights(name, **bounds)))


def _correction_cells(weights: PerToken | None, **cuts: Truncation) -> tuple[str, ...]:
    recipe = Recipe(reinforce_loss, _advantages("rloo"), weights=weights)
    found = [_agree(one_prompt().moved(sampler=step).replace(**cuts), recipe) for step in STEPS.values()]
    far = found[-1]
    return *map(_bias, found), _cosine(far), _number(far.noise)


def truncation_lines() -> Iterator[Line]:
    """REINFORCE with `rloo` advantages for truncated samples, against the expected reward of the truncated policy."""
    ratio = sampling_weights("sequence_truncate")
    for name, cuts in (("top_k=2", Truncation(top_k=2)), ("top_p=0.7", Truncation(top_p=0.7))):
        for scored, which in ((cuts, "exact"), (Truncation(), "softmax")):
            for weights, how in ((None, "no weights"), (ratio, "weighted")):
                cells = _correction_cells(weights, sampled=cuts, scored=scored)
                yield Line(f"`{name}`, `{which}`, {how}", cells)


def kl_lines() -> Iterator[Line]:
    """KL estimates as losses and in the reward: on-policy, and off-policy with and without importance weights."""
    for name, row in KL_ESTIMATORS.items():

        def value(samples: Samples, function: Any = row.function) -> Tensor:
            found: Tensor = function(samples.logprobs, reference(samples))
            return found

        def weighted(samples: Samples, name: str = name) -> Tensor:
            return importance_corrected(samples.logprobs, reference(samples), log_ratio(samples), kl_estimator=name)

        yield Line(f"`{name}`", (*_loss_cells(value), *_reward_cells(value)))
        yield Line(f"`{name}`, weighted", (*_loss_cells(weighted), "", ""))
    yield Line("`full`", (*_loss_cells(full), *_reward_cells(full)))
    for cap in (None, 1.1):
        words = "no cap" if cap is None else f"cap {cap:g}"
        yield Line(f"`sequence`, {words}", (*_loss_cells(functools.partial(sequence, cap=cap)), "", ""))
    yield Line("`later_tokens`", (*_loss_cells(later_tokens), "", ""))
    yield Line("`later_tokens`, one completion", (*_loss_cells(later_tokens, group_size=1), "", ""))


def _loss_cells(value: PerToken, *, group_size: int = 2) -> tuple[str, ...]:
    """Bias against the divergence of tokens and of completions, on-policy and a large step away; and the noise."""
    recipe, problem = Recipe(silent, term=value), one_prompt()
    away = problem.moved(sampler=STEPS["large step"])
    cells = [
        _agree(p, recipe, objective=objective, group_size=group_size)
        for objective in _KL_OBJECTIVES
        for p in (problem, away)
    ]
    return *map(_bias, cells), _number(_agree(problem, recipe, objective="kl", group_size=group_size).noise)


_KL_OBJECTIVES: tuple[ObjectiveName, ...] = ("token_kl", "kl")


def _reward_cells(value: PerToken) -> tuple[str, ...]:
    """Bias and noise as a part of the reward, against the divergence of completions."""
    total = row_total(value)
    found = _agree(one_prompt(), Recipe(reinforce_loss, lambda samples: -total(samples)), objective="kl")
    return _bias(found), _number(found.noise)


_DIVERGENCES: dict[ObjectiveName, str] = {"kl": "reverse KL", "forward_kl": "forward KL", "jensen_shannon": "JSD"}


def distillation_lines() -> Iterator[Line]:
    """Forms of distillation against a divergence of completions: ranges over four problems, for three samplers."""
    of_all = problems()
    for form in FORMS:
        found = {name: [_form(form, problem, move(problem)) for problem in of_all] for name, move in SAMPLERS.items()}
        # Two completions that do not affect each other have half the variance of one.
        noise = [each.noise if form.reads_group else each.noise / 2**0.5 for each in found["student"]]
        pairs = [
            (_range(_number, [a.bias for a in each]), _range(_decimals, [a.cosine for a in each]))
            for each in found.values()
        ]
        yield Line(form.name, (_DIVERGENCES[form.objective], *itertools.chain(*pairs), _range(_number, noise)))


def _form(form: Form, problem: Problem, sampled: Problem) -> Agreement:
    samples = every_batch(sampled, group_size=2 if form.reads_group else 1)
    return agreement(estimate(samples, form.recipe), exact_gradient(problem, form.objective))


def late_lines() -> Iterator[Line]:
    """Groups that finish late: from the policy itself, and from two versions of the weights, away from it."""
    here, away = (0.0, 0.0), (STEPS["large step"], STEPS["small step"])
    for name, form in late_forms(*away).items():
        fresh = late_forms(*here)[name].agreement(problem_of_versions(*here))
        old = form.agreement(problem_of_versions(*away))
        yield Line(name, (_bias(fresh), _bias(old), _cosine(old), _number(old.noise)))


def _range(cell: Callable[[float], str], values: Sequence[float]) -> str:
    """The smallest and the largest number."""
    ends = list(dict.fromkeys(cell(value) for value in (min(values), max(values))))
    return " to ".join(ends)


TABLES: dict[str, TableOfLines] = {
    "advantages": TableOfLines(
        ("advantage", "bias", "scale", "bent", "noise", "bias off-policy, weighted"), advantage_lines
    ),
    "turns": TableOfLines(("advantage", "bias", "scale", "bent", "noise"), turn_lines),
    "policy": TableOfLines(
        ("loss", "level", *(f"bias, {step}" for step in STEPS), "cosine, large step", "noise, large step"),
        policy_lines,
    ),
    "reductions": TableOfLines(("reduction", "bias", "scale", "bent", "noise"), reduction_lines),
    "corrections": TableOfLines(
        ("correction", *(f"bias, {step}" for step in STEPS), "cosine, large step", "noise, large step"),
        correction_lines,
    ),
    "truncation": TableOfLines(
        ("log-probs", *(f"bias, {step}" for step in STEPS), "cosine, large step", "noise, large step"),
        truncation_lines,
    ),
    "kl": TableOfLines(
        (
            "estimate",
            "loss: tokens",
            "off-policy",
            "loss: completions",
            "off-policy",
            "noise",
            "in the reward: completions",
            "noise",
        ),
        kl_lines,
    ),
    "late": TableOfLines(
        ("groups", "bias, on-policy", "bias, two versions", "cosine, two versions", "noise, two versions"), late_lines
    ),
    "distillation": TableOfLines(
        (
            "form",
            "compared with",
            *(f"{what}, {samples}" for samples in SAMPLERS for what in ("bias", "cosine")),
            "noise",
        ),
        distillation_lines,
    ),
}
