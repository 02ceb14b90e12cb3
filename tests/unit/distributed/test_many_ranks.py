"""Up to 512 ranks in one process: what each rank would take, hold, send and write, and that all of it is the whole."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from prefrl import distributed
from prefrl.data import samplers as dealing_module
from prefrl.data.packing import map_rows
from prefrl.data.samplers import Dealing, StepBatchSampler, deal, positions_of_rank
from prefrl.distributed import shards
from prefrl.distributed.processes import form_teams
from prefrl.errors import DataError
from prefrl.rollout.batches import Minibatch, RolloutBuffer
from prefrl.rollout.journal import Journal
from prefrl.scripts.report_page import _FILE
from prefrl.trainer.online.minibatches import share_out
from prefrl.types import LabeledBatch
from tests.unit.distributed.test_orders import labeled
from tests.unit.rollout.test_journal import part

IDS = datasets.List(datasets.Value("int64"))
WORLDS = [8, 64, 512]
many = pytest.mark.parametrize("world", WORLDS)


@pytest.fixture
def pretended(world: int) -> Iterator[int]:
    """This process is the last of many; its collectives give it its own values back."""
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    yield world
    form_teams(1)
    dist.destroy_process_group()


def ragged(count: int, *, most: float = 4096) -> list[float]:
    """Lengths of which few are large."""
    draws = random.Random(count)
    return [min(draws.lognormvariate(6, 1), most) for _ in range(count)]


@many
@pytest.mark.parametrize("rows_per_rank", [0.3, 1.0, 7.4])
def test_each_item_is_dealt_to_one_rank_and_ranks_cost_about_the_same(world: int, rows_per_rank: float) -> None:
    costs = ragged(int(world * rows_per_rank))
    for equal_counts in (True, False):
        parts = deal(costs, world, equal_counts=equal_counts)
        assert len(parts) == world
        assert sorted(item for some in parts for item in some) == list(range(len(costs)))
        loads, counts = [sum(costs[item] for item in some) for some in parts], [len(some) for some in parts]
        assert max(counts) - min(counts) <= 1 or not equal_counts
        mean = sum(costs) / world
        assert max(loads) <= 4 / 3 * max(mean, *costs)  # Graham's bound, with the least that is possible at best
        if rows_per_rank > 7:
            assert max(loads) <= 1.05 * max(mean, *costs)


@many
@pytest.mark.parametrize("is_dealt", [True, False])
def test_every_rank_has_as_many_micro_batches_and_each_row_is_on_one(
    world: int, is_dealt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each rank deals the rows of a step for itself; here, all of them are in one process.
    remembered = lru_cache(lambda costs, parts: deal(costs, parts, equal_counts=False))
    monkeypatch.setattr(dealing_module, "deal", lambda costs, parts, **_: remembered(tuple(costs), parts))
    num_rows = 2 * world + world // 3  # a full step, and one in which most ranks have no row
    costs = ragged(num_rows)
    dealing = Dealing(lambda row: costs[row], equal_counts=False) if is_dealt else None
    ranks = [
        StepBatchSampler(
            num_rows,
            micro_batch_size=1,
            micro_batches_per_step=2,
            rank=rank,
            world_size=world,
            dealing=dealing,
            shuffle=True,
        )
        for rank in range(world)
    ]
    batches = [list(sampler) for sampler in ranks]
    assert {len(of_rank) for of_rank in batches} == {4}
    rows = [row for of_rank in batches for batch in of_rank for row in batch]
    assert sorted(rows) == list(range(num_rows))
    per_step = [[sum(map(len, of_rank[start : start + 2])) for of_rank in batches] for start in (0, 2)]
    assert [sum(counts) for counts in per_step] == [2 * world, world // 3]


@many
@pytest.mark.parametrize("prompts_per_rank", [0.5, 1.0, 1.7, 6.0])
def test_each_prompt_is_sampled_on_one_rank(world: int, prompts_per_rank: float) -> None:
    count = int(world * prompts_per_rank)
    shares = [positions_of_rank(count, num_updates=3, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(position for share in shares for position in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@many
def test_ranks_learn_from_prompts_of_every_update(world: int) -> None:
    shares = [positions_of_rank(6 * world, num_updates=3, rank=rank, world_size=world) for rank in range(world)]
    for update in range(3):
        positions = sorted(position for of_rank in shares for position in of_rank[2 * update : 2 * update + 2])
        assert positions == list(range(2 * world * update, 2 * world * (update + 1)))


def test_rollouts_of_fewer_ranks_are_shared_by_more_and_counted_once(tmp_path: Path) -> None:
    before, now = 8, 24
    paths = [tmp_path / distributed.rollouts_file(rank, before) for rank in range(before)]
    for rank, path in enumerate(paths):
        buffer = RolloutBuffer(1, LabeledBatch)
        buffer.fill([Minibatch([labeled([1 + rank] * 3, 3 * rank)] if rank % 3 else [], 3.0 * (rank % 3 > 0))])
        buffer.save(path)
    groups, counts = [], []
    for rank in range(now):
        buffer = RolloutBuffer(1, LabeledBatch)
        buffer.load_share(paths, cut=lambda batch: batch.chunks(2), rank=rank, world_size=now)
        minibatch = buffer.next()
        counts.append(minibatch.num_items)
        groups += [group for batch in minibatch.micro_batches for group in batch.group_index]
    assert sum(counts) == len(groups) == 15
    assert sorted(groups) == [group for rank in range(before) if rank % 3 for group in range(3 * rank, 3 * rank + 3)]


def backends(count: int) -> list[distributed.Partition]:
    zero = [
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage, "zero3_save_16bit_model": True}}
        for stage in (1, 2, 3)
    ]
    configs: list[dict[str, Any]] = [{"distributed_type": "MULTI_GPU"}, *zero, {"distributed_type": "FSDP"}]
    return [distributed.partition_of(config, count, option="accelerate_config") for config in configs]


@many
def test_no_two_ranks_write_the_same_file_and_names_sort_by_rank(world: int, tmp_path: Path) -> None:
    for backend in backends(world):
        for is_bf16 in (True, False):
            names = [
                name
                for rank in range(world)
                for name in distributed.names_in_checkpoint(backend, rank, step=7, has_rollouts=True, is_bf16=is_bf16)
            ]
            assert len(set(names)) == len(names) >= 2 * world
    rollouts = [distributed.rollouts_file(rank, world) for rank in range(world)]
    journals = [Journal(tmp_path, rank, world, keep=9).path_of(12345).name for rank in range(world)]
    for of_ranks in (rollouts, journals):
        assert sorted(set(of_ranks)) == of_ranks
    assert {match[1] for name in journals if (match := _FILE.fullmatch(name.removesuffix(".parquet")))} == {"12345"}


def test_a_rank_lists_the_journal_once_and_deletes_only_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, step = 512, 3
    for rank in range(world):
        Journal(tmp_path, rank, world, keep=2).path_of(step).touch()
    others = {path.name for path in tmp_path.iterdir()} - {Journal(tmp_path, 1, world, keep=2).path_of(step).name}
    listed, glob = [], Path.glob

    def noted(path: Path, pattern: str, **options: Any) -> Any:
        listed.append(path)
        return glob(path, pattern, **options)

    monkeypatch.setattr(Path, "glob", noted)
    journal = Journal(tmp_path, 1, world, keep=2)
    for number in range(4, 9):
        journal.seal(number, [part(1)], step=number, needed_from=number)
    assert len(listed) == 1
    left = {path.name for path in tmp_path.iterdir()} - others
    assert left == {journal.path_of(number).name for number in (7, 8)}
    journal.forget(from_step=0)
    assert {path.name for path in tmp_path.iterdir()} == others


@many
def test_a_rank_sends_its_rows_once_however_many_ranks_there_are(
    pretended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    class Sent(Exception):
        pass

    def exchange(parts: list[Any], device: torch.device) -> list[Any]:
        sent.extend(parts)
        raise Sent

    monkeypatch.setattr(distributed, "exchange", exchange)
    batch = labeled([400, 10, 250, 30], 0)
    with pytest.raises(Sent):
        share_out(batch, hidden_size=64, equal_counts=True, device=torch.device("cpu"))
    own = [some for some in sent if some is not None]
    assert len(sent) == pretended
    assert len(own) <= batch.num_rows  # the others get nothing, not even an empty batch
    assert sorted(group for some in own for group in some.group_index) == [0, 1, 2, 3]
    assert sum(len(pickle.dumps(some)) for some in sent) < 2 * len(pickle.dumps(batch)) + 6000 * len(own)


def test_a_selection_of_no_rows_holds_no_memory_of_the_others() -> None:
    nothing = labeled([1000, 2000], 0).select([])
    assert {name: tensor.untyped_storage().nbytes() for name, tensor in nothing.tensors().items()} == {
        "prompt_ids": 0,
        "response_ids": 0,
        "trainable": 0,
    }


@many
def test_values_of_all_processes_are_in_order_and_teams_share_a_rank(pretended: int) -> None:
    assert (distributed.rank(), distributed.world_size()) == (pretended - 1, pretended)
    assert not distributed.is_main()
    assert distributed.gather_numbers(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]] * pretended
    everyone, start = distributed.gather_rows(["a", "b", "c"])
    assert (len(everyone), start) == (3 * pretended, 3 * (pretended - 1))
    form_teams(8)
    assert (distributed.rank(), distributed.world_size()) == (pretended // 8 - 1, pretended // 8)
    assert (distributed.num_processes(), distributed.place_in_team()) == (pretended, 7)


def test_of_a_team_only_the_first_process_is_the_main_one() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=64)
    try:
        form_teams(8)
        assert (distributed.rank(), distributed.is_main()) == (0, False)
        assert distributed.gather_on_main("mine") is None
    finally:
        form_teams(1)
        dist.destroy_process_group()


SHAPES = [(1000, 7), (511, 3), (512,), (513,), (5, 4), (1,)]


@many
def test_flat_parts_without_their_padding_are_the_whole(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel()))
        size = distributed.largest_share(whole.shape, world)
        padded = torch.cat([whole, torch.full((size * world - len(whole),), float("nan"))])
        parts = []
        for rank in range(world):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
            parameter: Any = nn.Parameter(torch.empty(0))
            parameter.ds_id, parameter.ds_tensor = 0, padded[rank * size : (rank + 1) * size]
            parameter.ds_numel, parameter.ds_process_group = len(whole), None
            assert distributed.num_local_elements(parameter) == size
            parts.append(shards._local_numbers(parameter))
        assert torch.equal(torch.cat(parts), whole)


@many
def test_fsdp2_gives_no_process_more_than_is_foreseen(world: int) -> None:
    shapes = [(1000, 7), (1000,), (11, 1000), (11,)]
    largest = [distributed.largest_share(shape, world) for shape in shapes]
    counts = {}
    for rank in (0, world - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        model = nn.Sequential(nn.Linear(7, 1000), nn.Linear(1000, 11))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        counts[rank] = [distributed.num_local_elements(p) for p in model.parameters()]
        dist.destroy_process_group()
    assert counts[0] == largest
    assert all(last <= first for last, first in zip(counts[world - 1], largest, strict=True))
    chunks = [torch.empty(shape, device="meta").chunk(world) for shape in shapes]
    assert [max(chunk.numel() for chunk in some) for some in chunks] == largest


@many
def test_the_share_of_a_process_is_that_of_the_backend(world: int) -> None:
    shapes = [(3 * world, 5), (world // 2, 10), (world + 1,)]
    total = 15 * world + 5 * world + world + 1
    ddp, zero1, zero2, zero3, fsdp2 = (backend.share(shapes) * total for backend in backends(world))
    assert ddp == pytest.approx(total)
    assert zero1 == zero2 == pytest.approx(22)  # of one vector, 21 and a bit
    assert zero3 == pytest.approx(15 + 5 + 2)
    assert fsdp2 == pytest.approx(15 + 10 + 2)  # half of the processes have no row of the second


@many
def test_what_is_wrong_with_a_dataset_is_told_by_one_process(pretended: int, caplog: pytest.LogCaptureFixture) -> None:
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": ""}])

    def encode(row: Any) -> dict[str, Any]:
        if not row["text"]:
            raise DataError("column 'text' is empty")
        return {"input_ids": [1]}

    for place in (pretended - 1, 0):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=pretended)
        kept, streamed = (
            map_rows(data, encode, {"input_ids": IDS}, invalid_rows="drop", num_proc=None, desc="Tokenizing")
            for data in (rows, rows.to_iterable_dataset())
        )
        assert len(kept) == len(list(streamed)) == 1
        assert len(caplog.records) == (2 if place == 0 else 0)
