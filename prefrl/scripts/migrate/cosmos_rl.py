"""What `prefrl migrate` makes of cosmos-rl's TOML."""

from __future__ import annotations

from math import lcm
from typing import Any

from prefrl.errors import ConfigError
from prefrl.scripts.migrate.edits import Migrated
from prefrl.scripts.migrate.foreign.cosmos_rl import COSMOS_RL, DECAYS, DEFAULTS, GRPO_DEFAULTS, REWARDS
from prefrl.scripts.migrate.values import ForeignRun, Values, of_toml

__all__ = ["migrate_cosmos_rl"]

_POLICY = "train.train_policy"
_OVERLONG = f"{_POLICY}.overlong_reward"


def migrate_cosmos_rl(text: str) -> Migrated:
    """The options of prefrl, as YAML, that a TOML file of cosmos-rl means.

    Raises:
        ConfigError: It is not TOML, or has no options of cosmos-rl.
    """
    values = of_toml(text, "reward_function")
    if not any(path.startswith("train.") for path in values):
        raise ConfigError("no options of cosmos-rl are in this file: it has no section train")
    idle = _without_effect(values)
    command = "sft" if values.get(f"{_POLICY}.type", (0, "grpo"))[1] == "sft" else "grpo"
    own = GRPO_DEFAULTS if command == "grpo" else {}
    run = ForeignRun(values, COSMOS_RL, DEFAULTS | own)
    run.changes += idle
    names = ("dp_shard_size", "dp_replicate_size")
    shards, copies = (max(1, run.number(f"policy.parallelism.{name}", 1)) for name in names)
    processes = shards * copies
    if command == "grpo":
        _rollouts(run)
        _rewards(run)
        _reference(run)
    else:
        run.options["max_length"] = run.value("policy.model_max_length", 4096)
    _schedule(run)
    _checkpoints(run)
    _evaluation(run)
    _batches(run, command, processes)
    return run.written(command, processes, shards_weights=shards > 1)


def _without_effect(values: Values) -> list[tuple[int, str]]:
    """Take out what cosmos-rl does not read because a feature is off, and say so."""

    def given(name: str) -> Any:
        return values.get(f"{_POLICY}.{name}", (0, None))[1]

    off = [] if given("variant") == "dapo" else ["filter_reward_metric", "max_retry_for_on_policy"]
    off += [] if given("kl_beta") else ["reference_reset_interval", "reset_optimizer_with_reference"]
    off += [] if given("reference_reset_interval") else ["reset_optimizer_with_reference"]
    paths = [path for name in dict.fromkeys(off) if (path := f"{_POLICY}.{name}") in values]
    taken = [(path, *values.pop(path)) for path in paths]
    return [(line, f"{path}={value!r} has no effect, because the feature is off") for path, line, value in taken]


def _rollouts(run: ForeignRun) -> None:
    """Rollouts come from servers, and by default from older weights; a prompt may take what a completion leaves."""
    options, is_async = run.options, not run.value(f"{_POLICY}.on_policy", False)
    options |= {"use_vllm": True, "generation_mode": "async" if is_async else "sync"}
    if not is_async:
        options.pop("max_staleness")
    if options.get("loss_type") == "aipo":
        options.pop("delta")
    left = run.number("policy.model_max_length", 4096) - _longest(run)
    if left > 0:
        options |= {"max_prompt_length": left, "filter_overlong_prompts": True}
    else:
        run.open.append((1, "policy.model_max_length leaves no room for prompts: set max_prompt_length"))
    tokens = run.number(f"{_POLICY}.unbiased_loss_max_tokens", 0)
    if tokens == _longest(run):
        options["loss_type"] = "dr_grpo"
    elif tokens:
        here = f"loss_type='dr_grpo' divides by max_completion_length={_longest(run)}"
        run.leave_open(f"{_POLICY}.unbiased_loss_max_tokens", here)


def _longest(run: ForeignRun) -> int:
    return run.number("rollout.max_response_length", 2048, least=1)


def _rewards(run: ForeignRun) -> None:
    """The rewards, the column of the answer, whose name depends on them, and which of them selects prompts."""
    weights = _weights(run, _POLICY)
    if run.value(f"{_OVERLONG}.enable_overlong_penalty", False):
        weights = {**weights, "overlong": weights.get("overlong", 1.0)}
    names = {name: ours for name in weights if (ours := _reward(run, name)) is not None}
    if unknown := [name for name in weights if name not in names]:
        text = f"{', '.join(unknown)}: write a function, and add file.py:function to reward_funcs and reward_weights"
        run.open.append((run.values.get(f"{_POLICY}.reward_function", (1, None))[0], text))
    if names:
        factor = run.value(f"{_OVERLONG}.penalty_factor", 1.0)
        run.options["reward_funcs"] = [*names.values()]
        run.options["reward_weights"] = [weights[name] * (factor if name == "overlong" else 1.0) for name in names]
    _answers(run, [*names])
    _selection(run, names)


def _weights(run: ForeignRun, section: str) -> dict[str, float]:
    path = f"{section}.reward_function"
    rewards = run.value(path, None)
    if not isinstance(rewards, dict):
        return dict.fromkeys(run.texts(path) or ["single_choice"], 1.0)
    if not all(isinstance(weight, int | float) for weight in rewards.values()):
        raise ConfigError(f"{path}={rewards!r}: must have numbers as weights")
    return rewards


def _reward(run: ForeignRun, name: str) -> str | None:
    """An entry of `reward_funcs`; None: there is none."""
    if name != "overlong":
        return REWARDS.get(name, (None, None))[0]
    longest, buffer = _longest(run), run.number(f"{_OVERLONG}.buffer_length", 4096)
    if buffer > longest:
        return None
    return f"soft_overlong_punishment_reward(max_completion_len={longest}, soft_punish_cache={buffer})"


def _answers(run: ForeignRun, rewards: list[str]) -> None:
    theirs = run.value(f"{_POLICY}.response_column_name", "")
    read = {column for name in rewards if (column := REWARDS.get(name, (None, None))[1])} or {"answer"}
    if theirs and len(read) > 1:
        text = f"the rewards read the columns {' and '.join(sorted(read))}: copy it, so that the dataset has both"
        run.leave_open(f"{_POLICY}.response_column_name", text)
    elif theirs and theirs not in read:
        run.options["columns"] = {**run.options.get("columns", {}), read.pop(): theirs}


def _selection(run: ForeignRun, names: dict[str, str]) -> None:
    """DAPO samples other prompts where a reward, or their sum, is the same for all completions."""
    if not run.options.get("dynamic_sampling"):
        return
    metrics, path = run.texts(f"{_POLICY}.filter_reward_metric"), f"{_POLICY}.max_retry_for_on_policy"
    tries = run.number(path, -1)
    kwargs: dict[str, Any] = {"max_tries": tries} if tries > 0 else {}
    if tries <= 0 and path in run.values:
        run.leave_open(path, "the tries are bounded here: set max_tries if 10 are few")
    if len(metrics) == 1 and metrics[0] in names:
        kwargs["reward_metric"] = names[metrics[0]].partition("(")[0]
    elif metrics:
        text = "here prompts are selected by one of the rewards, or by their sum: set the key reward_metric"
        run.leave_open(f"{_POLICY}.filter_reward_metric", text)
    if kwargs:
        run.options["dynamic_sampling_kwargs"] = kwargs


def _reference(run: ForeignRun) -> None:
    interval = run.number(f"{_POLICY}.reference_reset_interval", 0)
    if interval:
        run.options |= {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": interval}


def _schedule(run: ForeignRun) -> None:
    """The learning rate rises in 20 steps and stays, and falls at the end if a kind of decay is given."""
    options, kind = run.options, run.value("train.optm_decay_type", "none")
    options.setdefault("warmup_steps", 20)
    fraction = run.value("train.optm_decay_ratio", 1.0)
    if kind not in DECAYS or fraction == 0:
        options["lr_scheduler_type"] = "constant_with_warmup"
        return
    options["lr_scheduler_type"] = "wsd"
    options["lr_scheduler_kwargs"] = {
        "decay_type": DECAYS[kind],
        "decay_fraction": fraction,
        "min_lr_ratio": run.value("train.optm_min_lr_factor", 0.0),
    }
    if not options["warmup_steps"]:
        options["lr_scheduler_kwargs"]["warmup_fraction"] = 0.0


def _checkpoints(run: ForeignRun) -> None:
    options = run.options
    if (where := run.value("train.ckpt.upload_s3", None)) and (bucket := run.value("train.ckpt.s3_bucket", "")):
        options["upload_to"] = f"s3://{bucket}/{run.value('train.ckpt.s3_prefix', 'outputs')}"
        options |= {"upload_kwargs": {"checkpoints": "final"}} if where == "final" else {}
    if options["save_strategy"] == "epoch":
        run.drop("save_steps", because="checkpoints are counted in epochs")


def _evaluation(run: ForeignRun) -> None:
    """Evaluation reads another split, or rows that are held out; its rewards and lengths are those of training."""
    if run.options.get("eval_strategy", "no") == "no":
        return
    size, other = run.value(f"{_POLICY}.dataset.test_size", None), "validation.dataset.name"
    if run.value(other, "") not in ("", run.options.get("dataset_name")):
        run.leave_open(other, "give both in datasets, or train and evaluate on splits of one dataset")
    elif size and "dataset_test_split" not in run.options and "dataset_name" in run.options:
        run.into_datasets()
        run.options["test_split_size"] = size
    longest = run.value("validation.max_response_length", None)
    if longest is not None and longest != _longest(run):
        run.leave_open("validation.max_response_length", "evaluations have the max_completion_length of training")
    has_rewards = run.value("validation.reward_function", None)
    if has_rewards and _weights(run, "validation").keys() != _weights(run, _POLICY).keys():
        run.leave_open("validation.reward_function", "evaluations have the rewards of training")


def _batches(run: ForeignRun, command: str, processes: int) -> None:
    """A replica learns from its batch in one optimizer step, or in several; a generation has whole groups."""
    options = run.options
    micro = run.number(f"{_POLICY}.mini_batch", 2, least=1)
    options["per_device_train_batch_size"] = micro
    batches = max(1, run.number("train.train_batch_per_replica", 8) // (micro * processes))
    per_step = run.number(f"{_POLICY}.batch_size_per_optimize", 0) // micro  # of one process
    options["gradient_accumulation_steps"] = min(per_step, batches) or batches
    if command == "grpo":
        whole = lcm(micro * batches, run.number("rollout.n_generation", 16, least=1)) // micro
        options["steps_per_generation"] = lcm(whole, options["gradient_accumulation_steps"])
