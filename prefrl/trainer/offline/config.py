"""Options of trainers that learn from a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from prefrl.options.fields import opt, parse_json
from prefrl.options.length_bound import LengthBound
from prefrl.options.offline_rules import WORKERS_RULES
from prefrl.options.rules import apply
from prefrl.trainer.base.config import BaseConfig, TruncationMode

__all__ = ["OfflineConfig", "SampleOptions"]


@dataclass
class OfflineConfig(BaseConfig):
    """Options of trainers that learn from a fixed dataset."""

    max_length: Annotated[int, Ge(2), Le(2 * 10**7)] | None = opt(
        1024, "Maximum sequence length in tokens; None: no limit."
    )
    truncation_mode: TruncationMode = opt(
        "keep_start", "How to handle longer sequences: keep their start, keep their end, or stop with an error."
    )
    chat_template_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for the chat template; JSON on the command line."
    )
    invalid_rows: Literal["error", "drop"] = opt(
        "error",
        "How to handle unusable rows (empty, too long, nothing to learn): stop and list them, or drop them.",
    )

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        parse_json(self, "chat_template_kwargs")
        apply(self, WORKERS_RULES)

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseConfig.length_bound`."""
        return LengthBound(self.max_length, "max_length")


@dataclass
class SampleOptions:
    """An option of the offline trainers that can sample completions in evaluations."""

    generate_during_eval: bool = opt(
        False,
        "At each evaluation, sample completions of the first per_device_eval_batch_size prompts, and log them as a "
        "table; see LogCompletionsCallback.",
        decides=False,
    )
