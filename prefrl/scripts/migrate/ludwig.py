"""`prefrl migrate` for Ludwig: the keys of its configs of language models, and what becomes of them."""

from __future__ import annotations

from typing import Any

from prefrl.errors import ConfigError
from prefrl.scripts.migrate.edits import Migrated
from prefrl.scripts.migrate.others import OTHERS
from prefrl.scripts.migrate.rows import (
    Counterpart,
    asked,
    becomes,
    betas,
    column,
    flag,
    instead,
    layers,
    not_needed,
    not_there,
    renamed,
    together,
)
from prefrl.scripts.migrate.values import ForeignRun, of_yaml

_ENCODERS = "there are no multi-input encoders; a vision-language model reads images, see docs/images.md"

LUDWIG: dict[str, Counterpart] = {
    "epochs": renamed("num_train_epochs"),
    "train_steps": renamed("max_steps"),
    "use_mixed_precision": flag("bf16", True),
    "compile": renamed("torch_compile"),
    "enable_gradient_checkpointing": renamed("activation_checkpointing"),
    "enable_profiling": renamed("profile"),
    "profiler": renamed("profile_kwargs"),
    "should_shuffle": instead(
        "use train_sampling_strategy='sequential', or shuffle_dataset=False of online trainers, to keep the order"
    ),
    "bucketing_field": not_needed("nothing is padded; max_tokens_per_micro_batch balances tokens"),
    "validation_field": instead(
        "give several datasets as eval_dataset={name: dataset}, and set metric_for_best_model='eval_<name>_loss'"
    ),
    "layers_to_freeze_regex": becomes("freeze: [expression]", lambda value: {"freeze": [value]}, "freeze"),
    "base_learning_rate": instead("use learning_rates, which gives some parameters other rates"),
    "preset": instead("use preset, which sets the options of a paper; docs/papers.md lists its names"),
    "loss_balancing": instead(
        "use reward_balance for the rewards of online trainers, or loss_balance for several losses of DPO"
    ),
    "loss_balancing_alpha": renamed("balance_kwargs", "alpha"),
    "loss_balancing_lr": renamed("balance_kwargs", "rate"),
    "loss_balancing_preference_vector": renamed("reward_weights"),
    "loss_balancing_tchebycheff_weight": instead(
        "use the key 'smoothing' of balance_kwargs, with reward_balance='pareto'"
    ),
    **dict.fromkeys(
        (
            *("contrastive_pretrain_epochs", "contrastive_pretrain_temperature"),
            *("contrastive_pretrain_projection_dim", "contrastive_pretrain_learnable_temperature"),
            "modality_dropout",
        ),
        not_there(_ENCODERS),
    ),
    **dict.fromkeys(("dpo_beta", "kto_beta", "orpo_beta", "grpo_beta"), renamed("beta")),
    "dpo_loss_type": renamed("loss_type"),
    "dpo_label_smoothing": renamed("label_smoothing"),
    "grpo_epsilon": renamed("epsilon"),
    "grpo_num_generations": renamed("num_generations"),
    "rejected_column": column("rejected"),
}

_SCHEDULE = (
    *("decay_rate", "decay_steps", "staircase", "t_0", "t_mult", "eta_min", "pct_start", "div_factor"),
    "final_div_factor",
)
_PROFILER = ("wait", "warmup", "active", "skip_first")


def _number_or_auto(option: str, auto: str) -> Counterpart:
    def convert(value: Any) -> dict[str, Any]:
        if value == "auto":
            raise ValueError(auto)
        return {option: value}

    return becomes(option, convert, option)


_TRAINER: dict[str, Counterpart] = {
    **OTHERS,
    **LUDWIG,
    "type": together("the command: sft for finetune, or dpo, kto, orpo and grpo"),
    "eval_batch_size": _number_or_auto("per_device_eval_batch_size", "write a number"),
    "effective_batch_size": becomes(
        "effective_batch_size", lambda value: {} if value == "auto" else {"effective_batch_size": value}
    ),
    **dict.fromkeys(
        ("steps_per_checkpoint", "checkpoints_per_epoch", "skip_all_evaluation"),
        together("save_strategy and eval_strategy, with save_steps and eval_steps, or save_epochs and eval_epochs"),
    ),
    "eval_steps": instead("name the rows of an evaluation: --dataset_test_split 'test[:1000]'"),
    "should_shuffle": becomes(
        "train_sampling_strategy", lambda value: {} if value else {"train_sampling_strategy": "sequential"}
    ),
    "validation_metric": asked("metric_for_best_model", {"loss": "loss"}),
    "validation_field": not_needed("there is one output"),
    "optimizer.type": becomes(
        "optim; adamw is 'adamw_torch_fused'",
        lambda value: {"optim": "adamw_torch_fused" if value == "adamw" else value},
        "optim",
    ),
    "optimizer.betas": betas(),
    "optimizer.eps": renamed("adam_epsilon"),
    "optimizer.weight_decay": renamed("weight_decay"),
    "optimizer": instead("use optim_args; see docs/optimizers.md"),
    "learning_rate_scheduler.decay": together("lr_scheduler_type", "lr_scheduler_type"),
    **{f"learning_rate_scheduler.{name}": renamed("lr_scheduler_kwargs", name) for name in _SCHEDULE},
    **{f"profiler.{name}": renamed("profile_kwargs", name) for name in _PROFILER},
    "profiler": instead("use profile_kwargs; see docs/profiling.md"),
}
_SECTIONS = ("learning_rate_scheduler", "gradient_clipping")  # keys of `trainer` may stand in them, too
_SPLIT = "name the rows, such as dataset_train_split: train[:80%] and dataset_test_split: train[80%:]"
LUDWIG_KEYS: dict[str, Counterpart] = {
    **{f"trainer.{section}.{name}": row for section in _SECTIONS for name, row in OTHERS.items()},
    **{f"trainer.{name}": row for name, row in _TRAINER.items()},
    "model_type": together("the command"),
    "base_model": renamed("model_name_or_path"),
    "input_features": together("columns, as {prompt: ...}; or prompt_template", "columns"),
    "output_features": together("columns, as {completion: ...} or {chosen: ...}", "columns"),
    "prompt.template": together("prompt_template", "prompt_template"),
    "prompt.task": together("prompt_template, in the place of {__task__}", "prompt_template"),
    "prompt": instead("use prompt_template, a text with the columns of a row in braces"),
    "adapter.type": asked("use_peft", {"lora": True}),
    "adapter.r": renamed("lora_r"),
    "adapter.alpha": renamed("lora_alpha"),
    "adapter.dropout": renamed("lora_dropout"),
    "adapter.target_modules": layers(),
    "adapter.use_rslora": renamed("use_rslora"),
    "adapter.use_dora": renamed("use_dora"),
    "adapter.postprocessor": instead("use prefrl merge after training"),
    "adapter": instead("see docs/peft.md"),
    "quantization.bits": becomes(
        "load_in_4bit or load_in_8bit", lambda value: {f"load_in_{value}bit": True}, "load_in_4bit"
    ),
    "quantization.bnb_4bit_quant_type": renamed("bnb_4bit_quant_type"),
    "quantization.bnb_4bit_use_double_quant": renamed("use_bnb_nested_quant"),
    "quantization": instead("see docs/peft.md"),
    "generation": not_needed("they are options of prefrl generate"),
    "preprocessing.global_max_sequence_length": renamed("max_length"),
    "preprocessing.split": instead(_SPLIT),
    "preprocessing.sample_ratio": instead("name the rows, such as dataset_train_split: train[:10%]"),
    "preprocessing": instead("prepare the dataset; see docs/datasets.md"),
    "backend": instead("set num_processes and accelerate_config; see docs/distributed.md"),
    "model_parameters": instead("set model_init_kwargs"),
    "ludwig_version": not_needed("it is the version of Ludwig"),
    "hyperopt": instead("start one run for each choice of options"),
}
# What Ludwig does if a key is not given, where that differs here.
DEFAULTS: dict[str, Any] = {
    "optim": "adam",
    "learning_rate": 1e-5,
    "num_train_epochs": 100,
    "max_grad_norm": 0.5,
    "early_stopping_patience": 5,
    "lr_scheduler_type": "constant_with_warmup",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
}


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
