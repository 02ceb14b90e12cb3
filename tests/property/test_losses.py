"""Properties of the losses that hold for any batch."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.advantage.balance import NASH_RIDGE, REWARD_BALANCES, RewardBalancer, gram, squared_weights
from prefrl.losses.kl import k3
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.per_token import item_count, token_weights
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS, importance_weights
from prefrl.losses.policy.tokens import PolicyTokens
from prefrl.options.policy import ClipParams

quick = settings(max_examples=40, deadline=None, derandomize=True)
REDUCTIONS = ("token", "sequence_mean", "sequence_sum", "constant")


@st.composite
def batches(draw):
    """Rows of 1 to 6 tokens: lengths, and per token a log-ratio, an advantage and whether it is trainable."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_tokens = sum(lengths)
    return {
        "lengths": lengths,
        "log_ratio": torch.randn(num_tokens, generator=generator),
        "advantages": torch.randn(len(lengths), generator=generator).repeat_interleave(torch.tensor(lengths)),
        "trainable": torch.rand(num_tokens, generator=generator) < 0.6,
    }


def select(batch, rows):
    parts = {name: value.split(batch["lengths"]) for name, value in batch.items() if name != "lengths"}
    chosen = {name: torch.cat([part[row] for row in rows]) for name, part in parts.items()}
    return chosen | {"lengths": [batch["lengths"][row] for row in rows]}


def total_and_count(batch, *, reduction, level="token"):
    lengths = torch.tensor(batch["lengths"])
    num_rows = len(lengths)
    row_index = torch.arange(num_rows).repeat_interleave(lengths)
    trainable, log_ratio = batch["trainable"], batch["log_ratio"]
    old = torch.zeros_like(log_ratio)
    tokens = PolicyTokens(log_ratio, old, batch["advantages"], trainable, row_index, num_rows, level=level)
    token_loss = POLICY_LOSSES["grpo"].function(tokens, ClipParams(epsilon_high=0.28))
    weights = token_weights(trainable, row_index, num_rows, reduction=reduction)
    constant = 7.0 if reduction == "constant" else None
    count = item_count(trainable, row_index, num_rows, reduction=reduction, constant=constant)
    return (weights * token_loss.loss).sum(), count


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@quick
@given(batch=batches(), data=st.data())
def test_row_order_changes_nothing(reduction, level, batch, data):
    order = data.draw(st.permutations(range(len(batch["lengths"]))))
    total, count = total_and_count(batch, reduction=reduction, level=level)
    other_total, other_count = total_and_count(select(batch, order), reduction=reduction, level=level)
    torch.testing.assert_close(other_total, total, atol=1e-5, rtol=1e-5)
    assert other_count == count


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@quick
@given(batch=batches(), data=st.data())
def test_sum_over_shards_is_the_whole(reduction, level, batch, data):
    num_rows = len(batch["lengths"])
    shard_of = data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    shards = [[row for row in range(num_rows) if shard_of[row] == shard] for shard in set(shard_of)]
    parts = [total_and_count(select(batch, rows), reduction=reduction, level=level) for rows in shards]
    total, count = total_and_count(batch, reduction=reduction, level=level)
    torch.testing.assert_close(sum(part[0] for part in parts), total, atol=1e-5, rtol=1e-5)
    assert sum(part[1] for part in parts) == count


@quick
@given(
    difference=st.floats(-80, 80, width=32),
    exponent=st.integers(0, 10),
    logprob=st.floats(-30, 0, width=32),
)
def test_k3_is_never_negative(difference, exponent, logprob):
    logprobs = torch.tensor([logprob])
    assert k3(logprobs, logprobs + difference / 10**exponent).item() >= 0.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@quick
@given(num_rows=st.integers(0, 9), chunk_size=st.integers(1, 10), seed=st.integers(0, 2**31))
def test_logprobs_do_not_depend_on_the_chunk_size(temperature, num_rows, chunk_size, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(num_rows, 3, generator=generator), torch.randn(5, 3, generator=generator)
    targets = torch.randint(5, (num_rows,), generator=generator)
    options = {"temperature": temperature, "want": ("entropy", "correct")}
    cut = chunked_logprobs(hidden, targets, Head(weight), **options, chunk_size=chunk_size)
    whole = chunked_logprobs(hidden, targets, Head(weight), **options, chunk_size=100)
    torch.testing.assert_close(cut.logprobs, whole.logprobs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut.entropy, whole.entropy, atol=1e-6, rtol=1e-5)
    assert (cut.entropy >= -1e-6).all()
    assert (cut.logprobs <= 1e-6).all()
    assert cut.correct.dtype == torch.bool


modes = pytest.mark.parametrize("mode", OFF_POLICY_CORRECTIONS)
SUMS = ("difference_sum", "num_tokens", "ratio_sum", "ratio_square_sum", "num_ratios", "num_cut")
BOUNDS = st.tuples(
    st.one_of(st.none(), st.floats(0.1, 1.0)),
    st.one_of(st.none(), st.floats(1.0, 5.0)),
)


@st.composite
def corrected_batches(draw):
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
@given(batch=corrected_batches(), bounds=BOUNDS, data=st.data())
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
@given(batch=corrected_batches(), bounds=BOUNDS)
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
@given(batch=corrected_batches(), bounds=BOUNDS)
def test_samples_of_the_policy_itself_weigh_one(mode, batch, bounds):
    result = weights_of([(0 * log_ratio, trainable) for log_ratio, trainable in batch], mode, bounds)
    assert result.weights.tolist() == torch.cat([row[1] for row in batch]).double().tolist()
    assert result.num_cut == 0
    assert result.ratio_sum == result.ratio_square_sum == result.num_ratios


@quick
@given(batch=corrected_batches(), bounds=BOUNDS, bound=st.sampled_from(["truncate", "mask"]))
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


HYPERPARAMETERS = {
    "uncertainty": {"rate": 0.3},
    "gradnorm": {"alpha": 1.5, "rate": 0.3},
    "famo": {"rate": 2.0, "decay": 0.05},
    "pareto": {"smoothing": 0.5},
}
every_balance = pytest.mark.parametrize("balance", REWARD_BALANCES)


@st.composite
def histories(draw):
    """One to four batches of B rows and K rewards with advantages, and weights of the rewards.

    Some rewards are copies or opposites of others, equal for all rows, or have nothing to say.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_rewards = draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from(["own", "own", "copy", "opposite", "equal", "none"]), min_size=num_rewards,
                          max_size=num_rewards))  # fmt: skip
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        rewards = torch.randn(draw(st.integers(2, 8)), num_rewards, generator=generator, dtype=torch.float64)
        for k, kind in enumerate(kinds):
            replaced = {"copy": rewards[:, 0], "opposite": -rewards[:, 0], "equal": torch.tensor(0.5),
                        "none": torch.tensor(torch.nan)}  # fmt: skip
            rewards[:, k] = replaced.get(kind, rewards[:, k])
        advantages = rewards - rewards.mean(0)
        advantages = torch.where((rewards == rewards[0]).all(0) | rewards.isnan(), 0.0, advantages)
        lengths = torch.randint(0, 9, (len(rewards),), generator=generator)
        batches.append((rewards, advantages, lengths))
    weights = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 5.0]), min_size=num_rewards, max_size=num_rewards))
    return batches, weights


def make(balance, weights):
    params = REWARD_BALANCES[balance].params(**HYPERPARAMETERS.get(balance, {}))
    return RewardBalancer(balance, params, reward_weights=weights)


def matrix_of(advantages, lengths):
    return gram(advantages, squared_weights(lengths, reduction="sequence_mean"))


@quick
@given(history=histories(), cut=st.integers(0, 8))
def test_gram_adds_up_over_shards(history, cut):
    for _, advantages, lengths in history[0]:
        parts = matrix_of(advantages[:cut], lengths[:cut]) + matrix_of(advantages[cut:], lengths[cut:])
        torch.testing.assert_close(parts, matrix_of(advantages, lengths))


@every_balance
@quick
@given(history=histories())
def test_alphas_are_finite_and_share_out_the_length_of_fixed_weights(balance, history):
    batches, weights = history
    balancer = make(balance, weights)
    for rewards, advantages, lengths in batches:
        matrix = matrix_of(advantages, lengths)
        alphas = balancer.weights(matrix, rewards)
        norms = matrix.diagonal().sqrt()
        fixed = torch.tensor(weights, dtype=torch.float64)
        assert ((alphas >= 0) & alphas.isfinite()).all()
        torch.testing.assert_close((alphas * norms).sum(), (fixed * norms).sum(), rtol=1e-12, atol=0.0)
        silent = (norms == 0) | (fixed == 0)
        assert torch.equal(alphas[silent], fixed[silent])


@every_balance
@quick
@given(history=histories(), data=st.data())
def test_order_of_rewards_changes_nothing(balance, history, data):
    batches, weights = history
    order = torch.tensor(data.draw(st.permutations(range(len(weights)))))
    plain, shuffled = make(balance, weights), make(balance, [weights[k] for k in order.tolist()])
    for rewards, advantages, lengths in batches:
        expected = plain.weights(matrix_of(advantages, lengths), rewards)
        found = shuffled.weights(matrix_of(advantages[:, order], lengths), rewards[:, order])
        torch.testing.assert_close(found, expected[order], rtol=1e-8, atol=1e-12)


@every_balance
@quick
@given(history=histories())
def test_state_goes_through_json(balance, history):
    batches, weights = history
    balancer, resumed = make(balance, weights), make(balance, weights)
    for rewards, advantages, lengths in batches:
        matrix = matrix_of(advantages, lengths)
        resumed.load_state_dict(json.loads(json.dumps(balancer.state_dict(), allow_nan=False)))
        assert resumed.weights(matrix, rewards).tolist() == balancer.weights(matrix, rewards).tolist()
        assert resumed.state_dict() == balancer.state_dict()


@quick
@given(history=histories())
def test_nash_solves_its_equation(history):
    batches, weights = history
    balancer = make("nash", weights)
    for rewards, advantages, lengths in batches:
        matrix = matrix_of(advantages, lengths)
        alphas = balancer.weights(matrix, rewards)
        powers = torch.tensor(weights, dtype=torch.float64)
        active = (matrix.diagonal() > 0) & (powers > 0)
        if active.any():
            matrix = (matrix + NASH_RIDGE * torch.diag(matrix.diagonal()))[active][:, active]
            products = alphas[active] * (matrix @ alphas[active]) / powers[active]
            torch.testing.assert_close(products, products.mean().expand_as(products), rtol=1e-9, atol=0.0)
