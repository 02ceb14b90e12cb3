"""What DeepSpeed and FSDP2 saved is read without executing anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from prefrl.distributed import only_data
from prefrl.errors import CheckpointError


class Plain:
    """A class that neither torch nor DeepSpeed knows."""


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_a_shard_that_holds_more_than_data_is_refused_and_not_executed(tmp_path: Path, canary: Path) -> None:
    torch.save({"optimizer": Attack(canary)}, tmp_path / "shard.pt")
    with pytest.raises(CheckpointError, match=r"more than data: it names posix\.mkdir\."), only_data(tmp_path):
        torch.load(tmp_path / "shard.pt", weights_only=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Attack(canary)))
    with pytest.raises(CheckpointError, match=r"raw\.pt holds more than data: torch cannot"), only_data(tmp_path):
        torch.load(tmp_path / "raw.pt")
    assert not canary.exists()
    torch.save(Plain(), tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match=rf"it names {__name__}\.Plain\..*add_safe_globals"), only_data(tmp_path):
        torch.load(tmp_path / "plain.pt", weights_only=False)
    torch.load(tmp_path / "shard.pt", weights_only=False)  # outside, what the caller asks for counts
    assert canary.exists()


def test_what_deepspeed_saves_is_read(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    saved = {"scaler": LossScaler(2.0), "stage": ZeroStageEnum.weights, "place": fragment_address(3, 4)}
    torch.save(saved, tmp_path / "shard.pt")
    with only_data(tmp_path):
        loaded = torch.load(tmp_path / "shard.pt", weights_only=False)
    assert (loaded["scaler"].cur_scale, loaded["stage"], loaded["place"].numel) == (2.0, ZeroStageEnum.weights, 3)


def test_an_index_that_holds_more_than_data_is_refused_and_not_executed(tmp_path: Path, canary: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".metadata").write_bytes(pickle.dumps(Attack(canary)))
    with pytest.raises(CheckpointError, match=r"model/\.metadata holds more than data: it names"), only_data(tmp_path):
        raise AssertionError("nothing may be read")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["os.system", "sys.modules"])
def test_an_index_cannot_reach_through_an_allowed_module(tmp_path: Path, name: str) -> None:
    module = "torch.distributed.checkpoint.metadata"
    names = b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\4" + names + pickle.STACK_GLOBAL + pickle.STOP)
    with pytest.raises(CheckpointError, match=f"it names {module}.{name}"), only_data(tmp_path):
        raise AssertionError("nothing may be read")


def test_an_index_of_torch_is_read(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "lr": [0.1, "x"]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found: dict[str, Any] = {"weight": torch.zeros(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "lr": None}
    with only_data(tmp_path):
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["weight"], state["weight"])
    assert found["lr"] == [0.1, "x"]


def test_an_object_beside_the_tensors_of_torch_is_refused_and_not_executed(tmp_path: Path, canary: Path) -> None:
    dcp.save({"weight": torch.zeros(2), "lr": Attack(canary)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"more than data: it names posix\.mkdir\."), only_data(tmp_path):
        dcp.load({"weight": torch.zeros(2), "lr": None}, checkpoint_id=tmp_path, no_dist=True)
    assert not canary.exists()
