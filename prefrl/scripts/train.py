"""`prefrl sft`, `prefrl grpo`, ...: one function for all algorithms, and what it prints at the end. Imports torch."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prefrl.options.online import OnlineOptions
from prefrl.registry import REGISTRY, Algorithm
from prefrl.rewards.named import reward_by_name
from prefrl.run.checkpoints import find_last
from prefrl.scripts.arguments.command import Given, RewardArguments
from prefrl.scripts.arguments.datasets import SHAPING
from prefrl.scripts.arguments.launch import ONLY_CHECK
from prefrl.scripts.checkup.checkup import check_before
from prefrl.scripts.declaration import uncollected
from prefrl.scripts.inputs import datasets_of, lora_of, options_of
from prefrl.trainer.progress.history import duration

if TYPE_CHECKING:
    from prefrl.trainer.base_trainer import BaseTrainer


def main(algorithm: Algorithm, given: Given) -> int:
    """Train and save.

    Args:
        algorithm: The algorithm to train with.
        given: The options, from `read`.

    Returns:
        The exit code.

    Raises:
        PrefrlError: The options ask for something that cannot work.
    """
    with uncollected():
        trainer_class = algorithm.load_trainer()
    with given.locating():
        script, config = options_of(algorithm, given)
        extra: dict[str, Any] = {}
        if isinstance(script, RewardArguments):
            extra = {"reward_funcs": _rewards(script)}
            if script.environment or script.tools:
                extra |= script.loaded()
        train_dataset, eval_dataset = datasets_of(script, config)
        check_before(algorithm, script, config, train_dataset, eval_dataset, extra)
    if ONLY_CHECK in os.environ:
        return 0
    trainer = trainer_class(
        model=script.model_name_or_path,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=lora_of(script),
        **extra,
    )
    trainer.dataset_name = script.dataset_name
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        trainer.save_model(config.output_dir)  # and push it with push_to_hub
        # With options of columns, the command that evaluates would be too long for the panel.
        dataset = None if any(getattr(script, name) for name in SHAPING) else script.dataset_name
        environment = getattr(script, "environment", None)
        print_ending(trainer, dataset=dataset, rewards=getattr(script, "reward_funcs", None), environment=environment)
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:  # else training stopped in order, and has said so
            _say_stopped(algorithm.name, trainer)
        raise
    finally:
        trainer.end()  # a process that exits while its process group is open may be aborted
    return 0


def _say_stopped(command: str, trainer: Any) -> None:
    """Say after Ctrl-C where the run stopped, and how it goes on."""
    last = find_last(trainer.run_folder.path, run=trainer.run_folder.run).folder
    way = "there is no checkpoint yet" if last is None else f"the last checkpoint is {last}"
    remedy = "" if last is None else f". To continue: prefrl resume {trainer.run_folder.path}"
    text = f"prefrl {command}: stopped in step {trainer.state.global_step + 1}; {way}{remedy}"
    print(text, file=sys.stderr)


def _rewards(script: RewardArguments) -> list[Any]:
    rewards: list[Any] = [reward_by_name(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path is not None:
        rewards.append(script.reward_model_name_or_path)
    return rewards


# What a run is judged by: metrics, and whether more is better. The first one that was logged is shown, of each line.
_JUDGED = (
    (("eval_reward", True), ("eval_rewards/margins", True), ("eval_accuracy", True), ("eval_loss", False)),
    (("reward", True), ("rewards/margins", True), ("accuracy", True), ("loss", False)),
)
_PROMPT = "your prompt"
_WITHOUT_TEXT = ("reward",)  # algorithms whose models do not write


def print_ending(
    trainer: BaseTrainer[Any], *, dataset: str | None, rewards: Sequence[str] | None, environment: Any = None
) -> None:
    """Print the panel, on the main process.

    Args:
        trainer: After training and saving.
        dataset: The dataset that was trained on; None: a mixture, or its columns were mapped.
        rewards: Rewards of the command line; None: the algorithm has none.
        environment: The option of this name.
    """
    if not trainer.is_world_process_zero():
        return
    console, folder, state = Console(), trainer.args.output_dir, trainer.state
    steps = {"steps": state.global_step, "max_steps": state.max_steps}
    console.print(ending(trainer.algorithm, state.log_history, folder=folder, **steps))
    console.print("Next steps:")
    is_chat = trainer.processing_class.chat_template is not None
    given = {"dataset": dataset, "rewards": rewards, "environment": environment}
    for command in next_commands(trainer.algorithm, folder, **given, is_chat=is_chat):
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
    algorithm: str,
    folder: str,
    *,
    dataset: str | None,
    rewards: Sequence[str] | None,
    is_chat: bool,
    environment: Any = None,
) -> list[str]:
    """The commands to go on with; see `print_ending`. `is_chat` says whether the model has a chat template."""
    commands = []
    if algorithm not in _WITHOUT_TEXT:
        commands += (
            [["chat", folder], ["generate", folder, _PROMPT]] if is_chat else [["generate", folder, _PROMPT, "--raw"]]
        )
    if environment:
        which = environment if isinstance(environment, str) else json.dumps(environment)
        commands.append(["play", which, "--model", folder])
    elif rewards and dataset is not None:
        commands.append(["eval", folder, dataset, "--reward_funcs", *rewards])
    # Without the first condition, those that an earlier run has left in the folder would count.
    if issubclass(REGISTRY[algorithm].load_options(), OnlineOptions) and (Path(folder) / "completions").is_dir():
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
