"""What options add to the loss of a policy. A term is made at construction if its option is on; others do not exist.

The states of coefficients that adapt are floats. Python's `json` writes them in the shortest form that is read back as
the same number, so a resumed run is bitwise identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.losses.kl import KL_ESTIMATORS, importance_corrected, sequence_kl
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights
from prefrl.losses.policy.tokens import off_policy_sequence_mask, positive_nll
from prefrl.metrics import EffectiveShare, Max, Mean, Metric, Min, token_mean
from prefrl.options.policy import EntropyParams, KLEstimate, KLParams, SampledKLParams, SequenceKLParams
from prefrl.types import ReadyBatch

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.per_token import TokenScores
    from prefrl.losses.policy.tokens import PolicyTokens
    from prefrl.trainer.configs import PolicyGradientConfig
    from prefrl.types import SampledBatch, TokenBatch


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyBatch(ReadyBatch):
    """The input of `PolicyObjective`."""

    cov_tokens: Tensor  # [N] bool: tokens that clip_cov and kl_cov treat differently; none for other losses
    nll_weights: Tensor  # [N] weights of the negative log-likelihood of good responses; 0 elsewhere
    entropy_weights: Tensor  # [N] weights of the entropy in its bonus; 0 for tokens without a policy loss
    # [N] nats, of the policy before the first update from this generation batch, if it was computed.
    entropies: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [N] nats, of the teacher; None: the loss has no KL term of a teacher


@dataclass(frozen=True, eq=False, kw_only=True)
class CriticBatch(PolicyBatch):
    """The input of a policy loss and a critic's loss."""

    values: Tensor  # [N] of the critic before the first update from this generation batch
    returns: Tensor  # [N] the critic's regression targets


@dataclass(frozen=True, slots=True)
class LossPass:
    """A training pass over a micro-batch, of which terms compute their part of the loss."""

    batch: PolicyBatch
    scores: TokenScores
    tokens: PolicyTokens
    old_logprobs: Tensor  # [N] nats, of the policy before the first update from this generation batch
    metrics: dict[str, Metric] = field(default_factory=dict)  # terms add theirs


class LossTerm(Protocol):
    """Changes the loss of each token, [N], or the sum of the loss over all tokens, a scalar."""

    def __call__(self, loss: Tensor, seen: LossPass) -> Tensor:
        """The loss with this term.

        Args:
            loss: The loss with the terms before this one.
            seen: What it is the loss of.
        """
        ...


# Terms of the loss of each token.


class SamplingCorrection:
    """Importance weights policy / sampler of the tokens' losses, for completions that another policy sampled.

    Args:
        args: Options.
    """

    def __init__(self, args: PolicyGradientConfig) -> None:
        self._row = OFF_POLICY_CORRECTIONS[args.vllm_importance_sampling_mode]
        self._params = args.correction_params
        # AIPO and VESPO use policy / sampler as their ratio, so they need no importance weights on top.
        self.is_ratio_of_loss = args.loss_type in ("aipo", "vespo")

    def __call__(self, loss: Tensor, seen: LossPass) -> Tensor:
        """See `LossTerm`."""
        weights, metrics = self.weights(seen.batch, seen.old_logprobs)
        seen.metrics.update(metrics)
        return loss if self.is_ratio_of_loss else weights * loss

    def weights(self, batch: SampledBatch, old_logprobs: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """[N] importance weights pi / mu, constants, see `losses.policy.off_policy`; and their metrics.

        Args:
            batch: The rows, which mu sampled.
            old_logprobs: [N] nats, of the trainer's policy pi before the first update from this generation batch.
        """
        result = importance_weights(
            old_logprobs - batch.sampling_logprobs,
            batch.trainable,
            batch.row_index,
            batch.num_rows,
            level=self._row.level,
            bound=self._row.bound,
            low=self._params.clip_min,
            high=self._params.clip_max,
        )
        ratio = "sampling/importance_sampling_ratio"
        return result.weights, {
            "sampling/sampling_logp_difference/mean": Mean(result.difference_sum, result.num_tokens),
            "sampling/sampling_logp_difference/max": Max(result.difference_max),
            f"{ratio}/min": Min(result.ratio_min),
            f"{ratio}/mean": Mean(result.ratio_sum, result.num_ratios),
            f"{ratio}/max": Max(result.ratio_max),
            "sampling/clipped_share": Mean(result.num_cut, result.num_ratios),
            "sampling/effective_sample_size": EffectiveShare(
                result.ratio_sum, result.ratio_square_sum, result.num_ratios
            ),
        }


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """Leaves out rows with negative advantages that the policy has moved away from since they were sampled."""

    threshold: float  # nats

    def __call__(self, loss: Tensor, seen: LossPass) -> Tensor:
        """See `LossTerm`."""
        kept = off_policy_sequence_mask(
            seen.tokens, seen.batch.sampling_logprobs, off_policy_mask_threshold=self.threshold
        )
        seen.metrics["sampling/off_policy_masked_share"] = token_mean(1 - kept, seen.batch.trainable)
        return kept * loss


@dataclass(frozen=True, slots=True)
class Compared:
    """A model that the policy stays close to, and how the KL from it is weighted and estimated."""

    score: Literal["ref_logprobs", "teacher_logprobs"]  # its log-probs
    metric: str
    estimator: KLEstimate
    params: KLParams
    coef: Callable[[], float]  # the current weight
    adaptation: Adaptation | None  # adapts the weight to the KL, if it is not constant


class KLTerm:
    """coef * KL(policy || reference or teacher) of each token.

    Args:
        args: Options.
        compared: The reference, or the teacher.
    """

    def __init__(self, args: PolicyGradientConfig, compared: Compared) -> None:
        params, name = compared.params, compared.estimator
        self._compared = compared
        self._is_corrected = args.corrects_sampling
        # Of log-probs of policy and reference, and log policy / sampler; None: the full distributions are compared.
        self._estimate: Callable[[PolicyBatch, Tensor, Tensor, Tensor], Tensor] | None
        if name == "full":
            self._estimate = None
        elif isinstance(params, SequenceKLParams):
            self._estimate = lambda batch, logprobs, reference, log_ratio: sequence_kl(
                logprobs, reference, log_ratio, batch.trainable, batch.row_index, batch.num_rows, params
            )
        elif isinstance(params, SampledKLParams) and params.bias_correction:
            self._estimate = lambda _, logprobs, reference, log_ratio: importance_corrected(
                logprobs, reference, log_ratio, kl_estimator=name
            )
        else:
            estimator = KL_ESTIMATORS[name].function
            self._estimate = lambda _, logprobs, reference, log_ratio: estimator(logprobs, reference)

    def __call__(self, loss: Tensor, seen: LossPass) -> Tensor:
        """See `LossTerm`."""
        batch, logprobs = seen.batch, seen.scores.logprobs
        if self._estimate is None:
            kl = seen.scores.divergence
        else:
            reference: Tensor = getattr(batch, self._compared.score)
            sampler = batch.sampling_logprobs if self._is_corrected else seen.old_logprobs
            log_ratio = (logprobs - sampler).where(batch.trainable, 0.0)
            kl = self._estimate(batch, logprobs, reference, log_ratio)
        seen.metrics[self._compared.metric] = token_mean(kl.detach(), batch.trainable)
        if self._compared.adaptation is not None:
            self._compared.adaptation.observe_kl(kl, batch)
        return loss + self._compared.coef() * kl


# Terms of the sum.


@dataclass(frozen=True, slots=True)
class LikelihoodTerm:
    """The mean of -log pi over the tokens of good responses, which `PolicyBatch.nll_weights` marks."""

    coef: float

    def __call__(self, loss: Tensor, seen: LossPass) -> Tensor:
        """See `LossTerm`."""
        weights = seen.batch.nll_weights
        return loss + self.coef * (weights * positive_nll(seen.tokens, weights > 0)).sum()


class EntropyBonus:
    """Minus the mean entropy of tokens, times a weight; `PolicyBatch.entropy_weights` says of which tokens.

    Args:
        args: Options.
        items: [B] what each row counts in the policy loss, for its metric.
        adaptation: Adapts the weight to the entropy, if it is not constant.
    """

    def __init__(
        self, args: PolicyGradientConfig, items: Callable[[PolicyBatch], Tensor], adaptation: Adaptation | None
    ) -> None:
        self._coef, self._items, self._adaptation = args.entropy_coef, items, adaptation
        self._adaptive = None if adaptation is None else adaptation.entropy

    @property
    def coef(self) -> float:
        """The weight, whether or not it is applied in this step."""
        return self._coef if self._adaptive is None else self._adaptive.coef

    @property
    def value(self) -> float:
        """The weight in this step's loss. An adaptive weight changes only between steps."""
        return self._coef if self._adaptive is None else self._adaptive.value

    def __call__(self, loss: Tensor, seen: LossPass) -> Tensor:
        """See `LossTerm`."""
        batch, entropy = seen.batch, seen.scores.entropy
        seen.metrics["policy_loss"] = Mean(loss.detach(), self._items(batch).sum())
        if self._adaptation is not None:
            self._adaptation.observe_entropy(entropy, batch.entropy_weights > 0)
        if self.value == 0:
            return loss
        return loss - self.value * (batch.entropy_weights * entropy).sum()


# Coefficients that adapt to the quantity that they control, from step to step.


class Adaptation:
    """Adapts coefficients to the KL and the entropy of an optimizer step, over all ranks.

    Args:
        kl: The weight of a KL term, in the loss or in the reward; None: it is constant.
        entropy: The weight of an entropy bonus; None: it is constant.
    """

    def __init__(self, kl: AdaptiveKL | None, entropy: AdaptiveEntropy | None) -> None:
        self.kl = kl
        self.entropy = entropy
        # Sums of this optimizer step: KL, its tokens, its rows; entropy, its tokens.
        self.observed = torch.zeros(5, dtype=torch.float64)

    def observe_kl(self, kl: Tensor, batch: TokenBatch) -> None:
        """Record the KL of these tokens, [N] nats, for the update at the end of the step."""
        if self.kl is not None:
            self._observe(0, kl, batch.trainable)
            self.observed[2] += batch.num_rows

    def observe_entropy(self, entropy: Tensor, counts: Tensor) -> None:
        """Record the entropy, [N] nats, of those tokens that count, [N] bool."""
        if self.entropy is not None:
            self._observe(3, entropy, counts)

    def _observe(self, place: int, values: Tensor, counts: Tensor) -> None:
        """Add the sum and the number of those [N] values that count."""
        self.observed = self.observed.to(counts.device, non_blocking=True)
        self.observed[place] += values.detach().where(counts, 0.0).sum(dtype=torch.float64)
        self.observed[place + 1] += counts.sum()

    def end_step(self, device: torch.device) -> None:
        """Adapt the coefficients to what was observed. All ranks must call it."""
        observed = self.observed.tolist()
        self.observed = torch.zeros(5, dtype=torch.float64)
        kl, kl_tokens, rows, entropy, entropy_tokens = distributed.sum_over_ranks(observed, device)
        if not math.isfinite(kl + entropy):  # the step will not be applied
            return
        if self.kl is not None and kl_tokens:
            self.kl.update(kl / kl_tokens, num_completions=int(rows))
        if self.entropy is not None and entropy_tokens:
            self.entropy.update(entropy / entropy_tokens)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The state of the coefficients."""
        parts = {"kl": self.kl, "entropy": self.entropy}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` returned, between optimizer steps."""
        self.observed = torch.zeros(5, dtype=torch.float64)
        if self.kl is not None:
            self.kl.load_state_dict(state["kl"])
        if self.entropy is not None:
            self.entropy.load_state_dict(state["entropy"])


# The bounds of the clip in `AdaptiveKL`.
_LARGEST_ERROR = 0.2


class AdaptiveKL:
    """The weight of a KL term: it rises while the divergence is above its target and falls while it is below.

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)

    after n completions with a mean divergence of `kl`.

    Args:
        value: The initial weight, above 0, because a product that starts at 0 stays there.
        target: Target divergence in nats, above 0; per token or per completion, like the `kl` of `update`.
        horizon: Number of completions over which the weight changes by at most about a factor of exp(0.2).

    Raises:
        ConfigError: A number is not positive.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        for name, number in (("value", value), ("target", target), ("horizon", horizon)):
            if not 0 < number < math.inf:
                raise ConfigError(f"{name}={number} of an adaptive KL weight: needs to be positive.")
        self._value = float(value)
        self._target = target
        self._horizon = horizon

    @property
    def value(self) -> float:
        """The weight for the next loss."""
        return self._value

    def update(self, kl: float, num_completions: int) -> None:
        """Adapt the weight to the mean divergence of `num_completions` completions, over all ranks.

        Raises:
            ConfigError: There are so many completions that the weight could become 0 or negative.
            ValueError: `kl` is NaN.
        """
        if math.isnan(kl):
            raise ValueError("kl=nan: the KL weight cannot adapt to it. Update it only after steps that have tokens.")
        if _LARGEST_ERROR * num_completions >= self._horizon:
            raise ConfigError(
                f"horizon={self._horizon} of an adaptive KL weight: needs to be above {_LARGEST_ERROR} times the "
                f"{num_completions} completions of an update, or the weight could become 0. Raise it."
            )
        error = min(max(kl / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._value *= 1 + error * num_completions / self._horizon

    def state_dict(self) -> dict[str, float]:
        """What `update` changes."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._value = state["value"]


class AdaptiveEntropy:
    """The weight of an entropy bonus that keeps the policy's entropy from falling below a target.

    After each step the coefficient changes by `delta`: up if the entropy was at most `target`, otherwise down, within
    `min` .. `max`. The next step applies it only if the entropy was at most `target`, so the bonus never
    pushes the entropy above the target. Before the first update there is no bonus.

    Args:
        coef: The initial coefficient.
        params: Bounds and change of the coefficient, and the target.

    Raises:
        ConfigError: The bounds exclude the coefficient.

    Source: He et al. 2025 (Skywork-OR1), arXiv 2505.22312 (adaptive entropy control); TRL, `use_adaptive_entropy`
    """

    def __init__(self, coef: float, params: EntropyParams) -> None:
        if not params.min <= coef <= params.max:
            raise ConfigError(f"coef={coef} of an adaptive entropy bonus: must be in {params.min} .. {params.max}.")
        self._coef = float(coef)
        self._params = params
        self._entropy: float | None = None

    @property
    def coef(self) -> float:
        """The coefficient, whether or not it is applied."""
        return self._coef

    @property
    def value(self) -> float:
        """The weight for the next loss: the coefficient, or 0 while the entropy is above its target or unknown."""
        return self._coef if self._entropy is not None and self._entropy <= self._params.target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to the mean entropy of a step's tokens, over all ranks.

        Raises:
            ValueError: `entropy` is NaN.
        """
        if math.isnan(entropy):
            raise ValueError("entropy=nan: the bonus cannot adapt to it. Update it only after steps that have tokens.")
        params = self._params
        step = params.delta if entropy <= params.target else -params.delta
        self._coef = min(max(self._coef + step, params.min), params.max)
        self._entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """What `update` changes."""
        return {"coef": self._coef} | ({} if self._entropy is None else {"entropy": self._entropy})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._coef = state["coef"]
        self._entropy = state.get("entropy")
