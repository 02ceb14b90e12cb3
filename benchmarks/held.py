"""What a training holds of a GPU beside what the doctor counts: its CUDA context, libraries, and gaps between blocks.

`prefrl doctor` sets a constant aside for it when a vLLM server shares the GPU. Memory of a context can only be seen
from another process: `memory_of_training` watches the free memory, and this module is the training, which waits at
each mark until it has been looked at.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["memory_of_training"]

GIB = 2**30
ROOT = Path(__file__).parents[1]


def memory_of_training(model: Path, *, device: str) -> dict[str, float]:
    """GiB of a GRPO run in another process, after each of its marks.

    Args:
        model: The model's folder.
        device: cuda, or cpu to rehearse: then free memory is that of the host.

    Returns:
        `context`: what a process takes that has one tensor. `libraries`: that, after a product of matrices. `held`:
        what is no longer free after some steps and `empty_cache`. `allocated`: what of it torch's allocator has given
        out. `counted`: what the doctor says that training keeps between its steps. `beside`: `held` less `counted`.
    """
    free = _free(device)
    before, found = free(), dict[str, float]()
    command = [sys.executable, "-m", "benchmarks.held", str(model.resolve()), device]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("mark "):
                says = json.loads(line.removeprefix("mark "))
                found |= {says.pop("mark"): (before - free()) / GIB} | says
                process.stdin.write("\n")
                process.stdin.flush()
    if process.returncode or "held" not in found:
        raise RuntimeError(f"the training ended with {process.returncode}, after {[*found]}")
    return found | {"beside": found["held"] - found["counted"]}


def _free(device: str) -> Callable[[], int]:
    import psutil
    import torch

    if device == "cpu":
        return lambda: int(psutil.virtual_memory().available)
    torch.zeros(1, device=device)  # the context of this process is not counted
    return lambda: int(torch.cuda.mem_get_info()[0])


def _mark(name: str, **figures: float) -> None:
    """Wait until the other process has looked."""
    print(f"mark {json.dumps({'mark': name, **figures})}", flush=True)
    input()


def _train(model: str, device: str) -> None:
    import torch

    from benchmarks import doctor
    from prefrl.rewards.named import reward_by_name
    from prefrl.scripts.inputs import datasets_of

    torch.zeros(1, device=device)
    _mark("context")
    matrix = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
    (matrix @ matrix).sum().item()
    del matrix
    _mark("libraries")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        doctor.write_rows("grpo", scale=16 if device == "cuda" else 1)
        options = ["--bf16", "true", "--dtype", "bfloat16"] if device == "cuda" else ["--use_cpu"]
        options += ["--output_dir", "out"]  # not in the model's folder
        row, script, config = doctor.run_of("grpo", model, options)
        counted = _counted(row, script, config)
        dataset, _ = datasets_of(script, config)
        rewards = [reward_by_name(name) for name in script.reward_funcs]
        trainer = row.load_trainer()(model=model, args=config, train_dataset=dataset, reward_funcs=rewards)
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
        _mark("held", allocated=allocated / GIB, counted=counted / GIB)
        trainer.end()


def _counted(row: Any, script: Any, config: Any) -> int:
    """Bytes that the doctor says are kept between steps."""
    from prefrl.models.footprint import weights_of
    from prefrl.scripts.checkup.resources import _kept_between_steps
    from prefrl.scripts.checkup.subject import Subject

    subject = Subject(row, script, config)
    return sum(_kept_between_steps(subject, weights_of(subject.trained)).values())


if __name__ == "__main__":
    _train(*sys.argv[1:])
