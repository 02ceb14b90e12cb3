"""`prefrl env`: the versions and devices of this machine, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from prefrl.scripts.command import command

__all__ = ["main"]

_PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "huggingface_hub", "safetensors", "pyarrow", "numpy"),
    *("peft", "bitsandbytes", "deepspeed", "liger-kernel", "flash-attn", "vllm", "math-verify", "rich"),
    *("tensorboard", "wandb", "trackio", "mlflow"),
)


@command("env", about="Print the versions and devices of this machine.", takes_config=False)
def main() -> int:
    """Print it."""
    import torch  # its import takes seconds, which --help does not

    import prefrl

    lines = {"prefrl": prefrl.__version__, "python": platform.python_version(), "platform": platform.platform()}
    lines |= {name: _version(name) for name in _PACKAGES}
    lines["CPU"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    lines["CUDA of torch"] = torch.version.cuda or "none"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines[f"GPU {index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    for name, text in lines.items():
        print(f"- {name}: {text}")
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
