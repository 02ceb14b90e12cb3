"""Properties of importance weights for any batch, and exact ones for a policy small enough to enumerate."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights

quick = settings(max_examples=40, deadline=None, derandomize=True)
modes = pytest.mark.parametrize("mode", OFF_POLICY_CORRECTIONS)
SUMS = ("difference_sum", "num_tokens", "ratio_sum", "ratio_square_sum", "num_ratios", "num_cut")
BOUNDS = st.tuples(
    st.one_of(st.none(), st.floats(0.1, 1.0)),
    st.one_of(st.none(), st.floats(1.0, 5.0)),
)


@st.composite
def batches(draw):
    """Rows of 1 to 6 tokens: per token a log-ratio and whether it is trainable."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.01, 0.5, 3.0]))
    return [
        (scale * torch.randn(n, generator=generator, dtype=torch.float64), torch.rand(n, generator=generator) < 0.6)
        for n in lengths
    ]


def weights_of(rows, mode, bounds):
    row = OFF_POLICY_CORRECTIONS[mode]
    row_index = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r[0]) for r in rows]))
    return importance_weights(
        torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows]), row_index, len(rows),
        level=row.level, bound=row.bound, low=bounds[0], high=bounds[1],
    )  # fmt: skip


@modes
@quick
@given(batch=batches(), bounds=BOUNDS, data=st.data())
def test_neither_row_order_nor_how_rows_share_a_batch_changes_weights(mode, batch, bounds, data):
    order = data.draw(st.permutations(range(len(batch))))
    together = weights_of([batch[i] for i in order], mode, bounds)
    alone = [weights_of([batch[i]], mode, bounds) for i in order]
    torch.testing.assert_close(together.weights, torch.cat([one.weights for one in alone]), rtol=1e-12, atol=0)
    for name in SUMS:
        torch.testing.assert_close(getattr(together, name), sum(getattr(one, name) for one in alone))
    assert together.ratio_min == min(one.ratio_min for one in alone)
    assert together.ratio_max == max(one.ratio_max for one in alone)
    assert together.difference_max == max(one.difference_max for one in alone)


@modes
@quick
@given(batch=batches(), bounds=BOUNDS)
def test_weights_are_within_the_bounds_and_untouched_inside(mode, batch, bounds):
    low, high = bounds[0] or 0.0, bounds[1] or float("inf")
    bounded, free = weights_of(batch, mode, bounds), weights_of(batch, mode, (None, None))
    trainable = torch.cat([row[1] for row in batch])
    inside = trainable & (free.weights >= low) & (free.weights <= high)
    torch.testing.assert_close(bounded.weights[inside], free.weights[inside])
    outside = bounded.weights[trainable & ~inside]
    if mode.endswith("mask"):
        assert (outside == 0).all()
    else:
        expected = free.weights[trainable & ~inside].clamp(low, high)
        torch.testing.assert_close(outside, expected)


@modes
@quick
@given(batch=batches(), bounds=BOUNDS)
def test_samples_of_the_policy_itself_weigh_one(mode, batch, bounds):
    result = weights_of([(0 * log_ratio, trainable) for log_ratio, trainable in batch], mode, bounds)
    assert result.weights.tolist() == torch.cat([row[1] for row in batch]).double().tolist()
    assert result.num_cut == 0
    assert result.ratio_sum == result.ratio_square_sum == result.num_ratios


@quick
@given(batch=batches(), bounds=BOUNDS, bound=st.sampled_from(["truncate", "mask"]))
def test_all_levels_agree_on_rows_of_one_token(batch, bounds, bound):
    rows = [(log_ratio[:1], trainable[:1]) for log_ratio, trainable in batch]
    token, *others = (
        weights_of(rows, f"{level}_{bound}", bounds).weights for level in ("token", "sequence", "geometric")
    )
    for other in others:
        assert other.equal(token)


# Every response of two tokens from a vocabulary of three, under two policies: E_mu is a sum over all of them.
RESPONSES = list(itertools.product(range(3), range(3)))


@pytest.fixture
def policies():
    """Log-probs of pi and of mu, [9, 2]: of a first token, and of a second one given the first."""
    generator = torch.Generator().manual_seed(3)
    both = []
    for _ in range(2):
        first = torch.randn(3, generator=generator, dtype=torch.float64).log_softmax(0)
        second = torch.randn(3, 3, generator=generator, dtype=torch.float64).log_softmax(1)
        both.append(torch.stack([torch.stack([first[a], second[a, b]]) for a, b in RESPONSES]))
    return both


def enumerated(policies, mode, bounds=(None, None)):
    """[9, 2] weights of every response's tokens."""
    pi, mu = policies
    rows = [(log_ratio, torch.ones(2, dtype=torch.bool)) for log_ratio in pi - mu]
    return weights_of(rows, mode, bounds).weights.reshape(9, 2)


VALUES = torch.tensor([1.0, -2, 0.5, 3, 0, -1, 2, 0.25, -4], dtype=torch.float64)


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_weights_of_sequences_without_bounds_are_unbiased(policies, mode):
    pi, mu = policies
    weights = enumerated(policies, mode)
    expected = (pi.sum(1).exp() * VALUES).sum()
    for token in range(2):
        assert (mu.sum(1).exp() * weights[:, token] * VALUES).sum().item() == pytest.approx(
            expected.item(), rel=0, abs=1e-10
        )
    assert abs((mu.sum(1).exp() * VALUES).sum() - expected) > 0.1


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_weights_of_tokens_without_bounds_are_unbiased_given_the_tokens_before(policies, mode):
    pi, mu = policies
    weights = enumerated(policies, mode)
    values = VALUES.reshape(3, 3)
    first = slice(0, 9, 3)  # one response for each first token
    found = (mu[first, 0].exp() * weights[first, 0] * values[:, 0]).sum()
    torch.testing.assert_close(found, (pi[first, 0].exp() * values[:, 0]).sum(), rtol=0, atol=1e-10)
    second_mu, second_pi, second_weights = (x[:, 1].reshape(3, 3) for x in (mu, pi, weights))
    found = (second_mu.exp() * second_weights * values).sum(1)
    torch.testing.assert_close(found, (second_pi.exp() * values).sum(1), rtol=0, atol=1e-10)
    # The tokens before are still mu's: not an expectation under pi.
    whole = (mu.sum(1).exp() * weights[:, 1] * VALUES).sum() - (pi.sum(1).exp() * VALUES).sum()
    assert abs(whole) > 0.05


@modes
def test_bounds_only_take_weight_away_from_what_mu_samples_too_rarely(policies, mode):
    mu = policies[1]
    total = (mu.sum(1).exp() * enumerated(policies, mode, (None, 1.2))[:, 0]).sum()
    unbounded = (mu.sum(1).exp() * enumerated(policies, mode)[:, 0]).sum()
    assert total < unbounded - 0.01
