"""Weights that FSDP2 has partitioned over one process: copies are made as over several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from prefrl.distributed import Reader, whole
from prefrl.models.export import PolicyWeights
from tests.assets import tiny_model
from tests.unit.models.test_export import MERGED, adapted, check_equal


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def partitioned(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.get_decoder().layers, model):
        fully_shard(module, mesh=mesh)
    return model


@pytest.mark.parametrize("options", [None, {"target_modules": "all-linear"}], ids=["plain", "merged"])
def test_one_layer_is_whole_at_a_time(options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=4, tie_word_embeddings=False)
    model = partitioned(model if options is None else adapted(model, options))
    copies: list[tuple[int, StorageWeakRef]] = []
    held: list[int] = []  # bytes, after each copy

    def count(tensor: Tensor) -> Tensor:
        copy = whole(tensor)
        if copy is tensor:
            return copy
        copies.append((copy.nbytes, StorageWeakRef(copy.untyped_storage())))
        held.append(sum(size for size, storage in copies if not storage.expired()))
        return copy

    monkeypatch.setattr("prefrl.distributed.reading.whole", count)
    for _, tensor in PolicyWeights(model):
        del tensor
    layer = sum(parameter.nbytes for parameter in model.get_decoder().layers[0].parameters())
    assert layer / 2 < max(held) <= layer < sum(held)


@pytest.mark.parametrize(("architecture", "model_options", "options"), MERGED[1:2])
def test_merging_leaves_the_weights_as_they_are_where_one_process_has_all_of_them(
    architecture: str, model_options: dict[str, Any], options: dict[str, Any]
) -> None:
    twin = adapted(tiny_model(architecture, **model_options), options)
    weights = PolicyWeights(partitioned(adapted(tiny_model(architecture, **model_options), options)))
    for _ in range(2):
        check_equal(weights, dict(PolicyWeights(twin)))


def test_after_a_weight_that_could_not_be_gathered_the_process_ends_whatever_the_task_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(tensor: Tensor) -> None:
        raise MemoryError("no room")

    model = partitioned(tiny_model("llama"))
    monkeypatch.setattr("prefrl.distributed.reading.whole", fail)
    read = Reader(model)

    def careless() -> None:
        with contextlib.suppress(MemoryError):
            read(next(model.parameters()))

    with pytest.raises(RuntimeError, match="could not be gathered from all processes"):
        read.lead(careless)


def test_what_a_task_raises_is_raised_and_the_next_task_reads() -> None:
    weights = PolicyWeights(partitioned(tiny_model("llama")))

    def fail() -> None:
        next(iter(weights))
        raise LookupError("no such server")

    with pytest.raises(LookupError, match="no such server"):
        weights.lead(fail)
    weights.lead(lambda: check_equal(weights, dict(PolicyWeights(tiny_model("llama")))))
