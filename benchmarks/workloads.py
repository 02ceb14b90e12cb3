"""The table of workloads: what is run, how often, and which ratio must be reached. This file holds only data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

__all__ = ["CPU_WORKLOADS", "CUDA_WORKLOADS", "LENGTHS", "Gate", "ModelSizes", "Task", "Workload"]

# grpo_loss and distillation: on given completions of prompts. gkd: distillation on completions of the dataset.
# grpo: whole steps with generation. generation: only generation.
Task = Literal["grpo_loss", "grpo", "generation", "distillation", "gkd", "dpo", "kto", "reward", "sft"]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A random Qwen2 with tied embeddings."""

    hidden_size: int
    num_layers: int
    ffn_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int = 0  # 0: half the heads
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint: str = ""  # a folder: the model that it holds instead, whose sizes these are


@dataclass(frozen=True, slots=True)
class Gate:
    """Minimum ratios TRL / prefrl of seconds (`must`) and of peak memory (`memory`); `aim` is the best seen so far."""

    must: float | None = None
    aim: float | None = None
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table.

    Lengths are in tokens and count the end token:

    | task | lengths |
    |---|---|
    | grpo_loss, grpo, generation, distillation | completions of each prompt |
    | gkd | completions; each has its own prompt |
    | dpo, reward | chosen, rejected, chosen, rejected, ...: each pair has its own prompt |
    | kto | responses, desirable and undesirable in turn; each has its own prompt |
    | sft | texts; there are no prompts |
    """

    name: str  # for --only and the JSON
    title: str
    task: Task
    model: ModelSizes
    lengths: tuple[int, ...]
    prompt_length: int = 256
    num_prompts: int = 1  # of grpo_loss, grpo, generation and distillation
    image_side: int = 0  # pixels; each prompt begins with a square image, which the model of LLaVA's kind reads
    options: Mapping[str, Any] = field(default_factory=dict)  # of both libraries' configs
    trl_options: Mapping[str, Any] = field(default_factory=dict)  # of TRL's config only
    steps_per_turn: int = 1  # optimizer steps that are timed together
    turns: int = 5  # timed pairs after the warm-up
    quick_turns: int = 0  # the same with --quick; 0: left out
    gate: Gate = field(default_factory=Gate)

    @property
    def is_online(self) -> bool:
        """Whether the task has completions of prompts."""
        return self.task in ("grpo_loss", "grpo", "generation", "distillation", "gkd")

    @property
    def has_equal_inputs(self) -> bool:
        """Whether both libraries learn from the same tokens. In the other tasks, each samples its own."""
        return self.task not in ("grpo", "generation")

    @property
    def num_tokens(self) -> int:
        """Number of tokens in each turn: of the completions, or of all rows including their prompts."""
        prompts = 0 if self.is_online or self.task == "sft" else self.prompt_length * len(self.lengths)
        return sum(self.lengths) * self.num_prompts + prompts


MODEL_S = ModelSizes(hidden_size=256, num_layers=4, ffn_size=768, vocab_size=8192, num_heads=4)
MODEL_A = ModelSizes(hidden_size=512, num_layers=8, ffn_size=2048, vocab_size=32000, num_heads=8)
MODEL_B = ModelSizes(hidden_size=256, num_layers=4, ffn_size=768, vocab_size=151936, num_heads=4)

LENGTHS = (16, 28, 40, 56, 72, 90, 110, 128)
LONG_LENGTHS = (32, 64, 96, 128, 160, 192, 224, 256)
VERY_LONG_LENGTHS = (128, 224, 320, 448, 576, 720, 880, 1024)
PAIR_LENGTHS = (64, 256, 96, 224, 256, 128, 192, 160)
TEXT_LENGTHS = (48, 64, 96, 128, 192, 256, 384, 512)

# What most rows of a task have.
_grpo_loss = partial(Workload, task="grpo_loss", model=MODEL_S, lengths=LENGTHS, options={"beta": 0.0})
_grpo = partial(Workload, task="grpo", model=MODEL_S, lengths=LENGTHS, options={"beta": 0.0})
_generation = partial(Workload, task="generation", model=MODEL_S, lengths=LENGTHS, options={"beta": 0.0})
_distillation = partial(Workload, task="distillation", model=MODEL_S, lengths=LENGTHS, options={"beta": 1.0})
_dpo = partial(Workload, task="dpo", model=MODEL_S, lengths=PAIR_LENGTHS)
_sft = partial(Workload, task="sft", model=MODEL_S, lengths=TEXT_LENGTHS)
_reward = partial(Workload, task="reward", model=MODEL_S, lengths=PAIR_LENGTHS)

GRPO_LOSS_WORKLOADS = (
    _grpo_loss("grpo_loss", "GRPO loss step, S, prompt 256", quick_turns=3, gate=Gate(must=5.0, aim=8.0, memory=5.0)),
    _grpo_loss(
        "grpo_loss_short_prompt",
        "GRPO loss step, S, prompt 64, completions 32 to 256",
        lengths=LONG_LENGTHS,
        prompt_length=64,
        turns=4,
        gate=Gate(must=3.2, aim=4.0),
    ),
    _grpo_loss(
        "grpo_loss_4_prompts",
        "GRPO loss step, S, 4 prompts of 128",
        prompt_length=128,
        num_prompts=4,
        turns=3,
        gate=Gate(must=4.3, aim=5.5),
    ),
    _grpo_loss(
        "grpo_loss_equal",
        "GRPO loss step, S, prompt 256, completions all 128",
        lengths=(128,) * 8,
        turns=4,
        gate=Gate(must=3.5, aim=4.1),
    ),
    _grpo_loss(
        "grpo_loss_kl",
        "GRPO loss step with reference, S, prompt 256",
        options={"beta": 0.04},
        turns=4,
        quick_turns=2,
        gate=Gate(must=5.5, aim=7.5),
    ),
    _grpo_loss(
        "grpo_loss_a",
        "GRPO loss step, A, prompt 256",
        model=MODEL_A,
        turns=2,
        gate=Gate(must=5.0, aim=6.3, memory=5.0),
    ),
    _grpo_loss(
        "grpo_loss_b",
        "GRPO loss step, B (vocabulary 151,936), prompt 256",
        model=MODEL_B,
        turns=2,
        gate=Gate(must=8.0, aim=14.8),
    ),
    _grpo_loss(
        "grpo_loss_image",
        "GRPO loss step, S with a vision tower, an image of 256 tokens and 64 of text",
        prompt_length=64,
        image_side=224,
        turns=3,
        gate=Gate(must=5.0, aim=7.3, memory=5.0),
    ),
    _grpo_loss(
        "grpo_loss_long_completions",
        "GRPO loss step, S, prompt 64, completions 128 to 1,024",
        lengths=VERY_LONG_LENGTHS,
        prompt_length=64,
        turns=2,
    ),
    _grpo_loss("grpo_loss_long_prompt", "GRPO loss step, S, prompt 2,048", prompt_length=2048, turns=2),
)
GRPO_WORKLOADS = (
    _grpo("grpo", "whole GRPO step, S, prompt 256", quick_turns=3, gate=Gate(must=2.7, aim=4.0)),
    _grpo(
        "grpo_kl",
        "whole GRPO step with reference, S, prompt 256",
        options={"beta": 0.04},
        turns=4,
        gate=Gate(must=2.7, aim=4.0),
    ),
    _grpo(
        "grpo_2_iterations",
        "GRPO, one generation and two updates, S, prompt 256",
        options={"beta": 0.0, "num_iterations": 2},
        steps_per_turn=2,
        turns=3,
        gate=Gate(must=3.3, aim=4.3),
    ),
    _generation("generation", "generation, S, 8 completions", quick_turns=3, gate=Gate(must=1.5, aim=2.4)),
    _generation(
        "generation_32",
        "generation, S, 4 prompts of 256, 32 completions",
        num_prompts=4,
        turns=4,
        gate=Gate(must=1.9, aim=2.9),
    ),
    _generation("generation_a", "generation, A, 8 completions", model=MODEL_A, turns=2, gate=Gate(must=1.9, aim=2.2)),
)
DISTILLATION_WORKLOADS = (
    _distillation(
        "distillation",
        "distillation loss step, reverse KL, S teaches S, prompt 256, 8 completions",
        turns=4,
        quick_turns=2,
        gate=Gate(must=3.0, aim=4.0, memory=4.0),
    ),
    _distillation(
        "distillation_8_prompts",
        "distillation loss step, reverse KL, S teaches S, 8 prompts of 256, a completion of 128 each",
        lengths=(128,),
        num_prompts=8,
        turns=4,
        gate=Gate(must=1.0, aim=1.2, memory=1.4),
    ),
    _distillation(
        "distillation_b",
        "distillation loss step, reverse KL, B teaches B (vocabulary 151,936), prompt 256, 8 completions",
        model=MODEL_B,
        turns=2,
        gate=Gate(must=2.4, aim=2.9, memory=3.0),
    ),
    Workload(
        "gkd",
        "GKD on given completions, beta 0.5, S teaches S, 8 rows, prompts of 256, completions 64 to 256",
        "gkd",
        MODEL_S,
        PAIR_LENGTHS,
        options={"beta": 0.5, "lmbda": 0.0},
        turns=4,
        quick_turns=2,
        gate=Gate(must=2.5, aim=3.2, memory=4.0),
    ),
)
OFFLINE_WORKLOADS = (
    _dpo(
        "dpo", "DPO, S, 4 pairs, responses 64 to 256", turns=4, quick_turns=2, gate=Gate(must=3.2, aim=4.3, memory=3.5)
    ),
    _dpo("dpo_equal", "DPO, S, 4 pairs, responses all 160", lengths=(160,) * 8, turns=9, gate=Gate(must=2.9, aim=3.5)),
    _dpo(
        "dpo_precomputed",
        "DPO, precomputed reference, S, 4 pairs, responses 64 to 256",
        options={"precompute_ref_log_probs": True},
        turns=9,
        gate=Gate(must=3.8, aim=4.7, memory=3.5),
    ),
    Workload("kto", "KTO, S, 8 rows, responses 64 to 256", "kto", MODEL_S, PAIR_LENGTHS, turns=3),
    _sft(
        "sft",
        "SFT, S, 8 texts of 48 to 512, TRL padded",
        turns=4,
        quick_turns=2,
        gate=Gate(must=4.0, aim=4.8, memory=4.0),
    ),
    _sft(
        "sft_padding_free",
        "SFT, S, 8 texts of 48 to 512, TRL padding-free",
        trl_options={"padding_free": True},
        quick_turns=3,
        gate=Gate(must=2.0, aim=2.3, memory=2.2),
    ),
    _sft("sft_equal", "SFT, S, 8 texts of 224, TRL padded", lengths=(224,) * 8, turns=4, gate=Gate(must=1.7, aim=1.9)),
    _reward(
        "reward",
        "reward model, S, 4 pairs, responses 64 to 256",
        quick_turns=3,
        gate=Gate(must=1.7, aim=2.0, memory=1.6),
    ),
    _reward(
        "reward_equal",
        "reward model, S, 4 pairs, responses all 160",
        lengths=(160,) * 8,
        gate=Gate(must=1.25, aim=1.4),
    ),
)
CPU_WORKLOADS = GRPO_LOSS_WORKLOADS + GRPO_WORKLOADS + DISTILLATION_WORKLOADS + OFFLINE_WORKLOADS

# Realistic sizes, in bfloat16 as they are trained on a GPU. The most telling rows come first: a run may be cut.
MODEL_1_5B = ModelSizes(
    hidden_size=1536,
    num_layers=28,
    ffn_size=8960,
    vocab_size=151936,
    num_heads=12,
    num_kv_heads=2,
    dtype="bfloat16",
)
MODEL_7B = ModelSizes(
    hidden_size=3584,
    num_layers=28,
    ffn_size=18944,
    vocab_size=152064,
    num_heads=28,
    num_kv_heads=4,
    dtype="bfloat16",
)
_CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
_cuda_grpo_loss = partial(_grpo_loss, model=MODEL_1_5B, lengths=VERY_LONG_LENGTHS, prompt_length=1024, turns=3)
CUDA_WORKLOADS = (
    _cuda_grpo_loss(
        "cuda_grpo_loss", "GRPO loss step, 1.5B, prompt 1,024, 8 completions of 1,024", lengths=(1024,) * 8
    ),
    _cuda_grpo_loss(
        "cuda_grpo_loss_ragged",
        "GRPO loss step, 1.5B, 2 prompts of 1,024, 8 completions of 128 to 1,024",
        num_prompts=2,
    ),
    Workload(
        "cuda_dpo",
        "DPO, 1.5B, 8 pairs, prompt 512, responses 128 to 1,024",
        "dpo",
        MODEL_1_5B,
        VERY_LONG_LENGTHS * 2,
        prompt_length=512,
        turns=3,
    ),
    Workload(
        "cuda_sft",
        "SFT, 1.5B, 16 texts of 128 to 1,024, TRL padding-free",
        "sft",
        MODEL_1_5B,
        VERY_LONG_LENGTHS * 2,
        trl_options={"padding_free": True},
        turns=3,
    ),
    _cuda_grpo_loss(
        "cuda_grpo_loss_long",
        "GRPO loss step, 1.5B, prompt 1,024, 8 completions of 8,192, checkpointing in both",
        lengths=(8192,) * 8,
        options={"beta": 0.0, **_CHECKPOINTED},
        turns=1,
    ),
    Workload(
        "cuda_generation",
        "generation, 1.5B, prompt 1,024, 64 completions of 16 to 128",
        "generation",
        MODEL_1_5B,
        LENGTHS * 8,
        prompt_length=1024,
        options={"beta": 0.0},
        turns=1,
    ),
    _cuda_grpo_loss(
        "cuda_grpo_loss_7b",
        "GRPO loss step, 7B, prompt 1,024, 8 completions of 1,024, checkpointing in both",
        model=MODEL_7B,
        lengths=(1024,) * 8,
        options={"beta": 0.0, **_CHECKPOINTED},
        turns=1,
    ),
    _cuda_grpo_loss(
        "cuda_grpo_loss_7b_long",
        "GRPO loss step, 7B, prompt 1,024, 8 completions of 8,192, checkpointing in both",
        model=MODEL_7B,
        lengths=(8192,) * 8,
        options={"beta": 0.0, **_CHECKPOINTED},
        turns=1,
    ),
    Workload(
        "cuda_grpo",
        "whole GRPO step, 1.5B, prompt 1,024, 8 completions of 32 to 256",
        "grpo",
        MODEL_1_5B,
        LONG_LENGTHS,
        prompt_length=1024,
        options={"beta": 0.0},
        turns=2,
    ),
    _cuda_grpo_loss(
        "cuda_grpo_loss_liger",
        "GRPO loss step, 1.5B, 2 prompts of 1,024, 8 completions of 128 to 1,024, Liger in both",
        num_prompts=2,
        options={"beta": 0.0, "use_liger_kernel": True},
    ),
    _cuda_grpo_loss(
        "cuda_grpo_loss_kl",
        "GRPO loss step with reference, 1.5B, prompt 1,024, 8 completions of 128 to 1,024",
        options={"beta": 0.04},
    ),
    Workload(
        "cuda_sft_padded",
        "SFT, 1.5B, 16 texts of 128 to 1,024, TRL padded",
        "sft",
        MODEL_1_5B,
        VERY_LONG_LENGTHS * 2,
        turns=3,
    ),
)
