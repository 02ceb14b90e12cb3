"""Checks of a loss beyond the right expected gradient, on a few made-up tokens.

Rows are ragged, numbers are float64, and some tokens are not trainable, like those of tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from prefrl.losses.advantage.estimators import Advantages, ScoredRows, ScoredTokens
from prefrl.losses.policy.tokens import PolicyTokens, TokenLoss
from prefrl.options.policy import ImportanceLevel

AdvantageLevel = Literal["row", "token"]
PolicyFunction = Callable[[PolicyTokens], TokenLoss]
AdvantageFunction = Callable[..., Advantages]
KLFunction = Callable[["Tensor", "Tensor"], "Tensor"]

_LENGTHS = torch.tensor([3, 1, 4, 2, 5, 2])
_GROUPS = torch.tensor([7, 7, 7, 2, 2, 2])
_ROWS = torch.arange(6)
_REVERSED = _ROWS.flip(0)
_POISON = (float("nan"), 1e30, -1e30)
_EXTREME = 100.0  # nats: e^100 overflows float32


@dataclass(frozen=True, slots=True)
class Check:
    """One property, and whether it holds."""

    name: str
    holds: bool
    is_needed: bool  # False: a correct loss may lack the property, so the result is only reported


@dataclass(frozen=True, slots=True)
class _Result:
    loss: Tensor  # [N]
    gradient: Tensor  # [N] of the sum over trainable tokens, with respect to the log-probs

    def at(self, positions: Tensor) -> _Result:
        return _Result(self.loss[positions], self.gradient[positions])


def check_policy_loss(function: PolicyFunction, *, level: ImportanceLevel) -> list[Check]:
    """Check the properties of a policy loss.

    Args:
        function: `function(tokens) -> TokenLoss`, with its hyperparameters bound.
        level: The level of the importance ratio.

    Raises:
        TypeError: It does not return a `TokenLoss`.
        ValueError: The loss is not [N] in the dtype of the log-probs, or has no gradient.
    """
    tokens = _policy_tokens(level)
    whole, mask = _policy_result(function, tokens), tokens.trainable

    def is_same_for(rows: Tensor) -> bool:
        positions = _positions(tokens.row_index, rows)
        found = _policy_result(function, _policy_rows(tokens, rows))
        return _is_same(found, whole.at(positions), mask[positions])

    poisoned = [_policy_result(function, _poisoned_tokens(tokens, value)) for value in _POISON]
    return [
        Check("the order of rows does not matter", is_same_for(_REVERSED), True),
        Check("the split of rows into batches does not matter", all(map(is_same_for, torch.split(_ROWS, 2))), True),
        Check(
            "tokens that are not trainable are not read", all(_is_same(other, whole, mask) for other in poisoned), True
        ),
        Check("raises tokens with a positive advantage, lowers the others", _has_right_sign(function, tokens), True),
        Check("is finite at ratios of e^100 and e^-100", _is_finite_at_extremes(function, tokens), False),
    ]


def _policy_tokens(level: ImportanceLevel) -> PolicyTokens:
    row_index = _ROWS.repeat_interleave(_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, len(row_index), dtype=torch.float64, generator=generator)
    logprobs = -1.0 - numbers[0].abs()
    trainable = torch.ones_like(row_index, dtype=torch.bool)
    trainable[torch.tensor([1, 5, 8, 12])] = False
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    return PolicyTokens(
        logprobs=logprobs,
        old_logprobs=logprobs + 0.3 * numbers[1],
        advantages=signs[row_index] * (0.1 + numbers[2].abs()),
        trainable=trainable,
        row_index=row_index,
        num_rows=len(_LENGTHS),
        level=level,
        cov_tokens=numbers[2] > 0.5,
    )


def _positions(row_index: Tensor, rows: Tensor) -> Tensor:
    """Positions of the tokens of some rows, one row after the other."""
    return torch.cat([(row_index == row).nonzero().squeeze(1) for row in rows])


def _policy_rows(tokens: PolicyTokens, rows: Tensor) -> PolicyTokens:
    positions = _positions(tokens.row_index, rows)
    per_token = ("logprobs", "old_logprobs", "advantages", "trainable", "cov_tokens")
    return dataclasses.replace(
        tokens,
        **{name: getattr(tokens, name)[positions] for name in per_token},
        row_index=torch.arange(len(rows)).repeat_interleave(_LENGTHS[rows]),
        num_rows=len(rows),
    )


def _poisoned_tokens(tokens: PolicyTokens, value: float) -> PolicyTokens:
    # Advantages are finite everywhere, because a row's advantage is set at all of its tokens.
    finite = 1e30 if value != value else value
    poison = {"logprobs": value, "old_logprobs": value, "advantages": finite}
    changes: dict[str, Any] = {
        name: getattr(tokens, name).where(tokens.trainable, value) for name, value in poison.items()
    }
    return dataclasses.replace(tokens, **changes)


def _policy_result(function: PolicyFunction, tokens: PolicyTokens) -> _Result:
    leaf = tokens.logprobs.clone().requires_grad_()
    found = function(dataclasses.replace(tokens, logprobs=leaf))
    if not isinstance(found, TokenLoss):
        raise TypeError(f"returns {type(found).__name__}: a policy loss returns a TokenLoss(loss=[N], stats={{}})")
    return _with_gradient(found.loss, leaf, tokens.trainable)


def _with_gradient(loss: Tensor, leaf: Tensor, mask: Tensor) -> _Result:
    check_output("loss", loss, leaf)
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it must be computed from the log-probs, and these must not be detached"
        )
    (gradient,) = torch.autograd.grad(loss.where(mask, 0.0).sum(), leaf)
    return _Result(loss.detach(), gradient)


def check_output(name: str, found: Tensor, expected: Tensor) -> None:
    """Reject a result whose shape or dtype differs from that of the input it belongs to.

    Raises:
        ValueError: The shape or dtype differs.
    """
    for what, ours, theirs in (
        ("shape", tuple(found.shape), tuple(expected.shape)),
        ("dtype", found.dtype, expected.dtype),
    ):
        if ours != theirs:
            raise ValueError(f"the {name} has {what} {ours}: must be {theirs}, like the input")


def _is_same(found: _Result, expected: _Result, mask: Tensor) -> bool:
    return _is_close(found.loss[mask], expected.loss[mask]) and _is_close(
        found.gradient[mask], expected.gradient[mask]
    )


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-10, atol=1e-10)


def _is_finite_at_extremes(function: PolicyFunction, tokens: PolicyTokens) -> bool:
    likely = torch.zeros_like(tokens.logprobs, dtype=torch.float32)
    unlikely = likely - _EXTREME
    single = dataclasses.replace(tokens, logprobs=likely, old_logprobs=likely, advantages=tokens.advantages.float())
    for logprobs, old_logprobs in ((likely, unlikely), (unlikely, likely)):
        changed = dataclasses.replace(single, logprobs=logprobs, old_logprobs=old_logprobs)
        result = _policy_result(function, changed)
        if not all(bool(part[tokens.trainable].isfinite().all()) for part in (result.loss, result.gradient)):
            return False
    return True


def _has_right_sign(function: PolicyFunction, tokens: PolicyTokens) -> bool:
    on_policy = dataclasses.replace(tokens, old_logprobs=tokens.logprobs)
    gradient = _policy_result(function, on_policy).gradient[tokens.trainable]
    pushes = -gradient * tokens.advantages[tokens.trainable].sign()
    return bool((pushes >= 0).all() and (pushes > 0).any())


def check_advantages(function: AdvantageFunction, *, level: AdvantageLevel) -> list[Check]:
    """Check the properties of an advantage estimator.

    Args:
        function: `function(scored) -> Advantages`, with its hyperparameters bound; `scored` is `ScoredRows` at level
            "row", else `ScoredTokens`.
        level: See above.

    Raises:
        TypeError: It does not return `Advantages`.
        ValueError: The values are not [B] or [N] in the dtype of the rewards.
    """
    rewards = torch.tensor([1.0, 0.25, 2.0, 0.5, 3.0, 0.75], dtype=torch.float64)
    scored = _scored(level, rewards)
    whole = _advantages(function, scored)

    def is_same_for(rows: Tensor) -> bool:
        found = _advantages(function, _scored(level, rewards, rows))
        return _is_close(found, whole[rows if level == "row" else _positions(_token_rows(), rows)])

    checks = [
        Check("the order of rows does not matter", is_same_for(_REVERSED), True),
        Check("groups do not affect each other", all(map(is_same_for, torch.split(_ROWS, 3))), False),
        Check(
            "a row without a reward gets 0 and does not affect other rows",
            _leaves_out_nan(function, level, rewards),
            True,
        ),
        Check("is finite where all rewards are equal", _is_finite_without_spread(function, level), True),
    ]
    if level == "row":
        return checks
    mask = _policy_tokens("token").trainable
    poisoned = [_advantages(function, _poisoned_scores(scored, value)) for value in _POISON]
    is_ignored = all(_is_close(other[mask], whole[mask]) for other in poisoned)
    return [*checks, Check("tokens that are not trainable are not read", is_ignored, True)]


def _token_rows() -> Tensor:
    return _policy_tokens("token").row_index


def _scored(level: AdvantageLevel, rewards: Tensor, rows: Tensor = _ROWS) -> ScoredRows | ScoredTokens:
    tokens = _policy_rows(_policy_tokens("token"), rows)
    if level == "row":
        lengths = torch.zeros(len(rows), dtype=torch.long).index_add(0, tokens.row_index, tokens.trainable.long())
        return ScoredRows(
            rewards=rewards[rows][:, None],
            weights=rewards.new_ones(1),
            groups=_GROUPS[rows],
            lengths=lengths,
            greedy=torch.full_like(rewards, 0.3)[rows],
        )
    last = torch.tensor(
        [int((tokens.trainable & (tokens.row_index == row)).nonzero().max()) for row in range(len(rows))]
    )
    return ScoredTokens(
        rewards=torch.zeros_like(tokens.logprobs).index_copy(0, last, rewards[rows]),
        trainable=tokens.trainable,
        row_index=tokens.row_index,
        num_rows=len(rows),
        groups=_GROUPS[rows],
        values=tokens.old_logprobs + 1.0,
        logprobs=tokens.logprobs,
        log_collision=tokens.logprobs + 0.1,
    )


def _advantages(function: AdvantageFunction, scored: ScoredRows | ScoredTokens) -> Tensor:
    found = function(scored)
    if not isinstance(found, Advantages):
        raise TypeError(f"returns {type(found).__name__}: an estimator returns Advantages(values=..., ...)")
    check_output("values", found.values, scored.rewards[:, 0] if isinstance(scored, ScoredRows) else scored.rewards)
    return found.values


def _poisoned_scores(scored: ScoredRows | ScoredTokens, value: float) -> ScoredTokens:
    assert isinstance(scored, ScoredTokens)
    names = ("rewards", "values", "logprobs", "log_collision")
    return dataclasses.replace(
        scored, **{name: getattr(scored, name).where(scored.trainable, value) for name in names}
    )


def _leaves_out_nan(function: AdvantageFunction, level: AdvantageLevel, rewards: Tensor) -> bool:
    rewards = rewards.clone()
    rewards[4] = torch.nan
    found = _advantages(function, _scored(level, rewards))
    others = torch.tensor([0, 1, 2, 3, 5])
    expected = _advantages(function, _scored(level, rewards, others))
    if level == "token":
        row, others = _positions(_token_rows(), torch.tensor([4])), _positions(_token_rows(), others)
    else:
        row = torch.tensor([4])
    return bool((found[row] == 0).all()) and _is_close(found[others], expected)


def _is_finite_without_spread(function: AdvantageFunction, level: AdvantageLevel) -> bool:
    levels = (torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64))
    return all(bool(_advantages(function, _scored(level, rewards)).isfinite().all()) for rewards in levels)


def check_kl(function: KLFunction) -> list[Check]:
    """Check the properties of a KL estimator.

    Raises:
        TypeError: It does not return a tensor.
        ValueError: The result is not [N] in the dtype of the log-probs, or has no gradient.
    """
    tokens = _policy_tokens("token")
    logprobs, reference = tokens.logprobs, tokens.old_logprobs
    whole = _kl_result(function, logprobs, reference)
    every = torch.ones_like(logprobs, dtype=torch.bool)

    def is_same_for(positions: Tensor) -> bool:
        found = _kl_result(function, logprobs[positions], reference[positions])
        return _is_same(found, whole.at(positions), every[positions])

    places = torch.arange(len(logprobs))
    extremes = torch.tensor([0.0, -_EXTREME])
    ends = _kl_result(function, extremes, extremes.flip(0))
    is_finite = all(bool(part.isfinite().all()) for part in (ends.loss, ends.gradient))
    agreeing = _kl_result(function, logprobs, logprobs).loss
    return [
        Check(
            "tokens do not affect each other",
            all(map(is_same_for, [places.flip(0), *torch.split(places, 1)])),
            True,
        ),
        Check("is 0 where the policies agree", _is_close(agreeing, torch.zeros_like(agreeing)), True),
        Check("is finite at ratios of e^100 and e^-100", is_finite, False),
    ]


def _kl_result(function: KLFunction, logprobs: Tensor, reference: Tensor) -> _Result:
    leaf = logprobs.clone().requires_grad_()
    found = function(leaf, reference)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"returns {type(found).__name__}: a KL estimator returns a tensor [N]")
    return _with_gradient(found, leaf, torch.ones_like(leaf, dtype=torch.bool))
