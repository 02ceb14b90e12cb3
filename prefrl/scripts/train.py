"""`prefrl sft`, `prefrl grpo`, ...: one function for all algorithms. Imports torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from prefrl.options.names import about_evaluations
from prefrl.registry import Algorithm, uncollected
from prefrl.rewards.named import reward_by_name
from prefrl.run.checkpoints import find_last
from prefrl.scripts.arguments.command import Given, RewardArguments
from prefrl.scripts.arguments.datasets import SHAPING
from prefrl.scripts.arguments.launch import ONLY_CHECK
from prefrl.scripts.checkup.checkup import check_before
from prefrl.scripts.inputs import datasets_of, lora_of, options_of


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
            extra = _rewards(script)
            if script.has_episodes:
                extra |= script.loaded()
        train_dataset, eval_dataset = datasets_of(script, config)
        share = check_before(algorithm, script, config, train_dataset, eval_dataset, extra)
    if ONLY_CHECK in os.environ:
        if share is not None:
            Path(os.environ[ONLY_CHECK]).write_text(f"{share:.2f}", encoding="utf-8")
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
    trainer.history.shows_ending = False  # but once the model is saved
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        trainer.save_model(config.output_dir)  # and push it with push_to_hub
        # With options of columns, the command that evaluates would be too long for the panel.
        dataset = None if any(getattr(script, name) for name in SHAPING) else script.dataset_name
        rewards, environment = getattr(script, "reward_funcs", None), getattr(script, "environment", None)
        trainer.show_ending(saved=True, dataset=dataset, rewards=rewards, environment=environment)
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


def _rewards(script: RewardArguments) -> dict[str, Any]:
    rewards: list[Any] = [reward_by_name(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path is not None:
        rewards.append(script.reward_model_name_or_path)
    if script.eval_reward_funcs is None:
        return {"reward_funcs": rewards}
    with about_evaluations():
        own = [reward_by_name(name) for name in script.eval_reward_funcs]
    return {"reward_funcs": rewards, "eval_reward_funcs": own}
