"""The help of `prefrl <algorithm>`: the common options in groups, all of them, or those with a word."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefrl.registry import REGISTRY
from prefrl.scripts.parsing.option_parser import default_in_words

_Options = Sequence[Mapping[str, Any]]
_WIDTH = 118
# The options that most runs set, in the order in which one thinks of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("model_name_or_path", "dtype", "attn_implementation", "trust_remote_code"),
        *("use_peft", "lora_r", "lora_target_modules"),
    ),
    "Data": (
        *("dataset_name", "datasets", "dataset_train_split", "columns", "prompt_template", "system_prompt"),
        *("conversational", "chat_template_path", "eos_token", "max_length"),
    ),
    "Rewards": ("reward_funcs", "reward_weights", "reward_model_name_or_path"),
    "Algorithm": ("preset", "loss_type", "beta", "epsilon", "scale_rewards", "advantage_estimator", "packing"),
    "Generation": (
        *("num_generations", "max_prompt_length", "max_completion_length", "temperature", "use_vllm"),
        *("vllm", "vllm_python", "vllm_server_base_url", "log_completions"),
    ),
    "Training": (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch", "bf16", "seed"),
    ),
    "Processes": ("num_processes", "accelerate_config"),
    "Output": (
        *("output_dir", "logging_steps", "report_to", "eval_strategy", "eval_steps", "save_steps"),
        *("resume_from_checkpoint", "push_to_hub"),
    ),
}


def common_options(algorithm: str, options: _Options) -> str:
    """The options that most runs set, each in one line."""
    by_name = {option["name"]: option for option in options}
    lines = [
        f"usage: prefrl {algorithm} [FILE.yaml] [--option value ...]",
        "",
        f"Dataset: {REGISTRY[algorithm].dataset}.",
        f"Options: {REGISTRY[algorithm].docs}",
        "",
        "Example:",
        f"  prefrl init {algorithm} > run.yaml",
        f"  prefrl {algorithm} run.yaml --learning_rate 1e-6 --output_dir runs/first",
    ]
    for group, names in GROUPS.items():
        rows = [_line(by_name[name]) for name in names if name in by_name]
        lines += ["", f"{group}:", *rows] if rows else []
    return "\n".join([*lines, "", f"{len(options)} options: --help WORD searches them, --help_all shows all of them."])


def found_options(algorithm: str, options: _Options, word: str) -> str:
    """The options with a word in their names or descriptions; those with it in the name come first."""
    word = word.lower()
    named = [option for option in options if word in option["name"]]
    told = [option for option in options if word in option.get("help", "").lower() and option not in named]
    if not named + told:
        return f"No option of {algorithm} has {word!r} in its name or description. --help_all shows every option."
    return option_list(named + told)


def all_options(algorithm: str, options: _Options) -> str:
    """Every option with its whole description: prefrl's own before those of transformers."""
    own = [_entry(option) for option in options if not option.get("is_inherited")]
    inherited = [_entry(option) for option in options if option.get("is_inherited")]
    usage = f"usage: prefrl {algorithm} [FILE.yaml] [--option value ...]"
    return "\n".join([usage, "", "Options of prefrl:", *own, "", "Options of transformers:", *inherited])


def option_list(options: Iterable[Mapping[str, Any]]) -> str:
    """Options with their whole descriptions."""
    return "\n".join(map(_entry, options))


def kind_of(option: Mapping[str, Any]) -> str:
    """The kind of value that an option takes."""
    if "choices" in option:
        return "{" + ",".join(map(str, option["choices"])) + "}"
    kind = {"bool": "true|false", "str": "text", "dataset": "JSON", "reward": "text"}.get(
        option["kind"], option["kind"]
    )
    return f"{kind} ..." if option.get("is_list") else kind


def _line(option: Mapping[str, Any]) -> str:
    head = f"  --{option['name']} {kind_of(option) if 'choices' not in option else ''}".rstrip()
    tail = default_in_words(option.get("default"))
    width = _WIDTH - max(len(head), 42) - len(tail) - 1
    return f"{head:<42} {textwrap.shorten(option.get('help', ''), width, placeholder=' ...')}{tail}"


def _entry(option: Mapping[str, Any]) -> str:
    text = option.get("help", "") + default_in_words(option.get("default"))
    return "\n".join(
        [
            f"  --{option['name']} {kind_of(option)}",
            *textwrap.wrap(text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8),
        ]
    )
