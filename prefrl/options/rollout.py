"""Options of rollouts: how prompts are drawn, and how rewards are shaped, selected and summed up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import opt
from prefrl.options.params import Params
from prefrl.options.rules import Rule, ascending, example, when

__all__ = [
    "AtKParams",
    "CurriculumParams",
    "CurriculumWeighting",
    "KeptParams",
    "PowParams",
    "ResamplingParams",
    "ReweightMethod",
    "RowSelection",
    "SELECTIONS",
    "SelectionRule",
    "ShapingParams",
]

CurriculumWeighting = Literal["variance", "band"]


@dataclass(frozen=True)
class CurriculumParams(Params):
    """Hyperparameters of `SuccessCurriculum`."""

    band: list[float] = opt([0.1, 0.9], "Lowest and highest success rate of prompts that are not replaced.")
    reward_bounds: list[float] = opt([0.0, 1.0], "Rewards of a failure and of a success.")
    floor: Annotated[float, Ge(0)] = opt(0.05, "Added to the sampling weight of every prompt.")
    momentum: Annotated[float, Ge(0), Lt(1)] = opt(
        0.5, "Weight of the past in a prompt's success rate, an exponential moving average."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        ascending("reward_bounds", example("grpo", curriculum="band", curriculum_kwargs={"reward_bounds": [1, 0]})),
        ascending("band", example("grpo", curriculum="band", curriculum_kwargs={"band": [0.8, 0.2]})),
        when(
            lambda p: not 0 <= p.band[0] < p.band[1] <= 1,
            "band={band}: success rates must be within 0 .. 1",
            example("grpo", curriculum="band", curriculum_kwargs={"band": [0.5, 1.5]}),
        ),
    )


@dataclass(frozen=True)
class ResamplingParams(Params):
    """Hyperparameters of dynamic sampling."""

    max_tries: Annotated[int, Ge(1)] = opt(
        10, "Maximum number of times that prompts are replaced in a generation batch."
    )
    reward_metric: str | None = opt(
        None, "Name of the reward that must differ within a prompt; None: the total reward."
    )


@dataclass(frozen=True)
class ShapingParams(Params):
    """Hyperparameters of `shaped`."""

    stop_properly_penalty_coef: Annotated[float, Le(1)] | None = opt(
        None,
        "The total reward of completions that were cut off at the length limit is multiplied by this number, or "
        "replaced by it if it is below 0.",
    )
    missing_eos_penalty: Annotated[float, Gt(0)] | None = opt(
        None, "Number to subtract from the total reward of completions that were cut off or aborted."
    )
    normalize: bool = opt(
        False,
        "Divide total rewards by the running standard deviation of all totals so far, over all processes. If the "
        "advantages do not compare completions of a group, subtract the running mean, too.",
    )
    clip_range: list[float] | None = opt(
        None, "Clip total rewards to this range: smallest and largest value; None: no clipping."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        ascending("clip_range", example("grpo", reward_shaping_kwargs={"clip_range": [2.0, 1.0]})),
    )


SelectionRule = Literal["max_variance", "best", "random"]


ReweightMethod = Literal["pow", "max_min", "max_random"]


RowSelection = Literal["max_variance", "best", "random", "pow", "max_min", "max_random"]


@dataclass(frozen=True)
class KeptParams(Params):
    """Hyperparameters of the rules of `kept_rows`."""

    num_selected: Annotated[int, Ge(1)] | None = opt(
        None, "Number of completions to keep of each prompt, below num_generations; required."
    )


@dataclass(frozen=True)
class PowParams(Params):
    """Hyperparameters of the method `pow` of `draw_counts`."""

    power: Annotated[float, Gt(0)] = opt(2.0, "Exponent of the reward.")


# Rules of `kept_rows` and methods of `draw_counts`, with their hyperparameters.
SELECTIONS: dict[str, type[Params]] = {
    "max_variance": KeptParams,
    "best": KeptParams,
    "random": KeptParams,
    "pow": PowParams,
    "max_min": Params,
    "max_random": Params,
}


@dataclass(frozen=True)
class AtKParams(Params):
    """Which of pass@k, best@k and maj@k are computed, and what a correct sample is."""

    k: list[int] | None = opt(None, "Sizes k, such as [1, 8]; None: nothing is computed.")
    reward: str | None = opt(
        None, "Name of the reward that decides whether a sample is correct; None: the total reward."
    )
    threshold: float = opt(1.0, "A sample is correct if that reward is at least this.")
    answer: str | None = opt(
        None, "Column of the answers that maj@k compares, which a reward logs with log_extra; None: no maj@k."
    )
