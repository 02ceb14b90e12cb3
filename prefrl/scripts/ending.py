"""What `prefrl <algorithm>` prints after training: where the model is, how it went, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

from prefrl.trainer.progress.history import duration

if TYPE_CHECKING:
    from prefrl.trainer.base.trainer import BaseTrainer

__all__ = ["ending", "print_ending"]

# What a run is judged by: metrics, and whether more is better. The first one that was logged is shown, of each line.
_JUDGED = (
    (("eval_reward", True), ("eval_rewards/margins", True), ("eval_accuracy", True), ("eval_loss", False)),
    (("reward", True), ("rewards/margins", True), ("accuracy", True), ("loss", False)),
)
_WITHOUT_TEXT = ("reward",)  # algorithms whose models do not write


def print_ending(trainer: BaseTrainer[Any], *, dataset: str | None, rewards: Sequence[str] | None) -> None:
    """Print the panel, on the main process.

    Args:
        trainer: After training and saving.
        dataset: The dataset that was trained on; None: a mixture, or its columns were mapped.
        rewards: Rewards of the command line; None: the algorithm has none.
    """
    if trainer.is_world_process_zero():
        Console().print(
            ending(
                trainer.algorithm,
                trainer.state.log_history,
                folder=trainer.args.output_dir,
                steps=trainer.state.global_step,
                max_steps=trainer.state.max_steps,
                dataset=dataset,
                rewards=rewards,
                is_chat=trainer.processing_class.chat_template is not None,
            )
        )


def ending(
    algorithm: str,
    log_history: Sequence[dict[str, Any]],
    *,
    folder: str,
    steps: int,
    max_steps: int,
    dataset: str | None,
    rewards: Sequence[str] | None,
    is_chat: bool,
) -> Panel:
    """The panel; see `print_ending`. `is_chat` says whether the model has a chat template."""
    rows = Table.grid(padding=(0, 2))
    rows.add_row("model", folder)
    seconds = next((entry["train_runtime"] for entry in reversed(log_history) if "train_runtime" in entry), None)
    took = "" if seconds is None else f" in {duration(seconds)}"
    rows.add_row(
        "steps", f"{steps:,}{took}" if steps >= max_steps else f"{steps:,} of {max_steps:,}{took}: ended early"
    )
    for candidates in _JUDGED:
        judged = next((pair for pair in candidates if any(pair[0] in entry for entry in log_history)), None)
        if judged is not None:
            rows.add_row(judged[0], _course(log_history, *judged))
    commands = Group(
        "", "To go on:", *(f"  {command}" for command in _commands(algorithm, folder, dataset, rewards, is_chat))
    )
    return Panel(Group(rows, commands), title=f"{algorithm}: done" if steps >= max_steps else algorithm, expand=False)


def _course(log_history: Sequence[dict[str, Any]], name: str, is_greater_better: bool) -> str:
    values = [(float(entry[name]), int(entry.get("step", 0))) for entry in log_history if name in entry]
    values = [pair for pair in values if pair[0] == pair[0]]
    if not values:
        return "-"
    choose = max if is_greater_better else min
    best, at = choose(values, key=lambda pair: pair[0])
    return f"first {values[0][0]:.4g}, last {values[-1][0]:.4g}, best {best:.4g} at step {at}"


def _commands(
    algorithm: str, folder: str, dataset: str | None, rewards: Sequence[str] | None, is_chat: bool
) -> list[str]:
    commands = []
    if algorithm not in _WITHOUT_TEXT:
        commands += (
            [["chat", folder], ["generate", folder, "..."]] if is_chat else [["generate", folder, "...", "--raw"]]
        )
    if rewards and dataset is not None:
        commands.append(["eval", folder, dataset, "--reward_funcs", *rewards])
    if (Path(folder) / "completions").is_dir():
        commands.append(["look", folder, "--worst", "5"])
    if (Path(folder) / "adapter_config.json").is_file():
        commands.append(["merge", folder, f"{folder.rstrip('/')}-merged"])
    lines = [shlex.join(["prefrl", *words]) for words in commands]
    # A file has no split for evaluation: its rows are those that were trained on.
    return [
        f"{line}  # or held-out prompts" if words[0] == "eval" and Path(words[2]).exists() else line
        for words, line in zip(commands, lines, strict=True)
    ]
