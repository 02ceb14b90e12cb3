"""Reuse and storage of rollouts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from prefrl.errors import DataError
from prefrl.metrics import Max, Mean, Min
from prefrl.rollout.batches import Minibatch, RolloutBuffer
from prefrl.rollout.selection import visit_order
from prefrl.trainer.online.policy_terms import CriticBatch
from prefrl.types import LabeledBatch, ReadyBatch, TokenBatch

METRICS = {"entropy": Mean(0.1, 3.0), "low": Min(0.25), "high": Max(0.75)}


def batch(start: int) -> ReadyBatch:
    return ReadyBatch(
        prompt_ids=torch.tensor([start, start + 1, start + 2]),
        prompt_lengths=(1, 2),
        prompt_index=(0, 1, 1),
        response_ids=torch.arange(6) + start,
        response_lengths=(3, 1, 2),
        trainable=torch.tensor([True, False, True, True, True, False]),
        group_index=(4, 5, 5),
        sampling_logprobs=torch.linspace(-2, -1, 6) / 3,
        advantages=torch.linspace(-1, 1, 6) / 3,
        loss_scale=torch.ones(6),
    )


def filled(num_iterations: int = 2) -> RolloutBuffer[ReadyBatch]:
    buffer = RolloutBuffer(num_iterations, ReadyBatch)
    buffer.fill([Minibatch([batch(10), batch(20)], 6.0, METRICS), Minibatch([batch(30)], 3.0)])
    return buffer


def test_minibatches_come_in_the_same_order_in_each_iteration() -> None:
    buffer = filled()
    starts = []
    while not buffer.is_spent:
        starts.append(int(buffer.next().micro_batches[0].response_ids[0]))
    assert starts == [10, 30, 10, 30]
    with pytest.raises(IndexError, match="spent"):
        buffer.next()


def test_later_passes_have_orders_of_their_own_which_survive_storage(tmp_path: Path) -> None:
    order = visit_order(4, 3, seed=0, generation=2)
    passes = [order[:4], order[4:8], order[8:]]
    assert passes[0] == [0, 1, 2, 3]
    assert [sorted(one) for one in passes] == [[0, 1, 2, 3]] * 3
    assert len({tuple(one) for one in passes}) == 3
    assert visit_order(4, 3, seed=0, generation=2) == order
    assert len({tuple(visit_order(4, 3, seed=seed, generation=g)) for seed in (0, 1) for g in (2, 3)}) == 4
    buffer = RolloutBuffer(3, ReadyBatch)
    buffer.fill([Minibatch([batch(10 * i)], 6.0) for i in range(4)], order=order)
    starts = [int(buffer.next().micro_batches[0].response_ids[0]) for _ in range(6)]
    buffer.change_visited(with_old, [torch.full((6,), -1.0)])
    assert [batch.old_logprobs is not None for one in buffer.minibatches for batch in one.micro_batches] == [
        i == order[5] for i in range(4)
    ]
    buffer.save(tmp_path / "rollouts.safetensors")
    restored = RolloutBuffer(3, ReadyBatch)
    restored.load(tmp_path / "rollouts.safetensors")
    while not restored.is_spent:
        starts.append(int(restored.next().micro_batches[0].response_ids[0]))
    assert starts == [10 * i for i in order]


def with_old(batch: ReadyBatch, logprobs: torch.Tensor) -> ReadyBatch:
    return batch.replace(old_logprobs=logprobs)


def test_old_logprobs_are_kept_for_the_minibatch_handed_out_last() -> None:
    buffer = filled()
    buffer.next()
    buffer.change_visited(with_old, [torch.full((6,), -1.0), torch.full((6,), -2.0)])
    assert buffer.next().micro_batches[0].old_logprobs is None
    again = buffer.next().micro_batches
    assert [float(b.old_logprobs[0]) for b in again if b.old_logprobs is not None] == [-1.0, -2.0]
    assert buffer.minibatches[0].metrics == METRICS


def test_a_buffer_survives_storage_bit_by_bit(tmp_path: Path) -> None:
    buffer = filled()
    buffer.next()
    buffer.save(tmp_path / "rollouts.safetensors")
    restored = RolloutBuffer(2, ReadyBatch)
    restored.load(tmp_path / "rollouts.safetensors")
    assert restored.position == 1
    assert restored.minibatches[0].metrics == METRICS
    for mine, theirs in zip(buffer.minibatches, restored.minibatches, strict=True):
        assert mine.num_items == theirs.num_items
        assert mine.metrics == theirs.metrics
        for a, b in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            assert (a.prompt_lengths, a.prompt_index, a.response_lengths, a.group_index) == (
                b.prompt_lengths,
                b.prompt_index,
                b.response_lengths,
                b.group_index,
            )
            assert a.tensors().keys() == b.tensors().keys()
            assert all(torch.equal(tensor, b.tensors()[name]) for name, tensor in a.tensors().items())


FULL: list[TokenBatch] = [
    CriticBatch.of(
        batch(10),
        old_logprobs=torch.arange(6.0),
        ref_logprobs=torch.arange(6.0) + 1,
        ref_hidden=torch.arange(12.0, dtype=torch.float64).view(6, 2),
        teacher_logprobs=torch.arange(6.0) - 1,
        entropies=torch.arange(6.0) + 2,
        values=torch.arange(6.0) + 3,
        returns=torch.arange(6.0) + 4,
        nll_weights=torch.zeros(6),
        entropy_weights=torch.zeros(6),
        cov_tokens=torch.tensor([True, False] * 3),
    ),
    LabeledBatch.of(batch(10), is_preferred=(True, False, None), weights=(1.0, 0.5, 1 / 3)),
    TokenBatch.of(batch(10), prompt_parent=(-1, 0), response_row=(0, 1, 1), group_index=(4, 5), trainable_counts=()),
]


@pytest.mark.parametrize("full", FULL, ids=lambda full: type(full).__name__)
def test_every_field_of_a_stage_is_stored(full: TokenBatch, tmp_path: Path) -> None:
    names = [f.name for f in fields(full)]
    numbers = torch.arange(100, dtype=torch.uint8).view(-1, 2, 1)  # experts: one of two routers for each token
    full = full.replace(prompt_routes=numbers[: len(full.prompt_ids)], response_routes=numbers[-full.num_tokens :])
    assert [name for name in names if getattr(full, name) is None] == [], "a new field: set it above"
    buffer = RolloutBuffer(1, type(full))
    buffer.fill([Minibatch([full], 3.0)])
    buffer.save(tmp_path / "rollouts.safetensors")
    buffer.load(tmp_path / "rollouts.safetensors")
    (restored,) = buffer.minibatches[0].micro_batches
    assert type(restored) is type(full)
    for name in names:
        value, found = getattr(full, name), getattr(restored, name)
        is_same = torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found
        assert is_same, name


def test_a_spent_buffer_is_stored_empty(tmp_path: Path) -> None:
    buffer = filled(1)
    buffer.next()
    buffer.next()
    buffer.save(tmp_path / "rollouts.safetensors")
    restored = RolloutBuffer(1, ReadyBatch)
    restored.load(tmp_path / "rollouts.safetensors")
    assert restored.is_spent


def test_another_number_of_iterations_is_refused(tmp_path: Path) -> None:
    filled().save(tmp_path / "rollouts.safetensors")
    with pytest.raises(DataError, match=r"num_iterations was 2 .* is 3 now"):
        RolloutBuffer(3, ReadyBatch).load(tmp_path / "rollouts.safetensors")


def test_rollouts_are_dealt_to_another_number_of_ranks(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    for rank, path in enumerate(paths):
        buffer = RolloutBuffer(2, ReadyBatch)
        first = Minibatch([batch(10 + 40 * rank), batch(20 + 40 * rank)], 6.0, {"m": Mean(1.0 + rank, 2)})
        buffer.fill([first, Minibatch([], 3.0)])
        buffer.next()
        buffer.change_visited(with_old, [torch.full((6,), -1.0 - rank), torch.full((6,), -3.0 - rank)])
        buffer.save(path)
    dealt = [RolloutBuffer(2, ReadyBatch) for _ in range(3)]
    for rank, buffer in enumerate(dealt):
        buffer.load_share(paths, cut=lambda rows: rows.chunks(3), rank=rank, world_size=3)
    firsts = [buffer.minibatches[0] for buffer in dealt]
    starts = [[int(rows.response_ids[0]) for rows in first.micro_batches] for first in firsts]
    assert starts == [[10, 60], [20], [50]]
    old = [float(rows.old_logprobs[0]) for first in firsts for rows in first.micro_batches]  # type: ignore[index]
    assert old == [-1.0, -4.0, -3.0, -2.0]
    assert [[minibatch.num_items for minibatch in buffer.minibatches] for buffer in dealt] == [[12, 6], [0, 0], [0, 0]]
    assert [buffer.position for buffer in dealt] == [1, 1, 1]
    assert [first.metrics for first in firsts] == [{"m": Mean(3.0, 4.0)}, {}, {}]
