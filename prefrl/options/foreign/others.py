"""Names that users of transformers, peft, Ludwig and other libraries try, for messages alone."""

from __future__ import annotations

from prefrl.options.foreign.row import Row, not_needed, not_there, renamed

__all__ = ["OTHERS"]

OTHERS: dict[str, Row] = {
    "early_stop": renamed("early_stopping_patience"),
    "block_wise": not_needed("8-bit optimizers of bitsandbytes always round in blocks"),
    "percentile_clipping": not_there("bitsandbytes has removed it; max_grad_norm clips gradients"),
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
