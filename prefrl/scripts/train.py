"""`prefrl sft`, `prefrl grpo`, ...: one function for every algorithm of the registry."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl.errors import ConfigError, DataError
from prefrl.scripts.arguments import RewardArguments, ScriptArguments
from prefrl.scripts.parser import CommandParser
from prefrl.scripts.suggest import nearest

if TYPE_CHECKING:
    from datasets import Dataset

    from prefrl.registry import Algorithm

__all__ = ["main"]

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def main(algorithm: Algorithm, argv: Sequence[str]) -> int:
    """Parse the command line, train and save.

    Args:
        algorithm: What to train with.
        argv: The options.

    Returns:
        The exit code.

    Raises:
        PrefrlError: Something that was asked for cannot work.
    """
    config_class = algorithm.load_config()
    takes_rewards = "reward_weights" in {field.name for field in dataclasses.fields(config_class)}
    script_class = RewardArguments if takes_rewards else ScriptArguments
    parser = CommandParser(algorithm.name, (script_class, config_class), f"Dataset: {algorithm.dataset}.")
    script, config = parser.parse(argv)
    _merge_revision(script, config)
    extra: dict[str, Any] = {"reward_funcs": _rewards(script)} if isinstance(script, RewardArguments) else {}
    evaluates = config.eval_strategy != "no"
    trainer = algorithm.load_trainer()(
        model=script.model_name_or_path,
        args=config,
        train_dataset=_load_split(script, "dataset_train_split"),
        eval_dataset=_load_split(script, "dataset_test_split") if evaluates else None,
        peft_config=_lora(script),
        **extra,
    )
    resume = config.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume and resume.lower() == "true" else resume)
    trainer.save_model(config.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub()
    trainer.end()  # a process that exits with its group open may be aborted
    return 0


def _merge_revision(script: ScriptArguments, config: Any) -> None:
    if script.model_revision is None:
        return
    given = config.model_init_kwargs or {}
    if "revision" in given:
        raise ConfigError(
            f"model_revision={script.model_revision!r} and model_init_kwargs['revision']={given['revision']!r}: "
            "remove one of them"
        )
    config.model_init_kwargs = {**given, "revision": script.model_revision}


def _lora(script: ScriptArguments) -> Any:
    if not script.use_peft:
        return None
    from prefrl.models.load import lora_config  # not needed for --help

    try:
        return lora_config(
            rank=script.lora_r,
            alpha=script.lora_alpha,
            dropout=script.lora_dropout,
            target_modules=script.lora_target_modules,
        )
    except ImportError as error:
        raise ConfigError(str(error)) from error


def _load_split(script: ScriptArguments, option: str) -> Dataset:
    import datasets  # not needed for --help

    name, split = script.dataset_name, getattr(script, option)
    suffix = Path(name).suffix
    is_file = suffix in _FORMATS
    if is_file and not Path(name).is_file():
        raise DataError(f"dataset_name={name!r}: there is no such file")
    try:
        if is_file:
            return datasets.load_dataset(_FORMATS[suffix], script.dataset_config, data_files=name, split=split)
        return datasets.load_dataset(name, script.dataset_config, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"dataset_name={name!r} with {option}={split!r} cannot be loaded: {error}") from error


def _rewards(script: RewardArguments) -> list[Any]:
    rewards: list[Any] = [_reward(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path is not None:
        rewards.append(script.reward_model_name_or_path)
    return rewards


def _reward(name: str) -> Callable[..., Any]:
    builtin: Mapping[str, Callable[..., Any]] = importlib.import_module("prefrl.rewards").REWARD_FUNCTIONS
    if name in builtin:
        return builtin[name]
    if ":" not in name:
        remedy = nearest(name, builtin)
        raise ConfigError(f"reward_funcs={name!r}: no built-in reward, and no module:function. {remedy}")
    module_name, _, function = name.partition(":")
    sys.path.insert(0, "")  # the command, unlike python -m, does not look in the working directory
    try:
        reward = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"reward_funcs={name!r}: cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(reward):
        raise ConfigError(f"reward_funcs={name!r}: is a {type(reward).__name__}; a reward is a function")
    return reward  # type: ignore[no-any-return]  # callable, checked above
