"""The HuggingFace options that would have no effect in any trainer here, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefrl.options.fields import check_no_effect

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["check_ignored_options", "check_ignored_parts"]


@dataclass(frozen=True)
class _Ignored:
    unset: Any
    because: str
    remedy: str


_PRECISION = "evaluation runs in the precision of training"
_NO_LOGITS = "evaluation computes metrics as it goes and keeps no logits or labels"
_OWN_BATCHES = "prefrl, not accelerate, lays out and distributes batches"
_OWN_COLUMNS = "the data layer chooses the columns"

_OPTIONS = {
    "average_tokens_across_devices": _Ignored(
        True, "losses are always divided by the count over all devices", "Leave it True."
    ),
    "label_smoothing_factor": _Ignored(0.0, "the losses here are computed from token log-probs", "Leave it at 0."),
    "include_num_input_tokens_seen": _Ignored(
        "no", "the metric num_tokens counts every token that was processed", "Read num_tokens."
    ),
    "bf16_full_eval": _Ignored(False, _PRECISION, "Set bf16=True, or load the model with a dtype of bfloat16."),
    "fp16_full_eval": _Ignored(False, _PRECISION, "Set fp16=True, or load the model with a dtype of float16."),
    "prediction_loss_only": _Ignored(False, _NO_LOGITS, "Leave it False: evaluate() returns only metrics."),
    "eval_accumulation_steps": _Ignored(
        None, _NO_LOGITS, "Leave it None; per_device_eval_batch_size decides the memory of evaluation."
    ),
    "eval_do_concat_batches": _Ignored(True, _NO_LOGITS, "Leave it True."),
    "eval_use_gather_object": _Ignored(False, _NO_LOGITS, "Leave it False; metrics are over all processes."),
    "include_for_metrics": _Ignored([], _NO_LOGITS, "Leave it empty; a TrainerCallback reads the metrics."),
    "batch_eval_metrics": _Ignored(False, _NO_LOGITS, "Leave it False."),
    "label_names": _Ignored(None, _OWN_COLUMNS, "Leave it None."),
    "length_column_name": _Ignored("length", _OWN_COLUMNS, "Leave it out; rows are not grouped by length."),
    "dataloader_in_order": _Ignored(True, "the order of rows depends on the seed alone", "Leave it True."),
}
# Parts of accelerator_config.
_ACCELERATOR = {
    "split_batches": _Ignored(False, _OWN_BATCHES, "Set per_device_train_batch_size."),
    "dispatch_batches": _Ignored(None, _OWN_BATCHES, "Leave it out."),
    "even_batches": _Ignored(True, _OWN_BATCHES, "Leave it out; dataloader_drop_last skips uneven steps."),
    "use_seedable_sampler": _Ignored(True, "the order of rows depends on the seed alone", "Set data_seed."),
}


def check_ignored_options(config: Any) -> None:
    """Reject options that are set but would have no effect.

    Raises:
        ConfigError: Names the option, why it has no effect, and what to do.
    """
    for name, row in _OPTIONS.items():
        value = getattr(config, name)
        check_no_effect(name=name, value=value, unset=row.unset, because=row.because, remedy=row.remedy)


def check_ignored_parts(config: TrainingArguments) -> None:
    """Reject parts of `accelerator_config` that would have no effect.

    Raises:
        ConfigError: Names the part, why it has no effect, and what to do.
    """
    for name, row in _ACCELERATOR.items():
        value = getattr(config.accelerator_config, name)
        full = f"accelerator_config.{name}"
        check_no_effect(name=full, value=value, unset=row.unset, because=row.because, remedy=row.remedy)
