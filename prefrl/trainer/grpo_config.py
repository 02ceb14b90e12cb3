"""Options of GRPO."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.errors import ConfigError
from prefrl.trainer.online_config import OnlineConfig, PolicyLossOptions, RewardOptions, SamplingOptions
from prefrl.trainer.reference_config import ReferenceOptions
from prefrl.trainer.vllm_options import VLLMOptions

__all__ = ["GRPOConfig"]

# Aggregations whose advantages depend on their own group alone.
_BY_GROUP = ("sum_then_normalize",)


@dataclass
class GRPOConfig(PolicyLossOptions, SamplingOptions, VLLMOptions, RewardOptions, ReferenceOptions, OnlineConfig):
    """Options of `GRPOTrainer`."""

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        if isinstance(self.scale_rewards, bool):  # the names before there was "batch"
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().validate()
        self._validate_groups()
        self._validate_clipping()
        self.validate_reference()
        self.validate_vllm()
        self._validate_generation_mode()
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            raise ConfigError(
                f"scale_rewards={self.scale_rewards!r} has no effect with "
                "multi_objective_aggregation='normalize_then_sum', which normalises by group and then by batch. Use "
                "scale_rewards='group'."
            )
        if self.filter_overlong_prompts and self.max_prompt_length is None:
            raise ConfigError(
                "filter_overlong_prompts=True with max_prompt_length=None: no prompt is too long. Set it."
            )

    def _validate_groups(self) -> None:
        if self.num_generations < 2:
            raise ConfigError(
                f"num_generations={self.num_generations}: group advantages need at least 2 completions of a prompt. "
                "Set num_generations>=2."
            )
        if self.completions_per_rank % self.num_generations:
            nearest = max(1, round(self.completions_per_rank / self.num_generations)) * self.num_generations
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} * steps_per_generation "
                f"{self.micro_batches_per_generation} = {self.completions_per_rank} completions on each process: must "
                f"be a multiple of num_generations={self.num_generations}, because a group stays on one process. The "
                f"nearest that works is {nearest}."
            )

    def _validate_clipping(self) -> None:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ConfigError(
                f"delta={self.delta}: must be above 1 + epsilon_high = {1 + high}, or the clipping never takes effect"
            )

    @property
    def steps_of_a_generation(self) -> int:
        """Optimizer steps that learn from one generation batch."""
        return self.updates_per_generation * self.num_iterations

    @property
    def generations_ahead(self) -> int:
        """Generation batches that may be under way besides the one that training needs."""
        return self.max_staleness // self.steps_of_a_generation if self.generation_mode == "async" else 0

    def _validate_generation_mode(self) -> None:
        steps = self.steps_of_a_generation
        if self.generation_mode == "overlap":
            if steps > 1:
                raise ConfigError(
                    f"generation_mode='overlap' with {steps} optimizer steps for each generation: the first would be "
                    "taken while completions of the others are still sampled. Set num_iterations=1 and "
                    "steps_per_generation=gradient_accumulation_steps, or use generation_mode='async'."
                )
            for name, allowed in (("scale_rewards", ("group", "none")), ("multi_objective_aggregation", _BY_GROUP)):
                if getattr(self, name) not in allowed:
                    raise ConfigError(
                        f"generation_mode='overlap' with {name}={getattr(self, name)!r}: advantages then depend on "
                        f"the whole batch, and groups are trained before it is complete. Use {name}={allowed[0]!r}."
                    )
        if self.generation_mode == "async" and self.max_staleness < steps:
            raise ConfigError(
                f"max_staleness={self.max_staleness}: must be at least {steps}, the optimizer steps of one "
                "generation, or nothing can be generated ahead."
            )
