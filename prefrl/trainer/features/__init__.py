"""The list of the optional parts: all that the core of a training knows of them.

Parts hear events in this order, those of models before all others. So a batch that grows comes first, whose epochs the
others shall see; gradients are clipped by value before the guard judges the step; and weights are judged at the end
before they are averaged.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.features.averages import moving_average, soup_of_checkpoints
from prefrl.trainer.features.early_stopping import add_early_stopping
from prefrl.trainer.features.flops import count_flops
from prefrl.trainer.features.gradients import clip_by_value, penalty
from prefrl.trainer.features.growth import growing_plan
from prefrl.trainer.features.guard import Guard
from prefrl.trainer.features.hub import Hub
from prefrl.trainer.features.intervals import epoch_intervals
from prefrl.trainer.features.kernels import kernels, offloading
from prefrl.trainer.features.moving_reference import MovingReference
from prefrl.trainer.features.plateau import plateau_watch
from prefrl.trainer.features.profile import profiler
from prefrl.trainer.features.replay import router_replay
from prefrl.trainer.features.router import RouterLoss, router_loss
from prefrl.trainer.features.shared_device import SharedDevice
from prefrl.trainer.features.sizes import EvaluationSize, automatic_sizes
from prefrl.trainer.features.tokens import token_record
from prefrl.trainer.features.uploads import uploaded_checkpoints
from prefrl.trainer.parts import Part, Run

__all__ = [
    "EvaluationSize",
    "Hub",
    "MovingReference",
    "RouterLoss",
    "SharedDevice",
    "count_flops",
    "parts_of",
    "parts_of_models",
]


def parts_of_models(args: BaseConfig, policy: PreTrainedModel) -> list[Part]:
    """The parts that change how models compute, which they hear of before there is a run.

    Raises:
        ConfigError: A part cannot do what it is asked for.
    """
    found: list[Part | None] = [
        router_loss(args, policy),
        router_replay(args, policy),
        kernels(args),
        offloading(args),
    ]
    return [part for part in found if part is not None]


def parts_of(run: Run) -> list[Part]:
    """The other parts that the options of a trainer ask for.

    Raises:
        ConfigError: A part cannot do what it is asked for.
    """
    args = run.args
    found: list[Part | None] = [
        growing_plan(args),
        epoch_intervals(args),
        profiler(args),
        plateau_watch(args),
        penalty(args),
        clip_by_value(args),
        Guard(run),
        automatic_sizes(run),
        moving_average(run),
        soup_of_checkpoints(run),
        uploaded_checkpoints(args),
        token_record(args),
    ]
    add_early_stopping(run)
    return [part for part in found if part is not None]
