"""How many completions are sampled at once, and which options exclude each other because of when they are sampled.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, check_unset

__all__ = ["GenerationRules"]


@dataclass
class GenerationRules:
    """The arithmetic of generation batches, and checks of the options that it connects; a base of online configs."""

    if TYPE_CHECKING:  # options, and what is derived from them; at run time, annotations would hide their types
        automatic: frozenset[str]
        sought: frozenset[str]
        per_device_train_batch_size: int
        gradient_accumulation_steps: int
        generation_batch_size: int | None
        steps_per_generation: int | None
        num_iterations: int
        num_generations: int
        num_generations_eval: int | None
        generation_mode: str
        max_staleness: int
        max_prompt_length: int | None
        filter_overlong_prompts: bool
        log_completions: bool
        train_sampling_strategy: str
        dynamic_sampling: bool
        curriculum: str | None
        increase_batch_size_on_plateau: int
        ema_decay: float | None

        @property
        def rows_per_micro_batch(self) -> int:
            """See `BaseConfig`."""

        @property
        def world_size(self) -> int:
            """See `transformers.TrainingArguments`."""

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """Options with which training on a group has to wait for the whole batch, and the remedy for each."""
        given = {"dynamic_sampling": self.dynamic_sampling, "curriculum": self.curriculum}
        return {f"{name}={value!r}": "Remove it." for name, value in given.items() if value}

    @property
    def micro_batches_per_generation(self) -> int:
        """The effective value of `steps_per_generation`: at least that of an optimizer step."""
        steps, accumulation = self.steps_per_generation, int(self.gradient_accumulation_steps)
        if self.generation_batch_size is not None:
            steps = self.generation_batch_size // int(self.rows_per_micro_batch * self.world_size)
        return accumulation if steps is None or accumulation % steps == 0 else steps

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps in one pass over a generation batch."""
        return self.micro_batches_per_generation // int(self.gradient_accumulation_steps)

    @property
    def samples_per_evaluated_prompt(self) -> int:
        """The effective value of `num_generations_eval`."""
        return self.num_generations_eval or self.num_generations

    @property
    def completions_per_rank(self) -> int:
        """Completions of a generation batch on one process."""
        return self.rows_per_micro_batch * self.micro_batches_per_generation

    @property
    def completions_of_generation(self) -> int:
        """Completions of a generation batch, over all processes."""
        return self.completions_per_rank * int(self.world_size)

    @property
    def steps_of_a_generation(self) -> int:
        """Optimizer steps that learn from one generation batch."""
        return self.updates_per_generation * self.num_iterations

    @property
    def generations_ahead(self) -> int:
        """Generation batches that may be requested in advance, in addition to the one that training needs."""
        return self.max_staleness // self.steps_of_a_generation if self.generation_mode == "async" else 0

    def validate_prompts(self) -> None:
        """Reject options of prompts and their tables that have no effect.

        Raises:
            ConfigError: Names the option, its value and what to do.
        """
        check_no_effect(
            name="train_sampling_strategy",
            value=self.train_sampling_strategy,
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
                value=getattr(self, name),
                unset=unset,
                because="prompts are tokenized once at the start and come in full generation batches",
                remedy=f"Leave it {unset}.",
            )
        if self.filter_overlong_prompts and self.max_prompt_length is None:
            raise ConfigError(
                "filter_overlong_prompts=True with max_prompt_length=None: nothing is dropped. Set max_prompt_length."
            )
        if not self.log_completions:
            names, because = ("num_completions_to_print", "log_unique_prompts"), "log_completions=False"
            check_unset(self, *names, because=because, remedy="Set log_completions=True.")

    def validate_generation_size(self) -> None:
        """Reject sizes of micro-batches, generation batches and groups that do not fit each other.

        Raises:
            ConfigError: Names the sizes, and the nearest that fit.
        """
        if self.sought == {"per_device_train_batch_size"}:
            raise ConfigError(
                "per_device_train_batch_size='auto' without effective_batch_size: it would decide how many prompts a "
                "generation batch has. Set effective_batch_size."
            )
        if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= self.automatic:
            because, remedy = "micro-batches, which it counts, are cut by trial", "Set generation_batch_size."
            check_unset(self, "steps_per_generation", because=because, remedy=remedy)
        per_step = self.rows_per_micro_batch * self.world_size
        if self.generation_batch_size is not None:
            if self.steps_per_generation is not None:
                raise ConfigError(
                    f"generation_batch_size={self.generation_batch_size} and "
                    f"steps_per_generation={self.steps_per_generation}: set one of them; the other follows"
                )
            if self.generation_batch_size % per_step:
                raise ConfigError(
                    f"generation_batch_size={self.generation_batch_size}: must be a multiple of {per_step} = "
                    f"{self.rows_per_micro_batch} completions of a micro-batch * {self.world_size} processes"
                )
        accumulation = self.gradient_accumulation_steps
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
        world_size, total, size = int(self.world_size), self.completions_of_generation, self.num_generations
        if total % size:
            step = lcm(world_size, size)
            nearest = max(1, round(total / step)) * step
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} * steps_per_generation "
                f"{self.micro_batches_per_generation} * {world_size} processes = {total} completions: must be a "
                f"multiple of num_generations={size}. The nearest that works is {nearest}, which is "
                f"{nearest // world_size} on each process."
            )

    def _validate_autopilot_mode(self) -> None:
        if self.increase_batch_size_on_plateau and self.generation_mode != "sync":
            raise ConfigError(
                f"increase_batch_size_on_plateau={self.increase_batch_size_on_plateau} with "
                f"generation_mode={self.generation_mode!r}: completions are requested before it is known how many the "
                "next step needs. Use generation_mode='sync'."
            )
        if self.ema_decay is not None and self.generation_mode == "async":
            raise ConfigError(
                f"ema_decay={self.ema_decay} with generation_mode='async': completions for training that are being "
                "sampled during an evaluation would come from the average. Use generation_mode='sync' or 'overlap'."
            )

    def validate_generation_mode(self) -> None:
        """Reject generation ahead of training where training decides what is generated, or needs all of it.

        Raises:
            ConfigError: Names the options and what to do.
        """
        self._validate_autopilot_mode()
        steps = self.steps_of_a_generation
        if self.generation_mode == "overlap":
            if steps > 1:
                raise ConfigError(
                    f"generation_mode='overlap' with {steps} optimizer steps for each generation: the first would be "
                    "taken while completions of the others are still being sampled. Set num_iterations=1 and "
                    "steps_per_generation=gradient_accumulation_steps, or use generation_mode='async'."
                )
            if self.completions_per_rank % self.num_generations:
                raise ConfigError(
                    f"generation_mode='overlap' with {self.completions_per_rank} completions on each process and "
                    f"num_generations={self.num_generations}: a group is trained on as it arrives, so each process "
                    "needs the same number of groups. Make per_device_train_batch_size * steps_per_generation a "
                    "multiple of num_generations, or use generation_mode='sync'."
                )
            for given, remedy in self.needs_whole_batch.items():
                raise ConfigError(
                    f"generation_mode='overlap' with {given}: the update from a group then depends on the whole "
                    f"batch, but training on groups starts before it is complete. {remedy}"
                )
        for name in ("dynamic_sampling", "curriculum"):
            if self.generation_mode == "async" and getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} with generation_mode='async': prompts are requested "
                    "before the rewards of the previous ones are known. Use generation_mode='sync'."
                )
        if self.generation_mode == "async" and self.max_staleness < steps:
            raise ConfigError(
                f"max_staleness={self.max_staleness}: must be at least {steps}, the optimizer steps of one "
                "generation, or nothing can be generated ahead."
            )
