"""Which files make a folder one that `from_pretrained` loads a model from."""

from __future__ import annotations

from pathlib import Path

__all__ = ["weights_in"]

# Names of transformers and peft. The config of an adapter decides how weights beside it are loaded.
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*", "adapter_model.*", "adapter_config.json")


def weights_in(folder: Path) -> list[Path]:
    """The files of the model in a folder; empty if there is none."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
