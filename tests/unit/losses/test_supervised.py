import math

import torch

from prefrl.losses.supervised import SUPERVISED_LOSSES, dft, nll


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
