"""The balancing loss of routers against numbers worked out by hand."""

import pytest
import torch

from prefrl.models.routers import routed, sequence_balance

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
