"""Names that users of transformers, peft and other libraries try, for messages alone."""

from __future__ import annotations

from prefrl.options.foreign.row import Row, if_set, not_needed, not_there, renamed

__all__ = ["OTHERS"]

OTHERS: dict[str, Row] = {
    "early_stop": if_set("early_stopping_patience"),
    "early_stopping_threshold": renamed("early_stopping_kwargs", "threshold"),
    "validation_metric": renamed("metric_for_best_model"),
    "increase_batch_size_on_plateau_patience": renamed("increase_batch_size_kwargs", "patience"),
    "increase_batch_size_on_plateau_rate": renamed("increase_batch_size_kwargs", "rate"),
    "increase_batch_size_eval_metric": renamed("increase_batch_size_kwargs", "eval_metric"),
    "increase_batch_size_eval_split": renamed("increase_batch_size_kwargs", "eval_split"),
    "model_soup_top_k": renamed("model_soup_kwargs", "top_k"),
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
