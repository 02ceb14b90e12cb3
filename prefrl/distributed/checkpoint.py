"""Checkpoints: whole weights of partitioned models, and which runs can resume from a backend's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prefrl.distributed.processes import num_processes
from prefrl.distributed.shards import unwrap, whole
from prefrl.errors import ConfigError
from prefrl.run.checkpoints import WRITER, check_has_state

_UNSHARDED = "no sharding"


@dataclass(frozen=True)
class Writer:
    """The backend and number of processes that wrote a checkpoint."""

    backend: str  # what partitioned the optimizer state, and how
    num_processes: int

    def __str__(self) -> str:
        plural = "" if self.num_processes == 1 else "es"
        return f"{self.num_processes} process{plural} with {self.backend}"


def sign_checkpoint(accelerator: Any, folder: Path) -> None:
    """Record in a checkpoint which backend and how many processes wrote it."""
    (folder / WRITER).write_text(json.dumps(asdict(_this_run(accelerator))), encoding="utf-8")


def writer_of(folder: Path) -> Writer:
    """The backend and number of processes that wrote a checkpoint.

    Raises:
        ConfigError: The folder holds no training state.
    """
    check_has_state(folder)
    return Writer(**json.loads((folder / WRITER).read_text(encoding="utf-8")))


def check_resumable(accelerator: Any, folder: Path) -> None:
    """Check that this run can read the optimizer state of a checkpoint.

    The state of a single process and of DDP is whole, and FSDP2 reshards its own state. ZeRO-1 and 2 can reshard a
    checkpoint that the tool `ds_to_universal` has converted, which `load_universal` in DeepSpeed's config announces;
    with ZeRO-3 the result was seen to differ.

    Raises:
        ConfigError: It cannot be read.
    """
    saved, now = writer_of(folder), _this_run(accelerator)
    if saved == now:
        return
    if saved.backend == now.backend and (not _is_deepspeed(accelerator) or _loads_universal(accelerator)):
        return
    has_weights = any(folder.glob("model*.safetensors")) or (folder / "adapter_model.safetensors").exists()
    convert = (
        "" if has_weights else ", after converting the checkpoint's partitioned weights with the backend's own tool"
    )
    raise ConfigError(
        f"resume_from_checkpoint={str(folder)!r} was written with {saved}, but this run uses {now}, which cannot "
        f"read the optimizer state. Resume with {saved}, or start a new training from the weights, "
        f"model={str(folder)!r}{convert}."
    )


def check_first_training(accelerator: Any, model: nn.Module) -> None:
    """Reject a second `train()` of a trainer if the backend can train a model only once.

    Args:
        accelerator: The trainer's accelerator.
        model: The model, with the wrappers of the first training.

    Raises:
        ConfigError: It has already been trained with DeepSpeed.
    """
    if _is_deepspeed(accelerator) and unwrap(model) is not model:
        raise ConfigError(
            "train() was called before, but a DeepSpeed engine can train only once. Construct a new trainer, with "
            "the saved model or with resume_from_checkpoint."
        )


def keeps_checkpoints_partitioned(accelerator: Any) -> bool:
    """Whether the backend's config asks for checkpoints without whole weights."""
    if accelerator.is_fsdp2:
        return _state_dict_type(accelerator) != "FULL_STATE_DICT"
    if not _is_deepspeed(accelerator):
        return False
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return bool(zero["stage"] == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is not True)


def keeps_optimizer_apart(accelerator: Any) -> bool:
    """Whether a checkpoint has the optimizer's state, whole, in a file of its own."""
    return _this_run(accelerator).backend == _UNSHARDED


def whole_on_host(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole copies on the host of tensors that may be partitioned. All ranks must call it, with the same names.

    Only one tensor at a time is whole on every rank. A tensor with several names is gathered once and stays shared.

    Args:
        tensors: Not detached: a detached ZeRO-3 parameter does not know how it is partitioned.
        keep: False: this rank only takes part and gets {}.
    """
    kept: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            value = whole(tensor).detach()
            if keep:
                kept[name] = value.cpu()
            del value  # free it before the next tensor is gathered
        elif keep:
            kept[name] = kept[first]
    return kept


def _this_run(accelerator: Any) -> Writer:
    if _is_deepspeed(accelerator):
        stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        return Writer(f"ZeRO-{stage}", num_processes())
    if accelerator.is_fsdp2:
        return Writer(f"FSDP2 ({_state_dict_type(accelerator)})", num_processes())
    return Writer(_UNSHARDED, num_processes())


def _is_deepspeed(accelerator: Any) -> bool:
    return bool(accelerator.distributed_type == "DEEPSPEED")


def _loads_universal(accelerator: Any) -> bool:
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    return bool(config["zero_optimization"]["stage"] < 3 and config.get("checkpoint", {}).get("load_universal", False))


def _state_dict_type(accelerator: Any) -> str:
    name: str = accelerator.state.fsdp_plugin.state_dict_type.name
    return name
