"""Advantages against those of TRL 1.16.0 and verl 0.9.1: their own source, run on the inputs stored here.

On purpose different, each with its test below: a row without anything to compare with gets 0, in verl its reward; GPG
counts rows that can be learned from, in verl rows with a reward other than 0. Tolerances above 1e-12 are for verl's
1e-8, added to variances, weights and counts, and for what peers compute in float32: TRL n / (n - 1), verl its
vectorized GRPO and GPG's alpha.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.estimators import Advantages, ScoredRows, ScoredTokens, moments, normalize_rows, whitened
from prefrl.options.policy_gradient import (
    AdvantageParams,
    BaselineParams,
    DiscountParams,
    GaeParams,
    GpgParams,
    GrpoParams,
)

STORED = json.loads((Path(__file__).parent / "advantages.json").read_text(encoding="utf-8"))
TRL, VERL = STORED["trl"], STORED["verl"]
EXACT = {"atol": 1e-12, "rtol": 1e-12}
FLOAT32 = {"atol": 1e-6, "rtol": 1e-6}
FLOAT32_FACTOR = {"atol": 1e-12, "rtol": 1e-7}
EPSILON_1E8 = {"atol": 1e-7, "rtol": 1e-7}


def float64(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trl_rows(num_rows: int) -> ScoredRows:
    rewards = [[math.nan if value is None else value for value in row] for row in TRL["rewards"][:num_rows]]
    return ScoredRows(
        rewards=float64(rewards),
        weights=float64(TRL["weights"]),
        groups=torch.arange(num_rows) // TRL["num_generations"],
        lengths=torch.ones(num_rows, dtype=torch.long),
    )


@pytest.mark.parametrize("name", ["group", "batch", "none", "normalize_then_sum"])
def test_grpo_is_that_of_trl(name: str) -> None:
    aggregation = "normalize_then_sum" if name == "normalize_then_sum" else "sum_then_normalize"
    scale = "group" if name == "normalize_then_sum" else name
    options = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "advantage_epsilon": 1e-4}
    result = ADVANTAGES["grpo"].function(trl_rows(len(TRL["rewards"])), GrpoParams(**options))
    tolerance = EXACT if name == "none" else FLOAT32_FACTOR
    torch.testing.assert_close(result.values, float64(TRL["grpo"][name]), **tolerance)


def test_rloo_is_that_of_trl() -> None:
    result = ADVANTAGES["rloo"].function(trl_rows(len(TRL["rewards"])), AdvantageParams())
    torch.testing.assert_close(result.values, float64(TRL["rloo"]["plain"]), **EXACT)


def test_normalized_rloo_is_that_of_trl() -> None:
    """Without the last group: TRL leaves a row that is alone out of the statistics, here it counts with its 0."""
    stored = float64(TRL["rloo"]["normalize_advantages"])
    result = normalize_rows(
        ADVANTAGES["rloo"].function(trl_rows(len(stored)), AdvantageParams()), advantage_epsilon=1e-4
    )
    torch.testing.assert_close(result.values, stored, **FLOAT32_FACTOR)


ROW_INDEX = torch.arange(len(VERL["lengths"])).repeat_interleave(torch.tensor(VERL["lengths"]))


def verl_lengths() -> torch.Tensor:
    trainable = torch.tensor(VERL["trainable"]["tools"])
    return torch.zeros(len(VERL["lengths"]), dtype=torch.long).index_add(0, ROW_INDEX, trainable.long())


def verl_rows() -> ScoredRows:
    return ScoredRows(
        rewards=float64(VERL["scores"])[:, None],
        weights=torch.ones(1),
        groups=torch.tensor(VERL["groups"]),
        lengths=verl_lengths(),
        greedy=float64(VERL["greedy"]),
    )


def grpo_options(scale: str) -> dict[str, Any]:
    return {
        "scale_rewards": scale,
        "multi_objective_aggregation": "sum_then_normalize",
        "advantage_epsilon": 1e-6,
    }


ROW_CASES = {
    "grpo": ("grpo", grpo_options("group"), EXACT),
    "grpo none": ("grpo", grpo_options("none"), EXACT),
    "grpo_vectorized": ("grpo", grpo_options("group"), FLOAT32),
    "grpo_passk": ("grpo_passk", {"scale_rewards": "group", "advantage_epsilon": 1e-6}, EXACT),
    "grpo_passk none": ("grpo_passk", {"scale_rewards": "none", "advantage_epsilon": 1e-6}, EXACT),
    "rloo": ("rloo", {}, EXACT),
    "rloo_vectorized": ("rloo", {}, EXACT),
    "opo": ("opo", {}, EXACT),
    "remax": ("remax", {}, EXACT),
}


@pytest.mark.parametrize("name", ROW_CASES)
def test_row_level_estimators_are_those_of_verl(name: str) -> None:
    estimator, options, tolerance = ROW_CASES[name]
    row = ADVANTAGES[estimator]
    result = row.function(verl_rows(), row.params(**options))
    torch.testing.assert_close(result.values, float64(VERL["row_outputs"][name]), **tolerance)


def test_gpg_of_verl_is_larger_by_its_other_count() -> None:
    """No group is without a difference: alpha is 1 here. verl has 9 rows / 7 rewards that are not 0."""
    result = ADVANTAGES["gpg"].function(verl_rows(), GpgParams(f_norm=2.0))
    torch.testing.assert_close(result.values * 9 / 7, float64(VERL["row_outputs"]["gpg"]), **FLOAT32_FACTOR)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_row_alone_in_its_group_keeps_its_reward_in_verl_and_gets_zero_here(name: str) -> None:
    stored = VERL["singleton"]
    rows = ScoredRows(
        rewards=float64(stored["rewards"])[:, None],
        weights=torch.ones(1),
        groups=torch.tensor(stored["groups"]),
        lengths=torch.ones(3, dtype=torch.long),
    )
    options = grpo_options("group") if name == "grpo" else {}
    result = ADVANTAGES[name].function(rows, ADVANTAGES[name].params(**options))
    torch.testing.assert_close(result.values, float64([0.0, *stored[name][1:]]), **EXACT)
    assert stored[name][0] == pytest.approx(2.0, rel=1e-5)


def test_verl_does_not_agree_with_itself_on_a_row_that_is_alone() -> None:
    assert VERL["singleton"]["rloo_vectorized"][0] == 0.0 < VERL["singleton"]["rloo"][0]


def verl_tokens(layout: str, *, with_rho: bool = False) -> ScoredTokens:
    """The score on the last trainable token, minus a KL term on each."""
    trainable = torch.tensor(VERL["trainable"][layout])
    rewards = -float64(VERL["kl"])
    for row, score in enumerate(VERL["scores"]):
        rewards[(trainable & ROW_INDEX.eq(row)).nonzero()[-1]] += score
    return ScoredTokens(
        rewards=rewards,
        trainable=trainable,
        row_index=ROW_INDEX,
        num_rows=len(VERL["lengths"]),
        groups=torch.tensor(VERL["groups"]),
        values=float64(VERL["values"]),
        logprobs=float64(VERL["probs"]).log(),
        log_collision=float64(VERL["collision"]).log(),
        log_ratio=float64(VERL["rho"]).log() if with_rho else None,
    )


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    total = moments(values, mask)
    return whitened(values, mask, mean=total.mean, std=total.std, shift_mean=shift_mean, advantage_epsilon=1e-8)


LAYOUTS = pytest.mark.parametrize("layout", ["tools", "single"])


@LAYOUTS
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)])
def test_gae_is_that_of_verl(layout: str, gamma: float, lam: float) -> None:
    stored = VERL["token_outputs"][layout][f"gae {gamma} {lam}"]
    scored = verl_tokens(layout)
    result: Advantages = ADVANTAGES["gae"].function(scored, GaeParams(gamma=gamma, lam=lam))
    torch.testing.assert_close(result.returns, float64(stored["returns"]), **EXACT)
    torch.testing.assert_close(whiten(result.values, scored.trainable), float64(stored["advantages"]), **EPSILON_1E8)


@LAYOUTS
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_that_of_verl(layout: str, gamma: float) -> None:
    stored = VERL["token_outputs"][layout][f"reinforce_plus_plus {gamma}"]
    scored = verl_tokens(layout)
    result = ADVANTAGES["reinforce_plus_plus"].function(scored, DiscountParams(gamma=gamma))
    torch.testing.assert_close(result.values, float64(stored["returns"]), **EXACT)
    torch.testing.assert_close(whiten(result.values, scored.trainable), float64(stored["advantages"]), **EPSILON_1E8)


def test_reinforce_plus_plus_baseline_is_that_of_verl() -> None:
    trainable = torch.tensor(VERL["trainable"]["tools"])
    per_row = ADVANTAGES["reinforce_plus_plus_baseline"].function(verl_rows(), AdvantageParams()).values
    stored = float64(VERL["row_outputs"]["reinforce_plus_plus_baseline"])
    expected = stored[ROW_INDEX].where(trainable, 0.0)
    torch.testing.assert_close(whiten(per_row[ROW_INDEX], trainable), expected, **EPSILON_1E8)


@LAYOUTS
@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("with_rho", [True, False])
def test_optimal_token_baseline_is_that_of_verl(layout: str, zero_tail: bool, with_rho: bool) -> None:
    """With tools, verl's plain form lines up steps by column; its `tir` form counts trainable tokens, as here."""
    name = "optimal_token_baseline" if layout == "single" else "tir_optimal_token_baseline"
    name += " zero_tail" * zero_tail + " rho" * with_rho
    result = ADVANTAGES["optimal_token_baseline"].function(
        verl_tokens(layout, with_rho=with_rho), BaselineParams(zero_tail=zero_tail)
    )
    stored = float64(VERL["token_outputs"][layout][name])
    torch.testing.assert_close(result.values, stored, **EPSILON_1E8)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_that_of_verl(shift_mean: bool) -> None:
    stored = VERL["whiten"]
    result = whiten(float64(stored["values"]), torch.tensor(stored["mask"]), shift_mean=shift_mean)
    expected = float64(stored["shift_mean" if shift_mean else "keep_mean"])
    torch.testing.assert_close(result, expected, **EPSILON_1E8)
