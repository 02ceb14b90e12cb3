"""Options for choosing prompts, shaping rewards, and selecting completions and tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError
from prefrl.trainer.base.options import check_no_effect, opt

__all__ = ["PromptOptions", "SelectionOptions", "ShapingOptions", "check_range", "refuse_unless"]


@dataclass
class ShapingOptions:
    """How total rewards are shaped before advantages are computed, in this order."""

    stop_properly_penalty_coef: Annotated[float, Le(1)] | None = opt(
        None, "Multiply the total reward of completions cut off at the length limit by this; below 0: set it to this."
    )
    missing_eos_penalty: Annotated[float, Gt(0)] | None = opt(
        None, "Subtract this from the total reward of completions that did not end by themselves."
    )
    normalize_rewards: bool = opt(
        False,
        "Divide total rewards by the running standard deviation of all totals so far, over all processes. If the "
        "advantages do not compare completions of a group, subtract the running mean, too.",
    )
    reward_clip_range: list[float] | None = opt(
        None, "Clip total rewards to this range: smallest and largest value; None: no clipping."
    )

    @property
    def shapes_rewards(self) -> bool:
        """Whether total rewards are shaped at all."""
        given = (self.stop_properly_penalty_coef, self.missing_eos_penalty, self.reward_clip_range)
        return self.normalize_rewards or any(value is not None for value in given)

    @property
    def shaping_hyperparameters(self) -> dict[str, Any]:
        """The keyword arguments of `rollout.reward_shaping.shaped` that are options."""
        bounds = self.reward_clip_range
        return {
            "stop_properly_penalty_coef": self.stop_properly_penalty_coef,
            "missing_eos_penalty": self.missing_eos_penalty,
            "reward_clip_range": None if bounds is None else tuple(bounds),
        }

    def validate_shaping(self) -> None:
        """Reject bounds that are not in order.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        check_range(self.reward_clip_range, "reward_clip_range")


@dataclass
class PromptOptions:
    """Which prompts are sampled from."""

    dynamic_sampling: bool = opt(
        False,
        "Replace prompts whose completions all have the same reward by other prompts of the dataset (DAPO), until "
        "rewards differ within every prompt or dynamic_sampling_max_tries is reached.",
    )
    dynamic_sampling_max_tries: Annotated[int, Ge(1)] = opt(
        10, "Maximum number of times that prompts are replaced in a generation batch."
    )
    filter_reward_metric: str | None = opt(
        None, "Name of the reward that must differ within a prompt; None: the total reward."
    )
    curriculum: Literal["variance", "band"] | None = opt(
        None,
        "Replace prompts whose success rate p is outside curriculum_band (too easy or too hard) by others. variance: "
        "sample them in proportion to p (1 - p). band: sample uniformly inside the band.",
    )
    curriculum_band: list[float] = opt([0.1, 0.9], "Lowest and highest success rate of prompts that are not replaced.")
    curriculum_reward_bounds: list[float] = opt([0.0, 1.0], "Rewards of a failure and of a success.")
    curriculum_floor: Annotated[float, Ge(0)] = opt(0.05, "Added to the sampling weight of every prompt.")
    curriculum_momentum: Annotated[float, Ge(0), Lt(1)] = opt(
        0.5, "Weight of the past in a prompt's success rate, an exponential moving average."
    )

    def validate_prompts(self) -> None:
        """Reject options of features that are off, and bounds that are not in order.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        if not self.dynamic_sampling:
            for name in ("dynamic_sampling_max_tries", "filter_reward_metric"):
                refuse_unless(self, name, switch="dynamic_sampling", remedy="Set dynamic_sampling=True.")
        if self.curriculum is None:
            for field in fields(PromptOptions):
                if field.name.startswith("curriculum_"):
                    refuse_unless(self, field.name, switch="curriculum", remedy="Set curriculum='variance'.")
        check_range(self.curriculum_band, "curriculum_band")
        check_range(self.curriculum_reward_bounds, "curriculum_reward_bounds")


@dataclass
class SelectionOptions:
    """Which completions and tokens are trained on."""

    rollout_selection: Literal["max_variance", "best", "random"] | None = opt(
        None,
        "Train on num_selected completions of each prompt: those whose rewards have the largest variance (PODS), "
        "those with the best rewards, or a random subset. None: all.",
    )
    num_selected: Annotated[int, Ge(1)] | None = opt(
        None, "Number of completions that rollout_selection keeps of each prompt."
    )
    rollout_resampling: Literal["pow", "max_min", "max_random"] | None = opt(
        None,
        "Resample the completions to train on with replacement (PF-PPO): pow, in proportion to abs(reward)^power; "
        "max_min, the best and the worst of the batch; max_random, mostly the best.",
    )
    rollout_resampling_power: Annotated[float, Gt(0)] = opt(2.0, "The exponent of rollout_resampling pow.")
    min_filter_prefix_tokens: Annotated[int, Ge(1)] | None = opt(
        None,
        "Exclude prefixes of at least this many tokens from the policy loss if completions of a prompt share them "
        "although their rewards differ (cosmos-rl); None: exclude none.",
    )

    def validate_selection(self, *, num_generations: int) -> None:
        """Reject options that cannot be combined.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        if self.rollout_resampling != "pow":
            remedy = "Set rollout_resampling='pow'."
            refuse_unless(self, "rollout_resampling_power", switch="rollout_resampling", remedy=remedy)
        if self.rollout_selection is None:
            remedy = "Set rollout_selection='max_variance', 'best' or 'random'."
            refuse_unless(self, "num_selected", switch="rollout_selection", remedy=remedy)
            return
        if self.num_selected is None or self.num_selected >= num_generations:
            raise ConfigError(
                f"num_selected={self.num_selected}: must be below num_generations={num_generations} with "
                f"rollout_selection={self.rollout_selection!r}"
            )
        if self.rollout_resampling is not None:
            raise ConfigError(
                f"rollout_selection={self.rollout_selection!r} and rollout_resampling={self.rollout_resampling!r}: "
                "completions are chosen by one of them. Remove the other."
            )


def refuse_unless(config: Any, name: str, *, switch: str, remedy: str) -> None:
    """Reject an option that is set although the feature it belongs to is off.

    Raises:
        ConfigError: Names the field, its value and what to do.
    """
    field = next(field for field in fields(config) if field.name == name)
    unset = field.default_factory() if callable(field.default_factory) else field.default
    because = f"{switch}={getattr(config, switch)!r}"
    check_no_effect(name=name, value=getattr(config, name), unset=unset, because=because, remedy=remedy)


def check_range(bounds: list[float] | None, name: str) -> None:
    """Reject bounds that are not two numbers in ascending order.

    Raises:
        ConfigError: Names the field.
    """
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ConfigError(f"{name}={bounds}: must be two numbers, the smaller one first, such as [-5, 5]")
