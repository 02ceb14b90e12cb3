"""How many completions are sampled at once, and which options exclude each other because of when they are sampled.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, check_unset

__all__ = ["LEAST_TEMPERATURE", "GenerationRules"]

LEAST_TEMPERATURE = 0.001  # below it, sampling is greedy but for rounding


@dataclass
class GenerationRules:
    """The arithmetic of generation batches, and checks of the options that it connects; a base of online configs."""

    @property
    def _all(self) -> Any:
        """This config, with the options that other groups declare."""
        return self

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """Options with which training on a group has to wait for the whole batch, and the remedy for each."""
        given = {
            "reward_shaping_kwargs: normalize": self._all.shaping_params.normalize,
            "dynamic_sampling": self._all.dynamic_sampling,
            "curriculum": self._all.curriculum,
        }
        return {f"{name}={value!r}": "Remove it." for name, value in given.items() if value}

    @property
    def micro_batches_per_generation(self) -> int:
        """The effective value of `steps_per_generation`: at least that of an optimizer step."""
        steps, accumulation = self._all.steps_per_generation, int(self._all.gradient_accumulation_steps)
        if self._all.generation_batch_size is not None:
            steps = self._all.generation_batch_size // int(self._all.rows_per_micro_batch * self._all.world_size)
        return accumulation if steps is None or accumulation % steps == 0 else int(steps)

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps in one pass over a generation batch."""
        return self.micro_batches_per_generation // int(self._all.gradient_accumulation_steps)

    @property
    def samples_per_evaluated_prompt(self) -> int:
        """The effective value of `num_generations_eval`."""
        return int(self._all.num_generations_eval or self._all.num_generations)

    @property
    def completions_per_rank(self) -> int:
        """Completions of a generation batch on one process."""
        return int(self._all.rows_per_micro_batch) * self.micro_batches_per_generation

    @property
    def completions_of_generation(self) -> int:
        """Completions of a generation batch, over all processes."""
        return self.completions_per_rank * int(self._all.world_size)

    @property
    def steps_of_a_generation(self) -> int:
        """Optimizer steps that learn from one generation batch."""
        return self.updates_per_generation * int(self._all.num_iterations)

    @property
    def generations_ahead(self) -> int:
        """Generation batches that may be requested in advance, in addition to the one that training needs."""
        is_async = self._all.generation_mode == "async"
        return int(self._all.max_staleness) // self.steps_of_a_generation if is_async else 0

    def validate_prompts(self) -> None:
        """Reject options of prompts and their tables that have no effect.

        Raises:
            ConfigError: Names the option, its value and what to do.
        """
        options = self._all
        check_no_effect(
            name="train_sampling_strategy",
            value=options.train_sampling_strategy,
            unset="random",
            because="shuffle_dataset decides the order of prompts",
            remedy="Set shuffle_dataset=False for the dataset's own order.",
        )
        for name, unset in (
            ("dataloader_num_workers", 0),
            ("dataloader_drop_last", False),
            ("dataloader_persistent_workers", False),
            ("dataloader_multiprocessing_context", None),
        ):
            check_no_effect(
                name=name,
                value=getattr(options, name),
                unset=unset,
                because="prompts are tokenized once at the start and come in full generation batches",
                remedy=f"Leave it {unset}.",
            )
        if options.filter_overlong_prompts and options.max_prompt_length is None:
            raise ConfigError(
                "filter_overlong_prompts=True with max_prompt_length=None: nothing is dropped. Set max_prompt_length."
            )
        if not options.log_completions:
            names, because = ("num_completions_to_print", "log_unique_prompts"), "log_completions=False"
            check_unset(self, *names, because=because, remedy="Set log_completions=True.")

    def validate_numbers(self) -> None:
        """Reject a temperature of evaluations that only seems to sample, and weights with which no reward counts.

        Raises:
            ConfigError: Names the option, its value and what to do.
        """
        temperature, weights = self._all.temperature_eval, self._all.reward_weights
        if temperature and temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature_eval={temperature!r}: must be 0, which is greedy decoding, or at least "
                f"{LEAST_TEMPERATURE}"
            )
        if weights and not any(weights):
            raise ConfigError(
                f"reward_weights={weights!r}: all rewards count 0, so there is nothing to learn. Give one of them a "
                "weight; those with weight 0 are only logged."
            )

    def validate_generation_size(self) -> None:
        """Reject sizes of micro-batches, generation batches and groups that do not fit each other.

        Raises:
            ConfigError: Names the sizes, and the nearest that fit.
        """
        options = self._all
        if options.sought == {"per_device_train_batch_size"}:
            raise ConfigError(
                "per_device_train_batch_size='auto' without effective_batch_size: it would decide how many prompts a "
                "generation batch has. Set effective_batch_size."
            )
        if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= options.automatic:
            because, remedy = "micro-batches, which it counts, are cut by trial", "Set generation_batch_size."
            check_unset(self, "steps_per_generation", because=because, remedy=remedy)
        per_step = options.rows_per_micro_batch * options.world_size
        if options.generation_batch_size is not None:
            if options.steps_per_generation is not None:
                raise ConfigError(
                    f"generation_batch_size={options.generation_batch_size} and "
                    f"steps_per_generation={options.steps_per_generation}: set only one of them; the other is derived "
                    "from it"
                )
            if options.generation_batch_size % per_step:
                raise ConfigError(
                    f"generation_batch_size={options.generation_batch_size}: must be a multiple of {per_step} = "
                    f"{options.rows_per_micro_batch} completions of a micro-batch * {options.world_size} processes"
                )
        accumulation = options.gradient_accumulation_steps
        steps = self.micro_batches_per_generation
        if steps % accumulation:
            fewer = steps // accumulation * accumulation
            fitting = f"{fewer} or {fewer + accumulation}" if fewer else f"{accumulation}"
            raise ConfigError(
                f"steps_per_generation={steps}: must be a multiple of gradient_accumulation_steps={accumulation}, or "
                f"divide it, so that an optimizer step learns from one generation. Set {fitting}."
            )
        self._validate_groups()

    def _validate_groups(self) -> None:
        options = self._all
        world_size, total, size = int(options.world_size), self.completions_of_generation, options.num_generations
        if total % size:
            step = lcm(world_size, size)
            nearest = max(1, round(total / step)) * step
            raise ConfigError(
                f"per_device_train_batch_size {options.per_device_train_batch_size} * steps_per_generation "
                f"{self.micro_batches_per_generation} * {world_size} processes = {total} completions: must be a "
                f"multiple of num_generations={size}. The nearest that works is {nearest}, which is "
                f"{nearest // world_size} on each process."
            )

    def _validate_autopilot_mode(self) -> None:
        options = self._all
        if options.increase_batch_size_on_plateau and options.generation_mode != "sync":
            raise ConfigError(
                f"increase_batch_size_on_plateau={options.increase_batch_size_on_plateau} with "
                f"generation_mode={options.generation_mode!r}: completions are requested before it is known how many "
                "the next step needs. Use generation_mode='sync'."
            )
        if options.ema_decay is not None and options.generation_mode == "async":
            raise ConfigError(
                f"ema_decay={options.ema_decay} with generation_mode='async': completions for training that are being "
                "sampled during an evaluation would come from the average. Use generation_mode='sync' or 'overlap'."
            )

    def validate_generation_mode(self) -> None:
        """Reject generation ahead of training where training decides what is generated, or needs all of it.

        Raises:
            ConfigError: Names the options and what to do.
        """
        options = self._all
        self._validate_autopilot_mode()
        steps = self.steps_of_a_generation
        if options.generation_mode == "overlap":
            if steps > 1:
                raise ConfigError(
                    f"generation_mode='overlap' with {steps} optimizer steps for each generation: the first would be "
                    "taken while completions of the others are still being sampled. Set num_iterations=1 and "
                    "steps_per_generation=gradient_accumulation_steps, or use generation_mode='async'."
                )
            if self.completions_per_rank % options.num_generations:
                raise ConfigError(
                    f"generation_mode='overlap' with {self.completions_per_rank} completions on each process and "
                    f"num_generations={options.num_generations}: a group is trained on as it arrives, so each process "
                    "needs the same number of groups. Make per_device_train_batch_size * steps_per_generation a "
                    "multiple of num_generations, or use generation_mode='sync'."
                )
            for given, remedy in self.needs_whole_batch.items():
                raise ConfigError(
                    f"generation_mode='overlap' with {given}: the update from a group then depends on the whole "
                    f"batch, but training on groups starts before it is complete. {remedy}"
                )
        for name in ("dynamic_sampling", "curriculum"):
            if options.generation_mode == "async" and getattr(options, name):
                raise ConfigError(
                    f"{name}={getattr(options, name)!r} with generation_mode='async': prompts are requested "
                    "before the rewards of the previous ones are known. Use generation_mode='sync'."
                )
        if options.generation_mode == "async" and options.max_staleness < steps:
            raise ConfigError(
                f"max_staleness={options.max_staleness}: must be at least {steps}, the optimizer steps of one "
                "generation, or nothing can be generated ahead."
            )
