"""Tries rewards on real rows: with the row's own answer as the completion, and with an empty one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prefrl.rewards.named import reward_by_name
from prefrl.rewards.runner import RewardRunner
from prefrl.scripts.checkup.rows import first_rows

if TYPE_CHECKING:
    from prefrl.rewards.runner import RewardScores
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.subject import Subject

__all__ = ["try_rewards"]

# Columns that may hold an answer, the first one that a row has.
_ANSWERS = ("completion", "response", "solution", "answer", "ground_truth", "chosen")
_ROWS = 3


def try_rewards(section: Section, subject: Subject, dataset: Any) -> None:
    """Call the reward functions on the first rows, and show what they return.

    Raises:
        ConfigError: There is no such reward, or a column is missing.
        RewardError: A reward raised an error, or returned something else than finite numbers.
    """
    config, script = subject.config, subject.script
    if (model := getattr(script, "reward_model_name_or_path", None)) is not None:
        section.note(f"the reward model {model} was not loaded")
    if not subject.reward_names:
        return
    weights = config.reward_weights if model is None else None
    rewards: list[Any] = [reward_by_name(name) for name in subject.reward_names]
    runner = RewardRunner(rewards, weights=weights, timeout=config.reward_timeout)
    rows = list(first_rows(dataset, _ROWS) or ())
    column = next((name for name in _ANSWERS if rows and isinstance(rows[0].get(name), str)), None)
    own = [str(row[column]) if column else _text(row.get("prompt")) for row in rows]
    started = time.perf_counter()
    scores = [_scored(subject, runner, rows, completions) for completions in (own, [""] * len(rows))]
    each = (time.perf_counter() - started) / (2 * len(rows))
    source = f"the row's {column}" if column else "the prompt itself, because there is no answer"
    section.ok(f"{', '.join(runner.names)}: {1000 * each:.3g} ms for a completion")
    table = Table("reward", f"completion: {source}", "empty completion", box=None, header_style="dim")
    for name in runner.names:
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
