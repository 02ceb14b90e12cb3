"""Options whose value may be "auto": sizes that are found by trial or follow from others, and the learning rate."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import default_of, mapping_of, opt
from prefrl.options.optimizers import optimizer_of
from prefrl.options.params import Params, hyperparameters
from prefrl.options.rules import apply, example, when
from prefrl.options.run_rules import HUGGINGFACE
from prefrl.options.types import check_value

__all__ = [
    "AUTO",
    "AUTOMATIC",
    "RATE_RULES",
    "AutoSizeParams",
    "automatic_rate",
    "derive_sizes",
    "largest_divisor",
    "num_ranks",
    "take_automatic",
]

AUTO = "auto"
_ROWS, _STEPS, _TOKENS = "per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch"
_ADAPTER_FACTOR = 10
# The default learning rates are for optimizers with one of these words in their names, but with none of the others.
_LIKE_ADAM, _UNLIKE_ADAM = ("adam", "amsgrad", "adafactor", "muon", "soap"), ("galore", "apollo")
# The options that take "auto".
AUTOMATIC = (_ROWS, _STEPS, _TOKENS, "learning_rate")


@hyperparameters
class AutoSizeParams(Params):
    """How sizes are found by trial."""

    memory_share: Annotated[float, Gt(0), Le(1)] = opt(
        0.9, "Maximum fraction of the memory that is free at the start of the search that training may need."
    )
    max_batch_size: Annotated[int, Ge(1)] | None = opt(
        None,
        "Largest per_device_train_batch_size that is tried; None: 128 on a CPU, and no limit but memory on a GPU.",
    )


def take_automatic(config: Any) -> frozenset[str]:
    """The names of the options that are "auto"; each gets its default in place of it, until its value is known."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    names = frozenset(name for name in AUTOMATIC if isinstance(value := getattr(config, name), str) and value == AUTO)
    for name in names:
        setattr(config, name, default_of(fields[name]))
    return names


def num_ranks(config: Any) -> int:
    """Processes with rows of their own: `distributed.world_size()`, which is known only to trainers."""
    sharing = 1 if config.parallelism_config is None else int(config.parallelism_config.sp_size)
    return int(config.world_size) // sharing


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def derive_sizes(config: Any, automatic: frozenset[str]) -> frozenset[str]:
    """Set the sizes that follow from `effective_batch_size`; return the names of those that need a trial.

    If batch size and accumulation both need one, they get values that make the same step.

    Args:
        config: Options, with numbers in place of "auto".
        automatic: The names of the options that are "auto".

    Raises:
        ConfigError: The sizes contradict each other, or nothing decides them.
    """
    apply(config, SIZE_RULES)
    automatic -= {"learning_rate"}
    if config.effective_batch_size is not None:
        automatic -= _derived(config, automatic)
        check_value(_STEPS, config.gradient_accumulation_steps, HUGGINGFACE[_STEPS])
    if _ROWS in automatic and _has_budget(config):
        automatic -= {_ROWS, _STEPS}  # the budget cuts the step
    if not automatic and mapping_of(config, "auto_size_kwargs"):
        raise ConfigError(
            f"auto_size_kwargs={config.auto_size_kwargs!r} has no effect because no size is found by trial. Set "
            f"{_TOKENS}='auto', or {_ROWS}='auto'."
        )
    return frozenset(automatic)


def _derived(config: Any, automatic: frozenset[str]) -> set[str]:
    """Set what follows from the effective batch size; the names of the options that are decided by that."""
    known, rest = {_ROWS, _STEPS} - automatic, config.effective_batch_size // _known_product(config)
    if known == {_ROWS}:
        config.gradient_accumulation_steps = rest
    elif known == {_STEPS}:
        config.per_device_train_batch_size = rest
    elif not known:
        config.per_device_train_batch_size = largest_divisor(rest, config.per_device_train_batch_size)
        config.gradient_accumulation_steps = rest // config.per_device_train_batch_size
        return set()
    return {_ROWS, _STEPS}


def _has_budget(o: Any) -> bool:
    return _TOKENS in o.automatic or o.max_tokens_per_micro_batch is not None


def _known_sizes(o: Any) -> dict[str, int]:
    return {name: int(getattr(o, name)) for name in sorted({_ROWS, _STEPS} - o.automatic)}


def _known_product(o: Any) -> int:
    return num_ranks(o) * math.prod(_known_sizes(o).values())


def _known_in_words(o: Any) -> str:
    return " * ".join([*(f"{name}={value}" for name, value in _known_sizes(o).items()), f"{num_ranks(o)} processes"])


def _nearest_multiples(o: Any) -> str:
    product = _known_product(o)
    lower = o.effective_batch_size // product * product
    return f"{lower} or {lower + product}" if lower else f"{product}"


SIZE_RULES = (
    when(
        lambda o: o.effective_batch_size is None and _STEPS in o.automatic,
        "gradient_accumulation_steps='auto' without effective_batch_size: nothing decides how many micro-batches a "
        "step has. Set effective_batch_size.",
        example("sft", gradient_accumulation_steps="auto"),
    ),
    when(
        lambda o: o.effective_batch_size is None and _ROWS in o.automatic and _has_budget(o),
        "per_device_train_batch_size='auto' with max_tokens_per_micro_batch: the budget decides what fits, but "
        "nothing decides how many rows a step has. Set effective_batch_size.",
        example("sft", per_device_train_batch_size="auto", max_tokens_per_micro_batch=9),
    ),
    when(
        lambda o: o.effective_batch_size not in (None, _known_product(o)) and len(_known_sizes(o)) == 2,
        "effective_batch_size={effective_batch_size}: {given} is {product}. Set gradient_accumulation_steps='auto', "
        "or leave effective_batch_size out.",
        example("sft", effective_batch_size=16),
        given=_known_in_words,
        product=_known_product,
    ),
    when(
        lambda o: o.effective_batch_size is not None and o.effective_batch_size % _known_product(o),
        "effective_batch_size={effective_batch_size}: must be a multiple of {given}. Set {fitting}.",
        example("sft", effective_batch_size=20, gradient_accumulation_steps="auto"),
        given=_known_in_words,
        fitting=_nearest_multiples,
    ),
)


def _is_not_like_adam(o: Any) -> bool:
    name = optimizer_of(o)
    return not any(word in name for word in _LIKE_ADAM) or any(word in name for word in _UNLIKE_ADAM)


RATE_RULES = (
    when(
        lambda o: "learning_rate" in o.automatic and _is_not_like_adam(o),
        "learning_rate='auto' with optim={optim!r}: it is a rate for Adam, but the steps of this optimizer have "
        "another size. Set a number.",
        example("sft", learning_rate="auto", optim="sgd"),
    ),
)


def automatic_rate(config: Any, *, has_adapter: bool) -> float:
    """The learning rate "auto": the trainer's default, ten times that if an adapter is trained.

    Source: Schulman et al. 2025, LoRA Without Regret, https://thinkingmachines.ai/blog/lora: the best learning rate of
    LoRA is about ten times that of full fine-tuning, in supervised and in reinforcement learning.
    """
    default = next(default_of(field) for field in dataclasses.fields(config) if field.name == "learning_rate")
    return float(default) * (_ADAPTER_FACTOR if has_adapter else 1)
