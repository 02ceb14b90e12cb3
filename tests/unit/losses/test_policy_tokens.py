import math

import pytest
import torch

from prefrl.losses.policy.tokens import PolicyTokens

# Row 0 has two trainable tokens, row 1 has one, row 2 has none.
ROW_INDEX = torch.tensor([0, 0, 0, 1, 2])
TRAINABLE = torch.tensor([True, False, True, True, False])
LEVELS = ("token", "sequence", "sequence_token", "sequence_sum")


def tokens_of(log_ratio, **changes):
    logprobs = torch.tensor(log_ratio, requires_grad=True)
    fields = {
        "logprobs": logprobs,
        "old_logprobs": torch.zeros(len(log_ratio)),
        "advantages": torch.ones(len(log_ratio)),
        "trainable": TRAINABLE,
        "row_index": ROW_INDEX,
        "num_rows": 3,
    }
    return PolicyTokens(**(fields | changes))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.1, 0.0, 0.3, -0.5, 0.0]),
        ("sequence", [0.2, 0.2, 0.2, -0.5, 0.0]),
        ("sequence_token", [0.2, 0.2, 0.2, -0.5, 0.0]),
        ("sequence_sum", [0.4, 0.4, 0.4, -0.5, 0.0]),
    ],
)
@pytest.mark.parametrize("unread", [9.0, math.nan, math.inf, -math.inf])
def test_log_ratio_by_hand_reads_trainable_tokens_alone(level, expected, unread):
    tokens = tokens_of([0.1, unread, 0.3, -0.5, unread], level=level)
    torch.testing.assert_close(tokens.log_ratio, torch.tensor(expected))
    (tokens.log_ratio * TRAINABLE).sum().backward()
    assert tokens.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # Row 0 has the coefficients 1 and 3 on its trainable tokens.
        ("token", [1.0, 0.0, 3.0, 5.0, 0.0]),
        ("sequence", [2.0, 0.0, 2.0, 5.0, 0.0]),
        ("sequence_token", [1.0, 0.0, 3.0, 5.0, 0.0]),
        ("sequence_sum", [4.0, 0.0, 4.0, 5.0, 0.0]),
    ],
)
def test_where_the_gradient_of_a_level_goes(level, expected):
    tokens = tokens_of([0.1, 7.0, 0.3, -0.5, 7.0], level=level)
    (tokens.log_ratio * torch.tensor([1.0, 0.0, 3.0, 5.0, 0.0])).sum().backward()
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(expected))


def test_a_rows_sum_stays_where_its_ratio_is_finite():
    tokens = tokens_of([150.0, 0.0, 50.0, -200.0, 0.0], level="sequence_sum")
    assert tokens.log_ratio.tolist() == [20.0, 20.0, 20.0, -20.0, 0.0]
    tokens.log_ratio.exp().sum().backward()
    assert tokens.logprobs.grad.tolist() == [0.0] * 5


def test_row_means_of_a_row_without_trainable_tokens_are_zero():
    tokens = tokens_of([0.0] * 5)
    means = tokens.row_means(torch.tensor([1.0, math.nan, 4.0, 3.0, math.nan]))
    assert means.tolist() == [2.5, 3.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_the_dtype_stays(level):
    double = torch.tensor([0.1, 0.2, 0.3, -0.5, 0.0], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of([0.0] * 5, logprobs=double, old_logprobs=torch.zeros(5, dtype=torch.float64), level=level)
    assert tokens.log_ratio.dtype == torch.float64
    assert tokens.trainable_logprobs.dtype == torch.float64


def test_log_probs_of_tokens_that_are_not_trainable_are_zero():
    assert tokens_of([-1.0, math.nan, -3.0, -4.0, math.nan]).trainable_logprobs.tolist() == [
        -1.0,
        0.0,
        -3.0,
        -4.0,
        0.0,
    ]


def test_old_log_probs_and_advantages_are_constants():
    constants = {name: torch.ones(5, requires_grad=True) for name in ("old_logprobs", "advantages")}
    tokens = tokens_of([0.1] * 5, **constants)
    (tokens.log_ratio * tokens.advantages).sum().backward()
    assert tokens.logprobs.grad is not None
    assert all(constant.grad is None for constant in constants.values())


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "trainable", "row_index", "cov_tokens"])
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ValueError, match=rf"shapes differ: logprobs \(5,\), .*{name} \(1,\)"):
        tokens_of([0.0] * 5, **{name: torch.zeros(1, dtype=torch.bool)})
