"""Weights of several losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefrl.options.balance import BALANCE_PARAMS
from prefrl.trainer.offline.loss_balance import LossBalance

# Log-probs of four pairs of one token each. The second loss has twice the gradient of the first at each.
LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -6.0])


def losses_of(_: Any, logprobs: Tensor) -> list[Tensor]:
    """Two losses with the same minimum."""
    return [-logprobs, 2 * logprobs.abs()]


def balance(method: str, losses_of: Any = losses_of) -> LossBalance[Any]:
    """Preferences 1 and 0.5."""
    return LossBalance(method, BALANCE_PARAMS[method](), [("a", 1.0), ("b", 0.5)], losses_of)


def weighted(of: LossBalance[Any], *logprobs: Tensor) -> dict[str, float]:
    """The weights for a step with these micro-batches."""
    of.weigh([None] * len(logprobs), logprobs)
    return dict(of.weighted)


@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 1, 1]])
def test_weights_do_not_depend_on_the_cut_of_a_step(cut: list[int]) -> None:
    expected = weighted(balance("nash"), LOGPROBS)
    assert weighted(balance("nash"), *LOGPROBS.split(cut)) == pytest.approx(expected)
    assert expected["a"] / expected["b"] == pytest.approx(4.0, rel=1e-3)  # parallel gradients: w_k / |g_k|


def test_weights_are_those_worked_out_by_hand() -> None:
    # Losses fall between 1 and 6, mean 3: L = (3 - 1) / (6 - 1) = 0.4 for both. So w_k / (1 + L_k) is as w_k.
    assert weighted(balance("log_transform"), LOGPROBS) == pytest.approx({"a": 1.0, "b": 0.5})
    # The second has L = (0.99 - 0.96) / (1 - 0.96) = 0.75. The total gradient length of the weights stays.
    first, second = weighted(balance("log_transform", apart), LOGPROBS).values()
    assert second / first == pytest.approx(0.5 * 1.4 / 1.75, rel=1e-4)
    assert first * 2.0 + second * 1.98 == pytest.approx(1.0 * 2.0 + 0.5 * 1.98, abs=2e-2)


def apart(_: Any, logprobs: Tensor) -> list[Tensor]:
    """Values that differ by other factors than the gradients, of length 2 and about 1.98."""
    scales = torch.tensor([1.0, 1.0, 1.0, 0.96])
    return [-logprobs, scales * (1.0 + logprobs - logprobs.detach())]


def unequal(_: Any, logprobs: Tensor) -> list[Tensor]:
    """Two losses with other gradients."""
    return [-logprobs, logprobs.square()]


@pytest.mark.parametrize("method", ["uncertainty", "gradnorm", "famo"])
def test_a_resumed_balance_goes_on_bit_by_bit(tmp_path: Path, method: str) -> None:
    steps = [LOGPROBS, LOGPROBS * 0.7, LOGPROBS * 0.9]
    whole, first, second = (balance(method, unequal) for _ in range(3))
    expected = [weighted(whole, step) for step in steps]
    for step in steps[:2]:
        weighted(first, step)
    first.save(tmp_path / "state.json", writes=True)
    second.load(tmp_path / "state.json")
    assert weighted(second, steps[2]) == expected[2]
    assert expected[2] != weighted(balance(method, unequal), steps[2])
