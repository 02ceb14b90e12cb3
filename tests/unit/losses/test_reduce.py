import pytest
import torch

from prefrl.losses.per_token import item_count, row_items, token_weights, trainable_per_row

# Rows of 3, 1 and 2 tokens, not in order; row 2 has no trainable token.
ROW_INDEX = torch.tensor([0, 1, 0, 2, 0, 2])
TRAINABLE = torch.tensor([True, True, False, False, True, False])
LOSS = torch.tensor([1.0, 10.0, 100.0, 1000.0, 3.0, 1000.0])


@pytest.mark.parametrize(
    ("reduction", "constant", "weights", "count", "loss"),
    [
        ("token", None, [1, 1, 0, 0, 1, 0], 3.0, 14 / 3),
        ("sequence_mean", None, [0.5, 1, 0, 0, 0.5, 0], 3.0, (2 + 10 + 0) / 3),
        ("sequence_sum", None, [1, 1, 0, 0, 1, 0], 3.0, (4 + 10 + 0) / 3),
        ("constant", 8.0, [1, 1, 0, 0, 1, 0], 24.0, 14 / 24),
    ],
)
def test_hand_numbers(reduction, constant, weights, count, loss):
    found = token_weights(TRAINABLE, ROW_INDEX, 3, reduction=reduction)
    items = item_count(TRAINABLE, ROW_INDEX, 3, reduction=reduction, constant=constant)
    assert found.dtype == items.dtype == torch.float32
    assert found.tolist() == weights
    assert items.shape == ()
    assert items.item() == count
    assert ((found * LOSS).sum() / items).item() == pytest.approx(loss)


@pytest.mark.parametrize(
    ("reduction", "constant", "items"),
    [
        ("token", None, [2, 1, 0]),
        ("sequence_mean", None, [1, 1, 1]),
        ("sequence_sum", None, [1, 1, 1]),
        ("constant", 8.0, [8, 8, 8]),
    ],
)
def test_items_of_rows(reduction, constant, items):
    found = row_items(TRAINABLE, ROW_INDEX, 3, reduction=reduction, constant=constant)
    assert found.dtype == torch.float32
    assert found.tolist() == items


def test_trainable_per_row_counts_only_those():
    assert trainable_per_row(TRAINABLE, ROW_INDEX, 4).tolist() == [2.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("reduction", ["token", "sequence_mean", "sequence_sum", "constant"])
def test_no_tokens_have_no_weight(reduction):
    nothing = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.long), 0
    assert token_weights(*nothing, reduction=reduction).shape == (0,)
    constant = 5.0 if reduction == "constant" else None
    assert item_count(*nothing, reduction=reduction, constant=constant).item() == 0.0


@pytest.mark.parametrize(
    ("reduction", "constant", "message"),
    [
        ("constant", None, "constant=None: reduction='constant' needs a positive number of tokens"),
        ("constant", 0.0, "constant=0.0: reduction='constant' needs a positive number of tokens"),
        ("token", 8.0, "constant=8.0 has no effect with reduction='token'"),
    ],
)
def test_constant_goes_with_its_reduction_alone(reduction, constant, message):
    with pytest.raises(ValueError, match=message):
        item_count(TRAINABLE, ROW_INDEX, 3, reduction=reduction, constant=constant)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: trainable \(6,\), row_index \(1,\)"):
        token_weights(TRAINABLE, ROW_INDEX[:1], 3, reduction="token")
