"""`prefrl sft`, `prefrl grpo`, ...: one function for every algorithm of the registry."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl.errors import ConfigError, DataError
from prefrl.options.fields import check_no_effect
from prefrl.scripts.arguments import DatasetPart, RewardArguments, ScriptArguments
from prefrl.scripts.parser import CommandParser

if TYPE_CHECKING:
    from prefrl.registry import Algorithm

__all__ = ["load_part", "main", "parser_of"]

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def main(algorithm: Algorithm, argv: Sequence[str]) -> int:
    """Parse the command line, train and save.

    Args:
        algorithm: The algorithm to train with.
        argv: The options.

    Returns:
        The exit code.

    Raises:
        PrefrlError: The options ask for something that cannot work.
    """
    script, config = parser_of(algorithm).parse(argv)
    _check_stream(script, config)
    _check_switches(config)
    _merge(config, "model_revision", "revision", script.model_revision)
    _merge(config, f"load_in_{script.bits}bit", "quantization_config", _quantization(script, config))
    extra: dict[str, Any] = {"reward_funcs": _rewards(script)} if isinstance(script, RewardArguments) else {}
    evaluates = config.eval_strategy != "no"
    trainer = algorithm.load_trainer()(
        model=script.model_name_or_path,
        args=config,
        train_dataset=_train_dataset(script, config),
        eval_dataset=_eval_dataset(script) if evaluates else None,
        peft_config=_lora(script),
        **extra,
    )
    resume = config.resume_from_checkpoint
    try:
        trainer.train(resume_from_checkpoint=True if resume and resume.lower() == "true" else resume)
        trainer.save_model(config.output_dir)  # and push it with push_to_hub
    finally:
        trainer.end()  # a process that exits while its process group is open may be aborted
    return 0


def parser_of(algorithm: Algorithm) -> CommandParser:
    """The parser for the options of `prefrl <algorithm>`: model, data and config."""
    config_class = algorithm.load_config()
    takes_rewards = "reward_weights" in {field.name for field in dataclasses.fields(config_class)}
    script_class = RewardArguments if takes_rewards else ScriptArguments
    return CommandParser(algorithm.name, (script_class, config_class), f"Dataset: {algorithm.dataset}.")


def _check_stream(script: ScriptArguments, config: Any) -> None:
    if script.dataset_streaming and config.max_steps <= 0:
        raise ConfigError(
            f"dataset_streaming=True and max_steps={config.max_steps}: a stream has no length, so the number of "
            "steps must be given. Set max_steps."
        )


def _check_switches(config: Any) -> None:
    """Switches of HuggingFace's scripts: the command trains, and `eval_strategy` says when it evaluates."""
    remedy = "Remove it, and set eval_strategy for evaluations during training."
    check_no_effect(
        name="do_predict", value=config.do_predict, unset=False, because="this command trains", remedy=remedy
    )
    if config.eval_strategy == "no":
        check_no_effect(name="do_eval", value=config.do_eval, unset=False, because="eval_strategy='no'", remedy=remedy)


def _merge(config: Any, option: str, argument: str, value: Any) -> None:
    """Add the value of an option to the arguments of from_pretrained."""
    if value is None:
        return
    given = config.model_init_kwargs or {}
    if argument in given:
        raise ConfigError(f"{option} and model_init_kwargs[{argument!r}]={given[argument]!r}: remove one of them")
    config.model_init_kwargs = {**given, argument: value}


def _quantization(script: ScriptArguments, config: Any) -> Any:
    if script.bits is None:
        return None
    import torch  # not needed for --help

    from prefrl.models.adapters import bitsandbytes_config

    try:
        return bitsandbytes_config(
            bits=script.bits,
            quant_type=script.bnb_4bit_quant_type,
            nested=script.use_bnb_nested_quant,
            compute_dtype=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32,
        )
    except ImportError as error:
        raise ConfigError(str(error)) from error


def _lora(script: ScriptArguments) -> Any:
    if not script.use_peft:
        return None
    from prefrl.models.adapters import lora_config  # not needed for --help

    try:
        return lora_config(**script.lora_options)
    except ImportError as error:
        raise ConfigError(str(error)) from error


def _train_dataset(script: ScriptArguments, config: Any) -> Any:
    if script.dataset_name is not None:
        return _load_single(script, "dataset_train_split")
    from prefrl.data.mixture import mix_datasets

    parts = _named(script.parts())
    weights = {name: part.weight for name, part in parts.items() if part.weight is not None}
    return mix_datasets(
        {name: load_part(part, streaming=script.dataset_streaming) for name, part in parts.items()},
        weights=weights or None,
        seed=config.seed if config.data_seed is None else config.data_seed,
        stopping="first_exhausted",
    )


def _eval_dataset(script: ScriptArguments) -> Any:
    """A single dataset; for a mixture, the test split of each part by name."""
    if script.dataset_name is not None:
        return _load_single(script, "dataset_test_split")
    tests = [dataclasses.replace(part, split=script.dataset_test_split) for part in script.parts()]
    return {name: load_part(part, streaming=script.dataset_streaming) for name, part in _named(tests).items()}


def _named(parts: Sequence[DatasetPart]) -> dict[str, DatasetPart]:
    """The parts by the last component of their path, with a number where that is ambiguous."""
    stems = [Path(part.path).stem for part in parts]
    return {
        stem if stems.count(stem) == 1 else f"{stem}_{i}": part
        for i, (stem, part) in enumerate(zip(stems, parts, strict=True))
    }


def _load_single(script: ScriptArguments, option: str) -> Any:
    assert script.dataset_name is not None
    part = DatasetPart(path=script.dataset_name, name=script.dataset_config, split=getattr(script, option))
    return load_part(part, streaming=script.dataset_streaming, path_option="dataset_name", split_option=option)


def load_part(
    part: DatasetPart, *, streaming: bool, path_option: str = "datasets.path", split_option: str = "split"
) -> Any:
    """Load the dataset of one part. The names of the options are for error messages.

    Raises:
        ConfigError: Options exclude each other.
        DataError: It cannot be loaded.
    """
    import datasets  # not needed for --help

    file_format = _FORMATS.get(Path(part.path).suffix)
    files = part.data_files if file_format is None else part.path
    if file_format is not None and not Path(part.path).is_file():
        raise DataError(f"{path_option}={part.path!r}: there is no such file")
    if file_format is not None and (part.data_files, part.data_dir) != (None, None):
        raise ConfigError(f"{path_option}={part.path!r} is a file: remove data_files and data_dir")
    try:
        dataset = datasets.load_dataset(
            file_format or part.path,
            part.name,
            data_dir=part.data_dir,
            data_files=files,
            split=part.split,
            streaming=streaming,
        )
        return dataset if part.columns is None else dataset.select_columns(part.columns)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        where = f"{path_option}={part.path!r} with {split_option}={part.split!r}"
        raise DataError(f"{where} cannot be loaded: {error}") from error


def _rewards(script: RewardArguments) -> list[Any]:
    named = importlib.import_module("prefrl.rewards.named")
    rewards: list[Any] = [named.reward_by_name(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path is not None:
        rewards.append(script.reward_model_name_or_path)
    return rewards
