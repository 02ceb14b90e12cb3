"""The options of every algorithm as data: their help, `prefrl init`, and checks before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.algorithms import PRESETS, combined
from prefrl.options.base import BaseOptions
from prefrl.options.fields import about, default_of, flat_names, hints_of
from prefrl.options.names import check_known, nearest
from prefrl.options.optimizers import check_not_refused
from prefrl.options.types import check_value
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import (
    CommandArguments,
    Given,
    RewardArguments,
    weighted_rewards,
)
from prefrl.scripts.arguments.launch import LaunchArguments, ProcessArguments
from prefrl.scripts.parsing.option_parser import (
    HEAD,
    WIDTH,
    EarlyParser,
    OptionParser,
    choices_in_words,
    default_in_words,
    option_of,
)

HUGGINGFACE_FILE = Path(__file__).with_name("huggingface.json")
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate does


# HuggingFace's options, and the names that some of them take; see `prefrl.scripts.generated`.
_HUGGINGFACE: dict[str, Any] = json.loads(HUGGINGFACE_FILE.read_text(encoding="utf-8"))
_INHERITED = {row["name"]: row for row in _HUGGINGFACE["options"]}
# A dataclass with their names and defaults.
HuggingFaceOptions: Any = dataclasses.make_dataclass(
    "HuggingFaceOptions",
    [
        (name, Any, dataclasses.field(default_factory=partial(list, value)) if isinstance(value, list) else value)
        for name, value in ((name, row.get("default")) for name, row in _INHERITED.items())
    ],
    init=False,
    repr=False,
    eq=False,
)


@dataclasses.dataclass(init=False, repr=False, eq=False)
class EarlyConfig(BaseOptions, HuggingFaceOptions):
    """What `BaseConfig` is to `TrainingArguments`."""

    gives_warnings = False  # the config does, in this process or in those that train

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
        check_known("lr_scheduler_type", str(self.lr_scheduler_type), _HUGGINGFACE["schedules"], "schedule")
        check_known("optim", str(self.optim), _HUGGINGFACE["optimizers"], "optimizer")
        options: Any = self
        if options.eval_strategy == "steps" and not options.eval_steps:
            options.eval_steps = options.logging_steps
        if options.include_num_input_tokens_seen is False:
            options.include_num_input_tokens_seen = "no"
        self._count_evaluations()


@cache
def early_class(algorithm: str) -> Any:
    """The options of an algorithm: its own, over the stand-in; `script` is the class of those of model and data."""
    options: Any = REGISTRY[algorithm].load_options()
    script: type[CommandArguments] = CommandArguments
    if "reward_weights" in {field.name for field in dataclasses.fields(options)}:
        script = RewardArguments
    early = type("Options", (options, EarlyConfig), {"__module__": __name__, "script": script})
    return dataclasses.dataclass(init=False, repr=False, eq=False)(early)


@cache
def options_of(algorithm: str, script: Any = None) -> list[dict[str, Any]]:
    """The options of an algorithm, in the order of their declaration; see `option_of`.

    Those that it has from HuggingFace alone are as they are described in the file.

    Args:
        algorithm: Its name in the registry.
        script: Class of those that are not the trainer's; None: that of the algorithm.
    """
    early = early_class(algorithm)
    names = {field.name for field in dataclasses.fields(early)}
    script_class = script or early.script
    launch_class = LaunchArguments if "use_vllm" in names else ProcessArguments
    options = []
    for cls in (script_class, early, launch_class):
        hints, inherited = hints_of(cls), _INHERITED if cls is early else {}
        for field in dataclasses.fields(cls):
            row = option_of(field, hints[field.name]) if "help" in field.metadata else inherited[field.name]
            marks = {"is_inherited": field.name in inherited, "is_hidden": not about(field).is_listed}
            options.append({**row, **{mark: True for mark, is_set in marks.items() if is_set}})
    if algorithm == "grpo":
        text = "Options of a paper's algorithm; your own take precedence."
        options.append({"name": "preset", "kind": "str", "help": text, "choices": [*PRESETS], "is_nullable": True})
    return options


class SchemaParser(OptionParser):
    """The parser of `prefrl <algorithm>`.

    Args:
        algorithm: Its name in the registry.
        script: See `options_of`.
    """

    def __init__(self, algorithm: str, script: Any = None) -> None:
        super().__init__(prog=f"prefrl {algorithm}", description=f"Dataset: {REGISTRY[algorithm].dataset}.")
        self._algorithm, self._script = algorithm, script or early_class(algorithm).script
        self._options = {option["name"]: option for option in options_of(algorithm, script)}
        for option in self._options.values():
            self.add_option(option)

    def parse(self, argv: Sequence[str]) -> Given:
        """The options that are given, checked as far as it costs nothing.

        Raises:
            ConfigError: An unknown or missing option, a value of the wrong type or out of bounds, an option of the
                command whose feature is off, or options of model, data and rewards that exclude each other.
            SystemExit: Help was asked for.
        """
        values = self.read(argv)[0]
        of_command_line = self.given(argv)
        places = {
            name: place for name, place in self.places.items() if re.split(r"\W", name)[0] not in of_command_line
        }
        names = [name for name in values if name in of_command_line | places.keys()]
        options = {name: values[name] for name in names if name not in self._own}
        path = options.pop("reward_model_path", None)  # TRL's name
        if path is not None and (own := options.setdefault("reward_model_name_or_path", path)) != path:
            raise ConfigError(
                f"reward_model_path={path!r} and reward_model_name_or_path={own!r}: given both ways. Remove one."
            )
        for prefix in ("", "eval_"):
            if options.get(f"{prefix}reward_funcs") is not None:
                given_weights = options.get(f"{prefix}reward_weights")
                rewards, weights = weighted_rewards(options[f"{prefix}reward_funcs"], given_weights, prefix=prefix)
                options[f"{prefix}reward_funcs"] = rewards
                options |= {} if weights is None else {f"{prefix}reward_weights": weights}
        if options.get("vllm") is not None and "use_vllm" not in options:
            options["use_vllm"] = values["use_vllm"] = True  # on the server that is started
        given = Given(options, places)
        with given.locating():
            for name, value in options.items():
                self._check_given(name, value, values)
            known = {field.name for field in dataclasses.fields(self._script)}
            script = self._script(**{name: value for name, value in options.items() if name in known})
        return dataclasses.replace(given, script=script)

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
        with given.locating():
            if preset is not None:
                values = combined(PRESETS[preset], values, flat_names(early))
            for field in dataclasses.fields(early):
                setattr(config, field.name, values[field.name] if field.name in values else default_of(field))
            config.knows_sizes = knows_processes and not config.parallelism_config
            config.__post_init__()
        return config

    def _check_given(self, name: str, value: Any, values: Mapping[str, Any]) -> None:
        """Check a number of ours, and whether the feature of an option of the command is on.

        The rules of the config answer for its own features, and its types for numbers of HuggingFace.
        """
        option = self._options[name]
        is_number = option.get("kind") in ("int", "float") and value is not None and not isinstance(value, str)
        if is_number and not option.get("is_inherited"):
            check_value(name, value, option["hint"])
        if name in early_class(self._algorithm).__dataclass_fields__:
            return
        off = [switch for switch in self._needs[name] if values.get(switch, True) is False]
        if off and values[name] != option.get("default"):
            raise ConfigError(f"{name}={values[name]!r} has no effect because {off[0]}=False. Set {off[0]}=True.")

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


_Options = Sequence[Mapping[str, Any]]
# The options that most runs set, in the order in which one thinks of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (*("model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r"),),
    "Data": (
        *("dataset_name", "datasets", "columns", "prompt_template", "system_prompt", "chat_template_path"),
        *("max_length", "assistant_only_loss"),
    ),
    "Rewards and agents": (
        *("reward_funcs", "reward_weights", "reward_model_name_or_path", "environment", "agent", "tools"),
    ),
    "Algorithm": (
        *("preset", "loss_type", "beta", "epsilon", "scale_rewards", "advantage_estimator", "packing"),
        *("teacher_model_name_or_path", "on_policy_fraction", "later_tokens"),
    ),
    "Generation": (
        *("num_generations", "max_prompt_length", "max_completion_length", "temperature", "use_vllm"),
        *("vllm", "log_completions"),
    ),
    "Training": (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch", "bf16", "seed"),
    ),
    "Processes": ("num_processes", "accelerate_config"),
    "Output": (
        *("output_dir", "logging_steps", "report_to", "eval_strategy", "eval_steps", "save_steps"),
        "resume_from_checkpoint",
    ),
}


def common_options(algorithm: str, options: _Options) -> str:
    """The options that most runs set, each in one line."""
    by_name = {option["name"]: option for option in options}
    lines = [
        f"usage: prefrl {algorithm} [FILE.yaml] [--option value ...]",
        "",
        f"Dataset: {REGISTRY[algorithm].dataset}.",
        f"Options: {REGISTRY[algorithm].docs}",
        "",
        "Example:",
        f"  prefrl init {algorithm} > run.yaml",
        f"  prefrl {algorithm} run.yaml --learning_rate 1e-6 --output_dir runs/first",
    ]
    for group, common in _groups(by_name):
        # The first sentence; --help WORD has the rest.
        lines += ["", f"{group}:", *(_line(option, _first_sentence(option)) for option in common)]
    return "\n".join([*lines, "", f"{len(options)} options: --help WORD searches them, --help_all shows all of them."])


def _groups(by_name: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The common options of an algorithm by group. A teacher is one of them where nothing is learned without it."""
    left_out = "teacher_model_name_or_path" if "teacher_kl_coef" in by_name else None
    for group, names in GROUPS.items():
        common = [by_name[name] for name in names if name in by_name and name != left_out]
        if common:
            yield group, common


def found_options(algorithm: str, options: _Options, word: str) -> str:
    """The options with a word in their names or descriptions; those with it in the name come first."""
    word = word.lower()
    named = [option for option in options if word in option["name"]]
    told = [option for option in options if word in option.get("help", "").lower() and option not in named]
    if not named + told:
        return f"No option of {algorithm} has {word!r} in its name or description. --help_all shows every option."
    return "\n".join(map(_entry, named + told))


def all_options(algorithm: str, options: _Options) -> str:
    """Every option with its whole description: prefrl's own before those of transformers."""
    own = [_entry(option) for option in options if not option.get("is_inherited")]
    inherited = [_entry(option) for option in options if option.get("is_inherited")]
    usage = f"usage: prefrl {algorithm} [FILE.yaml] [--option value ...]"
    return "\n".join([usage, "", "Options of prefrl:", *own, "", "Options of transformers:", *inherited])


def kind_of(option: Mapping[str, Any]) -> str:
    """The kind of value that an option takes."""
    if "choices" in option:
        return "{" + ",".join(map(str, option["choices"])) + "}"
    kind = {"bool": "true|false", "str": "text", "dataset": "JSON", "reward": "text"}.get(
        option["kind"], option["kind"]
    )
    return f"{kind} ..." if option.get("is_list") else kind


def option_group(title: str, options: Iterable[Mapping[str, Any]]) -> str:
    """Options with their whole descriptions, below a title, as in the help of other commands."""
    return "\n".join([f"{title}:", *(_line(option, option.get("help", "")) for option in options)])


def _first_sentence(option: Mapping[str, Any]) -> str:
    return re.split(r"(?<=[a-z0-9)]{2}\.) ", option.get("help", ""), maxsplit=1)[0]


def _line(option: Mapping[str, Any], about: str) -> str:
    head = f"  --{option['name']} {kind_of(option) if 'choices' not in option else ''}".rstrip()
    text = about + choices_in_words(option.get("choices")) + default_in_words(option.get("default"))
    first, *rest = textwrap.wrap(text, WIDTH - max(len(head), HEAD) - 1) or [""]
    more = textwrap.wrap(" ".join(rest), WIDTH - HEAD - 1)
    return "\n".join([f"{head:<{HEAD}} {first}", *(f"{'':<{HEAD}} {line}" for line in more)]).rstrip()


def _entry(option: Mapping[str, Any]) -> str:
    text = option.get("help", "") + default_in_words(option.get("default"))
    return "\n".join(
        [
            f"  --{option['name']} {kind_of(option)}",
            *textwrap.wrap(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8),
        ]
    )


_USAGE = "usage: prefrl init ALGORITHM > run.yaml"
_ABOUT = f"""\
{_USAGE}

Print a commented YAML file with the common options of an algorithm.

Example:
  prefrl init grpo > run.yaml

Algorithms:
{textwrap.fill(", ".join(REGISTRY), WIDTH, initial_indent="  ", subsequent_indent="  ")}

General:
  -h, --help  Show this help."""
_FILE_WIDTH = 100
# What a first run has to set; everything else is a comment.
_FILLED = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "data.jsonl",
    "reward_funcs": ["numeric_reward"],
    "teacher_model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "max_steps": 100,
}


def init(argv: Sequence[str]) -> int:
    """Print the file for the algorithm that the command line names."""
    if argv and argv[0] in ("-h", "--help"):
        print(_ABOUT)
        return 0
    if len(argv) != 1:
        raise ConfigError(f"{len(argv)} arguments: give one, the algorithm. {_USAGE}")
    if argv[0] not in REGISTRY:
        raise ConfigError(f"{argv[0]!r} is not an algorithm. {nearest(argv[0], REGISTRY)}")
    print(_file_of(argv[0]))
    return 0


def _file_of(algorithm: str) -> str:
    by_name = {option["name"]: option for option in options_of(algorithm)}
    blocks = [
        f"# prefrl {algorithm} run.yaml\n# Dataset: {REGISTRY[algorithm].dataset}.\n# Options on the command line "
        f"take precedence; prefrl {algorithm} --help WORD searches all of them."
    ]
    filled = {**_FILLED, "output_dir": f"runs/{algorithm}"}
    if algorithm == "distillation":
        del filled["reward_funcs"]
    for group, common in _groups(by_name):
        entries = [_commented(option, filled) for option in common]
        blocks.append("\n".join([f"# ---- {group} ----", *entries]))
    return "\n\n".join(blocks)


def _commented(option: Mapping[str, Any], filled: Mapping[str, Any]) -> str:
    name = option["name"]
    about = textwrap.wrap(option.get("help", ""), _FILE_WIDTH, initial_indent="# ", subsequent_indent="# ")
    if name in filled:
        return "\n".join([*about, f"{name}: {json.dumps(filled[name])}"])
    return "\n".join([*about, f"#{name}: {json.dumps(option.get('default'))}  # {kind_of(option)}"])
