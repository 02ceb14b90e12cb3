"""The configs of the algorithms: their options over HuggingFace's, and what both need from models."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Self

from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.losses.truncation import Truncation
from prefrl.models.plans import PositionLimit
from prefrl.options.algorithms import (
    PRESETS,
    GRPOOptions,
    OnlineDPOOptions,
    PPOOptions,
    ReinforcePlusPlusOptions,
    RLOOOptions,
    combined,
)
from prefrl.options.distillation import DistillationOptions
from prefrl.options.fields import flat_names
from prefrl.options.generation_rules import cuts_of
from prefrl.options.offline import (
    BCOOptions,
    CPOOptions,
    DPOOptions,
    KTOOptions,
    OfflineOptions,
    ORPOOptions,
    RewardModelOptions,
    SFTOptions,
)
from prefrl.options.online import OnlineOptions
from prefrl.options.policy_gradient import PolicyGradientOptions
from prefrl.trainer.base_config import BaseConfig

logger = logging.getLogger(__name__)


@dataclass
class OfflineConfig(OfflineOptions, BaseConfig):
    """Options of trainers that learn from a fixed dataset."""


@dataclass
class OnlineConfig(OnlineOptions, BaseConfig):
    """Options of the rollout loop."""

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
            stop=tuple(self.stop or ()),
            ignores_eos=self.ignore_eos,
        )

    def evaluation_sampling_params(self) -> SamplingParams:
        """The sampling parameters of evaluations."""
        params = replace(self.sampling_params(), num_samples=self.samples_per_evaluated_prompt)
        if self.temperature_eval is not None:
            params = replace(params, temperature=self.temperature_eval)
        return replace(params, **self.eval_sampling_params.given)

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
    def rows_in_words(self) -> str:
        """See `BaseConfig.rows_in_words`."""
        completions = self.completions_of_generation
        shared = "" if self.steps_of_a_generation == 1 else f", for {self.steps_of_a_generation} steps"
        kind = "completion" if self.num_generations == 1 else "completions"
        return (
            f"{completions // self.num_generations:,} prompts x {self.num_generations} {kind} of at most "
            f"{self.max_completion_length} tokens{shared}"
        )

    def check_machine(self) -> None:
        """See `BaseConfig.check_machine`; also whether the device can sample."""
        if not self.use_vllm and self.device.type == "mps":
            raise ConfigError(
                "use_vllm=False on MPS: tokens are sampled with numbers in float64, which MPS does not have. Set "
                "use_cpu=True."
            )
        super().check_machine()


@dataclass
class PolicyGradientConfig(PolicyGradientOptions, OnlineConfig):
    """Options of all policy-gradient trainers."""

    @property
    def scoring_truncation(self) -> Truncation | None:
        """See `BaseConfig.scoring_truncation`."""
        cuts = cuts_of(self)
        return Truncation(**cuts) if cuts and self.truncated_logprobs == "exact" else None

    def warn_of_lengths(self) -> None:
        """Warn if the ratio of a sequence counts once for each of its tokens."""
        reduction = self.reduction
        if self.importance_sampling_level in ("sequence", "sequence_token") and reduction in ("token", "constant"):
            logger.warning(
                "importance_sampling_level=%r with loss_type=%r: this loss is a sum over tokens, so a sequence counts "
                "as often as it has tokens. loss_type='grpo' counts each sequence once, as in GSPO.",
                *(self.importance_sampling_level, self.loss_type),
            )


@dataclass
class SFTConfig(SFTOptions, OfflineConfig):
    """Options of `SFTTrainer`."""


@dataclass
class DPOConfig(DPOOptions, OfflineConfig):
    """Options of `DPOTrainer`."""


@dataclass
class KTOConfig(KTOOptions, OfflineConfig):
    """Options of `KTOTrainer`."""


@dataclass
class ORPOConfig(ORPOOptions, OfflineConfig):
    """Options of `ORPOTrainer`."""


@dataclass
class CPOConfig(CPOOptions, OfflineConfig):
    """Options of `CPOTrainer`."""


@dataclass
class BCOConfig(BCOOptions, OfflineConfig):
    """Options of `BCOTrainer`."""


@dataclass
class RewardConfig(RewardModelOptions, OfflineConfig):
    """Options of `RewardTrainer`."""


@dataclass
class GRPOConfig(GRPOOptions, PolicyGradientConfig):
    """Options of `GRPOTrainer`."""

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """A config with the options of a paper's algorithm. Your own options, and keys of mappings, take precedence.

        Args:
            name: A key of `PRESETS`: "deepseekmath", "dr_grpo", "dapo", "gspo", "cispo", ...
            options: Any options of the config.

        Raises:
            ConfigError: There is no preset of this name, or the options cannot be combined.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset {name!r}: must be one of {', '.join(map(repr, PRESETS))}")
        return cls(**combined(PRESETS[name], options, flat_names(cls)))


@dataclass
class RLOOConfig(RLOOOptions, PolicyGradientConfig):
    """Options of `RLOOTrainer`."""


@dataclass
class ReinforcePlusPlusConfig(ReinforcePlusPlusOptions, PolicyGradientConfig):
    """Options of `ReinforcePlusPlusTrainer`."""


@dataclass
class PPOConfig(PPOOptions, PolicyGradientConfig):
    """Options of `PPOTrainer`."""


@dataclass
class OnlineDPOConfig(OnlineDPOOptions, OnlineConfig):
    """Options of `OnlineDPOTrainer`."""


@dataclass
class DistillationConfig(DistillationOptions, OnlineConfig):
    """Options of `DistillationTrainer`."""
