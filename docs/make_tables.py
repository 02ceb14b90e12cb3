"""Write the generated parts of the docs from the code: `python docs/make_tables.py`.

A page says where with a pair of markers; what stands between them is replaced.

`<!-- options: prefrl.GRPOConfig -->`, `<!-- end of options -->`: options that only this config has
`<!-- shared options -->`, `<!-- end of options -->`: options of several configs
`<!-- command options -->`, `<!-- end of options -->`: options of commands that are in no config: model, data, rewards
`<!-- keys: loss_kwargs -->`, `<!-- end of keys -->`: keys of options that are mappings
`<!-- rows: losses -->`, `<!-- end of rows -->`: tables of losses, advantages, KL estimates, ...
`<!-- papers: grpo -->`, `<!-- end of papers -->`: papers that options of an algorithm implement, with their commands
`<!-- api: prefrl errors -->`, `<!-- end of api -->`: public names of a module or of a part, with docstrings
`<!-- demo -->`, `<!-- end of demo -->`: what `make demo` reached, from benchmarks/results/demo.json
`<!-- recipes -->`, `<!-- end of recipes -->`: what `python -m benchmarks.recipes` found
`<!-- ready first -->`, `<!-- end of ready first -->`: what `python -m benchmarks.ready_first` found
`<!-- gpu: steps -->`, `<!-- end of gpu -->`: a stage of `make gpu`, from benchmarks/results/gpu.json
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import shlex
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import flat_names, listed_fields
from prefrl.options.params import kwargs_options

DOCS = Path(__file__).parent
MARKERS = re.compile(r"(<!-- options: ([\w.]+) -->\n).*?(<!-- end of options -->)", re.S)
SHARED = re.compile(r"(<!-- shared options -->\n).*?(<!-- end of options -->)", re.S)
COMMAND = re.compile(r"(<!-- command options -->\n).*?(<!-- end of options -->)", re.S)
API = re.compile(r"(<!-- api: ([\w.]+) ?(\w*) -->\n).*?(<!-- end of api -->)", re.S)
DEMO = re.compile(r"(<!-- demo -->\n).*?(<!-- end of demo -->)", re.S)
GPU = re.compile(r"(<!-- gpu: (\w+) -->\n).*?(<!-- end of gpu -->)", re.S)
READY = re.compile(r"(<!-- ready first -->\n).*?(<!-- end of ready first -->)", re.S)
RECIPES = re.compile(r"(<!-- recipes -->\n).*?(<!-- end of recipes -->)", re.S)
PAPERS = re.compile(r"(<!-- papers: (\w+) -->\n).*?(<!-- end of papers -->)", re.S)
ROWS = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end of rows -->)", re.S)
KEYS = re.compile(r"(<!-- keys: ([\w ]+) -->\n).*?(<!-- end of keys -->)", re.S)
# Pages that list the keys of an option that is a mapping; the others are in docs/losses.md.
KEY_PAGES = {
    **dict.fromkeys(("vllm_kwargs", "vllm_importance_sampling_kwargs", "async_kwargs"), "vllm.md"),
    **dict.fromkeys(
        ("lr_scheduler_kwargs", "reduce_on_plateau_kwargs", "weight_decay_schedule_kwargs"), "schedules.md"
    ),
    "auto_size_kwargs": "batch_sizes.md",
    "profile_kwargs": "profiling.md",
    **dict.fromkeys(("teacher_weights_kwargs", "teacher_server_kwargs"), "trainers/distillation.md"),
    **dict.fromkeys(("checkpoint_kwargs", "upload_kwargs"), "checkpoints.md"),
    **dict.fromkeys(("eval_sampling_kwargs", "pass_at_k_kwargs"), "evaluation.md"),
    **dict.fromkeys(
        ("early_stopping_kwargs", "model_soup_kwargs", "increase_batch_size_kwargs", "spike_kwargs"), "autopilot.md"
    ),
}
ARXIV = re.compile(r"arXiv (\d+\.\d+)")
WIDTH = 78  # of lines of code
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# In texts without markup: the name of an option, perhaps with its value.
OPTION = re.compile(r"(?<![\w'\"/.:{-])(?:--)?[a-z]\w*_\w+(?:=(?:'[^']*'|\{[^}]*\}|[\w.]+))?(?![\w/]|\.\w)")
LINK = r"[arXiv \1](https://arxiv.org/abs/\1)"
_LOSSES_OF = {
    "dpo": "prefrl.losses.preference.pairwise.PAIR_LOSSES",
    "cpo": "prefrl.losses.preference.pairwise.CPO_LOSSES",
}
SIGNS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def render(page: str) -> str:
    """The page with its tables as they should be."""
    page = MARKERS.sub(lambda found: f"{found[1]}\n{own_tables(load(found[2]))}\n{found[3]}", page)
    page = SHARED.sub(lambda found: f"{found[1]}\n{shared_tables()}\n{found[2]}", page)
    page = COMMAND.sub(lambda found: f"{found[1]}\n{command_tables()}\n{found[2]}", page)
    page = API.sub(lambda found: f"{found[1]}\n{api_of(found[2], found[3])}\n\n{found[4]}", page)
    page = DEMO.sub(lambda found: f"{found[1]}\n{demo_figures()}\n\n{found[2]}", page)
    page = GPU.sub(lambda found: f"{found[1]}\n{load('benchmarks.gpu_report.markdown')(found[2])}\n\n{found[3]}", page)
    page = READY.sub(lambda found: f"{found[1]}\n{load('benchmarks.ready_first.markdown')()}\n\n{found[2]}", page)
    page = RECIPES.sub(lambda found: f"{found[1]}\n{load('benchmarks.recipes.markdown')()}\n\n{found[2]}", page)
    page = PAPERS.sub(lambda found: f"{found[1]}\n{papers_of(found[2])}\n\n{found[3]}", page)
    page = KEYS.sub(lambda found: f"{found[1]}\n{keys_of(found[2].split())}\n\n{found[3]}", page)
    return ROWS.sub(lambda found: f"{found[1]}\n{rows_of(found[2])}\n\n{found[3]}", page)


# The names of `prefrl` that are on a page of their own; those that match none are in the last one.
API_PARTS = {
    "trainers": r"Trainer$",
    "configs": r"Config$|Arguments$|Parser$|^get_(peft|quantization|kbit)",
    "errors": r"Error$",
    "callbacks": r"Callback$",
    "environments": r"Agent$|Client$|Env$|Environment$|Spec$|Observation$",
    "data": r"",
}


def api_of(module: str, part: str = "") -> str:
    """A directive of mkdocstrings for each public name of a module, or of a part of it, in alphabetical order.

    The signature of a config is left out: it repeats all options, which are in the tables of its trainer's page.
    """
    names = importlib.import_module(module).__all__
    if part:
        parts = {name: next(key for key, ending in API_PARTS.items() if re.search(ending, name)) for name in names}
        names = [name for name in names if parts[name] == part]
    options = {name: "\n    options: {show_signature: false}" for name in names if name.endswith("Config")}
    return "\n\n".join(f"::: {module}.{name}{options.get(name, '')}" for name in sorted(names, key=str.lower))


def demo_figures() -> str:
    """What the demo reached; each row is the `summary.json` of a machine, as far as it was kept."""
    rows = json.loads((DOCS.parent / "benchmarks/results/demo.json").read_text(encoding="utf-8"))
    sft, grpo, seconds = (
        " and ".join(f"{value:{form}}" for value in (min(found), max(found)))
        for name, form in (("accuracy_sft", ".2f"), ("accuracy_grpo", ".2f"), ("cpu_seconds", ".0f"))
        for found in [[row[name] for row in rows if name in row]]
    )
    text = (
        f"In {len(rows)} runs with the same seed, the accuracy on held-out questions rose from 0 to between {sft} "
        f"after SFT, and to between {grpo} after GRPO. The figures differ because processors round differently. The "
        f"runs took between {seconds} seconds of CPU time, with one thread."
    )
    return "\n".join(textwrap.wrap(text, 128))


def papers_of(algorithm: str) -> str:
    """A command for each paper that is a choice of options of an algorithm."""
    if algorithm == "grpo":
        presets = load("prefrl.options.algorithms.PRESETS")
        entries = {
            name: (f"{row.source}. {row.note}".removesuffix(". "), row.options) for name, row in presets.items()
        }
        start = "--config examples/grpo.yaml"
    else:
        losses = load(_LOSSES_OF[algorithm])
        papers = {name: row.source for name, row in losses.items() if "arXiv" in row.source}
        needed = {"alphapo": {"alpha": 0.25}}
        entries = {name: (source, {"loss_type": name} | needed.get(name, {})) for name, source in papers.items()}
        start = f"--model_name_or_path {MODEL} --dataset_name pairs.jsonl --output_dir runs/{algorithm}"
    return "\n\n".join(
        f"**`{name}`**: {ARXIV.sub(LINK, source)}\n\n```bash\n{_wrapped(f'prefrl {algorithm} {start}', options)}\n```"
        for name, (source, options) in entries.items()
    )


def _wrapped(start: str, options: dict[str, Any]) -> str:
    """The command with the options, in lines that fit into the column of a page."""
    first, *parts = re.split(r" (?=--)", f"{start} {_flags(options)}".rstrip())
    lines = [first]
    for part in parts:
        if len(f"{lines[-1]} {part} \\") > WIDTH:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


def _flags(options: dict[str, Any]) -> str:
    """The options as flags, without those of sampling and of the KL term that examples/grpo.yaml sets to the same."""
    example = yaml.safe_load((DOCS.parent / "examples/grpo.yaml").read_text(encoding="utf-8"))
    same = {"top_p": 1.0, "top_k": None, **example}
    words = []
    for name, value in options.items():
        if name not in same or value != same[name]:
            text = json.dumps(value) if isinstance(value, dict | bool) else str(value)
            words += [f"--{name}", shlex.quote(text)]
    rows = example["per_device_train_batch_size"]
    if options.get("num_generations", 1) > rows * example["gradient_accumulation_steps"]:
        words += ["--gradient_accumulation_steps", str(options["num_generations"] // rows)]
    return " ".join(words)


def keys_of(names: Collection[str]) -> str:
    """A table of the keys of options that are mappings."""
    lines = ["| option | with | key | value | default | meaning |", "|---|---|---|---|---|---|"]
    options = {
        option.name: option
        for config in ("GRPO", "PPO", "DPO", "Distillation")
        for option in kwargs_options(load(f"prefrl.{config}Config"))
    }
    for option in options.values():
        hints = {}
        for params in option.choices.values():
            known = typing.get_type_hints(params, include_extras=True)
            hints |= {id(field): known[field.name] for field in dataclasses.fields(params)}
        for choices, keys in option.keys().items() if option.name in names else ():
            switch = "" if choices == "all" else _code(choices.split(", "))
            lines += [f"| `{option.name}` | {switch} {row(key.name, hints[id(key)], key)}" for key in keys]
    return "\n".join(lines)


def rows_of(name: str) -> str:
    """A table of one of the library's dictionaries."""
    titles, lines = {
        "losses": (["`loss_type`", "averaged over", "`importance_sampling_level`", "options", "source"], _losses),
        "advantages": (["`advantage_estimator`", "of", "options", "source"], _advantages),
        "kl": (["`kl_estimator`", "value unbiased", "gradient unbiased", "source"], _kl),
        "optimizers": (["`optim`", "class", "`weight_decay`", "keys of `optim_args`", "ZeRO", "FSDP2"], _optimizers),
        "commands": (["command", "what it does"], _commands),
        "names": (["TRL", "prefrl"], _names),
        "trl": (["TRL", "prefrl"], lambda: _foreign("rows.TRL")),
        "trl_arguments": (["argument", "instead"], _trl_arguments),
        "trl_names": (["name", "prefrl"], _trl_names),
        "transformers": (["transformers 4", "prefrl"], lambda: _foreign("rows.TRANSFORMERS")),
        "trl_defaults": (["option", "of", "TRL", "prefrl"], _trl_defaults),
        "verl": (["verl", "prefrl"], lambda: _needed("verl_keys.VERL")),
        "verl_sft": (["verl", "prefrl"], _verl_sft),
        "cosmos_rl": (["cosmos-rl", "prefrl"], lambda: _needed("cosmos_rl.COSMOS_RL")),
        "axolotl": (["axolotl", "prefrl"], lambda: _foreign("others.AXOLOTL")),
        "ms_swift": (["ms-swift", "prefrl"], lambda: _foreign("others.MS_SWIFT")),
        "ludwig": (["Ludwig", "prefrl"], lambda: _needed("ludwig.LUDWIG")),
        "ludwig_keys": (["Ludwig", "prefrl"], lambda: _of_sections("ludwig.LUDWIG_KEYS", "trainer.")),
        "errors": (["class", "meaning"], _errors),
    }[name]
    head = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    rows = _together(lines()) if len(titles) == 2 else lines()
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in rows)])


def _together(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """The rows of a table of names, those that say the same as one row."""
    names: dict[str, list[str]] = {}
    for name, text in rows:
        names.setdefault(text, []).append(name)
    yield from ([", ".join(found), text] for text, found in names.items())


_AVERAGES = {
    "token": "tokens",
    "sequence_mean": "sequences, of means over tokens",
    "sequence_sum": "sequences, of sums over tokens",
    "constant": "sequences * max_completion_length",
}


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _own_options(option: str, params: Any) -> str:
    """The options of their own that the hyperparameters of a row have."""
    (mapping,) = [found for found in kwargs_options(load("prefrl.GRPOConfig")) if found.name == option]
    return _code(name for name in params.names() if name in mapping.own_options)


def _losses() -> Iterator[list[str]]:
    for name, loss in load("prefrl.losses.policy.losses.POLICY_LOSSES").items():
        options = _own_options("loss_kwargs", loss.params)
        yield [f"`{name}`", _AVERAGES[loss.reduction], _code(loss.levels), options, loss.source]


def _advantages() -> Iterator[list[str]]:
    for name, row in load("prefrl.losses.advantage.ADVANTAGES").items():
        options = _own_options("advantage_kwargs", row.params)
        yield [f"`{name}`", {"row": "a completion", "token": "a token"}[row.level], options, row.source]


def _kl() -> Iterator[list[str]]:
    says = {True: "yes", False: "no"}
    for name, row in load("prefrl.losses.kl.KL_ESTIMATORS").items():
        yield [f"`{name}`", says[row.unbiased_value], says[row.unbiased_gradient], row.source]


def _optimizers() -> Iterator[list[str]]:
    places = {"torch": "torch.optim", "bitsandbytes": "bitsandbytes.optim", "pytorch_optimizer": "pytorch_optimizer"}
    decays = {"L2": "L2", "decoupled": "decoupled", "none": "refused"}
    works_under = load("prefrl.trainer.optimizers.works_under")
    for name, row in load("prefrl.options.optimizers.OPTIMIZERS").items():
        decay = "L2, or decoupled" if "decoupled_weight_decay" in row.keys else decays[row.decay]
        works = ["yes" if value else "refused" for value in works_under(name).values()]
        class_name = "Muon` and `torch.optim.AdamW" if name == "muon" else row.class_name
        yield [f"`{name}`", f"`{places[row.package]}.{class_name}`", decay, _code(row.keys), *works]


def _commands() -> Iterator[list[str]]:
    for name, algorithm in load("prefrl.registry.REGISTRY").items():
        page = algorithm.docs.removeprefix("docs/")
        yield [f"[`prefrl {name}`]({page})", f"Train on {algorithm.dataset}."]
    for name, command in load("prefrl.scripts.main.OTHERS").items():
        yield [f"`prefrl {name}`", f"{command.text[0].upper()}{command.text[1:]}."]


def _names() -> Iterator[list[str]]:
    for name, place in flat_names(load("prefrl.GRPOConfig")).items():
        key = f"`{place.option}`" if place.key is None else f"`{place.key}` of `{place.option}`"
        yield [f"`{name}`", key]


def _errors() -> Iterator[list[str]]:
    for name in load("prefrl.errors.__all__"):
        error = load(f"prefrl.errors.{name}")
        yield [f"`{name}`", f"{error.__doc__.strip().splitlines()[0]} Subclass of `{error.__bases__[-1].__name__}`."]


_FOREIGN = "prefrl.scripts.migrate"


def _foreign(path: str) -> Iterator[list[str]]:
    for name, row in load(f"{_FOREIGN}.{path}").items():
        is_refused = row.kind == "not there" and "not supported" not in row.text
        text = f"not needed: {row.text}" if row.kind == "not needed" else row.text
        text = f"not supported: {text}" if is_refused else text
        if row.kind == "renamed":
            text = f"`{text}`"
        elif text.startswith("--"):
            text = f"`{text}` of `prefrl vllm-serve`"
        elif row.kind != "becomes":
            text = f"{text[0].upper()}{text[1:]}."
        yield [f"`{name}`", text if text.startswith("`") else OPTION.sub(r"`\g<0>`", text)]


def _needed(path: str) -> Iterator[list[str]]:
    """The rows that say more than another name."""
    names = {f"`{name}`" for name, row in load(f"{_FOREIGN}.{path}").items() if row.kind == "renamed"}
    plain = ("Not needed", "the key '")
    yield from (row for row in _foreign(path) if row[0] not in names and not row[1].startswith(plain))


def _verl_sft() -> Iterator[list[str]]:
    """The rows that are not those of the other trainer, whose optimizer is below its actor."""
    others = [[name.replace("actor_rollout_ref.actor.", ""), text] for name, text in _foreign("verl_keys.VERL")]
    yield from (row for row in _needed("verl.VERL_SFT") if row not in others)


def _of_sections(path: str, without: str) -> Iterator[list[str]]:
    """The rows of all sections but one."""
    yield from (row for row in _needed(path) if not row[0].startswith(f"`{without}"))


def _trl_arguments() -> Iterator[list[str]]:
    yield from ([f"`{name}`", text] for name, text in load("prefrl.options.names.ARGUMENTS").items())


def _trl_names() -> Iterator[list[str]]:
    yield from ([f"`{name}`", text] for name, text in load(f"{_FOREIGN}.names.NAMES").items())


def _trl_defaults() -> Iterator[list[str]]:
    configs: dict[tuple[str, str, str], list[str]] = {}
    defaults = load(f"{_FOREIGN}.rows.DEFAULTS")
    for config, values in defaults.items():
        ours = {field.name: field for field in dataclasses.fields(load(f"prefrl.{config}"))}
        for option, value in values.items():
            default = False if option in ("bf16", "gradient_checkpointing") else ours[option].default
            configs.setdefault((option, repr(value), repr(default)), []).append(config)
    for (option, theirs, default), names in configs.items():
        where = "all" if len(names) == len(defaults) else _code(names)
        yield [f"`{option}`", where, f"`{theirs}`", f"`{default}`"]


def load(path: str) -> Any:
    """What is at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def groups(config: type[Any]) -> list[type[Any]]:
    """The option groups of a config: itself and its bases, without HuggingFace's."""
    return [group for group in config.__mro__ if group.__module__.startswith("prefrl.") and options_of(group)]


def options_of(group: type[Any]) -> list[str]:
    """The options that a group declares."""
    fields = {field.name for field in listed_fields(group)} if dataclasses.is_dataclass(group) else set()
    return [name for name in inspect.get_annotations(group) if name in fields]


@functools.cache
def audiences() -> dict[type[Any], str]:
    """The trainers that have an option group in common, for each group that several have."""
    users: dict[type[Any], list[str]] = {}
    for algorithm in load("prefrl.registry.REGISTRY").values():
        config = algorithm.load_config()
        for group in groups(config):
            users.setdefault(group, []).append(config.__name__.removesuffix("Config"))
    largest = max(map(len, users.values()))
    return {
        group: "all" if len(names) == largest else ", ".join(names) for group, names in users.items() if len(names) > 1
    }


# What shared options are about: the first topic whose pattern matches a name; else that of the class of the option.
TOPICS = {
    "Optimizer and learning rate": r"optim$|learning_rate|^lr_|^warmup|^reduce_on|^weight_decay|^max_grad|^regul",
    "Batch sizes": r"(?<!_ref_)batch_size|max_tokens_per|auto_size|steps_per_gen|num_iterations|minibatches",
    "Model and tokenizer": r"^model_init|trust_remote|dropout|freeze|router_|tokenizer|chat_templ|^eos_|pad_t|image",
    "Memory, speed and precision": r"forward_plan|activation|liger|fp8|flops|profile|ds3_|cache_|num_proc",
    "Checkpoints, resuming and what ends a run": r"checkpoint|upload|resume|save_|max_train_|stop_at|on_nan|^nan_",
    "Early stopping, averages and spikes": r"^early_|soup|^ema_|spike",
    "Evaluation": r"^eval_(?!reward)|_eval_samp|during_eval|evaluate_|pass_at_k|log_val",
    "Logs": r"^log_|logging_|completions_to_print|journal_keep|strict_options|remove_unused",
    "Lengths and rows": r"max_length|truncation_mode|invalid_rows|max_prompt|filter_over|shuffle_dataset",
    "Reference model and KL term": r"^beta$|(?<!_)ref_|_reference|_ref_|^kl_",
    "Teacher": r"^teacher_",
    "Policy loss and entropy": r"^loss_|epsilon|delta|entropy|importance_sampling_level",
    "Advantages": r"advantage|^turn_|selection|balance|truncated_logprobs",
    "Sampling": r"num_gen|max_completion|temperature|^top_|min_p|repetition|^stop$|include_stop|ignore_eos",
    "Agents, tools and turns": r"max_turns|tool|episode|environment|reasoning_in",
    "Rewards": r"reward|stop_without_signal|mask_truncated",
    "Choice of prompts": r"dynamic_sampling|curriculum",
    "vLLM": r"vllm|weight_sync|generation_mode|max_staleness|async",
}
_CLASS_TOPICS = {
    "TrainingOptions": "Memory, speed and precision",
    "OfflineOptions": "Lengths and rows",
    "OfflineReferenceOptions": "Reference model and KL term",
    "ReferenceOptions": "Reference model and KL term",
    "SampleOptions": "Evaluation",
    "TeacherOptions": "Teacher",
    "PolicyGradientOptions": "Policy loss and entropy",
    "CreditOptions": "Advantages",
    "OnlineOptions": "Sampling",
    "RolloutOptions": "Rewards",
}


def topic_of(name: str, group: type[Any]) -> str:
    """What an option that several trainers share is about."""
    found = (topic for topic, pattern in TOPICS.items() if re.search(pattern, name))
    return next(found, _CLASS_TOPICS.get(group.__name__, "Checkpoints, resuming and what ends a run"))


def own_tables(config: type[Any]) -> str:
    """The tables of the option groups that only this config has, and links to the topics of those that it shares."""
    own = [table(config, group) for group in groups(config) if group not in audiences()]
    shared = [group for group in groups(config) if group in audiences()]
    topics = {topic_of(name, group) for group in shared for name in options_of(group)}
    links = [f"[{topic}](options.md#{re.sub('[^a-z -]', '', topic.lower()).replace(' ', '-')})" for topic in TOPICS]
    listed = [link for topic, link in zip(TOPICS, links, strict=True) if topic in topics]
    lead = "Options that other trainers have, too; a default above overrides the one in a shared table:"
    return "\n".join([*own, lead, "", *(f"- {link}" for link in listed), ""])


def shared_tables() -> str:
    """A table of options for each topic, with the trainers that have them."""
    sections: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for algorithm in load("prefrl.registry.REGISTRY").values():
        config = algorithm.load_config()
        for group in groups(config):
            for name, line in rows_of_options(config, group) if group in audiences() else ():
                sections[topic_of(name, group)].append(f"{line} {audiences()[group]} |")
    head = "| option | value | default | meaning | trainers |\n|---|---|---|---|---|"
    return "\n".join(
        f"## {topic}\n\n{head}\n" + "\n".join(dict.fromkeys(lines)) + "\n" for topic, lines in sections.items()
    )


def command_tables() -> str:
    """The tables of the options that commands have besides those of a config."""
    arguments = load("prefrl.scripts.arguments.command.RewardArguments")
    return "\n".join(table(arguments, group) for group in groups(arguments))


def table(config: type[Any], group: type[Any]) -> str:
    """The table of an option group of a config under the group's description, with the group's own defaults."""
    assert group.__doc__ is not None
    title = group.__doc__.strip().splitlines()[0]
    rows = [line for _, line in rows_of_options(config, group)]
    return "\n".join([title, "", "| option | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def rows_of_options(config: type[Any], group: type[Any]) -> list[tuple[str, str]]:
    """Name and line of each option of a group, with the group's own defaults."""
    hints = typing.get_type_hints(group, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(group)}
    meanings = {
        option.name: f"{option.description} [Keys](../{KEY_PAGES.get(option.name, 'losses.md')}#keys)."
        for option in kwargs_options(config)
    }
    return [(name, row(name, hints[name], fields[name], meanings.get(name))) for name in options_of(group)]


def row(name: str, hint: Any, field: dataclasses.Field[Any], meaning: str | None = None) -> str:
    """A line of a table; the meaning of an option is its help, if it is not given."""
    has_factory = field.default_factory is not dataclasses.MISSING
    default = field.default_factory() if has_factory else field.default
    shown = "must be set" if default is dataclasses.MISSING else f"`{default}`"
    return f"| `{name}` | {describe(hint)} | {shown} | {meaning or field.metadata['help'].replace('%%', '%')} |"


def describe(hint: Any) -> str:
    """What a value may be, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [f"{SIGNS[type(b)][1]} {getattr(b, SIGNS[type(b)][0])}" for b in arguments[1:]]
        return f"{describe(arguments[0])} {', '.join(bounds)}"
    if hint is load("prefrl.losses.policy.losses.LossType"):
        return "a [policy loss](../losses.md#policy-losses)"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {describe(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:  # a union; a mapping may also be given as JSON text
        is_mapping = any(typing.get_origin(part) is dict for part in arguments)
        return " or ".join(describe(part) for part in arguments if not (is_mapping and part is str))
    return "None" if hint is type(None) else str(hint.__name__)


def main() -> None:
    """Rewrite every page."""
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        page = path.read_text(encoding="utf-8")
        if (new := render(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
