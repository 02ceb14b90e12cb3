"""What a training is given: its options as they are read and checked, its datasets and its adapter.

Training, its checks and its launcher read them. Nothing here imports torch before `options_of` makes a config.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.algorithms import PRESETS, combined
from prefrl.options.distillation import DistillationOptions, TeacherOptions
from prefrl.options.fields import flat_names, warn_of_hint
from prefrl.registry import Algorithm
from prefrl.scripts.arguments.command import (
    CommandArguments,
    Given,
    RewardArguments,
    check_reward_files,
)
from prefrl.scripts.arguments.datasets import (
    SHAPING,
    DatasetConfig,
    get_dataset,
    load_part,
    load_parts,
    source_of,
)
from prefrl.scripts.arguments.launch import LaunchArguments, launch_options
from prefrl.scripts.arguments.model_config import get_peft_config, quantization_config
from prefrl.scripts.schema import SchemaParser


def read(algorithm: Algorithm, argv: Sequence[str], *, is_launched: bool = False) -> Given:
    """Read the command line, and check it as far as that needs no import of torch.

    Args:
        algorithm: The algorithm to train with.
        argv: The options.
        is_launched: Whether other processes train, even if no option says so.

    Raises:
        ConfigError: A name, a value or a combination is wrong.
        SystemExit: Help was asked for.
    """
    parser = SchemaParser(algorithm.name)
    given = parser.parse(argv)
    is_launched = is_launched or launch_options(given, os.environ) is not None
    config = parser.check(given, knows_processes=not is_launched)
    with given.locating():
        _check_run(given.script, config)
    return given


def check_files(given: Given) -> None:
    """Check that files and folders on this machine are there, which needs no import of torch either.

    Raises:
        ConfigError: Options exclude each other, a file of rewards is missing, or the checkpoint to resume from is not
            whole.
        DataError: A dataset is missing, or of an unknown format.
    """
    script: CommandArguments = given.script
    with given.locating():
        if script.dataset_name is not None:
            part = DatasetConfig(script.dataset_name, script.dataset_config, revision=script.dataset_revision)
            source_of(part, f"dataset_name={part.path!r}")
        for option in ("datasets", "eval_datasets"):
            for number, part in enumerate(getattr(script, option)):
                source_of(part, f"{option}[{number}].path={part.path!r}")
        if isinstance(script, RewardArguments):
            for option in ("reward_funcs", "eval_reward_funcs"):
                check_reward_files(getattr(script, option) or (), option)
            if script.has_episodes:
                script.check_code()
        checkpoint = given.values.get("resume_from_checkpoint")
        # Machines with disks of their own hold parts of it: the first process looks, as in training.
        is_first = os.environ.get("RANK", "0") == "0" and not given.values.get("machine_rank")
        if is_first and checkpoint:
            from prefrl.run.checkpoints import WORDS_TO_RESUME, check_whole  # --help does not wait for it

            if checkpoint.lower() not in WORDS_TO_RESUME and "://" not in checkpoint:
                check_whole(Path(checkpoint), reads_files=False)  # training also compares their bytes


def options_of(
    algorithm: Algorithm, given: Given, *, num_processes: int | None = None
) -> tuple[CommandArguments, Any]:
    """The options of model, data and rewards, and those of the trainer, as the trainer takes them.

    Args:
        algorithm: The algorithm to train with.
        given: The options, from `read`.
        num_processes: How many processes the options are for; None: those that this process is one of.

    Raises:
        ConfigError: Options exclude each other, one has no effect, or the package of one is missing.
    """
    script, config_class = given.script, algorithm.load_config()
    of_script = {field.name for part in (script, LaunchArguments) for field in dataclasses.fields(part)}
    values = {name: value for name, value in given.values.items() if name not in of_script}
    preset = values.pop("preset", None)
    with given.locating():
        if preset is not None:
            values = combined(PRESETS[preset], values, flat_names(config_class))
        try:
            config = config_class.for_processes(num_processes, **values)
        except ImportError as error:  # transformers misses the package of an option
            raise ConfigError(str(error)) from error
    config.check_packages_installed()
    lora_of(script)  # refuses its options
    _check_run(script, config)
    _add_model_options(script, config)
    return script, config


def _check_run(script: CommandArguments, config: Any) -> None:
    """Reject streams without an end, and warn of switches of HuggingFace's scripts that have no effect here.

    The command trains, and `eval_strategy` says when it evaluates.
    """
    may_be_stored = isinstance(config, DistillationOptions) and config.on_policy_fraction == 0  # by prefrl teacher
    if isinstance(config, TeacherOptions) and config.lacks_teacher and not may_be_stored:
        raise ConfigError(f"teacher_model_name_or_path=None: {config.needs_teacher}.")
    if isinstance(script, RewardArguments) and script.lacks_reward and config.needs_rewards:
        raise ConfigError(
            "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name, a grader or "
            "module:function, or set reward_model_name_or_path, or an environment or an agent that has rewards."
        )
    if script.dataset_name is None and not script.datasets:
        _check_without_dataset(config)
    if (script.dataset_streaming or script.streaming) and config.max_steps <= 0:
        name = "dataset_streaming" if script.dataset_streaming else "streaming"
        raise ConfigError(
            f"{name}=True and max_steps={config.max_steps}: a stream has no length, so the number of steps must be "
            "given. Set max_steps."
        )
    remedy = "Remove it, and set eval_strategy for evaluations during training."
    if config.do_predict:
        warn_of_hint(config, f"do_predict=True has no effect because this command trains. {remedy}")
    if config.eval_strategy != "no":
        return
    paths, rewards = ", ".join(part.path for part in script.eval_datasets), getattr(script, "eval_reward_funcs", None)
    for name, value in {"eval_datasets": paths, "eval_reward_funcs": rewards, "do_eval": config.do_eval}.items():
        if value:
            warn_of_hint(config, f"{name}={value} has no effect because eval_strategy='no'. {remedy}")


def _check_without_dataset(config: Any) -> None:
    """An environment brings the prompts: they have no end, and there are none to evaluate on."""
    if config.max_steps <= 0:
        raise ConfigError(
            f"max_steps={config.max_steps} without dataset_name: the environment's reset gives the prompts, so the "
            "number of steps must be given. Set max_steps."
        )
    if config.eval_strategy != "no":
        raise ConfigError(
            f"eval_strategy={str(config.eval_strategy)!r} without dataset_name: there is nothing to evaluate on. Set "
            "dataset_name, or eval_strategy to 'no'."
        )


def _add_model_options(script: CommandArguments, config: Any) -> None:
    """Add the options of the model that were given to the arguments of from_pretrained."""
    defaults = {field.name: field.default for field in dataclasses.fields(script)}
    for option, argument in (
        ("model_revision", "revision"),
        ("dtype", "dtype"),
        ("attn_implementation", "attn_implementation"),
    ):
        value = getattr(script, option)
        _merge(config, option, argument, None if value == defaults[option] else value)
    precision: Any = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    bits = 4 if script.load_in_4bit else 8
    quantization = quantization_config(script, precision if script.dtype == defaults["dtype"] else script.dtype)
    _merge(config, f"load_in_{bits}bit", "quantization_config", quantization)


def _merge(config: Any, option: str, argument: str, value: Any) -> None:
    if value is None:
        return
    given = config.model_init_kwargs or {}
    if argument in given:
        raise ConfigError(f"{option} and model_init_kwargs[{argument!r}]={given[argument]!r}: remove one of them")
    config.model_init_kwargs = {**given, argument: value}


def lora_of(script: CommandArguments) -> Any:
    """The adapter to train; None: there is none.

    Raises:
        ConfigError: A package is missing.
    """
    adapter = get_peft_config(script)
    if adapter is not None and adapter.task_type == "CAUSAL_LM":  # the default: the trainer knows better
        adapter.task_type = None
    return adapter


def datasets_of(script: CommandArguments, config: Any) -> tuple[Any, Any]:
    """The datasets to train on and to evaluate on; of several to evaluate on, each by name.

    Both are None if an environment brings the prompts. Without `eval_datasets` and `test_split_size`, evaluations read
    the split `dataset_test_split` of what is trained on.
    """
    if script.dataset_name is None and not script.datasets:
        return None, None
    seed = config.seed if config.data_seed is None else config.data_seed
    if script.dataset_name is None:
        splits: Any = get_dataset(script, seed=seed)
    else:
        splits = {"train": _load_single(script, "dataset_train_split")}
        if script.test_split_size is not None:
            from prefrl.data.sources import split_off  # needs datasets, which --help does not

            splits = split_off(splits["train"], script.test_split_size, seed=seed)
    if config.eval_strategy == "no":
        return splits["train"], None
    if script.eval_datasets:
        return splits["train"], _one_or_named(script.evaluated, "eval_datasets")
    if script.test_split_size is not None:
        return splits["train"], splits["test"]
    if script.dataset_name is not None:
        return splits["train"], _load_single(script, "dataset_test_split")
    tests = [dataclasses.replace(part, split=script.dataset_test_split) for part in script.datasets]
    return splits["train"], _one_or_named(tests, "datasets", streaming=script.streaming)


def _one_or_named(parts: list[DatasetConfig], option: str, *, streaming: bool = False) -> Any:
    """A dataset, so that its metrics have no name in their names; several by name."""
    loaded = load_parts(parts, streaming=streaming, option=option)
    return loaded if len(loaded) > 1 else loaded.popitem()[1]


def _load_single(script: CommandArguments, option: str) -> Any:
    assert script.dataset_name is not None
    shaping: dict[str, Any] = {name: getattr(script, name) for name in SHAPING}
    split, revision = getattr(script, option), script.dataset_revision
    part = DatasetConfig(script.dataset_name, script.dataset_config, split=split, revision=revision, **shaping)
    return load_part(part, streaming=script.dataset_streaming, path_option="dataset_name", split_option=option)
