"""Properties of the losses that hold for any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.kl import k3
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.per_token import item_count, token_weights
from prefrl.losses.policy.losses import POLICY_LOSSES, PolicyTokens
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
