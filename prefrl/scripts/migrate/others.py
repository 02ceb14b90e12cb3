"""What names of axolotl and ms-swift, and names that belong to no library in particular, are here."""

from __future__ import annotations

from prefrl.scripts.migrate.rows import LAUNCH, Counterpart, if_set, instead, not_needed, not_there, renamed

AXOLOTL: dict[str, Counterpart] = {
    "base_model": renamed("model_name_or_path"),
    "sequence_len": renamed("max_length"),
    "micro_batch_size": renamed("per_device_train_batch_size"),
    "num_epochs": renamed("num_train_epochs"),
    "optimizer": renamed("optim"),
    "lr_scheduler": renamed("lr_scheduler_type"),
    "sample_packing": renamed("packing"),
    "eval_sample_packing": renamed("eval_packing"),
    "pad_to_sequence_len": not_needed("batches are laid out without padding"),
    "flash_attention": instead("set attn_implementation='flash_attention_2'"),
    "sdp_attention": instead("set attn_implementation='sdpa'"),
    "train_on_inputs": instead("set completion_only_loss=False to train on prompts, too"),
    "val_set_size": renamed("test_split_size"),
    "rl": instead("choose the command: prefrl dpo, kto, orpo or grpo"),
    "kd_trainer": instead("use prefrl distillation"),
    "kd_temperature": renamed("temperature"),
    "kd_beta": renamed("beta"),
    "kd_online_server_base_url": renamed("teacher_server_base_url"),
    "kd_online_server_model": renamed("teacher_server_kwargs", "model"),
    "kd_online_timeout": renamed("teacher_server_kwargs", "request_timeout"),
    "kd_online_topk": renamed("teacher_server_kwargs", "top_k"),
    **dict.fromkeys(("kd_alpha", "kd_ce_alpha"), not_there("the loss is the divergence alone")),
    "kd_normalize_topk": not_needed("all tokens that are left out count as one"),
    "rl_beta": renamed("beta"),
    "adapter": instead("use use_peft=True for LoRA; add load_in_4bit=True for QLoRA"),
    "lora_target_linear": instead("set lora_target_modules=all-linear"),
    "peft_use_rslora": renamed("use_rslora"),
    "peft_use_dora": renamed("use_dora"),
    "unfrozen_parameters": instead("use freeze, which names the parameters that are not trained"),
    "saves_per_epoch": instead("set save_strategy='epoch' and save_epochs"),
    "evals_per_epoch": instead("set eval_strategy='epoch' and eval_epochs"),
    "neftune_noise_alpha": not_there("noise on embeddings is not supported"),
    "wandb_project": instead("set the variable WANDB_PROJECT, for example in env"),
    "special_tokens": instead("set eos_token and pad_token"),
    "chat_template_jinja": instead("write it into a file and set chat_template_path"),
    "default_system_message": renamed("system_prompt"),
    "field_messages": instead("set columns={messages: ...}, for one dataset or for each of datasets"),
}

# Options of distillation.
MS_SWIFT: dict[str, Counterpart] = {
    "rlhf_type": instead("choose the command: prefrl dpo, kto, orpo, cpo, reward, ppo, grpo, or distillation for gkd"),
    "teacher_model": renamed("teacher_model_name_or_path"),
    "teacher_adapters": instead("merge them into the teacher with prefrl merge"),
    "teacher_model_type": not_needed("the teacher's config says it"),
    "teacher_deepspeed": not_needed("a teacher is partitioned like the student"),
    "offload_teacher_model": instead("partition it with ZeRO-3 or FSDP2; see docs/distributed.md"),
    "teacher_model_server": renamed("teacher_server_base_url"),
    "gkd_logits_topk": renamed("teacher_server_kwargs", "top_k"),
    "sft_alpha": not_there("the loss is the divergence alone"),
}


OTHERS: dict[str, Counterpart] = {
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
    "dry_run": instead("use max_steps=1 to try out a run, or prefrl launch --dry_run to print its commands"),
    "block_wise": not_needed("8-bit optimizers of bitsandbytes always round in blocks"),
    "percentile_clipping": instead("use max_grad_norm to clip gradients; bitsandbytes has removed it"),
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
    "reduce_eval_split": instead(
        "set the key metric of reduce_on_plateau_kwargs; metrics of evaluations begin with eval_"
    ),
    "skip_all_evaluation": not_needed("eval_strategy is 'no' unless it is set"),
    "steps_per_checkpoint": renamed("save_steps"),
    "checkpoints_per_epoch": instead("set save_strategy='epoch' and save_epochs, the epochs between two checkpoints"),
    "tp_size": instead("give a server --tensor_parallel_size; for training, see docs/distributed.md"),
    "model_resume_path": renamed("resume_from_checkpoint"),
    "skip_save_progress": instead("set save_strategy='no'"),
    # Names of schedules' hyperparameters, of parallelism, and of what reads none of these here.
    **dict.fromkeys(("lr_scheduler", "learning_rate_scheduler"), renamed("lr_scheduler_type")),
    **{
        name: renamed("lr_scheduler_kwargs", name)
        for name in ("t_0", "t_mult", "eta_min", "pct_start", "div_factor", "final_div_factor", "staircase")
    },
    "polynomial_power": instead("set the key 'power' of lr_scheduler_kwargs, with lr_scheduler_type='polynomial'"),
    "inverse_sqrt_warmup_steps": renamed("warmup_steps"),
    "wsd_stable_fraction": instead("set the keys warmup_fraction and decay_fraction of lr_scheduler_kwargs"),
    "decay": instead("choose the decay by lr_scheduler_type, or set weight_decay"),
    "eps": instead("set adam_epsilon for the optimizer, or epsilon for the clipping of the ratio"),
    "momentum_decay": instead("set optim='nadam' and optim_args='momentum_decay=0.004'"),
    "clip_value": renamed("max_grad_value"),
    **dict.fromkeys(("cp_size", "sp_size"), instead("see sequence parallelism in docs/distributed.md")),
    **dict.fromkeys(("pp_size", "pp_dynamic_shape"), not_there("pipeline parallelism is not supported")),
    "ep_size": instead(LAUNCH),
    "fsdp_size": instead(LAUNCH),
    "min_num_params": not_there("FSDP2 shards each layer by itself"),
    **dict.fromkeys(
        ("param_offload", "optimizer_offload"), instead("use accelerate_config=zero3_offload; see docs/distributed.md")
    ),
    "attention_backend": renamed("attn_implementation"),
    "enable_fp4": instead("use fp8=True to compute in 8 bits, or load_in_4bit=True to keep frozen weights in 4"),
    "n_init_replicas": instead("set num_processes for training; each prefrl vllm-serve is one replica"),
    "do_sample": instead("completions of a training are always sampled; set temperature"),
    "enable_tools": instead("give the trainer tools"),
    # What plays an episode, in slime, AReaL and TRL.
    **dict.fromkeys(
        ("custom_generate_function_path", "rollout_function_path", "workflow", "agent_workflow"),
        instead("set agent to a function or a command that asks the policy over a chat API; see docs/agents.md"),
    ),
    **dict.fromkeys(
        ("rollout_worker", "harness", "harness_adapter", "harness_session_factory"),
        instead("set agent, which starts the harness with client.base_url and client.api_key; see docs/agents.md"),
    ),
    "custom_rm_path": renamed("reward_funcs"),
    "rollout_reward_fn": instead("return the reward from the agent, or set reward_funcs"),
    **dict.fromkeys(
        ("lossless_capture", "fork_threshold_tokens"),
        not_needed("a rewritten history is a row of its own, and always trained on"),
    ),
    "enable_multi_turn": instead("give the trainer tools or an environment; max_turns bounds the turns"),
    "kl_ctrl": instead("set beta, the constant weight of the KL term"),
    "n_generation": renamed("num_generations"),
    "timestamp": instead("choose another output_dir for each run"),
    **dict.fromkeys(
        ("buffer_length", "penalty_factor"),
        instead("use the reward soft_overlong_punishment_reward(max_completion_len=..., soft_punish_cache=...)"),
    ),
    "model_max_length": instead("set max_length; online trainers have max_prompt_length and max_completion_length"),
    "completions_per_sample": renamed("num_generations"),
    "max_num_ppo_steps": renamed("max_steps"),
    "lr_policy": renamed("learning_rate"),
    "lr_value": instead("set critic_learning_rate of prefrl ppo"),
    "policy_model": renamed("model_name_or_path"),
    "value_model": instead("use prefrl ppo, whose critic is a head or a model of its own; see critic"),
    "grader": instead("give the grader as one of reward_funcs"),
    "samples_per_batch": instead(
        "set steps_per_generation; a generation batch has per_device_train_batch_size * processes * "
        "steps_per_generation completions"
    ),
    "samples_per_mini_batch": instead(
        "set gradient_accumulation_steps; an optimizer step has per_device_train_batch_size * processes * "
        "gradient_accumulation_steps completions"
    ),
    "save_model_safely": not_needed("a checkpoint gets its name only when it is complete"),
    "max_tokens": instead("set max_completion_length for completions, or max_length for rows"),
    "max_seq_len": renamed("max_length"),
    "batch_size_per_device": renamed("per_device_train_batch_size"),
    "wandb": instead("set report_to=wandb"),
    "gpus": renamed("num_processes"),
}
