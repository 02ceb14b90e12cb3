"""Likelihoods, values and pairs of rewards: numbers and gradients worked out by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from prefrl.losses.per_token import item_count, row_items, token_weights, trainable_per_row
from prefrl.losses.supervised import SUPERVISED_LOSSES, dft, nll, value_loss
from prefrl.models.routers import routed, sequence_balance


def loss_and_gradient(function):
    logprobs = torch.tensor([math.log(0.25), 0.0], requires_grad=True)
    loss = function(logprobs)
    loss.sum().backward()
    return loss.detach(), logprobs.grad


def test_nll_by_hand():
    loss, gradient = loss_and_gradient(nll)
    torch.testing.assert_close(loss, torch.tensor([math.log(4), 0.0]))
    assert gradient.tolist() == [-1.0, -1.0]


def test_dft_weighs_a_token_by_its_probability_as_a_constant():
    loss, gradient = loss_and_gradient(dft)
    torch.testing.assert_close(loss, torch.tensor([math.log(4) / 4, 0.0]))
    torch.testing.assert_close(gradient, torch.tensor([-0.25, -1.0]))


def test_table_holds_each_loss_under_its_name():
    assert SUPERVISED_LOSSES["nll"] is nll
    assert SUPERVISED_LOSSES["dft"] is dft


VERL = json.loads((Path(__file__).parents[2] / "golden" / "value_loss.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("value", "old", "returned", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, 0.0),  # before the first update: 0.5 * 2^2, towards R
        (1.25, 1.0, 3.0, 1.53125, -1.75, 0.0),  # inside the range
        (1.5, 1.0, 3.0, 1.125, -1.5, 0.0),  # on its edge
        (2.0, 1.0, 3.0, 1.125, 0.0, 1.0),  # beyond it, on the side of R: 0.5 * (1.5 - 3)^2
        (3.0, 1.0, 3.0, 1.125, 0.0, 1.0),  # exact, but not within this update's range
        (0.0, 1.0, 3.0, 4.5, -3.0, 0.0),  # beyond it, away from R: the plain error
        (0.0, 1.0, -2.0, 3.125, 0.0, 1.0),  # as much below: 0.5 * (0.5 + 2)^2
        (2.0, 1.0, -2.0, 8.0, 4.0, 0.0),
        (2.0, 1.0, 1.25, 0.28125, 0.75, 0.0),  # R within the range, v beyond: pulled back
        (2.0, 1.0, 1.75, 0.03125, 0.25, 0.0),  # as far from R as the edge is: the error that has a gradient
    ],
)
def test_clip_limits_only_steps_towards_the_return(value, old, returned, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    old_values, returns = torch.tensor([old], requires_grad=True), torch.tensor([returned], requires_grad=True)
    found = value_loss(values, old_values, returns, cliprange_value=0.5)
    found.loss.sum().backward()
    assert (found.loss.item(), values.grad.item(), found.stats["val/clipfrac"].item()) == (loss, gradient, clipped)
    assert old_values.grad is None
    assert returns.grad is None


def test_without_a_range_it_is_half_the_squared_error_wherever_the_value_was():
    values = torch.tensor([2.0, -1.0], requires_grad=True)
    found = value_loss(values, torch.tensor([100.0, -100.0]), torch.tensor([3.0, 3.0]), cliprange_value=None)
    found.loss.sum().backward()
    assert found.loss.tolist() == [0.5, 8.0]
    assert values.grad.tolist() == [-1.0, -4.0]
    assert found.stats == {}


@pytest.mark.parametrize("cliprange", VERL["cases"])
def test_the_mean_over_tokens_is_that_of_verl(cliprange):
    expected = VERL["cases"][cliprange]
    values, old_values, returns = (
        torch.tensor(VERL["inputs"][name], dtype=torch.float64) for name in ("values", "old_values", "returns")
    )
    trainable = torch.tensor(VERL["inputs"]["trainable"])
    values.requires_grad_()
    found = value_loss(values, old_values, returns, cliprange_value=float(cliprange))
    loss = found.loss[trainable].mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-12)
    assert values.grad.tolist() == pytest.approx(expected["gradient"], abs=1e-12)
    # verl adds 1e-8 to the number of tokens.
    share = found.stats["val/clipfrac"][trainable].double().mean().item()
    assert share == pytest.approx(expected["clipfrac"], rel=2e-9)
    assert 0 < expected["clipfrac"] < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_the_loss_has_the_dtype_of_the_values(dtype, cliprange):
    ones = torch.ones(2, dtype=dtype)
    assert value_loss(ones, ones, ones, cliprange_value=cliprange).loss.dtype == dtype


def test_shapes_that_would_broadcast_and_ranges_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: values \(2,\), old_values \(2,\), returns \(1,\)"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1), cliprange_value=None)
    for cliprange in (0.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"cliprange_value=.*: needs to be positive, or None for no clip"):
            value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), cliprange_value=cliprange)


# Probabilities of two experts: three tokens in one layer, of which two choose the first expert.
PROBABILITIES = torch.tensor([[0.75, 0.25], [0.9, 0.1], [0.4, 0.6]])
SECOND_LAYER = torch.tensor([[0.2, 0.8], [0.3, 0.7], [0.1, 0.9]])


def balance(*layers, top_k=1):
    """The loss of one sequence of three tokens, from the logits of its layers."""
    sums = routed(layers, top_k=top_k).sum(0, keepdim=True)
    return sequence_balance(sums, torch.tensor([3 * len(layers)]))


def test_one_layer():
    # f = (2/3, 1/3), P = (2.05, 0.95) / 3
    assert balance(PROBABILITIES.log()).tolist() == pytest.approx([2 * (2 * 2.05 + 1 * 0.95) / 9])


def test_layers_count_together():
    # f = (2, 4) / 6, P = (2.65, 3.35) / 6
    found = balance(PROBABILITIES.log(), SECOND_LAYER.log())
    assert found.tolist() == pytest.approx([2 * (2 * 2.65 + 4 * 3.35) / 36])


def test_it_is_the_number_of_experts_of_a_token_if_all_are_used_alike():
    assert balance(torch.zeros(3, 4), top_k=4).tolist() == [4.0]
    even = torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]])
    assert balance(even.log()).tolist() == pytest.approx([1.0])


def test_the_gradient_is_that_of_the_probabilities_alone():
    logits = PROBABILITIES.log().requires_grad_()
    balance(logits).sum().backward()
    first, second = PROBABILITIES.unbind(1)
    # 2 (f_1 - f_2) / 3 * dp_1/dlogit_1, with dp_1/dlogit_1 = p_1 p_2
    expected = 2 / 9 * first * second
    torch.testing.assert_close(logits.grad, torch.stack([expected, -expected], 1))


def test_half_precision_is_summed_in_single():
    logits = PROBABILITIES.log().bfloat16()
    assert routed([logits], top_k=1).dtype == torch.float32
    torch.testing.assert_close(balance(logits), balance(logits.float()))


# Rows of 3, 1 and 2 tokens, not in order; row 2 has no trainable token.
ROW_INDEX = torch.tensor([0, 1, 0, 2, 0, 2])
TRAINABLE = torch.tensor([True, True, False, False, True, False])
LOSS = torch.tensor([1.0, 10.0, 100.0, 1000.0, 3.0, 1000.0])


@pytest.mark.parametrize(
    ("reduction", "constant", "weights", "count", "loss"),
    [
        ("token", None, [1, 1, 0, 0, 1, 0], 3.0, 14 / 3),
        ("sequence_mean", None, [0.5, 1, 0, 0, 0.5, 0], 3.0, (2 + 10 + 0) / 3),
        ("sequence_sum", None, [1, 1, 0, 0, 1, 0], 3.0, (4 + 10 + 0) / 3),
        ("constant", 8.0, [1, 1, 0, 0, 1, 0], 24.0, 14 / 24),
    ],
)
def test_hand_numbers(reduction, constant, weights, count, loss):
    found = token_weights(TRAINABLE, ROW_INDEX, 3, reduction=reduction)
    items = item_count(TRAINABLE, ROW_INDEX, 3, reduction=reduction, constant=constant)
    assert found.dtype == items.dtype == torch.float32
    assert found.tolist() == weights
    assert items.shape == ()
    assert items.item() == count
    assert ((found * LOSS).sum() / items).item() == pytest.approx(loss)


@pytest.mark.parametrize(
    ("reduction", "constant", "items"),
    [
        ("token", None, [2, 1, 0]),
        ("sequence_mean", None, [1, 1, 1]),
        ("sequence_sum", None, [1, 1, 1]),
        ("constant", 8.0, [8, 8, 8]),
    ],
)
def test_items_of_rows(reduction, constant, items):
    found = row_items(TRAINABLE, ROW_INDEX, 3, reduction=reduction, constant=constant)
    assert found.dtype == torch.float32
    assert found.tolist() == items


def test_trainable_per_row_counts_only_those():
    assert trainable_per_row(TRAINABLE, ROW_INDEX, 4).tolist() == [2.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("reduction", ["token", "sequence_mean", "sequence_sum", "constant"])
def test_no_tokens_have_no_weight(reduction):
    nothing = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.long), 0
    assert token_weights(*nothing, reduction=reduction).shape == (0,)
    constant = 5.0 if reduction == "constant" else None
    assert item_count(*nothing, reduction=reduction, constant=constant).item() == 0.0


@pytest.mark.parametrize(
    ("reduction", "constant", "message"),
    [
        ("constant", None, "constant=None: reduction='constant' needs a positive number of tokens"),
        ("constant", 0.0, "constant=0.0: reduction='constant' needs a positive number of tokens"),
        ("token", 8.0, "constant=8.0 has no effect with reduction='token'"),
    ],
)
def test_constant_goes_with_its_reduction_alone(reduction, constant, message):
    with pytest.raises(ValueError, match=message):
        item_count(TRAINABLE, ROW_INDEX, 3, reduction=reduction, constant=constant)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: trainable \(6,\), row_index \(1,\)"):
        token_weights(TRAINABLE, ROW_INDEX[:1], 3, reduction="token")
