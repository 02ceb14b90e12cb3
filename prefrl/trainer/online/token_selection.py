"""Selects the tokens of a generation batch that get a policy loss, or a special one, among those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from prefrl import distributed
from prefrl.losses.policy.covariance import covariance, token_keys
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.rollout.collect import prompt_seed

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.options.policy import PolicyLossParams
    from prefrl.trainer.base.scorer import Scores
    from prefrl.trainer.online.config import PolicyGradientConfig
    from prefrl.types import Rollout, TokenBatch

__all__ = ["cov_tokens", "high_entropy"]


def high_entropy(
    args: PolicyGradientConfig, batch: TokenBatch, entropies: Tensor, rollouts: Sequence[Rollout], *, step: int
) -> Tensor:
    """[N] 1 for the share `top_entropy_quantile` of trainable tokens with the highest entropy, otherwise 0.

    Args:
        args: Options.
        batch: This rank's rows.
        entropies: [N] nats, of the policy that sampled.
        rollouts: The rollouts of these rows.
        step: The first optimizer step that learns from them.

    Source: Wang et al. 2025, Beyond the 80/20 Rule, arXiv 2506.01939, eq. 6
    """
    (values, keys), mine = _gathered(batch, _rounded(entropies), keys_of(args, batch, rollouts, step=step))
    by_key = keys.argsort()
    order = by_key[values[by_key].argsort(descending=True, stable=True)]
    is_high = torch.zeros(len(values), dtype=torch.bool)
    is_high[order[: max(1, round(args.top_entropy_quantile * len(values)))]] = True
    return _spread(batch, is_high[mine]).float()


def cov_tokens(
    args: PolicyGradientConfig,
    params: PolicyLossParams,
    batch: TokenBatch,
    scores: Scores,
    advantages: Tensor,
    rollouts: Sequence[Rollout],
    *,
    step: int,
) -> Tensor:
    """[N] True for the tokens that `clip_cov` or `kl_cov` treats differently; none for other losses.

    Args:
        args: Options.
        params: The hyperparameters of the loss.
        batch: This rank's rows.
        scores: With the old log-probs, for these losses.
        advantages: [N].
        rollouts: The rollouts of these rows.
        step: The first optimizer step that learns from them.
    """
    loss = POLICY_LOSSES[args.loss_type]
    if loss.selection is None:
        return torch.zeros(batch.num_tokens, dtype=torch.bool)
    keys = keys_of(args, batch, rollouts, step=step)
    (logprobs, values, keys), mine = _gathered(batch, _rounded(scores.old_logprobs), advantages, keys)
    every = torch.ones(len(logprobs), dtype=torch.bool)
    found = covariance(
        logprobs,
        values,
        every,
        mean_logprob=float(logprobs.double().mean()),
        mean_advantage=float(values.double().mean()),
    )
    return _spread(batch, loss.selection(found, every, keys, params)[mine])


def keys_of(args: PolicyGradientConfig, batch: TokenBatch, rollouts: Sequence[Rollout], *, step: int) -> Tensor:
    """[N] a random number for each token, which breaks ties. It does not depend on the rank that holds the token."""
    return token_keys(_row_seeds(rollouts, seed=args.seed, step=step), batch.row_lengths)


def _rounded(values: Tensor) -> Tensor:
    """Round to 1e-4. Tokens after the same text then have equal values, whatever micro-batch they were computed in."""
    return (values.double() * 1e4).round() / 1e4


def _gathered(batch: TokenBatch, *values: Tensor) -> tuple[list[Tensor], slice]:
    """Values at the trainable tokens of all ranks, and the slice of them that is this rank's."""
    mine = [value[batch.trainable_positions].cpu().numpy() for value in values]
    parts = distributed.gather_objects(mine)
    start = sum(len(part[0]) for part in parts[: distributed.rank()])
    everyone = [torch.cat([torch.from_numpy(part[i]) for part in parts]) for i in range(len(values))]
    return everyone, slice(start, start + batch.num_trainable)


def _spread(batch: TokenBatch, values: Tensor) -> Tensor:
    """[N] from [M], False elsewhere."""
    return torch.zeros(batch.num_tokens, dtype=torch.bool).index_copy(0, batch.trainable_positions, values)


def _row_seeds(rollouts: Sequence[Rollout], *, seed: int, step: int) -> list[int]:
    """Seeds from the group of each row and its position in the group, so the rank that holds it does not matter."""
    places: dict[int, int] = {}
    seeds = []
    for rollout in rollouts:
        place = places.setdefault(rollout.group, 0)
        places[rollout.group] += 1
        seeds.append(prompt_seed(prompt_seed(seed, step, rollout.group), 0, place))
    return seeds
