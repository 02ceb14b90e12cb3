"""`prefrl migrate` for verl: the keys of sft_trainer.yaml, next to those of the other trainer; YAML and commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError
from prefrl.scripts.migrate.edits import Migrated
from prefrl.scripts.migrate.rows import (
    LAUNCH,
    Counterpart,
    asked,
    column,
    if_set,
    if_true,
    instead,
    not_needed,
    renamed,
    together,
)
from prefrl.scripts.migrate.values import ForeignRun, Values, of_command, of_yaml
from prefrl.scripts.migrate.verl_keys import KL_ESTIMATORS, LOSSES, PPO_DEFAULTS, VERL

_NESTED = "make the nested texts columns of their own, and name these in columns"
_PADDING = "batches are laid out without padding"
_ACTOR = "actor_rollout_ref.actor."
# The rows of the other file, by the names that they have in this one.
_SHARED = {
    name.removeprefix(_ACTOR): row for name, row in VERL.items() if name.startswith((_ACTOR, "data.", "trainer."))
}
_SFT_DATA: dict[str, Counterpart] = {
    "train_batch_size": together("gradient_accumulation_steps, times processes and per_device_train_batch_size"),
    "micro_batch_size": together("per_device_train_batch_size, of one process", "per_device_train_batch_size"),
    "micro_batch_size_per_gpu": renamed("per_device_train_batch_size"),
    "use_dynamic_bsz": together("max_tokens_per_micro_batch, a number or 'auto'", "max_tokens_per_micro_batch"),
    "max_token_len_per_gpu": renamed("max_tokens_per_micro_batch"),
    "response_key": column("completion"),
    "prompt_dict_keys": instead(_NESTED),
    "response_dict_keys": instead(_NESTED),
    "multiturn.enable": together("columns, as {messages: ...}; without it conversational=True", "columns"),
    "multiturn.messages_key": column("messages", "conversations"),
    "messages_key": column("messages", "conversations"),
    "multiturn.tools_key": column("tools"),
    "tools_key": column("tools"),
    "enable_thinking_key": instead("give the template its switches in the column chat_template_kwargs"),
    "multiturn.enable_thinking_key": instead("give the template its switches in the column chat_template_kwargs"),
    "balance_dp_token": not_needed("losses are divided by the count of all processes"),
    "chat_template": if_set("chat_template_path"),
    "pad_mode": not_needed(_PADDING),
    "ignore_input_ids_mismatch": not_needed("conversations are tokenized as a whole"),
}
_SFT_MODEL: dict[str, Counterpart] = {
    "partial_pretrain": renamed("model_name_or_path"),
    "path": renamed("model_name_or_path"),
    "fsdp_config.model_dtype": asked(
        "dtype", {"fp32": "float32", "bf16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}
    ),
    "fsdp_config": instead(LAUNCH),
    "strategy": together("accelerate_config='fsdp2' on several processes"),
    **{
        name: VERL[f"actor_rollout_ref.model.{name}"]
        for name in ("external_lib", "enable_gradient_checkpointing", "lora_rank", "target_modules", "use_liger")
    },
}
VERL_SFT: dict[str, Counterpart] = {
    **{name: row for name, row in _SHARED.items() if name.startswith(("data.", "optim", "checkpoint", "trainer."))},
    **{f"data.{name}": row for name, row in _SFT_DATA.items()},
    **{f"model.{name}": row for name, row in _SFT_MODEL.items()},
    "optim.warmup_steps_ratio": VERL[f"{_ACTOR}optim.lr_warmup_steps_ratio"],
    "optim.lr_scheduler": asked("lr_scheduler_type", {"cosine": "cosine"}),
    "ulysses_sequence_parallel_size": instead("see sequence parallelism in docs/distributed.md"),
    "use_remove_padding": not_needed(_PADDING),
    "engine": instead(LAUNCH),
    "trainer.resume_path": if_set("resume_from_checkpoint"),
    "trainer.max_ckpt_to_keep": if_true("save_total_limit"),
    "defaults": VERL["defaults"],
}
# What sft_trainer.yaml says if it is not changed, where that differs here.
SFT_DEFAULTS: dict[str, Any] = {
    "bf16": True,
    "learning_rate": 1e-5,
    "adam_beta2": 0.95,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "cosine",
    "truncation_mode": "error",
    "num_train_epochs": 4,
    "save_strategy": "no",
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
}


_ROWS = VERL | VERL_SFT
_SECTIONS = frozenset(path.split(".")[0] for path in _ROWS)
# Of the policy, in ppo_trainer.yaml and in sft_trainer.yaml.
_OF_PPO, _OF_SFT = ("actor_rollout_ref.", "algorithm."), ("model.", "optim.")
# Read only with reward_model.enable.
_REWARD_MODEL = ("reward_model.model.", "reward_model.micro_batch_size", "reward_model.max_length")


def migrate_verl(text: str, *, is_command: bool) -> Migrated:
    """The options of prefrl, as YAML, that a verl run means.

    Args:
        text: verl's YAML, or a shell script that calls one of its trainers with `key=value` words.
        is_command: Whether it is the script.

    Raises:
        ConfigError: It has no options of verl's trainers, or a value of YAML cannot be read.
    """
    values = of_command(text, _SECTIONS) if is_command else of_yaml(text, _ROWS)
    if any(path.startswith(_OF_PPO) for path in values):
        return _of_ppo(values)
    if any(path.startswith(_OF_SFT) for path in values):
        return _of_sft(values, text if is_command else "")
    if "data.path" in values:
        raise ConfigError("this is a file of verl's main_generation or main_eval: use prefrl generate or prefrl eval")
    if not any(path.startswith("data.") for path in values):
        raise ConfigError("no options of verl are in this file: it has none of actor_rollout_ref, algorithm and data")
    return _of_ppo(values)


def _of_ppo(values: Values) -> Migrated:
    if not values.get("reward_model.enable", (0, False))[1]:
        values = {path: found for path, found in values.items() if not path.startswith(_REWARD_MODEL)}
    run = ForeignRun(values, VERL, PPO_DEFAULTS)
    estimator = run.value("algorithm.adv_estimator", "gae")
    command = {"gae": "ppo", "rloo": "rloo"}.get(estimator, "grpo")
    command = "reinforce_plus_plus" if str(estimator).startswith("reinforce") else command
    if command == "ppo":
        run.options = {"lam": 1.0, "critic": "model", **run.options}
        policy = run.options.get("model_name_or_path")
        if run.value("critic.model.path", policy) != policy:
            run.options["value_model_name_or_path"] = run.value("critic.model.path", policy)
    elif command != "reinforce_plus_plus":
        run.drop("gamma", "lam", because=f"{estimator} does not read it")
    if estimator not in ("grpo", "grpo_passk"):
        run.drop("scale_rewards", because=f"{estimator} does not read it")
    if "reward_funcs" in run.options:
        module = run.options["reward_funcs"][0].partition(":")[0]
        run.options["reward_funcs"] = [f"{module}:{run.value('custom_reward_function.name', 'compute_score')}"]
    _files(run)
    _kl(run)
    _loss(run)
    processes = _processes(run, of_a_node=8)
    run.options.setdefault("num_generations", 1)
    _batches(run, processes)
    if not {"reward_funcs", "reward_model_name_or_path"} & run.options.keys():
        run.open.append((1, "verl scores by data_source: set reward_funcs; see docs/rewards.md"))
    strategy = str(run.value("actor_rollout_ref.actor.strategy", "fsdp"))
    return run.written(command, processes, shards_weights=strategy.startswith("fsdp"))


def _of_sft(values: Values, script: str) -> Migrated:
    """The question and the answer of a row are a conversation, unless the rows are conversations."""
    for side in ("prompt", "response"):  # the names of nested texts, which are often those of the columns
        name = values.get(f"data.{side}_key", (0, f"{side}"))[1]
        if values.get(f"data.{side}_dict_keys", (0, None))[1] == [name]:
            del values[f"data.{side}_dict_keys"]
    has_messages = "data.messages_key" in values or values.get("data.multiturn.enable", (0, False))[1]
    unread = ("data.prompt_", "data.response_") if has_messages else ("data.multiturn.",)
    values = {path: found for path, found in values.items() if not path.startswith(unread)}
    run = ForeignRun(values, VERL_SFT, SFT_DEFAULTS)
    run.options |= {} if has_messages else {"conversational": True}
    _files(run)
    processes = _processes(run, of_a_node=1) * _torchrun(run, script)
    _sft_batches(run, processes)
    return run.written("sft", processes, shards_weights=True)


def _processes(run: ForeignRun, *, of_a_node: int) -> int:
    return run.number("trainer.nnodes", 1, least=1) * run.number("trainer.n_gpus_per_node", of_a_node, least=1)


def _torchrun(run: ForeignRun, script: str) -> int:
    """The processes that the script starts."""
    found = [re.search(rf"--{name}[ =]+(\d+)", script) for name in ("nnodes", "nproc[_-]per[_-]node")]
    if "torchrun" in script and found[1] is None:
        run.open.append((1, "torchrun starts the processes: set num_processes to their number"))
    return int(found[0][1] if found[0] else 1) * int(found[1][1] if found[1] else 1)


def _sft_batches(run: ForeignRun, processes: int) -> None:
    """A batch has rows of all processes."""
    options, batch = run.options, run.number("data.train_batch_size", 256, least=1)
    if run.value("data.use_dynamic_bsz", False):
        options.setdefault("max_tokens_per_micro_batch", 8192)
    else:
        options.pop("max_tokens_per_micro_batch", None)
    whole = run.number("data.micro_batch_size", 0) // processes
    micro = run.number("data.micro_batch_size_per_gpu", 0) or whole or 4
    options |= {"per_device_train_batch_size": micro, "per_device_eval_batch_size": micro}
    options["gradient_accumulation_steps"] = max(1, batch // (micro * processes))
    if batch % (micro * processes):
        sizes = f"{batch} rows of a batch are no multiple of {micro} on {processes} processes"
        run.open.append((1, f"{sizes}: check the batch sizes"))


def _files(run: ForeignRun) -> None:
    """Files to train on and to evaluate on are splits of one dataset here."""
    paths = [path for name in ("train", "val") for path in run.texts(f"data.{name}_files")]
    files = {"train": run.value("data.train_files", None), "test": run.value("data.val_files", None)}
    if not all(files.values()):
        return
    formats = sorted({"json" if ".json" in Path(path).suffix else "parquet" for path in paths})
    run.options.pop("dataset_name", None)
    run.options["datasets"] = [{"path": formats[0], "data_files": files}]
    if len(formats) > 1:
        run.open.append((1, f"files of several formats: {', '.join(paths)}. Convert them to one"))


def _kl(run: ForeignRun) -> None:
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
    options["kl_estimator"] = KL_ESTIMATORS.get(run.value(estimate, default), "k3")
    options["kl_in"] = "loss" if in_loss else "reward"
    if not in_loss and run.value("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        options["kl_kwargs"] = {
            "target": run.value("algorithm.kl_ctrl.target_kl", 0.1),
            "horizon": run.value("algorithm.kl_ctrl.horizon", 10000),
        }


def _loss(run: ForeignRun) -> None:
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
        options |= LOSSES.get(mode, {})
    if not run.value("algorithm.use_pf_ppo", False):
        options.pop("rollout_selection", None)
        options.pop("selection_kwargs", None)


def _batches(run: ForeignRun, processes: int) -> None:
    """Prompts of a step are counted over all processes there, completions of a process here."""
    options, actor = run.options, "actor_rollout_ref.actor"
    group = run.number("actor_rollout_ref.rollout.n", 1, least=1)
    if run.value(f"{actor}.use_dynamic_bsz", False):
        options.setdefault("max_tokens_per_micro_batch", 16384)
    else:
        options.pop("max_tokens_per_micro_batch", None)
    per_generation = run.number("data.train_batch_size", 1024, least=1) * group
    per_step = min(per_generation, run.number(f"{actor}.ppo_mini_batch_size", 256, least=1) * group)
    whole = run.number(f"{actor}.ppo_micro_batch_size", 0) // processes
    micro = run.number(f"{actor}.ppo_micro_batch_size_per_gpu", 0) or whole or group
    options["per_device_train_batch_size"] = micro
    options["gradient_accumulation_steps"] = max(1, per_step // (micro * processes))
    options["steps_per_generation"] = max(1, per_generation // (micro * processes))
    if per_step % (micro * processes) or per_generation % per_step:
        counts = f"{per_generation} completions for a generation, {per_step} for a step"
        run.open.append((1, f"{counts}: no multiples of {micro} on {processes} processes. Check the batch sizes"))
