"""Partitioned weights are exported as one process exports them, whatever the process that reads them does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("backend", ["zero3", "fsdp2"])
def test_partitioned_weights_are_read_bit_by_bit(backend: str, tmp_path: Path) -> None:
    """All weights, those below an adapter, and the adapter's files; see the worker for how they are read."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.export_worker", backend, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results = torch.load(tmp_path / f"export_{backend}.pt")
    assert len(results) >= 19
    wrong = {(case, way): names for case, ways in results.items() for way, names in ways.items() if names}
    assert wrong == {}
