"""Options of steps: schedules, sizes that may be "auto", evaluations, precision, tokenizer and optimizer."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import apply, default_of, example, flat, mapping_of, opt, unset, warn_of_hint, when
from prefrl.options.optimizers import OPTIMIZERS, optimizer_of
from prefrl.options.params import KwargsValue, Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.run import HUGGINGFACE, ProfileParams
from prefrl.options.schedule import (
    SCHEDULE_FACTS,
    WARMUP_EVALUATIONS_RULES,
    PlateauParams,
    WeightDecayParams,
    own_options,
    schedule_of,
)
from prefrl.options.types import BatchSize, check_value

AUTO = "auto"
_ROWS, _STEPS, _TOKENS = "per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch"
_ADAPTER_FACTOR = 10
# The default learning rates are for optimizers with one of these words in their names, but with none of the others.
_LIKE_ADAM, _UNLIKE_ADAM = ("adam", "amsgrad", "adafactor", "muon", "soap"), ("galore", "apollo")
EVALUATED_ROWS = "per_device_eval_batch_size"
# The options that take "auto".
AUTOMATIC = (_ROWS, _STEPS, _TOKENS, EVALUATED_ROWS, "learning_rate")


@hyperparameters
class AutoSizeParams(Params):
    """How sizes are found by trial."""

    memory_share: Annotated[float, Gt(0), Le(1)] = opt(
        0.9, "Maximum fraction of the memory that training may need, of what is free when the search starts."
    )
    max_batch_size: Annotated[int, Ge(1)] | None = opt(
        None,
        "Largest number of rows that is tried. The default is 128 on a CPU; on a GPU, memory is the only limit.",
    )


def take_automatic(config: Any) -> frozenset[str]:
    """The names of the options that are "auto"; each gets its default in place of it, until its value is known."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    names = frozenset(name for name in AUTOMATIC if isinstance(value := getattr(config, name), str) and value == AUTO)
    for name in names:
        setattr(config, name, default_of(fields[name]))
    return names


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def derive_sizes(config: Any, automatic: frozenset[str]) -> frozenset[str]:
    """Set the sizes that follow from `effective_batch_size`; return the names of those that need a trial of a step.

    If batch size and accumulation both need one, they get values that make the same step.

    Args:
        config: Options, with numbers in place of "auto".
        automatic: The names of the options that are "auto".

    Raises:
        ConfigError: The sizes contradict each other, or nothing decides them.
    """
    apply(config, SIZE_RULES)
    finds_evaluated = EVALUATED_ROWS in automatic
    automatic -= {"learning_rate", EVALUATED_ROWS}
    if config.effective_batch_size is not None:
        automatic -= _derived(config, automatic)
        check_value(_STEPS, config.gradient_accumulation_steps, HUGGINGFACE[_STEPS])
    if _ROWS in automatic and _has_budget(config):
        automatic -= {_ROWS, _STEPS}  # the budget cuts the step
    if not automatic and not finds_evaluated and mapping_of(config, "auto_size_kwargs"):
        warn_of_hint(
            config,
            f"auto_size_kwargs={config.auto_size_kwargs!r} has no effect because no size is found by trial. Set "
            f"{_TOKENS}='auto', or {_ROWS}='auto'.",
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
    return int(o.num_ranks) * math.prod(_known_sizes(o).values())


def _known_in_words(o: Any) -> str:
    return " * ".join([*(f"{name}={value}" for name, value in _known_sizes(o).items()), f"{o.num_ranks} processes"])


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


# Of names that configs only take.
NAMES_RULES = (
    when(
        lambda o: o.pad_to_multiple_of not in (None, "auto"),
        "pad_to_multiple_of={pad_to_multiple_of!r} has no effect because batches are laid out without padding. Leave "
        "it out.",
        example("sft", pad_to_multiple_of=8),
        hint=True,
    ),
    *unset(
        {"padding_value": 0},
        lambda o: True,
        "batches are laid out without padding. Leave it out.",
        example("sft"),
        hint=True,
    ),
    when(
        lambda o: o.group_by_length,
        "group_by_length=True: rows are drawn at random. Batches are not padded, so grouping by length has no use; "
        "max_tokens_per_micro_batch balances tokens.",
        example("sft", group_by_length=True),
    ),
    when(
        lambda o: not o.save_safetensors,
        "save_safetensors=False: weights are always saved as safetensors, which hold no code. Leave it out.",
        example("sft", save_safetensors=False),
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


_Epochs = Annotated[float, Gt(0)]
# Schedules of transformers that are independent of the number of steps.
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


@dataclass(init=False, repr=False, eq=False)
class TrainingOptions:
    """Schedules, sizes, evaluations, precision, tokenizer and optimizer; see also docs/schedules.md.

    In this class and those derived from it, methods whose `self` is `Any` read options of HuggingFace, too.
    """

    # Names of TRL, and of transformers 4.
    padding_free: bool = flat(default=False)
    pad_to_multiple_of: int | str | None = flat()
    padding_value: int | None = flat()
    group_by_length: bool = flat(default=False)
    overwrite_output_dir: bool = flat(default=False)
    save_safetensors: bool = flat(default=True)

    lr_scheduler_type: str = opt(
        "linear",
        "Schedule of the learning rate, such as linear, cosine or wsd. There are those of transformers, and "
        f"{', '.join(SCHEDULE_FACTS)}.",
    )
    lr_scheduler_kwargs: KwargsValue = kwargs(
        "Hyperparameters of lr_scheduler_type, or the arguments of a schedule of transformers; see docs/schedules.md.",
        {name: row.params for name, row in SCHEDULE_FACTS.items()},
        switch="lr_scheduler_type",
        others_elsewhere=True,
    )
    warmup_steps: float = opt(
        0, "Steps in which the learning rate rises to its full value. A value below 1 is a fraction of all steps."
    )
    lr_decay_steps: Annotated[int, Ge(1)] | None = opt(
        None,
        "Step at which the schedule ends, and after which the learning rate is constant. The default is the last step "
        "of training.",
    )
    warmup_start_factor: Annotated[float, Ge(0), Le(1)] | None = opt(
        None,
        "Fraction of learning_rate at which the warm-up begins. By default it is 0, unless the schedule says "
        "otherwise.",
    )
    warmup_evaluations: Annotated[int, Ge(0)] = opt(
        0, "Set warmup_steps to this multiple of eval_steps. Needs eval_strategy='steps'."
    )
    learning_rate_scaling: Literal["constant", "sqrt", "linear"] = opt(
        "constant",
        "What to multiply learning rates by: 1 ('constant'), the square root of the number of processes ('sqrt'), "
        "or that number itself ('linear').",
    )
    reduce_on_plateau: Annotated[int, Ge(0)] = opt(
        0,
        "Maximum number of times that the learning rate is reduced, on top of its schedule, when a metric stops "
        "improving.",
    )
    reduce_on_plateau_kwargs: KwargsValue = kwargs(
        "Hyperparameters of reduce_on_plateau.",
        {True: PlateauParams},
        switch="reduce_on_plateau",
        off="reduce_on_plateau=0. Set it to the number of times that the learning rate may be reduced.",
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = opt(
        "constant",
        "How the weight decay changes during training: not at all ('constant'), linearly ('linear'), or along "
        "half a cosine ('cosine').",
    )
    weight_decay_schedule_kwargs: KwargsValue = kwargs(
        "Hyperparameters of weight_decay_schedule.",
        {"linear": WeightDecayParams, "cosine": WeightDecayParams},
        switch="weight_decay_schedule",
    )
    max_tokens_per_micro_batch: Annotated[int, Ge(1)] | None = opt(
        None,
        "Split the rows of a step into micro-batches of at most this many tokens. Their number of rows is then not "
        "fixed; a prompt counts once for its group. With 'auto', the number of tokens is found by trial; see "
        "docs/batch_sizes.md. This changes memory and speed, but never the update.",
        decides=False,
    )
    effective_batch_size: BatchSize | None = opt(
        None,
        "Rows of an optimizer step: per_device_train_batch_size * gradient_accumulation_steps * processes. Whichever "
        "of the first two is 'auto' is derived from it. By default, it is their product.",
        decides=False,
    )
    auto_size_kwargs: KwargsValue = kwargs("How sizes that are 'auto' are determined.", AutoSizeParams, decides=False)
    eval_epochs: _Epochs = opt(
        1.0,
        "Number of epochs between evaluations with eval_strategy='epoch'. 0.25 means four per epoch, and 2 means one "
        "every two epochs.",
        decides=False,
    )
    save_epochs: _Epochs = opt(
        1.0,
        "Number of epochs between checkpoints with save_strategy='epoch'. 0.25 means four per epoch.",
        decides=False,
    )
    stop_at_first_limit: bool = opt(
        False,
        "With max_steps, also end the run after num_train_epochs, whichever comes first. By default, max_steps "
        "overrides num_train_epochs, as in transformers.",
        decides=False,
    )
    max_eval_samples: Annotated[int, Ge(1)] | None = opt(
        None,
        "Evaluate only this many rows of each dataset, from its start. By default, all rows are evaluated.",
        decides=False,
    )
    evaluate_training_set: bool = opt(
        False,
        "Evaluate the training dataset in the same way, too. Its metrics are named eval_train_...",
        decides=False,
    )
    profile: bool = opt(
        False,
        "Trace some steps for a timeline viewer; the traces are written to the folder profile of output_dir.",
        decides=False,
    )
    profile_kwargs: KwargsValue = kwargs(
        "Which steps profile=True traces, and what it records.", {True: ProfileParams}, switch="profile", decides=False
    )
    fp8: bool = opt(
        False,
        "Compute the matrix products of the layers in 8-bit floating point, with torchao. Needs bf16=True and a GPU "
        "that supports it.",
    )
    tokenizer_name_or_path: str | None = opt(
        None,
        "Tokenizer, or processor of a model that reads images: a name on the Hub or a folder. The default is the "
        "model's own.",
    )
    chat_template_path: str | None = opt(
        None,
        "Chat template: chatml, llama-3, gemma, mistral, zephyr, a file, or a model. The file has a Jinja template; a "
        "model's template is copied. A name or a model also sets eos_token, and adds tokens in SFT and reward models. "
        "The default is the tokenizer's own template.",
    )
    eos_token: str | None = opt(
        None,
        "End-of-sequence token. The default is the chat template's, if chat_template_path has one, and otherwise "
        "the tokenizer's.",
    )
    pad_token: str | None = opt(
        None,
        "Padding token of the saved tokenizer; training itself needs none. The default is the tokenizer's own, or its "
        "eos_token.",
    )
    optim: str = opt(
        "adamw_torch_fused",
        f"Optimizer: one of transformers, or {', '.join(OPTIMIZERS)}.",
    )
    learning_rates: dict[str, float] | str | None = opt(
        None,
        "Learning rates of some parameters: a mapping from regular expressions to rates, all with the same schedule. "
        "The first expression that matches part of a parameter's name applies; parameters that none matches use "
        "learning_rate. On the command line, give it as JSON.",
    )
    max_grad_value: Annotated[float, Gt(0)] | None = opt(
        None,
        "Clip each element of the gradients to this absolute value, after max_grad_norm is applied. By default, "
        "elements are not clipped.",
    )
    regularization_type: Literal["l1", "l2", "l1_l2"] | None = opt(
        None,
        "Penalty that is added to the loss of each optimizer step: regularization_lambda times the sum of the "
        "absolute values ('l1') or squares ('l2') of all trained weights, or of both ('l1_l2').",
    )
    regularization_lambda: Annotated[float, Ge(0)] = opt(0.0, "Weight of the penalty of regularization_type.")

    plateau_params = ParamsOf("reduce_on_plateau_kwargs", PlateauParams)
    schedule_params = ParamsOf("lr_scheduler_kwargs", Params)
    weight_decay_params = ParamsOf("weight_decay_schedule_kwargs", WeightDecayParams)
    auto_size_params = ParamsOf("auto_size_kwargs", AutoSizeParams)
    profile_params = ParamsOf("profile_kwargs", ProfileParams)

    @property
    def num_ranks(self: Any) -> int:
        """Processes, or teams of them, with rows of their own: what `distributed.world_size()` is in training.

        `sp_size` is that of `parallelism_config`, or of the file of `accelerate launch`.
        """
        team_size = "1"
        if self.parallelism_config is not None:
            team_size = self.parallelism_config.sp_size
        elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
            team_size = os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")
        return max(int(self.world_size) // int(team_size), 1)  # trainers refuse teams that are not whole

    @property
    def set_on_gradients(self) -> list[str]:
        """The options that are set and act on gradients between the backward pass and the update."""
        return [name for name in ("max_grad_value", "regularization_type") if getattr(self, name) is not None]

    @property
    def reduces_on_plateau(self) -> bool:
        """Whether the learning rate is reduced when a metric stops improving."""
        return self.reduce_on_plateau > 0

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is more than one of transformers."""
        return bool(own_options(self)) or schedule_of(self) in SCHEDULE_FACTS

    @property
    def depends_on_length(self) -> bool:
        """Whether learning rate or weight decay of a step depend on the number of steps of the training."""
        if self.lr_decay_steps is not None:
            return False
        name = schedule_of(self)
        knows_length = SCHEDULE_FACTS[name].knows_length if name in SCHEDULE_FACTS else name not in _ENDLESS
        return knows_length or 0 < self.warmup_steps < 1 or self.weight_decay_schedule != "constant"

    def _count_evaluations(self: Any) -> None:
        """Set the length of a warm-up that is counted in evaluations."""
        apply(self, WARMUP_EVALUATIONS_RULES)
        if self.warmup_evaluations:
            self.warmup_steps = self.warmup_evaluations * self.eval_steps
