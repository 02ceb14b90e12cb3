"""The turns and tokens of completions in the folder of a run, and the quantities that tokens are colored by."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from prefrl.errors import printable
from prefrl.scripts.report_record import last_checkpoint

TokenQuantity = Literal["logprob", "ratio", "advantage", "kl", "teacher_kl"]


@dataclass(frozen=True)
class Scale:
    """A quantity of tokens, and its colors.

    Args:
        key: Short name.
        name: In texts.
        about: What it is.
        borders: Values at which the color changes, ascending.
        num_below: Number of borders below the values without a color.
        missing: Why no token has it; empty: some have.
    """

    key: TokenQuantity
    name: str
    about: str
    borders: tuple[float, ...]
    num_below: int
    missing: str = ""

    def level(self, value: float) -> int:
        """0 without a color; the further from 0, the stronger the color, which above 0 is another one than below."""
        return sum(value >= border for border in self.borders) - self.num_below

    def legend(self) -> list[tuple[int, str]]:
        """All levels, and their values in words."""
        first, *_, last = self.borders
        inner = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(self.borders)]
        words = [f"below {first:.3g}", *inner, f"{last:.3g} and above"]
        return list(enumerate(words, start=-self.num_below))


_KL = "estimate of KL(policy || {}) at this token in nats: exp(d) - d - 1 with d = log {} - log policy"
_KL_BORDERS = (1e-3, 1e-2, 0.1, 1.0)
_FRACTIONS = (0.01, 0.25, 0.5, 0.75)  # of the largest advantage, at which the color changes
LOGPROB = Scale("logprob", "log-prob", "log-prob in nats when the token was sampled", (-4.0, -2.0, -1.0, -0.5), 4)
RATIO = Scale(
    "ratio",
    "ratio",
    "probability under the policy in the last pass that trained on it, divided by that when it was sampled",
    (0.5, 0.83, 0.95, 0.99, 1.01, 1.05, 1.2, 2.0),
    4,
)
ADVANTAGE = Scale("advantage", "advantage", "advantage in the loss", (), 4)
KL = Scale("kl", "KL", _KL.format("reference", "reference"), _KL_BORDERS, 0, "beta is 0, so there is no reference")
TEACHER_KL = Scale(
    "teacher_kl", "teacher KL", _KL.format("teacher", "teacher"), _KL_BORDERS, 0, "teacher_kl_coef is 0: no teacher"
)
SCALES = {scale.key: scale for scale in (LOGPROB, RATIO, ADVANTAGE, KL, TEACHER_KL)}
_NOT_RECORDED = (
    "not recorded. With journal_tokens=True, it is known once a step has learned from this generation batch"
)


@dataclass(frozen=True)
class ShownToken:
    """A token, with a text that is safe to show."""

    text: str
    values: dict[str, float]  # by the key of the quantity; those that are not known are left out


@dataclass(frozen=True)
class ShownTurn:
    """A turn of an episode, or a whole completion."""

    text: str  # what was said in it, if it is one of an episode
    reward: float | None  # of its observation
    tokens: list[ShownToken]
    step: int | None  # the last one, counted from 1, that trained on it; None: none that is known


@dataclass(frozen=True)
class BatchTokens:
    """The turns of some completions of a generation batch."""

    turns: dict[tuple[int, int], list[ShownTurn]] = field(default_factory=dict)  # by group and number of the rollout
    scales: list[Scale] = field(default_factory=list)


# From the ids of a completion, the text of each.
TextOf = Callable[[Sequence[int]], list[str]]
_MAX_TOKENS = 300  # that are shown of a completion
_MAX_TURNS = 20
_MAX_CHARACTERS = 1500  # of a turn
_FILE = re.compile(r"tokens_(\d+)(?:_rank\d+of\d+)?")
_COLUMNS = ("group", "rollout", "turn", "turn_text", "turn_reward", "prompt_ids", "completion_ids", "logprobs")


def text_of_tokens(folder: Path) -> TextOf | None:
    """By the tokenizer of the last checkpoint, or of the folder; None if there is none."""
    checkpoint = last_checkpoint(folder)
    files = [at / "tokenizer.json" for at in (checkpoint, folder) if at is not None]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def text_of(ids: Sequence[int]) -> list[str]:
        whole = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in range(len(ids) + 1)]
        return [printable(after[len(before) :]) for before, after in pairwise(whole)]

    return text_of


def turns_of(
    folder: Path, paths: Iterable[Path], wanted: Collection[tuple[int, int]], *, first: int, end: float = math.inf
) -> BatchTokens:
    """The turns of completions, with what the run recorded of their tokens.

    Args:
        folder: Of the run.
        paths: The journal's files of a generation batch.
        wanted: Groups and numbers of the completions.
        first: The step that learned from the batch first, counted from 0.
        end: The first step that learned from the next one.
    """
    text_of, groups = text_of_tokens(folder), sorted({group for group, _ in wanted})
    rows, run = _rows(paths, groups)
    record = _Record.read(folder, run, groups, first=first, end=end)
    turns: dict[tuple[int, int], list[ShownTurn]] = {}
    for key, of_rollout in groupby(rows, key=lambda row: (row["group"], row["rollout"])):
        if key not in wanted:
            continue
        num_left, every_turn = _MAX_TOKENS, list(of_rollout)
        shown = turns[key] = []
        for row in every_turn[:_MAX_TURNS]:
            shown.append(_turn(row, text_of, record, num_left))
            num_left -= len(shown[-1].tokens)
        if len(every_turn) > _MAX_TURNS:
            shown.append(ShownTurn(f"{len(every_turn) - _MAX_TURNS} more turns are not shown", None, [], None))
    every = [token.values for of_rollout in turns.values() for turn in of_rollout for token in turn.tokens]
    return BatchTokens(turns, [_fitted(scale, every, record) for scale in SCALES.values()])


def _fitted(scale: Scale, every: Sequence[Mapping[str, float]], record: _Record) -> Scale:
    """The scale for these tokens: with borders for their advantages, and the reason if none has a value."""
    values = [values[scale.key] for values in every if scale.key in values]
    if scale is ADVANTAGE:
        most = max(map(abs, values), default=0.0) or 1.0
        borders = [fraction * most for fraction in _FRACTIONS]
        scale = replace(scale, borders=(*(-border for border in reversed(borders)), *borders))
    missing = ""
    if not values:
        missing = scale.missing if record.of_group and scale.missing else _NOT_RECORDED
    return replace(scale, missing=missing)


def _rows(paths: Iterable[Path], groups: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
    """The turns of some groups, in order, and the id of the run; none of files that are gone or damaged."""
    rows: list[dict[str, Any]] = []
    run = ""
    for path in paths:
        try:
            schema = pq.read_schema(path)
            run = json.loads((schema.metadata or {}).get(b"prefrl", b"{}")).get("run", "")
            columns = [name for name in _COLUMNS if name in schema.names]
            rows += pq.read_table(path, columns=columns, filters=[("group", "in", groups)]).to_pylist()
        except (OSError, pa.ArrowException, ValueError, KeyError):
            continue
    return rows, run


def _turn(row: Mapping[str, Any], text_of: TextOf | None, record: _Record, num_left: int) -> ShownTurn:
    ids, logprobs = row["completion_ids"], row.get("logprobs") or []
    found, step = record.find(row["group"], row["prompt_ids"], ids)
    shown = min(len(ids), len(logprobs), max(0, num_left))
    texts = [] if text_of is None else text_of(ids[:shown])
    tokens = [
        ShownToken(text, {"logprob": logprobs[i]} | {key: values[i] for key, values in found.items()})
        for i, text in enumerate(texts)
        if logprobs[i] is not None
    ]
    text = printable(str(row.get("turn_text") or ""), max_characters=_MAX_CHARACTERS)
    return ShownTurn(text, row.get("turn_reward"), tokens, step)


@dataclass(frozen=True)
class _Record:
    """The responses of some groups as training passes saw them, those of later steps last; see `features.tokens`."""

    of_group: dict[int, list[dict[str, Any]]]

    @classmethod
    def read(cls, folder: Path, run: str, groups: Sequence[int], *, first: int, end: float) -> _Record:
        """What the steps from `first` to before `end` have written in this run."""
        rows: dict[int, list[dict[str, Any]]] = {}
        paths = (folder / "completions").glob("tokens_*.parquet")
        files = sorted((int(name[1]), path) for path in paths if (name := _FILE.fullmatch(path.stem)))
        for _, path in [file for file in files if first <= file[0] < end]:
            try:
                about = json.loads(pq.read_schema(path).metadata[b"prefrl"])
                table = pq.read_table(path, filters=[("group", "in", groups)]) if about["run"] == run else None
            except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
                continue
            for row in [] if table is None else table.to_pylist():
                rows.setdefault(row["group"], []).append(row | {"step": about["step"] + 1})
        return cls(rows)

    def find(
        self, group: int, sent_ids: Sequence[int], ids: Sequence[int]
    ) -> tuple[dict[str, list[float]], int | None]:
        """The values of the tokens of a turn by the key of the quantity, and the step; nothing if it is not there."""
        for row in reversed(self.of_group.get(group, [])):
            before, start = row["num_before"], len(sent_ids) - row["num_before"]
            place = slice(start, start + len(ids))
            seen = row["response_ids"]
            if start >= 0 and seen[place] == ids and seen[:start] == sent_ids[before:]:
                return _values({name: row[name][place] for name in row if isinstance(row[name], list)}), row["step"]
        return {}, None


def _values(row: Mapping[str, list[float]]) -> dict[str, list[float]]:
    now = row["logprobs"]
    values = {
        "ratio": [_exp(a - b) for a, b in zip(now, row["sampling_logprobs"], strict=True)],
        "advantage": row["advantages"],
    }
    for key, name in (("kl", "ref_logprobs"), ("teacher_kl", "teacher_logprobs")):
        if name in row:
            values[key] = [_exp(b - a) - (b - a) - 1 for a, b in zip(now, row[name], strict=True)]
    return values


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the largest that a float can hold is exp(709)
