"""What holds of the losses for any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.advantages import group_advantages
from prefrl.losses.kl import k3
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.policy import POLICY_LOSSES, sequence_log_ratio
from prefrl.losses.reduce import item_count, token_weights

quick = settings(max_examples=40, deadline=None, derandomize=True)
REDUCTIONS = ("token", "sequence_mean", "sequence_sum", "constant")
SCALES = [("group", "sum_then_normalize"), ("batch", "sum_then_normalize"), ("none", "sum_then_normalize"),
          ("group", "normalize_then_sum")]  # fmt: skip


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
    if level == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, trainable, row_index, num_rows)
    token_loss = POLICY_LOSSES["grpo"].function(
        log_ratio, batch["advantages"], clip_low=0.2, clip_high=0.28, delta=None
    )
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


@st.composite
def reward_tables(draw):
    """Rewards [B, K] with holes, weights [K] and groups [B] of any sizes, interleaved."""
    num_rows, num_rewards = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    value = st.one_of(st.just(float("nan")), st.integers(-4, 4).map(lambda i: i / 4))
    row = st.lists(value, min_size=num_rewards, max_size=num_rewards)
    rewards = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    weights = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_rewards, max_size=num_rewards))
    groups = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(weights), torch.tensor(groups)


def values(rewards, weights, groups, scale, aggregation):
    return group_advantages(rewards, weights, groups, scale=scale, aggregation=aggregation, epsilon=1e-4).values


@pytest.mark.parametrize(("scale", "aggregation"), SCALES)
@quick
@given(table=reward_tables())
def test_advantages_of_a_group_sum_to_zero(scale, aggregation, table):
    found = values(*table, scale, aggregation)
    sums = torch.zeros(4).index_add(0, table[2], found)
    torch.testing.assert_close(sums, torch.zeros(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("scale", "aggregation"), SCALES)
@quick
@given(table=reward_tables(), data=st.data())
def test_advantages_ignore_a_constant_of_each_reward(scale, aggregation, table, data):
    rewards, weights, groups = table
    # A missing reward counts as 0 in a sum of rewards, so there a constant may be added where none is missing.
    if aggregation == "sum_then_normalize":
        rewards = rewards.nan_to_num(nan=0.25)
    shift = torch.tensor(data.draw(st.lists(st.integers(-9, 9), min_size=len(weights), max_size=len(weights))))
    shifts = shift.double().expand_as(rewards)
    if scale != "batch":  # each group may have its own, as long as the batch's spread is not asked for
        shifts = shifts * (groups[:, None] + 1)
    found = values(rewards + shifts, weights, groups, scale, aggregation)
    torch.testing.assert_close(found, values(rewards, weights, groups, scale, aggregation), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("scale", "aggregation"), SCALES)
@quick
@given(table=reward_tables(), data=st.data())
def test_advantages_follow_their_rows_in_any_order(scale, aggregation, table, data):
    rewards, weights, groups = table
    order = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    renumbered = 1000 - 7 * groups[order]
    found = values(rewards[order], weights, renumbered, scale, aggregation)
    torch.testing.assert_close(found, values(*table, scale, aggregation)[order], atol=1e-6, rtol=1e-5)


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
