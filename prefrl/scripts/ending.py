"""What `prefrl <algorithm>` prints after training: where the model is, how it went, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prefrl.trainer.progress.history import duration

if TYPE_CHECKING:
    from prefrl.trainer.base_trainer import BaseTrainer

# What a run is judged by: metrics, and whether more is better. The first one that was logged is shown, of each line.
_JUDGED = (
    (("eval_reward", True), ("eval_rewards/margins", True), ("eval_accuracy", True), ("eval_loss", False)),
    (("reward", True), ("rewards/margins", True), ("accuracy", True), ("loss", False)),
)
_PROMPT = "your prompt"
_WITHOUT_TEXT = ("reward",)  # algorithms whose models do not write


def print_ending(trainer: BaseTrainer[Any], *, dataset: str | None, rewards: Sequence[str] | None) -> None:
    """Print the panel, on the main process.

    Args:
        trainer: After training and saving.
        dataset: The dataset that was trained on; None: a mixture, or its columns were mapped.
        rewards: Rewards of the command line; None: the algorithm has none.
    """
    if not trainer.is_world_process_zero():
        return
    console, folder, state = Console(), trainer.args.output_dir, trainer.state
    steps = {"steps": state.global_step, "max_steps": state.max_steps}
    console.print(ending(trainer.algorithm, state.log_history, folder=folder, **steps))
    console.print("To go on:")
    is_chat = trainer.processing_class.chat_template is not None
    for command in next_commands(trainer.algorithm, folder, dataset=dataset, rewards=rewards, is_chat=is_chat):
        console.print(Text(f"  {command}"), soft_wrap=True)  # in one piece, so that it can be copied


def ending(algorithm: str, log_history: Sequence[dict[str, Any]], *, folder: str, steps: int, max_steps: int) -> Panel:
    """The panel about a run; see `print_ending`."""
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
    return Panel(rows, title=f"{algorithm}: done" if steps >= max_steps else algorithm, expand=False)


def _course(log_history: Sequence[dict[str, Any]], name: str, is_greater_better: bool) -> str:
    values = [(float(entry[name]), int(entry.get("step", 0))) for entry in log_history if name in entry]
    values = [pair for pair in values if pair[0] == pair[0]]
    if not values:
        return "-"
    choose = max if is_greater_better else min
    best, at = choose(values, key=lambda pair: pair[0])
    (first, _), (last, end) = values[0], values[-1]
    return f"first {first:.4g}, last {last:.4g} at step {end}, best {best:.4g} at step {at}"


def next_commands(
    algorithm: str, folder: str, *, dataset: str | None, rewards: Sequence[str] | None, is_chat: bool
) -> list[str]:
    """The commands to go on with; see `print_ending`. `is_chat` says whether the model has a chat template."""
    commands = []
    if algorithm not in _WITHOUT_TEXT:
        commands += (
            [["chat", folder], ["generate", folder, _PROMPT]] if is_chat else [["generate", folder, _PROMPT, "--raw"]]
        )
    if rewards and dataset is not None:
        commands.append(["eval", folder, dataset, "--reward_funcs", *rewards])
    if (Path(folder) / "completions").is_dir():
        commands.append(["look", folder, "--worst", "5"])
    if (Path(folder) / "adapter_config.json").is_file():
        commands.append(["merge", folder, f"{folder.rstrip('/')}-merged"])
    commands.append(["report", folder])
    lines = [shlex.join(["prefrl", *words]) for words in commands]
    # A file has no split for evaluation: its rows are those that were trained on.
    return [
        f"{line}  # or held-out prompts" if words[0] == "eval" and Path(words[2]).exists() else line
        for words, line in zip(commands, lines, strict=True)
    ]
