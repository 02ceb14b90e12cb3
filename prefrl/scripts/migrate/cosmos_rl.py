"""`prefrl migrate` for cosmos-rl: the keys of its TOML, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from prefrl.errors import ConfigError
from prefrl.scripts.migrate.edits import Migrated
from prefrl.scripts.migrate.rows import (
    LAUNCH,
    Counterpart,
    asked,
    becomes,
    betas,
    column,
    flag,
    if_set,
    if_set_key,
    if_true,
    instead,
    layers,
    loggers,
    not_needed,
    renamed,
    sampled_top_k,
    server,
    together,
)
from prefrl.scripts.migrate.values import ForeignRun, Values, of_toml

# Rewards by name: what they are here, and the column of the answer that they read.
REWARDS: dict[str, tuple[str, str | None]] = {
    "boxed_math": ("accuracy_reward", "solution"),
    "format": ("format_reward", None),
    "gsm8k": ("numeric_reward", "answer"),
    "single_choice": ("single_choice_reward", "answer"),
}
# How the learning rate falls.
DECAYS = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
_VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"dynamic_sampling": True},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


def _split(value: Any) -> Mapping[str, Any]:
    return {"dataset_train_split": value if isinstance(value, str) else "+".join(value)} if value else {}


_POLICY: dict[str, Counterpart] = {
    "type": becomes("the command: prefrl sft or prefrl grpo", lambda value: {}),
    "variant": becomes(
        "dynamic_sampling=True for dapo, and importance_sampling_level='sequence' for gspo",
        lambda value: _VARIANTS[value],
    ),
    "dataset.name": renamed("dataset_name"),
    "dataset.subset": if_set("dataset_config"),
    **dict.fromkeys(
        ("dataset.split", "dataset.train_split"), becomes("dataset_train_split", _split, "dataset_train_split")
    ),
    "dataset.test_split": if_set("dataset_test_split"),
    "dataset.test_size": together("test_split_size, with the dataset in datasets", "test_split_size"),
    "dataset.revision": if_set("dataset_revision"),
    "conversation_column_name": column("messages", "conversations"),
    "prompt_column_name": column("prompt"),
    "response_column_name": together(
        "columns, as {solution: ...} for accuracy_reward and {answer: ...} for others", "columns"
    ),
    "system_prompt": if_set("system_prompt"),
    "dataloader_shuffle": renamed("shuffle_dataset"),
    "dataloader_prefetch_factor": not_needed("rows are tokenized once, at the start"),
    "dataloader_num_workers": not_needed("rows are tokenized once, at the start"),
    "dataloader_batch_size": not_needed("there is no separate controller"),
    "enable_dataset_cache": not_needed("datasets caches what it has processed"),
    "reward_function": together(
        "reward_funcs and reward_weights: " + ", ".join(f"{name} is {ours}" for name, (ours, _) in REWARDS.items()),
        "reward_funcs",
    ),
    "filter_reward_metric": together(
        "the key 'reward_metric' of dynamic_sampling_kwargs, one or several names of rewards here",
        "dynamic_sampling_kwargs",
    ),
    "epsilon_low": renamed("epsilon"),
    "lower_bound_ratio": renamed("delta"),
    "loss_type": asked("loss_type", {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}),
    "unbiased_loss_max_tokens": together("loss_type='dr_grpo', which divides by max_completion_length", "loss_type"),
    "unbiased_advantage": flag("scale_rewards", "none"),
    "overlong_reward": together(
        "the reward soft_overlong_punishment_reward(max_completion_len=..., soft_punish_cache=...)", "reward_funcs"
    ),
    "kl_beta": renamed("beta"),
    "positive_nll_coef": renamed("loss_kwargs", "positive_nll_coef"),
    "aipo_rho": becomes(
        "loss_type='aipo' and the key 'rho' of loss_kwargs",
        lambda value: {"loss_type": "aipo", "loss_kwargs": {"rho": value}} if value else {},
        "loss_type",
    ),
    "mu_iterations": renamed("num_iterations"),
    "mini_batch": renamed("per_device_train_batch_size"),
    "batch_size_per_optimize": together(
        "per_device_train_batch_size * gradient_accumulation_steps", "gradient_accumulation_steps"
    ),
    "max_token_len_per_mini_batch": renamed("max_tokens_per_micro_batch"),
    "entropy_coeff": renamed("entropy_coef"),
    "allowed_outdated_steps": renamed("max_staleness"),
    "on_policy": together("generation_mode; with 'async', samples may be max_staleness steps old", "generation_mode"),
    "no_outdated_rollout": not_needed("no rollout is older than max_staleness"),
    "outdated_rollout_fetch_batch_size": not_needed("no rollout is discarded"),
    "min_filter_prefix_tokens": renamed("loss_kwargs", "min_filter_prefix_tokens"),
    "max_retry_for_on_policy": together("the key 'max_tries' of dynamic_sampling_kwargs", "dynamic_sampling_kwargs"),
    "reference_reset_interval": together(
        "sync_ref_model=True, ref_model_mixup_alpha=1.0 and ref_model_sync_steps", "sync_ref_model"
    ),
    "reset_optimizer_with_reference": together("the option of that name"),
    "use_decoupled_loss": renamed("vllm_importance_sampling_correction"),
    "behav_imp_weight_cap": instead(
        "use vllm_importance_sampling_mode='token_mask' and vllm_importance_sampling_kwargs={'clip_max': ...}"
    ),
    "rollout_as_token_ids": not_needed("token ids are never decoded and encoded again"),
    "balance_dp_token": not_needed("losses are divided by the count of all processes"),
}
_TRAIN: dict[str, Counterpart] = {
    "resume": becomes(
        "resume_from_checkpoint",
        lambda value: {"resume_from_checkpoint": value if isinstance(value, str) else "auto"} if value else {},
        "resume_from_checkpoint",
    ),
    "epoch": renamed("num_train_epochs"),
    "epsilon": renamed("adam_epsilon"),
    "optm_name": asked("optim", {"AdamW": "adamw_torch_fused", "Adam": "adam"}),
    "optm_impl": not_needed("optim also names the implementation"),
    "optm_lr": becomes(
        "learning_rate, and learning_rates for other rates of some parameters",
        lambda value: {"learning_rate": float(value)},
        "learning_rate",
    ),
    "optm_weight_decay": renamed("weight_decay"),
    "optm_betas": betas(),
    "optm_warmup_steps": renamed("warmup_steps"),
    "optm_grad_norm_clip": renamed("max_grad_norm"),
    "optm_warmup_start_factor": if_true("warmup_start_factor"),
    "optm_decay_type": together(
        "lr_scheduler_type='wsd' and the key 'decay_type' of lr_scheduler_kwargs, where sqrt is '1-sqrt'",
        "lr_scheduler_kwargs",
    ),
    "optm_decay_ratio": together("decay_fraction in lr_scheduler_kwargs, if there is a decay", "lr_scheduler_kwargs"),
    "optm_min_lr_factor": together("min_lr_ratio in lr_scheduler_kwargs, if there is a decay", "lr_scheduler_kwargs"),
    "max_num_steps": if_true("max_steps", "max_steps with stop_at_first_limit=True"),
    **dict.fromkeys(("compile", "enable_torch_compile"), renamed("torch_compile")),
    "param_dtype": becomes("bf16=True", lambda value: {"bfloat16": {"bf16": True}, "float32": {}}[value], "bf16"),
    "master_dtype": becomes("float32 weights", lambda value: {"float32": {}}[value]),
    "deterministic": renamed("full_determinism"),
    "activation_offload": renamed("activation_offloading"),
    "fa_version": not_needed("attention is chosen by the forward plan"),
    "sequence_packing": not_needed("batches are laid out without padding"),
    "train_batch_per_replica": together(
        "per_device_train_batch_size * steps_per_generation; without batch_size_per_optimize, this is also one step",
        "gradient_accumulation_steps",
    ),
    "sync_weight_interval": not_needed("weights are sent before every generation"),
    "transfer_dtype": not_needed("weights are sent as the server has them"),
    "local_dataset": not_needed("every process reads the dataset"),
    **dict.fromkeys(
        ("async_tp_enabled", "fsdp_reduce_dtype", "fsdp_offload", "fsdp_reshard_after_forward"), instead(LAUNCH)
    ),
    "fp8.enable_fp8": becomes(
        "fp8=True with bf16=True", lambda value: {"fp8": True, "bf16": True} if value else {}, "fp8"
    ),
    "fp8": not_needed("scales are of whole tensors, taken anew in each product, and powers of 2"),
    "fp4": instead("use fp8=True to compute in 8 bits; load_in_4bit=True trains an adapter on weights of 4 bits"),
    "ckpt.enable_checkpoint": asked("save_strategy", {True: "steps", False: "no"}),
    "ckpt.save_freq": renamed("save_steps"),
    "ckpt.save_freq_in_epoch": becomes(
        "save_strategy='epoch' and save_epochs",
        lambda value: {"save_strategy": "epoch", "save_epochs": value} if value else {},
        "save_epochs",
    ),
    "ckpt.save_mode": asked("save_in_background", {"async": True, "sync": False}),
    "ckpt.max_keep": if_set("save_total_limit"),
    "ckpt.export_safetensors": not_needed(
        "checkpoints are HuggingFace folders; under ZeRO-3 and FSDP2 set the key 'export_weights' of checkpoint_kwargs"
    ),
    "ckpt.upload_hf": renamed("push_to_hub"),
    "ckpt.hf_repo_name": renamed("hub_model_id"),
    **dict.fromkeys(
        ("ckpt.upload_s3", "ckpt.s3_bucket", "ckpt.s3_prefix"),
        together("upload_to='s3://bucket/prefix'; final is upload_kwargs={'checkpoints': 'final'}", "upload_to"),
    ),
    "ckpt": instead("see docs/checkpoints.md"),
    "enable_validation": flag("eval_strategy", "steps"),
    **dict.fromkeys(("validation_freq", "validation_step"), renamed("eval_steps")),
}
_LORA: dict[str, Counterpart] = {
    "r": becomes("lora_r with use_peft=True", lambda value: {"use_peft": True, "lora_r": value}, "lora_r"),
    "target_modules": layers(),
    "modules_to_save": renamed("lora_modules_to_save"),
    "alpha_pattern": renamed("lora_alpha_pattern"),
    "r_pattern": renamed("lora_rank_pattern"),
    "init_lora_weights": becomes(
        "lora_init", lambda value: {} if value is True else {"lora_init": value}, "lora_init"
    ),
}
_ROLLOUT: dict[str, Counterpart] = {
    "max_response_length": renamed("max_completion_length"),
    "n_generation": renamed("num_generations"),
    **{f"sampling_config.{name}": renamed(name) for name in ("temperature", "top_p", "repetition_penalty")},
    "sampling_config.top_k": becomes("top_k, where 0 means all tokens", lambda value: {"top_k": max(value, 0)}),
    "sampling_config": not_needed("it is an environment variable of vLLM"),
    "backend": becomes(
        "use_vllm=True; TensorRT-LLM is not supported", lambda value: {"vllm": {"use_vllm": True}}[value], "use_vllm"
    ),
    "gpu_memory_utilization": server("--gpu_memory_utilization"),
    "enforce_eager": server("--enforce_eager"),
    "enable_chunked_prefill": server("--enable-chunked-prefill"),
    "quantization": server("--quantization"),
    "parallelism": server("--tensor_parallel_size"),
    "vllm_use_flashinfer": server("set the environment variables of vLLM for the server"),
    "batch_size": not_needed("all prompts of a step are requested at once"),
    "n_generation_to_batch": not_needed("the server makes its own batches"),
    "include_stop_str_in_output": together("the option of that name, which acts with stop", "stop"),
    "multi_turn_config.max_assistant_turns": renamed("max_turns"),
    "multi_turn_config.custom_chat_template_path": if_set("chat_template_path"),
    "multi_turn_config": instead("set environment or tools; see docs/environments.md"),
    "seed": not_needed("seed decides the sampling, too"),
}
_SECTIONS = {"train.train_policy": _POLICY, "train": _TRAIN, "policy.lora": _LORA, "rollout": _ROLLOUT}
# A row stands for a section, too: for all keys in it that have no row.
COSMOS_RL: dict[str, Counterpart] = {
    **{f"{section}.{name}": row for section, rows in _SECTIONS.items() for name, row in rows.items()},
    "train.train_policy.temperature": not_needed("the temperature of sampling is that of the loss"),
    "policy.model_gradient_checkpointing": renamed("gradient_checkpointing"),
    "policy.model_max_length": together(
        "max_length of prefrl sft; max_prompt_length and filter_overlong_prompts of prefrl grpo", "max_length"
    ),
    "policy.trainable_map": instead(
        "use freeze, with regular expressions of parameters that are not trained; '^(?!.*lm_head)' is all but lm_head"
    ),
    "policy.enable_liger_kernel": renamed("use_liger_kernel"),
    **dict.fromkeys(
        ("policy.parallelism.dp_shard_size", "policy.parallelism.dp_replicate_size"),
        together("num_processes and accelerate_config; see docs/distributed.md"),
    ),
    "policy.parallelism": instead(LAUNCH),
    "logging.logger": loggers(),
    "logging.project_name": renamed("project"),
    "logging.experiment_name": if_set("run_name"),
    "profiler.enable_profiler": flag("profile", True),
    "profiler.enable_nsys": instead("start the run under nsys profile, where phases are ranges of record_function"),
    **{f"profiler.{name}_steps": renamed("profile_kwargs", name) for name in ("active", "warmup", "wait")},
    "profiler.rank_filter": renamed("profile_kwargs", "ranks"),
    "profiler.record_shape": renamed("profile_kwargs", "record_shapes"),
    **{f"profiler.{name}": renamed("profile_kwargs", name) for name in ("profile_memory", "with_stack")},
    "profiler.with_modules": not_needed("the phases of a step are ranges of the trace; with_stack has the modules"),
    "profiler": instead("use profile=True and profile_kwargs; see docs/profiling.md"),
    "validation.enable": flag("eval_strategy", "steps"),
    "validation.freq": renamed("eval_steps"),
    "validation.batch_size": if_set("per_device_eval_batch_size"),
    "validation.temperature": renamed("temperature_eval"),
    "validation.n_generation": renamed("num_generations_eval"),
    "validation.top_p": if_set_key("eval_sampling_kwargs", "top_p"),
    "validation.top_k": sampled_top_k(),
    "validation.repetition_penalty": if_set_key("eval_sampling_kwargs", "repetition_penalty"),
    "validation.dataset.name": together("eval_datasets, if it is another dataset", "eval_datasets"),
    "validation.dataset.test_split": if_set("dataset_test_split"),
    "validation.max_response_length": together(
        "max_completion_length in eval_sampling_kwargs", "eval_sampling_kwargs"
    ),
    "validation.reward_function": together("eval_reward_funcs and eval_reward_weights", "eval_reward_funcs"),
    "validation": instead("set the options of evaluations; see docs/evaluation.md"),
    "redis": not_needed("there is no separate controller"),
    "custom": instead("give the values to your own script"),
}
# What the TOML means if a key is not given, where that differs here.
DEFAULTS: dict[str, Any] = {
    "gradient_checkpointing": True,
    "bf16": True,
    "learning_rate": 1e-6,
    "weight_decay": 0.01,
    "adam_epsilon": 1e-6,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "save_steps": 20,
    "save_in_background": True,
    "save_total_limit": 5,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
}
GRPO_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "beta": 0.0,
    "delta": 3.0,
    "num_generations": 16,
    "max_completion_length": 2048,
    "max_staleness": 4,
}
_SECTION = "train.train_policy"
_OVERLONG, _RESET = f"{_SECTION}.overlong_reward", "reset_optimizer_with_reference"


def migrate_cosmos_rl(text: str) -> Migrated:
    """The options of prefrl, as YAML, that a TOML file of cosmos-rl means.

    Raises:
        ConfigError: It is not TOML, or has no options of cosmos-rl.
    """
    values = of_toml(text, "reward_function")
    if not any(path.startswith("train.") for path in values):
        raise ConfigError("no options of cosmos-rl are in this file: it has no section train")
    idle = _without_effect(values)
    command = "sft" if values.get(f"{_SECTION}.type", (0, "grpo"))[1] == "sft" else "grpo"
    own = GRPO_DEFAULTS if command == "grpo" else {}
    run = ForeignRun(values, COSMOS_RL, DEFAULTS | own)
    run.changes += idle
    shards, copies = (max(1, run.number(f"policy.parallelism.dp_{name}_size", 1)) for name in ("shard", "replicate"))
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
        return values.get(f"{_SECTION}.{name}", (0, None))[1]

    off = [] if given("variant") == "dapo" else ["filter_reward_metric", "max_retry_for_on_policy"]
    off += [] if given("kl_beta") else ["reference_reset_interval", "reset_optimizer_with_reference"]
    off += [] if given("reference_reset_interval") else ["reset_optimizer_with_reference"]
    paths = [path for name in dict.fromkeys(off) if (path := f"{_SECTION}.{name}") in values]
    taken = [(path, *values.pop(path)) for path in paths]
    return [(line, f"{path}={value!r} has no effect, because the feature is off") for path, line, value in taken]


def _rollouts(run: ForeignRun) -> None:
    """Rollouts come from servers, and by default from older weights; a prompt may take what a completion leaves."""
    options, is_async = run.options, not run.value(f"{_SECTION}.on_policy", False)
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
    tokens = run.number(f"{_SECTION}.unbiased_loss_max_tokens", 0)
    if tokens == _longest(run):
        options["loss_type"] = "dr_grpo"
    elif tokens:
        here = f"loss_type='dr_grpo' divides by max_completion_length={_longest(run)}"
        run.leave_open(f"{_SECTION}.unbiased_loss_max_tokens", here)


def _longest(run: ForeignRun) -> int:
    return run.number("rollout.max_response_length", 2048, least=1)


def _rewards(run: ForeignRun) -> None:
    """The rewards, the column of the answer, whose name depends on them, and which of them selects prompts."""
    weights = _weights(run, _SECTION)
    if run.value(f"{_OVERLONG}.enable_overlong_penalty", False):
        weights = {**weights, "overlong": weights.get("overlong", 1.0)}
    names = _named(run, weights, _SECTION)
    _answers(run, [*names])
    _selection(run, names)


def _named(run: ForeignRun, weights: Mapping[str, float], section: str) -> dict[str, str]:
    """Set the options of rewards; returns our names of those that there are."""
    options = [f"{'' if section == _SECTION else 'eval_'}reward_{kind}" for kind in ("funcs", "weights")]
    names = {name: ours for name in weights if (ours := _reward(run, name)) is not None}
    if unknown := [name for name in weights if name not in names]:
        text = f"{', '.join(unknown)}: write a function, and add file.py:function to {' and '.join(options)}"
        run.open.append((run.values.get(f"{section}.reward_function", (1, None))[0], text))
    factors = {"overlong": run.value(f"{_OVERLONG}.penalty_factor", 1.0)}
    values = [weights[name] * factors.get(name, 1.0) for name in names]
    run.options |= dict(zip(options, ([*names.values()], values), strict=True)) if names else {}
    return names


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
    parameters = f"max_completion_len={longest}, soft_punish_cache={buffer}"
    return None if buffer > longest else f"soft_overlong_punishment_reward({parameters})"


def _answers(run: ForeignRun, rewards: list[str]) -> None:
    theirs = run.value(f"{_SECTION}.response_column_name", "")
    read = {column for name in rewards if (column := REWARDS.get(name, (None, None))[1])} or {"answer"}
    if theirs and len(read) > 1:
        text = f"the rewards read the columns {' and '.join(sorted(read))}: copy it, so that the dataset has both"
        run.leave_open(f"{_SECTION}.response_column_name", text)
    elif theirs and theirs not in read:
        run.options["columns"] = {**run.options.get("columns", {}), read.pop(): theirs}


def _selection(run: ForeignRun, names: dict[str, str]) -> None:
    """DAPO samples other prompts where a reward, or their sum, is the same for all completions."""
    if not run.options.get("dynamic_sampling"):
        return
    metrics, path = run.texts(f"{_SECTION}.filter_reward_metric"), f"{_SECTION}.max_retry_for_on_policy"
    tries = run.number(path, -1)
    kwargs: dict[str, Any] = {"max_tries": max(tries, 0)} if path in run.values else {}
    if metrics and all(metric in names for metric in metrics):
        ours = [names[metric].partition("(")[0] for metric in metrics]
        kwargs["reward_metric"] = ours if len(ours) > 1 else ours[0]
    elif metrics:
        text = "here prompts are selected by rewards, or by their sum: set the key reward_metric"
        run.leave_open(f"{_SECTION}.filter_reward_metric", text)
    if kwargs:
        run.options["dynamic_sampling_kwargs"] = kwargs


def _reference(run: ForeignRun) -> None:
    if interval := run.number(f"{_SECTION}.reference_reset_interval", 0):
        run.options |= {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": interval}
        run.options[_RESET] = run.value(f"{_SECTION}.{_RESET}", True)


def _schedule(run: ForeignRun) -> None:
    """The learning rate rises in 20 steps and stays, and falls at the end if a kind of decay is given."""
    options, kind = run.options, run.value("train.optm_decay_type", "none")
    options |= {"stop_at_first_limit": True} if "max_steps" in options else {}
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
    """Evaluation reads another split or dataset, or rows that are held out, and may have rewards of its own."""
    if run.options.get("eval_strategy", "no") == "no":
        return
    size, other = run.value(f"{_SECTION}.dataset.test_size", None), "validation.dataset.name"
    if run.value(other, "") not in ("", run.options.get("dataset_name")):
        run.options["eval_datasets"] = [run.value(other, "")]
    elif size and "dataset_test_split" not in run.options and "dataset_name" in run.options:
        run.into_datasets()
        run.options["test_split_size"] = size
    if (longest := run.value("validation.max_response_length", None)) not in (None, _longest(run)):
        run.options.setdefault("eval_sampling_kwargs", {})["max_completion_length"] = longest
    if run.value("validation.reward_function", None) and "reward_funcs" in run.options:
        _named(run, _weights(run, "validation"), "validation")


def _batches(run: ForeignRun, command: str, processes: int) -> None:
    """A replica learns from its batch in one optimizer step, or in several; a generation has whole groups."""
    options = run.options
    micro = run.number(f"{_SECTION}.mini_batch", 2, least=1)
    options["per_device_train_batch_size"] = micro
    batches = max(1, run.number("train.train_batch_per_replica", 8) // (micro * processes))
    per_step = run.number(f"{_SECTION}.batch_size_per_optimize", 0) // micro  # of one process
    options["gradient_accumulation_steps"] = min(per_step, batches) or batches
    if command == "grpo":
        whole = lcm(micro * batches, run.number("rollout.n_generation", 16, least=1)) // micro
        options["steps_per_generation"] = lcm(whole, options["gradient_accumulation_steps"])
