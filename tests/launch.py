"""How a test starts several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def launch(
    module: str,
    *arguments: str | Path,
    result: Path,
    num_processes: int = 2,
    seconds: int = 900,
    environment: dict[str, str] | None = None,
) -> Any:
    """What rank 0 of `module` stored with `torch.save`.

    Args:
        module: Run with `arguments`: by torchrun in each of several processes, or alone.
        result: The file that rank 0 writes.
        seconds: Until all processes are ended, if they have not. Workers have deadlines of their own, and say where
            they wait; this one is for what they cannot see.
        environment: More variables.
    """
    command = [sys.executable, "-m"]
    if num_processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", "-m"]
    command += [module, *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
        finally:
            process.terminate()  # torchrun ends its workers then, which it would leave behind if it were killed
    assert process.returncode == 0, errors[-6000:]
    return torch.load(result)
