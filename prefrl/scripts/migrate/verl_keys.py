"""The keys of verl's ppo_trainer.yaml. A row stands for a section, too: for all keys in it that have no row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefrl.scripts.migrate.rows import (
    LAUNCH,
    Counterpart,
    asked,
    becomes,
    betas,
    column,
    flag,
    if_set,
    if_set_key,
    if_true,
    instead,
    layers,
    loggers,
    not_needed,
    not_there,
    renamed,
    sampled_top_k,
    server,
    together,
    unless,
)

_PYTHON = "give the trainer a dataset in Python"
_FOLLOWS = "passes without gradients choose their own size"
# The estimate of the KL.
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_ESTIMATORS |= {"kl+": "k1+", "k1+": "k1+", "abs+": "abs+", "low_var_kl+": "k3+", "k3+": "k3+", "full": "full"}
# Classes of torch.optim and bitsandbytes.optim, and Megatron's name.
_OPTIMIZERS = {
    **{"AdamW": "adamw_torch_fused", "Adam": "adam", "SGD": "sgd", "AdamW8bit": "adamw_8bit"},
    **{"PagedAdamW8bit": "paged_adamw_8bit", "adam": "adamw_torch_fused"},
}
_REDUCTIONS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence_token"},
    "clip_cov": {"loss_type": "clip_cov"},
    "kl_cov": {"loss_type": "kl_cov"},
    "gpg": {"loss_type": "gpg"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "geo_mean": {"loss_type": "gmpo"},
}
_DECAYS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
_DECAYS |= {"inverse_square_root": "inverse_sqrt", "WSD": "wsd"}
# The algorithm that an advantage estimator stands for is the name of the command.
_ESTIMATORS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gae", "grpo", "rloo", "reinforce_plus_plus")},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    **{
        name: {"advantage_estimator": name} for name in ("remax", "opo", "grpo_passk", "gpg", "optimal_token_baseline")
    },
}


def _files(value: Any) -> Mapping[str, Any]:
    paths = [value] if isinstance(value, str) else list(value)
    return {"dataset_name": paths[0]} if len(paths) == 1 else {"datasets": [{"path": path} for path in paths]}


def _lora(value: Any) -> Mapping[str, Any]:
    return {"use_peft": True, "lora_r": value} if value else {}


def _every(what: str) -> Any:
    def convert(value: Any) -> Mapping[str, Any]:
        return (
            {f"{what}_strategy": "steps", f"{what}_steps": value}
            if value and value > 0
            else {f"{what}_strategy": "no"}
        )

    return convert


def _reward(value: Any) -> Mapping[str, Any]:
    return {} if value is None else {"reward_funcs": [f"{value}:compute_score"]}


def _saved(value: Any) -> Mapping[str, Any]:
    contents = {value} if isinstance(value, str) else {*value}
    if not {"optimizer", "extra"} & contents:
        return {"save_only_model": True}
    if not {"model", "extra"} <= contents:
        raise ValueError("a checkpoint that holds more than the model has the model and the state of the run")
    return {} if "optimizer" in contents else {"checkpoint_kwargs": {"save_optimizer": False}}


def _loaded(value: Any) -> Mapping[str, Any]:
    contents = {value} if isinstance(value, str) else {*value}
    if not {"model", "extra"} <= contents:
        raise ValueError("start a new training with the folder of the checkpoint as its model")
    return {} if "optimizer" in contents else {"checkpoint_kwargs": {"load_optimizer": False}}


def _overridden(value: Any) -> Mapping[str, Any]:
    if any((value.get("moe_config") or {}).values()):
        raise ValueError("moe_config is of Megatron-LM's models")
    options = {name: entry for name, entry in value.items() if name not in ("model_config", "moe_config")}
    options |= value.get("model_config") or {}
    return {"model_init_kwargs": options} if options else {}


_DATA: dict[str, Counterpart] = {
    "train_files": becomes("dataset_name, or several paths in datasets", _files, "dataset_name"),
    "val_files": together(
        "datasets: [{path: parquet, data_files: {train: ..., test: ...}}] with train_files", "datasets"
    ),
    "tokenizer": if_set("tokenizer_name_or_path"),
    "prompt_key": column("prompt"),
    "image_key": renamed("image_key"),
    "video_key": not_there("videos are not supported"),
    "reward_fn_key": not_needed("rewards get every column of the dataset by its name"),
    "train_batch_size": together(
        "steps_per_generation; verl counts prompts, but per_device_train_batch_size * processes * "
        "steps_per_generation counts completions",
        "steps_per_generation",
    ),
    "val_batch_size": not_needed("per_device_eval_batch_size decides the memory of evaluation"),
    "max_response_length": renamed("max_completion_length"),
    "filter_overlong_prompts_workers": renamed("dataset_num_proc"),
    "truncation": asked("truncation_mode", {"error": "error", "left": "keep_end", "right": "keep_start"}),
    "shuffle": renamed("shuffle_dataset"),
    "seed": if_set("data_seed"),
    "train_max_samples": instead("name the rows: --dataset_train_split 'train[:1000]'"),
    "apply_chat_template_kwargs": renamed("chat_template_kwargs"),
    "dataloader_num_workers": not_needed("prompts are tokenized once, at the start"),
    "return_raw_input_ids": not_needed("reward models apply their own chat template to the messages"),
    "return_raw_chat": not_needed("rewards get the messages"),
    "return_full_prompt": not_needed("rewards get the prompt"),
    "return_multi_modal_inputs": not_needed("the trainer passes images on"),
    "val_max_samples": if_set("max_eval_samples"),
    "validation_shuffle": not_needed("evaluation keeps the order of the dataset"),
    "use_shm": not_needed("datasets are memory-mapped"),
    "custom_cls": instead(_PYTHON),
    "sampler": instead(_PYTHON + ", in the order that you want, with shuffle_dataset=False"),
    "datagen": instead(_PYTHON),
}
_MODEL: dict[str, Counterpart] = {
    "path": renamed("model_name_or_path"),
    "enable_gradient_checkpointing": renamed("gradient_checkpointing"),
    "enable_activation_offload": renamed("activation_offloading"),
    "use_remove_padding": not_needed("batches are laid out without padding"),
    "use_fused_kernels": not_needed("the logits of all tokens are never in memory"),
    "fused_kernel_options": not_needed("the logits of all tokens are never in memory"),
    "use_liger": renamed("use_liger_kernel"),
    "lora_rank": becomes("lora_r with use_peft=True", _lora, "lora_r"),
    "target_modules": layers(),
    "exclude_modules": instead("list the layers in lora_target_modules"),
    "override_config": becomes("model_init_kwargs", _overridden, "model_init_kwargs"),
    "custom_chat_template": if_set("chat_template_path"),
    "external_lib": instead("import it in a script of your own"),
    "use_shm": not_needed("weights are memory-mapped"),
}
_ACTOR: dict[str, Counterpart] = {
    "strategy": together("accelerate_config='fsdp2' on several processes"),
    "fsdp_config": instead(LAUNCH),
    "megatron": instead("use DeepSpeed ZeRO or FSDP2, which shard weights; see docs/distributed.md"),
    "ulysses_sequence_parallel_size": instead("see sequence parallelism in docs/distributed.md"),
    "ppo_mini_batch_size": together(
        "gradient_accumulation_steps; verl counts prompts, but per_device_train_batch_size * processes * "
        "gradient_accumulation_steps counts completions",
        "gradient_accumulation_steps",
    ),
    "ppo_micro_batch_size": together("per_device_train_batch_size, of one process", "per_device_train_batch_size"),
    "ppo_micro_batch_size_per_gpu": renamed("per_device_train_batch_size"),
    "use_dynamic_bsz": together("max_tokens_per_micro_batch, a number or 'auto'", "max_tokens_per_micro_batch"),
    "ppo_max_token_len_per_gpu": renamed("max_tokens_per_micro_batch"),
    "clip_ratio": renamed("epsilon"),
    "clip_ratio_low": renamed("epsilon"),
    "clip_ratio_high": renamed("epsilon_high"),
    "clip_ratio_c": renamed("delta"),
    "loss_agg_mode": asked("loss_type", _REDUCTIONS),
    "loss_scale_factor": not_needed("loss_type='dr_grpo' divides by max_completion_length"),
    "policy_loss.loss_mode": becomes(
        "loss_type; gspo also needs importance_sampling_level='sequence_token'",
        lambda value: LOSSES[value],
        "loss_type",
    ),
    "policy_loss.clip_cov_ratio": renamed("loss_kwargs", "ratio"),
    "policy_loss.clip_cov_lb": renamed("loss_kwargs", "lb"),
    "policy_loss.clip_cov_ub": renamed("loss_kwargs", "ub"),
    "policy_loss.kl_cov_ratio": renamed("loss_kwargs", "ratio"),
    "policy_loss.ppo_kl_coef": renamed("loss_kwargs", "coef"),
    "tau_pos": renamed("loss_kwargs", "temperature_pos"),
    "tau_neg": renamed("loss_kwargs", "temperature_neg"),
    "entropy_coeff": renamed("entropy_coef"),
    "use_kl_loss": together("beta > 0, and kl_in='loss'", "kl_in"),
    "kl_loss_coef": renamed("beta"),
    "kl_loss_type": asked("kl_estimator", KL_ESTIMATORS),
    "ppo_epochs": renamed("num_iterations"),
    "shuffle": becomes(
        "shuffle_minibatches=True, which changes the order of minibatches and keeps the rows of each",
        lambda value: {"shuffle_minibatches": True} if value else {},
        "shuffle_minibatches",
    ),
    "data_loader_seed": if_set("data_seed"),
    "grad_clip": renamed("max_grad_norm"),
    "use_torch_compile": not_needed("torch_compile=True compiles the layers; entropies need no compiler here"),
    "use_remove_padding": not_needed("batches are laid out without padding"),
    "use_fused_kernels": not_needed("the logits of all tokens are never in memory"),
    "entropy_from_logits_with_chunking": not_needed("the logits of all tokens are never in memory"),
    "entropy_checkpointing": not_needed("the logits of all tokens are never in memory"),
    "optim.lr": renamed("learning_rate"),
    "optim.lr_warmup_steps": if_set("warmup_steps"),
    "optim.lr_warmup_steps_ratio": if_true(
        "warmup_steps", "warmup_steps, which is a fraction of all steps if it is below 1"
    ),
    "optim.weight_decay": renamed("weight_decay"),
    "optim.betas": betas(),
    "optim.warmup_style": asked("lr_scheduler_type", {"constant": "constant_with_warmup", "cosine": "cosine"}),
    "optim.lr_scheduler_type": asked("lr_scheduler_type", {"constant": "constant_with_warmup", "cosine": "cosine"}),
    "optim.min_lr_ratio": instead(
        "use lr_scheduler_type='cosine_with_min_lr' and lr_scheduler_kwargs={'min_lr_rate': ...}"
    ),
    "optim.num_cycles": becomes(
        "num_cycles in lr_scheduler_kwargs",
        lambda value: {} if value == 0.5 else {"lr_scheduler_kwargs": {"num_cycles": value}},
        "lr_scheduler_kwargs",
    ),
    "optim.total_training_steps": not_needed("the schedule ends with the training"),
    "optim.lr_warmup_init": instead("use warmup_start_factor, its share of learning_rate"),
    "optim.lr_decay_steps": if_set("lr_decay_steps"),
    "optim.lr_decay_style": asked("lr_scheduler_type", _DECAYS),
    "optim.lr_wsd_decay_style": instead(
        "use lr_scheduler_type='wsd' and lr_scheduler_kwargs={'decay_type': ...}; minus_sqrt is '1-sqrt'"
    ),
    "optim.lr_wsd_decay_steps": instead(
        "use lr_scheduler_type='wsd' and lr_scheduler_kwargs={'decay_fraction': ...}, a share of all steps"
    ),
    "optim.min_lr": instead("use lr_scheduler_type='cosine_with_min_lr' and lr_scheduler_kwargs={'min_lr': ...}"),
    "optim.weight_decay_incr_style": unless("constant", "weight_decay_schedule"),
    "optim.use_checkpoint_opt_param_scheduler": not_needed(
        "a resumed run continues its schedule; allow_resume_changes names options that may differ"
    ),
    "optim.clip_grad": renamed("max_grad_norm"),
    "optim.optimizer": asked("optim", _OPTIMIZERS),
    "optim.optimizer_impl": not_needed("optim also names the implementation"),
    "optim.override_optimizer_config": instead("use optim_args and adam_epsilon; see docs/optimizers.md"),
    "optim": instead("see the options of transformers.TrainingArguments"),
    "checkpoint.save_contents": becomes(
        "checkpoint_kwargs={'save_optimizer': False} if optimizer is missing, and save_only_model=True for the model "
        "only; hf_model is always saved, under ZeRO-3 and FSDP2 with the key 'export_weights'",
        _saved,
        "checkpoint_kwargs",
    ),
    "checkpoint.load_contents": becomes(
        "checkpoint_kwargs={'load_optimizer': False} if optimizer is missing; to load only the model, give its folder "
        "as the model of a new training",
        _loaded,
        "checkpoint_kwargs",
    ),
    "checkpoint.async_save": renamed("save_in_background"),
    "checkpoint": not_needed("checkpoints hold everything that a resumed run needs"),
    "profiler.enable": renamed("profile"),
    "profiler.ranks": renamed("profile_kwargs", "ranks"),
    "profiler.all_ranks": becomes(
        "the key 'ranks' of profile_kwargs: None",
        lambda value: {"profile_kwargs": {"ranks": None}} if value else {},
        "profile_kwargs",
    ),
    "profiler": instead("use profile=True and profile_kwargs; see docs/profiling.md"),
}
_ROLLOUT: dict[str, Counterpart] = {
    "name": becomes(
        "use_vllm, which is False for hf; SGLang is not supported",
        lambda value: {"use_vllm": {"vllm": True, "hf": False}[value]},
        "use_vllm",
    ),
    "mode": not_needed("requests to servers are asynchronous"),
    "top_k": becomes("top_k, where 0 means all tokens", lambda value: {"top_k": max(value, 0)}),
    "n": renamed("num_generations"),
    "prompt_length": not_needed("it is max_prompt_length"),
    "response_length": not_needed("it is max_completion_length"),
    "do_sample": not_needed("training samples; temperature_eval=0 decodes greedily"),
    "ignore_eos": renamed("ignore_eos"),
    "calculate_log_probs": not_needed("samplers always report log-probs"),
    "tensor_model_parallel_size": server("--tensor_parallel_size"),
    "gpu_memory_utilization": server("--gpu_memory_utilization"),
    "dtype": server("--dtype"),
    "enforce_eager": server("--enforce_eager"),
    "max_model_len": server("--max_model_len"),
    "max_num_batched_tokens": server("--max-num-batched-tokens"),
    "max_num_seqs": server("--max-num-seqs"),
    "enable_chunked_prefill": server("--enable-chunked-prefill"),
    "engine_kwargs.sglang": instead("use a vLLM server, with use_vllm=True; SGLang is not supported"),
    "engine_kwargs": server("give options of vLLM to prefrl vllm-serve itself, which passes them on"),
    "cudagraph_capture_sizes": server("give options of vLLM to prefrl vllm-serve itself, which passes them on"),
    "disable_log_stats": server("--disable-log-stats"),
    "over_sample_rate": instead(
        "use dynamic_sampling=True, which replaces prompts whose completions all have one reward"
    ),
    "multi_stage_wake_up": not_needed("a server has its own GPUs"),
    "update_weights_bucket_megabytes": not_needed("weights are sent in buckets of a fixed size"),
    "trace": not_needed("the folder completions in output_dir has every rollout"),
    "skip_rollout": instead("use prefrl replay, which computes a step again from its rollouts"),
    "skip_dump_dir": instead("use prefrl replay, which computes a step again from its rollouts"),
    "layered_summon": not_needed("weights are gathered layer by layer"),
    "load_format": not_needed("weights are sent before the first generation"),
    "free_cache_engine": not_needed("a server has its own GPUs"),
    "log_prob_micro_batch_size": not_needed(_FOLLOWS),
    "log_prob_micro_batch_size_per_gpu": not_needed(_FOLLOWS),
    "log_prob_use_dynamic_bsz": not_needed(_FOLLOWS),
    "log_prob_max_token_len_per_gpu": not_needed(_FOLLOWS),
    "val_kwargs.temperature": renamed("temperature_eval"),
    "val_kwargs.n": renamed("num_generations_eval"),
    "val_kwargs.do_sample": not_needed("temperature_eval=0 decodes greedily"),
    "val_kwargs.top_p": if_set_key("eval_sampling_kwargs", "top_p"),
    "val_kwargs.top_k": sampled_top_k(),
    "val_kwargs": instead(
        "use eval_sampling_kwargs, with the keys top_p, top_k, min_p, repetition_penalty and max_completion_length"
    ),
    "multi_turn.max_assistant_turns": if_set("max_turns"),
    "multi_turn": instead("set environment or tools; see docs/environments.md"),
    "agent": instead("set agent, tools or environment; see docs/agents.md and docs/environments.md"),
}
_CRITIC: dict[str, Counterpart] = {
    "optim.lr": renamed("critic_learning_rate"),
    "optim.weight_decay": renamed("critic_optim_kwargs", "weight_decay"),
    "optim.betas": becomes(
        "the keys adam_beta1 and adam_beta2 of critic_optim_kwargs",
        lambda value: {"critic_optim_kwargs": {"adam_beta1": value[0], "adam_beta2": value[1]}},
        "critic_optim_kwargs",
    ),
    "optim.lr_warmup_steps": becomes(
        "the key 'warmup_steps' of critic_optim_kwargs",
        lambda value: {} if value in (None, -1) else {"critic_optim_kwargs": {"warmup_steps": value}},
        "critic_optim_kwargs",
    ),
    "optim.lr_warmup_steps_ratio": renamed("critic_optim_kwargs", "warmup_steps"),
    "optim.clip_grad": renamed("critic_optim_kwargs", "max_grad_norm"),
    "optim": instead("set critic_learning_rate and critic_optim_kwargs; the schedule is that of the policy"),
    "grad_clip": renamed("critic_optim_kwargs", "max_grad_norm"),
    "cliprange_value": renamed("cliprange_value"),
    "model.path": together("critic='model', and value_model_name_or_path if it is not the policy's model", "critic"),
    "model": not_needed("a critic is loaded and partitioned like the policy"),
}
_REWARD: dict[str, Counterpart] = {
    "enable": not_needed("a reward model is on if it is given"),
    "model.path": renamed("reward_model_name_or_path"),
    "model.input_tokenizer": not_needed("messages get the chat template of the reward model"),
    "model.trust_remote_code": instead("load the reward model in Python, and pass the instance to the trainer"),
    "model.external_lib": instead("import it in a script of your own"),
    "model.fsdp_config": instead(f"{LAUNCH}; a reward model is partitioned like the policy"),
    "micro_batch_size": renamed("reward_model_kwargs", "batch_size"),
    "micro_batch_size_per_gpu": renamed("reward_model_kwargs", "batch_size"),
    "max_length": renamed("reward_model_kwargs", "max_length"),
    "reward_manager": together(
        "reward_num_workers, the number of processes that score in parallel, as the manager prime does; by_source, a "
        "reward for each data source",
        "reward_num_workers",
    ),
    "sandbox_fusion": instead("use prefrl.rewards.get_code_reward, which runs code in a sandbox"),
    "launch_reward_fn_async": not_needed("write the reward as an async function"),
}
_ALGORITHM: dict[str, Counterpart] = {
    "adv_estimator": becomes(
        "the command: prefrl ppo for gae, and grpo, rloo or reinforce_plus_plus under the same name; the others are "
        "values of advantage_estimator",
        lambda value: _ESTIMATORS[value],
    ),
    "norm_adv_by_std_in_grpo": becomes(
        "scale_rewards='group', or 'none'",
        lambda value: {"scale_rewards": "group" if value else "none"},
        "scale_rewards",
    ),
    "use_kl_in_reward": together("beta > 0, and kl_in='reward'", "kl_in"),
    "kl_penalty": asked("kl_estimator", KL_ESTIMATORS),
    "kl_ctrl.kl_coef": renamed("beta"),
    "kl_ctrl.type": together("kl_kwargs; the weight adapts if it has the key 'target'", "kl_kwargs"),
    "kl_ctrl.target_kl": renamed("kl_kwargs", "target"),
    "kl_ctrl.horizon": renamed("kl_kwargs", "horizon"),
    "use_pf_ppo": together("rollout_selection, as 'pow', 'max_min' or 'max_random'", "rollout_selection"),
    "pf_ppo.reweight_method": renamed("rollout_selection"),
    "pf_ppo.weight_pow": renamed("selection_kwargs", "power"),
}
_TRAINER: dict[str, Counterpart] = {
    "total_epochs": renamed("num_train_epochs"),
    "total_training_steps": if_set("max_steps"),
    "project_name": renamed("project"),
    "experiment_name": renamed("run_name"),
    "logger": loggers(),
    "nnodes": together("num_processes, num_machines and accelerate_config; see docs/distributed.md"),
    "n_gpus_per_node": together("num_processes, num_machines and accelerate_config; see docs/distributed.md"),
    "esi_redundant_time": instead("use max_train_time, which ends training with a checkpoint"),
    "device": instead("set use_cpu=True to train on the CPU"),
    "save_freq": becomes(
        "save_strategy='steps' and save_steps; -1 is save_strategy='no'", _every("save"), "save_steps"
    ),
    "test_freq": becomes(
        "eval_strategy='steps' and eval_steps; -1 is eval_strategy='no'", _every("eval"), "eval_steps"
    ),
    "val_before_train": renamed("eval_on_start"),
    "val_only": instead("call trainer.evaluate()"),
    "default_local_dir": renamed("output_dir"),
    "default_hdfs_dir": if_set("upload_to"),
    "max_actor_ckpt_to_keep": if_set("save_total_limit"),
    "max_critic_ckpt_to_keep": not_needed("a checkpoint holds policy and critic; save_total_limit counts it"),
    "remove_previous_ckpt_in_save": flag("save_total_limit", 1),
    "del_local_ckpt_after_load": instead("set save_total_limit"),
    "resume_mode": becomes(
        "resume_from_checkpoint, where 'auto' resumes if there is a checkpoint; leave it out for disable, and give "
        "the path for resume_path",
        lambda value: {"auto": {"resume_from_checkpoint": "auto"}, "disable": {}, "resume_path": {}}[value],
        "resume_from_checkpoint",
    ),
    "resume_from_path": if_set("resume_from_checkpoint"),
    "balance_batch": not_needed("losses are divided by the count of all processes"),
    "rollout_data_dir": not_needed("the folder completions in output_dir has every rollout"),
    "validation_data_dir": instead(
        "set log_val_generations: as many completions of each evaluation are in output_dir/evaluations"
    ),
    "ray_wait_register_center_timeout": not_needed("there is no Ray"),
    "use_legacy_worker_impl": not_needed("there are no workers"),
}
_SECTIONS = {
    "data": _DATA,
    "actor_rollout_ref.model": _MODEL,
    "actor_rollout_ref.actor": _ACTOR,
    "actor_rollout_ref.rollout": _ROLLOUT,
    "critic": _CRITIC,
    "reward_model": _REWARD,
    "algorithm": _ALGORITHM,
    "trainer": _TRAINER,
}
VERL: dict[str, Counterpart] = {
    **{f"{section}.{name}": row for section, rows in _SECTIONS.items() for name, row in rows.items()},
    "trainer.critic_warmup": renamed("critic_warmup"),
    "actor_rollout_ref.hybrid_engine": not_needed("the sampler is a server, or the training process"),
    "actor_rollout_ref.nccl_timeout": renamed("ddp_timeout"),
    **{
        f"actor_rollout_ref.ref.{name}": instead(f"{LAUNCH}; the reference is partitioned like the policy")
        for name in ("fsdp_config", "megatron", "strategy")
    },
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": instead("see sequence parallelism in docs/distributed.md"),
    "actor_rollout_ref.ref": not_needed("the reference is scored like the policy, and only with beta > 0"),
    "critic": not_needed("the critic is trained with the batches of the policy"),
    "reward_model": not_needed("a reward model scores on every process"),
    "custom_reward_function.path": becomes(
        "reward_funcs: [folder/file.py:compute_score]; prefrl knows verl's arguments, see docs/rewards.md",
        _reward,
        "reward_funcs",
    ),
    "custom_reward_function.name": together("the function after the colon in reward_funcs", "reward_funcs"),
    "custom_reward_function.reward_kwargs": instead(
        "write parameters beside the function: reward_funcs: [{name: file.py:compute_score, tolerance: 0.1}]"
    ),
    "global_profiler.steps": instead("use the keys skip_first, wait, warmup and active of profile_kwargs"),
    "global_profiler": instead("use profile=True and profile_kwargs; see docs/profiling.md"),
    "ray_kwargs": not_needed("there is no Ray"),
    "ray_init": not_needed("there is no Ray"),
    "defaults": instead("migrate the whole config, which verl's command prints with --cfg job"),
}
# What ppo_trainer.yaml says if it is not changed, where that differs here.
PPO_DEFAULTS: dict[str, Any] = {
    "bf16": True,
    "gradient_checkpointing": True,
    "temperature": 1.0,
    "max_completion_length": 512,
    "truncation_mode": "error",
    "delta": 3.0,
    "num_iterations": 1,
    "weight_decay": 0.01,
    "lr_scheduler_type": "constant_with_warmup",
    "temperature_eval": 0,
    "num_generations_eval": 1,
    "learning_rate": 1e-6,
    "critic_learning_rate": 1e-5,
    "num_train_epochs": 30,
    "save_strategy": "no",
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
}
