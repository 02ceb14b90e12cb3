"""What a name of another library is here: rows, and the tables of TRL, transformers, axolotl, peft and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# How many processes there are, and what each of them holds.
LAUNCH = "set num_processes, num_machines and accelerate_config; see docs/distributed.md"
_UNSET = (None, "", "None", -1)

CounterpartKind = Literal["renamed", "becomes", "instead", "not needed", "server", "not there", "aside"]


@dataclass(frozen=True)
class Counterpart:
    """What a name of another library is here.

    Args:
        kind: Whether there is a counterpart, and whether the name may be left out.
        text: What it is, or why it is not needed, or what to do instead; no full stop.
        options: The options that it becomes; advice is given only where a config has the first of them.
        convert: From the value to those options, which may be none. None: the value alone does not decide them.
    """

    kind: CounterpartKind
    text: str
    options: tuple[str, ...] = ()
    convert: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def says(self) -> str:
        """The row in words that may follow the name."""
        return {
            "renamed": f"is {self.text} here",
            "becomes": f"becomes here: {self.text}",
            "instead": f"works differently here: {self.text}",
            "not needed": f"is not needed here: {self.text}",
            "server": f"belongs to prefrl vllm-serve here: {self.text}",
            "not there": f"has no counterpart here: {self.text}",
            "aside": f"works differently here: {self.text}",
        }[self.kind]

    @property
    def may_go(self) -> bool:
        """Whether the name may be left out without another one in its place."""
        return self.kind in ("not needed", "server")


def renamed(option: str, key: str | None = None) -> Counterpart:
    """The same value under another name, or as a key of an option that is a mapping."""
    if key is None:
        return Counterpart("renamed", option, (option,), lambda value: {option: value})
    return Counterpart("becomes", f"the key {key!r} of {option}", (option,), lambda value: {option: {key: value}})


def becomes(text: str, convert: Callable[[Any], Mapping[str, Any]], *options: str) -> Counterpart:
    """Other options, or other values."""
    return Counterpart("becomes", text, options, convert)


def together(text: str, *options: str) -> Counterpart:
    """Other options, which the values of several keys decide together."""
    return Counterpart("becomes", text, options)


def asked(option: str, values: Mapping[Any, Any], text: str | None = None) -> Counterpart:
    """An option whose values have other names."""
    listed = ", ".join(f"{theirs} is {ours!r}" for theirs, ours in values.items())
    return Counterpart(
        "becomes", text or f"{option}, where {listed}", (option,), lambda value: {option: values[value]}
    )


def flag(option: str, value: Any) -> Counterpart:
    """A switch that sets an option to a value."""
    return becomes(f"{option}={value!r}", lambda given: {option: value} if given else {}, option)


def if_true(option: str, text: str | None = None) -> Counterpart:
    """The same value under another name, unless it is 0, False or empty."""
    return becomes(text or option, lambda value: {option: value} if value else {}, option)


def unless(default: Any, option: str) -> Counterpart:
    """The same value under another name, unless it is what `default` says, which is so without it."""
    return becomes(option, lambda value: {} if value == default else {option: value}, option)


def if_set(option: str) -> Counterpart:
    """The same value under another name, unless it says that nothing is set."""
    return becomes(option, lambda value: {} if value in _UNSET else {option: value}, option)


def if_set_key(option: str, key: str) -> Counterpart:
    """The same value as a key of an option that is a mapping, unless it says that nothing is set."""
    convert = renamed(option, key).convert
    assert convert is not None
    return becomes(f"the key {key!r} of {option}", lambda value: {} if value in _UNSET else convert(value), option)


def sampled_top_k() -> Counterpart:
    """The number of tokens that evaluations sample from; a negative one stands for all of them."""
    option = "eval_sampling_kwargs"
    return becomes(f"the key 'top_k' of {option}, 0 for all tokens", lambda n: {option: {"top_k": max(n, 0)}}, option)


def column(name: str, *others: str) -> Counterpart:
    """The name of a column of the dataset; here it is `name`, or one of the others, unless `columns` maps it."""

    def convert(value: Any) -> Mapping[str, Any]:
        return {} if value in (name, *others, None, "") else {"columns": {name: value}}

    return becomes(f"columns, as {{{name}: ...}}", convert, "columns")


def betas() -> Counterpart:
    """The two decay rates of Adam in a list."""
    names = ("adam_beta1", "adam_beta2")
    return becomes(" and ".join(names), lambda value: {names[0]: value[0], names[1]: value[1]}, names[0])


def layers() -> Counterpart:
    """The layers that get adapters."""
    option = "lora_target_modules"
    return becomes(option, lambda value: {option: [value] if isinstance(value, str) else value}, option)


def loggers() -> Counterpart:
    """The trackers of a run."""

    def convert(value: Any) -> Mapping[str, Any]:
        trackers = [name for name in ([value] if isinstance(value, str) else value) if name != "console"]
        if len(trackers) > 1:
            raise ValueError("report_to names one tracker, or all")
        return {"report_to": trackers[0] if trackers else "none"}

    return becomes("report_to; the console always has the log", convert, "report_to")


def not_needed(why: str) -> Counterpart:
    """Leaving it out changes nothing."""
    return Counterpart("not needed", why)


def server(text: str) -> Counterpart:
    """Not an option of training, but of the command that starts a server."""
    return Counterpart("server", text)


def instead(what: str) -> Counterpart:
    """Something else does this, which the user has to choose."""
    return Counterpart("instead", what)


def not_there(why: str) -> Counterpart:
    """There is no counterpart."""
    return Counterpart("not there", why)


def aside(why: str) -> Counterpart:
    """There is no counterpart, but most runs mean the same without it: `prefrl migrate` turns it into a comment."""
    return Counterpart("aside", why)


def row_of(rows: Mapping[str, Counterpart], name: str) -> Counterpart | None:
    """The row of an option or a path of keys: its own, or that of a section that contains it."""
    parts = name.split(".")
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((rows[path] for path in paths if path in rows), None)


_NO_PADDING = "batches are laid out without padding"
_LOCAL = "completions are sampled by prefrl's own loop or on a server"
_SERVER = "start the server with --{}"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "ignore_eos")


def _sampling(value: Any) -> Mapping[str, Any]:
    unknown = value.keys() - {*_SAMPLING}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} has no counterpart")
    return dict(value)


def _off(value: Any) -> Mapping[str, Any]:
    if value:
        raise ValueError("it is on")
    return {}


def _one(value: Any) -> Mapping[str, Any]:
    if value != 1:  # or True
        raise ValueError("it is not")
    return {}


# Options of configs and of the command line.
TRL: dict[str, Counterpart] = {
    "padding_free": not_needed(_NO_PADDING),
    "pad_to_multiple_of": not_needed(_NO_PADDING),
    "padding_value": not_needed(_NO_PADDING),
    "label_pad_token_id": not_needed(_NO_PADDING),
    "cast_lm_head_to_fp32": not_needed("log-probs are computed in float32 from the hidden states"),
    "use_logits_to_keep": not_needed("only the log-probs of responses are computed"),
    "generation_kwargs": becomes(
        "the options temperature, top_p, top_k, min_p, repetition_penalty, stop and ignore_eos themselves",
        _sampling,
        "temperature",
    ),
    "use_transformers_continuous_batching": not_needed(_LOCAL),
    "transformers_continuous_batching_config": not_needed(_LOCAL),
    "use_transformers_paged": not_needed(_LOCAL),
    "vllm_model_impl": server(_SERVER.format("model-impl")),
    "vllm_tensor_parallel_size": server(_SERVER.format("tensor_parallel_size")),
    "vllm_max_model_length": server(_SERVER.format("max_model_len")),
    "vllm_enable_sleep_mode": not_needed("with vllm_mode='colocate', the server sleeps while the trainer works"),
    "vllm_group_port": not_needed("the trainer chooses a free port"),
    "vllm_importance_sampling_cap": renamed("vllm_importance_sampling_clip_max"),
    "log_completions_hub_repo": instead(
        "upload the folder completions in output_dir, which has all rollouts as Parquet files, with "
        "huggingface_hub.upload_folder"
    ),
    "log_multimodal": not_needed("the journal keeps the images"),
    "max_new_tokens": renamed("max_completion_length"),
    "response_length": renamed("max_completion_length"),
    "reward_model_path": instead(
        "give the reward model to the trainer as reward_funcs, or on the command line as --reward_model_name_or_path"
    ),
    "sft_model_path": instead("give this model to the trainer as the policy; its weights are also the reference"),
    "is_encoder_decoder": not_there("models with an encoder are not supported; use a decoder-only model"),
    "max_completion_length": aside("use max_length, which bounds prompt and completion together"),
    "max_prompt_length": aside("use max_length, which bounds prompt and completion together"),
    "max_seq_length": renamed("max_length"),
    "max_length": aside("use max_prompt_length and max_completion_length"),
    "num_of_sequences": not_needed("packing needs no estimate"),
    "chars_per_token": not_needed("packing needs no estimate"),
    "seq_kd": becomes(
        "nothing if it is off; otherwise, put completions of the teacher into the column completion, and set "
        "on_policy_fraction=0",
        _off,
    ),
    "use_uld_loss": becomes("nothing if it is off; a teacher with another tokenizer is not supported", _off),
    **dict.fromkeys(
        (
            *("teacher_tokenizer_name_or_path", "use_extended_uld", "uld_token_merge_strategy", "uld_use_hybrid_loss"),
            *("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight", "uld_crossentropy_weight"),
            *("uld_distillation_weight", "uld_student_temperature", "uld_teacher_temperature"),
            *("uld_skip_student_eos", "uld_skip_teacher_eos"),
        ),
        not_needed("it is for a teacher with another tokenizer, which is not supported"),
    ),
    "teacher_server_urls": together(
        "teacher_server_base_url, a list; several teachers, each on a server of its own, are not supported",
        "teacher_server_base_url",
    ),
    "teacher_top_k": renamed("teacher_server_kwargs", "top_k"),
    "teacher_temperature": becomes("nothing if it is 1; temperature is that of student and teacher", _one),
    **dict.fromkeys(
        ("loss_add_tail", "add_tail_bucket"), becomes("nothing if it is on; all other tokens count as one", _one)
    ),
    "reverse_kl_top_1_mode": not_needed("the teacher's likeliest tokens are compared"),
    "teacher_model_kind": asked("teacher_weights", {"base": "frozen", "live": "live", "ema": "ema"}),
    "teacher_prompt_template": instead("set teacher_prompt to a function that makes the prompt from a row"),
    "distillation_alpha": renamed("beta"),
    "distillation_mode": becomes(
        "nothing for full_logits; the divergence is over the whole vocabulary",
        lambda value: {"full_logits": {}}[value],
    ),
    **dict.fromkeys(
        ("distillation_topk", "distillation_add_tail"), not_needed("the divergence is over the whole vocabulary")
    ),
    "distillation_is_clip": not_there("the divergence has no importance weight"),
    "use_teacher_server": becomes(
        "nothing if it is off; a teacher that is the student is computed by the trainer, and servers of another "
        "teacher are given as teacher_server_base_url",
        _off,
    ),
    "generate_from_teacher": becomes("nothing if it is off; completions are always the student's", _off),
    "num_loss_tokens_to_skip": becomes("nothing if it is 0; all tokens of a completion count", _off),
    "ref_model_init_kwargs": instead("load the reference model yourself, and give the instance as ref_model"),
    "force_use_ref_model": not_needed("a reference beside an adapter is used if it is given"),
    "model_adapter_name": instead("call model.set_adapter first; the active adapter is the policy"),
    "ref_adapter_name": instead("give ref_model; without it, the reference is the model without its adapter"),
    "reference_free": instead("use CPOTrainer, whose losses have no reference"),
    "num_ppo_epochs": renamed("num_iterations"),
    "num_mini_batches": instead(
        "set steps_per_generation to gradient_accumulation_steps times the number of optimizer steps per generation"
    ),
    "cliprange": renamed("epsilon"),
    "kl_coef": renamed("beta"),
    "whiten_rewards": renamed("reward_shaping_kwargs", "normalize"),
    "total_episodes": instead("set max_steps = total_episodes / completions of an optimizer step"),
    "local_rollout_forward_batch_size": not_needed("passes without gradients choose their own size"),
    "num_sample_generations": not_needed("log_completions prints what was sampled"),
    "stop_token": not_needed("completions end at the end-of-sequence tokens of model and tokenizer"),
    "stop_token_id": not_needed("completions end at the end-of-sequence tokens of model and tokenizer"),
    "response_template": instead("set completion_only_loss or assistant_only_loss, which need no template"),
    "token_budget": renamed("max_tokens_per_micro_batch"),
    "request_timeout": renamed("vllm_kwargs", "request_timeout"),
    "weight_sync_steps": not_needed("weights are sent before every generation, and never later than max_staleness"),
    "max_inflight_tasks": renamed("max_concurrent_environments"),
    "torch_dtype": renamed("dtype"),
}

# Values of options that have another name: config, option, value -> ours.
VALUES: dict[tuple[str, str, str], str] = {
    ("SFTConfig", "loss_type", "chunked_nll"): "nll",
}
# Values that say what is so here anyway, and may not be given.
SAME_VALUES: dict[str, Any] = {"remove_unused_columns": True}
_EVERY = {"gradient_checkpointing": True, "bf16": True, "logging_nan_inf_filter": True}
_SAMPLED = {"max_prompt_length": None, "vllm_server_timeout": 240.0, "vllm_mode": "colocate"}
_ONLINE = {"max_completion_length": 512, "temperature": 1.0, "num_completions_to_print": None, **_SAMPLED, **_EVERY}
# What an option is in TRL if it is not given, where that differs here: those of TRL 1.16, and of 1.12 for the configs
# that later versions do not have.
DEFAULTS: dict[str, dict[str, Any]] = {
    "SFTConfig": _EVERY,
    "DPOConfig": _EVERY,
    "KTOConfig": {"train_sampling_strategy": "sequential", **_EVERY},
    "RewardConfig": _EVERY,
    "CPOConfig": _EVERY,
    "ORPOConfig": _EVERY,
    "BCOConfig": {"learning_rate": 5e-7, **_EVERY},
    "GRPOConfig": {"beta": 0.0, **_ONLINE},
    "RLOOConfig": _ONLINE,
    "DistillationConfig": {"num_completions_to_print": None, **_SAMPLED, **_EVERY},
    "OnlineDPOConfig": {
        **{"learning_rate": 5e-7, "max_completion_length": 64, "disable_dropout": True, **_SAMPLED, **_EVERY}
    },
    "PPOConfig": {
        **{"learning_rate": 3e-6, "max_completion_length": 53, "max_prompt_length": None, "temperature": 0.7, **_EVERY}
    },
}
# TRL trains without what it cannot use, where an error is the default here.
LENIENT = {"invalid_rows": "drop"}


_PRECISION = "mixed precision is that of torch"


def _warmup(ratio: Any) -> Mapping[str, Any]:
    if not 0 <= float(ratio) < 1:
        raise ValueError("only a fraction below 1 is one of all steps")
    return {"warmup_steps": ratio}


TRANSFORMERS: dict[str, Counterpart] = {
    "warmup_ratio": Counterpart("renamed", "warmup_steps", ("warmup_steps",), _warmup),
    "evaluation_strategy": renamed("eval_strategy"),
    "per_gpu_train_batch_size": renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": renamed("per_device_eval_batch_size"),
    "no_cuda": renamed("use_cpu"),
    "push_to_hub_model_id": renamed("hub_model_id"),
    "push_to_hub_token": renamed("hub_token"),
    "adafactor": flag("optim", "adafactor"),
    "group_by_length": not_needed("nothing is padded; max_tokens_per_micro_batch balances tokens"),
    "overwrite_output_dir": not_needed("training starts anew unless resume_from_checkpoint is set"),
    "save_safetensors": not_needed("weights are always saved as safetensors"),
    "use_mps_device": not_needed("the device that is there is used"),
    "fp16_backend": not_needed(_PRECISION),
    "half_precision_backend": not_needed(_PRECISION),
    "fp16_opt_level": not_needed(_PRECISION),
    "logging_dir": instead("set the variable TENSORBOARD_LOGGING_DIR, for example in env"),
}
