"""Options of steps: their schedules, sizes, evaluations, precision, tokenizer and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.checkpoint import ProfileParams
from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.optimizers import OPTIMIZERS
from prefrl.options.params import Params
from prefrl.options.rules import apply
from prefrl.options.schedule import SCHEDULE_FACTS, PlateauParams, WeightDecayParams
from prefrl.options.schedule_rules import (
    WARMUP_EVALUATIONS_RULES,
    own_options,
    takes_warmup,
)
from prefrl.options.size import AutoSizeParams
from prefrl.options.types import BatchSize

__all__ = ["TrainingOptions"]

_Epochs = Annotated[float, Gt(0)]
# Schedules of transformers that are independent of the number of steps.
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


@dataclass(init=False, repr=False, eq=False)
class TrainingOptions:
    """Schedules, sizes, evaluations, precision, tokenizer and optimizer; see also docs/schedules.md."""

    lr_scheduler_type: str = opt(
        "linear",
        f"Schedule of the learning rate: one of transformers, or {', '.join(SCHEDULE_FACTS)}.",
    )
    lr_scheduler_kwargs: KwargsValue = kwargs(
        "Hyperparameters of lr_scheduler_type, see docs/schedules.md; for schedules of transformers, their arguments.",
        {name: row.params for name, row in SCHEDULE_FACTS.items()},
        switch="lr_scheduler_type",
        others_elsewhere=True,
    )
    warmup_steps: float = opt(
        0, "Steps in which the learning rate rises to its full value; a value below 1 is a fraction of all steps."
    )
    lr_decay_steps: Annotated[int, Ge(1)] | None = opt(
        None,
        "Step at which the schedule ends; after it, the learning rate is constant. None: the last step of training.",
    )
    warmup_start_factor: Annotated[float, Ge(0), Le(1)] | None = opt(
        None,
        "Fraction of learning_rate at which the warm-up begins; None: 0, unless the schedule has another default.",
    )
    warmup_evaluations: Annotated[int, Ge(0)] = opt(
        0, "Set warmup_steps to this multiple of eval_steps; needs eval_strategy='steps'. 0: off."
    )
    learning_rate_scaling: Literal["constant", "sqrt", "linear"] = opt(
        "constant", "Multiply learning rates by 1, the square root of the number of processes, or this number."
    )
    reduce_on_plateau: Annotated[int, Ge(0)] = opt(
        0,
        "Maximum number of times that the learning rate is reduced, on top of its schedule, when a metric stops "
        "improving; 0: never.",
    )
    reduce_on_plateau_kwargs: KwargsValue = kwargs(
        "Hyperparameters of reduce_on_plateau.",
        {True: PlateauParams},
        switch="reduces_on_plateau",
        label="reduce_on_plateau",
        off="reduce_on_plateau=0. Set it to the number of times that the learning rate may be reduced.",
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = opt(
        "constant", "How the weight decay changes during training: not at all, linearly, or along half a cosine."
    )
    weight_decay_schedule_kwargs: KwargsValue = kwargs(
        "Hyperparameters of weight_decay_schedule.",
        {"linear": WeightDecayParams, "cosine": WeightDecayParams},
        switch="weight_decay_schedule",
    )
    max_tokens_per_micro_batch: Annotated[int, Ge(1)] | None = opt(
        None,
        "Split the rows of a step into micro-batches of at most this many tokens (a prompt counts once for its group) "
        "instead of a fixed number of rows. 'auto': found by trial, see docs/automatic_sizes.md. Changes memory and "
        "speed, never the update.",
        decides=False,
    )
    effective_batch_size: BatchSize | None = opt(
        None,
        "Rows of an optimizer step: per_device_train_batch_size * gradient_accumulation_steps * processes. "
        "Whichever of the two options is 'auto' is derived from it. None: it is derived from them.",
        decides=False,
    )
    auto_size_kwargs: KwargsValue = kwargs("How sizes that are 'auto' are determined.", AutoSizeParams, decides=False)
    eval_epochs: _Epochs = opt(
        1.0,
        "With eval_strategy='epoch': epochs between evaluations; 0.25 means four per epoch, 2 means one every two "
        "epochs.",
        decides=False,
    )
    save_epochs: _Epochs = opt(
        1.0,
        "With save_strategy='epoch': epochs between checkpoints; 0.25 means four per epoch.",
        decides=False,
    )
    max_eval_samples: Annotated[int, Ge(1)] | None = opt(
        None,
        "Evaluate only this many rows of a dataset, from its start; None: all of them.",
        decides=False,
    )
    evaluate_training_set: bool = opt(
        False,
        "Evaluate the training dataset, too, in the same way; its metrics are named eval_train_...",
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
    chat_template_path: str | None = opt(
        None,
        "Chat template: a file with a Jinja template; chatml, llama-3, gemma, mistral or zephyr; or a model whose "
        "template is copied. A name or a model also sets eos_token, and adds tokens in SFT and reward models. None: "
        "the tokenizer's own.",
    )
    eos_token: str | None = opt(
        None, "Token of the vocabulary that ends texts; None: the one of chat_template_path, or the tokenizer's own."
    )
    pad_token: str | None = opt(
        None,
        "Padding token of the saved tokenizer; training itself needs none. None: the tokenizer's own, or its "
        "eos_token.",
    )
    optim: str = opt(
        "adamw_torch_fused",
        f"Optimizer: one of transformers, or {', '.join(OPTIMIZERS)}.",
    )
    learning_rates: dict[str, float] | str | None = opt(
        None,
        "Learning rates of some parameters: a mapping from regular expressions to rates, all with the same "
        "schedule. The first expression that matches part of a parameter's name applies; parameters that none "
        "matches use learning_rate. JSON on the command line.",
    )
    max_grad_value: Annotated[float, Gt(0)] | None = opt(
        None, "Clip each element of the gradients to this absolute value, after max_grad_norm. None: no clipping."
    )
    regularization_type: Literal["l1", "l2", "l1_l2"] | None = opt(
        None,
        "Penalty that is added to the loss of each optimizer step: regularization_lambda times the sum of absolute "
        "values (l1) or squares (l2) of all trained weights, or both.",
    )
    regularization_lambda: Annotated[float, Ge(0)] = opt(0.0, "Weight of the penalty of regularization_type.")

    plateau_params = ParamsOf("reduce_on_plateau_kwargs", PlateauParams)
    schedule_params = ParamsOf("lr_scheduler_kwargs", Params)
    weight_decay_params = ParamsOf("weight_decay_schedule_kwargs", WeightDecayParams)
    auto_size_params = ParamsOf("auto_size_kwargs", AutoSizeParams)
    profile_params = ParamsOf("profile_kwargs", ProfileParams)

    @property
    def _all(self) -> Any:
        """This config, with HuggingFace's options."""
        return self

    @property
    def set_on_gradients(self) -> list[str]:
        """The options that are set and act on gradients between the backward pass and the update."""
        return [name for name in ("max_grad_value", "regularization_type") if getattr(self, name) is not None]

    @property
    def _schedule_name(self) -> str:
        return str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))

    @property
    def reduces_on_plateau(self) -> bool:
        """Whether the learning rate is reduced when a metric stops improving."""
        return self.reduce_on_plateau > 0

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is more than one of transformers."""
        return bool(own_options(self)) or self._schedule_name in SCHEDULE_FACTS

    @property
    def depends_on_length(self) -> bool:
        """Whether learning rate or weight decay of a step depend on the number of steps of the training."""
        if self.lr_decay_steps is not None:
            return False
        own = SCHEDULE_FACTS.get(self._schedule_name)
        knows_length = self._schedule_name not in _ENDLESS if own is None else own.knows_length
        return knows_length or 0 < self.warmup_steps < 1 or self.weight_decay_schedule != "constant"

    @property
    def takes_warmup(self) -> bool:
        """Whether the schedule reads `warmup_steps`."""
        return takes_warmup(self)

    def _count_evaluations(self) -> None:
        """Set the length of a warm-up that is counted in evaluations."""
        apply(self, WARMUP_EVALUATIONS_RULES)
        if self.warmup_evaluations:
            self.warmup_steps = self.warmup_evaluations * self._all.eval_steps
