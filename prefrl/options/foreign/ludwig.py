"""Names of the section `trainer` of Ludwig's configs that no other library has; the rest is in `others`."""

from __future__ import annotations

from prefrl.options.foreign.row import Row, becomes, column, instead, not_needed, not_there, renamed

__all__ = ["LUDWIG"]

_ENCODERS = "there are no multi-input encoders; a vision-language model reads images, see docs/images.md"

LUDWIG: dict[str, Row] = {
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
