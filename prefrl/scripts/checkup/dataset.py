"""Checks of the rows that a run trains on: lengths, ends, duplicates, rewards of them, and steps of batches.

Rewards are tried with the row's own answer as the completion, and with an empty one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from prefrl.data.chat import special_tokens
from prefrl.data.checks import (
    ID_COLUMNS,
    check_known_ids,
    check_positions,
    num_duplicates,
    warn_of_shared_rows,
    warn_of_unknown_end,
)
from prefrl.data.packing import list_lengths
from prefrl.errors import DataError, printable
from prefrl.generation.local.generator import end_token_ids
from prefrl.models.plans import position_limit
from prefrl.rewards.named import reward_by_name
from prefrl.rewards.runner import RewardRunner, RewardScores
from prefrl.scripts.checkup.findings import Section, logged_into, rows_in_memory
from prefrl.scripts.checkup.subject import Subject
from prefrl.trainer.online.prompts import prompts_per_generation

_MOST_CHARACTERS = 600  # of a part of a row that is shown
# What no limit holds for.
UNLIMITED = {"max_length": None, "max_prompt_length": None, "filter_overlong_prompts": False}


def check_rows(section: Section, subject: Subject, dataset: Any, eval_dataset: Any) -> datasets.Dataset | None:
    """Tokenize the first rows as the trainer does, and check them.

    Returns:
        The tokenized rows of the training dataset, truncated as the trainer truncates them.

    Raises:
        ConfigError: An option does not fit the data.
        DataError: Rows cannot be used.
    """
    raw, config, tokenizer = rows_in_memory(dataset), subject.config, subject.tokenizer
    rows = _usable(section, subject, raw)
    check_known_ids(rows, tokenizer, num_embeddings=subject.num_embeddings, columns=ID_COLUMNS)
    check_positions(rows, position_limit(subject.model), config.length_bound, columns=ID_COLUMNS)
    if not subject.is_online and subject.model.can_generate():
        warn_of_unknown_end(rows, tokenizer, end_ids=end_token_ids(subject.model, tokenizer))
    section.shown.append(_table_of_lengths(section, subject, _without_invalid(subject, raw, **UNLIMITED)))
    _check_special_tokens(section, subject, rows)
    if duplicates := num_duplicates(rows, columns=ID_COLUMNS):
        section.warn(f"{duplicates} of {len(rows)} rows repeat an earlier row")
    warn_of_blank_prompts(section, raw)
    if (evaluated := rows_in_memory(eval_dataset)) is not None:
        warn_of_shared_rows(rows, subject.tokenized(evaluated, trained=raw), columns=ID_COLUMNS)
        section.ok("training and evaluation rows were compared")
    return rows


def warn_of_blank_prompts(section: Section, raw: datasets.Dataset) -> None:
    """Warn of prompts that are empty or only white space: in conversations, the last message counts."""
    prompts = raw["prompt"] if "prompt" in raw.column_names else ()
    blank = [row for row, prompt in enumerate(prompts) if isinstance(prompt, str | list) and not _text(prompt).strip()]
    if blank:
        section.warn(
            f"{len(blank)} of {len(raw)} rows have a blank prompt; the first is row {blank[0]}. Remove them, unless "
            "the model is to write without a question"
        )


def _usable(section: Section, subject: Subject, raw: Any) -> datasets.Dataset:
    """The rows as the trainer tokenizes them; those that it refuses are a problem, and left out."""
    try:
        return subject.tokenized(raw)
    except DataError as error:
        if subject.is_online:  # whose trainer never drops a row that cannot be used
            raise
        section.problem(str(error))
    return _without_invalid(subject, raw)


def _without_invalid(subject: Subject, raw: Any, **changes: Any) -> datasets.Dataset:
    """The rows that can be used; that others are left out is known already."""
    with logged_into(Section("Rows")):
        return subject.tokenized(raw, invalid_rows="drop", **changes)


def row_lengths(rows: datasets.Dataset) -> dict[str, NDArray[np.int64]]:
    """Tokens of each row, for each column of ids."""
    return {name: list_lengths(rows, name) for name in ID_COLUMNS if name in rows.column_names}


def _table_of_lengths(section: Section, subject: Subject, rows: datasets.Dataset) -> Table:
    config = subject.config
    option = "max_prompt_length" if subject.is_online else "max_length"
    limit = getattr(config, option)
    lengths = row_lengths(rows)
    if not subject.is_online and len(lengths) > 1:  # the limit is for a prompt with its longest completion
        sides = [lengths[name] for name in lengths if name != "prompt_ids"]
        lengths["whole row"] = lengths.get("prompt_ids", 0) + np.maximum.reduce(sides)
    table = Table("tokens", "shortest", "median", "95 %", "longest", box=None, header_style="dim")
    for name, counts in lengths.items():
        quantiles = np.quantile(counts, [0, 0.5, 0.95, 1])
        table.add_row(name, *(f"{int(value):,}" for value in quantiles))
    counts = list(lengths.values())[-1]
    num_long = 0 if limit is None else int((counts > limit).sum())
    if num_long:
        is_cut = getattr(config, "packing", False) and config.packing_strategy != "bfd"
        what = "packed in pieces" if is_cut else "truncated, or dropped if the options say so"
        section.warn(f"{num_long} of {len(counts)} rows have more than {option}={limit} tokens and are {what}")
    elif limit is not None:
        section.ok(f"no row has more than {option}={limit} tokens")
    return table


def _check_special_tokens(section: Section, subject: Subject, rows: datasets.Dataset) -> None:
    tokenizer = subject.tokenizer
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    section.ok(", ".join(f"{name} {value!r}" for name, value in names.items()))
    column = next(name for name in ("input_ids", "prompt_ids", "chosen_ids") if name in rows.column_names)
    texts = rows[column][:]
    bos = tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id:
        twice = sum(ids[:2] == [bos, bos] for ids in texts)
        if twice:
            section.warn(f"{twice} of {len(texts)} rows begin with {tokenizer.bos_token!r} twice")
    if subject.is_online:
        return
    ending = next(name for name in ("input_ids", "chosen_ids", "completion_ids") if name in rows.column_names)
    ends = special_tokens(tokenizer)
    whole = sum(any(token in ends for token in tokenizer.convert_ids_to_tokens(ids[-3:])) for ids in rows[ending][:])
    text = f"{whole} of {len(rows)} rows of {ending} end with a special token, at which the model learns to stop"
    (section.ok if whole == len(rows) else section.warn)(text)


def show_rows(section: Section, subject: Subject, rows: datasets.Dataset, *, count: int = 3) -> None:
    """Show some rows as tokens: what is trained in green, what is context dim, special tokens reversed."""
    for number, row in enumerate(rows.select(range(min(count, len(rows))))):
        section.shown.append(Text(f"row {number}", style="bold"))
        section.shown += [_rendered(subject, name, parts) for name, parts in _parts(row)]


def _parts(row: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[int, bool]]]]:
    """Texts of a row by name: token ids, and whether they are trained."""
    if "input_ids" in row:
        yield "text", list(zip(row["input_ids"], row["trainable"], strict=True))
        return
    prompt = [(token_id, False) for token_id in row.get("prompt_ids") or ()]
    sides = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
    for name in sides:
        yield name.removesuffix("_ids"), [*prompt, *((token_id, True) for token_id in row[name])]
    if not sides:
        yield "prompt", prompt


def _rendered(subject: Subject, name: str, parts: list[tuple[int, bool]]) -> Text:
    tokenizer = subject.tokenizer
    special = set(tokenizer.all_special_ids) | set(tokenizer.convert_tokens_to_ids(list(special_tokens(tokenizer))))
    text = Text(f"{name}, {sum(trained for _, trained in parts)} of {len(parts)} tokens trained: ", style="dim")
    for trained, run in groupby(parts, key=lambda part: part[1]):
        if trained:
            text.append("[+", style="bold green")
        for is_special, tokens in groupby(run, key=lambda part: part[0] in special):
            style = "green" if trained else "dim"
            words = _shortened(printable(tokenizer.decode([token_id for token_id, _ in tokens])))
            text.append(words, style=f"reverse {style}" if is_special else style)
        if trained:
            text.append("+]", style="bold green")
    return text


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


# Columns that may hold an answer, the first one that a row has.
_ANSWERS = ("completion", "response", "solution", "answer", "ground_truth", "chosen")
_ROWS = 3


def try_rewards(section: Section, subject: Subject, dataset: Any, *, option: str = "reward_funcs") -> None:
    """Call the reward functions on the first rows, and show what they return.

    Args:
        section: Says what is found.
        subject: The run.
        dataset: Whose rows the rewards get; None: there is none, so none is called.
        option: Which rewards: "reward_funcs" or "eval_reward_funcs".

    Raises:
        ConfigError: There is no such reward, or a column is missing.
        RewardError: A reward raised an error, or returned something else than finite numbers.
    """
    config, script, is_training = subject.config, subject.script, option == "reward_funcs"
    model = getattr(script, "reward_model_name_or_path", None) if is_training else None
    if model is not None:
        section.note(f"the reward model {model} was not loaded")
    rewards: list[Any] = [reward_by_name(name) for name in getattr(script, option, None) or ()]
    if not rewards or dataset is None:
        return
    weights = config.reward_weights if is_training else config.eval_reward_weights
    weights = weights if model is None else None
    environments = None if subject.episodes is None else subject.episodes.rewards
    runner = RewardRunner(rewards, weights=weights, timeout=config.reward_timeout, environments=environments)
    if "environments" in runner.required:
        section.note("a reward reads environments after their episodes, so the rewards were not tried")
        return
    rows = list(rows_in_memory(dataset, _ROWS) or ())
    column = next((name for name in _ANSWERS if rows and isinstance(rows[0].get(name), str)), None)
    own = [str(row[column]) if column else _text(row.get("prompt")) for row in rows]
    started = time.perf_counter()
    scores = [_scored(subject, runner, rows, completions) for completions in (own, [""] * len(rows))]
    each = (time.perf_counter() - started) / (2 * len(rows))
    source = f"the row's {column}" if column else "the prompt itself, because there is no answer"
    names = [name for name in runner.names if name not in (environments or {})]
    section.ok(f"{', '.join(names)}: {1000 * each:.3g} ms for a completion")
    table = Table("reward", f"completion: {source}", "empty completion", box=None, header_style="dim")
    for name in names:
        first, second = (found.by_name[name] for found in scores)
        table.add_row(name, _shown(first), _shown(second))
        if column and first == second:
            section.warn(
                f"{name} gives {_shown(first)} both for {source} and for an empty completion. If an answer should "
                "earn more, check how the reward reads completions."
            )
    section.shown.append(table)


def _scored(subject: Subject, runner: RewardRunner, rows: list[dict[str, Any]], texts: list[str]) -> RewardScores:
    is_chat = bool(rows) and not isinstance(rows[0].get("prompt"), str)
    completions: list[Any] = [[{"role": "assistant", "content": text}] if is_chat else text for text in texts]
    columns: Mapping[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    ids = [subject.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return runner.score([row.get("prompt") for row in rows], completions, ids, columns)


def _text(prompt: Any) -> str:
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[-1], Mapping)
    return str(prompt[-1].get("content") if is_chat else prompt)


def _shown(values: list[float | None]) -> str:
    return ", ".join("None" if value is None else f"{value:g}" for value in values)


@dataclass(frozen=True)
class Batches:
    """Sizes over all processes.

    Args:
        lines: The arithmetic in words.
        rows_per_step: Rows of the dataset, or completions, of an optimizer step.
        rows_per_micro_batch: Of one process, at most those that there are.
        num_rows: Rows of the dataset; None: not known, as it is a stream.
        num_steps: Optimizer steps of the run; None: not known, as the dataset is a stream.
        note: What else is to be said; empty: nothing.
    """

    lines: tuple[str, ...]
    rows_per_step: int
    rows_per_micro_batch: int
    num_rows: int | None
    num_steps: int | None
    note: str = ""

    @classmethod
    def of(cls, subject: Subject, dataset: Any) -> Batches:
        """From the options and the dataset, which may be a stream."""
        config, num_rows = subject.config, None if isinstance(dataset, datasets.IterableDataset) else len(dataset)
        per_device = config.rows_per_micro_batch
        if not isinstance(per_device, int):  # auto
            return cls(("sizes that are 'auto' are determined when the run begins",), 1, 1, num_rows, None)
        accumulation = int(config.gradient_accumulation_steps)
        ranks = config.num_ranks if subject.plan is None else subject.plan.num_ranks
        rows = per_device * accumulation * ranks
        who = "processes" if ranks == config.world_size else f"teams of {config.world_size // ranks} processes"
        noun = "completions" if subject.is_online else "rows"
        product = f"{per_device} {noun} in a micro-batch * {accumulation} micro-batches * {ranks} {who}"
        lines = [f"{product} = {rows} {noun} a step"]
        steps_per_epoch = None if num_rows is None else -(-num_rows // rows)
        if subject.is_online:
            prompts = prompts_per_generation(config)
            lines.append(
                f"{prompts} prompts * {config.num_generations} completions = {config.completions_of_generation} "
                f"completions a generation batch, for {config.steps_of_a_generation} steps"
            )
            if num_rows is not None:
                steps_per_epoch = num_rows // prompts * config.steps_of_a_generation
        num_steps = _num_steps(config, steps_per_epoch)
        if num_steps is not None and steps_per_epoch:
            lines.append(f"{steps_per_epoch:,} steps an epoch, {num_steps:,} steps in all")
        if subject.is_online or num_rows is None or per_device * ranks <= num_rows:
            return cls(tuple(lines), rows, per_device, num_rows, num_steps)
        note = f"a micro-batch of {per_device:,} {noun} is never full: the dataset has {num_rows:,}"
        return cls(tuple(lines), rows, -(-num_rows // ranks), num_rows, num_steps, note)

    def report(self, section: Section) -> None:
        """Say it."""
        for line in self.lines:
            section.ok(line)
        if self.note:
            section.note(self.note)
        if self.num_steps == 0:
            section.problem("there is no step: the dataset is smaller than one generation batch")


def _num_steps(config: Any, steps_per_epoch: int | None) -> int | None:
    by_epochs = None if steps_per_epoch is None else int(steps_per_epoch * config.num_train_epochs)
    if config.max_steps <= 0:
        return by_epochs
    if config.stop_at_first_limit and by_epochs is not None:
        return min(int(config.max_steps), by_epochs)
    return int(config.max_steps)
