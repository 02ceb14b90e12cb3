"""The main rows of the comparison with TRL, with SmolLM2 in place of the random model."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from benchmarks.__main__ import run_workloads
from benchmarks.real.inputs import Inputs
from benchmarks.worker import measure as measure_workload
from benchmarks.worker import prepare_environment
from benchmarks.workloads import CPU_WORKLOADS, Gate, ModelSizes, Workload

__all__ = ["measure"]


def measure(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """A row for each of the workloads of `make bench QUICK=1`, as the report stores it."""
    sizes = ModelSizes(576, 30, 1536, 49152, 9, checkpoint=str(inputs.model.resolve()))
    workloads = [_with(workload, sizes) for workload in CPU_WORKLOADS if workload.quick_turns]
    # One at a time: TRL's padded rows take several GB.
    options = argparse.Namespace(device="cpu", quick=True, turns=2, threads=1, jobs=1)
    with tempfile.TemporaryDirectory(prefix="prefrl-bench-") as folder:
        prepare_environment(cache=folder)
        for workload in workloads:
            yield from map(asdict, run_workloads([workload], options, measure_workload))


def _with(workload: Workload, sizes: ModelSizes) -> Workload:
    title = workload.title.replace(", S,", ", SmolLM2,")
    return replace(workload, model=sizes, title=title, gate=Gate())
