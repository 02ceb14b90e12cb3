"""Names that users of peft, Ludwig and other libraries try, for messages alone."""

from __future__ import annotations

from prefrl.options.foreign.row import Row, if_set, not_needed, not_there, renamed

__all__ = ["OTHERS"]

OTHERS: dict[str, Row] = {
    **dict.fromkeys(
        ("model", "model_name", "model_path", "pretrained_model_name_or_path"), renamed("model_name_or_path")
    ),
    **dict.fromkeys(("dataset", "data", "dataset_path", "train_file", "data_path"), renamed("dataset_name")),
    **dict.fromkeys(("reward", "rewards", "reward_function", "reward_functions"), renamed("reward_funcs")),
    **dict.fromkeys(("lr", "learn_rate"), renamed("learning_rate")),
    **dict.fromkeys(("epochs", "num_epochs"), renamed("num_train_epochs")),
    **dict.fromkeys(("steps", "num_steps", "max_iters"), renamed("max_steps")),
    **dict.fromkeys(("output", "out_dir", "save_dir"), renamed("output_dir")),
    **dict.fromkeys(("grad_accum", "accumulation_steps"), renamed("gradient_accumulation_steps")),
    **dict.fromkeys(("resume", "resume_from"), renamed("resume_from_checkpoint")),
    **dict.fromkeys(("precision", "weight_dtype"), renamed("dtype")),
    **dict.fromkeys(("tracker", "logger", "log_with"), renamed("report_to")),
    **dict.fromkeys(("group_size", "num_return_sequences", "n_generations"), renamed("num_generations")),
    **dict.fromkeys(("rank", "lora_dim"), renamed("lora_r")),
    **dict.fromkeys(("lora", "use_lora"), renamed("use_peft")),
    "target_modules": renamed("lora_target_modules"),
    **dict.fromkeys(("chat_template", "template"), renamed("chat_template_path")),
    **dict.fromkeys(("column_mapping", "column_map", "rename_columns"), renamed("columns")),
    **dict.fromkeys(("system", "system_message"), renamed("system_prompt")),
    "gradient_clipping": renamed("max_grad_norm"),
    "scheduler": renamed("lr_scheduler_type"),
    "dry_run": not_there("max_steps=1 tries out a run; prefrl launch --dry_run prints its commands"),
    "block_wise": not_needed("8-bit optimizers of bitsandbytes always round in blocks"),
    "percentile_clipping": not_there("bitsandbytes has removed it; max_grad_norm clips gradients"),
    "early_stop": if_set("early_stopping_patience"),
    "early_stopping_threshold": renamed("early_stopping_kwargs", "threshold"),
    "validation_metric": renamed("metric_for_best_model"),
    "increase_batch_size_on_plateau_patience": renamed("increase_batch_size_kwargs", "patience"),
    "increase_batch_size_on_plateau_rate": renamed("increase_batch_size_kwargs", "rate"),
    "increase_batch_size_eval_metric": renamed("increase_batch_size_kwargs", "eval_metric"),
    "increase_batch_size_eval_split": renamed("increase_batch_size_kwargs", "eval_split"),
    "model_soup_top_k": renamed("model_soup_kwargs", "top_k"),
    "batch_size": renamed("per_device_train_batch_size"),
    "eval_batch_size": renamed("per_device_eval_batch_size"),
    "max_batch_size": renamed("auto_size_kwargs", "max_batch_size"),
    "clipglobalnorm": renamed("max_grad_norm"),
    "clipnorm": renamed("max_grad_norm"),
    "clipvalue": renamed("max_grad_value"),
    "lora_rank": renamed("lora_r"),
    "warmup_fraction": renamed("warmup_steps"),
    "reduce_on_plateau_patience": renamed("reduce_on_plateau_kwargs", "patience"),
    "reduce_on_plateau_rate": renamed("reduce_on_plateau_kwargs", "factor"),
    "reduce_eval_metric": renamed("reduce_on_plateau_kwargs", "metric"),
    "reduce_eval_split": not_there("a metric of reduce_on_plateau_kwargs of evaluations begins with eval_"),
    "skip_all_evaluation": not_needed("eval_strategy is 'no' unless it is set"),
    "steps_per_checkpoint": renamed("save_steps"),
    "checkpoints_per_epoch": not_there("save_strategy='epoch' and save_epochs, the epochs between two checkpoints"),
    "tp_size": not_there("a server takes --tensor_parallel_size; for training see docs/distributed.md"),
    "model_resume_path": renamed("resume_from_checkpoint"),
    "skip_save_progress": not_there("set save_strategy='no'"),
}
