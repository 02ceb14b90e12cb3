"""The cases that every backend must train in the same way as a single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from transformers import BitsAndBytesConfig, EvalPrediction

from prefrl import BEMACallback
from tests.assets import EXPERTS
from tests.contract.cases import dataset_of, ragged_reward

ATTENTION = ("q_proj", "v_proj")


@dataclass(frozen=True)
class Case:
    """One training of a tiny model; 8 rows a step, 4 of them on each of two processes."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)  # overrides of the tiny model
    lora: tuple[str, ...] = ()
    by_name: bool = False  # the model comes from a folder, so that ZeRO-3 partitions it while it is loaded
    reward_model: bool = False  # by name
    reward: Callable[..., list[float]] = ragged_reward
    rows_per_micro_batch: int | None = None  # on two processes
    eval_rows: int = 0
    chunk: int | None = None  # rows of logits at once


TIED = {"tie_word_embeddings": True}
MIXTURE = {"architecture": "qwen3_moe", **EXPERTS, "router_aux_loss_coef": 0.5}
LLAMA_TIED = {"architecture": "llama", **TIED}
REUSE = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
# Moments, decay and clipping: what an optimizer's state and a global norm could get wrong. A small epsilon would make
# steps of full size of gradients that are rounding alone.
ADAM = {
    "max_steps": 3,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}
ITSELF = {"teacher_model": None, "teacher_prompt": "hint"}
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 1}
EVAL = {"eval_strategy": "steps", "eval_steps": 1}
# Weights that are gathered for each token and layer: few tokens, and one evaluation.
UNGATHERED = {"ds3_gather_for_generation": False, "max_completion_length": 6}
EVAL_AT_END = {**EVAL, "eval_steps": 2}
# Layers as wide as bitsandbytes' blocks, in four bits, which FSDP2 shares out in floating-point storage alone.
WIDE = {"architecture": "llama", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SCHEDULE: dict[str, Any] = {
    **{"max_steps": 4, "weight_decay": 0.3, "weight_decay_schedule": "linear"},
    **{"lr_scheduler_type": "exponential", "lr_scheduler_kwargs": {"decay_rate": 0.5, "decay_steps": 2}},
    **{"reduce_on_plateau": 2, "reduce_on_plateau_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.9}},
}
FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.float32)
BUDGET = {"max_tokens_per_micro_batch": 25}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
LEAN = {"activation_checkpointing": True}  # passes without gradients are no larger than those with
ONE = {"max_steps": 1}  # where nothing is carried from one step to the next


def with_long_rows(algorithm: str) -> Dataset:
    """Every eighth row is about as long as the seven after it together."""
    rows = dataset_of(algorithm).to_list()
    return Dataset.from_list([row if i % 8 else {**row, "prompt": 30 * row["prompt"]} for i, row in enumerate(rows)])


def good_at_subtraction(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Groups of other prompts have no advantage."""
    values = ragged_reward(completions)
    return [value * ("-" in prompt) for value, prompt in zip(values, prompts, strict=True)]


def answering(completions: list[str], log_extra: Callable[[str, list[Any]], None], **_: Any) -> list[float]:
    """`ragged_reward`, and an answer in most completions."""
    log_extra("answer", [text[:1] for text in completions])
    return ragged_reward(completions)


def from_two_sources(num_rows: int) -> Dataset:
    """Prompts with a column that says where they come from."""
    return dataset_of("grpo", num_rows).add_column("data_source", [("math", "code")[i % 2] for i in range(num_rows)])


def num_predicted(evaluated: EvalPrediction) -> dict[str, float]:
    """Sums over the rows of all processes."""
    return {"labels": float(evaluated.label_ids.sum()), "predictions": float(evaluated.predictions.sum())}


CASES: dict[str, Case] = {
    # Algorithms; SFT, rewards, GRPO and KTO are below. What is the same for several of them is tried with one.
    "dpo": Case("dpo", model=TIED),
    "orpo": Case("orpo", model=LLAMA_TIED),
    "ppo": Case(
        "ppo",
        {**ADAM, **EVAL, "max_steps": 2, "critic_learning_rate": 1e-2, "critic_warmup": 1, "max_grad_norm": 0.0},
        eval_rows=3,
    ),
    # One rank has no completions.
    "online_dpo": Case(
        "online_dpo",
        {**EVAL, "pass_at_k_kwargs": {"k": [2], "answer": "answer"}},
        model=TIED,
        reward=answering,
        eval_rows=1,
    ),
    # The head, the forward pass, and how the work is cut.
    "sft_micro_batches": Case("sft", {"gradient_accumulation_steps": 2}, rows_per_micro_batch=2),
    "sft_token_budget": Case("sft", {"max_tokens_per_micro_batch": 25}),
    "sft_checkpointing": Case("sft", LEAN, model=TIED, chunk=8),
    "sft_compiled": Case("sft", COMPILED),
    "sft_lora": Case("sft", lora=(*ATTENTION, "down_proj")),
    "sft_lora_embeddings": Case("sft", lora=("q_proj", "embed_tokens", "lm_head"), chunk=8),
    "sft_lora_head_chunks": Case("sft", lora=("q_proj", "lm_head"), chunk=8),
    "sft_adam": Case("sft", ADAM),
    # Rates by name, with an optimizer that needs whole weights, penalties and clipped numbers, or without them.
    "sft_lars": Case(
        "sft",
        {
            **{"max_steps": 3, "optim": "lars", "learning_rate": 1.0, "max_grad_norm": 0.5, "max_grad_value": 0.05},
            **{"learning_rates": {"q_proj": 0.1}, "regularization_type": "l1_l2", "regularization_lambda": 1e-3},
        },
    ),
    "sft_nadam_rates": Case("sft", {**ADAM, "optim": "nadam", "learning_rates": {"norm": 1e-3, "mlp": 2e-2}}),
    "sft_grown": Case(
        "sft",
        {
            **ADAM,
            **{"max_steps": 5, "lr_scheduler_type": "linear", "increase_batch_size_on_plateau": 1},
            "increase_batch_size_kwargs": {"patience": 1, "eval_metric": "learning_rate"},  # which never rises
        },
    ),
    "sft_window": Case("sft", model={"architecture": "mistral", "sliding_window": 4, "num_key_value_heads": 1}),
    "sft_eval": Case(
        "sft",
        {**EVAL, **SCHEDULE, "compute_metrics": num_predicted, "callbacks": [BEMACallback(update_freq=1)]},
        model=TIED,
        eval_rows=7,
    ),
    "reward": Case("reward"),  # for test_sequence_parallel
    "reward_lora": Case("reward", lora=ATTENTION),
    "reward_by_name": Case("reward", EVAL, by_name=True, eval_rows=7),
    # Mixtures of experts, whose routers have a loss of their own.
    "sft_mixture": Case("sft", {"gradient_accumulation_steps": 2}, model=MIXTURE, rows_per_micro_batch=2),
    "grpo_mixture_one_signal": Case("grpo", {"beta": 0.0, **BUDGET}, model=MIXTURE, reward=good_at_subtraction),
    # References.
    "dpo_moving": Case("dpo", {**MOVING, **EVAL}, model=TIED, by_name=True, eval_rows=7),
    "dpo_by_name_precomputed": Case("dpo", {"precompute_ref_log_probs": True}, model=TIED, by_name=True),
    # Ranks with different numbers of micro-batches and of passes of references, or without a row.
    "kto_long_row": Case("kto", {"train_dataset": with_long_rows("kto"), **BUDGET, **LEAN, **EVAL}, eval_rows=3),
    "dpo_last_row": Case(
        "dpo",
        {"rows": 9, "num_train_epochs": 1, "max_steps": -1, "loss_type": ["aot"], **BUDGET, **MOVING, **EVAL},
        lora=ATTENTION,
        eval_rows=1,
    ),
    # Rollouts.
    "grpo_reuse": Case("grpo", {"beta": 0.04, "teacher_kl_coef": 0.5, **REUSE}, model=TIED),
    "grpo_replay": Case("grpo", {"router_replay": True, **REUSE, **LEAN}, model=MIXTURE),
    "grpo_not_gathered": Case(
        "grpo",
        {
            "eval_dataset": from_two_sources(5),
            "pass_at_k_kwargs": {"k": [1, 2, 4], "answer": "answer"},
            "log_val_generations": 3,
            **UNGATHERED,
            **EVAL_AT_END,
        },
        reward=answering,
        eval_rows=5,
    ),
    "grpo_full_kl_by_name": Case("grpo", {"beta": 0.1, "kl_estimator": "full"}, by_name=True),
    # Ranks whose episodes have different numbers of turns sample together.
    "grpo_episodes": Case("grpo", {"talks": "forgetful", "turn_credit": "return", **ONE}),
    "grpo_episodes_not_gathered": Case(
        "grpo", {**UNGATHERED, **ONE, "talks": "faithful", "max_turns": 3, "max_completion_length": 20}
    ),
    # One group, which one rank samples and scores, and both train on.
    "grpo_one_group": Case(
        "grpo",
        {
            "num_generations": 8,
            "beta": 0.04,
            "kl_in": "reward",
            "advantage_estimator": "remax",
            **UNGATHERED,
            **EVAL_AT_END,
        },
        reward_model=True,
        eval_rows=3,
    ),
    "grpo_one_group_of_episodes": Case("grpo", {"talks": "agent", "num_generations": 8, **ONE}),
    "grpo_scored_first": Case(
        "grpo",
        {
            "advantage_estimator": "optimal_token_baseline",
            "top_entropy_quantile": 0.3,
            "entropy_coef": 0.01,
            **{**BUDGET, **ONE},
        },
    ),
    "grpo_resampled": Case(
        "grpo",
        {
            "beta": 0.0,
            "reward_shaping_kwargs": {"normalize": True},
            "dynamic_sampling": True,
            "curriculum": "variance",
            **UNGATHERED,
        },
    ),
    "grpo_quantized": Case(
        "grpo",
        {"beta": 0.04, "model_init_kwargs": {"quantization_config": FOUR_BITS}},
        model=WIDE,
        lora=ATTENTION,
        by_name=True,
    ),
    # Groups in an order of their own; the generator of the tests asks no server.
    "grpo_overlap": Case(
        "grpo",
        {"arrival": 3, "generation_mode": "overlap", "use_vllm": True, "beta": 0.04, "num_generations": 2, **BUDGET},
    ),
    # Teachers of another width, which are partitioned like references.
    "distillation": Case(
        "distillation", {**REUSE, **EVAL_AT_END, "later_tokens": True, "num_generations": 2}, model=TIED, eval_rows=3
    ),
    # Each rank may have rows of one teacher alone.
    "distillation_several": Case(
        "distillation", {"several": True, "teacher_prompt": "hint", "max_completion_length": 6}, model=TIED
    ),
    # The teacher's logits come from the policy's head, in the middle of its own pass.
    "distillation_live": Case(
        "distillation", {**ITSELF, "teacher_weights": "live", "max_completion_length": 6, **EVAL_AT_END}, eval_rows=3
    ),
    "distillation_lora_by_name": Case("distillation", {"beta": 0.5, **BUDGET}, lora=ATTENTION, by_name=True),
    # Critics.
    "ppo_model": Case("ppo", {"critic": "model", "critic_warmup": 1}, by_name=True),
    "ppo_micro_batches": Case(
        "ppo",
        {"gradient_accumulation_steps": 2, "steps_per_generation": 2, **ONE},
        lora=ATTENTION,
        rows_per_micro_batch=2,
    ),
    "ppo_clipped": Case("ppo", {"critic": "model", "vf_coef": 1.0, "max_grad_norm": 1.0}),
}
