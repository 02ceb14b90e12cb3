"""What reward functions log in addition to their values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from prefrl.errors import ConfigError, RewardError

__all__ = ["RewardLog"]

# Metrics that online trainers log, by their name or by what stands before the first slash.
_METRICS = frozenset(
    {
        *("balance", "clip_cov", "clip_ratio", "completions", "dynamic_sampling", "entropy", "entropy_coef", "epoch"),
        *(
            "frac_reward_zero_std",
            "frac_unscored",
            "grad_norm",
            "health",
            "kl",
            "kl_coef",
            "kl_cov",
            "learning_rate",
            "logits",
            "logps",
        ),
        *("loss", "mean_token_accuracy", "num_tokens", "perf", "policy_loss"),
        *("reward", "reward_balance", "reward_group_std", "reward_std", "rewards"),
        *("sample", "sampling", "server", "step", "step_time", "time", "val", "vespo"),
    }
)
# Columns of the table of completions.
_COLUMNS = frozenset(
    {
        *("step", "group", "rollout", "turn", "prompt", "completion", "prompt_ids", "completion_ids", "logprobs"),
        *("trainable", "finish_reason", "policy_version", "policy_versions", "reward", "greedy_reward", "advantage"),
    }
)


class RewardLog:
    """What reward functions log for B completions.

    Args:
        size: B.
        rewards: Names of the rewards.
    """

    def __init__(self, size: int, rewards: Collection[str]) -> None:
        self.size = size
        self.columns: dict[str, list[Any]] = {}
        self._taken = _COLUMNS | set(rewards)
        self._metrics: dict[str, list[float]] = {}

    def metric(self, name: str, value: float) -> None:
        """Log a number; several under one name are averaged.

        Raises:
            ConfigError: The trainer logs something under this name.
        """
        if name.partition("/")[0] in _METRICS:
            raise ConfigError(
                f"log_metric({name!r}): this name belongs to the trainer, as do all that start with "
                f"{name.partition('/')[0]}/. Choose another, such as {'my_' + name!r}"
            )
        self._metrics.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column for the table of completions; a later one of the same name replaces it.

        Values that a column of one type cannot hold are logged as text.

        Raises:
            ConfigError: The table has such a column.
            RewardError: There are not B values.
        """
        if column in self._taken:
            raise ConfigError(f"log_extra({column!r}): the table of completions has this column. Choose another name")
        if len(values) != self.size:
            raise RewardError(
                f"log_extra({column!r}): {len(values)} values for {self.size} completions; there must be one for each"
            )
        self.columns[column] = _of_one_type(list(values))

    def means(self) -> dict[str, float]:
        """Mean of the values of each metric."""
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}


def _of_one_type(values: list[Any]) -> list[Any]:
    try:
        pa.array(values)
    except (pa.ArrowException, UnicodeError, OverflowError):  # UnicodeError: half of a surrogate pair
        return [None if v is None else str(v).encode("utf-8", "backslashreplace").decode() for v in values]
    return values
