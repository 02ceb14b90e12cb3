"""The requests for the completions of generation batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefrl import GRPOConfig
from prefrl.generation.base import OnDemand
from prefrl.rollout.collect import Collector
from prefrl.trainer.online.prompts import Prompts


class Asked:
    """A sampler that notes the seeds of prompts."""

    def __init__(self) -> None:
        self.seeds: Sequence[int] = []

    def start(self, rows: Any, groups: Any, sampling: Any, seeds: Sequence[int]) -> Any:
        self.seeds = seeds
        return OnDemand(lambda: [])

    def release(self, rollouts: Any) -> None: ...

    def close(self) -> None: ...


def seeds_of(folder: Path, number: int, **options: Any) -> Sequence[int]:
    """The seeds of the two prompts of a generation batch."""
    asked = Asked()
    nothing: Any = None  # is collected
    collector = Collector(nothing, asked, nothing, nothing)
    args = GRPOConfig(output_dir=str(folder), use_cpu=True, num_generations=4, **options)
    rows = [{"prompt_ids": [5]}, {"prompt_ids": [6]}]
    prompts = Prompts(args, dataset=rows, rows_of_generation=lambda _: [0, 1], collector=collector)
    prompts.request(number, last=9)
    return asked.seeds


def test_every_prompt_of_every_generation_and_run_has_samples_of_its_own(tmp_path: Path) -> None:
    first = seeds_of(tmp_path, 0)
    assert seeds_of(tmp_path, 0) == first
    assert len({*first, *seeds_of(tmp_path, 1), *seeds_of(tmp_path, 0, seed=7)}) == 6
