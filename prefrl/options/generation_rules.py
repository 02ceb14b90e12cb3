"""How many completions are sampled, when and by whom, and which options exclude each other because of that."""

from __future__ import annotations

from math import lcm
from typing import Any

from prefrl.options.fields import Example, Rule, example, mapping_of, unset, when

LEAST_TEMPERATURE = 0.001  # below it, sampling is greedy but for rounding


def _steps_that_fit(o: Any) -> str:
    """The nearest values of `steps_per_generation` that are multiples of `gradient_accumulation_steps`."""
    accumulation = int(o.gradient_accumulation_steps)
    fewer = o.micro_batches_per_generation // accumulation * accumulation
    return f"{fewer} or {fewer + accumulation}" if fewer else f"{accumulation}"


def _nearest_completions(o: Any) -> int:
    """The number of completions of a generation batch nearest to that of the options that groups fit into."""
    step = lcm(int(o.num_ranks), int(o.num_generations))
    return max(1, round(int(o.completions_of_generation) / step)) * step


def _completions_of_step(o: Any) -> int:
    return int(o.rows_per_micro_batch * o.num_ranks)


def _chooses_prompts(name: str, example: Example) -> Rule:
    return when(
        lambda o: o.generation_mode == "async" and getattr(o, name),
        f"{name}={{{name}!r}} with generation_mode='async': prompts are requested before the rewards of the previous "
        "ones are known. Use generation_mode='sync'.",
        example,
    )


def _from_dataset(name: str, value: Any, *, unset: Any) -> Rule:
    return when(
        lambda o: getattr(o, name) != unset,
        f"{name}={{{name}!r}} has no effect because prompts are tokenized once at the start and come in full "
        f"generation batches. Leave it {unset}.",
        example("grpo", **{name: value}),
        hint=True,
    )


def _meaningless_k(o: Any) -> int | None:
    """A size k that has no meaning for the number of samples of a prompt."""
    return next((k for k in o.at_k_params.k or () if not 1 <= k <= o.samples_per_evaluated_prompt), None)


def _counts_cut_offs(o: Any) -> str | None:
    """An option that treats completions that were cut off in another way than those that ended."""
    shaping = o.shaping_params
    found = {
        "mask_truncated_completions=True": o.mask_truncated_completions,
        "missing_eos_penalty in reward_shaping_kwargs": shaping.missing_eos_penalty is not None,
        "stop_properly_penalty_coef in reward_shaping_kwargs": shaping.stop_properly_penalty_coef is not None,
    }
    return next((name for name, is_set in found.items() if is_set), None)


PROMPTS_RULES = (
    when(
        lambda o: o.train_sampling_strategy != "random",
        "train_sampling_strategy={train_sampling_strategy!r} has no effect because shuffle_dataset decides the order "
        "of prompts. Set shuffle_dataset=False for the dataset's own order.",
        example("grpo", train_sampling_strategy="sequential"),
    ),
    when(
        lambda o: o.remove_unused_columns,
        "remove_unused_columns=True has no effect because rewards may read any column. Leave it False.",
        example("grpo", remove_unused_columns=True),
        hint=True,
    ),
    _from_dataset("dataloader_num_workers", 2, unset=0),
    _from_dataset("dataloader_drop_last", True, unset=False),
    _from_dataset("dataloader_persistent_workers", True, unset=False),
    _from_dataset("dataloader_multiprocessing_context", "spawn", unset=None),
    when(
        lambda o: o.filter_overlong_prompts and o.max_prompt_length is None,
        "filter_overlong_prompts=True has no effect because max_prompt_length=None. Set max_prompt_length.",
        example("grpo", filter_overlong_prompts=True, max_prompt_length=None),
        hint=True,
    ),
    *unset(
        {"num_completions_to_print": 3, "log_unique_prompts": True},
        lambda o: not o.log_completions,
        "log_completions=False. Set log_completions=True.",
        example("grpo"),
        hint=True,
        same={"num_completions_to_print": None},
    ),
)
NUMBERS_RULES = (
    when(
        lambda o: o.router_replay and o.torch_compile,
        "router_replay={router_replay!r} with torch_compile=True: the choice of experts cannot be replaced inside "
        "compiled layers. Set one of them to False.",
        example("grpo", router_replay=True, torch_compile=True),
    ),
    when(
        lambda o: o.temperature_eval and o.temperature_eval < LEAST_TEMPERATURE,
        "temperature_eval={temperature_eval!r}: must be 0, which is greedy decoding, or at least {least}",
        example("grpo", temperature_eval=0.0001),
        least=lambda o: LEAST_TEMPERATURE,
    ),
    when(
        lambda o: o.reward_weights and not any(o.reward_weights),
        "reward_weights={reward_weights!r}: all rewards count 0, so there is nothing to learn. Give one of them a "
        "weight; those with weight 0 are only logged.",
        example("grpo", reward_weights=[0.0]),
    ),
    when(
        lambda o: o.eval_reward_weights and not any(o.eval_reward_weights),
        "eval_reward_weights={eval_reward_weights!r}: all rewards count 0, so eval_reward would always be 0. Give one "
        "of them a weight; those with weight 0 are only logged.",
        example("grpo", eval_reward_weights=[0.0]),
    ),
)
STOP_RULES = (
    when(
        lambda o: o.stop is not None and (not o.stop or "" in o.stop),
        "stop={stop!r}: must be one or more strings that are not empty, or None",
        example("grpo", stop=["</answer>", ""]),
    ),
    when(
        lambda o: not o.include_stop_str_in_output and o.stop is None,
        "include_stop_str_in_output=False has no effect because stop is None. Set stop to the strings that end a "
        "completion, or remove it.",
        example("grpo", include_stop_str_in_output=False),
    ),
    when(
        lambda o: _counts_cut_offs(o) if o.ignore_eos and o.stop is None else None,
        "{found} with ignore_eos=True: every completion is then cut off at max_completion_length. Remove one of them, "
        "or set stop to strings that end a completion.",
        example("grpo", ignore_eos=True, mask_truncated_completions=True),
    ),
)
GENERATION_SIZE_RULES = (
    when(
        lambda o: "per_device_eval_batch_size" in o.automatic,
        "per_device_eval_batch_size='auto' in a trainer that samples: how many completions fit is not known before "
        "they are sampled. Set a number.",
        example("grpo", per_device_eval_batch_size="auto"),
    ),
    when(
        lambda o: o.sought == {"per_device_train_batch_size"},
        "per_device_train_batch_size='auto' without effective_batch_size: it would decide how many prompts a "
        "generation batch has. Set effective_batch_size.",
        example("grpo", per_device_train_batch_size="auto"),
    ),
    *unset(
        {"steps_per_generation": 2},
        lambda o: {"per_device_train_batch_size", "gradient_accumulation_steps"} <= o.automatic,
        "micro-batches, which it counts, are cut by trial. Set generation_batch_size.",
        example(
            "grpo",
            per_device_train_batch_size="auto",
            gradient_accumulation_steps="auto",
            effective_batch_size=8,
        ),
    ),
    when(
        lambda o: o.generation_batch_size is not None and o.steps_per_generation is not None,
        "generation_batch_size={generation_batch_size} and steps_per_generation={steps_per_generation}: set only one "
        "of them; the other is derived from it",
        example("grpo", generation_batch_size=16, steps_per_generation=2),
    ),
    when(
        lambda o: o.generation_batch_size is not None and o.generation_batch_size % _completions_of_step(o),
        "generation_batch_size={generation_batch_size}: must be a multiple of {multiple} = {rows_per_micro_batch} "
        "completions of a micro-batch * {num_ranks} processes",
        example("grpo", generation_batch_size=12),
        multiple=_completions_of_step,
    ),
    when(
        lambda o: o.micro_batches_per_generation % o.gradient_accumulation_steps,
        "steps_per_generation={micro_batches_per_generation}: must be a multiple of "
        "gradient_accumulation_steps={gradient_accumulation_steps}, or divide it, so that an optimizer step learns "
        "from one generation. Set {fitting}.",
        example("grpo", steps_per_generation=3, gradient_accumulation_steps=2),
        fitting=_steps_that_fit,
    ),
    when(
        lambda o: o.shuffle_minibatches and min(o.num_iterations, o.updates_per_generation) == 1,
        "shuffle_minibatches=True has no effect because there are num_iterations={num_iterations} passes over "
        "{updates_per_generation} minibatches. Remove it, or set num_iterations and the optimizer steps of a pass "
        "(steps_per_generation) so that both are above 1.",
        example("grpo", shuffle_minibatches=True),
    ),
    when(
        lambda o: o.router_replay == "R2" and o.steps_of_a_generation == 1,
        "router_replay='R2' with one optimizer step for each generation batch: its own pass is the only one, so there "
        "are no old log-probs whose experts could be replayed. Set num_iterations or steps_per_generation above 1, or "
        "router_replay='R3'.",
        example("grpo", router_replay="R2"),
    ),
    when(
        lambda o: o.completions_of_generation % o.num_generations,
        "per_device_train_batch_size {per_device_train_batch_size} * steps_per_generation "
        "{micro_batches_per_generation} * {num_ranks} processes = {completions_of_generation} completions: must be a "
        "multiple of num_generations={num_generations}. The nearest that works is {nearest}, which is "
        "{nearest_per_process} on each process.",
        example("grpo", num_generations=3),
        nearest=_nearest_completions,
        nearest_per_process=lambda o: _nearest_completions(o) // int(o.num_ranks),
    ),
)
GENERATION_MODE_RULES = (
    when(
        lambda o: o.generation_mode != "async" and mapping_of(o, "async_kwargs"),
        "async_kwargs={async_kwargs!r} with generation_mode={generation_mode!r}: only 'async' reads it. Set "
        "generation_mode='async', or remove async_kwargs.",
        example("grpo", use_vllm=True, async_kwargs={"order": "ready"}),
    ),
    when(
        lambda o: o.increase_batch_size_on_plateau and o.generation_mode != "sync",
        "increase_batch_size_on_plateau={increase_batch_size_on_plateau} with generation_mode={generation_mode!r}: "
        "completions are requested before it is known how many the next step needs. Use generation_mode='sync'.",
        example("grpo", increase_batch_size_on_plateau=2, generation_mode="overlap", use_vllm=True),
    ),
    when(
        lambda o: o.ema_decay is not None and o.generation_mode == "async",
        "ema_decay={ema_decay} with generation_mode='async': completions for training that are being sampled during "
        "an evaluation would come from the average. Use generation_mode='sync' or 'overlap'.",
        example("grpo", ema_decay=0.9, generation_mode="async", use_vllm=True),
    ),
    when(
        lambda o: o.generation_mode == "overlap" and o.steps_of_a_generation > 1,
        "generation_mode='overlap' with {steps_of_a_generation} optimizer steps for each generation: the first would "
        "be taken while completions of the others are still being sampled. Set num_iterations=1 and "
        "steps_per_generation=gradient_accumulation_steps, or use generation_mode='async'.",
        example("grpo", generation_mode="overlap", num_iterations=2, use_vllm=True),
    ),
    when(
        lambda o: o.generation_mode == "overlap" and o.completions_per_rank % o.num_generations,
        "generation_mode='overlap' with {completions_per_rank} completions on each process and "
        "num_generations={num_generations}: a group is trained on as it arrives, so each process needs the same "
        "number of groups. Make per_device_train_batch_size * steps_per_generation a multiple of num_generations, or "
        "use generation_mode='sync'.",
        example("grpo", processes=2, generation_mode="overlap", per_device_train_batch_size=4, use_vllm=True),
    ),
    when(
        lambda o: next(iter(o.needs_whole_batch.items()), None) if o.generation_mode == "overlap" else None,
        "generation_mode='overlap' with {found[0]}: the update from a group then depends on the whole batch, but "
        "training on groups starts before it is complete. {found[1]}",
        example("grpo", generation_mode="overlap", dynamic_sampling=True, use_vllm=True),
    ),
    _chooses_prompts(
        "dynamic_sampling", example("grpo", dynamic_sampling=True, generation_mode="async", use_vllm=True)
    ),
    _chooses_prompts("curriculum", example("grpo", curriculum="band", generation_mode="async", use_vllm=True)),
    when(
        lambda o: o.generation_mode == "async" and o.max_staleness < o.steps_of_a_generation,
        "max_staleness={max_staleness}: must be at least {steps_of_a_generation}, the optimizer steps of one "
        "generation, or nothing can be generated ahead.",
        example("grpo", generation_mode="async", max_staleness=1, num_iterations=2, use_vllm=True),
    ),
    when(
        lambda o: o.generation_mode == "async" and o.generations_ahead == 0,  # in_order: see the rule before
        "max_staleness={max_staleness} with async_kwargs: order='ready': must be at least {needed}, the optimizer "
        "steps of two generations, or no group could be taken before another. Raise it, or use order='in_order'.",
        example("grpo", generation_mode="async", max_staleness=1, async_kwargs={"order": "ready"}, use_vllm=True),
        needed=lambda o: 2 * o.steps_of_a_generation,
    ),
)
AT_K_RULES = (
    when(
        lambda o: o.at_k_params.k is None and not o.at_k_params.is_default,
        "pass_at_k_kwargs={pass_at_k_kwargs!r} has no effect because it has no k. Add one: k=[1, 8].",
        example("grpo", pass_at_k_kwargs={"threshold": 0.5}),
    ),
    when(
        lambda o: _meaningless_k(o) is not None,
        "pass_at_k_kwargs: k={wrong}: must be from 1 to {samples_per_evaluated_prompt}, the samples of each prompt in "
        "evaluations. Set num_generations_eval={enough}, or lower k.",
        example("grpo", pass_at_k_kwargs={"k": [64]}),
        wrong=_meaningless_k,
        enough=lambda o: max(_meaningless_k(o) or 0, 1),
    ),
)


def guides_of(o: Any) -> dict[str, Any]:
    """What constrains completions, by the name of its option."""
    guides = {
        "vllm_guided_decoding_regex": o.vllm_guided_decoding_regex,
        "guided_json": o.vllm_params.guided_json,
        "guided_grammar": o.vllm_params.guided_grammar,
    }
    return {name: guide for name, guide in guides.items() if guide is not None}


def unscored(o: Any) -> str:
    """The options that make the sampler's distribution differ from the one that the trainer scores, as text."""
    cuts = cuts_of(o) if not o.scores_truncated else {}
    return ", ".join(f"{name}={value!r}" for name, value in (cuts | guides_of(o)).items())


# Names of TRL, each with a value and what `prefrl vllm-serve` calls it.
_OF_SERVER: tuple[tuple[str, Any, str], ...] = (
    ("vllm_model_impl", "transformers", "model-impl"),
    ("vllm_tensor_parallel_size", 2, "tensor_parallel_size"),
    ("vllm_max_model_length", 512, "max_model_len"),
)
SAMPLER_RULES = (
    *(
        rule
        for name, value, option in _OF_SERVER
        for rule in unset(
            {name: value},
            lambda o: True,
            f"the server is a process of its own. Give --{option} to prefrl vllm-serve.",
            example("grpo"),
            hint=True,
        )
    ),
    *unset(
        {"vllm_group_port": 51217},
        lambda o: True,
        "the trainer chooses a free port. Leave it out.",
        example("grpo"),
        hint=True,
    ),
    *unset(
        {
            "use_transformers_continuous_batching": True,
            "use_transformers_paged": True,
            "transformers_continuous_batching_config": {"block_size": 32},
        },
        lambda o: True,
        "completions are sampled by prefrl's own loop, which batches them, or on a server. Leave it out.",
        example("grpo"),
        hint=True,
    ),
    *unset(
        {"cast_lm_head_to_fp32": True},
        lambda o: True,
        "the product with the head has the precision of training, and the rest of the loss is computed in float32. "
        "Leave it out.",
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
_NEUTRAL = {"top_p": (1.0,), "top_k": (None, 0), "min_p": (None, 0), "repetition_penalty": (1.0,)}


def cuts_of(options: Any) -> dict[str, Any]:
    """The sampling options that make the sampler's distribution differ from the softmax at the temperature."""
    values = {name: getattr(options, name) for name in _NEUTRAL}
    return {name: value for name, value in values.items() if value not in _NEUTRAL[name]}
