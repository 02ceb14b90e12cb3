"""Options for choosing prompts, shaping rewards, and selecting completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.params import Params
from prefrl.options.rollout import SELECTIONS, CurriculumParams, ResamplingParams, RowSelection, ShapingParams

__all__ = [
    "PromptOptions",
    "SelectionOptions",
    "ShapingOptions",
]


@dataclass
class ShapingOptions:
    """Shaping of total rewards before advantages are computed."""

    reward_shaping_kwargs: KwargsValue = kwargs(
        "How total rewards are shaped before advantages are computed, in this order.", ShapingParams
    )

    shaping_params = ParamsOf("reward_shaping_kwargs", ShapingParams)


@dataclass
class PromptOptions:
    """Selection of prompts."""

    dynamic_sampling: bool = opt(
        False,
        "Replace prompts whose completions all have the same reward with other prompts of the dataset (DAPO) until "
        "rewards differ within every prompt or max_tries is reached.",
    )
    dynamic_sampling_kwargs: KwargsValue = kwargs(
        "Hyperparameters of dynamic_sampling.", {True: ResamplingParams}, switch="dynamic_sampling"
    )
    curriculum: Literal["variance", "band"] | None = opt(
        None,
        "Replace prompts whose success rate p is outside a band (too easy or too hard). variance: sample the "
        "replacements in proportion to p (1 - p). band: sample them uniformly inside the band.",
    )
    curriculum_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the curriculum.",
        {"variance": CurriculumParams, "band": CurriculumParams},
        switch="curriculum",
    )

    resampling_params = ParamsOf("dynamic_sampling_kwargs", ResamplingParams)
    curriculum_params = ParamsOf("curriculum_kwargs", CurriculumParams)


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
    selection_kwargs: KwargsValue = kwargs(
        "Hyperparameters of rollout_selection.", SELECTIONS, switch="rollout_selection"
    )

    selection_params = ParamsOf("selection_kwargs", Params)
