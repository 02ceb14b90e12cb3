"""Options of what is rolled out, what rewards become, and what of it is learned from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError
from prefrl.trainer.base.options import check_no_effect, opt

__all__ = ["PromptOptions", "SelectionOptions", "ShapingOptions", "check_range", "refuse_unless"]


@dataclass
class ShapingOptions:
    """What happens to total rewards before advantages are made of them, in this order."""

    stop_properly_penalty_coef: Annotated[float, Le(1)] | None = opt(
        None, "Totals of completions cut off by the length limit: multiplied by this, or set to it if it is below 0."
    )
    missing_eos_penalty: Annotated[float, Gt(0)] | None = opt(
        None, "What is taken from totals of completions that did not end by themselves."
    )
    normalize_rewards: bool = opt(
        False,
        "Divide totals by the standard deviation of all totals so far, of all processes; where advantages have no "
        "group to compare with, their mean is taken away too.",
    )
    reward_clip_range: list[float] | None = opt(
        None, "Smallest and largest total: those outside are set to it; None: no bounds."
    )

    @property
    def shapes_rewards(self) -> bool:
        """Whether anything happens to totals."""
        given = (self.stop_properly_penalty_coef, self.missing_eos_penalty, self.reward_clip_range)
        return self.normalize_rewards or any(value is not None for value in given)

    @property
    def shaping_hyperparameters(self) -> dict[str, Any]:
        """What `rollout.shaping.shaped` is called with, beside totals and their moments."""
        bounds = self.reward_clip_range
        return {
            "stop_properly_penalty_coef": self.stop_properly_penalty_coef,
            "missing_eos_penalty": self.missing_eos_penalty,
            "reward_clip_range": None if bounds is None else tuple(bounds),
        }

    def validate_shaping(self) -> None:
        """Refuse bounds that are not in order.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        check_range(self.reward_clip_range, "reward_clip_range")


@dataclass
class PromptOptions:
    """Which prompts are asked."""

    dynamic_sampling: bool = opt(
        False,
        "Prompts whose completions all have the same reward give way to other prompts of the dataset (DAPO), until "
        "all have a signal or dynamic_sampling_max_tries is reached.",
    )
    dynamic_sampling_max_tries: Annotated[int, Ge(1)] = opt(10, "Most times that prompts are replaced in a step.")
    filter_reward_metric: str | None = opt(
        None, "Name of the reward that has to differ within a prompt; None: the total."
    )
    curriculum: Literal["variance", "band"] | None = opt(
        None,
        "Prompts whose rate of success is outside curriculum_band give way to others, drawn in proportion to "
        "p (1 - p), or evenly from the band.",
    )
    curriculum_band: list[float] = opt([0.1, 0.9], "Lowest and highest rate of success that is asked as it comes.")
    curriculum_reward_bounds: list[float] = opt([0.0, 1.0], "Rewards of a failure and of a success.")
    curriculum_floor: Annotated[float, Ge(0)] = opt(0.05, "Added to every prompt's chance of being drawn.")
    curriculum_momentum: Annotated[float, Ge(0), Lt(1)] = opt(0.5, "Weight of the past in a prompt's rate of success.")

    def validate_prompts(self) -> None:
        """Refuse options of what is off, and bounds that are not in order.

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
    """Which completions and tokens are learned from."""

    rollout_selection: Literal["max_variance", "best", "random"] | None = opt(
        None, "Learn from num_selected completions of each prompt: those that differ most (PODS), the best, or any."
    )
    num_selected: Annotated[int, Ge(1)] | None = opt(None, "Completions of each prompt that are learned from.")
    rollout_resampling: Literal["pow", "max_min", "max_random"] | None = opt(
        None,
        "Draw the completions that are learned from anew, with replacement (PF-PPO): pow, in proportion to a power of "
        "the reward's size; max_min, the best and the worst; max_random, mostly the best.",
    )
    rollout_resampling_power: Annotated[float, Gt(0)] = opt(2.0, "The power of pow.")
    min_filter_prefix_tokens: Annotated[int, Ge(1)] | None = opt(
        None,
        "Beginnings of at least so many tokens that completions of a prompt share in spite of different rewards have "
        "no policy loss (cosmos-rl); None: all tokens have one.",
    )

    def validate_selection(self, *, num_generations: int) -> None:
        """Refuse what cannot work together.

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
    """Refuse an option that was set although what it belongs to is off.

    Raises:
        ConfigError: Names the field, its value and what to do.
    """
    field = next(field for field in fields(config) if field.name == name)
    unset = field.default_factory() if callable(field.default_factory) else field.default
    because = f"{switch}={getattr(config, switch)!r}"
    check_no_effect(name=name, value=getattr(config, name), unset=unset, because=because, remedy=remedy)


def check_range(bounds: list[float] | None, name: str) -> None:
    """Refuse bounds that are not two numbers in order.

    Raises:
        ConfigError: Names the field.
    """
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ConfigError(f"{name}={bounds}: must be two numbers, the smaller one first, such as [-5, 5]")
