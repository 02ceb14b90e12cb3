"""Eight ranks as threads: all call the same collectives in the same order, however much each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prefrl import distributed
from prefrl.errors import CheckpointError
from prefrl.metrics import Mean, Metric
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import Journal
from prefrl.run import checkpoints
from prefrl.run.folder import Identity
from prefrl.trainer import dumps
from prefrl.trainer.online.minibatches import share_out
from prefrl.trainer.run_folder import RunFolder
from prefrl.trainer.steps import drained
from prefrl.types import LabeledBatch
from tests.threads import on_ranks
from tests.unit.rollout.test_journal import part

CPU = torch.device("cpu")
RANKS = 8


def rows_of(rank: int) -> list[str]:
    """None, on two ranks, or up to three."""
    return [f"{rank}.{i}" for i in range(rank % 4)]


def test_ragged_values_arrive_whole_and_in_the_order_of_ranks() -> None:
    every = [row for rank in range(RANKS) for row in rows_of(rank)]

    def work(rank: int) -> None:
        own = rows_of(rank)
        assert distributed.gather_objects(own) == [rows_of(other) for other in range(RANKS)]
        assert distributed.gather_on_main(own) == ([rows_of(other) for other in range(RANKS)] if rank == 0 else None)
        assert distributed.gather_rows(own) == (every, every.index(own[0]) if own else sum(r % 4 for r in range(rank)))
        numbers = torch.tensor([float(rank), 0.5])
        assert distributed.gather_numbers(numbers).tolist() == [[float(other), 0.5] for other in range(RANKS)]
        sent = [f"{rank} to {to}" if (rank + to) % 3 else None for to in range(RANKS)]
        arrived = [f"{source} to {rank}" if (source + rank) % 3 else None for source in range(RANKS)]
        assert distributed.exchange(sent, CPU) == arrived
        assert distributed.sum_over_ranks([len(own)], CPU) == [len(every)]
        assert distributed.max_over_ranks([len(own)], CPU) == [3]
        assert distributed.min_over_ranks([len(own)], CPU) == [0]
        assert distributed.from_main(rank) == 0
        distributed.wait_for_all()

    assert on_ranks(RANKS, work) == [None] * RANKS


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("no space")
        self.on_retry = lambda: None


class NeedsTwo(Exception):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} {where}")


@pytest.mark.parametrize("error", [OSError("no space"), Unpicklable(), NeedsTwo("no", "space")], ids=repr)
def test_an_error_on_the_main_process_ends_all_with_its_words_even_if_it_cannot_be_sent(error: Exception) -> None:
    def fail() -> None:
        raise error

    found = on_ranks(RANKS, lambda _: distributed.on_main(fail))
    assert found[0] is error
    assert all(isinstance(one, Exception) and "no space" in str(one) for one in found)


def test_metrics_that_only_some_ranks_have_are_means_over_those() -> None:
    def work(rank: int) -> dict[str, float]:
        mine: dict[str, Metric] = {"reward": Mean(float(rank), 1.0)} if rows_of(rank) else {}
        return drained({"train": mine, "eval": {}}, "train")

    mean = sum(rank for rank in range(RANKS) if rows_of(rank)) / sum(bool(rows_of(rank)) for rank in range(RANKS))
    assert on_ranks(RANKS, work) == [{"reward": mean}] * RANKS


def labeled(lengths: list[int], first_group: int) -> LabeledBatch:
    """A row in a group of its own for each length; its tokens are the number of the group."""
    count, total = len(lengths), sum(lengths)
    groups = tuple(range(first_group, first_group + count))
    tokens = [group for group, length in zip(groups, lengths, strict=True) for _ in range(length)]
    return LabeledBatch(
        prompt_ids=torch.zeros(count, dtype=torch.long),
        prompt_lengths=(1,) * count,
        prompt_index=tuple(range(count)),
        response_ids=torch.tensor(tokens, dtype=torch.long),
        response_lengths=tuple(lengths),
        group_index=groups,
        trainable=torch.ones(total, dtype=torch.bool),
        is_preferred=(None,) * count,
        weights=(1.0,) * count,
    )


@pytest.mark.parametrize("equal_counts", [True, False])
def test_rows_are_shared_out_once_each_and_evenly_if_some_ranks_have_none(equal_counts: bool) -> None:
    lengths = [[7 + 5 * i + rank for i in range(2 * (rank % 4))] for rank in range(RANKS)]

    def work(rank: int) -> LabeledBatch:
        first = sum(map(len, lengths[:rank]))
        batch = labeled(lengths[rank], first)
        return share_out(batch, hidden_size=64, equal_counts=equal_counts, device=CPU)

    shares = [share for share in on_ranks(RANKS, work) if isinstance(share, LabeledBatch)]
    assert len(shares) == RANKS
    every = [length for some in lengths for length in some]
    assert sorted(group for share in shares for group in share.group_index) == list(range(len(every)))
    for share in shares:
        expected = [group for group in share.group_index for _ in range(every[group])]
        assert share.response_ids.tolist() == expected
    counts, tokens = [share.num_rows for share in shares], [share.num_tokens for share in shares]
    assert max(counts) - min(counts) <= 1 or not equal_counts
    assert max(tokens) <= 4 / 3 * max(sum(every) / RANKS, *every)


def test_ranks_agree_on_the_batches_that_all_of_them_have_left(tmp_path: Path) -> None:
    def work(rank: int) -> list[bool]:
        writer, reader = (Journal(tmp_path, rank, RANKS, keep=9) for _ in range(2))
        writer.begin("r", generations=range(9), steps_each=1, device=CPU)
        for number in range(2 + rank % 3):
            parts = [part(rank)] if number else [Collected([])]  # no prompt of the first batch is on any rank
            writer.seal(number, parts, step=number, needed_from=0)
        reader.begin("r", generations=range(9), steps_each=1, device=CPU)
        return [reader.left(number, step=number) is not None for number in range(4)]

    assert on_ranks(RANKS, work) == [[True, True, False, False]] * RANKS


@pytest.mark.parametrize("error", [OSError("disk full"), SafetensorError("disk full")])
def test_a_rank_that_cannot_write_its_rows_makes_all_give_up(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *_: object) -> None:
        if "step_5_of_8" in path.name:
            raise error
        path.touch()

    monkeypatch.setattr(dumps, "_write", write)

    def work(rank: int) -> Path:
        identity = Identity(run="r", decisive={}, model="")
        return dumps.dump_step(tmp_path, [], step=3, num_items=1.0, identity=identity, save_model=lambda _: None)

    found = on_ranks(RANKS, work)
    assert [(type(one), str(one)) for one in found] == [(OSError, "disk full")] * RANKS


def sharded(rank: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model under FSDP2 whose tensors do not divide, of which some have fewer rows than there are ranks."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 13), nn.LayerNorm(13), nn.Linear(13, 3))
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,))), before


def equal(tensors: Any, others: Any) -> bool:
    return all(torch.equal(one.detach(), other.detach()) for one, other in zip(tensors, others, strict=True))


def test_shards_that_do_not_divide_are_put_together_again_bit_by_bit() -> None:
    def work(rank: int) -> list[int]:
        model, before = sharded(rank)
        parameters = list(model.parameters())
        assert equal([distributed.whole(p) for p in parameters], before)
        kept = distributed.whole_on_host(dict(model.named_parameters()), keep=rank == 3)
        assert equal(kept.values(), before) if rank == 3 else not kept
        assert equal(distributed.bare_copy(model, distributed.whole).parameters(), before)
        other, _ = sharded(rank)
        for own, mine, value in zip(other.parameters(), parameters, before, strict=True):
            distributed.load_whole(own, value + 2)
            with torch.no_grad():
                distributed.mix(own, mine, 0.5)
        mixed = [torch.lerp(value + 2, value, 0.5) for value in before]
        assert equal([distributed.whole(p) for p in other.parameters()], mixed)
        for own, mine in zip(other.parameters(), parameters, strict=True):
            distributed.assign(own, mine)
        assert equal([distributed.whole(p) for p in other.parameters()], before)
        with distributed.full_params(model) as inner:
            assert equal(inner.parameters(), before)
        assert distributed.first_non_finite(model, CPU) is None
        last = parameters[-1].to_local()
        if last.numel() and rank == 2:  # the third of three rows
            last.data.fill_(float("inf"))
        assert distributed.first_non_finite(model, CPU) == "2.bias"
        return [distributed.num_local_elements(p) for p in parameters]

    found = on_ranks(RANKS, work)
    shapes = [(13, 5), (13,), (13,), (13,), (3, 13), (3,)]
    assert found[0] == [distributed.largest_share(shape, RANKS) for shape in shapes]
    assert found[-1] == [0] * 6
    totals = [sum(of_ranks) for of_ranks in zip(*(one for one in found if isinstance(one, list)), strict=True)]
    assert totals == [65, 13, 13, 13, 39, 3]


def test_ranks_with_different_numbers_of_passes_keep_in_step() -> None:
    def work(rank: int) -> tuple[int, list[float]]:
        model, _ = sharded(rank)
        missing = distributed.missing_passes(model, rank % 4, CPU)

        def idle() -> object:
            return model(torch.zeros(1, 5))

        with torch.no_grad(), distributed.in_company([(model, idle)], CPU):
            own = [float(model(torch.full((1, 5), float(i))).sum()) for i in range(rank % 4)]
        return missing, own

    found = [one for one in on_ranks(RANKS, work) if isinstance(one, tuple)]
    assert [missing for missing, _ in found] == [3, 2, 1, 0] * 2
    longest = found[3][1]
    assert [own for _, own in found] == [longest[:count] for count in (0, 1, 2, 3)] * 2


@pytest.mark.parametrize("reads", [[], [0, 5, 5, 1]])
def test_the_main_process_alone_decides_what_is_read(reads: list[int]) -> None:
    def work(rank: int) -> None:
        model, before = sharded(rank)
        reader, parameters = distributed.Reader(model), list(model.parameters())

        def task() -> None:
            assert rank == 0
            assert equal([reader(parameters[number]) for number in reads], [before[number] for number in reads])

        reader.lead(task)

    assert on_ranks(RANKS, work) == [None] * RANKS


def test_ranks_compare_their_shards_with_those_of_the_last_time_and_send_what_differs() -> None:
    def work(rank: int) -> None:
        model, before = sharded(rank)
        reader, parameters = distributed.Reader(model), list(model.parameters())
        after = [tensor.clone() for tensor in before]
        after[0][0, 0] *= -1
        after[0][12, 4] = -0.0
        after[0][6] *= 1 + 2**-12  # less than bfloat16 can show
        after[1][:] += 1
        reads: list[Any] = []

        def read(is_first: bool, dtype: torch.dtype) -> None:
            reader.lead(lambda: reads.append([reader.compare(p, dtype, is_first=is_first) for p in parameters]))

        read(True, torch.bfloat16)
        for parameter, value in zip(parameters, after, strict=True):
            distributed.load_whole(parameter, value)
        read(False, torch.bfloat16)
        read(False, torch.bfloat16)
        read(False, torch.float32)  # with which nothing can be compared
        read(True, torch.float32)
        if rank != 0:
            assert not reads
            return
        first, second, third, *whole = reads
        assert equal(first, before)
        for found, old, new in zip(second, before, after, strict=True):
            assert found.places.tolist() == (old.bfloat16() != new.bfloat16()).flatten().nonzero()[:, 0].tolist()
            assert torch.equal(found.values.view(torch.bfloat16), new.bfloat16().flatten()[found.places])
        assert [len(found.places) for found in second] == [2, 13, 0, 0, 0, 0]
        assert [len(found.places) for found in third] == [0] * 6
        assert all(equal(found, after) for found in whole)

    assert on_ranks(RANKS, work) == [None] * RANKS


@pytest.mark.parametrize(
    "work",
    [
        lambda rank: distributed.gather_objects(rank) if rank != 5 else None,
        lambda rank: distributed.wait_for_all() if rank % 2 else distributed.sum_over_ranks([1.0], CPU),
    ],
    ids=["one leaves", "two orders"],
)
def test_ranks_out_of_step_are_noticed(work: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.threads.PATIENCE", 1.0)  # they would wait forever
    with pytest.raises(AssertionError):
        on_ranks(RANKS, work)


def run_folder(path: Path) -> RunFolder:
    found = RunFolder(path, limit=None, in_background=False, is_first_of_node=True, run="r")
    found._shares_folder = True
    return found


def staged(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint that has been written, but not sealed: a large one, and one of each rank."""
    contents = {"model.safetensors": b"w" * 9999} | {
        f"global_step3/rank_{rank}.pt": b"s" * rank for rank in range(RANKS)
    }
    for name, content in contents.items():
        file = path / ".saving" / "checkpoint-3" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return contents


def test_ranks_seal_a_checkpoint_together_and_read_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents, read = staged(tmp_path), []

    def noted(path: Path) -> checkpoints.FileSeal:
        read.append((distributed.rank(), path.name))
        return seal_file(path)

    def threads_of_a_rank(folder: Path, names: Sequence[str]) -> dict[str, checkpoints.FileSeal]:
        return {name: noted(folder / name) for name in names}

    seal_file = checkpoints._seal_file
    monkeypatch.setattr("prefrl.trainer.run_folder.seals_of", threads_of_a_rank)
    monkeypatch.setattr(
        checkpoints, "_seal_file", lambda path: pytest.fail(f"the main process reads {path.name} again")
    )
    found = on_ranks(RANKS, lambda _: run_folder(tmp_path).publish(tmp_path, step=3, resumable=True, best=None))
    assert found == [tmp_path / "checkpoint-3"] * RANKS
    assert sorted(name for _, name in read) == sorted(Path(name).name for name in contents)
    (of_model,) = [rank for rank, name in read if name == "model.safetensors"]
    assert [name for rank, name in read if rank == of_model] == ["model.safetensors"]
    monkeypatch.undo()
    assert checkpoints.problem_of(tmp_path / "checkpoint-3") is None
    manifest = checkpoints.manifest_of(tmp_path / "checkpoint-3")
    assert manifest is not None
    assert {name: file.size for name, file in manifest.files.items()} == {k: len(v) for k, v in contents.items()}


@pytest.mark.parametrize(
    ("error", "is_sealed"),
    [(FileNotFoundError(2, "not seen yet"), True), (OSError(28, "No space left on device"), False)],
)
def test_a_file_that_a_rank_cannot_read_is_sealed_by_the_main_process_or_ends_all(
    error: OSError, is_sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged(tmp_path)
    seals_of = checkpoints.seals_of

    def fail(folder: Path, names: Sequence[str]) -> dict[str, checkpoints.FileSeal]:
        if distributed.rank() == 5:
            raise error
        return seals_of(folder, names)

    monkeypatch.setattr("prefrl.trainer.run_folder.seals_of", fail)
    found = on_ranks(RANKS, lambda _: run_folder(tmp_path).publish(tmp_path, step=3, resumable=True, best=None))
    if is_sealed:
        assert found == [tmp_path / "checkpoint-3"] * RANKS
        assert checkpoints.problem_of(tmp_path / "checkpoint-3") is None
        return
    assert all(isinstance(one, CheckpointError) and "No space left" in str(one) for one in found)
    assert not (tmp_path / "checkpoint-3").exists()
    assert not (tmp_path / ".saving" / "checkpoint-3").exists()
