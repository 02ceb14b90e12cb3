"""Options of commands that are not part of a config: data and rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from prefrl.errors import ConfigError, PrefrlError
from prefrl.options.fields import check_unset, opt
from prefrl.options.names import check_references
from prefrl.scripts.arguments.datasets import SHAPING, DatasetConfig, DatasetMixtureConfig, ScriptArguments, parts_of
from prefrl.scripts.arguments.episodes import EpisodeArguments
from prefrl.scripts.arguments.model_config import ModelConfig

_E = TypeVar("_E", bound=PrefrlError)


@dataclass(frozen=True)
class Given:
    """What a user asked for.

    Args:
        values: The options that the command line or the file sets.
        places: Where those of the file stand, as file:line; also their entries, such as datasets[1].path.
        script: Those of them that are not the trainer's, checked: model, data and rewards.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str]
    script: Any = None  # `CommandArguments`, once they are checked

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


_WEIGHTED = re.compile(r"(.*[\w)])=([-+]?\d[\d_.]*(?:[eE][-+]?\d+)?)", re.DOTALL)


def weighted_rewards(
    rewards: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] | None,
    weights: Sequence[float] | None,
    *,
    prefix: str = "",
) -> tuple[list[Any] | None, Sequence[float] | None]:
    """The entries of `reward_funcs` without their weights, and the weights.

    Args:
        rewards: Entries; `entry=weight` on the command line, and a mapping from entries to weights in a file, say what
            `reward_weights` would say.
        weights: The option `reward_weights`.
        prefix: What the names of both options begin with: "eval_" for those of evaluations.

    Raises:
        ConfigError: A weight is no number, or `reward_weights` is given too.
    """
    if isinstance(rewards, Mapping):
        pairs: list[tuple[Any, Any]] = [*rewards.items()]
    else:
        found = [isinstance(entry, str) and _WEIGHTED.fullmatch(entry) for entry in rewards or ()]
        if not any(found):
            return None if rewards is None else [*rewards], weights
        own = zip(rewards or (), found, strict=True)
        pairs = [(match[1], float(match[2])) if match else (entry, 1.0) for entry, match in own]
    for entry, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(
                f"{prefix}reward_funcs: the weight of {entry!r} is {weight!r}; it must be a number. Give parameters "
                "in an entry of a list, as in [{name: string_check, reference: '{answer}'}], or in parentheses"
            )
    if weights is not None:
        raise ConfigError(
            f"{prefix}reward_weights={weights}: {prefix}reward_funcs already gives weights. Remove one of them"
        )
    return [entry for entry, _ in pairs], [float(weight) for _, weight in pairs]


def reward_entries(
    entries: Sequence[str | Mapping[str, Any]] | None, option: str = "reward_funcs"
) -> list[RewardEntry] | None:
    """The entries of an option that names rewards.

    Raises:
        ConfigError: One is neither a name nor a mapping with a name.
    """
    if entries is None:
        return None
    return [RewardEntry(entry, f"{option}[{i}]") for i, entry in enumerate(entries)]


def check_reward_files(entries: Sequence[str], option: str) -> None:
    """Refuse rewards in files that are not there; files are not run.

    Args:
        entries: What the option says.
        option: Its name.

    Raises:
        ConfigError: A file is missing.
    """
    for number, entry in enumerate(entries):
        place = entry.partition("(")[0].rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"{option}[{number}]={str(entry)!r}: there is no file {place!r}")


@dataclass
class CommandArguments(ScriptArguments, ModelConfig, DatasetMixtureConfig):
    """Model and data of `prefrl <algorithm>`."""

    model_name_or_path: str = field(kw_only=True, metadata={"help": "Name of a model on the Hub, or a folder."})
    eval_datasets: list[DatasetConfig] = opt(
        [],
        "Datasets to evaluate on, instead of a split of the training data. Each is a path, or a mapping with the same "
        "keys as those of datasets; JSON on the command line. With one, metrics are eval_loss and so on; with "
        "several, eval_NAME_loss. Entries without options of columns use those of the training data.",
    )

    def __post_init__(self) -> None:
        check_references({name: getattr(self, name) for name in ("model_name_or_path", "dataset_name")})
        for part in (ScriptArguments, ModelConfig, DatasetMixtureConfig):
            part.__post_init__(self)
        self.eval_datasets = parts_of("eval_datasets", self.eval_datasets, split=self.dataset_test_split)
        for option in ("datasets", "eval_datasets"):
            for number, data in enumerate(getattr(self, option)):
                keys = ("path", "data_dir", "data_files")
                check_references({f"{option}[{number}].{key}": getattr(data, key) for key in keys})
        for bits in (4, 8):
            if getattr(self, f"load_in_{bits}bit") and not self.use_peft:
                raise ConfigError(
                    f"load_in_{bits}bit=True and use_peft=False: quantized weights cannot be trained. Set "
                    "use_peft=True."
                )
        self._check_data()
        self.streaming = self.streaming or (bool(self.datasets) and self.dataset_streaming)

    @property
    def needs_dataset(self) -> bool:
        """Whether nothing else brings prompts."""
        return True

    def _check_data(self) -> None:
        is_missing = not self.datasets and self.dataset_name is None
        if (self.datasets and self.dataset_name is not None) or (is_missing and self.needs_dataset):
            given = "not given" if is_missing else "both are given"
            raise ConfigError(f"dataset_name, datasets: {given}. Set one of them.")
        if self.datasets:
            names = ("dataset_config", "dataset_train_split", "dataset_revision", *SHAPING)
            remedy = "Set it for each dataset of datasets, by the names name, split, revision, columns and so on."
            check_unset(self, *names, because="datasets is set", remedy=remedy)
        if is_missing:
            splits = ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_revision")
            streams = ("dataset_streaming", "streaming", "test_split_size", "eval_datasets")
            check_unset(self, *splits, *streams, *SHAPING, because="there is no dataset", remedy="Set dataset_name.")
            return
        if self.dataset_name is not None:
            check_unset(self, "streaming", because="dataset_name is set", remedy="Set dataset_streaming.")
        self._check_evaluated()

    def _check_evaluated(self) -> None:
        """Refuse more than one source of rows to evaluate on, and shares of what is not mixed."""
        for number, part in enumerate(self.eval_datasets):
            if part.fraction is not None or part.weight is not None:
                raise ConfigError(
                    f"eval_datasets[{number}]: fraction and weight are for mixtures, but each of these is evaluated "
                    "separately. Remove them."
                )
        if self.test_split_size is None:
            return
        if self.eval_datasets:
            raise ConfigError(
                f"test_split_size={self.test_split_size} and eval_datasets: both say what to evaluate on. Remove one "
                "of them."
            )
        if self.dataset_streaming:
            raise ConfigError(
                f"dataset_streaming=True and test_split_size={self.test_split_size}: a stream has no length, so no "
                "rows can be held out. Set eval_datasets."
            )
        because = f"test_split_size={self.test_split_size} holds out rows of the training data"
        check_unset(self, "dataset_test_split", because=because, remedy="Remove one of them.")

    @property
    def evaluated(self) -> list[DatasetConfig]:
        """The datasets of `eval_datasets`, each with options of columns: its own, or else those of the training."""
        trained: Any = self if self.dataset_name is not None else self.datasets[0]
        same = self.dataset_name is not None or len({repr(_shaping(part)) for part in self.datasets}) == 1
        plain = _shaping(DatasetConfig(""))
        return [
            replace(part, **_shaping(trained)) if same and _shaping(part) == plain else part
            for part in self.eval_datasets
        ]


def _shaping(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SHAPING}


@dataclass
class RewardArguments(CommandArguments, EpisodeArguments):
    """Rewards, for the online algorithms."""

    reward_funcs: list[RewardEntry] | None = opt(
        None,
        "Reward functions, in the order of reward_weights. Each is a built-in or registered name, a grader, or your "
        "own function as module.function or file.py:function. Parameters follow in parentheses, as in "
        "string_check(reference='{answer}'). A YAML file may use a mapping instead, such as {name: string_check, "
        "reference: '{answer}'}. Weights may follow, as in numeric_reward=1.0 format_reward=0.2, or in a YAML file "
        "{numeric_reward: 1.0, format_reward: 0.2}.",
    )
    reward_model_name_or_path: str | None = opt(
        None, "Sequence-classification model for one more reward, after those of reward_funcs."
    )
    eval_reward_funcs: list[RewardEntry] | None = opt(
        None,
        "Rewards of evaluations instead of those of training, written as in reward_funcs. Evaluations then have no "
        "loss, which belongs to the rewards of training.",
    )

    def __post_init__(self) -> None:
        if self.has_episodes:
            self.check_names()
        super().__post_init__()
        check_references({"reward_model_name_or_path": self.reward_model_name_or_path})
        self.reward_funcs = reward_entries(self.reward_funcs)
        self.eval_reward_funcs = reward_entries(self.eval_reward_funcs, "eval_reward_funcs")

    @property
    def has_episodes(self) -> bool:
        """Whether the model acts, instead of completing a prompt."""
        return bool(self.environment or self.agent or self.tools)

    @property
    def needs_dataset(self) -> bool:
        """See `CommandArguments`."""
        # Of several environments and agents, the dataset has the name of each row's.
        return not (self.environment or self.agent) or not self.has_one_kind

    @property
    def lacks_reward(self) -> bool:
        """Whether neither an option nor an environment or agent brings a reward."""
        sources = self.reward_funcs or self.reward_model_name_or_path or self.environment
        return not (sources or (self.agent and self.agents_have_rewards))
