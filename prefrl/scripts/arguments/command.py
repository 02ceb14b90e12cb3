"""What a command is given: options that are not part of a config, of model, data and rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from prefrl.errors import ConfigError, PrefrlError
from prefrl.options.fields import check_unset, opt
from prefrl.options.names import check_references
from prefrl.scripts.arguments.datasets import SHAPING, DatasetMixtureConfig, ScriptArguments
from prefrl.scripts.arguments.model_config import ModelConfig

__all__ = ["Given", "RewardEntry", "check_reward_files", "reward_entries", "CommandArguments", "RewardArguments"]

_E = TypeVar("_E", bound=PrefrlError)


@dataclass(frozen=True)
class Given:
    """What a user asked for.

    Args:
        values: The options that the command line or the file sets.
        places: Where those of the file stand, as file:line; also their entries, such as datasets[1].path.
        takes_rewards: Whether the algorithm learns from rewards.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str]
    takes_rewards: bool

    def located(self, error: _E) -> _E:
        """The error with the line of the option that its message begins with, if the file sets it."""
        name = re.match(r"[\w.\[\]]*(?=[=:])", str(error))
        parts = re.findall(r"\w+|\.\w+|\[\d+\]", name[0]) if name else []
        names = ["".join(parts[:length]) for length in range(len(parts), 0, -1)]
        where = next((self.places[name] for name in names if name in self.places), None)
        return error if where is None else type(error)(f"{where}: {error}")

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Inside this context, errors name the line of the option that their messages begin with."""
        try:
            yield
        except PrefrlError as error:
            located = self.located(error)
            if located is error:
                raise
            raise located from error


class RewardEntry(str):
    """A reward as one writes it on the command line: `name`, or `name(parameter=value)`.

    Args:
        entry: This text; or a mapping with the key `name`, whose other keys are parameters.
        where: The option that has it, for messages.

    Raises:
        ConfigError: It is neither.
    """

    __slots__ = ()

    def __new__(cls, entry: str | Mapping[str, Any], where: str = "reward_funcs") -> Self:
        """Write a mapping as text."""
        if isinstance(entry, str):
            return super().__new__(cls, entry)
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or "(" in name:
            raise ConfigError(f"{where}={entry!r}: must be a name, or a mapping such as {{name: f, tolerance: 0.1}}")
        parameters = {key: value for key, value in entry.items() if key != "name"}
        for key in parameters:
            if not str(key).isidentifier():
                raise ConfigError(f"{where}={entry!r}: {key!r} is not the name of a parameter")
        text = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        return super().__new__(cls, f"{name}({text})" if parameters else name)


def reward_entries(entries: Sequence[str | Mapping[str, Any]] | None) -> list[RewardEntry] | None:
    """The entries of the option `reward_funcs`.

    Raises:
        ConfigError: One is neither a name nor a mapping with a name.
    """
    if entries is None:
        return None
    return [RewardEntry(entry, f"reward_funcs[{i}]") for i, entry in enumerate(entries)]


def check_reward_files(entries: Sequence[str]) -> None:
    """Refuse rewards in files that are not there; files are not run.

    Args:
        entries: Of the option `reward_funcs`.

    Raises:
        ConfigError: A file is missing.
    """
    for number, entry in enumerate(entries):
        place = entry.partition("(")[0].rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"reward_funcs[{number}]={str(entry)!r}: there is no file {place!r}")


@dataclass
class CommandArguments(ScriptArguments, ModelConfig, DatasetMixtureConfig):
    """Model and data of `prefrl <algorithm>`."""

    model_name_or_path: str = field(kw_only=True, metadata={"help": "Model: a name on the Hub or a folder."})

    def __post_init__(self) -> None:
        check_references({name: getattr(self, name) for name in ("model_name_or_path", "dataset_name")})
        for part in (ScriptArguments, ModelConfig, DatasetMixtureConfig):
            part.__post_init__(self)
        for number, data in enumerate(self.datasets):
            keys = ("path", "data_dir", "data_files")
            check_references({f"datasets[{number}].{key}": getattr(data, key) for key in keys})
        for bits in (4, 8):
            if getattr(self, f"load_in_{bits}bit") and not self.use_peft:
                raise ConfigError(
                    f"load_in_{bits}bit=True and use_peft=False: quantized weights cannot be trained. Set "
                    "use_peft=True."
                )
        self._check_data()
        self.streaming = self.streaming or (bool(self.datasets) and self.dataset_streaming)

    def _check_data(self) -> None:
        if bool(self.datasets) == (self.dataset_name is not None):
            given = "both are given" if self.datasets else "not given"
            raise ConfigError(f"dataset_name, datasets: {given}. Set one of them.")
        if self.datasets:
            names = ("dataset_config", "dataset_train_split", "dataset_revision", *SHAPING)
            remedy = "Set it for each dataset of datasets, by the names name, split, revision, columns and so on."
            check_unset(self, *names, because="datasets is set", remedy=remedy)
            return
        check_unset(self, "streaming", because="dataset_name is set", remedy="Set dataset_streaming.")
        remedy = "Set dataset_test_split; slices such as train[90%:] work."
        check_unset(self, "test_split_size", because="dataset_name is set", remedy=remedy)


@dataclass
class RewardArguments(CommandArguments):
    """Rewards, for the online algorithms."""

    reward_funcs: list[RewardEntry] | None = opt(
        None,
        "Rewards, in the order of reward_weights: built-in names, module.function or file.py:function for your own, "
        "and graders. Parameters follow in parentheses, string_check(reference='{answer}'); a YAML file may use a "
        "mapping instead, {name: string_check, reference: '{answer}'}.",
    )
    reward_model_name_or_path: str | None = opt(
        None, "A sequence-classification model as an additional reward, after those of reward_funcs."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_references({"reward_model_name_or_path": self.reward_model_name_or_path})
        self.reward_funcs = reward_entries(self.reward_funcs)
        if not self.reward_funcs and self.reward_model_name_or_path is None:
            raise ConfigError(
                "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name, a grader or "
                "module:function, or set reward_model_name_or_path."
            )
