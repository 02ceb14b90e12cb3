"""Policy losses, KL terms and advantages on plain tensors, for training loops of any library.

    rows = TokenRows(mask)                                            # [B, T] bool: the tokens that have a loss
    token_loss = policy_loss("dapo", rows, logprobs, old_logprobs, advantages, epsilon_high=0.28).loss
    token_loss = token_loss + 0.01 * kl("k3", rows, logprobs, ref_logprobs)
    step = summed(rows, token_loss, reduction_of("dapo"))
    loss = step.total / step.items                                    # both over all micro-batches and ranks

Tensors are padded, [B, T], or flat, [N]; results have the shape of the mask. Where the mask is False nothing is read,
NaN and infinity included, and results are 0. Hyperparameters are keyword arguments with the names and defaults of the
options `loss_kwargs`, `kl_kwargs` and `advantage_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from prefrl.errors import ConfigError
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import (
    Advantages,
    ScoredRows,
    ScoredTokens,
    clip_advantages,
    moments,
    whitened,
)
from prefrl.losses.kl import KL_ESTIMATORS, importance_corrected, sequence_kl
from prefrl.losses.per_token import check_same_shape, row_items, score_dtype, token_weights, trainable_per_row
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, ImportanceWeights, importance_weights
from prefrl.losses.policy.tokens import PolicyTokens, TokenLoss, covariance, token_keys
from prefrl.options.names import nearest
from prefrl.options.params import Params
from prefrl.options.policy import KL_PARAMS, ImportanceLevel, PolicyLossParams, Reduction, SequenceKLParams
from prefrl.options.policy_gradient import AdvantageParams

# Added to the standard deviation of advantages that are whitened.
WHITENING_EPSILON = 1e-4

_T = TypeVar("_T")


class TokenRows:
    """Which tokens have a loss, and which rows they belong to.

    Args:
        mask: [B, T] bool, or [N] of rows that are laid end to end: True for the tokens that the policy chose.
        row_index: [N] int64, row of each token of a flat batch, in 0 .. B-1, never decreasing; None: padded.
        num_rows: B of a flat batch; None: padded.

    Raises:
        ValueError: The mask has another shape, or is not bool.
    """

    def __init__(self, mask: Tensor, row_index: Tensor | None = None, num_rows: int | None = None) -> None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask has dtype {mask.dtype}: needs to be bool. Use mask.bool().")
        if mask.dim() == 2 and row_index is None and num_rows is None:
            num_rows, length = mask.shape
            row_index = torch.arange(num_rows, device=mask.device).repeat_interleave(length)
        elif mask.dim() != 1 or row_index is None or num_rows is None:
            raise ValueError(
                f"mask {tuple(mask.shape)}: needs to be [B, T] alone, or [N] with row_index [N] and num_rows."
            )
        self.mask = mask
        self.trainable = mask.flatten()  # [N]; padding is a token without a loss
        check_same_shape(mask=self.trainable, row_index=row_index)
        self.row_index, self.num_rows = row_index, num_rows

    def read(self, name: str, values: Tensor) -> Tensor:
        """[N] the values, 0 where there is no loss, so that what stands there reaches neither value nor gradient.

        Raises:
            ValueError: The values have another shape than the mask.
        """
        check_same_shape(mask=self.mask, **{name: values})
        return values.flatten().masked_fill(~self.trainable, 0)

    def spread(self, values: Tensor) -> Tensor:
        """The [N] values in the shape of the mask, 0 where there is no loss."""
        return values.masked_fill(~self.trainable, 0).view(self.mask.shape)

    @property
    def lengths(self) -> Tensor:
        """[B] float32, tokens of each row that have a loss."""
        return trainable_per_row(self.trainable, self.row_index, self.num_rows)


def policy_loss(
    loss_type: str,
    rows: TokenRows,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    level: ImportanceLevel = "token",
    cov_tokens: Tensor | None = None,
    **hyperparameters: Any,
) -> TokenLoss:
    """The loss of each token.

    Args:
        loss_type: A name in `POLICY_LOSSES`.
        rows: The tokens.
        logprobs: Nats, log pi; gradient flows.
        old_logprobs: Nats, constants: of the policy before the first update from these samples, or of the sampler.
        advantages: Constants.
        level: Whether a ratio is one token's or one row's, see `PolicyTokens.log_ratio`.
        cov_tokens: Bool, see `covariance_tokens`; for `clip_cov` and `kl_cov` only.
        **hyperparameters: Of the loss.

    Returns:
        Loss and statistics, each in the shape of the mask.

    Raises:
        ConfigError: There is no such loss, level or hyperparameter, or its value is not allowed.
        ValueError: Shapes differ, or `cov_tokens` is missing.
    """
    params = loss_params(loss_type, level, hyperparameters)
    row = POLICY_LOSSES[loss_type]  # type: ignore[index]  # `loss_params` has looked it up
    tokens = PolicyTokens(
        logprobs=rows.read("logprobs", logprobs),
        old_logprobs=rows.read("old_logprobs", old_logprobs),
        advantages=rows.read("advantages", advantages),
        trainable=rows.trainable,
        row_index=rows.row_index,
        num_rows=rows.num_rows,
        level=level,
        cov_tokens=None if cov_tokens is None else rows.read("cov_tokens", cov_tokens),
    )
    found = row.function(tokens, params)
    return TokenLoss(rows.spread(found.loss), {name: rows.spread(each) for name, each in found.stats.items()})


def loss_params(loss_type: str, level: ImportanceLevel, hyperparameters: Mapping[str, Any]) -> PolicyLossParams:
    """The hyperparameters of a policy loss at a level of its ratio.

    Raises:
        ConfigError: There is no such loss, level or hyperparameter, or its value is not allowed.
    """
    row = _row(POLICY_LOSSES, "loss_type", loss_type)
    if level not in row.levels:
        raise ConfigError(f"level={level!r}: with loss_type={loss_type!r}, allowed are {', '.join(row.levels)}.")
    others = dict.fromkeys(PolicyLossParams.names(), "it is a term beside the loss, or a selection of tokens")
    params: PolicyLossParams = _params(f"loss_type={loss_type!r}", row.params, hyperparameters, others)
    return params


def reduction_of(loss_type: str) -> Reduction:
    """How the losses of tokens become one number, as the source of the loss has it; see `losses.per_token`."""
    return _row(POLICY_LOSSES, "loss_type", loss_type).reduction


def covariance_tokens(
    loss_type: str,
    rows: TokenRows,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    row_seeds: Sequence[int],
    **hyperparameters: Any,
) -> Tensor:
    """The tokens that `clip_cov` or `kl_cov` treats differently, among all tokens of a generation batch.

    Args:
        loss_type: "clip_cov" or "kl_cov".
        rows: All tokens of the generation batch, of all ranks.
        old_logprobs: Nats.
        advantages: In the shape of the mask.
        row_seeds: B numbers that break ties; they should not depend on the rank of a row.
        **hyperparameters: Of the loss.

    Returns:
        Bool, in the shape of the mask.

    Raises:
        ConfigError: The loss selects no tokens, or there is no such hyperparameter.
    """
    row = _row(POLICY_LOSSES, "loss_type", loss_type)
    if row.selection is None:
        raise ConfigError(f"loss_type={loss_type!r} selects no tokens: only 'clip_cov' and 'kl_cov' do.")
    chosen = rows.trainable
    # Rounded, because tokens after the same text have equal log-probs up to the order of sums.
    logprobs = (rows.read("old_logprobs", old_logprobs).detach()[chosen].double() * 1e4).round() / 1e4
    values = rows.read("advantages", advantages).detach()[chosen]
    every = torch.ones_like(values, dtype=torch.bool)
    means = {"mean_logprob": float(logprobs.mean()), "mean_advantage": float(values.double().mean())}
    lengths = torch.bincount(rows.row_index, minlength=rows.num_rows).tolist()
    keys = token_keys(row_seeds, lengths).to(chosen.device)[chosen]
    params = loss_params(loss_type, "token", hyperparameters)
    selected = row.selection(covariance(logprobs, values, every, **means), every, keys, params)
    return torch.zeros_like(chosen).masked_scatter(chosen, selected).view(rows.mask.shape)


def kl(
    estimator: str,
    rows: TokenRows,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    sampling_logprobs: Tensor | None = None,
    **hyperparameters: Any,
) -> Tensor:
    """KL(policy || reference) of each token, estimated from the log-probs of sampled tokens.

    Args:
        estimator: A name in `KL_ESTIMATORS`, or "sequence".
        rows: The tokens.
        logprobs: Nats; gradient flows.
        ref_logprobs: Nats, constants.
        sampling_logprobs: Nats, of the policy that sampled; for "sequence", and for `bias_correction=True`.
        **hyperparameters: `bias_correction`, or `weight_cap` of "sequence".

    Returns:
        Nats, in the shape of the mask.

    Raises:
        ConfigError: There is no such estimator or hyperparameter, or it has no effect here.
        ValueError: Shapes differ.
    """
    if estimator == "full":
        raise ConfigError(
            "estimator='full' compares whole distributions, not log-probs of sampled tokens. Use token_logprobs with "
            "a reference, or losses.kl.full_kl on [N, V] log-probs."
        )
    others = dict.fromkeys(("target", "horizon"), "the weight of the KL term is the caller's")
    params = _params(f"estimator={estimator!r}", _row(KL_PARAMS, "estimator", estimator), hyperparameters, others)
    new, reference = rows.read("logprobs", logprobs), rows.read("ref_logprobs", ref_logprobs)
    is_sequence, corrects = isinstance(params, SequenceKLParams), getattr(params, "bias_correction", False)
    if (is_sequence or corrects) != (sampling_logprobs is not None):
        given = "None" if sampling_logprobs is None else "given"
        raise ConfigError(
            f"sampling_logprobs={given}: estimator='sequence' and bias_correction=True need it, and others ignore it."
        )
    if sampling_logprobs is None:
        return rows.spread(KL_ESTIMATORS[estimator].function(new, reference))
    log_ratio = new - rows.read("sampling_logprobs", sampling_logprobs).detach()
    if isinstance(params, SequenceKLParams):
        found = sequence_kl(new, reference, log_ratio, rows.trainable, rows.row_index, rows.num_rows, params)
        return rows.spread(found)
    return rows.spread(importance_corrected(new, reference, log_ratio, kl_estimator=estimator))


def sampling_weights(
    mode: str,
    rows: TokenRows,
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
) -> ImportanceWeights:
    """Importance weights of the tokens' losses, for samples of another policy than the one before the update.

    Args:
        mode: A name in `OFF_POLICY_CORRECTIONS`.
        rows: The tokens.
        old_logprobs: Nats.
        sampling_logprobs: Nats, of the policy that sampled.
        low: Smallest ratio, in 0 .. 1; None: no bound.
        high: Largest ratio, at least 1; None: no bound.

    Returns:
        `weights` in the shape of the mask, and statistics.

    Raises:
        ConfigError: There is no such mode.
        ValueError: Shapes differ, or the bounds exclude 1.
    """
    row = _row(OFF_POLICY_CORRECTIONS, "mode", mode)
    log_ratio = rows.read("old_logprobs", old_logprobs) - rows.read("sampling_logprobs", sampling_logprobs)
    found = importance_weights(
        log_ratio, rows.trainable, rows.row_index, rows.num_rows, level=row.level, bound=row.bound, low=low, high=high
    )
    return replace(found, weights=rows.spread(found.weights))


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """The loss of some rows as a sum, and what it is divided by. Both are added over micro-batches and ranks."""

    total: Tensor  # scalar, gradient flows
    items: Tensor  # scalar float32


def summed(rows: TokenRows, token_loss: Tensor, reduction: Reduction, *, constant: float | None = None) -> SummedLoss:
    """Sum the losses of tokens with the weights of a reduction, and count what the sum is divided by.

    Args:
        rows: The tokens.
        token_loss: In the shape of the mask.
        reduction: See `losses.per_token`; `reduction_of` has that of a policy loss.
        constant: Of reduction "constant": the maximum length of a completion.

    Raises:
        ConfigError: There is no such reduction.
        ValueError: Shapes differ, or `constant` is missing or has no effect.
    """
    allowed = ("token", "sequence_mean", "sequence_sum", "constant")
    if reduction not in allowed:
        raise ConfigError(f"reduction={reduction!r} is not known: allowed are {', '.join(allowed)}.")
    layout = rows.trainable, rows.row_index, rows.num_rows
    weights = token_weights(*layout, reduction=reduction, dtype=score_dtype(token_loss))
    items = row_items(*layout, reduction=reduction, constant=constant).sum()
    return SummedLoss((weights * rows.read("token_loss", token_loss)).sum(), items)


def advantages(
    estimator: str,
    rows: TokenRows,
    rewards: Tensor,
    groups: Tensor,
    *,
    weights: Tensor | None = None,
    whiten: bool | None = None,
    scores: Mapping[str, Tensor] | None = None,
    **hyperparameters: Any,
) -> Advantages:
    """Advantages of tokens, from the rewards of rows or of tokens.

    Statistics are over these rows: pass those of all ranks. A NaN reward means that a row has none.

    Args:
        estimator: A name in `ADVANTAGES`.
        rows: The tokens.
        rewards: [B], or [B, K] of several rewards for an estimator of rows. An estimator of tokens takes [B], which
            count at the last token of each row, or one reward per token in the shape of the mask.
        groups: [B] int64, equal for the completions of a prompt.
        weights: [K] of several rewards; None: all 1.
        whiten: Whether advantages get mean 0 and standard deviation 1 over all tokens; None: if the source of the
            estimator does so.
        scores: What the estimator needs besides, by name, see `ADVANTAGES[estimator].needs`: `greedy` [B], or
            `values`, `logprobs`, `log_collision` and `log_ratio` in the shape of the mask.
        **hyperparameters: Of the estimator.

    Returns:
        `values`, and `returns` if there is a critic, in the shape of the mask; `totals` [B].

    Raises:
        ConfigError: There is no such estimator or hyperparameter, or a score is missing or has no effect.
        ValueError: Shapes do not match, or a reward is infinite.
    """
    params = estimator_params(estimator, hyperparameters)
    row, scores = ADVANTAGES[estimator], dict(scores or {})
    optional = {"log_ratio"} if estimator == "optimal_token_baseline" else set()
    if row.needs - scores.keys() or scores.keys() - row.needs - optional:
        needed = ", ".join(sorted(row.needs | optional)) or "none"
        raise ConfigError(f"scores={sorted(scores)}: estimator={estimator!r} takes {needed}.")
    if row.level == "row":
        more = {"weights": weights, "greedy": scores.get("greedy"), **hyperparameters}
        found = row_advantages(estimator, rewards, groups, rows.lengths, **more)
        found = replace(found, values=found.values[rows.row_index])
    else:
        if weights is not None:
            raise ConfigError(f"weights have no effect with estimator={estimator!r}: pass total rewards.")
        found = _of_tokens(estimator, rows, rewards, groups, scores, params)
    values = found.values.float()
    if row.whitened if whiten is None else whiten:
        counted = rows.trainable & ~found.totals.isnan()[rows.row_index]
        sums = moments(values, counted)
        values = whitened(
            values, counted, mean=sums.mean, std=sums.std, shift_mean=True, advantage_epsilon=WHITENING_EPSILON
        )
    if params.clip_range is not None:
        values = clip_advantages(values, low=params.clip_range[0], high=params.clip_range[1])
    returns = None if found.returns is None else rows.spread(found.returns)
    return Advantages(rows.spread(values), found.totals, returns)


def row_advantages(
    estimator: str,
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    *,
    weights: Tensor | None = None,
    greedy: Tensor | None = None,
    **hyperparameters: Any,
) -> Advantages:
    """Advantages of rows, before they are whitened or clipped; for the arguments, see `advantages`.

    Args:
        estimator: A name in `ADVANTAGES` whose level is "row".
        rewards: [B], or [B, K].
        groups: [B] int64.
        lengths: [B] tokens of each row that have a loss.
        weights: [K]; None: all 1.
        greedy: [B] reward of the greedy completion of the row's prompt, for `remax`.
        **hyperparameters: Of the estimator.

    Returns:
        `values` and `totals`, [B].

    Raises:
        ConfigError: There is no such estimator of rows, or no such hyperparameter.
        ValueError: Shapes do not match, or a reward is infinite.
    """
    row = _row({name: row for name, row in ADVANTAGES.items() if row.level == "row"}, "estimator", estimator)
    params = estimator_params(estimator, hyperparameters)
    rewards = rewards[:, None] if rewards.dim() == 1 else rewards
    weights = torch.ones(rewards.shape[-1], device=rewards.device) if weights is None else weights
    return row.function(ScoredRows(rewards, weights, groups, lengths, greedy), params)


def estimator_params(estimator: str, hyperparameters: Mapping[str, Any]) -> AdvantageParams:
    """The hyperparameters of an estimator.

    Raises:
        ConfigError: There is no such estimator or hyperparameter, or its value is not allowed.
    """
    row = _row(ADVANTAGES, "estimator", estimator)
    params: AdvantageParams = _params(f"estimator={estimator!r}", row.params, hyperparameters, {})
    return params


def _of_tokens(
    estimator: str, rows: TokenRows, rewards: Tensor, groups: Tensor, scores: Mapping[str, Tensor], params: Any
) -> Advantages:
    """[N] advantages of an estimator of tokens."""
    if rewards.shape == (rows.num_rows,) and rows.mask.shape != rewards.shape:
        rewards = at_last_tokens(rows, rewards)
    scored = ScoredTokens(
        rewards=rows.read("rewards", rewards),
        trainable=rows.trainable,
        row_index=rows.row_index,
        num_rows=rows.num_rows,
        groups=groups,
        **{name: rows.read(name, each) for name, each in scores.items()},
    )
    return ADVANTAGES[estimator].function(scored, params)


def at_last_tokens(rows: TokenRows, values: Tensor) -> Tensor:
    """[B] values of rows at the last token of each that has a loss, 0 elsewhere, in the shape of the mask."""
    positions = rows.trainable.nonzero().squeeze(1)
    last = positions.new_full((rows.num_rows,), -1).scatter_reduce(0, rows.row_index[positions], positions, "amax")
    has_token = last >= 0
    flat = values.new_zeros(len(rows.trainable)).index_add(0, last[has_token], values[has_token])
    return flat.view(rows.mask.shape)


def _row(table: Mapping[Any, _T], option: str, name: str) -> _T:
    """The row of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in table:
        raise ConfigError(f"{option}={name!r} is not known. {nearest(name, [*table])}")
    return table[name]


def _params(where: str, params: type[Params], given: Mapping[str, Any], others: Mapping[str, str]) -> Any:
    """The hyperparameters of a part.

    Args:
        where: The part, for messages.
        params: Their class.
        given: Their values by name.
        others: Those that have no effect here, and why.

    Raises:
        ConfigError: There is no such hyperparameter, it has no effect here, or its value is not allowed.
    """
    known = [name for name in params.names() if name not in others]
    for name, value in given.items():
        if name in others:
            raise ConfigError(f"{name}={value!r} has no effect here: {others[name]}.")
        if name not in known:
            remedy = nearest(name, known) if known else "It has none."
            raise ConfigError(f"{name}={value!r} is not a hyperparameter of {where}. {remedy}")
    return params(**given)
