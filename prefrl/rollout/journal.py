"""The journal of a run: every scored generation batch, sealed on the disk before training learns from it.

It is the table of completions for people, and what a resumed run reads instead of generating and scoring again.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from prefrl import distributed
from prefrl.data.images import file_bytes
from prefrl.errors import CheckpointError, ConfigError
from prefrl.metrics import from_json, to_json
from prefrl.rollout.collect import Collected
from prefrl.rollout.summary import as_text, messages_of_turn, said_in
from prefrl.run.checkpoints import sync_folder
from prefrl.types import Completion, Episode, Rollout, Turn

# Columns of prepared datasets that are learned from: a row's teacher, by number, and the prompt that it sees, as ids;
# and what `prefrl teacher` has stored of its distributions.
TEACHER_COLUMNS = (
    *("teacher_number", "teacher_prompt_ids"),
    *("teacher_ids", "teacher_logprobs", "teacher_other_logprobs"),
)
_METADATA = b"prefrl"
# The last value of the metadata: a hash of all other bytes of the file. No text that a run writes comes after it.
_SEAL, _HASH = b"prefrl.seal", b"sha256:"
_NO_HASH = 64 * b"0"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A generation batch as it was journaled by one rank."""

    run: str  # id of the run
    generation: int  # number of the batch
    step: int  # the optimizer step that learned from it first
    parts: list[Collected]  # in the order in which they were scored


@dataclass
class Journal:
    """The generation batches of a run, one file for each and each rank.

    A file is written under another name, synced and renamed, so a batch is in the journal whole or not at all. Only
    this user can read the folder.

    Args:
        folder: Where the files are.
        rank: Number of this rank.
        world_size: Number of ranks. Batches that another number of ranks wrote are not read.
        keep: Number of batches that are kept, besides those that a resumed run may need; 0: nothing is written.
    """

    folder: Path
    rank: int
    world_size: int
    keep: int
    _run: str = ""
    _left_until: int = 0
    _suffix: str = field(init=False)  # of the names of this rank's files
    # Files of this rank by step. The folder has those of all ranks, so it is not listed for each batch.
    _known: list[tuple[int, Path]] | None = None

    def __post_init__(self) -> None:
        """Find the names of this rank's files."""
        number = distributed.rank_in_names(self.rank, self.world_size)
        self._suffix = ".parquet" if self.world_size == 1 else f"_rank{number}of{self.world_size}.parquet"

    def begin(self, run: str, *, generations: Sequence[int], steps_each: int, device: torch.device) -> None:
        """Find the batches that an interrupted run has left, up to the first damaged one. All ranks must call it.

        Args:
            run: Id of the run.
            generations: Numbers of the batches that training will need, in order.
            steps_each: Optimizer steps of a batch.
            device: For the communication.
        """
        self._run = run
        found = itertools.takewhile(lambda number: self._has(number, step=number * steps_each), generations)
        (count,) = distributed.min_over_ranks([len(list(found))], device)
        self._left_until = generations[0] + int(count) if generations else 0

    def left(self, generation: int, *, step: int) -> list[Collected] | None:
        """The parts of a batch that an interrupted run has left; None: it must be collected.

        Raises:
            CheckpointError: It was there when training began, and is not any more, or is damaged now.
        """
        if generation >= self._left_until:
            return None
        if not self._has(generation, step=step):
            raise CheckpointError(f"generation batch {generation} has disappeared from {self.folder}; resume again")
        return read_entry(self.path_of(step)).parts

    def seal(self, generation: int, parts: list[Collected], *, step: int, needed_from: int) -> None:
        """Write a batch of this rank, if it was not left by an interrupted run, and delete old ones.

        Args:
            generation: Number of the batch.
            parts: In the order in which they were scored.
            step: The optimizer step that learns from it first.
            needed_from: Batches that were first learned from at or after this step are not deleted.

        Raises:
            CheckpointError: It cannot be written.
        """
        if self.keep == 0 or generation < self._left_until:
            return
        try:
            files = self._files() if self._known is None else self._known
            write_table(_table(Entry(self._run, generation, step, parts)), self.path_of(step))
        except OSError as error:
            raise CheckpointError(
                f"the rollouts of step {step} cannot be written to {self.folder}: {error}. Free space or lower "
                "journal_keep, then resume with resume_from_checkpoint=True."
            ) from error
        files = sorted({*files, (step, self.path_of(step))})
        surplus = [file for file in files[: max(0, len(files) - self.keep)] if file[0] < needed_from]
        for _, path in surplus:
            path.unlink(missing_ok=True)
        self._known = [file for file in files if file not in surplus]

    def forget(self, *, from_step: int) -> None:
        """Delete the batches of this rank that were first learned from at or after a step."""
        for step, path in self._files():
            if step >= from_step:
                path.unlink(missing_ok=True)
        self._known = None

    def path_of(self, step: int) -> Path:
        """The file of the batch of this rank that a step, counted from 0, learned from first."""
        return self.folder / f"completions_{step:05d}{self._suffix}"

    def _has(self, generation: int, *, step: int) -> bool:
        path = self.path_of(step)
        if not path.exists():
            return False
        try:
            about = _about_entry(pq.read_schema(_whole(path)))
        except CheckpointError as error:
            _log.warning(
                "%s. This generation batch and later ones are sampled and scored again. A local sampler repeats them "
                "exactly; a vLLM server does not, so the final weights will be others than without the damage.",
                error,
            )
            return False
        return (about["run"], about["generation"]) == (self._run, generation)

    def _files(self) -> list[tuple[int, Path]]:
        """The files of this rank by step, in the folder."""
        paths = self.folder.glob(f"completions_*{self._suffix}")
        numbers = ((path.name.removeprefix("completions_").removesuffix(self._suffix), path) for path in paths)
        return sorted((int(number), path) for number, path in numbers if number.isdecimal())


def write_entry(entry: Entry, path: Path) -> None:
    """Write a generation batch, see `write_table`."""
    write_table(_table(entry), path)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table with metadata to a file that only this user can read; it is there whole or not at all.

    Raises:
        ConfigError: Its folder is a symbolic link.
        OSError: It cannot be written.
    """
    folder = path.parent
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a symbolic link, and prefrl does not write to its target. Remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    data = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, _SEAL: _HASH + _NO_HASH}), data)
    before, _, after = data.getvalue().rpartition(_NO_HASH)
    aside = path.with_suffix(".part")
    aside.unlink(missing_ok=True)  # it could be a link
    with aside.open("wb") as file:
        file.write(before + hashlib.sha256(before + after).hexdigest().encode() + after)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, path)
    sync_folder(folder)


def read_entry(path: Path) -> Entry:
    """Read a file of the journal.

    Raises:
        CheckpointError: Its bytes are not those that were written.
    """
    table = pq.read_table(_whole(path))
    about = _about_entry(table.schema)
    rows = table.to_pylist()
    parts, first = [], 0
    for part in about["parts"]:
        own = rows[first : first + part["rows"]]
        first += part["rows"]
        parts.append(_collected(own, part))
    return Entry(about["run"], about["generation"], about["step"], parts)


def _whole(path: Path) -> io.BytesIO:
    """The bytes of a file, if they are those that were written.

    Raises:
        CheckpointError: They are not.
    """
    data = path.read_bytes()
    start = data.rfind(_HASH) + len(_HASH)
    end = start + len(_NO_HASH)
    if hashlib.sha256(data[:start] + data[end:]).hexdigest().encode() != data[start:end]:
        raise CheckpointError(f"{path} is damaged: its bytes differ from those that were written")
    return io.BytesIO(data)


def _about_entry(schema: pa.Schema) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(schema.metadata[_METADATA])
    return about


def _table(entry: Entry) -> pa.Table:
    """A row for each turn."""
    rows: list[dict[str, Any]] = []
    abouts = []
    for part in entry.parts:
        own = [row for i, rollout in enumerate(part.rollouts) for row in _rows(entry.step, i, rollout, part)]
        if any(rollout.row.get("images") for rollout in part.rollouts):
            _add_images(own, part.rollouts)
        rows += own
        abouts.append(
            {
                "rows": len(own),
                "rewards": list(part.rollouts[0].rewards) if part.rollouts else [],
                "logged_metrics": part.logged_metrics,
                "logged_columns": list(part.logged_columns),
                "metrics": {name: to_json(metric) for name, metric in part.metrics.items()},
                "visits": part.visits,
                **({"tickets": part.tickets} if part.tickets else {}),
            }
        )
    about = {"run": entry.run, "generation": entry.generation, "step": entry.step, "parts": abouts}
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    return table.replace_schema_metadata({_METADATA: json.dumps(about).encode()})


def _column(values: list[Any]) -> pa.Array:
    """Values that have no common type are written as text."""
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return pa.array([None if value is None else _utf8(str(value)) for value in values])


def _rows(step: int, number: int, rollout: Rollout, part: Collected) -> Iterator[dict[str, Any]]:
    prompt, text = (_utf8(as_text(value)) for value in (rollout.prompt, rollout.text))
    for i, turn in enumerate(rollout.turns):
        completion = turn.completion
        yield {
            "step": step,
            "group": rollout.group,
            "rollout": number,
            "turn": i,
            "prompt": prompt,
            "completion": text,
            **({} if rollout.episode is None else _of_episode(rollout, rollout.episode, i)),
            "prompt_ids": turn.sent_ids,
            "completion_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "trainable": completion.trainable,
            "finish_reason": completion.finish_reason,
            "policy_versions": completion.policy_versions,
            **({} if completion.routes is None else _packed_routes(completion.routes)),
            **rollout.rewards,
            "reward": rollout.reward,
            "greedy_reward": rollout.greedy_reward,
            "advantage": rollout.advantage,
            **{name: values[number] for name, values in part.logged_columns.items()},
            **{name: rollout.row[name] for name in TEACHER_COLUMNS if name in rollout.row},
        }


def _packed_routes(routes: Tensor) -> dict[str, Any]:
    """The columns of a turn's routes: their bytes; tokens, layers and experts of each token."""
    return {"routes": routes.numpy().tobytes(), "routes_shape": [*routes.shape]}


def _routes(row: Mapping[str, Any]) -> Tensor | None:
    """What `_packed_routes` wrote; None if the turn has none."""
    if row.get("routes") is None:
        return None
    data, shape = bytearray(row["routes"]), row["routes_shape"]
    dtype = torch.uint8 if len(data) == math.prod(shape) else torch.int16
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _add_images(rows: Sequence[dict[str, Any]], rollouts: Sequence[Rollout]) -> None:
    """Add the images of each group's prompt, as the bytes of files, to the first row of the group."""
    images = {rollout.group: rollout.row["images"] for rollout in rollouts if rollout.row.get("images")}
    for row in rows:
        of_group = images.pop(row["group"], None)
        if of_group is not None:
            row["images"] = [file_bytes(image) for image in of_group]


def _of_episode(rollout: Rollout, episode: Episode, turn: int) -> dict[str, Any]:
    """What a turn of an episode adds to the table."""
    said = episode.said[turn] if episode.said else messages_of_turn(rollout.text, turn)
    return {
        "completion": _utf8(said_in(rollout)),
        "environment": episode.kind,
        "stop_reason": episode.stop_reason,
        "turn_text": _utf8(as_text(said)),
        **({"goes_on_from": episode.parents[turn]} if episode.parents else {}),
        "turn_reward": episode.turn_rewards[turn],
        "num_calls": episode.num_calls,
        "num_failed_calls": episode.num_failed_calls,
        "environment_reward": episode.reward,
        "tokens_sampled": episode.num_sampled,
        "tokens_dropped": episode.num_dropped,
    }


def _collected(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> Collected:
    rollouts: list[Rollout] = []
    columns: dict[str, list[Any]] = {name: [] for name in about["logged_columns"]}
    images = {row["group"]: [{"bytes": data} for data in row["images"]] for row in rows if row.get("images")}
    for _, turns in itertools.groupby(rows, key=lambda row: row["rollout"]):
        of_rollout = list(turns)
        rollouts.append(_rollout(of_rollout, about["rewards"], images.get(of_rollout[0]["group"], [])))
        for name, values in columns.items():
            values.append(of_rollout[0][name])
    return Collected(
        rollouts,
        about["logged_metrics"],
        columns,
        metrics={name: from_json(values) for name, values in about["metrics"].items()},
        visits=[[(row, group, reward) for row, group, reward in visit] for visit in about["visits"]],
        tickets=about.get("tickets", []),
    )


def _rollout(rows: Sequence[dict[str, Any]], reward_names: Sequence[str], images: list[Any]) -> Rollout:
    first = rows[0]
    turns = [
        Turn(
            row["prompt_ids"],
            Completion(
                row["completion_ids"],
                row["finish_reason"],
                row["logprobs"],
                row["trainable"],
                row["policy_versions"],
                _routes(row),
            ),
        )
        for row in rows
    ]
    episode = None
    if first.get("stop_reason") is not None:
        episode = Episode(
            first["environment"],
            first["stop_reason"],
            [row["turn_reward"] for row in rows],
            first["num_calls"],
            first["num_failed_calls"],
            first["environment_reward"],
            num_sampled=first.get("tokens_sampled", 0),
            num_dropped=first.get("tokens_dropped", 0),
        )
    return Rollout(
        turns,
        {
            **{name: first[name] for name in ("prompt", "prompt_ids", *TEACHER_COLUMNS) if name in first},
            **({"images": images} if images else {}),
        },
        first["group"],
        prompt=first["prompt"],
        text=first["completion"],
        rewards={name: first[name] for name in reward_names},
        reward=first["reward"],
        advantage=first["advantage"],
        greedy_reward=first["greedy_reward"],
        episode=episode,
    )


def _utf8(text: str) -> str:
    r"""The text, with a surrogate that stands alone, which no file can contain, as `\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode()
