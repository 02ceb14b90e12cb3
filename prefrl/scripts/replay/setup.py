"""What the replays of a run and of a single step have in common."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from transformers import AutoProcessor, AutoTokenizer

from prefrl.errors import ConfigError
from prefrl.options.schedule import PlateauParams
from prefrl.registry import REGISTRY

__all__ = ["config_of", "never", "processing_class_of", "watches_evaluations"]

# What a replay does in another way than the run: it writes nothing, asks nobody, runs in one process, and goes on
# where the run would have stopped. None of it decides the updates.
_OTHERWISE: dict[str, Any] = {
    "report_to": "none",
    "push_to_hub": False,
    "hub_token": None,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_epochs": 1.0,
    "save_epochs": 1.0,
    "evaluate_training_set": False,
    "warmup_evaluations": 0,  # warmup_steps has what follows from it
    "profile": False,
    "profile_kwargs": None,
    "load_best_model_at_end": False,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "disable_tqdm": True,
    "resume_from_checkpoint": None,
    "allow_resume_changes": None,
    "save_in_background": False,
    "checkpoint_kwargs": None,
    "upload_to": None,
    "upload_kwargs": None,
    "max_train_time": None,
    "on_nan": "skip",
    "nan_patience": 1_000_000,
    "on_spike": "ignore",
    "spike_kwargs": None,
    "early_stopping_patience": None,
    "early_stopping_kwargs": None,
    "model_soup": None,
    "model_soup_kwargs": None,
    "ema_decay": None,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "parallelism_config": None,
    "log_completions": False,
    "num_completions_to_print": 4,
    "log_unique_prompts": False,
    "journal_keep": 0,
}


def config_of(folder: Path, algorithm: str, scratch: str) -> Any:
    """The config that a run has left in a folder, changed to what a replay does in another way."""
    values = json.loads((folder / "training_args.json").read_text(encoding="utf-8"))
    config_class = REGISTRY[algorithm].load_config()
    if watches_evaluations(values):  # there are none
        values |= {"reduce_on_plateau": 0, "reduce_on_plateau_kwargs": None}
    names = {field.name for field in dataclasses.fields(config_class) if field.init}
    values |= {**_OTHERWISE, "output_dir": scratch}
    return config_class(**{name: value for name, value in values.items() if name in names})


def watches_evaluations(options: Mapping[str, Any]) -> bool:
    """Whether `reduce_on_plateau` waits for a metric of evaluations."""
    keys = options.get("reduce_on_plateau_kwargs") or {}
    return bool(options.get("reduce_on_plateau")) and PlateauParams(**keys).metric.startswith("eval_")


def processing_class_of(folder: Path) -> Any:
    """The tokenizer that is saved in a folder, or the processor."""
    has_processor = any((folder / name).exists() for name in ("processor_config.json", "preprocessor_config.json"))
    return (AutoProcessor if has_processor else AutoTokenizer).from_pretrained(folder)


def never(name: str) -> Callable[..., NoReturn]:
    """A reward with this name that must not be called: the rewards are in the journal."""

    def reward(completions: list[Any], **_: Any) -> NoReturn:
        raise ConfigError(f"the reward {name!r} was called, but a replay reads rewards from the journal")

    reward.__name__ = name
    return reward
