"""The options of every algorithm as data: a mistake is found before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError
from prefrl.options.base import BaseOptions
from prefrl.options.fields import default_of, flat_names, hints_of, init_vars
from prefrl.options.names import check_known
from prefrl.options.optimizers import check_not_refused
from prefrl.options.presets import PRESETS, combined
from prefrl.options.types import check_value
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import CommandArguments, Given, RewardArguments
from prefrl.scripts.arguments.launch import LaunchArguments, ProcessArguments
from prefrl.scripts.parsing.option_parser import EarlyParser, OptionParser, option_of
from prefrl.scripts.schema.help import all_options, common_options, found_options

HUGGINGFACE_FILE = Path(__file__).with_name("huggingface.json")
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate does


@cache
def huggingface() -> dict[str, Any]:
    """HuggingFace's options, and the names that some of them take; see `prefrl.scripts.schema.writer`."""
    found: dict[str, Any] = json.loads(HUGGINGFACE_FILE.read_text(encoding="utf-8"))
    return found


def _stand_in() -> Any:
    """A dataclass with the names and defaults of HuggingFace's options."""
    defaults = {row["name"]: row.get("default") for row in huggingface()["options"]}
    rows = [
        (name, Any, dataclasses.field(default_factory=partial(list, value)) if isinstance(value, list) else value)
        for name, value in defaults.items()
    ]
    return dataclasses.make_dataclass("HuggingFaceOptions", rows, init=False, repr=False, eq=False)


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


_NUMBERS = {"int": int, "float": float}
_LIMITS: dict[str, Any] = {"ge": Ge, "gt": Gt, "le": Le, "lt": Lt}


@cache
def options_of(algorithm: str) -> list[dict[str, Any]]:
    """The options of an algorithm, in the order of their declaration; see `option_of`."""
    early = early_class(algorithm)
    names = {field.name for field in dataclasses.fields(early)}
    script_class = RewardArguments if "reward_weights" in names else CommandArguments
    launch_class = LaunchArguments if "use_vllm" in names else ProcessArguments
    options = [*_options(script_class), *_options(early), *_flat_names(early), *_options(launch_class)]
    if algorithm == "grpo":
        text = "Options of a paper's algorithm; your own take precedence."
        options.append({"name": "preset", "kind": "str", "help": text, "choices": [*PRESETS], "is_nullable": True})
    return options


def _options(cls: Any) -> list[dict[str, Any]]:
    """The fields of a class as options; those that it has from HuggingFace alone as they are described in the file."""
    hints = hints_of(cls)
    inherited = {row["name"]: row for row in huggingface()["options"]} if issubclass(cls, EarlyConfig) else {}
    rows = []
    for field in dataclasses.fields(cls):
        row = option_of(field, hints[field.name]) if "help" in field.metadata else inherited[field.name]
        rows.append({**row, "is_inherited": True} if field.name in inherited else row)
    return rows


def _flat_names(cls: Any) -> list[dict[str, Any]]:
    """The keywords that fill places in options, which the help does not show."""
    hints = hints_of(cls)
    fields = cls.__dataclass_fields__
    return [{**option_of(fields[name], hints[name].type), "is_hidden": True} for name in init_vars(cls)]


class SchemaParser(OptionParser):
    """The parser of `prefrl <algorithm>`.

    Args:
        algorithm: Its name in the registry.
    """

    def __init__(self, algorithm: str) -> None:
        super().__init__(prog=f"prefrl {algorithm}", description=f"Dataset: {REGISTRY[algorithm].dataset}.")
        self._algorithm, self._options = algorithm, {option["name"]: option for option in options_of(algorithm)}
        for option in self._options.values():
            self.add_option(option)

    def parse(self, argv: Sequence[str]) -> Given:
        """The options that are given, checked as far as it costs nothing.

        Raises:
            ConfigError: An unknown or missing option, a value of the wrong type or out of bounds, or an option of a
                feature that is off.
            SystemExit: Help was asked for.
        """
        values = self.read(argv)[0]
        of_command_line = self.given(argv)
        places = {
            name: place for name, place in self.places.items() if re.split(r"\W", name)[0] not in of_command_line
        }
        names = [name for name in values if name in of_command_line | places.keys()]
        options = {name: values[name] for name in names if name not in self._own}
        if options.get("vllm") is not None and "use_vllm" not in options:
            options["use_vllm"] = values["use_vllm"] = True  # on the server that is started
        given = Given(options, places, takes_rewards="reward_funcs" in self._options)
        try:
            for name, value in given.values.items():
                self._check_number(name, value)
                off = [switch for switch in self._needs[name] if values.get(switch, True) is False]
                if off and value != self._options[name].get("default"):
                    raise ConfigError(f"{name}={value!r} has no effect because {off[0]}=False. Set {off[0]}=True.")
        except ConfigError as error:
            raise given.located(error) from None
        return given

    def check(self, given: Given, *, knows_processes: bool = True) -> Any:
        """Check the options against each other, as far as that needs neither torch nor transformers.

        Args:
            given: Those that the user gives.
            knows_processes: False: the run is started on other processes, so sizes of batches are left to them.

        Returns:
            The options as attributes.

        Raises:
            ConfigError: The one that the config would raise.
        """
        early, values, preset = early_class(self._algorithm), given.values, given.values.get("preset")
        config = early()
        try:
            if preset is not None:
                values = combined(PRESETS[preset], values, flat_names(early))
            for field in dataclasses.fields(early):
                setattr(config, field.name, values[field.name] if field.name in values else default_of(field))
            config.knows_sizes = knows_processes and not config.parallelism_config
            config.__post_init__(*(values.get(name, default) for name, default in init_vars(early).items()))
        except ConfigError as error:
            raise given.located(error) from None
        return config

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Every option by name, the defaults included.

        Raises:
            ConfigError: An unknown or missing option, or a value of the wrong type.
            SystemExit: Help was asked for.
        """
        return self.read(argv)[0]

    def _check_number(self, name: str, value: Any) -> None:
        """Check a number of ours; those of HuggingFace are checked together with the rules."""
        option = self._options[name]
        hint: Any = _NUMBERS.get(option.get("kind", ""))
        if hint is None or value is None or isinstance(value, str) or option.get("is_inherited"):
            return
        if "bounds" in option:
            hint = Annotated[(hint, *(_LIMITS[kind](limit) for kind, limit in option["bounds"].items()))]
        check_value(name, value, list[hint] if option.get("is_list") else hint)

    def remedy(self, name: str, known: Collection[str]) -> str:
        """See `OptionParser.remedy`; also names the algorithms that have the option."""
        plain = name.lstrip("-").replace("-", "_")
        others = [other for other in REGISTRY if any(option["name"] == plain for option in options_of(other))]
        if others:
            return f"It is an option of {', '.join(others)}; {self._algorithm} has no option with this name."
        return super().remedy(name, known)

    def show_help(self, argv: Sequence[str], early: EarlyParser) -> None:
        """Print the common options, all of them, or those with the word that was asked for."""
        options = [option for option in self._options.values() if not option.get("is_hidden")]
        if early.word:
            print(found_options(self._algorithm, options, early.word))
        else:
            print((all_options if early.wants_all else common_options)(self._algorithm, options))
