"""Names that users of transformers, peft, Ludwig and other libraries try, for messages alone."""

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
    "warmup_fraction": renamed("warmup_steps"),
    "reduce_on_plateau_patience": renamed("reduce_on_plateau_kwargs", "patience"),
    "reduce_on_plateau_rate": renamed("reduce_on_plateau_kwargs", "factor"),
    "reduce_eval_metric": renamed("reduce_on_plateau_kwargs", "metric"),
    "reduce_eval_split": not_there("a metric of reduce_on_plateau_kwargs of evaluations begins with eval_"),
    "validation_metric": renamed("metric_for_best_model"),
    "skip_all_evaluation": not_needed("eval_strategy is 'no' unless it is set"),
    "steps_per_checkpoint": renamed("save_steps"),
    "checkpoints_per_epoch": not_there("save_strategy='epoch' and save_epochs, the epochs between two checkpoints"),
    "evaluation_strategy": renamed("eval_strategy"),
    "no_cuda": renamed("use_cpu"),
    "tp_size": not_there("a server takes --tensor_parallel_size; for training see docs/distributed.md"),
    "upload_s3": not_there("output_dir is a local folder; push_to_hub uploads it"),
}
