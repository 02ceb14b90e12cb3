"""What has changed between two lists of weights, sent and applied, is bit by bit the second list."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefrl.generation.weights import wire
from prefrl.generation.weights.delta import Changes, HostCopy

DTYPES = sorted(wire._DTYPES.values(), key=str)
SHAPES = [(), (0, 3), (1,), (7, 11), (3, 1000)]


def random_bits(random: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits: also NaN with payloads, -0.0 and denormals."""
    size = (math.prod(shape) * dtype.itemsize,)
    content = torch.randint(0, 2 if dtype == torch.bool else 256, size, dtype=torch.uint8, generator=random)
    return content.view(dtype).view(shape)


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def are_bit_equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(as_integers(one), as_integers(other))


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from(SHAPES),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_applied_changes_are_the_new_tensor_bit_by_bit(
    dtype: torch.dtype, shape: tuple[int, ...], share: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    old, other = random_bits(random, shape, dtype), random_bits(random, shape, dtype)
    new = torch.where(torch.rand(shape, generator=random) < share, as_integers(other), as_integers(old)).view(dtype)
    changes = Changes.between(old, new)
    if changes is None:
        num_changed = int((as_integers(old) != as_integers(new)).sum())
        assert num_changed * (1 + dtype.itemsize) + new.numel() // 255 >= new.nbytes
        return
    assert changes.nbytes < new.nbytes
    found = old.clone()
    changes.apply(found)
    assert are_bit_equal(found, new)


@given(dtypes=st.permutations(DTYPES), seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 3))
def test_a_copy_that_follows_every_message_is_that_of_the_sender(
    dtypes: list[torch.dtype], seed: int, steps: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    sender, receiver = HostCopy(), HostCopy()
    pairs = list(zip(dtypes, SHAPES, strict=False))
    weights = {f"{dtype}{shape}": random_bits(random, shape, dtype) for dtype, shape in pairs}
    for _ in range(steps + 1):
        receiver.apply([dict(sender.changes(weights.items(), dtype=None))])
        found = list(receiver.weights.items())
        assert sender.fingerprint == receiver.fingerprint
        assert [name for name, _ in found] == list(weights)
        assert all(are_bit_equal(tensor, weights[name]) for name, tensor in found)
        for (dtype, shape), tensor in zip(pairs, weights.values(), strict=True):
            is_changed = torch.rand(shape, generator=random) < 0.01  # the sender has its own copy
            as_integers(tensor)[is_changed] = as_integers(random_bits(random, shape, dtype))[is_changed]


@pytest.mark.parametrize("distance", [0, 1, 254, 255, 256, 510, 511, 9999])
def test_one_change_far_from_the_start_takes_a_byte_for_every_255_elements(distance: int) -> None:
    old = torch.zeros(10_000, dtype=torch.bfloat16)
    new = old.clone()
    new[distance] = -0.0
    changes = Changes.between(old, new)
    assert changes is not None
    assert changes.nbytes == distance // 255 + 1 + 2
    found = old.clone()
    changes.apply(found)
    assert are_bit_equal(found, new)
