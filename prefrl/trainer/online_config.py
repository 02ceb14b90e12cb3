"""Options of trainers that learn from their own completions, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.trainer.base_config import BaseConfig, TruncationMode
from prefrl.trainer.options import check_no_effect, opt, parse_json

__all__ = ["OnlineConfig", "PolicyLossOptions", "RewardOptions", "SamplingOptions"]


@dataclass
class SamplingOptions:
    """How completions are drawn."""

    max_prompt_length: Annotated[int, Ge(1)] | None = opt(512, "Longest prompt in tokens; None: any length.")
    truncation_mode: TruncationMode = opt(
        "keep_end", "What happens to a longer prompt: keep its end, keep its start, or stop with an error."
    )
    filter_overlong_prompts: bool = opt(False, "Leave prompts above max_prompt_length out of the dataset.")
    num_generations: Annotated[int, Ge(1)] = opt(8, "Completions of each prompt: the size of a group.")
    num_generations_eval: Annotated[int, Ge(1)] | None = opt(
        None, "Completions of each prompt in evaluation; None: as num_generations."
    )
    max_completion_length: Annotated[int, Ge(1)] = opt(256, "Longest completion in tokens.")
    temperature: Annotated[float, Gt(0)] = opt(0.9, "Sampling temperature; the losses score at the same temperature.")
    temperature_eval: Annotated[float, Ge(0)] | None = opt(
        None, "Temperature in evaluation; 0: greedy. None: as temperature."
    )
    top_p: Annotated[float, Gt(0), Le(1)] = opt(1.0, "Sample from the smallest set of tokens with this probability.")
    top_k: Annotated[int, Ge(0)] | None = opt(50, "Sample from the k most likely tokens; None or 0: from all.")
    min_p: Annotated[float, Ge(0), Le(1)] | None = opt(
        None, "Sample from tokens with at least this share of the likeliest token's probability."
    )
    repetition_penalty: Annotated[float, Gt(0)] = opt(1.0, "Above 1: tokens of the text so far become less likely.")

    def sampling_params(self, *, evaluation: bool = False) -> SamplingParams:
        """What the generator is asked for."""
        num_samples, temperature = self.num_generations, self.temperature
        if evaluation:
            num_samples = self.num_generations_eval or num_samples
            temperature = temperature if self.temperature_eval is None else self.temperature_eval
        return SamplingParams(
            num_samples=num_samples,
            max_tokens=self.max_completion_length,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


@dataclass
class RewardOptions:
    """How rewards become advantages."""

    reward_weights: list[float] | None = opt(None, "Weight of each reward; None: 1 for all.")
    reward_timeout: Annotated[float, Gt(0)] | None = opt(
        None, "Seconds that a reward function may take for a batch; None: no limit."
    )
    scale_rewards: Literal["group", "batch", "none"] = opt(
        "group",
        "What centred rewards are divided by: the standard deviation of their group, of the whole batch, or nothing "
        "(Dr. GRPO). True and False mean group and none.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = opt(
        "sum_then_normalize", "Several rewards: weighted sum first, or each normalised first (GDPO)."
    )
    mask_truncated_completions: bool = opt(False, "Completions that hit max_completion_length have no loss (DAPO).")


@dataclass
class PolicyLossOptions:
    """The clipped surrogate."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = opt(
        "dapo",
        "How token losses are averaged. grpo: mean over sequences of token means. dapo, bnpo: mean over all tokens of "
        "the step. dr_grpo: sum over sequences / (number of sequences * max_completion_length).",
    )
    importance_sampling_level: Literal["token", "sequence"] = opt(
        "token", "Ratio for each token, or one for each sequence from its mean log-ratio (GSPO)."
    )
    epsilon: Annotated[float, Ge(0), Le(1)] = opt(0.2, "The ratio is clipped to >= 1 - epsilon.")
    epsilon_high: Annotated[float, Ge(0)] | None = opt(
        None, "The ratio is clipped to <= 1 + epsilon_high; None: as epsilon. DAPO: 0.28."
    )
    delta: Annotated[float, Gt(0)] | None = opt(
        None, "Upper bound of the ratio on the side that is not clipped (two-sided clipping); above 1 + epsilon."
    )
    num_iterations: Annotated[int, Ge(1)] = opt(1, "How often each generation batch is learned from.")


@dataclass
class OnlineConfig(BaseConfig):
    """Options of the rollout loop."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    generation_batch_size: Annotated[int, Ge(1)] | None = opt(
        None, "Completions of one generation over all processes; None: from steps_per_generation."
    )
    steps_per_generation: Annotated[int, Ge(1)] | None = opt(
        None, "Micro-batches made from one generation; None: gradient_accumulation_steps."
    )
    chat_template_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for the chat template; JSON on the command line."
    )
    shuffle_dataset: bool = opt(True, "Visit prompts in a new order each epoch.")
    log_completions: bool = opt(False, "Print a table of completions and write them to parquet at every generation.")
    num_completions_to_print: Annotated[int, Ge(1)] | None = opt(None, "Rows of that table; None: all.")

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        parse_json(self, "chat_template_kwargs")
        self._validate_generation_size()
        self._validate_prompt_loading()
        if not self.log_completions:
            check_no_effect(
                name="num_completions_to_print",
                value=self.num_completions_to_print,
                unset=None,
                because="log_completions=False",
                remedy="Set log_completions=True.",
            )

    def _validate_prompt_loading(self) -> None:
        check_no_effect(
            name="train_sampling_strategy",
            value=self.train_sampling_strategy,
            unset="random",
            because="shuffle_dataset decides the order of prompts",
            remedy="Set shuffle_dataset=False for the dataset's own order.",
        )
        for name, unset in (("dataloader_num_workers", 0), ("dataloader_drop_last", False)):
            check_no_effect(
                name=name,
                value=getattr(self, name),
                unset=unset,
                because="prompts are tokenised once at the start and come in full generation batches",
                remedy=f"Leave it {unset}.",
            )

    def _validate_generation_size(self) -> None:
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None:
            if self.steps_per_generation is not None:
                raise ConfigError(
                    f"generation_batch_size={self.generation_batch_size} and "
                    f"steps_per_generation={self.steps_per_generation}: set one of them; the other follows"
                )
            if self.generation_batch_size % per_step:
                raise ConfigError(
                    f"generation_batch_size={self.generation_batch_size}: must be a multiple of {per_step} = "
                    f"per_device_train_batch_size {self.per_device_train_batch_size} * {self.world_size} processes"
                )
        accumulation = self.gradient_accumulation_steps
        if self.micro_batches_per_generation % accumulation:
            raise ConfigError(
                f"steps_per_generation={self.micro_batches_per_generation}: must be a multiple of "
                f"gradient_accumulation_steps={accumulation}, so that an optimizer step learns from one generation"
            )

    @property
    def micro_batches_per_generation(self) -> int:
        """`steps_per_generation` as it takes effect."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // int(self.per_device_train_batch_size * self.world_size)
        return self.steps_per_generation or int(self.gradient_accumulation_steps)

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps of one pass over a generation batch."""
        return self.micro_batches_per_generation // int(self.gradient_accumulation_steps)

    @property
    def completions_per_rank(self) -> int:
        """Completions of one generation on this process."""
        return int(self.per_device_train_batch_size) * self.micro_batches_per_generation
