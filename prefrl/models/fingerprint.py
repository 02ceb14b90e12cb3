"""Digests of weights and rows: equal for equal values, whatever object holds them.

They tell whether stored values still belong to this model and this dataset.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash

from prefrl.distributed import memory_of, shape_of, whole
from prefrl.errors import require
from prefrl.models.adapters import is_peft_model
from prefrl.models.scoring import user_model

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_BYTES_PER_PIECE = 1 << 26
_ROWS_PER_PIECE = 10_000

# Parts that peft inserts into the names of a base model's weights.
_PEFT_NAMES = ("base_layer", "original_module")
# Config fields about where an adapter comes from, not what it computes.
_PEFT_ORIGIN = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")


def weights_fingerprint(model: nn.Module) -> str:
    """Digest of the names, dtypes, shapes and bytes of everything that determines what the model computes now.

    This covers parameters and buffers and, for a PEFT model, the active adapters with their configs. Adapters that are
    inactive, switched off or do not change anything yet are ignored: the digest is then that of the base model.

    Args:
        model: A transformers or PEFT model, also inside DDP; all weights are whole on this process.

    Raises:
        ConfigError: There is no such model inside.
    """
    inner: Any = user_model(model)
    digest_of = _Digests()
    if not is_peft_model(inner):
        return joint_digest([type(inner).__name__, digest_of(_tensors(inner))])
    adapters = {name: _adapter_tensors(inner, name) for name in inner.peft_config}
    owned = {memory_of(tensor) for tensors in adapters.values() for tensor in tensors.values()}
    base = inner.get_base_model()
    tensors = {name: tensor for name, tensor in _tensors(base).items() if memory_of(tensor) not in owned}
    parts = [type(base).__name__, digest_of(tensors)]
    for name in _deciding_adapters(inner):
        parts += [digest_of(adapters[name]), _config_digest(inner.peft_config[name])]
    return joint_digest(parts)


def rows_fingerprint(dataset: Dataset, columns: Sequence[str]) -> str:
    """Digest of the numbers in some columns, row by row.

    Equal rows in the same order have an equal digest, however they got there (`select`, `shuffle`, flattening) and
    however their memory is chunked.

    Args:
        dataset: Map-style.
        columns: Lists of numbers or flags, without None in a list; or of images, as files or their bytes.
    """
    values = {column: xxhash.xxh3_128() for column in columns}
    lengths = {column: xxhash.xxh3_128() for column in columns}
    for table in dataset.select_columns(list(columns)).with_format("arrow").iter(_ROWS_PER_PIECE):
        for column in columns:
            rows = table[column].combine_chunks()
            lengths[column].update(_bytes_of(pc.list_value_length(rows).fill_null(-1).cast(pa.int64())))
            flat = rows.flatten()
            if pa.types.is_struct(flat.type):
                for image in flat.to_pylist():
                    values[column].update(image["bytes"] or str(image["path"]).encode())
            else:
                values[column].update(_bytes_of(flat))
    return joint_digest([[column, lengths[column].hexdigest(), values[column].hexdigest()] for column in columns])


def joint_digest(parts: Sequence[Any]) -> str:
    """Digest of strings, numbers, and lists and dictionaries of them."""
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=_plain).encode()).hexdigest()


def is_neutral_adapter(model: PreTrainedModel) -> bool:
    """Whether switching the adapter off does not change what the model computes, and nothing else is trainable.

    True for LoRA with peft's default initialization, where one of the two matrices is 0: B in linear layers, A in
    embeddings. Initializations like PiSSA change the base model too, and have a nonzero B.
    """
    zeros, others = [], []
    for name, parameter in model.named_parameters():
        kind = name.split(".")
        if "lora_B" in kind or "lora_embedding_A" in kind:
            zeros.append(parameter)
        elif "lora_A" in kind or "lora_embedding_B" in kind:
            continue
        elif parameter.requires_grad or "modules_to_save" in kind or "lora_magnitude_vector" in kind:
            others.append(parameter)
    return bool(zeros) and not others and not any(bool(whole(parameter).any()) for parameter in zeros)


class _Digests:
    """Digests of tensors by name; a tensor with several names is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}

    def __call__(self, tensors: Mapping[str, Tensor]) -> str:
        return joint_digest([[name, self._of(tensors[name])] for name in sorted(tensors)])

    def _of(self, tensor: Tensor) -> str:
        key = (memory_of(tensor), tensor.dtype, shape_of(tensor), tensor.stride())
        if key not in self._known:
            tensor = whole(tensor)
            hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            for piece in torch.split(tensor.detach().reshape(-1).view(torch.uint8), _BYTES_PER_PIECE):
                hasher.update(piece.cpu().numpy().data)
            self._known[key] = hasher.hexdigest()
        return self._known[key]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and the extra state of quantized layers, under the names that they have without peft."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    # Dynamic RoPE changes inv_freq with the sequence lengths that it sees; original_inv_freq is its initial value.
    moving = {name for name in buffers if name.replace("inv_freq", "original_inv_freq") in buffers.keys() - {name}}
    tensors = {**buffers, **model.state_dict(keep_vars=True)}
    return {
        ".".join(part for part in name.split(".") if part not in _PEFT_NAMES): tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and name not in moving
    }


def _adapter_tensors(model: PreTrainedModel, name: str) -> dict[str, Tensor]:
    peft = require("peft", extra="peft", feature="an adapter")
    # Without the base model's embeddings, which are part of the base model's digest.
    state = model.state_dict(keep_vars=True)  # a detached ZeRO-3 parameter does not know how it is partitioned
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=state, adapter_name=name, save_embedding_layers=False
    )
    return tensors


def _deciding_adapters(model: PreTrainedModel) -> list[str]:
    active: list[str] = model.active_adapters
    if model.active_peft_config.is_prompt_learning:
        return active
    return [] if model.get_model_status().enabled is False or is_neutral_adapter(model) else active


def _config_digest(config: PeftConfig) -> str:
    """Digest of the values that differ from peft's defaults, so that a newer peft with more fields gives the same."""
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _PEFT_ORIGIN and getattr(config, field.name) != _default(field)
    }
    return joint_digest([values])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain(value: object) -> object:
    """A JSON-serializable substitute for values that JSON has no type for."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else type(value).__name__


def _bytes_of(array: pa.Array) -> Any:
    """The numbers of an array, without other data in the same buffer."""
    if pa.types.is_boolean(array.type):  # packed 8 to a byte, starting at any bit
        array = array.cast(pa.uint8())
    return array.to_numpy(zero_copy_only=True)
