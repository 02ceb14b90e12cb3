"""The options of an algorithm over a stand-in for HuggingFace's, checked before anything heavy is imported.

What needs a device, a model or a package is left to the config.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prefrl.options.algorithms import PRESETS, combined
from prefrl.options.base import BaseOptions
from prefrl.options.fields import default_of, flat_names, init_vars
from prefrl.options.names import check_known
from prefrl.options.optimizers import check_not_refused
from prefrl.registry import REGISTRY

__all__ = ["HUGGINGFACE_FILE", "check_together", "early_class", "huggingface"]

HUGGINGFACE_FILE = Path(__file__).with_name("huggingface.json")
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate does


@cache
def huggingface() -> dict[str, Any]:
    """HuggingFace's options, and the names that some of them take; see `prefrl.scripts.schema.writer`."""
    found: dict[str, Any] = json.loads(HUGGINGFACE_FILE.read_text(encoding="utf-8"))
    return found


def _stand_in() -> Any:
    """A dataclass with the names and defaults of HuggingFace's options."""
    rows = [(row["name"], Any, _default(row.get("default"))) for row in huggingface()["options"]]
    return dataclasses.make_dataclass("HuggingFaceOptions", rows, init=False, repr=False, eq=False)


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: list(value)) if isinstance(value, list) else value


HuggingFaceOptions: Any = _stand_in()


@dataclasses.dataclass(init=False, repr=False, eq=False)
class EarlyConfig(BaseOptions, HuggingFaceOptions):
    """What `BaseConfig` is to `TrainingArguments`."""

    @property
    def device(self) -> Any:
        """Where the run computes, as far as that can be known without torch."""
        return SimpleNamespace(type="cpu" if self.use_cpu else "unknown")

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return max(int(os.environ.get(name, "1")) for name in _NUMBERS_OF_PROCESSES)

    def _complete(self) -> None:
        """See `BaseOptions._complete`, as far as rules read what HuggingFace fills in."""
        check_not_refused(str(self.optim))
        check_known("lr_scheduler_type", str(self.lr_scheduler_type), huggingface()["schedules"], "schedule")
        check_known("optim", str(self.optim), huggingface()["optimizers"], "optimizer")
        options: Any = self
        if options.eval_strategy == "steps" and not options.eval_steps:
            options.eval_steps = options.logging_steps
        if options.include_num_input_tokens_seen is False:
            options.include_num_input_tokens_seen = "no"
        self._count_evaluations()


@cache
def early_class(algorithm: str) -> Any:
    """The options of an algorithm: its own, over the stand-in."""
    early = type("Options", (REGISTRY[algorithm].load_options(), EarlyConfig), {"__module__": __name__})
    return dataclasses.dataclass(init=False, repr=False, eq=False)(early)


def check_together(algorithm: str, given: Mapping[str, Any], *, knows_processes: bool = True) -> Any:
    """Check the options of an algorithm against each other.

    Args:
        algorithm: Its name in the registry.
        given: The options that the user gives.
        knows_processes: False: the run is started on other processes, so sizes of batches are left to them.

    Returns:
        The options as attributes.

    Raises:
        ConfigError: The one that the config would raise.
    """
    early = early_class(algorithm)
    preset = given.get("preset")
    values = dict(given) if preset is None else combined(PRESETS[preset], given, flat_names(early))
    config = early()
    for field in dataclasses.fields(early):
        setattr(config, field.name, values[field.name] if field.name in values else default_of(field))
    config.knows_sizes = knows_processes and not config.parallelism_config
    config.__post_init__(*(values.get(name, default) for name, default in init_vars(early).items()))
    return config
