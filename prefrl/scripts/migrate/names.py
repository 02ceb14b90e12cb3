"""Names that scripts import from TRL, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Options that no trainer of TRL reads: its scripts load with them what they give to the trainer.
SCRIPT_OPTIONS = ("reward_model_path", "sft_model_path")
# Methods of trainers that scripts need not call here, and why.
METHODS: dict[str, str] = {"generate_completions": "log_completions prints what was sampled"}


def _classes(text: str, *algorithms: str) -> dict[str, str]:
    """The configs and trainers of algorithms, with what to say of them."""
    return {f"{name}{kind}": text for name in algorithms for kind in ("Config", "Trainer")}


# Public names of TRL that are not there under this name, and what to do. An import from prefrl says so, too.
NAMES: dict[str, str] = {
    "AsyncGRPOConfig": "GRPOConfig with use_vllm=True, generation_mode='async' and max_staleness",
    "AsyncGRPOTrainer": "GRPOTrainer, whose config has generation_mode='async'",
    "GMPOConfig": "GRPOConfig with loss_type='gmpo', epsilon=0.4 and epsilon_high=0.4",
    "GMPOTrainer": "GRPOTrainer, whose config has loss_type='gmpo', epsilon=0.4 and epsilon_high=0.4",
    **_classes(
        "DistillationTrainer, whose config has beta=0.5, on_policy_fraction=0.5, temperature=0.9 and "
        "max_completion_length=128 for GKD's defaults, and whose rows have prompt and completion",
        "GKD",
    ),
    **_classes(
        "DistillationTrainer, as with distillation_objective='jsd'; weights by how far earlier tokens are from "
        "the teacher are not supported",
        "IWOPD",
    ),
    **_classes(
        "DistillationTrainer, whose config has use_vllm=True, generation_mode='async', teacher_server_base_url, "
        "beta=0.0 and max_completion_length=2048",
        "AsyncDistillation",
    ),
    **_classes(
        "DistillationTrainer, whose config has teacher_server_base_url, and loss_top_k=1 for TRL's default",
        "ServerDistillation",
    ),
    **_classes(
        "DistillationTrainer with GKD's defaults and top_p=0.95, as with use_uld_loss=False; a teacher with another "
        "tokenizer is not supported",
        "GOLD",
    ),
    **_classes(
        "DistillationTrainer without a teacher, whose config has beta=0.5, num_generations=8 and teacher_prompt, a "
        "function that puts privileged_context into the prompt",
        "SDFT",
    ),
    **_classes(
        "DistillationTrainer with teacher_prompt and teacher_weights='ema', whose divergence is over the whole "
        "vocabulary; a teacher that sees the successful completions of the same step is not supported, nor is "
        "distillation_weight below 1: rewards are logged, and not learned from",
        "SDPO",
    ),
    **_classes("A*-PO is not supported; GRPOTrainer and RLOOTrainer learn from the same rewards", "A2PO"),
    **_classes("triple preferences are not supported; DPOTrainer learns from chosen and rejected", "TPO"),
    **_classes("use OnlineDPOTrainer, whose loss is that of DPO", "NashMD", "XPO"),
    **_classes("process rewards are not supported; RewardTrainer learns one reward of a whole text", "PRM"),
    "HarnessRolloutWorker": "GRPOTrainer(..., agent=solve), where solve starts the harness; see docs/agents.md",
    "build_teacher_request_inputs": "the option teacher_server_base_url",
    **dict.fromkeys(
        ("HfPairwiseJudge", "PairRMJudge", "BasePairwiseJudge", "BaseRankJudge", "BaseJudge"),
        "prefrl.rewards.get_judge_reward turns any judge into a reward",
    ),
    "OpenAIPairwiseJudge": "prefrl.rewards.PairwiseModel asks a model behind an OpenAI-compatible server",
    "setup_chat_format": "clone_chat_template, or the option chat_template_path",
    "SIMPLE_CHAT_TEMPLATE": "the option chat_template_path knows templates by name, and reads one from a file",
    "DataCollatorForCompletionOnlyLM": "the option completion_only_loss or assistant_only_loss",
    **dict.fromkeys(
        ("DataCollatorForLanguageModeling", "DataCollatorForPreference", "DataCollatorForUnpairedPreference"),
        "the trainer lays out batches itself",
    ),
    "ConstantLengthDataset": "the option packing",
    "SyncRefModelCallback": "the option sync_ref_model",
    "AutoModelForCausalLMWithValueHead": "PPOTrainer makes its critic itself: critic='head' or 'model'",
    "AutoModelForSeq2SeqLMWithValueHead": "models with an encoder are not supported; use a decoder-only model",
    **dict.fromkeys(
        ("MergeModelCallback", "MergeConfig"),
        "prefrl soup averages checkpoints; merge with other models by mergekit itself",
    ),
    "WinRateCallback": "compute_metrics gets the completions of an evaluation, and get_judge_reward uses a judge",
    **dict.fromkeys(("profiling_context", "profiling_decorator"), "the option profile measures each step"),
    "get_act_offloading_ctx_manager": "the option activation_offloading",
    "enable_selective_activation_checkpointing": "the option activation_checkpointing",
    "disable_dropout_in_model": "the option disable_dropout",
    "selective_log_softmax": "logits.log_softmax(-1).gather(-1, ids[..., None]) in torch",
    "entropy_from_logits": "torch.distributions.Categorical(logits=logits).entropy()",
    **dict.fromkeys(("nanstd", "nanmin", "nanmax"), "mask the NaN and use torch's own function"),
    **dict.fromkeys(("pad", "flush_left"), "nothing is padded here; torch.nn.utils.rnn.pad_sequence does it"),
    **dict.fromkeys(("RepeatSampler", "repeat_iterable_dataset"), "the trainer repeats prompts itself"),
    **dict.fromkeys(
        ("unwrap_model_for_generation", "prepare_deepspeed", "prepare_fsdp"),
        "the trainer prepares its models itself",
    ),
}
# Classes of TRL that are another class with these options here, and what is left to do.
_GKD = {
    **{"beta": 0.5, "lmbda": 0.5, "temperature": 0.9, "max_completion_length": 128},
    **{"learning_rate": 2e-5, "disable_dropout": True},
}
_GKD_ROWS = (
    "rows have the columns prompt and completion in place of messages, and the distributions are compared at "
    "temperature, which in TRL is for sampling alone"
)
_GOLD_ROWS = f"the teacher needs the student's tokenizer; {_GKD_ROWS}"
_SDFT = {"beta": 0.5, "num_generations": 8, "max_completion_length": 256, "max_prompt_length": 512}
_SDFT |= {"learning_rate": 5e-5, "disable_dropout": True}
_SDFT_ROWS = (
    "set teacher_prompt to a function that puts privileged_context into the prompt, as TRL's "
    "f\"{row['prompt']}\\n\\n{row['privileged_context']}\"; the divergence is over the whole vocabulary, as with "
    "distillation_mode='full_logits', and the loss is its mean over all tokens"
)
_SERVED_ROWS = "with beta > 0, TRL compares the sampled token alone, prefrl the likeliest tokens of the teacher"
SAME_CLASSES: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "GMPOConfig": ("GRPOConfig", {"loss_type": "gmpo", "epsilon": 0.4}, ""),
    "GMPOTrainer": ("GRPOTrainer", {}, ""),
    "GKDConfig": ("DistillationConfig", _GKD, _GKD_ROWS),
    "GKDTrainer": ("DistillationTrainer", {}, ""),
    "GOLDConfig": ("DistillationConfig", {**_GKD, "top_p": 0.95}, _GOLD_ROWS),
    "GOLDTrainer": ("DistillationTrainer", {}, ""),
    "ServerDistillationConfig": ("DistillationConfig", {"loss_top_k": 1}, _SERVED_ROWS),
    "ServerDistillationTrainer": ("DistillationTrainer", {}, ""),
    "SDFTConfig": ("DistillationConfig", _SDFT, _SDFT_ROWS),
    "SDFTTrainer": ("DistillationTrainer", {}, ""),
}
# The functions of trl.rewards, which prefrl.rewards has, too.
REWARDS = (
    *("accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
    *("reasoning_accuracy_reward", "think_format_reward"),
)
