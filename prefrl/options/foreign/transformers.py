"""Options of `TrainingArguments` in transformers 4 that transformers 5 no longer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefrl.options.foreign.row import Row, becomes, not_needed, not_there, renamed

__all__ = ["TRANSFORMERS"]

_PRECISION = "mixed precision is that of torch"


def _warmup(ratio: Any) -> Mapping[str, Any]:
    if not 0 <= float(ratio) < 1:
        raise ValueError("only a fraction below 1 is one of all steps")
    return {"warmup_steps": ratio}


TRANSFORMERS: dict[str, Row] = {
    "warmup_ratio": Row("renamed", "warmup_steps", ("warmup_steps",), _warmup),
    "evaluation_strategy": renamed("eval_strategy"),
    "per_gpu_train_batch_size": renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": renamed("per_device_eval_batch_size"),
    "no_cuda": renamed("use_cpu"),
    "push_to_hub_model_id": renamed("hub_model_id"),
    "push_to_hub_token": renamed("hub_token"),
    "adafactor": becomes("optim='adafactor'", lambda value: {"optim": "adafactor"} if value else {}, "optim"),
    "group_by_length": not_needed("nothing is padded; max_tokens_per_micro_batch balances tokens"),
    "overwrite_output_dir": not_needed("training starts anew unless resume_from_checkpoint is set"),
    "save_safetensors": not_needed("weights are always saved as safetensors"),
    "use_mps_device": not_needed("the device that is there is used"),
    "fp16_backend": not_needed(_PRECISION),
    "half_precision_backend": not_needed(_PRECISION),
    "fp16_opt_level": not_needed(_PRECISION),
    "logging_dir": not_there("set the variable TENSORBOARD_LOGGING_DIR, for example in env"),
}
