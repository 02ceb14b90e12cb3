"""What log-probs of truncated sampling cost in a GRPO loss step: truncated_logprobs="exact" against "softmax".

    python -m benchmarks.truncation [--vocabularies 32000 128000] [--turns 7]    about 10 minutes on one core

The step is the loss step of `python -m benchmarks`, model S: completions are given. The two forms run in two processes
that take turns on the same core. Temperature 0.05 makes the distributions of the random model as peaked as those of a
trained one; at 1, they are nearly flat, and a nucleus has most of the vocabulary.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.worker import Machine, Turn, Worker, prepare_environment
from benchmarks.workloads import CPU_WORKLOADS, Workload

__all__ = ["FORMS", "SAMPLING", "cells", "main", "measure", "workload_of"]

FORMS = ("softmax", "exact")
PEAKED = {"temperature": 0.05}
SAMPLING: dict[str, dict[str, Any]] = {
    "`top_k=50`, `top_p=0.9`": {"top_k": 50, "top_p": 0.9, **PEAKED},
    "`top_p=0.9`": {"top_p": 0.9, **PEAKED},
    "`top_p=0.9`, nearly flat": {"top_p": 0.9},
    "`min_p=0.05`": {"min_p": 0.05, **PEAKED},
    "`repetition_penalty=1.1`": {"repetition_penalty": 1.1, **PEAKED},
}
HEADS = ("vocabulary", "sampling", "`softmax`, s", "`exact`, s", "exact / softmax", "`softmax`, MiB", "`exact`, MiB")


def workload_of(vocab_size: int, sampling: dict[str, Any], form: str) -> Workload:
    """The main benchmark's loss step with these options."""
    base = next(workload for workload in CPU_WORKLOADS if workload.name == "grpo_loss")
    return replace(
        base,
        model=replace(base.model, vocab_size=vocab_size),
        options={**base.options, **sampling, "truncated_logprobs": form},
    )


def measure(workloads: Sequence[Workload], *, num_turns: int, machine: Machine) -> list[list[Turn]]:
    """The turns of two workloads in alternation, without their warm-up."""
    arguments: dict[str, Any] = {"machine": machine, "num_turns": num_turns + 1}
    first, second = workloads
    with Worker(first, "prefrl", **arguments) as one, Worker(second, "prefrl", **arguments) as other:
        pairs = [(one.turn(), other.turn()) for _ in range(num_turns + 1)]
    return [list(turns) for turns in zip(*pairs[1:], strict=True)]


def cells(softmax: Sequence[Turn], exact: Sequence[Turn]) -> list[str]:
    """The measured cells of a row: medians with their ranges, and peaks of memory."""
    ratios = [other.cpu_s / one.cpu_s for one, other in zip(softmax, exact, strict=True)]
    columns = ([turn.cpu_s for turn in softmax], [turn.cpu_s for turn in exact], ratios)
    peaks = (max(turn.peak_mib for turn in turns) for turns in (softmax, exact))
    return [
        *(f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in columns),
        *(f"{peak:,.0f}" for peak in peaks),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--turns", type=int, default=7, help="timed pairs, after a warm-up")
    options = parser.parse_args(arguments)
    machine = Machine("cpu", tuple(sorted(os.sched_getaffinity(0))[:1]))
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}", flush=True)
    for vocab_size in options.vocabularies:
        for name, sampling in SAMPLING.items():
            workloads = [workload_of(vocab_size, sampling, form) for form in FORMS]
            softmax, exact = measure(workloads, num_turns=options.turns, machine=machine)
            print(f"| {vocab_size:,} | {name} | {' | '.join(cells(softmax, exact))} |", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="prefrl-bench-") as folder:
        prepare_environment(cache=folder)
        main()
