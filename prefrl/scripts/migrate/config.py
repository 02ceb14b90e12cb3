"""Rewrites files of options: YAML of TRL, YAML and command lines of verl, TOML of cosmos-rl."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from math import lcm, prod
from pathlib import Path
from typing import Any

import yaml

from prefrl.errors import ConfigError
from prefrl.options.foreign import Row, cosmos_rl, row_of, verl
from prefrl.options.foreign.trl import DEFAULTS
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate import options as trl_options
from prefrl.scripts.migrate.edits import Migrated, converted, every_option, options_of

__all__ = ["migrate_cosmos_rl", "migrate_trl_yaml", "migrate_verl"]

Values = dict[str, tuple[int, Any]]  # path of keys -> line number and value

_SECTIONS = frozenset(path.split(".")[0] for path in verl.VERL)  # of verl
# Keys that decide several options together; see `_batches_of_verl`, `_kl_of_verl` and others.
_TOGETHER = {
    *("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "trainer.nnodes"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.actor.use_dynamic_bsz"),
    *("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.type"),
    *("trainer.n_gpus_per_node", "algorithm.use_pf_ppo", "custom_reward_function.name"),
    *("train.train_batch_per_replica", "train.train_policy.on_policy"),
    *("policy.parallelism.dp_shard_size", "policy.parallelism.dp_replicate_size"),
    *("train.optm_decay_type", "train.optm_decay_ratio", "train.optm_min_lr_factor"),
    *("data.val_files", "train.ckpt.upload_s3", "train.ckpt.s3_bucket", "train.ckpt.s3_prefix"),
}
_OF_EVALUATION = (
    *("eval_steps", "eval_on_start", "dataset_test_split", "temperature_eval", "num_generations_eval"),
    *("eval_sampling_kwargs", "log_val_generations", "max_eval_samples"),
)


# TRL: the options have the same places, so the file is edited.


def migrate_trl_yaml(text: str, algorithm: str | None = None) -> Migrated:
    """A YAML file for TRL's commands or scripts, with the names and values of prefrl; all else stays as it is.

    Args:
        text: The file.
        algorithm: The command of prefrl that reads the file; None: the only one that has the file's options.

    Raises:
        ConfigError: It has no options of TRL, the algorithm cannot be told, or the file is one line in braces.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigError("the file must have an option in each line, as name: value")
    entries = {str(key.value): (key, value) for key, value in root.value}
    values = {name: yaml.safe_load(yaml.serialize(value)) for name, (_, value) in entries.items()}
    algorithm = algorithm or _algorithm_of(values)
    config = trl_options.config_of(algorithm)
    result, lines = Migrated(text), text.splitlines(keepends=True)
    for step in trl_options.steps_of(config, {*options_of(algorithm), "env"}, values):
        key, value = entries[step.name]
        _apply(step, lines, key.start_mark.line, value.end_mark.line + (value.end_mark.column > 0))
        said = (key.start_mark.line + 1, f"{step.name} {step.says}")
        (result.open if step.is_open else result.changes).append(said)
        values.update(step.options)
    if missing := trl_options.missing_defaults(config, values):
        written = yaml.safe_dump(missing, sort_keys=False)
        start = "" if text.endswith("\n") else "\n"
        lines += [start, "# TRL's defaults that differ from those of prefrl.\n", written]
        shown = ", ".join(written.splitlines())
        result.changes.append((len(lines), trl_options.say_written(missing, values, shown)))
    result.text = "".join(lines)
    result.changes.sort()
    result.open.sort()
    return result


def _apply(step: trl_options.Step, lines: list[str], first: int, end: int) -> None:
    """Change the lines of an option, from the first to the one before the end; all other lines keep their places."""
    while end > first + 1 and lines[end - 1].lstrip()[:1] in ("", "#"):
        end -= 1  # the end of a list is the next option; what lies between belongs to that
    if step.kind == "rename":
        lines[first] = lines[first].replace(step.name, next(iter(step.options)), 1)
    elif step.kind == "replace":
        written = yaml.safe_dump(dict(step.options), sort_keys=False) if step.options else ""
        lines[first:end] = [written, *[""] * (end - first - 1)]
    elif step.kind == "comment":
        lines[first:end] = [f"# {line}" for line in lines[first:end]]
        lines[first] = f"# to do: {step.name} {step.says}\n{lines[first]}"


def _algorithm_of(names: Collection[str]) -> str:
    """The only algorithm of TRL that has all of these options."""
    if not {*names} & (every_option() | trl_options.NAMES.keys()):
        raise ConfigError("no options of TRL are in this file")
    known = {name for name in names if name in every_option() - trl_options.NAMES.keys()}
    commands = [command for command in REGISTRY if trl_options.config_of(command) in DEFAULTS]
    fitting = [command for command in commands if known <= options_of(command)]
    if len(fitting) == 1:
        return fitting[0]
    which = f"they may be those of {', '.join(fitting)}" if fitting else "no algorithm has all of them"
    example = (fitting or commands)[0]
    raise ConfigError(
        f"the file's options do not tell its algorithm: {which}. Name it, for example --algorithm {example}"
    )


# verl and cosmos-rl: another file is written.


def migrate_verl(text: str, *, is_command: bool) -> Migrated:
    """The options of prefrl, as YAML, that a verl run means.

    Args:
        text: verl's YAML, or a shell script that calls `verl.trainer.main_ppo` with `key=value` words.
        is_command: Whether it is the script.

    Raises:
        ConfigError: It has no options of verl.
    """
    values = dict(_of_command(text) if is_command else _of_yaml(text))
    if not any(path.startswith(("actor_rollout_ref.", "algorithm.", "data.")) for path in values):
        raise ConfigError("no options of verl are in this file: neither actor_rollout_ref nor algorithm")
    run = _Run(values, verl.VERL, dict(verl.DEFAULTS))
    estimator = run.value("algorithm.adv_estimator", "gae")
    command = {"gae": "ppo", "rloo": "rloo"}.get(estimator, "grpo")
    command = "reinforce_plus_plus" if str(estimator).startswith("reinforce") else command
    if command == "ppo":
        run.options.setdefault("lam", 1.0)
    if "reward_funcs" in run.options:
        module = run.options["reward_funcs"][0].partition(":")[0]
        run.options["reward_funcs"] = [f"{module}:{run.value('custom_reward_function.name', 'compute_score')}"]
    _files_of_verl(run)
    if "columns" in run.options and "datasets" in run.options:
        columns = run.options.pop("columns")
        run.options["datasets"] = [{**part, "columns": columns} for part in run.options["datasets"]]
    _kl_of_verl(run)
    _loss_of_verl(run)
    processes = run.number("trainer.nnodes", 1) * run.number("trainer.n_gpus_per_node", 8)
    run.options.setdefault("num_generations", 1)
    _batches_of_verl(run, processes)
    _without_effect(run.options)
    if not run.value("reward_model.enable", False):
        run.options.pop("reward_model_name_or_path", None)
    if not {"reward_funcs", "reward_model_name_or_path"} & run.options.keys():
        run.open.append((1, "verl scores by data_source: set reward_funcs; see docs/rewards.md"))
    return run.written(command, processes)


def migrate_cosmos_rl(text: str) -> Migrated:
    """The options of prefrl, as YAML, that a TOML file of cosmos-rl means.

    Raises:
        ConfigError: It is not TOML, or has no options of cosmos-rl.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"this is not TOML: {error}") from error
    if "train" not in tree:
        raise ConfigError("no options of cosmos-rl are in this file: it has no section train")
    lines = _lines_of_toml(text)
    values = {path: (lines.get(path, 1), value) for path, value in _flat(tree, "reward_function")}
    run = _Run(values, cosmos_rl.COSMOS_RL, dict(cosmos_rl.DEFAULTS))
    command = "sft" if run.value("train.train_policy.type", "grpo") == "sft" else "grpo"
    places = [f"policy.parallelism.{name}" for name in ("dp_shard_size", "dp_replicate_size")]
    processes = max(1, run.number(places[0], 1)) * max(1, run.number(places[1], 1))
    if command == "grpo":
        _rollouts_of_cosmos_rl(run)
    _schedule_of_cosmos_rl(run)
    if (where := run.value("train.ckpt.upload_s3", False)) and (bucket := run.value("train.ckpt.s3_bucket", "")):
        run.options["upload_to"] = f"s3://{bucket}/{run.value('train.ckpt.s3_prefix', 'outputs')}"
        run.options |= {"upload_kwargs": {"checkpoints": "final"}} if where == "final" else {}
    _without_effect(run.options)
    micro = run.options.setdefault("per_device_train_batch_size", 2)
    batches = max(1, run.number("train.train_batch_per_replica", 8) // (micro * processes))
    run.options["gradient_accumulation_steps"] = batches
    if command == "grpo":  # a generation has whole groups
        run.options["steps_per_generation"] = lcm(micro * batches, run.options["num_generations"]) // micro
    return run.written(command, processes)


def _rollouts_of_cosmos_rl(run: _Run) -> None:
    """Rollouts come from servers, and by default from older weights; defaults of losses differ, too."""
    options, is_async = run.options, not run.value("train.train_policy.on_policy", False)
    options |= {"use_vllm": True, "generation_mode": "async" if is_async else "sync"}
    defaults = {"beta": 0.0, "delta": 3.0, "num_generations": 16, "max_completion_length": 2048, "max_staleness": 4}
    for name, value in defaults.items():
        options.setdefault(name, value)
    if not is_async:
        options.pop("max_staleness")
    if options.get("loss_type") == "aipo":
        options.pop("delta")


def _schedule_of_cosmos_rl(run: _Run) -> None:
    """The learning rate rises in 20 steps and stays, and falls at the end if a kind of decay is given."""
    options, kind = run.options, run.value("train.optm_decay_type", "none")
    options.setdefault("warmup_steps", 20)
    fraction = run.value("train.optm_decay_ratio", 1.0)
    if kind not in cosmos_rl.DECAYS or fraction == 0:
        options["lr_scheduler_type"] = "constant_with_warmup"
        return
    options["lr_scheduler_type"] = "wsd"
    options["lr_scheduler_kwargs"] = {
        "decay_type": cosmos_rl.DECAYS[kind],
        "decay_fraction": fraction,
        "min_lr_ratio": run.value("train.optm_min_lr_factor", 0.0),
    }
    if not options["warmup_steps"]:
        options["lr_scheduler_kwargs"]["warmup_fraction"] = 0.0


def _without_effect(options: dict[str, Any]) -> None:
    """Leave out what belongs to evaluation or checkpoints that are off; here it would be an error."""
    if options.get("eval_strategy", "no") == "no":
        for name in _OF_EVALUATION:
            options.pop(name, None)
    if options.get("save_strategy") == "no":
        for name in ("save_steps", "save_in_background", "save_total_limit", "upload_to", "upload_kwargs"):
            options.pop(name, None)


class _Run:
    """The options that the values of a run become."""

    def __init__(self, values: Values, rows: Mapping[str, Row], options: dict[str, Any]) -> None:
        self.values, self.rows, self.options = values, rows, options
        self.defaults = frozenset(options)
        self.changes: list[tuple[int, str]] = []
        self.open: list[tuple[int, str]] = []
        self.server: list[str] = []  # options of prefrl vllm-serve
        for path, (line, value) in values.items():
            self._convert(path, line, value)

    def value(self, path: str, default: Any) -> Any:
        """The value of a path of keys that was given."""
        value = self.values.get(path, (0, None))[1]
        return default if value is None else value

    def number(self, path: str, default: int) -> int:
        """The number at a path of keys; the default if it is not given, or left to the shell."""
        value = self.value(path, default)
        return value if isinstance(value, int) else default

    def _convert(self, path: str, line: int, value: Any) -> None:
        leaf, row = path.rpartition(".")[2], row_of(self.rows, path)
        if leaf == "_target_":
            return
        if isinstance(value, str) and "$" in value:
            self.open.append((line, f"{path}={value!r}: write out what the shell would have put in"))
        if path in _TOGETHER:
            self.changes.append((line, f"{path}={value!r} decides several options"))
        elif row is None and leaf in every_option():
            self._add({leaf: value})
        elif row is None:
            self.open.append((line, f"{path}={value!r}: no such option is known"))
        elif row.kind == "not needed" or _is_off(value):
            self._leave_out(path, line, value, row)
        elif row.kind == "server" and row.text.startswith("--"):
            self.server.append(f"{row.text} {value}")
            self.changes.append((line, f"{path}={value!r} {row.says}"))
        elif row.kind in ("server", "not there"):
            self.open.append((line, f"{path}={value!r} {row.says}"))
        else:
            self._take(path, line, value, row)

    def _leave_out(self, path: str, line: int, value: Any, row: Row) -> None:
        """A key that is not needed, or that switches something off: its row may know an option for that."""
        options = None if row.convert is None or value is None else converted(row, value)
        if isinstance(options, str) or not options:
            self.changes.append((line, f"{path}={value!r} {row.says}" if row.may_go else f"{path} is off"))
        else:
            self._take(path, line, value, row)

    def _take(self, path: str, line: int, value: Any, row: Row) -> None:
        options = converted(row, value)
        if isinstance(options, str):
            self.open.append((line, f"{path}: {options}"))
            return
        self._add(options)
        shown = ", ".join(f"{name}={given!r}" for name, given in options.items()) or "nothing has to be set"
        self.changes.append((line, f"{path}={value!r}: {shown}"))

    def _add(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            there = self.options.get(name)
            both = isinstance(there, dict) and isinstance(value, dict)
            self.options[name] = {**there, **value} if both else value  # type: ignore[dict-item]  # both are mappings

    def written(self, command: str, processes: int) -> Migrated:
        """The YAML file, with what it leaves open as comments."""
        if not self.options.get("use_peft"):
            self.options = {name: value for name, value in self.options.items() if not name.startswith("lora_")}
        known = options_of(command)
        for name in [name for name in self.options if name not in known]:
            value = self.options.pop(name)
            notes = self.changes if _is_off(value) or name in self.defaults else self.open
            notes.append((1, f"{name}={value!r}: left out, prefrl {command} has no such option"))
        if processes > 1:
            self.options["num_processes"] = processes
        head = [f"# prefrl {command} --config FILE"]
        if self.options.get("use_vllm"):
            model = self.options.get("model_name_or_path", "MODEL")
            head.append(f"# prefrl vllm-serve --model {model} {' '.join(self.server)}".rstrip())
        head += [f"# Open: line {line}: {text}" for line, text in sorted(self.open)]
        body = yaml.safe_dump(self.options, sort_keys=False, allow_unicode=True)
        return Migrated("\n".join(head) + "\n" + body, sorted(self.changes), sorted(self.open))


def _files_of_verl(run: _Run) -> None:
    """Files to train on and to evaluate on are splits of one dataset here."""
    files = {"train": run.value("data.train_files", None), "test": run.value("data.val_files", None)}
    if None in files.values():
        return
    paths = [path for given in files.values() for path in ([given] if isinstance(given, str) else given)]
    formats = sorted({"json" if ".json" in Path(path).suffix else "parquet" for path in paths})
    run.options.pop("dataset_name", None)
    run.options["datasets"] = [{"path": formats[0], "data_files": files}]
    if len(formats) > 1:
        run.open.append((1, f"files of several formats: {', '.join(paths)}. Convert them to one"))


def _kl_of_verl(run: _Run) -> None:
    """There is a weight and an estimate for the KL in the loss, and others for that in the reward."""
    options, in_loss = run.options, bool(run.value("actor_rollout_ref.actor.use_kl_loss", False))
    is_on = in_loss or bool(run.value("algorithm.use_kl_in_reward", False))
    for name in ("beta", "kl_estimator", "kl_in", "kl_kwargs"):
        options.pop(name, None)
    options["beta"] = 0.0
    if not is_on:
        return
    if in_loss and run.value("algorithm.use_kl_in_reward", False):
        run.open.append((1, "use_kl_loss and use_kl_in_reward are both on: here there is one KL term, in the loss"))
    weight = "actor_rollout_ref.actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    estimate = "actor_rollout_ref.actor.kl_loss_type" if in_loss else "algorithm.kl_penalty"
    default = "low_var_kl" if in_loss else "kl"
    options["beta"] = run.value(weight, 0.001)
    options["kl_estimator"] = verl.KL_ESTIMATORS.get(run.value(estimate, default), "k3")
    options["kl_in"] = "loss" if in_loss else "reward"
    if not in_loss and run.value("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        options["kl_kwargs"] = {
            "target": run.value("algorithm.kl_ctrl.target_kl", 0.1),
            "horizon": run.value("algorithm.kl_ctrl.horizon", 10000),
        }


def _loss_of_verl(run: _Run) -> None:
    """Keep the hyperparameters of the loss that is on."""
    options, actor = run.options, "actor_rollout_ref.actor.policy_loss"
    mode = run.value(f"{actor}.loss_mode", "vanilla")
    keys = {"clip_cov": {"ratio": "clip_cov_ratio", "lb": "clip_cov_lb", "ub": "clip_cov_ub"}}
    keys["kl_cov"] = {"ratio": "kl_cov_ratio", "coef": "ppo_kl_coef"}
    options.pop("loss_kwargs", None)
    given = {ours: run.value(f"{actor}.{theirs}", None) for ours, theirs in keys.get(mode, {}).items()}
    if given := {name: value for name, value in given.items() if value is not None}:
        options["loss_kwargs"] = given
    if mode == "vanilla":
        options |= {"loss_type": options.get("loss_type", "dapo"), "importance_sampling_level": "token"}
    else:
        options.pop("delta", None)
        options |= verl.LOSSES.get(mode, {})
    if not run.value("algorithm.use_pf_ppo", False):
        options.pop("rollout_selection", None)
        options.pop("selection_kwargs", None)


def _batches_of_verl(run: _Run, processes: int) -> None:
    """Prompts of a step are counted over all processes there, completions of a process here."""
    options, actor, group = run.options, "actor_rollout_ref.actor", run.number("actor_rollout_ref.rollout.n", 1)
    if run.value(f"{actor}.use_dynamic_bsz", False):
        options.setdefault("max_tokens_per_micro_batch", 16384)
    else:
        options.pop("max_tokens_per_micro_batch", None)
    per_generation = run.number("data.train_batch_size", 1024) * group
    per_step = min(per_generation, run.number(f"{actor}.ppo_mini_batch_size", 256) * group)
    whole = run.number(f"{actor}.ppo_micro_batch_size", 0) // processes
    micro = run.number(f"{actor}.ppo_micro_batch_size_per_gpu", 0) or whole or group
    options["per_device_train_batch_size"] = micro
    options["gradient_accumulation_steps"] = max(1, per_step // (micro * processes))
    options["steps_per_generation"] = max(1, per_generation // (micro * processes))
    if per_step % (micro * processes) or per_generation % per_step:
        counts = f"{per_generation} completions for a generation, {per_step} for a step"
        run.open.append((1, f"{counts}: no multiples of {micro} on {processes} processes. Check the batch sizes"))


def _is_off(value: Any) -> bool:
    """Whether a value of a switch or a size asks for nothing."""
    if isinstance(value, bool) or value is None:
        return not value
    return value in ("", "none", "None", "default", -1, 0, 1, [], {})


# Reading.


def _of_yaml(text: str) -> Iterator[tuple[str, tuple[int, Any]]]:
    def leaves(node: yaml.Node, path: str, line: int) -> Iterator[tuple[str, tuple[int, Any]]]:
        if isinstance(node, yaml.MappingNode) and node.value and not path.endswith("_kwargs"):
            for key, value in node.value:
                yield from leaves(value, f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1)
        else:
            value = yaml.safe_load(yaml.serialize(node))
            if not str(value).startswith("${"):  # the value of another key
                yield path, (line, value)

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from leaves(root, "", 1)


def _of_command(text: str) -> Iterator[tuple[str, tuple[int, Any]]]:
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(_expanded(line.rstrip().removesuffix("\\"), variables), comments=True)
        except ValueError:  # a quotation over several lines
            continue
        for word in words:
            name, _, value = word.partition("=")
            if name.lstrip("+").split(".")[0] in _SECTIONS and "." in name:
                yield name.lstrip("+"), (number, _number(yaml.safe_load(value)))
            elif name.isidentifier():
                variables[name] = value


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """A line with the variables that the script sets itself, and with products of numbers."""
    line = re.sub(
        r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))",
        lambda found: variables.get(found[1] or found[3], found[2] or found[0]),
        line,
    )
    return re.sub(r"\$\(\(([\d* ]+)\)\)", lambda found: str(prod(map(int, found[1].split("*")))), line)


def _number(value: Any) -> Any:
    """YAML reads 1e-6 as a text, hydra as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _flat(tree: Mapping[str, Any], *whole: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree; mappings of the names in `whole` are leaves."""
    for key, value in tree.items():
        if isinstance(value, dict) and key not in whole:
            yield from _flat(value, *whole, path=f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _lines_of_toml(text: str) -> dict[str, int]:
    section, lines = "", {}
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[([\w.]+)\]", line):
            section = f"{found[1]}."
        elif found := re.match(r"\s*([\w.]+)\s*=", line):
            lines[section + found[1]] = number
    return lines
