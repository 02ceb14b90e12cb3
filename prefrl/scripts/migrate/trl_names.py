"""What differs here: options, arguments and names of TRL 1.16, a few of earlier versions, and of transformers 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefrl.scripts.migrate.rows import Counterpart, aside, becomes, flag, not_needed, not_there, renamed, server

_NO_PADDING = "batches are laid out without padding"
_LOCAL = "completions are sampled by prefrl's own loop or on a server"
_SERVER = "a server runs in its own process, so give it --{} there"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _sampling(value: Any) -> Mapping[str, Any]:
    unknown = value.keys() - {*_SAMPLING}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} has no counterpart")
    return dict(value)


def _server_mode(mode: Any) -> Mapping[str, Any]:
    if mode != "server":
        raise ValueError("that server shares the GPUs of training")
    return {}


# Options of configs and of the command line.
TRL: dict[str, Counterpart] = {
    "padding_free": not_needed(_NO_PADDING),
    "pad_to_multiple_of": not_needed(_NO_PADDING),
    "padding_value": not_needed(_NO_PADDING),
    "label_pad_token_id": not_needed(_NO_PADDING),
    "cast_lm_head_to_fp32": not_needed("log-probs are computed in float32 from the hidden states"),
    "use_logits_to_keep": not_needed("only the log-probs of responses are computed"),
    "generation_kwargs": becomes(
        "the options temperature, top_p, top_k, min_p and repetition_penalty themselves", _sampling, "temperature"
    ),
    "use_transformers_continuous_batching": not_needed(_LOCAL),
    "transformers_continuous_batching_config": not_needed(_LOCAL),
    "use_transformers_paged": not_needed(_LOCAL),
    "vllm_mode": Counterpart(
        "server",
        "completions come from a server on GPUs of its own, for 'colocate' too; without one, set use_vllm=False",
        convert=_server_mode,
    ),
    "vllm_model_impl": server(_SERVER.format("model-impl")),
    "vllm_gpu_memory_utilization": server(_SERVER.format("gpu_memory_utilization")),
    "vllm_tensor_parallel_size": server(_SERVER.format("tensor_parallel_size")),
    "vllm_max_model_length": server(_SERVER.format("max_model_len")),
    "vllm_enable_sleep_mode": server("it has its own GPUs and never sleeps"),
    "vllm_group_port": not_needed("the trainer chooses a free port"),
    "vllm_importance_sampling_cap": renamed("vllm_importance_sampling_clip_max"),
    "log_completions_hub_repo": not_there(
        "the folder completions in output_dir has all rollouts as Parquet files; upload it with "
        "huggingface_hub.upload_folder"
    ),
    "log_multimodal": not_needed("the journal keeps the images"),
    "max_new_tokens": renamed("max_completion_length"),
    "response_length": renamed("max_completion_length"),
    "reward_model_path": not_there(
        "give the reward model to the trainer as reward_funcs, or on the command line as --reward_model_name_or_path"
    ),
    "sft_model_path": not_there("the model given to the trainer is the policy, and its weights are the reference"),
    "is_encoder_decoder": not_there("models with an encoder are not supported; use a decoder-only model"),
    "max_completion_length": aside("max_length bounds prompt and completion together"),
    "max_prompt_length": aside("max_length bounds prompt and completion together"),
    "max_seq_length": renamed("max_length"),
    "max_length": aside("max_prompt_length and max_completion_length bound prompts and completions"),
    "num_of_sequences": not_needed("packing needs no estimate"),
    "chars_per_token": not_needed("packing needs no estimate"),
    "ref_model_init_kwargs": not_there("give ref_model as an instance that you loaded"),
    "force_use_ref_model": not_needed("a reference beside an adapter is used if it is given"),
    "model_adapter_name": not_there("the active adapter is the policy; call model.set_adapter first"),
    "ref_adapter_name": not_there("the reference is the model without its adapter, or ref_model"),
    "reference_free": not_there("use CPOTrainer, whose losses have no reference"),
    "num_ppo_epochs": renamed("num_iterations"),
    "num_mini_batches": not_there(
        "steps_per_generation / gradient_accumulation_steps is the number of optimizer steps for each generation"
    ),
    "cliprange": renamed("epsilon"),
    "kl_coef": renamed("beta"),
    "whiten_rewards": renamed("reward_shaping_kwargs", "normalize"),
    "total_episodes": not_there("set max_steps = total_episodes / completions of an optimizer step"),
    "local_rollout_forward_batch_size": not_needed("passes without gradients choose their own size"),
    "num_sample_generations": not_needed("log_completions prints what was sampled"),
    "stop_token": not_needed("completions end at the end-of-sequence tokens of model and tokenizer"),
    "response_template": not_there("set completion_only_loss or assistant_only_loss; they need no template"),
    "token_budget": renamed("max_tokens_per_micro_batch"),
    "request_timeout": renamed("vllm_kwargs", "request_timeout"),
    "weight_sync_steps": not_needed("weights are sent before every generation, and never later than max_staleness"),
    "max_inflight_tasks": renamed("max_concurrent_environments"),
    "torch_dtype": renamed("dtype"),
}

# Options that no trainer of TRL reads: its scripts load with them what they give to the trainer.
SCRIPT_OPTIONS = ("reward_model_path", "sft_model_path")
# Methods of trainers that scripts need not call here, and why.
METHODS: dict[str, str] = {"generate_completions": "log_completions prints what was sampled"}
# Public names that are not there under this name.
NAMES: dict[str, str] = {
    "AsyncGRPOConfig": "GRPOConfig with use_vllm=True, generation_mode='async' and max_staleness",
    "AsyncGRPOTrainer": "GRPOTrainer, whose config has generation_mode='async'",
    "DistillationConfig": "distillation is not supported",
    "DistillationTrainer": "distillation is not supported",
    "GKDConfig": "distillation is not there",
    "GKDTrainer": "distillation is not there",
    "HfPairwiseJudge": "prefrl.rewards.get_judge_reward turns any judge into a reward",
    "PairRMJudge": "prefrl.rewards.get_judge_reward turns any judge into a reward",
    "OpenAIPairwiseJudge": "prefrl.rewards.PairwiseModel asks a model behind an OpenAI-compatible server",
    "setup_chat_format": "clone_chat_template, or the option chat_template_path",
    "SIMPLE_CHAT_TEMPLATE": "the option chat_template_path knows templates by name, and reads one from a file",
    "DataCollatorForCompletionOnlyLM": "the option completion_only_loss or assistant_only_loss",
    "ConstantLengthDataset": "the option packing",
    "SyncRefModelCallback": "the option sync_ref_model",
    "WeaveCallback": "the option report_to names trackers",
    "AutoModelForCausalLMWithValueHead": "PPOTrainer makes its critic itself: critic='head' or 'model'",
    "AutoModelForSeq2SeqLMWithValueHead": "models with an encoder are not supported; use a decoder-only model",
    "MergeModelCallback": "prefrl soup averages checkpoints; merge with other models by mergekit itself",
    "MergeConfig": "prefrl soup averages checkpoints; merge with other models by mergekit itself",
    "WinRateCallback": "compute_metrics gets the completions of an evaluation, and get_judge_reward uses a judge",
}
# The functions of trl.rewards, which prefrl.rewards has, too.
REWARDS = (
    *("accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
    *("reasoning_accuracy_reward", "think_format_reward"),
)
# Values of options that have another name: config, option, value -> ours.
VALUES: dict[tuple[str, str, str], str] = {
    ("SFTConfig", "loss_type", "chunked_nll"): "nll",
    ("SFTConfig", "packing_strategy", "bfd_split"): "wrapped",
}
# Values that say what is so here anyway, and may not be given.
SAME_VALUES: dict[str, Any] = {"remove_unused_columns": True}
_LOGS = {"logging_first_step": False, "logging_nan_inf_filter": True}
_EVERY = {"gradient_checkpointing": True, "bf16": True, **_LOGS}
_SAMPLED = {"max_prompt_length": None, "vllm_server_timeout": 240.0}
_ONLINE = {"max_completion_length": 512, "temperature": 1.0, "num_completions_to_print": None, **_SAMPLED, **_EVERY}
# What an option is in TRL if it is not given, where that differs here: those of TRL 1.16, and of 1.12 for the configs
# that later versions do not have.
DEFAULTS: dict[str, dict[str, Any]] = {
    "SFTConfig": _EVERY,
    "DPOConfig": _EVERY,
    "KTOConfig": {"train_sampling_strategy": "sequential", **_EVERY},
    "RewardConfig": _EVERY,
    "CPOConfig": _EVERY,
    "ORPOConfig": _EVERY,
    "BCOConfig": {"learning_rate": 5e-7, **_EVERY},
    "GRPOConfig": {"beta": 0.0, **_ONLINE},
    "RLOOConfig": _ONLINE,
    "OnlineDPOConfig": {
        **{"learning_rate": 5e-7, "max_completion_length": 64, "disable_dropout": True, **_SAMPLED, **_EVERY}
    },
    "PPOConfig": {
        **{"learning_rate": 3e-6, "max_completion_length": 53, "max_prompt_length": None, "temperature": 0.7, **_EVERY}
    },
}


_PRECISION = "mixed precision is that of torch"


def _warmup(ratio: Any) -> Mapping[str, Any]:
    if not 0 <= float(ratio) < 1:
        raise ValueError("only a fraction below 1 is one of all steps")
    return {"warmup_steps": ratio}


TRANSFORMERS: dict[str, Counterpart] = {
    "warmup_ratio": Counterpart("renamed", "warmup_steps", ("warmup_steps",), _warmup),
    "evaluation_strategy": renamed("eval_strategy"),
    "per_gpu_train_batch_size": renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": renamed("per_device_eval_batch_size"),
    "no_cuda": renamed("use_cpu"),
    "push_to_hub_model_id": renamed("hub_model_id"),
    "push_to_hub_token": renamed("hub_token"),
    "adafactor": flag("optim", "adafactor"),
    "group_by_length": not_needed("nothing is padded; max_tokens_per_micro_batch balances tokens"),
    "overwrite_output_dir": not_needed("training starts anew unless resume_from_checkpoint is set"),
    "save_safetensors": not_needed("weights are always saved as safetensors"),
    "use_mps_device": not_needed("the device that is there is used"),
    "fp16_backend": not_needed(_PRECISION),
    "half_precision_backend": not_needed(_PRECISION),
    "fp16_opt_level": not_needed(_PRECISION),
    "logging_dir": not_there("set the variable TENSORBOARD_LOGGING_DIR, for example in env"),
}
