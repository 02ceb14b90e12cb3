"""The keys of Ludwig's configs of language models.

`LUDWIG` has the names of the section `trainer` that no other library has, for messages; the rest is in `others`.
"""

from __future__ import annotations

from typing import Any

from prefrl.scripts.migrate.foreign.others import OTHERS
from prefrl.scripts.migrate.foreign.row import (
    Counterpart,
    asked,
    becomes,
    column,
    instead,
    layers,
    not_needed,
    not_there,
    renamed,
    together,
)

__all__ = ["DEFAULTS", "LUDWIG", "LUDWIG_KEYS"]

_ENCODERS = "there are no multi-input encoders; a vision-language model reads images, see docs/images.md"

LUDWIG: dict[str, Counterpart] = {
    "epochs": renamed("num_train_epochs"),
    "train_steps": renamed("max_steps"),
    "use_mixed_precision": becomes("bf16=True", lambda value: {"bf16": True} if value else {}, "bf16"),
    "compile": renamed("torch_compile"),
    "enable_gradient_checkpointing": renamed("activation_checkpointing"),
    "enable_profiling": renamed("profile"),
    "profiler": renamed("profile_kwargs"),
    "should_shuffle": instead(
        "use train_sampling_strategy='sequential', or shuffle_dataset=False of online trainers, to keep the order"
    ),
    "bucketing_field": not_needed("nothing is padded; max_tokens_per_micro_batch balances tokens"),
    "validation_field": instead(
        "give several datasets as eval_dataset={name: dataset}, and set metric_for_best_model='eval_<name>_loss'"
    ),
    "layers_to_freeze_regex": becomes("freeze: [expression]", lambda value: {"freeze": [value]}, "freeze"),
    "base_learning_rate": instead("use learning_rates, which gives some parameters other rates"),
    "preset": instead("use preset, which sets the options of a paper; docs/trainers/grpo.md lists its names"),
    "loss_balancing": instead(
        "use reward_balance for the rewards of online trainers; several losses of DPO have fixed loss_weights"
    ),
    "loss_balancing_alpha": renamed("balance_kwargs", "alpha"),
    "loss_balancing_lr": renamed("balance_kwargs", "rate"),
    "loss_balancing_preference_vector": renamed("reward_weights"),
    "loss_balancing_tchebycheff_weight": instead(
        "use the key 'smoothing' of balance_kwargs, with reward_balance='pareto'"
    ),
    **dict.fromkeys(
        (
            *("contrastive_pretrain_epochs", "contrastive_pretrain_temperature"),
            *("contrastive_pretrain_projection_dim", "contrastive_pretrain_learnable_temperature"),
            "modality_dropout",
        ),
        not_there(_ENCODERS),
    ),
    **dict.fromkeys(("dpo_beta", "kto_beta", "orpo_beta", "grpo_beta"), renamed("beta")),
    "dpo_loss_type": renamed("loss_type"),
    "dpo_label_smoothing": renamed("label_smoothing"),
    "grpo_epsilon": renamed("epsilon"),
    "grpo_num_generations": renamed("num_generations"),
    "rejected_column": column("rejected"),
}

_SCHEDULE = (
    "decay_rate",
    "decay_steps",
    "staircase",
    "t_0",
    "t_mult",
    "eta_min",
    "pct_start",
    "div_factor",
    "final_div_factor",
)
_PROFILER = ("wait", "warmup", "active", "skip_first")


def _number_or_auto(option: str, auto: str) -> Counterpart:
    def convert(value: Any) -> dict[str, Any]:
        if value == "auto":
            raise ValueError(auto)
        return {option: value}

    return becomes(option, convert, option)


_TRAINER: dict[str, Counterpart] = {
    **OTHERS,
    **LUDWIG,
    "type": together("the command: sft for finetune, or dpo, kto, orpo and grpo"),
    "eval_batch_size": _number_or_auto("per_device_eval_batch_size", "write a number"),
    "effective_batch_size": becomes(
        "effective_batch_size", lambda value: {} if value == "auto" else {"effective_batch_size": value}
    ),
    **dict.fromkeys(
        ("steps_per_checkpoint", "checkpoints_per_epoch", "skip_all_evaluation"),
        together("save_strategy and eval_strategy, with save_steps and eval_steps, or save_epochs and eval_epochs"),
    ),
    "eval_steps": instead("name the rows of an evaluation: --dataset_test_split 'test[:1000]'"),
    "should_shuffle": becomes(
        "train_sampling_strategy", lambda value: {} if value else {"train_sampling_strategy": "sequential"}
    ),
    "validation_metric": asked("metric_for_best_model", {"loss": "loss"}),
    "validation_field": not_needed("there is one output"),
    "optimizer.type": becomes(
        "optim; adamw is 'adamw_torch_fused'",
        lambda value: {"optim": "adamw_torch_fused" if value == "adamw" else value},
        "optim",
    ),
    "optimizer.betas": becomes(
        "adam_beta1 and adam_beta2", lambda value: {"adam_beta1": value[0], "adam_beta2": value[1]}, "adam_beta1"
    ),
    "optimizer.eps": renamed("adam_epsilon"),
    "optimizer.weight_decay": renamed("weight_decay"),
    "optimizer": instead("use optim_args; see docs/optimizers.md"),
    "learning_rate_scheduler.decay": together("lr_scheduler_type", "lr_scheduler_type"),
    **{f"learning_rate_scheduler.{name}": renamed("lr_scheduler_kwargs", name) for name in _SCHEDULE},
    **{f"profiler.{name}": renamed("profile_kwargs", name) for name in _PROFILER},
    "profiler": instead("use profile_kwargs; see docs/profiling.md"),
}
_SECTIONS = ("learning_rate_scheduler", "gradient_clipping")  # keys of `trainer` may stand in them, too
_SPLIT = "name the rows, such as dataset_train_split: train[:80%] and dataset_test_split: train[80%:]"
LUDWIG_KEYS: dict[str, Counterpart] = {
    **{f"trainer.{section}.{name}": row for section in _SECTIONS for name, row in OTHERS.items()},
    **{f"trainer.{name}": row for name, row in _TRAINER.items()},
    "model_type": together("the command"),
    "base_model": renamed("model_name_or_path"),
    "input_features": together("columns, as {prompt: ...}; or prompt_template", "columns"),
    "output_features": together("columns, as {completion: ...} or {chosen: ...}", "columns"),
    "prompt.template": together("prompt_template", "prompt_template"),
    "prompt.task": together("prompt_template, in the place of {__task__}", "prompt_template"),
    "prompt": not_there("prompts are texts with the columns of their row"),
    "adapter.type": asked("use_peft", {"lora": True}),
    "adapter.r": renamed("lora_r"),
    "adapter.alpha": renamed("lora_alpha"),
    "adapter.dropout": renamed("lora_dropout"),
    "adapter.target_modules": layers(),
    "adapter.use_rslora": renamed("use_rslora"),
    "adapter.use_dora": renamed("use_dora"),
    "adapter.postprocessor": instead("use prefrl merge after training"),
    "adapter": instead("see docs/peft.md"),
    "quantization.bits": becomes(
        "load_in_4bit or load_in_8bit", lambda value: {f"load_in_{value}bit": True}, "load_in_4bit"
    ),
    "quantization.bnb_4bit_quant_type": renamed("bnb_4bit_quant_type"),
    "quantization.bnb_4bit_use_double_quant": renamed("use_bnb_nested_quant"),
    "quantization": instead("see docs/peft.md"),
    "generation": not_needed("they are options of prefrl generate"),
    "preprocessing.global_max_sequence_length": renamed("max_length"),
    "preprocessing.split": instead(_SPLIT),
    "preprocessing.sample_ratio": instead("name the rows, such as dataset_train_split: train[:10%]"),
    "preprocessing": instead("prepare the dataset; see docs/howto/your_data.md"),
    "backend": instead("set num_processes and accelerate_config; see docs/distributed.md"),
    "model_parameters": instead("set model_init_kwargs"),
    "ludwig_version": not_needed("it is the version of Ludwig"),
    "hyperopt": not_there("start one run for each choice of options"),
}
# What Ludwig does if a key is not given, where that differs here.
DEFAULTS: dict[str, Any] = {
    "optim": "adam",
    "learning_rate": 1e-5,
    "num_train_epochs": 100,
    "max_grad_norm": 0.5,
    "early_stopping_patience": 5,
    "lr_scheduler_type": "constant_with_warmup",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
}
