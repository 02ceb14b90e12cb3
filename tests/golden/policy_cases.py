"""Inputs on which prefrl's policy losses are compared with those of TRL and verl."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prefrl.losses.per_token import item_count, token_weights
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.tokens import PolicyTokens, covariance, covariance_sums, off_policy_sequence_mask
from prefrl.options.policy import ImportanceLevel

__all__ = ["CONSTANT", "PEER_CASES", "PeerCase", "Rows", "prefrl_values", "rows_of"]

# 1: the token has a loss. Rows are ragged, have holes, and one has no loss at all. Weights of their tokens, 1 / count,
# are exact in float32.
MASKS = ("11011", "11", "111101111", "000", "1", "01111", "11")
ROW_ADVANTAGES = (1.3, -0.8, 0.6, -1.0, -1.7, -0.4, 0.0)
# Tokens that each row counts as in Dr. GRPO's reduction.
CONSTANT = 16


@dataclass(frozen=True)
class PeerCase:
    """A loss of prefrl, the loss of a peer, and what both are told."""

    peer: str  # trl or verl
    peer_loss: str
    peer_options: dict[str, Any]
    loss: str
    hyperparameters: dict[str, float | None] = field(default_factory=dict)
    level: ImportanceLevel = "token"
    selection: dict[str, float] = field(default_factory=dict)
    off_policy_mask_threshold: float | None = None
    # verl adds 1e-8 to the number of tokens of a row.
    tolerance: float = 1e-12
    peer_adds: float = 0.0


@dataclass(frozen=True)
class Rows:
    """Rows laid end to end, in float64. Ratios are between 0.5 and 2."""

    logprobs: Tensor
    old_logprobs: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor
    trainable: Tensor
    row_index: Tensor
    lengths: tuple[int, ...]


def rows_of(case: PeerCase) -> Rows:
    """Advantages differ from token to token for verl; TRL has one for each row."""
    lengths = tuple(map(len, MASKS))
    places = range(sum(lengths))
    row_index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ripple = 0.3 if case.peer == "verl" else 0.0
    values = {
        "logprobs": [-1.2 + math.cos(1.9 * k) for k in places],
        "log_ratio": [0.7 * math.sin(1.1 * k + 5.0) for k in places],
        "drift": [0.2 * math.sin(0.7 * k) for k in places],
        "advantages": [ROW_ADVANTAGES[row] + ripple * math.sin(1.3 * k) for k, row in enumerate(row_index.tolist())],
    }
    tensors = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in values.items()}
    old_logprobs = tensors["logprobs"] - tensors["log_ratio"]
    return Rows(
        logprobs=tensors["logprobs"].requires_grad_(),
        old_logprobs=old_logprobs,
        sampling_logprobs=old_logprobs + tensors["drift"],
        advantages=tensors["advantages"],
        trainable=torch.tensor([mark == "1" for mask in MASKS for mark in mask]),
        row_index=row_index,
        lengths=lengths,
    )


def prefrl_values(case: PeerCase) -> dict[str, Any]:
    """The loss of a step that is these rows alone, its gradient, and means of statistics over trainable tokens."""
    rows, loss = rows_of(case), POLICY_LOSSES[case.loss]
    layout = (rows.trainable, rows.row_index, len(rows.lengths))
    tokens = PolicyTokens(
        rows.logprobs,
        rows.old_logprobs,
        rows.advantages,
        *layout,
        level=case.level,
        cov_tokens=_selected(case, rows),
    )
    result = loss.function(tokens, loss.params(**case.hyperparameters))
    per_token = result.loss
    if case.off_policy_mask_threshold is not None:
        threshold = case.off_policy_mask_threshold
        per_token = per_token * off_policy_sequence_mask(
            tokens, rows.sampling_logprobs, off_policy_mask_threshold=threshold
        )
    constant = CONSTANT if loss.reduction == "constant" else None
    weights = token_weights(*layout, reduction=loss.reduction)
    total = (weights * per_token).sum() / item_count(*layout, reduction=loss.reduction, constant=constant)
    total.backward()
    means = {name: values[rows.trainable].mean().item() for name, values in result.stats.items()}
    return {"loss": total.item(), "gradient": rows.logprobs.grad.tolist(), "stats": means}


def _selected(case: PeerCase, rows: Rows) -> Tensor | None:
    """verl selects from the log-probs of the update; prefrl from those before the first one, when it trains."""
    loss = POLICY_LOSSES[case.loss]
    if loss.selection is None:
        return None
    inputs = (rows.logprobs, rows.advantages, rows.trainable)
    sums = covariance_sums(*inputs)
    means = {
        "mean_logprob": (sums.logprobs / sums.num_tokens).item(),
        "mean_advantage": (sums.advantages / sums.num_tokens).item(),
    }
    keys = torch.arange(len(rows.logprobs), dtype=torch.float64)
    return loss.selection(covariance(*inputs, **means), rows.trainable, keys, loss.params(**case.selection))


_CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
_LOG_CLIP = {"epsilon": 0.4, "epsilon_high": 0.3}
_VERL_CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
_VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
_SAPO = {"temperature_pos": 1.0, "temperature_neg": 1.05}
_NEARLY = 1e-7


def _trl(loss: str, hyperparameters: dict[str, Any], peer_options: dict[str, Any], **changes: Any) -> PeerCase:
    return PeerCase("trl", loss, peer_options, loss, hyperparameters, **changes)


def _clipped(loss: str, *, delta: float | None = None, **changes: Any) -> PeerCase:
    options = {**_CLIP, "delta": delta, "importance_sampling_level": changes.get("level", "token")}
    return _trl(loss, {**_CLIP, "delta": delta}, options, **changes)


def _prefixed(loss: str, hyperparameters: dict[str, float]) -> dict[str, float]:
    """As options of TRL's config."""
    return {f"{loss}_{name}": value for name, value in hyperparameters.items()}


def _verl(peer_loss: str, loss: str, hyperparameters: dict[str, Any], **options: Any) -> PeerCase:
    ours = {name: options.pop(name) for name in ("level", "selection", "tolerance") if name in options}
    return PeerCase("verl", peer_loss, options, loss, hyperparameters, **ours)


PEER_CASES: dict[str, PeerCase] = {
    **{f"trl {loss}": _clipped(loss) for loss in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "trl grpo delta": _clipped("grpo", delta=1.6),
    "trl gspo": _clipped("grpo", level="sequence"),
    "trl luspo": _clipped("luspo", level="sequence"),
    "trl grpo off-policy mask": PeerCase(
        "trl",
        "grpo",
        {**_CLIP, "off_policy_mask_threshold": 0.1},
        "grpo",
        {**_CLIP, "delta": None},
        off_policy_mask_threshold=0.1,
    ),
    # TRL's bound is epsilon_high itself and there is no lower one.
    "trl cispo": _trl("cispo", {"epsilon": 1.0, "epsilon_high": 0.5}, {"epsilon_high": 1.5}),
    "trl sapo": _trl("sapo", _SAPO, _prefixed("sapo", _SAPO)),
    "trl vespo": _trl("vespo", _VESPO, _prefixed("vespo", _VESPO)),
    # Its row without a token has the ratio 1, so the loss -A = 1, and no gradient.
    "trl gmpo": _trl("gmpo", _LOG_CLIP, _LOG_CLIP, peer_adds=1 / len(MASKS)),
    # verl's dual clip is always on; a bound that nothing reaches turns it off.
    "verl vanilla": _verl("vanilla", "dapo", {**_CLIP, "delta": None}, **_VERL_CLIP, clip_ratio_c=99.0),
    "verl dual clip": _verl("vanilla", "dapo", {**_CLIP, "delta": 1.6}, **_VERL_CLIP, clip_ratio_c=1.6),
    "verl vanilla, sequence means": _verl(
        "vanilla",
        "grpo",
        {**_CLIP, "delta": None},
        **_VERL_CLIP,
        clip_ratio_c=99.0,
        loss_agg_mode="seq-mean-token-mean",
        tolerance=_NEARLY,
    ),
    "verl vanilla, constant": _verl(
        "vanilla",
        "dr_grpo",
        {**_CLIP, "delta": None},
        **_VERL_CLIP,
        clip_ratio_c=99.0,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=CONSTANT,
    ),
    "verl gspo": _verl(
        "gspo",
        "grpo",
        {**_CLIP, "delta": None},
        **_VERL_CLIP,
        loss_agg_mode="seq-mean-token-mean",
        level="sequence_token",
        tolerance=_NEARLY,
    ),
    "verl sapo": _verl("sapo", "sapo", _SAPO, tau_pos=1.0, tau_neg=1.05, tolerance=_NEARLY),
    "verl dppo": _verl(
        "dppo_tv",
        "dppo",
        {"epsilon": 0.1, "epsilon_high": 0.05, "delta": 1.5},
        clip_ratio=0.1,
        clip_ratio_low=0.1,
        clip_ratio_high=0.05,
        clip_ratio_c=1.5,
    ),
    "verl gpg": _verl("gpg", "gpg", {}),
    "verl reinforce": _verl("reinforce", "reinforce", {}, loss_agg_mode="seq-mean-token-sum"),
    # With ratio 1 verl's random choice is of all candidates.
    "verl clip_cov": _verl(
        "clip_cov",
        "clip_cov",
        {**_CLIP, "delta": None},
        **_VERL_CLIP,
        policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8},
        selection={"ratio": 1.0, "lb": 0.1, "ub": 0.8},
    ),
    "verl kl_cov": _verl(
        "kl_cov",
        "kl_cov",
        {"coef": 0.7},
        policy_loss={"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.7},
        selection={"ratio": 0.25},
    ),
    "verl geo_mean": _verl(
        "geo_mean",
        "gmpo",
        _LOG_CLIP,
        clip_ratio=0.4,
        clip_ratio_low=0.4,
        clip_ratio_high=0.3,
        tolerance=_NEARLY,
    ),
    "verl cispo": _verl("cispo", "cispo", _CLIP, **_VERL_CLIP),
}
