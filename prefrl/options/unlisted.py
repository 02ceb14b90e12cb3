"""Names of TRL for which there is nothing to set here. Configs take them, so that its scripts and flags keep working.

Each is a field that help, docs and trackers do not show. A row of a table answers values that ask for more than what
happens anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prefrl.errors import ConfigError
from prefrl.options.fields import default_of, example, flat, hidden, mapping_of, unset, when


@dataclass(init=False, repr=False, eq=False)
class UnpaddedNames:
    """Names of how rows are padded: they are not."""

    padding_free: bool = hidden(False)
    pad_to_multiple_of: int | str | None = hidden(None)
    padding_value: int | None = hidden(None)


@dataclass(init=False, repr=False, eq=False)
class EncoderNames:
    """Names of models with an encoder, in CPO and ORPO."""

    is_encoder_decoder: bool | None = hidden(None)
    max_completion_length: int | None = hidden(None)


@dataclass(init=False, repr=False, eq=False)
class SamplerNames:
    """Names of TRL's samplers, which are vLLM with options of its own, and transformers' continuous batching."""

    generation_kwargs: dict[str, Any] | str | None = hidden(None)
    vllm_mode: Literal["server", "colocate"] = hidden("server")
    vllm_model_impl: str = hidden("vllm")
    vllm_gpu_memory_utilization: float | None = hidden(0.3)
    vllm_tensor_parallel_size: int = hidden(1)
    vllm_max_model_length: int | None = hidden(None)
    vllm_enable_sleep_mode: bool = hidden(False)
    vllm_group_port: int = hidden(51216)
    vllm_importance_sampling_cap: float | None = flat("vllm_importance_sampling_kwargs", "clip_max")
    use_transformers_paged: bool = hidden(False)
    use_transformers_continuous_batching: bool = hidden(False)
    transformers_continuous_batching_config: dict[str, Any] | str | None = hidden(None)
    cast_lm_head_to_fp32: bool = hidden(False)
    log_completions_hub_repo: str | None = hidden(None)
    log_multimodal: bool = hidden(True)


@dataclass(init=False, repr=False, eq=False)
class PairsNames:
    """Names of online DPO."""

    max_new_tokens: int | None = flat("max_completion_length")
    max_length: int | None = hidden(None)
    reward_model_path: str | None = hidden(None)


UNPADDED_RULES = (
    when(
        lambda o: o.pad_to_multiple_of not in (None, "auto"),
        "pad_to_multiple_of={pad_to_multiple_of!r} has no effect because batches are laid out without padding. Leave "
        "it out.",
        example("sft", pad_to_multiple_of=8),
        hint=True,
    ),
    *unset(
        {"padding_value": 0},
        lambda o: True,
        "batches are laid out without padding. Leave it out.",
        example("sft"),
        hint=True,
    ),
)
ENCODER_RULES = (
    when(
        lambda o: o.is_encoder_decoder,
        "is_encoder_decoder=True: models with an encoder are not supported. Use a decoder-only model.",
        example("cpo", is_encoder_decoder=True),
    ),
    *unset(
        {"max_completion_length": 64},
        lambda o: True,
        "max_length bounds prompt and completion together. Leave it out.",
        example("cpo"),
        hint=True,
    ),
)


def _option_of_server(name: str, value: Any, option: str) -> Any:
    return unset(
        {name: value},
        lambda o: True,
        f"the server is a process of its own. Give --{option} to prefrl vllm-serve.",
        example("grpo"),
        hint=True,
    )


SAMPLER_RULES = (
    when(
        lambda o: o.use_vllm and o.vllm_mode == "colocate",
        "vllm_mode='colocate': vLLM does not share the GPUs of training. Start `prefrl vllm-serve` on other GPUs and "
        "leave vllm_mode out, or set use_vllm=False, which samples in the training process.",
        example("grpo", use_vllm=True, vllm_mode="colocate"),
    ),
    *_option_of_server("vllm_model_impl", "transformers", "model-impl"),
    *_option_of_server("vllm_gpu_memory_utilization", 0.5, "gpu_memory_utilization"),
    *_option_of_server("vllm_tensor_parallel_size", 2, "tensor_parallel_size"),
    *_option_of_server("vllm_max_model_length", 512, "max_model_len"),
    *unset(
        {"vllm_enable_sleep_mode": True},
        lambda o: True,
        "the server has GPUs of its own and never sleeps. Leave it out.",
        example("grpo"),
        hint=True,
    ),
    *unset(
        {"vllm_group_port": 51217},
        lambda o: True,
        "the trainer chooses a free port for sending weights. Leave it out.",
        example("grpo"),
        hint=True,
    ),
    when(
        lambda o: o.use_transformers_paged or o.use_transformers_continuous_batching,
        "use_transformers_continuous_batching=True and use_transformers_paged=True have no effect because completions "
        "are sampled by prefrl's own loop, which batches them, or on a server. Leave them out.",
        example("grpo", use_transformers_continuous_batching=True),
        hint=True,
    ),
    *unset(
        {"transformers_continuous_batching_config": {"block_size": 32}},
        lambda o: True,
        "completions are sampled by prefrl's own loop, or on a server. Leave it out.",
        example("grpo"),
        hint=True,
    ),
    *unset(
        {"cast_lm_head_to_fp32": True},
        lambda o: True,
        "the product with the head has the precision of training, and all of the loss after it is computed in "
        "float32. Leave it out.",
        example("grpo"),
        hint=True,
    ),
    *unset(
        {"log_completions_hub_repo": "me/completions"},
        lambda o: True,
        "rollouts are written to the folder completions of output_dir. Upload it with huggingface_hub.upload_folder.",
        example("grpo"),
        hint=True,
    ),
)
PAIRS_NAMES_RULES = (
    when(
        lambda o: (
            o.max_length is not None
            and (
                o.max_prompt_length is None
                or o.max_completion_length is None
                or o.max_length < o.max_prompt_length + o.max_completion_length
            )
        ),
        "max_length={max_length}: prompts and completions have bounds of their own, max_prompt_length="
        "{max_prompt_length} and max_completion_length={max_completion_length}. Set these instead.",
        example("online_dpo", max_length=512),
    ),
)

# Keys of generation_kwargs, and the options that they are here, where a config has them.
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "cache_implementation": "cache_implementation",
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("stop", "stop_strings"), "stop"),
    "ignore_eos": "ignore_eos",
}
# What happens anyway.
_ALWAYS = {"do_sample": True, "num_beams": 1, "n": 1, "num_return_sequences": 1, "use_cache": True}


def take_generation_kwargs(config: Any) -> None:
    """Move the keys of TRL's `generation_kwargs` to the options that they are here, in place.

    Raises:
        ConfigError: A key has no counterpart, or the option is also set.
    """
    given = mapping_of(config, "generation_kwargs")
    defaults = {name: default_of(field) for name, field in type(config).__dataclass_fields__.items()}
    for key, value in given.items():
        if key in _ALWAYS and value == _ALWAYS[key]:
            continue
        option = _SAMPLING.get(key, "")
        if option not in defaults:
            known = ", ".join(name for name, option in _SAMPLING.items() if option in defaults)
            raise ConfigError(f"generation_kwargs: {key}={value!r} has no counterpart here. Known: {known}.")
        if (other := getattr(config, option)) not in (defaults[option], value):
            raise ConfigError(
                f"generation_kwargs: {key}={value!r} and {option}={other!r}: given both ways. Remove one of them."
            )
        setattr(config, option, value)
    config.generation_kwargs = None
