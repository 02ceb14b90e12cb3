"""Combine the advantages of K rewards into one advantage, with weights that adapt during training.

Each reward has its own advantages A_k, centered (and scaled, if requested) independently of the others. At ratio 1
the gradient of its surrogate with respect to the log-probs of the sampled tokens is known before any backward pass:
g_k = -u A_k on a token whose loss has weight u. The Gram matrix of these gradients therefore stands in for that of the
gradients of K losses (as if the log-probs of different tokens moved independently). This makes the methods of
multi-task learning applicable, and

    A = sum_k alpha_k A_k

needs only one backward pass. The loss of task k, which these methods read, is the distance of the batch's mean reward
from the best reward seen so far, as a share of the range of rewards seen so far:

    L_k = max((highest_k - mean_k) / (highest_k - lowest_k), 0.01)

It is positive, falls as the reward rises, and has no unit: it does not depend on the scale and offset of the reward.
The floor keeps weights proportional to 1 / L_k within a factor of 100; without a range, L_k = 1. Highest and lowest
are over the training so far. Means of earlier batches are compared with the current highest and lowest too, so that a
new record does not look like a loss of progress.

These losses have no unit, but advantages have the unit of their reward unless they are divided by a standard
deviation. The methods that read losses do not rescale the gradients, so with them rewards in different units need
scaled advantages. nash, and gradnorm at rest, give the same advantage up to a factor, however each A_k is scaled.

For every method:

- sum_k alpha_k |g_k| = sum_k w_k |g_k|, w = `reward_weights`: a method redistributes the total gradient length of the
  fixed weights, so switching the method does not change the effective learning rate. With equal |g_k| the alphas sum
  to sum_k w_k. Identical rewards, or a single reward, get the combined advantage of the fixed weights.
- A reward is inactive in a batch where it has no gradient (equal rewards in every group, or no value) or where
  w_k = 0. The alphas of the others are then as if it did not exist, its own alpha is w_k, and its memory is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from prefrl.options.balance import BALANCE_PARAMS, FamoParams, GradnormParams, ParetoParams, UncertaintyParams
from prefrl.options.params import Params
from prefrl.options.policy import Reduction

SMALLEST_LOSS = 0.01
# Added to the diagonal of the cosine matrix: without it, rewards in full conflict have no bargaining solution.
NASH_RIDGE = 1e-4


def squared_weights(lengths: Tensor, *, reduction: Reduction) -> Tensor:
    """Squared loss weights summed over the tokens of each row: the weight that `gram` gives a row.

    Args:
        lengths: [B] trainable tokens of each row.
        reduction: The reduction of the policy loss, see `losses.per_token`.

    Returns:
        [B] float64: 1 / length for `sequence_mean`, else the length; 0 in rows without a trainable token.
    """
    lengths = lengths.double()
    return lengths.clamp(min=1).reciprocal() * (lengths > 0) if reduction == "sequence_mean" else lengths


def gram(advantages: Tensor, weights: Tensor) -> Tensor:
    """Inner products of the rewards' gradients with respect to the log-probs, at ratio one.

        G_kl = sum_b weights_b A_bk A_bl

    It is a sum over rows, so the matrices of micro-batches and ranks can be added.

    Args:
        advantages: [B, K] of each row, 0 where a reward does not apply; or [N, K] of each token.
        weights: [B] from `squared_weights`; or [N] squared weights of tokens, 0 where a token is not trainable.

    Returns:
        [K, K] float64.

    Raises:
        ValueError: Shapes do not match.
    """
    if advantages.dim() != 2 or weights.shape != advantages.shape[:1]:
        shapes = f"advantages {tuple(advantages.shape)}, weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes}: need to be [B, K] and [B]")
    advantages = advantages.detach().double()
    return advantages.T @ (weights.double()[:, None] * advantages)


@dataclass(frozen=True, slots=True)
class RewardTasks:
    """Input of a method: the K rewards that are active in a batch. All float64."""

    gram: Tensor  # [K, K], above 0 on the diagonal
    weights: Tensor  # [K] reward_weights, above 0
    losses: Tensor  # [K] L_k, the remaining share of the range of rewards, 0.01 to 1
    first_losses: Tensor  # [K] losses of the first batch in which each reward was active
    previous_losses: Tensor  # [K] losses of the last batch before this one in which it was active; else `losses`
    memory: Tensor  # [K] state that the method kept; 0 at first

    @property
    def norms(self) -> Tensor:
        """[K] |g_k|."""
        return self.gram.diagonal().sqrt()


@dataclass(frozen=True, slots=True)
class Balanced:
    """Result of a method."""

    weights: Tensor  # [K] above 0, up to a common factor
    memory: Tensor  # [K] state for the next batch


def fixed(tasks: RewardTasks, _: Params) -> Balanced:
    """Fixed weights, alpha_k = w_k: `reward_weights` unchanged."""
    return Balanced(weights=tasks.weights, memory=tasks.memory)


def log_transform(tasks: RewardTasks, _: Params) -> Balanced:
    """Weights from the gradient of sum_k w_k log(1 + L_k): alpha_k ~ w_k / (1 + L_k).

    Source: Ludwig, trainer.loss_balancing
    """
    return Balanced(weights=tasks.weights / (1 + tasks.losses), memory=tasks.memory)


def uncertainty(tasks: RewardTasks, params: UncertaintyParams) -> Balanced:
    """Homoscedastic uncertainty: the gradient of sum_k w_k (exp(-s_k) L_k + s_k), alpha_k ~ w_k exp(-s_k).

    L_k is a mean absolute distance, so this is the likelihood of Laplace noise with log-scale s_k. The optimal s_k is
    log L_k. s_k starts at 0 and approaches it by s_k += rate * (log L_k - s_k): close to the optimum these
    are gradient descent steps, and far from it they do not overshoot.

    Source: Kendall et al. 2018, arXiv 1705.07115, section 3
    """
    log_scale = tasks.memory + params.rate * (tasks.losses.log() - tasks.memory)
    return Balanced(weights=tasks.weights * (-log_scale).exp(), memory=log_scale)


def gradnorm(tasks: RewardTasks, params: GradnormParams) -> Balanced:
    """Gradient norms in proportion to w_k r_k^a, with r_k = L_k(t) / L_k(0): rewards that lag behind get more weight.

    With a = `alpha` and alpha_k ~ w_k exp(v_k), where v starts at 0, the norms exp(v_k) |g_k| are moved
    towards their mean times (r_k / mean r)^a:

        e_k = v_k + log |g_k| - a log r_k,  v_k -= rate * (e_k - mean e)

    The paper minimizes the distance |norm - target| with arithmetic means and renormalizes its weights in each step.
    The logarithmic form has the same proportions at rest, has no units, and keeps the weights positive and the sum of
    v at 0.

    Source: Chen et al. 2018, arXiv 1711.02257, eq. 1 and 2
    """
    log_rates = tasks.losses.log() - tasks.first_losses.log()
    excess = tasks.memory + tasks.norms.log() - params.alpha * log_rates
    log_weights = tasks.memory - params.rate * (excess - excess.mean())
    return Balanced(weights=tasks.weights * log_weights.exp(), memory=log_weights)


def famo(tasks: RewardTasks, params: FamoParams) -> Balanced:
    """Make all log-losses fall at the same rate: alpha_k ~ w_k z_k / L_k with z = softmax(x), where x starts at 0.

    With d_k = log L_k(t - 1) - log L_k(t), the progress since the last batch, rewards with more progress lose weight:

        x_k -= rate * (z_k (d_k - sum_j z_j d_j) + decay * x_k)

    The paper measures progress on one batch, before and after its update. Here that would cost another generation, so
    progress is measured from batch to batch. While z changes slowly, the noise of a batch enters x twice with opposite
    signs, and cancels.

    Source: Liu et al. 2023, arXiv 2306.03792, algorithm 1
    """
    shares = tasks.memory.softmax(0)
    progress = tasks.previous_losses.log() - tasks.losses.log()
    descent = shares * (progress - (shares * progress).sum())
    logits = tasks.memory - params.rate * (descent + params.decay * tasks.memory)
    return Balanced(weights=tasks.weights * logits.softmax(0) / tasks.losses, memory=logits)


def nash(tasks: RewardTasks, _: Params) -> Balanced:
    """The Nash bargaining solution: G alpha = w / alpha, so that every reward improves, g_k . g = w_k / alpha_k > 0.

    It maximizes sum_k w_k log(g_k . g) over directions g of fixed length; the weights w are bargaining powers. In
    terms of beta_k = alpha_k |g_k| and the cosines C between gradients, (C + 1e-4 I) beta = w / beta. Without the
    ridge there is no solution where the gradients can cancel; with it, beta is then close to the canceling weights.

    Source: Navon et al. 2022, arXiv 2202.01017, claim 3.1; Kalai 1977, Int. J. Game Theory 6 (bargaining powers)
    """
    norms = tasks.norms
    cosines = tasks.gram / (norms[:, None] * norms)
    return Balanced(weights=_bargain(cosines, tasks.weights) / norms, memory=tasks.memory)


def _bargain(cosines: Tensor, powers: Tensor) -> Tensor:
    """[K] beta > 0 with (C + ridge I) beta = w / beta up to a common factor, to within rounding.

    Newton's method on the convex function beta' (C + ridge I) beta / 2 - sum_k w_k log beta_k, which is
    self-concordant for w_k >= 1. Damped steps of length 1 / (1 + decrement) keep beta above 0 and converge from any
    start. Once the decrement is at most 1/4, each full step more than halves it (Nesterov & Nemirovskii 1994), until
    only rounding is left.
    """
    matrix = cosines + NASH_RIDGE * torch.eye(len(powers), dtype=cosines.dtype)
    powers = powers / powers.min()
    beta = powers.sqrt()
    last_decrement = torch.inf
    while True:
        gradient = matrix @ beta - powers / beta
        step = torch.linalg.solve(matrix + torch.diag(powers / beta.square()), gradient)
        decrement = float((gradient @ step).clamp(min=0).sqrt())
        if not decrement < last_decrement / 2:
            return beta
        if decrement <= 0.25:
            last_decrement = decrement
        beta = beta - step / (1 + decrement if decrement > 0.25 else 1)


def pareto(tasks: RewardTasks, params: ParetoParams) -> Balanced:
    """Smooth Tchebycheff scalarization: the gradient of m log sum_k exp(p_k L_k / m).

        alpha_k ~ p_k exp(p_k L_k / m),  p_k = w_k / mean w,  m = smoothing

    The weights w are the preference vector. As m approaches 0, the reward with the largest p_k L_k gets all the
    weight, so training ends where all p_k L_k are equal: on the Pareto front, even where it is not convex. A large m
    gives fixed weights.

    Source: Lin et al. 2024, arXiv 2402.19078, section 3
    """
    preference = tasks.weights / tasks.weights.mean()
    urgency = (preference * tasks.losses / params.smoothing).softmax(0)
    return Balanced(weights=preference * urgency, memory=tasks.memory)


P = TypeVar("P", bound=Params)


@dataclass(frozen=True, slots=True)
class RewardBalance(Generic[P]):
    """A row of `REWARD_BALANCES`: `function(tasks, params) -> Balanced`."""

    function: Callable[[RewardTasks, P], Balanced]
    params: type[P]
    source: str


_ROWS: dict[str, tuple[Callable[[RewardTasks, Any], Balanced], str]] = {
    "fixed": (fixed, "linear scalarization"),
    "log_transform": (log_transform, "Ludwig, trainer.loss_balancing"),
    "uncertainty": (uncertainty, "Kendall et al. 2018, arXiv 1705.07115"),
    "gradnorm": (gradnorm, "Chen et al. 2018, arXiv 1711.02257"),
    "famo": (famo, "Liu et al. 2023, arXiv 2306.03792"),
    "nash": (nash, "Navon et al. 2022, arXiv 2202.01017"),
    "pareto": (pareto, "Lin et al. 2024, arXiv 2402.19078"),
}

REWARD_BALANCES: dict[str, RewardBalance[Any]] = {
    name: RewardBalance(function, BALANCE_PARAMS[name], source) for name, (function, source) in _ROWS.items()
}


class BalanceState(TypedDict):
    """The state of a `RewardBalancer` in a checkpoint; None stands for a reward that was not seen yet."""

    balance: str
    highest: list[float | None]
    lowest: list[float | None]
    first_means: list[float | None]
    previous_means: list[float | None]
    memory: list[float | None]


class RewardBalancer:
    """Computes the alphas of K rewards for each batch, and keeps the state between batches."""

    def __init__(self, balance: str, params: Params, *, reward_weights: Sequence[float]) -> None:
        """Start without having seen a batch.

        Args:
            balance: A name in `REWARD_BALANCES`.
            params: The hyperparameters of the method.
            reward_weights: K numbers; not negative, except with `fixed`.

        Raises:
            ValueError: A weight is negative and the method is not `fixed`.
        """
        self.balance = balance
        self._row = REWARD_BALANCES[balance]
        if balance != "fixed" and min(reward_weights) < 0:
            raise ValueError(
                f"reward_weights={list(reward_weights)}: reward_balance={balance!r} needs weights >= 0. Change the "
                "sign of the reward, or use 'fixed'."
            )
        self._params = params
        self._reward_weights = torch.tensor(reward_weights, dtype=torch.float64)
        unknown = torch.full_like(self._reward_weights, torch.nan)
        self._highest, self._lowest = unknown, unknown
        self._first_means, self._previous_means = unknown, unknown
        self._memory = torch.zeros_like(unknown)

    def weights(self, gram: Tensor, rewards: Tensor) -> Tensor:
        """Update the state with a batch and return the alphas for it.

        Args:
            gram: [K, K] summed over all ranks, see the function `gram`.
            rewards: [B, K] of all ranks, NaN where a reward does not apply.

        Returns:
            [K] float64 on the CPU, constants. See the module for their properties.

        Raises:
            ValueError: Shapes do not match, there are no rows, or values are not finite.
        """
        size = len(self._reward_weights)
        if gram.shape != (size, size) or rewards.dim() != 2 or rewards.shape[1] != size or rewards.shape[0] == 0:
            shapes = f"gram {tuple(gram.shape)}, rewards {tuple(rewards.shape)}"
            raise ValueError(f"{shapes}: need to be [{size}, {size}] and [B, {size}] for {size} reward_weights")
        if not gram.isfinite().all() or rewards.isinf().any():
            raise ValueError(
                "gram or rewards contain values that are not finite: advantages of rewards that do not apply must be 0"
            )
        gram, rewards = (tensor.detach().to("cpu", torch.float64) for tensor in (gram, rewards))
        self._highest = torch.fmax(self._highest, _extreme(rewards, sign=1))
        self._lowest = torch.fmin(self._lowest, _extreme(rewards, sign=-1))
        means = rewards.nanmean(0)
        is_active = (gram.diagonal() > 0) & (self._reward_weights > 0) & means.isfinite()
        alphas = self._reward_weights.clone()
        if is_active.any():
            tasks = self._tasks(gram, means, is_active)
            balanced = self._row.function(tasks, self._params)
            self._memory = self._memory.masked_scatter(is_active, balanced.memory)
            self._previous_means = torch.where(is_active, means, self._previous_means)
            budget = (tasks.weights * tasks.norms).sum() / (balanced.weights * tasks.norms).sum()
            alphas = alphas.masked_scatter(is_active, balanced.weights * budget)
        return alphas

    def _tasks(self, gram: Tensor, means: Tensor, is_active: Tensor) -> RewardTasks:
        """The active rewards. Remembers the mean of each reward's first active batch."""
        self._first_means = torch.where(is_active & self._first_means.isnan(), means, self._first_means)
        previous = torch.where(self._previous_means.isnan(), means, self._previous_means)
        return RewardTasks(
            gram=gram[is_active][:, is_active],
            weights=self._reward_weights[is_active],
            losses=self._losses(means)[is_active],
            first_losses=self._losses(self._first_means)[is_active],
            previous_losses=self._losses(previous)[is_active],
            memory=self._memory[is_active],
        )

    def _losses(self, means: Tensor) -> Tensor:
        """[K] distance of each mean from the highest reward, as a share of the range seen so far."""
        span = self._highest - self._lowest
        return ((self._highest - means) / span).where(span > 0, 1.0).clamp(min=SMALLEST_LOSS)

    def state_dict(self) -> BalanceState:
        """All that determines the next weights. A round trip through JSON is bit-exact."""
        return {
            "balance": self.balance,
            "highest": _numbers(self._highest),
            "lowest": _numbers(self._lowest),
            "first_means": _numbers(self._first_means),
            "previous_means": _numbers(self._previous_means),
            "memory": _numbers(self._memory),
        }

    def load_state_dict(self, state: BalanceState) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError: It belongs to another method or another number of rewards.
        """
        size = len(self._reward_weights)
        if state["balance"] != self.balance or len(state["memory"]) != size:
            raise ValueError(
                f"the checkpoint balances {len(state['memory'])} rewards or losses by {state['balance']!r}, this run "
                f"{size} by {self.balance!r}: resume with those of the checkpoint"
            )
        self._highest, self._lowest = _tensor(state["highest"]), _tensor(state["lowest"])
        self._first_means, self._previous_means = _tensor(state["first_means"]), _tensor(state["previous_means"])
        self._memory = _tensor(state["memory"])


def _extreme(rewards: Tensor, *, sign: int) -> Tensor:
    """[K] highest (sign 1) or lowest (sign -1) reward of a batch; NaN if there is none."""
    largest = (sign * rewards).nan_to_num(nan=-torch.inf).amax(0)
    return sign * largest.masked_fill(largest.isinf(), torch.nan)


def _numbers(values: Tensor) -> list[float | None]:
    # JSON has no NaN.
    return [None if value != value else value for value in values.tolist()]


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values], dtype=torch.float64)
