"""The page about one run or several: one HTML file without anything from elsewhere, with completions and curves."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from prefrl import __version__
from prefrl.errors import printable
from prefrl.scripts.report_record import Point, events_of, read_run, series_of, state_of, thinned
from prefrl.scripts.report_tokens import SCALES, Scale, ShownTurn, turns_of

_FOLDER = Path(__file__).parent / "page"
MOST_RUNS = 6  # that one page compares: as many as there are colors
_MAX_POINTS = 600  # of all runs' curves of a metric
_MAX_METRICS = 200
_MAX_OF_OPTION = 500  # of an option's value
# Metrics whose curves come first.
_FIRST = (
    *("reward", "eval_reward", "loss", "eval_loss", "mean_token_accuracy", "rewards/accuracies", "rewards/margins"),
    *("kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "learning_rate"),
)
_NUM_FIRST = 9
# What HuggingFace logs at the end of training.
_TOTALS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss")


def page(folders: Sequence[Path], *, is_live: bool = False) -> str:
    """The page about one run, or several that are compared; a live one asks its server every second for what is new.

    Raises:
        ConfigError: A folder is not that of a run.
    """
    runs = [read_run(folder) for folder in folders]
    names = [printable(run.name) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({letter})" for name, letter in zip(names, ascii_uppercase, strict=False)]
    series = [series_of(run.rows) for run in runs]
    main = _main_metrics(series)
    metrics = _ordered(series, main)
    times = [run.times() for run in runs]
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    limit = _MAX_POINTS // max(2, len(runs))
    curves = {name: [[_short(point) for point in thinned(s.get(name, []), limit)] for s in series] for name in metrics}
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"number": _number, "clock": _clock, "color": _color, "changes": ShownCompletion.changes}
    text = environment.get_template("page.html").render(
        runs=runs,
        names=names,
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data={"names": names, "curves": curves},
        first=main,
        others=metrics[len(main) :],
        finals=_finals(metrics, series),
        times=times,
        phases=sorted({phase for of_run in times for phase in of_run}),
        histograms=[histograms_of(run.folder) for run in runs],
        scales=SCALES.values(),
        tables=side_by_side([run.folder for run in runs], names),
        events=[events_of(run) for run in runs],
        options=_table([run.config for run in runs]),
        versions=_table(
            [{**run.starts[-1].versions, "platform": run.starts[-1].platform} if run.starts else {} for run in runs]
        ),
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        states=(states := [state_of(run, time.time()) for run in runs]),
        is_live=is_live,
        status="live" if "live" in states else " and ".join(dict.fromkeys(states)),
    )
    return printable(text)  # names of metrics, options and packages, and commands, come from files


def _main_metrics(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the metrics whose curves come first: as many as fit, but the mean of every reward in any case."""
    names = {name for of_run in series for name in of_run}
    if "reward" in names:  # the loss of a policy gradient says nothing about progress
        names -= {"loss", "eval_loss"}
    parts = sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))
    head = [name for name in _FIRST[:2] if name in names]  # the reward in training and in evaluations
    rest = [name for name in _FIRST[2:] if name in names]
    return [*head, *parts, *rest[: max(0, _NUM_FIRST - len(head) - len(parts))]]


def _ordered(series: Sequence[Mapping[str, Any]], main: Sequence[str]) -> list[str]:
    """The names of all metrics: the main ones, then the others in the order of the alphabet."""
    others = sorted({name for of_run in series for name in of_run} - {*main, *_TOTALS})
    return [*main, *others][:_MAX_METRICS]


def _short(point: Point) -> tuple[int, float]:
    return point[0], float(f"{point[1]:.5g}")


def _finals(names: Sequence[str], series: Sequence[Mapping[str, Sequence[Point]]]) -> list[dict[str, Any]]:
    """The first and last value of each metric in each run, and the difference of the last ones."""
    rows = []
    for name in names:
        of_runs = [s.get(name, []) for s in series]
        firsts = [points[0][1] if points else None for points in of_runs]
        lasts = [points[-1][1] if points else None for points in of_runs]
        known = [last for last in lasts if last is not None]
        change = known[1] - known[0] if len(known) == len(series) == 2 else None
        rows.append({"name": name, "firsts": firsts, "lasts": lasts, "change": change})
    return rows


def _table(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each name: its values in all columns, and whether all columns have it with values that differ."""
    rows = []
    for name in sorted({name for column in columns for name in column}):
        values = [_text(column[name]) if name in column else "" for column in columns]
        rows.append(
            {
                "name": name,
                "values": values,
                "differs": all(name in column for column in columns) and len(set(values)) > 1,
            }
        )
    return rows


def _text(value: Any) -> str:
    return printable("null" if value is None else str(value), max_characters=_MAX_OF_OPTION)


def _clock(time: str) -> str:
    """A time in ISO 8601 as people read it; other texts as they are."""
    try:
        return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return time


def _number(value: float | None) -> str:
    """A number with four digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 and math.isfinite(value) else f"{value:.4g}"


_FILE = re.compile(r"completions_(\d+)(?:_rank\d+of\d+)?")
_EVALUATION = re.compile(r"(\w+)_(\d+)")
_WORDS = re.compile(r"\s+|\S+")
_COLUMNS = (
    *("group", "rollout", "turn", "prompt", "completion", "reward", "advantage", "finish_reason"),
    *("environment", "stop_reason", "num_calls", "num_failed_calls"),
)
_MAX_CHARACTERS = 1500  # of a prompt and of a completion
_MAX_PROMPTS = 8
_MAX_EVALUATIONS = 4  # that are shown beside each other
_RECENT = 8  # generation batches in which prompts of two runs are looked for
_BINS = 20


@dataclass(frozen=True)
class ShownCompletion:
    """A completion, with texts that are safe to show."""

    group: int
    rollout: int
    key: str  # the whole prompt, by which prompts are found in another batch
    prompt: str
    completion: str
    step: int
    reward: float
    rewards: dict[str, float]  # by the name of the reward; those that are None are left out
    advantage: float | None
    is_cut_off: bool
    ending: str  # of an episode
    turns: tuple[ShownTurn, ...] = ()  # with their tokens; a single completion is one turn

    def changes(self, before: ShownCompletion) -> list[tuple[str, bool]]:
        """The pieces of the completion, and whether an earlier completion of the prompt lacks them."""
        old, new = (_WORDS.findall(sample.completion) for sample in (before, self))
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        return [("".join(new[i:j]), tag != "equal") for tag, _, _, i, j in matcher.get_opcodes() if i < j]


@dataclass(frozen=True)
class SideBySide:
    """Completions of the same prompts in columns."""

    title: str
    columns: tuple[str, ...]
    pairs: Sequence[tuple[ShownCompletion, ...]]  # one completion for each column
    shows_changes: bool = False  # from each column to the next
    scales: Sequence[Scale] = ()  # of the tokens, if they are known


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
    """The tables of one run, or of several.

    One run: up to four evaluations from the first to the last, and the best and the worst completion of prompts of the
    last batch. Several runs: the completions of prompts that all have had, in the last evaluations or else in the last
    batches; the first ones of their groups, which are random ones. If no prompt is shared: the best and the worst of
    each run.
    """
    if len(folders) == 1:
        tables = [_evaluated(folders[0]), _best_and_worst(folders[0], "Last generation batch, best and worst")]
        return [table for table in tables if table.pairs]
    columns = tuple(names)
    last = [[sample for batch in _evaluations(folder)[-1:] for sample in _samples(*batch)] for folder in folders]
    found = SideBySide("The same prompts in the last evaluations", columns, _shared(last))
    if not found.pairs:
        recent = [
            [sample for batch in _batches(folder)[-_RECENT:] for sample in _samples(*batch)] for folder in folders
        ]
        found = SideBySide("The same prompts in the last generation batches", columns, _shared(recent))
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


def _evaluated(folder: Path) -> SideBySide:
    """The same prompts in evaluations from the first to the last; nothing changes in a single one."""
    batches = _evaluations(folder)
    places = {round(i * (len(batches) - 1) / (_MAX_EVALUATIONS - 1)) for i in range(_MAX_EVALUATIONS)}
    chosen = [batches[place] for place in sorted(places)] if batches else []
    columns = ("first", *("later" for _ in chosen[2:]), "last")[: len(chosen)]
    pairs = _shared([_samples(*batch) for batch in chosen])
    return SideBySide("Evaluations, first to last", columns, pairs, shows_changes=True)


def _shared(sides: Sequence[Iterable[ShownCompletion]]) -> list[tuple[ShownCompletion, ...]]:
    """The first completions of each prompt's last group on every side."""
    found = [_by_prompt(samples) for samples in sides]
    keys = [key for key in found[0] if all(key in side for side in found)] if found else []
    return [tuple(side[key] for side in found) for key in keys[:_MAX_PROMPTS]]


def _by_prompt(samples: Iterable[ShownCompletion]) -> dict[str, ShownCompletion]:
    chosen: dict[str, ShownCompletion] = {}
    for sample in samples:
        old = chosen.get(sample.key)
        if old is None or (sample.step, sample.group) != (old.step, old.group):
            chosen[sample.key] = sample
    return chosen


def _best_and_worst(folder: Path, title: str) -> SideBySide:
    groups: dict[int, list[ShownCompletion]] = {}
    batches = _batches(folder)
    for sample in _samples(*batches[-1]) if batches else []:
        if math.isfinite(sample.reward):
            groups.setdefault(sample.group, []).append(sample)
    pairs = [
        (max(group, key=lambda sample: sample.reward), min(reversed(group), key=lambda sample: sample.reward))
        for group in groups.values()
    ]
    pairs.sort(key=lambda pair: pair[1].reward - pair[0].reward)
    differing = [pair for pair in pairs if pair[0].reward > pair[1].reward]
    return _with_turns(SideBySide(title, ("best", "worst"), (differing or pairs)[:_MAX_PROMPTS]), folder, batches)


def _with_turns(table: SideBySide, folder: Path, batches: Sequence[tuple[int, list[Path]]]) -> SideBySide:
    """The table with the turns and tokens of its completions, which are those of the last batch."""
    if not table.pairs:
        return table
    step, paths = batches[-1]
    wanted = {(sample.group, sample.rollout) for pair in table.pairs for sample in pair}
    found = turns_of(folder, paths, wanted, first=step - 1)
    pairs = [
        tuple(replace(sample, turns=tuple(found.turns.get((sample.group, sample.rollout), ()))) for sample in pair)
        for pair in table.pairs
    ]
    has_tokens = any(turn.tokens for turns in found.turns.values() for turn in turns)
    return replace(table, pairs=pairs, scales=found.scales if has_tokens else ())


def _batches(folder: Path) -> list[tuple[int, list[Path]]]:
    """The journal's files of each step, counted from 1 as in the metrics; those of all ranks together."""
    paths: dict[int, list[Path]] = {}
    for path in sorted((folder / "completions").glob("completions_*.parquet")):
        if found := _FILE.fullmatch(path.stem):
            paths.setdefault(int(found[1]) + 1, []).append(path)
    return sorted(paths.items())


def _evaluations(folder: Path) -> list[tuple[int, list[Path]]]:
    """The files of each evaluation, those of all its datasets together."""
    paths: dict[int, list[Path]] = {}
    for path in sorted((folder / "evaluations").glob("*.parquet")):
        if found := _EVALUATION.fullmatch(path.stem):
            paths.setdefault(int(found[2]), []).append(path)
    return sorted(paths.items())


def _samples(step: int, paths: Iterable[Path]) -> list[ShownCompletion]:
    return [sample for path in paths for sample in _read(step, path)]


def _read(step: int, path: Path) -> Iterator[ShownCompletion]:
    """The rows of a file, one for each rollout; none if it has been deleted meanwhile or is damaged."""
    try:
        schema = pq.read_schema(path)
        parts = json.loads((schema.metadata or {}).get(b"prefrl", b"{}")).get("parts", [])
        names = list(dict.fromkeys(name for part in parts for name in part["rewards"]))
        wanted = [name for name in (*_COLUMNS, *names) if name in schema.names]
        rows = pq.read_table(path, columns=wanted).to_pylist()
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return
    yield from (_sample(step, row, names) for row in rows if row.get("turn", 0) == 0)


def _sample(step: int, row: Mapping[str, Any], names: Sequence[str]) -> ShownCompletion:
    prompt = str(row.get("prompt", ""))
    rewards = {name: float(row[name]) for name in names if isinstance(row.get(name), int | float)}
    return ShownCompletion(
        group=row.get("group", 0),
        rollout=row.get("rollout", 0),
        key=prompt,
        prompt=_ending(prompt),
        completion=printable(str(row.get("completion", "")), max_characters=_MAX_CHARACTERS),
        step=step,
        reward=math.nan if row.get("reward") is None else float(row["reward"]),
        rewards=rewards,
        advantage=row.get("advantage"),
        is_cut_off=row.get("finish_reason") == "length",
        ending=_ending_of(row),
    )


def _color(scale: Scale, level: int) -> str:
    """The class of a level of a quantity in the style."""
    return f"{scale.key}{'_' if level < 0 else ''}{abs(level)}"


def _ending_of(row: Mapping[str, Any]) -> str:
    """How an episode ended, and what it called; empty for a single completion."""
    if row.get("stop_reason") is None:
        return ""
    calls = f", {row['num_calls']} calls, {row['num_failed_calls']} of them failed" if row["num_calls"] else ""
    return f"{row['environment']}, ended by {row['stop_reason']}{calls}"


def _ending(prompt: str) -> str:
    """The end of a prompt, where the question is."""
    left_out = len(prompt) - _MAX_CHARACTERS
    return (
        printable(prompt) if left_out <= 0 else f"({left_out:,} more characters) ...\n{printable(prompt[left_out:])}"
    )
