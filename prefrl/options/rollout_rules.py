"""What hyperparameters of rewards and prompts must be together.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_range

__all__ = ["check_clip_range", "check_curriculum"]


def check_clip_range(params: Any) -> None:
    """The range of total rewards has to be one."""
    check_range(params.clip_range, "clip_range")


def check_curriculum(params: Any) -> None:
    """The bounds of rewards and success rates have to be in ascending order."""
    check_range(params.reward_bounds, "reward_bounds")
    check_range(params.band, "band")
    if not 0 <= params.band[0] < params.band[1] <= 1:
        raise ConfigError(f"band={params.band}: success rates must be within 0 .. 1")
