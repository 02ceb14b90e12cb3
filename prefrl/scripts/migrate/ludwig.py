"""What `prefrl migrate` makes of Ludwig's YAML, where it trains a language model."""

from __future__ import annotations

from typing import Any

from prefrl.errors import ConfigError
from prefrl.scripts.migrate.edits import Migrated
from prefrl.scripts.migrate.foreign.ludwig import DEFAULTS, LUDWIG_KEYS
from prefrl.scripts.migrate.values import ForeignRun, of_yaml

__all__ = ["migrate_ludwig"]

_GUIDE = "See docs/migrating_from_ludwig.md."
_COMMANDS = {"finetune": "sft", "dpo": "dpo", "kto": "kto", "orpo": "orpo", "grpo": "grpo"}
_SCHEDULES = {  # and the keys that they read
    "linear": ("linear", ()),
    "exponential": ("exponential", ("decay_rate", "decay_steps", "staircase")),
    "cosine": ("cosine_warm_restarts", ("t_0", "t_mult", "eta_min")),
    "one_cycle": ("one_cycle", ("pct_start", "div_factor", "final_div_factor")),
    "wsd": ("wsd", ()),
}
_RANDOM = (
    "Ludwig splits the rows at random; these are the first 70 % and the next 10 %. Shuffle them if their order matters"
)


def migrate_ludwig(text: str) -> Migrated:
    """The options of prefrl, as YAML, that a config of Ludwig means.

    Raises:
        ConfigError: It trains no language model, or a value cannot be read.
    """
    values = of_yaml(text, LUDWIG_KEYS)
    run = ForeignRun(values, LUDWIG_KEYS, DEFAULTS)
    kind, model = run.value("trainer.type", "none"), run.value("model_type", "ecd")
    if model != "llm":
        raise ConfigError(f"model_type={model!r}: only language models, model_type: llm, can be migrated. {_GUIDE}")
    if kind not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        raise ConfigError(f"trainer.type={kind!r}: nothing is trained that could be migrated: not {known}. {_GUIDE}")
    command = _COMMANDS[kind]
    _columns(run, command)
    _schedule(run)
    _intervals(run)
    _sizes(run)
    if run.options.get("load_in_4bit") or run.options.get("load_in_8bit"):
        run.options["use_peft"] = True
    if not run.options.get("regularization_lambda"):
        run.drop("regularization_type", "regularization_lambda", because="the penalty is 0")
    run.open.append((1, "ludwig train is given the dataset: set dataset_name"))
    if command == "grpo":
        run.open.append((1, "Ludwig has no rewards: set reward_funcs; see docs/rewards.md"))
    return run.written(command, 1)


def _columns(run: ForeignRun, command: str) -> None:
    """One text becomes the prompt, or a template that may have several columns; the answer is one column."""
    inputs, outputs = (_texts(run, f"{side}_features") for side in ("input", "output"))
    columns = {"prompt": inputs[0]} if inputs else {}
    if template := run.value("prompt.template", ""):
        columns = {}
        template = template.replace("{__task__}", str(run.value("prompt.task", "")))
        run.options["prompt_template"] = template.replace("{__sample__}", f"{{{inputs[0]}}}" if inputs else "")
        if "{__" in run.options["prompt_template"]:
            run.leave_open("prompt.template", "write columns in the place of {__...__}")
    elif len(inputs) > 1:
        run.leave_open("input_features", "several columns become a prompt by prompt_template")
    answer = {"sft": "completion", "kto": "completion", "grpo": "answer"}.get(command, "chosen")
    columns |= {answer: outputs[0]} if outputs else {}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if columns:
        run.options["columns"] = columns | run.options.get("columns", {})


def _texts(run: ForeignRun, path: str) -> list[str]:
    """The columns of features, which are texts."""
    features: list[Any] = run.value(path, [])
    if not all(isinstance(feature, dict) and isinstance(feature.get("name"), str) for feature in features):
        raise ConfigError(f"{path}={features!r}: must be a list of features with names. {_GUIDE}")
    others = [feature for feature in features if feature.get("type", "text") != "text"]
    if others or not features:
        run.open.append((run.values.get(path, (1, None))[0], f"{path}: only texts can be migrated. {_GUIDE}"))
    return [feature.get("column", feature["name"]) for feature in features if feature not in others]


def _schedule(run: ForeignRun) -> None:
    options, decay = run.options, run.value("trainer.learning_rate_scheduler.decay", "none")
    given = options.pop("lr_scheduler_kwargs", {})
    if decay not in (*_SCHEDULES, "none"):
        run.leave_open("trainer.learning_rate_scheduler.decay", "set lr_scheduler_type; see docs/schedules.md")
    name, keys = _SCHEDULES.get(decay, ("constant_with_warmup", ()))
    if name == "cosine_warm_restarts" and "t_0" not in given:
        name, keys = "cosine", ()
    options["lr_scheduler_type"] = name
    if kwargs := {key: value for key, value in given.items() if key in keys}:
        options["lr_scheduler_kwargs"] = kwargs


def _intervals(run: ForeignRun) -> None:
    """Ludwig evaluates where it saves, by default after each epoch, and keeps the best model."""
    options, steps = run.options, run.number("trainer.steps_per_checkpoint", 0)
    per_epoch = run.number("trainer.checkpoints_per_epoch", 0)
    strategy = "steps" if steps else "epoch"
    every = {"steps": steps} if steps else {"epochs": 1 / per_epoch} if per_epoch > 1 else {}
    options |= {"save_strategy": strategy} | {f"save_{name}": number for name, number in every.items()}
    if run.value("trainer.skip_all_evaluation", False):
        run.drop("early_stopping_patience", "metric_for_best_model", because="nothing is evaluated")
        return
    options |= {"eval_strategy": strategy} | {f"eval_{name}": number for name, number in every.items()}
    options |= {"load_best_model_at_end": True}
    if run.number("trainer.early_stop", 5) < 0:
        run.drop("early_stopping_patience", because="training does not stop early")
    if "preprocessing.split" not in {path[:19] for path in run.values}:
        options |= {"dataset_train_split": "train[:70%]", "dataset_test_split": "train[70%:80%]"}
        run.open.append((1, _RANDOM))


def _sizes(run: ForeignRun) -> None:
    """Automatic sizes need one that is fixed."""
    options = run.options
    if "effective_batch_size" not in options and options.get("gradient_accumulation_steps") == "auto":
        options.pop("gradient_accumulation_steps")
    if options.get("per_device_train_batch_size") != "auto":
        run.drop("auto_size_kwargs", because="batch_size is a number")
