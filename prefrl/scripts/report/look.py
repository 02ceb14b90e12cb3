"""`prefrl look`: completions of a run, from the files of its journal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
from annotated_types import Ge
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from prefrl.errors import ConfigError, DataError
from prefrl.options.fields import check_fields, opt
from prefrl.options.names import nearest
from prefrl.printable import printable
from prefrl.scripts.declaration import command

__all__ = ["LookArguments", "main"]

_METADATA = b"prefrl"  # where the journal says which columns are rewards
_SHOWN_CHARACTERS, _SHOWN_LINES = 4000, 100
_DEFAULT_WORST = 3


@dataclass
class LookArguments:
    """Which completions of which run."""

    run_dir: str | None = opt(None, "Folder of the run, or of its completions.")
    worst: Annotated[int, Ge(0)] | None = opt(None, "Number of completions with the lowest reward to show; None: 3.")
    best: Annotated[int, Ge(0)] = opt(0, "Number of completions with the highest reward to show.")
    step: int | None = opt(
        None, "Show completions of the generation batch that this optimizer step learned from; None: the last one."
    )
    all_steps: bool = opt(False, "Search all generation batches that the run kept.")
    reward: str = opt("reward", "Column to sort by: reward for the total, the name of a single reward, or advantage.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.run_dir is None:
            raise ConfigError("run_dir: not given. Write prefrl look RUN_DIR --worst 5.")
        if self.step is not None and self.all_steps:
            raise ConfigError(f"step={self.step} and all_steps=True: remove one of them")
        if self.worst is None:
            self.worst = 0 if self.best else _DEFAULT_WORST


@command("look", LookArguments, about="Show the worst and the best completions of a run.", positional=("run_dir",))
def main(options: LookArguments) -> int:
    """Print completions."""
    files = _files(Path(str(options.run_dir)))
    chosen = _chosen(files, options)
    rows = [row for step in chosen for row in _last_turns(files[step], options.reward)]
    scored = sorted(
        (row for row in rows if _is_number(row[options.reward])), key=lambda row: float(row[options.reward])
    )
    console = Console(highlight=False)
    console.print(_heading(chosen, rows, scored, options.reward))
    names = _reward_names(files[chosen[0]])
    for title, some in (("worst", scored[: options.worst]), ("best", scored[len(scored) - options.best :][::-1])):
        for number, row in enumerate(some, start=1):
            console.print(_panel(row, f"{title} {number}", names))
    return 0


def _files(run: Path) -> dict[int, list[Path]]:
    """The files by the first step that learned from them, as logs count it; several processes wrote one each."""
    folder = run / "completions" if (run / "completions").is_dir() else run
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("completions_*.parquet")):
        number = path.stem.removeprefix("completions_").split("_")[0]
        if number.isdecimal():
            files.setdefault(int(number) + 1, []).append(path)  # the number is that of the steps before it
    if not files:
        raise DataError(
            f"run_dir={str(run)!r}: has no completions. Runs that sample (GRPO, RLOO, PPO, ...) write them to the "
            "folder completions of their output_dir; journal_keep=0 switches that off."
        )
    return files


def _chosen(files: Mapping[int, Any], options: LookArguments) -> list[int]:
    steps = sorted(files)
    if options.all_steps:
        return steps
    if options.step is None:
        return steps[-1:]
    before = [step for step in steps if step <= options.step]
    if not before:
        raise ConfigError(
            f"step={options.step}: the run kept steps {steps[0]} to {steps[-1]}. Raise journal_keep to keep more."
        )
    return before[-1:]


def _last_turns(paths: Iterable[Path], reward: str) -> list[dict[str, Any]]:
    """The rows of the files; of an episode, that of its last turn, which has the whole conversation."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        table = pq.read_table(path)
        if reward not in table.column_names:
            raise ConfigError(f"reward={reward!r}: is not a column. {nearest(reward, table.column_names)}")
        ids = ("prompt_ids", "completion_ids", "logprobs", "trainable", "policy_versions", "images")
        kept = [name for name in table.column_names if name not in ids]
        lengths = [len(ids or ()) for ids in table["completion_ids"].to_pylist()]
        for row, length in zip(table.select(kept).to_pylist(), lengths, strict=True):
            key = (path, row["group"], row["rollout"])
            tokens = length + (rows[key]["tokens"] if key in rows else 0)
            rows[key] = {**row, "tokens": tokens}
    return list(rows.values())


def _reward_names(paths: Sequence[Path]) -> list[str]:
    about = json.loads(pq.read_schema(paths[0]).metadata[_METADATA])
    return list(dict.fromkeys(name for part in about["parts"] for name in part["rewards"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _heading(steps: Sequence[int], rows: Sequence[Any], scored: Sequence[Mapping[str, Any]], reward: str) -> str:
    values = [float(row[reward]) for row in scored]
    where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    told = f"{where}: {len(rows):,} completions"
    if not values:
        return f"{told}, none with a number in {reward}"
    return f"{told}, {reward} {min(values):.4g} to {max(values):.4g}, mean {math.fsum(values) / len(values):.4g}"


def _panel(row: Mapping[str, Any], title: str, rewards: Sequence[str]) -> Panel:
    numbers = [f"{name} {row[name]:.4g}" for name in ("reward", *rewards, "advantage") if _is_number(row.get(name))]
    about = f"{row['tokens']} tokens, {row['finish_reason']}"
    shown = Text()
    for name in ("prompt", "completion"):
        text = printable(str(row[name]), max_characters=_SHOWN_CHARACTERS, max_lines=_SHOWN_LINES)
        shown.append(f"{name}\n", style="dim").append(f"{text}\n")
    shown.append(" | ".join([*numbers, about]), style="bold")
    return Panel(shown, title=f"{title}, step {row['step'] + 1}, prompt {row['group']}", title_align="left")
