import math

import pytest
import torch

from prefrl.losses.policy.tokens import PolicyTokens, off_policy_sequence_mask, positive_nll

ROW_INDEX = torch.tensor([0, 0, 0, 1, 2, 2])
TRAINABLE = torch.tensor([True, False, True, True, False, False])
LOGPROBS = [-1.0, math.nan, -2.0, -3.0, math.nan, math.nan]
# Row 0 has moved away by 0.2 and 0.4 nats, 0.3 in the mean; row 1 has come 0.5 nearer; row 2 has no loss.
SAMPLING = torch.tensor([-0.8, math.nan, -1.6, -3.5, math.nan, math.nan])


def tokens_of(advantages, dtype=torch.float32):
    logprobs = torch.tensor(LOGPROBS, dtype=dtype, requires_grad=True)
    fields = {"trainable": TRAINABLE, "row_index": ROW_INDEX, "num_rows": 3}
    return PolicyTokens(logprobs, torch.zeros(6), torch.tensor(advantages), **fields)


@pytest.mark.parametrize(
    ("threshold", "advantages", "expected"),
    [
        (0.29, [-1.0] * 6, [0, 1, 0, 1, 1, 1]),  # the second token has no loss
        (0.31, [-1.0] * 6, [1, 1, 1, 1, 1, 1]),
        (0.29, [1.0] * 6, [1, 1, 1, 1, 1, 1]),
        (0.29, [0.0] * 6, [1, 1, 1, 1, 1, 1]),
        (0.29, [-1.0, -1.0, 1.0, -1.0, -1.0, -1.0], [0, 1, 1, 1, 1, 1]),  # A of each token decides
        (0.0, [-1.0] * 6, [0, 1, 0, 1, 1, 1]),
    ],
)
def test_only_bad_rows_that_the_policy_has_left_are_dropped(threshold, advantages, expected):
    mask = off_policy_sequence_mask(tokens_of(advantages), SAMPLING, off_policy_mask_threshold=threshold)
    assert mask.tolist() == expected
    assert not mask.requires_grad


def test_a_row_with_an_unknown_log_prob_is_kept():
    sampling = SAMPLING.clone()
    sampling[0] = math.nan
    mask = off_policy_sequence_mask(tokens_of([-1.0] * 6), sampling, off_policy_mask_threshold=0.0)
    assert mask.tolist() == [1.0] * 6


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_a_threshold_that_drops_rows_of_the_policy_itself_is_refused(threshold):
    with pytest.raises(ValueError, match=f"off_policy_mask_threshold={threshold}"):
        off_policy_sequence_mask(tokens_of([-1.0] * 6), SAMPLING, off_policy_mask_threshold=threshold)


def test_positive_nll_and_its_gradient_are_of_the_marked_trainable_tokens():
    tokens = tokens_of([1.0] * 6)
    loss = positive_nll(tokens, torch.tensor([True, True, True, False, True, True]))
    assert loss.tolist() == [1.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    loss.sum().backward()
    assert tokens.logprobs.grad.tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_the_dtype_stays():
    tokens = tokens_of([-1.0] * 6, dtype=torch.float64)
    assert positive_nll(tokens, TRAINABLE).dtype == torch.float64
    assert off_policy_sequence_mask(tokens, SAMPLING, off_policy_mask_threshold=0.1).dtype == torch.float64


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        off_policy_sequence_mask(tokens_of([-1.0] * 6), torch.zeros(1), off_policy_mask_threshold=0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        positive_nll(tokens_of([-1.0] * 6), torch.ones(1, dtype=torch.bool))
