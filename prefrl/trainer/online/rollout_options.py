"""Options for choosing prompts, shaping rewards, and selecting completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsOption, KwargsValue
from prefrl.options.params import Params
from prefrl.options.rollout import SELECTIONS, CurriculumParams, ResamplingParams, RowSelection, ShapingParams

__all__ = [
    "CURRICULUM",
    "DYNAMIC_SAMPLING",
    "SELECTION",
    "SHAPING",
    "PromptOptions",
    "SelectionOptions",
    "ShapingOptions",
]

SHAPING: KwargsOption[ShapingParams] = KwargsOption(
    "reward_shaping_kwargs",
    "How total rewards are shaped before advantages are computed, in this order.",
    switch=None,
    choices={None: ShapingParams},
)
DYNAMIC_SAMPLING: KwargsOption[ResamplingParams] = KwargsOption(
    "dynamic_sampling_kwargs",
    "Hyperparameters of dynamic_sampling.",
    switch="dynamic_sampling",
    choices={True: ResamplingParams},
)
CURRICULUM: KwargsOption[CurriculumParams] = KwargsOption(
    "curriculum_kwargs",
    "Hyperparameters of the curriculum.",
    switch="curriculum",
    choices={"variance": CurriculumParams, "band": CurriculumParams},
)
SELECTION: KwargsOption[Params] = KwargsOption(
    "selection_kwargs", "Hyperparameters of rollout_selection.", switch="rollout_selection", choices=SELECTIONS
)


@dataclass
class ShapingOptions:
    """Shaping of total rewards before advantages are computed."""

    reward_shaping_kwargs: KwargsValue = opt(None, SHAPING.help)

    @property
    def shaping_params(self) -> ShapingParams:
        """How total rewards are shaped."""
        return SHAPING.of(self)


@dataclass
class PromptOptions:
    """Selection of prompts."""

    dynamic_sampling: bool = opt(
        False,
        "Replace prompts whose completions all have the same reward with other prompts of the dataset (DAPO) until "
        "rewards differ within every prompt or max_tries is reached.",
    )
    dynamic_sampling_kwargs: KwargsValue = opt(None, DYNAMIC_SAMPLING.help)
    curriculum: Literal["variance", "band"] | None = opt(
        None,
        "Replace prompts whose success rate p is outside a band (too easy or too hard). variance: sample the "
        "replacements in proportion to p (1 - p). band: sample them uniformly inside the band.",
    )
    curriculum_kwargs: KwargsValue = opt(None, CURRICULUM.help)

    @property
    def resampling_params(self) -> ResamplingParams:
        """The hyperparameters of dynamic sampling."""
        return DYNAMIC_SAMPLING.of(self)

    @property
    def curriculum_params(self) -> CurriculumParams:
        """The hyperparameters of the curriculum."""
        return CURRICULUM.of(self)


@dataclass
class SelectionOptions:
    """Selection of the completions to train on."""

    rollout_selection: RowSelection | None = opt(
        None,
        "Train only on some completions. Either select num_selected per prompt: those whose rewards have the "
        "largest variance (max_variance; PODS), those with the best rewards (best), or a random subset (random). Or "
        "resample the same number with replacement (PF-PPO): in proportion to abs(reward)^power (pow), the best and "
        "the worst of the batch (max_min), or mostly the best (max_random). None: all.",
    )
    selection_kwargs: KwargsValue = opt(None, SELECTION.help)

    @property
    def selection_params(self) -> Params:
        """The hyperparameters of `rollout_selection`."""
        return SELECTION.of(self)
