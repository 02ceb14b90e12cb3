import math

import pytest
import torch

from prefrl.losses.policy.tokens import covariance, covariance_sums, select_clip_cov, select_kl_cov, token_keys
from prefrl.options.policy import CovarianceBand, HighestCovariance

# Trainable tokens: log-probs -1, -3, -2 (mean -2), advantages 2, -1, 2 (mean 1).
LOGPROBS = torch.tensor([-1.0, math.nan, -3.0, -2.0])
ADVANTAGES = torch.tensor([2.0, math.nan, -1.0, 2.0])
TRAINABLE = torch.tensor([True, False, True, True])
ALL = torch.ones(6, dtype=torch.bool)
CLIP = {"ratio": 0.5, "lb": 1.0, "ub": 5.0}


def test_covariance_by_hand():
    values = covariance(LOGPROBS, ADVANTAGES, TRAINABLE, mean_logprob=-2.0, mean_advantage=1.0)
    assert values.tolist() == [1.0, 0.0, 2.0, 0.0]
    double = (LOGPROBS.double(), ADVANTAGES.double(), TRAINABLE)
    assert covariance(*double, mean_logprob=-2.0, mean_advantage=1.0).dtype == torch.float64


def test_sums_are_of_trainable_tokens_and_add_up_over_ranks():
    sums = covariance_sums(LOGPROBS, ADVANTAGES, TRAINABLE)
    assert (sums.logprobs.item(), sums.advantages.item(), sums.num_tokens.item()) == (-6.0, 3.0, 3)
    parts = [covariance_sums(LOGPROBS[part], ADVANTAGES[part], TRAINABLE[part]) for part in (slice(0, 1), slice(1, 4))]
    for name in sums.__slots__:
        assert sum(getattr(part, name) for part in parts) == getattr(sums, name)


def test_sums_of_many_small_numbers_are_exact():
    logprobs = torch.full((1_000_000,), -0.1)
    sums = covariance_sums(logprobs, logprobs, torch.ones_like(logprobs, dtype=torch.bool))
    assert sums.logprobs.item() == pytest.approx(1e6 * logprobs[0].item(), rel=1e-12)


def test_constants_have_no_graph():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    everything = torch.ones(2, dtype=torch.bool)
    assert not covariance(logprobs, logprobs, everything, mean_logprob=0.0, mean_advantage=0.0).requires_grad
    assert not covariance_sums(logprobs, logprobs, everything).logprobs.requires_grad


def test_keys_of_a_row_follow_from_its_seed_alone():
    keys = token_keys([7, 8, 9], [3, 1, 2])
    torch.testing.assert_close(keys, torch.cat([token_keys([s], [n]) for s, n in ((7, 3), (8, 1), (9, 2))]))
    assert keys.dtype == torch.float64
    assert len(set(keys.tolist())) == 6
    assert token_keys([], []).tolist() == []


def test_keys_leave_the_global_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    token_keys([1, 2], [3, 4])
    assert torch.rand(1) == expected


def test_clip_cov_takes_the_smallest_keys_between_the_bounds():
    covariances = torch.tensor([2.0, 9.0, 3.0, 1.0, 4.0, 5.0])  # 9, 1 and 5 are not in (1, 5)
    keys = torch.tensor([0.5, 0.1, 0.9, 0.0, 0.2, 0.1])
    found = {share: select_clip_cov(covariances, ALL, keys, CovarianceBand(**CLIP | {"ratio": share})).tolist()
             for share in (0.01, 0.4, 1.0)}  # fmt: skip
    assert found[0.01] == [False, False, False, False, True, False]  # 0.06 tokens: at least one
    assert found[0.4] == [True, False, False, False, True, False]  # 2.4 tokens: rounded down
    assert found[1.0] == [True, False, True, False, True, False]  # no more than there are


def test_kl_cov_takes_the_largest_covariances():
    covariances = torch.tensor([2.0, -9.0, 3.0, 1.0, 4.0, 5.0])
    keys = torch.linspace(0, 1, 6)
    found = {
        share: select_kl_cov(covariances, ALL, keys, HighestCovariance(ratio=share)).tolist()
        for share in (0.01, 0.6, 1.0)
    }
    assert found[0.01] == [False, False, False, False, False, True]
    assert found[0.6] == [False, False, True, False, True, True]
    assert found[1.0] == [True] * 6


def test_keys_decide_among_equal_covariances():
    covariances = torch.tensor([1.0, 3.0, 3.0, 3.0, 3.0, 0.0])
    keys = torch.tensor([0.0, 0.4, 0.1, 0.3, 0.2, 0.0])
    assert select_kl_cov(covariances, ALL, keys, HighestCovariance(ratio=0.4)).tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


def test_tokens_that_are_not_trainable_are_neither_selected_nor_counted():
    covariances = torch.tensor([2.0, 4.0, 3.0, 2.0, 2.5, 4.0])
    trainable = torch.tensor([True, False, True, True, True, False])
    keys = torch.tensor([0.5, 0.0, 0.4, 0.3, 0.2, 0.1])
    assert select_kl_cov(covariances, trainable, keys, HighestCovariance(ratio=0.5)).tolist() == [
        False, False, True, False, True, False,
    ]  # fmt: skip
    assert select_clip_cov(covariances, trainable, keys, CovarianceBand(**CLIP)).tolist() == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]
    nothing = torch.zeros(6, dtype=torch.bool)
    assert not select_kl_cov(covariances, nothing, keys, HighestCovariance(ratio=1.0)).any()
    assert not select_clip_cov(covariances, nothing, keys, CovarianceBand(**CLIP)).any()


def test_selection_does_not_depend_on_the_order_of_rows():
    generator = torch.Generator().manual_seed(0)
    lengths, seeds = [5, 1, 7, 3, 4], [11, 12, 13, 14, 15]
    covariances = torch.randint(-2, 7, (20,), generator=generator) / 1.0  # many are equal
    trainable = torch.rand(20, generator=generator) < 0.8

    def select(order):
        rows = torch.arange(20).split(lengths)
        index = torch.cat([rows[row] for row in order])
        keys = token_keys([seeds[row] for row in order], [lengths[row] for row in order])
        inputs = (covariances[index], trainable[index], keys)
        clip = select_clip_cov(*inputs, CovarianceBand(**CLIP | {"ratio": 0.2}))
        kl = select_kl_cov(*inputs, HighestCovariance(ratio=0.2))
        return set(index[clip].tolist()), set(index[kl].tolist())

    expected = select([0, 1, 2, 3, 4])
    assert all(expected)
    assert select([3, 0, 4, 1, 2]) == expected
    assert select([4, 3, 2, 1, 0]) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"ratio": 1.1}, "ratio=1.1"),
        ({"lb": 5.0}, "lb=5.0: must be below ub=5.0"),
    ],
)
def test_clip_cov_that_selects_nothing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        select_clip_cov(torch.zeros(6), ALL, torch.zeros(6), CovarianceBand(**CLIP | changes))


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_kl_cov_that_selects_nothing_is_refused(ratio):
    with pytest.raises(ValueError, match=f"ratio={ratio}"):
        select_kl_cov(torch.zeros(6), ALL, torch.zeros(6), HighestCovariance(ratio=ratio))


def test_shapes_that_would_broadcast_are_refused():
    one, six = torch.zeros(1), torch.zeros(6)
    with pytest.raises(ValueError, match="shapes differ"):
        covariance(six, one, ALL, mean_logprob=0.0, mean_advantage=0.0)
    with pytest.raises(ValueError, match="shapes differ"):
        covariance_sums(six, one, ALL)
    with pytest.raises(ValueError, match="shapes differ"):
        select_clip_cov(six, ALL, one, CovarianceBand(**CLIP))
    with pytest.raises(ValueError, match="shapes differ"):
        select_kl_cov(six, ALL, one, HighestCovariance(ratio=0.5))
