"""The keys of verl's sft_trainer.yaml; many of them are also those of ppo_trainer.yaml."""

from __future__ import annotations

from typing import Any

from prefrl.scripts.migrate.foreign.row import (
    Counterpart,
    asked,
    becomes,
    column,
    if_set,
    instead,
    not_needed,
    renamed,
    together,
)
from prefrl.scripts.migrate.foreign.verl import LAUNCH, VERL

__all__ = ["SFT_DEFAULTS", "VERL_SFT"]

_NESTED = "make the nested texts columns of their own, and name these in columns"
_PADDING = "batches are laid out without padding"
_ACTOR = "actor_rollout_ref.actor."
# The rows of the other file, by the names that they have in this one.
_SHARED = {
    name.removeprefix(_ACTOR): row for name, row in VERL.items() if name.startswith((_ACTOR, "data.", "trainer."))
}
_SFT_DATA: dict[str, Counterpart] = {
    "train_batch_size": together("gradient_accumulation_steps, times processes and per_device_train_batch_size"),
    "micro_batch_size": together("per_device_train_batch_size, of one process", "per_device_train_batch_size"),
    "micro_batch_size_per_gpu": renamed("per_device_train_batch_size"),
    "use_dynamic_bsz": together("max_tokens_per_micro_batch, a number or 'auto'", "max_tokens_per_micro_batch"),
    "max_token_len_per_gpu": renamed("max_tokens_per_micro_batch"),
    "response_key": column("completion"),
    "prompt_dict_keys": instead(_NESTED),
    "response_dict_keys": instead(_NESTED),
    "multiturn.enable": together("columns, as {messages: ...}; without it conversational=True", "columns"),
    "multiturn.messages_key": column("messages", "conversations"),
    "messages_key": column("messages", "conversations"),
    "multiturn.tools_key": column("tools"),
    "tools_key": column("tools"),
    "enable_thinking_key": instead("give the template its switches in the column chat_template_kwargs"),
    "multiturn.enable_thinking_key": instead("give the template its switches in the column chat_template_kwargs"),
    "balance_dp_token": not_needed("losses are divided by the count of all processes"),
    "chat_template": if_set("chat_template_path"),
    "pad_mode": not_needed(_PADDING),
    "ignore_input_ids_mismatch": not_needed("conversations are tokenized as a whole"),
}
_SFT_MODEL: dict[str, Counterpart] = {
    "partial_pretrain": renamed("model_name_or_path"),
    "path": renamed("model_name_or_path"),
    "fsdp_config.model_dtype": asked(
        "dtype", {"fp32": "float32", "bf16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}
    ),
    "fsdp_config": instead(LAUNCH),
    "strategy": together("accelerate_config='fsdp2' on several processes"),
    **{
        name: VERL[f"actor_rollout_ref.model.{name}"]
        for name in ("external_lib", "enable_gradient_checkpointing", "lora_rank", "target_modules", "use_liger")
    },
}
VERL_SFT: dict[str, Counterpart] = {
    **{name: row for name, row in _SHARED.items() if name.startswith(("data.", "optim", "checkpoint", "trainer."))},
    **{f"data.{name}": row for name, row in _SFT_DATA.items()},
    **{f"model.{name}": row for name, row in _SFT_MODEL.items()},
    "optim.warmup_steps_ratio": VERL[f"{_ACTOR}optim.lr_warmup_steps_ratio"],
    "optim.lr_scheduler": asked("lr_scheduler_type", {"cosine": "cosine"}),
    "ulysses_sequence_parallel_size": instead("see sequence parallelism in docs/distributed.md"),
    "use_remove_padding": not_needed(_PADDING),
    "engine": instead(LAUNCH),
    "trainer.resume_path": if_set("resume_from_checkpoint"),
    "trainer.max_ckpt_to_keep": becomes(
        "save_total_limit", lambda value: {"save_total_limit": value} if value else {}, "save_total_limit"
    ),
    "defaults": VERL["defaults"],
}
# What sft_trainer.yaml says if it is not changed, where that differs here.
SFT_DEFAULTS: dict[str, Any] = {
    "bf16": True,
    "learning_rate": 1e-5,
    "adam_beta2": 0.95,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "cosine",
    "truncation_mode": "error",
    "num_train_epochs": 4,
    "save_strategy": "no",
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
}
