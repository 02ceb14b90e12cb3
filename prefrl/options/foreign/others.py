"""Names that users of transformers, peft and other libraries try, for messages alone."""

from __future__ import annotations

from prefrl.options.foreign.row import Row, not_needed, not_there, renamed

__all__ = ["OTHERS"]

_EARLY = "add transformers.EarlyStoppingCallback to callbacks, with load_best_model_at_end=True"

OTHERS: dict[str, Row] = {
    "early_stop": not_there(_EARLY),
    "early_stopping_patience": not_there(_EARLY),
    "clipglobalnorm": renamed("max_grad_norm"),
    "clipnorm": renamed("max_grad_norm"),
    "clipvalue": renamed("max_grad_value"),
    "lora_rank": renamed("lora_r"),
    "group_by_length": not_needed("nothing is padded; max_tokens_per_micro_batch balances tokens"),
    "warmup_ratio": renamed("warmup_steps"),
    "evaluation_strategy": renamed("eval_strategy"),
    "no_cuda": renamed("use_cpu"),
    "tp_size": not_there("a server takes --tensor_parallel_size; for training see docs/distributed.md"),
    "upload_s3": not_there("output_dir is a local folder; push_to_hub uploads it"),
}
