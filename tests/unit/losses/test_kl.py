import math

import pytest
import torch

from prefrl.losses.kl import KL_ESTIMATORS, k1, k2, k3

LOG2 = math.log(2)


# pi = 1/4, ref = 1/2: d = log ref - log pi = log 2.
@pytest.mark.parametrize(
    ("estimator", "value", "gradient"), [(k1, -LOG2, 1.0), (k2, LOG2**2 / 2, -LOG2), (k3, 2 - LOG2 - 1, -1.0)]
)
def test_hand_value_and_gradient(estimator, value, gradient):
    logprobs = torch.tensor([math.log(0.25)], requires_grad=True)
    ref_logprobs = torch.tensor([math.log(0.5)], requires_grad=True)
    estimate = estimator(logprobs, ref_logprobs)
    torch.testing.assert_close(estimate.detach(), torch.tensor([value]))
    estimate.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([gradient]))
    assert ref_logprobs.grad is None


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values())
def test_zero_with_zero_expected_gradient_where_policies_agree(estimator):
    logprobs = torch.tensor([0.2, 0.3, 0.5]).log().requires_grad_()
    estimate = estimator(logprobs, logprobs.detach())
    assert estimate.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [k1, k3])
def test_mean_over_samples_of_the_policy_is_the_divergence(estimator):
    pi, ref = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.5, 0.25, 0.25])
    divergence = (pi * (pi.log() - ref.log())).sum()
    torch.testing.assert_close((pi * estimator(pi.log(), ref.log())).sum(), divergence)


def test_gradient_of_k2_is_that_of_the_divergence():
    # The gradient of KL(pi || ref) is E[(log pi - log ref) * grad log pi]; that of E[k2], samples fixed, is the same.
    logits, ref = torch.tensor([0.1, -0.4, 0.9], requires_grad=True), torch.tensor([0.5, 0.25, 0.25])
    log_pi = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_pi.exp() * (log_pi - ref.log())).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((log_pi.detach().exp() * k2(log_pi, ref.log())).sum(), logits)
    torch.testing.assert_close(estimated, exact)


def test_k3_keeps_its_digits_where_policies_are_close():
    # d^2 / 2 at d = 1e-4, where exp(d) - 1 - d in float32 has no correct digit.
    estimate = k3(torch.tensor([-1e-4]), torch.tensor([0.0]))
    torch.testing.assert_close(estimate, torch.tensor([5.0e-9]), rtol=2e-3, atol=0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values())
def test_shapes_that_would_broadcast_are_refused(estimator):
    with pytest.raises(ValueError, match=r"shapes differ: logprobs \(3,\), ref_logprobs \(1,\)"):
        estimator(torch.zeros(3), torch.zeros(1))
