"""Options of trainers that learn from their own completions, as option groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.options.fields import opt, parse_json
from prefrl.options.generation_rules import (
    AT_K_RULES,
    GENERATION_MODE_RULES,
    GENERATION_SIZE_RULES,
    LEAST_TEMPERATURE,
    NUMBERS_RULES,
    PROMPTS_RULES,
    GenerationRules,
)
from prefrl.options.length_bound import LengthBound
from prefrl.options.rules import apply
from prefrl.options.types import BatchSize, Length, NumSamples, Seconds
from prefrl.trainer.base.config import BaseConfig, TruncationMode
from prefrl.trainer.online.episode_options import EpisodeOptions
from prefrl.trainer.online.evaluation_options import SampledEvaluationOptions
from prefrl.trainer.online.flat_names import OnlineNames
from prefrl.trainer.online.local_options import LOCAL_RULES, LocalOptions
from prefrl.trainer.online.rollout_options import (
    PromptOptions,
    ShapingOptions,
)
from prefrl.trainer.online.vllm_options import NO_SERVER_RULES, SERVER_RULES, VLLMOptions

if TYPE_CHECKING:
    from prefrl.models.positions import PositionLimit

__all__ = ["OnlineConfig", "RewardOptions", "SamplingOptions"]


@dataclass
class SamplingOptions:
    """How completions are sampled."""

    max_prompt_length: Length | None = opt(512, "Maximum prompt length in tokens; None: no limit.")
    truncation_mode: TruncationMode = opt(
        "keep_end", "How to handle longer prompts: keep their end, keep their start, or stop with an error."
    )
    filter_overlong_prompts: bool = opt(False, "Drop prompts longer than max_prompt_length from the dataset.")
    num_generations: NumSamples = opt(8, "Completions per prompt: the size of a group.")
    num_generations_eval: NumSamples | None = opt(
        None,
        "Completions per prompt in evaluation; None: same as num_generations.",
        decides=False,
    )
    max_completion_length: Length | None = opt(
        256, "Maximum completion length in tokens; None: the rest of the model's context after max_prompt_length."
    )
    temperature: Annotated[float, Ge(LEAST_TEMPERATURE), Le(100)] = opt(
        0.9, "Sampling temperature; log-probs in losses are computed at the same temperature."
    )
    temperature_eval: Annotated[float, Ge(0), Le(100)] | None = opt(
        None,
        "Temperature in evaluation; 0: greedy decoding. None: same as temperature.",
        decides=False,
    )
    top_p: Annotated[float, Ge(0.001), Le(1)] = opt(
        1.0, "Sample from the smallest set of tokens whose total probability is at least this."
    )
    top_k: Annotated[int, Ge(0)] | None = opt(0, "Sample from the k most likely tokens; 0 or None: from all.")
    min_p: Annotated[float, Ge(0), Le(1)] | None = opt(
        None, "Sample from tokens whose probability is at least this fraction of the most likely token's."
    )
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = opt(
        1.0, "Above 1: tokens that already occur in the text become less likely."
    )

    @property
    def longest_completion(self) -> int:
        """`max_completion_length`, which is a number once a trainer has loaded the model."""
        if self.max_completion_length is None:
            raise ConfigError(
                "max_completion_length=None: a trainer sets it only after it has loaded the model. Set it."
            )
        return self.max_completion_length

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters for the generator."""
        return SamplingParams(
            num_samples=self.num_generations,
            max_tokens=self.longest_completion,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


@dataclass
class RewardOptions:
    """Reward weights, what happens when rewards fail, and masking of truncated completions."""

    reward_weights: list[float] | None = opt(None, "Weight of each reward; None: 1 for all.")
    reward_timeout: Seconds | None = opt(
        600.0,
        "Time limit of a reward function for a batch, in seconds; None: no limit.",
        decides=False,
    )
    on_reward_error: Literal["raise", "skip"] = opt(
        "raise",
        "What happens on an error in a reward function. raise: the run ends. skip: the function's rewards are None "
        "for that batch; ten such batches in a row end the run.",
        decides=False,
    )
    stop_without_signal: Annotated[int, Ge(1)] | None = opt(
        None,
        "End the run with an error after this many consecutive optimizer steps in which the rewards give no signal; "
        "None: only warn.",
        decides=False,
    )
    mask_truncated_completions: bool = opt(
        False, "Exclude completions that were cut off at max_completion_length from the loss (DAPO)."
    )


@dataclass
class OnlineConfig(
    SamplingOptions,
    SampledEvaluationOptions,
    EpisodeOptions,
    LocalOptions,
    VLLMOptions,
    PromptOptions,
    RewardOptions,
    ShapingOptions,
    OnlineNames,
    GenerationRules,
    BaseConfig,
):
    """Options of the rollout loop."""

    hints: ClassVar[Mapping[str, Any]] = {
        **BaseConfig.hints,
        "tool_parser": dict[str, Any] | str | Callable[[str], Any] | None,
    }
    best_metric: ClassVar[str] = "reward"
    spike_metrics: ClassVar[tuple[str, ...]] = ("grad_norm", "kl")

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    generation_batch_size: BatchSize | None = opt(
        None,
        "Completions of a generation batch, over all processes; None: follows from steps_per_generation.",
        decides=False,
    )
    steps_per_generation: Annotated[int, Ge(1), Le(10**5)] | None = opt(
        None,
        "Micro-batches per generation batch and process: a multiple of gradient_accumulation_steps. None, or a "
        "divisor of it: one generation batch per optimizer step, so that all its completions are sampled with the "
        "same weights.",
        decides=False,
    )
    chat_template_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for the chat template; JSON on the command line."
    )
    num_iterations: Annotated[int, Ge(1), Le(10**6)] = opt(1, "Number of passes over each generation batch.")
    shuffle_dataset: bool = opt(True, "Visit prompts in a new random order each epoch.")
    log_completions: bool = opt(
        False,
        "Print completions of each generation batch as a table, and send all of them to those trackers in report_to "
        "that have tables.",
        decides=False,
    )
    journal_keep: Annotated[int, Ge(0)] = opt(
        100,
        "Number of scored generation batches to keep in the folder completions, in addition to those that a resumed "
        "run needs; 0: none are written, and a resumed run generates them again.",
        decides=False,
    )
    num_completions_to_print: Annotated[int, Ge(1)] | None = opt(
        4,
        "log_completions prints the best and the worst completion of each prompt, up to this number; None: all.",
        decides=False,
    )
    log_unique_prompts: bool = opt(False, "Let log_completions print only one completion per prompt.", decides=False)

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        parse_json(self, "chat_template_kwargs")
        apply(self, GENERATION_SIZE_RULES, PROMPTS_RULES, NUMBERS_RULES, AT_K_RULES, LOCAL_RULES)
        self.check_sampler(use_vllm=self.use_vllm)
        apply(self, SERVER_RULES if self.use_vllm else NO_SERVER_RULES)
        apply(self, GENERATION_MODE_RULES)

    @property
    def scoring_temperature(self) -> float:
        """The sampling temperature: the distribution that is sampled from enters the losses."""
        return self.temperature

    def fit_context(self, limit: PositionLimit | None) -> None:
        """See `BaseConfig.fit_context`; sets `max_completion_length` if it is None."""
        prompt, length = self.max_prompt_length, self.max_completion_length
        if length is not None:
            if limit is not None and length > limit.count and not limit.is_scaled:
                raise ConfigError(
                    f"max_completion_length={length}: the model has {limit.count} positions, "
                    "max_position_embeddings in its config, for prompt and completion together. Lower it, or stretch "
                    "the positions with rope_parameters in model_init_kwargs."
                )
            return
        if limit is None or prompt is None or prompt >= limit.count:
            context = "no max_position_embeddings" if limit is None else f"max_position_embeddings={limit.count}"
            raise ConfigError(
                f"max_completion_length=None with max_prompt_length={prompt} and {context} in the model's config: "
                "leaves no number of tokens for completions. Set max_completion_length."
            )
        self.max_completion_length = limit.count - prompt

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseConfig.length_bound`."""
        options = "max_prompt_length or max_completion_length"
        return LengthBound(self.max_prompt_length, options, sampled=self.longest_completion)

    def evaluation_sampling_params(self) -> SamplingParams:
        """The sampling parameters of evaluations."""
        params = replace(self.sampling_params(), num_samples=self.samples_per_evaluated_prompt)
        if self.temperature_eval is not None:
            params = replace(params, temperature=self.temperature_eval)
        return replace(params, **self.eval_sampling_params.given)

    @property
    def prompts_per_evaluation_batch(self) -> int:
        """Prompts of an evaluation batch on one process."""
        return max(1, int(self.per_device_eval_batch_size) // self.samples_per_evaluated_prompt)

    @property
    def rows_in_words(self) -> str:
        """See `BaseConfig.rows_in_words`."""
        completions = self.completions_of_generation
        shared = "" if self.steps_of_a_generation == 1 else f", for {self.steps_of_a_generation} steps"
        kind = "completion" if self.num_generations == 1 else "completions"
        return (
            f"{completions // self.num_generations:,} prompts x {self.num_generations} {kind} of at most "
            f"{self.max_completion_length} tokens{shared}"
        )

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt also needs a greedy completion."""
        return False

    @property
    def needs_scores_first(self) -> bool:
        """Whether the learning signal depends on log-probs of the policy before its first update from the batch."""
        return False
