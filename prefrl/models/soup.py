"""Model soups: averages of checkpoints that were trained from one model.

Source: Wortsman et al. 2022, arXiv 2203.05482.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefrl.errors import ConfigError, require
from prefrl.models.soup_choice import Ingredient, Soup, check_folders, greedy_choice

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor
    from transformers import PreTrainedModel


Evaluate = Callable[["PreTrainedModel"], float]
Folder = str | os.PathLike[str]

_ADAPTER_CONFIG = "adapter_config.json"
# Checkpoint files that are neither weights nor training state.
_COPIED = re.compile(
    r"((generation|preprocessor|processor)_)?config\.json|(tokenizer|vocab|chat_template|special_tokens|added_tokens).*"
    r"|merges\.txt|.*\.(py|model|tiktoken)"
)
# Config options that do not affect what is computed from the weights.
_HARMLESS = re.compile(r"^_|version$|dtype$|^use_cache$|token_id$|drop")
# LoRA options that are compatible with an adapter that only adds scale * B A to a layer's weight.
_LINEAR = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "lora_alpha",
        "lora_dropout",
        "peft_version",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)


def uniform_soup(checkpoints: Sequence[Folder], output_dir: Folder, *, weights: Sequence[float] | None = None) -> Soup:
    """Write the weighted mean of checkpoints: theta = sum_i w_i theta_i / sum_i w_i.

    Means are computed in float32 and saved in the first checkpoint's dtype. LoRA adapters become one adapter whose
    update is the mean of their updates, sum_i w_i scale_i B_i A_i; its rank is the sum of their ranks. Config and
    tokenizer are those of the first checkpoint.

    Args:
        checkpoints: Folders of models of one architecture, or of LoRA adapters of one base model.
        output_dir: A folder without a model in it.
        weights: One positive number for each checkpoint; None: equal weights.

    Returns:
        The checkpoints with their shares, in the given order.

    Raises:
        ConfigError: The checkpoints cannot be averaged, the weights are invalid, or `output_dir` has a model.
        ImportError: The checkpoints are adapters and peft is not installed.

    Source: section 2, uniform soup.
    """
    folders = _checked(checkpoints, output_dir)
    shares = _shares(weights, len(folders))
    _write(folders, shares, Path(output_dir))
    return Soup([Ingredient(folder, share) for folder, share in zip(folders, shares, strict=True)], metric=None)


def best_soup(
    checkpoints: Sequence[Folder],
    output_dir: Folder,
    evaluate: Evaluate,
    *,
    greater_is_better: bool,
    top_k: int | None = None,
) -> Soup:
    """Write the uniform soup of the best checkpoints, and score it.

    Args:
        checkpoints: As for `uniform_soup`.
        output_dir: A folder without a model in it.
        evaluate: Returns the held-out metric of a model.
        greater_is_better: Whether a greater metric is better.
        top_k: How many checkpoints to average; None: all.

    Returns:
        The checkpoints, best first, with their metrics and their shares of the soup.

    Raises:
        ConfigError: As for `uniform_soup`, or a checkpoint's metric is not finite.
        ImportError: The checkpoints are adapters and peft is not installed.
    """
    ranked = _ranked(_checked(checkpoints, output_dir, top_k), evaluate, greater_is_better)
    best = [ingredient.checkpoint for ingredient in ranked[:top_k]]
    _write(best, _shares(None, len(best)), Path(output_dir))
    shares = [1 / len(best)] * len(best) + [0.0] * (len(ranked) - len(best))
    ingredients = [dataclasses.replace(i, weight=share) for i, share in zip(ranked, shares, strict=True)]
    return Soup(ingredients, metric=float(evaluate(load_checkpoint(output_dir))))


def greedy_soup(
    checkpoints: Sequence[Folder],
    output_dir: Folder,
    evaluate: Evaluate,
    *,
    greater_is_better: bool,
    top_k: int | None = None,
) -> Soup:
    """Write the uniform soup of the checkpoints that do not make it worse, tried from the best to the worst.

    Args:
        checkpoints: As for `uniform_soup`.
        output_dir: A folder without a model in it; trial soups are stored in it temporarily.
        evaluate: Returns the held-out metric of a model.
        greater_is_better: Whether a greater metric is better.
        top_k: Try the k best checkpoints only; None: all.

    Returns:
        The checkpoints, best first, with their metrics and their shares of the soup.

    Raises:
        ConfigError: As for `uniform_soup`, or a checkpoint's metric is not finite.
        ImportError: The checkpoints are adapters and peft is not installed.

    Source: algorithm 1, greedy soup; equal metrics are accepted, as there.
    """
    ranked = _ranked(_checked(checkpoints, output_dir, top_k), evaluate, greater_is_better)
    tried = ranked[:top_k]
    metric_of = partial(_metric_of, output_dir=Path(output_dir), evaluate=evaluate)
    soup = greedy_choice(tried, metric_of, greater_is_better=greater_is_better)
    _write(soup.used, _shares(None, len(soup.used)), Path(output_dir))
    return dataclasses.replace(soup, ingredients=[*soup.ingredients, *ranked[len(tried) :]])


def load_checkpoint(folder: Folder) -> PreTrainedModel:
    """The model in a folder, in float32, as prefrl's trainers load it; an adapter is loaded onto its base model.

    Raises:
        ConfigError: The model cannot be loaded.
        ImportError: The folder holds an adapter and peft is not installed.
    """
    path = Path(folder)
    if not (path / _ADAPTER_CONFIG).is_file():
        architecture = str((_read_json(path / "config.json").get("architectures") or [""])[0])
        return _from_pretrained(path, is_classifier=architecture.endswith("ForSequenceClassification"))
    # is_trainable, because trainers reject a model without trainable parameters.
    return _peft().PeftModel.from_pretrained(_base_of(path), path, is_trainable=True)


def _ranked(folders: Sequence[Path], evaluate: Evaluate, greater_is_better: bool) -> list[Ingredient]:
    """The checkpoints with their metrics, best first, all with weight 0."""
    metrics = [(folder, float(evaluate(load_checkpoint(folder)))) for folder in folders]
    for folder, metric in metrics:
        if not math.isfinite(metric):
            raise ConfigError(f"checkpoint {str(folder)!r}: its metric is {metric}. Leave this checkpoint out.")
    metrics.sort(key=lambda pair: pair[1], reverse=greater_is_better)
    return [Ingredient(folder, weight=0.0, metric=metric) for folder, metric in metrics]


def _metric_of(checkpoints: Sequence[Path], output_dir: Path, evaluate: Evaluate) -> float:
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trial-", dir=output_dir) as trial:
        _write(checkpoints, _shares(None, len(checkpoints)), Path(trial))
        return float(evaluate(load_checkpoint(trial)))


def _checked(checkpoints: Sequence[Folder], output_dir: Folder, top_k: int | None = None) -> list[Path]:
    folders = [Path(checkpoint) for checkpoint in checkpoints]
    check_folders(folders, Path(output_dir), top_k)
    is_adapter = [(folder / _ADAPTER_CONFIG).is_file() for folder in folders]
    if any(is_adapter) and not all(is_adapter):
        raise ConfigError(
            f"checkpoint {str(folders[is_adapter.index(True)])!r} is an adapter, but "
            f"{str(folders[is_adapter.index(False)])!r} is not. Merge the adapters into their base model first."
        )
    check = _check_adapters if all(is_adapter) else _check_models
    check(folders)
    return folders


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else list(weights)
    if len(given) != count or not all(math.isfinite(weight) and weight > 0 for weight in given):
        raise ConfigError(f"weights={given}: must be {count} positive numbers, one for each checkpoint")
    return [weight / sum(given) for weight in given]


def _write(folders: Sequence[Path], shares: Sequence[float], output_dir: Path) -> None:
    """Write the averaged weights, and the other files of a checkpoint."""
    is_adapter = (folders[0] / _ADAPTER_CONFIG).is_file()
    average = _average_adapters if is_adapter else _average_models
    average(folders, shares, output_dir)
    for file in folders[0].iterdir():
        if file.is_file() and _COPIED.fullmatch(file.name):
            shutil.copy(file, output_dir)
    (output_dir / "README.md").write_text(_card(folders, shares, is_adapter), encoding="utf-8")


# Whole models.


class _Tensors:
    """The weights of a checkpoint, read from its safetensors files one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            files = sorted(set(_read_json(index)["weight_map"].values()))
        elif single.is_file():
            files = [single.name]
        else:
            raise ConfigError(f"checkpoint {str(folder)!r}: has no model.safetensors, not even in shards")
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(folder / file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def shapes(self) -> dict[str, list[int]]:
        return {name: file.get_slice(name).get_shape() for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _average_models(folders: Sequence[Path], shares: Sequence[float], output_dir: Path) -> None:
    checkpoints = [_Tensors(folder) for folder in folders]
    # Tied weights are stored once in the files, so they stay tied in the average.
    averages = {name: _average(name, checkpoints, shares) for name in checkpoints[0].shapes()}
    output_dir.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(averages, output_dir, metadata={"format": "pt"})


def _average(name: str, checkpoints: Sequence[_Tensors], shares: Sequence[float]) -> Tensor:
    first = checkpoints[0].read(name)
    if not first.is_floating_point():
        for other in checkpoints[1:]:
            if not first.equal(other.read(name)):
                raise ConfigError(
                    f"{name} ({first.dtype}) differs between {str(checkpoints[0].folder)!r} and "
                    f"{str(other.folder)!r}, but integers cannot be averaged. Use checkpoints of one model."
                )
        return first
    mean = first.to(torch.promote_types(first.dtype, torch.float32))
    total = shares[0]
    for checkpoint, share in zip(checkpoints[1:], shares[1:], strict=True):
        total += share
        # As a running mean, weights that are equal in all checkpoints stay bit-identical.
        mean = mean + (checkpoint.read(name).to(mean.dtype) - mean) * (share / total)
    return mean.to(first.dtype)


def _check_models(folders: Sequence[Path]) -> None:
    first, *others = [_Tensors(folder) for folder in folders]
    for other in others:
        _check_same_architecture(first, other)


def _check_same_architecture(first: _Tensors, other: _Tensors) -> None:
    pair = f"{str(first.folder)!r} and {str(other.folder)!r}"
    configs = [_read_json(checkpoint.folder / "config.json") for checkpoint in (first, other)]
    for key in ("architectures", "model_type"):  # checked first: they explain all other differences
        if configs[0].get(key) != configs[1].get(key):
            raise ConfigError(f"{pair}: {key}={configs[0].get(key)} and {configs[1].get(key)}; must be the same")
    if any("quantization_config" in config for config in configs):
        raise ConfigError(f"{pair}: quantized weights cannot be averaged. Use the models before quantization.")
    ours, theirs = first.shapes(), other.shapes()
    if ours.keys() != theirs.keys():
        raise ConfigError(f"{pair} have different weights: {_some(ours.keys() ^ theirs.keys())} in one of them only")
    differing = [f"{name} is {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]
    if differing:
        raise ConfigError(f"{pair} have weights of different shapes: {_some(differing)}")
    options = [_functional(config) for config in configs]
    keys = {key for key in options[0].keys() | options[1].keys() if options[0].get(key) != options[1].get(key)}
    if keys:
        raise ConfigError(f"{pair} compute different functions of their weights: config.json differs in {_some(keys)}")


def _functional(config: dict[str, Any]) -> dict[str, Any]:
    """The options that determine what a model computes from its weights, including those of sub-configs."""
    return {
        key: _functional(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _HARMLESS.search(key)
    }


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


# LoRA adapters.


def _average_adapters(folders: Sequence[Path], shares: Sequence[float], output_dir: Path) -> None:
    """Concatenate the matrices, since the mean of products B A is not the product of the means."""
    peft = _peft()
    output_dir.mkdir(parents=True, exist_ok=True)
    if len(folders) == 1:
        for file in folders[0].glob("adapter_*"):
            shutil.copy(file, output_dir)
        return
    names = [f"ingredient_{i}" for i in range(len(folders))]
    base = _base_of(folders[0])
    try:
        model = peft.PeftModel.from_pretrained(base, folders[0], adapter_name=names[0])
        for folder, name in zip(folders[1:], names[1:], strict=True):
            model.load_adapter(folder, adapter_name=name)
        # The new adapter inherits the first one's options, and rsLoRA would scale it by the square root of its own
        # rank. The concatenated matrices already contain the scale of each part.
        model.peft_config[names[0]].use_rslora = False
        model.add_weighted_adapter(names, list(shares), "default", combination_type="cat")
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"adapters cannot be averaged: {error}. Merge them into their base model first.") from error
    model.save_pretrained(output_dir, selected_adapters=["default"])


def _check_adapters(folders: Sequence[Path]) -> None:
    peft = _peft()
    plain = peft.LoraConfig().to_dict()
    configs = [peft.PeftConfig.from_pretrained(folder) for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        if config.peft_type != "LORA":
            raise ConfigError(
                f"checkpoint {str(folder)!r}: peft_type={config.peft_type}, but only LoRA adapters can be averaged"
            )
        options = config.to_dict()
        other = [name for name, value in options.items() if name not in _LINEAR and value != plain.get(name)]
        if not isinstance(config.init_lora_weights, bool) and config.init_lora_weights != "gaussian":
            other.append("init_lora_weights")  # PiSSA and similar initializations change the base model as well
        if other:
            raise ConfigError(
                f"checkpoint {str(folder)!r}: an adapter with {_some(f'{name}={options[name]!r}' for name in other)} "
                "does more than add B A, so it cannot be averaged. Merge it into its base model first."
            )
        if config.base_model_name_or_path != configs[0].base_model_name_or_path:
            raise ConfigError(
                f"{str(folders[0])!r} and {str(folder)!r} are adapters of different base models: "
                f"{configs[0].base_model_name_or_path!r} and {config.base_model_name_or_path!r}"
            )


def _base_of(folder: Path) -> PreTrainedModel:
    config: PeftConfig = _peft().PeftConfig.from_pretrained(folder)
    if not config.base_model_name_or_path:
        raise ConfigError(f"adapter {str(folder)!r} does not name its base model. Merge it into the model first.")
    return _from_pretrained(config.base_model_name_or_path, is_classifier=config.task_type == "SEQ_CLS")


def _peft() -> Any:
    return require("peft", extra="peft", feature="a soup of adapters")


def _from_pretrained(name: Folder, *, is_classifier: bool) -> PreTrainedModel:
    loader = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    try:
        return loader.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model {os.fspath(name)!r} cannot be loaded: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    return content


def _card(folders: Sequence[Path], shares: Sequence[float], is_adapter: bool) -> str:
    # The last two parts of the path tell checkpoints of several runs apart; the rest may be private.
    names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    rows = "\n".join(f"| {name} | {share:.6g} |" for name, share in zip(names, shares, strict=True))
    return f"""---
library_name: {"peft" if is_adapter else "transformers"}
tags:
- prefrl
- model-soup
---

# Model soup made with prefrl

The weighted mean of {len(folders)} {"LoRA adapters: of their updates B A" if is_adapter else "checkpoints"}.
Model soups: [arXiv 2203.05482](https://arxiv.org/abs/2203.05482).

| checkpoint | share |
|---|---|
{rows}
"""
