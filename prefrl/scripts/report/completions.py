"""Completions and rewards of a run, from its journal and its evaluations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefrl.printable import printable

__all__ = ["Histogram", "Sample", "SideBySide", "histograms_of", "side_by_side"]

_FILE = re.compile(r"completions_(\d+)(?:_rank\d+of\d+)?")
_EVALUATION = re.compile(r"(\w+)_(\d+)")
_COLUMNS = ("group", "turn", "prompt", "completion", "reward", "finish_reason")
_MAX_CHARACTERS = 1500  # of a prompt and of a completion
_MAX_PROMPTS = 8
_RECENT = 8  # generation batches in which prompts of two runs are looked for
_BINS = 20


@dataclass(frozen=True)
class Sample:
    """A completion, with texts that are safe to show."""

    group: int
    key: str  # the whole prompt, by which prompts are found in another batch
    prompt: str
    completion: str
    step: int
    reward: float
    rewards: dict[str, float]  # by the name of the reward; those that are None are left out
    is_cut_off: bool


@dataclass(frozen=True)
class SideBySide:
    """Completions of the same prompts in columns."""

    title: str
    columns: tuple[str, str]
    pairs: list[tuple[Sample, Sample]]


@dataclass(frozen=True)
class Histogram:
    """The rewards of a generation batch."""

    name: str
    step: int
    low: float
    high: float
    counts: list[int]  # of bins of equal width from low to high

    @property
    def most(self) -> int:
        """The count of the fullest bin."""
        return max(self.counts)


def side_by_side(folders: Sequence[Path], names: Sequence[str]) -> list[SideBySide]:
    """The tables of one run, or of two.

    One run: the first and the last evaluation, and the best and the worst completion of prompts of the last batch. Two
    runs: the completions of prompts that both have had, in the last evaluations or else in the last batches; the first
    ones of their groups, which are random ones. If no prompt is shared: the best and the worst of each run.

    Args:
        folders: `output_dir` of each run.
        names: What the runs are called.
    """
    if len(folders) == 1:
        first, last = _evaluations(folders[0], 0), _evaluations(folders[0], -1)
        tables = [_shared("Evaluation, first and last", ("first", "last"), first, last)]
        tables.append(_best_and_worst(folders[0], "Last generation batch, best and worst"))
        return [table for table in tables if table.pairs]
    a, b = folders
    columns = (names[0], names[1])
    found = _shared("The same prompts in the last evaluations", columns, _evaluations(a, -1), _evaluations(b, -1))
    if not found.pairs:
        recent = [
            [sample for batch in _batches(folder)[-_RECENT:] for sample in _samples(*batch)] for folder in folders
        ]
        found = _shared("The same prompts in the last generation batches", columns, *recent)
    if found.pairs:
        return [found]
    tables = [
        _best_and_worst(folder, f"{name}: best and worst") for folder, name in zip(folders, columns, strict=True)
    ]
    return [table for table in tables if table.pairs]


def histograms_of(folder: Path) -> list[list[Histogram]]:
    """For each reward, and the total of several: histograms of the first, a middle and the last batch."""
    batches = _batches(folder)
    if not batches:
        return []
    chosen = [batches[i] for i in sorted({0, len(batches) // 2, len(batches) - 1})]
    values: dict[str, list[tuple[int, list[float]]]] = {}
    for step, paths in chosen:
        samples = _samples(step, paths)
        names = dict.fromkeys(name for sample in samples for name in sample.rewards)
        for name in names:
            values.setdefault(name, []).append((step, [s.rewards[name] for s in samples if name in s.rewards]))
        if len(names) > 1:
            values.setdefault("reward", []).append((step, [s.reward for s in samples if math.isfinite(s.reward)]))
    return [rows for name, of_steps in values.items() if (rows := _histograms(name, of_steps))]


def _histograms(name: str, of_steps: Sequence[tuple[int, list[float]]]) -> list[Histogram]:
    every = [value for _, values in of_steps for value in values if math.isfinite(value)]
    if not every:
        return []
    low, high = min(every), max(every)
    width = (high - low) / _BINS or 1.0
    rows = []
    for step, values in of_steps:
        counts = [0] * _BINS
        for value in values:
            if math.isfinite(value):
                counts[min(int((value - low) / width), _BINS - 1)] += 1
        rows.append(Histogram(name, step, low, high, counts))
    return rows


def _shared(title: str, columns: tuple[str, str], left: Iterable[Sample], right: Iterable[Sample]) -> SideBySide:
    """The first completions of each prompt's last group on both sides."""
    of_left, of_right = _by_prompt(left), _by_prompt(right)
    keys = [key for key in of_left if key in of_right][:_MAX_PROMPTS]
    return SideBySide(title, columns, [(of_left[key], of_right[key]) for key in keys])


def _by_prompt(samples: Iterable[Sample]) -> dict[str, Sample]:
    chosen: dict[str, Sample] = {}
    for sample in samples:
        old = chosen.get(sample.key)
        if old is None or (sample.step, sample.group) != (old.step, old.group):
            chosen[sample.key] = sample
    return chosen


def _best_and_worst(folder: Path, title: str) -> SideBySide:
    groups: dict[int, list[Sample]] = {}
    batches = _batches(folder)
    for sample in _samples(*batches[-1]) if batches else []:
        if math.isfinite(sample.reward):
            groups.setdefault(sample.group, []).append(sample)
    pairs = [
        (max(group, key=lambda sample: sample.reward), min(group, key=lambda sample: sample.reward))
        for group in groups.values()
    ]
    pairs.sort(key=lambda pair: pair[1].reward - pair[0].reward)
    differing = [pair for pair in pairs if pair[0].reward > pair[1].reward]
    return SideBySide(title, ("best", "worst"), (differing or pairs)[:_MAX_PROMPTS])


def _batches(folder: Path) -> list[tuple[int, list[Path]]]:
    """The journal's files of each step, counted from 1 as in the metrics; those of all ranks together."""
    paths: dict[int, list[Path]] = {}
    for path in sorted((folder / "completions").glob("completions_*.parquet")):
        if found := _FILE.fullmatch(path.stem):
            paths.setdefault(int(found[1]) + 1, []).append(path)
    return sorted(paths.items())


def _evaluations(folder: Path, place: int) -> list[Sample]:
    """The samples of an evaluation, those of all its datasets."""
    paths: dict[int, list[Path]] = {}
    for path in sorted((folder / "evaluations").glob("*.parquet")):
        if found := _EVALUATION.fullmatch(path.stem):
            paths.setdefault(int(found[2]), []).append(path)
    steps = sorted(paths)
    return _samples(steps[place], paths[steps[place]]) if steps else []


def _samples(step: int, paths: Iterable[Path]) -> list[Sample]:
    return [sample for path in paths for sample in _read(step, path)]


def _read(step: int, path: Path) -> Iterator[Sample]:
    """The rows of a file, one for each rollout; none if it has been deleted meanwhile or is damaged."""
    try:
        schema = pq.read_schema(path)
        parts = json.loads((schema.metadata or {}).get(b"prefrl", b"{}")).get("parts", [])
        names = list(dict.fromkeys(name for part in parts for name in part["rewards"]))
        wanted = [name for name in (*_COLUMNS, *names) if name in schema.names]
        rows = pq.read_table(path, columns=wanted).to_pylist()
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return
    for row in rows:
        if row.get("turn", 0) == 0:
            yield _sample(step, row, names)


def _sample(step: int, row: Mapping[str, Any], names: Sequence[str]) -> Sample:
    prompt = str(row.get("prompt", ""))
    rewards = {name: float(row[name]) for name in names if isinstance(row.get(name), int | float)}
    return Sample(
        group=row.get("group", 0),
        key=prompt,
        prompt=_ending(prompt),
        completion=printable(str(row.get("completion", "")), max_characters=_MAX_CHARACTERS),
        step=step,
        reward=math.nan if row.get("reward") is None else float(row["reward"]),
        rewards=rewards,
        is_cut_off=row.get("finish_reason") == "length",
    )


def _ending(prompt: str) -> str:
    """The end of a prompt, where the question is."""
    left_out = len(prompt) - _MAX_CHARACTERS
    return (
        printable(prompt) if left_out <= 0 else f"({left_out:,} more characters) ...\n{printable(prompt[left_out:])}"
    )
