"""Options of trainers that learn from their own completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import (
    about,
    apply,
    default_of,
    example,
    json_mapping,
    mapping_of,
    opt,
    parse_json,
    unset,
    warn_of_hint,
    when,
)
from prefrl.options.generation_rules import (
    AT_K_RULES,
    GENERATION_MODE_RULES,
    GENERATION_SIZE_RULES,
    LEAST_TEMPERATURE,
    NUMBERS_RULES,
    PROMPTS_RULES,
    SAMPLER_RULES,
    STOP_RULES,
)
from prefrl.options.params import KwargsValue, ParamsOf, kwargs
from prefrl.options.rollout import AtKParams, EvalSamplingParams, RolloutOptions
from prefrl.options.server_rules import NO_SERVER_RULES, OWN_DEVICE_RULES, SERVER_RULES, SHARED_DEVICE_RULES
from prefrl.options.types import (
    BatchSize,
    EnvironmentErrorMode,
    Length,
    LengthBound,
    NumSamples,
    ReasoningInHistory,
    Seconds,
    ToolErrorMode,
    TruncationMode,
)

LOCAL_RULES = (
    *unset(
        {"ds3_gather_for_generation": False, "cache_implementation": "dynamic"},
        lambda o: o.use_vllm,
        "use_vllm=True: a server samples. Remove it.",
        example("grpo", use_vllm=True),
        hint=True,
    ),
    when(
        lambda o: o.cache_implementation == "offloaded" and o.device.type == "cpu",
        "cache_implementation='offloaded' has no effect because this run is on the CPU, where the cache is in host "
        "memory anyway. Leave it out.",
        example("grpo", cache_implementation="offloaded"),
        hint=True,
        resets={"cache_implementation": None},
    ),
    when(
        lambda o: o.cache_implementation == "static",
        "cache_implementation='static' has no effect because the sampler's cache grows with its completions. Leave "
        "it out.",
        example("grpo", cache_implementation="static"),
        hint=True,
        resets={"cache_implementation": None},
    ),
)


@dataclass(init=False, repr=False, eq=False)
class OnlineOptions(RolloutOptions):
    """Episodes, and how completions are sampled in training and evaluations, and how they are generated and shown."""

    hints: ClassVar[Mapping[str, Any]] = {
        "tool_parser": dict[str, Any] | str | Callable[[str], Any] | None,
    }
    best_metric: ClassVar[str] = "reward"
    learns_from_rewards: ClassVar[bool] = True
    spike_metrics: ClassVar[tuple[str, ...]] = ("grad_norm", "kl")

    max_turns: Annotated[int, Ge(1)] | None = opt(
        None,
        "Maximum number of the model's turns in an episode. By default, there is no limit.",
        needs=["episodes"],
    )
    max_tool_calling_iterations: Annotated[int, Ge(0)] | None = opt(
        None,
        "Maximum number of turns per episode whose tool calls are run. By default, there is no limit.",
        needs=["episodes"],
    )
    tool_timeout: Seconds = opt(
        60.0,
        "Time limit, in seconds, for each call of a tool or of an environment's method.",
        decides=False,
        needs=["episodes"],
    )
    episode_timeout: Seconds | None = opt(
        None,
        "Time limit of an episode, in seconds. When it is over, the episode ends with the turns that it has. By "
        "default, there is no limit.",
        needs=["episodes"],
    )
    max_concurrent_environments: Annotated[int, Ge(1)] | None = opt(
        None,
        "Maximum number of episodes that each process runs at the same time. By default, it runs all of them.",
        decides=False,
        needs=["episodes"],
    )
    tool_error: ToolErrorMode = opt(
        "tell",
        "What happens if a tool fails or exceeds its time limit: the model is told about it ('tell'), or the run ends "
        "('raise').",
        needs=["episodes"],
    )
    environment_error: EnvironmentErrorMode = opt(
        "retry",
        "What happens if one of an environment's own methods fails or exceeds its time limit. With 'retry', the "
        "episode starts again with the same seed, at most twice, and is then dropped. With 'drop', the episode is "
        "neither trained on nor part of a baseline. With 'raise', the run ends.",
        needs=["episodes"],
    )
    reasoning_in_history: ReasoningInHistory = opt(
        "template",
        "How much of the reasoning of earlier turns the model sees in later ones: what the chat template renders "
        "('template'), all of it ('keep'), or nothing ('strip').",
        needs=["episodes"],
    )
    tool_parser: dict[str, Any] | str | None = opt(
        None,
        "How tool calls are parsed: the name of a format, a response template of transformers (JSON on the command "
        "line), or, in Python, a function of the sampled text. The default is the first known format that correctly "
        "parses a call rendered by the chat template.",
        needs=["episodes"],
    )
    eval_sampling_kwargs: KwargsValue = kwargs(
        "How completions are sampled in evaluations, in addition to temperature_eval and num_generations_eval. What "
        "is not set is as in training.",
        EvalSamplingParams,
        decides=False,
    )
    pass_at_k_kwargs: KwargsValue = kwargs(
        "Compute pass@k, best@k and maj@k in evaluations, with 95% intervals; see docs/evaluation.md.",
        AtKParams,
        decides=False,
    )
    log_val_generations: Annotated[int, Ge(0)] = opt(
        0,
        "Number of completions of each evaluation that are printed as a table and written to the folder evaluations. "
        "The prompts are the same each time.",
        decides=False,
    )
    max_prompt_length: Length | None = opt(512, "Maximum prompt length in tokens. None means no limit.")
    truncation_mode: TruncationMode = opt(
        "keep_end", "How to handle longer prompts: keep their end, keep their start, or stop with an error."
    )
    filter_overlong_prompts: bool = opt(False, "Drop prompts longer than max_prompt_length from the dataset.")
    num_generations: NumSamples = opt(8, "Completions per prompt: the size of a group.")
    num_generations_eval: NumSamples | None = opt(
        None,
        "Completions per prompt in evaluations. The default is num_generations.",
        decides=False,
    )
    max_completion_length: Length | None = opt(
        256, "Maximum completion length in tokens. None means what max_prompt_length leaves of the model's context."
    )
    temperature: Annotated[float, Ge(LEAST_TEMPERATURE), Le(100)] = opt(
        0.9, "Sampling temperature. Log-probs in losses are computed at the same temperature."
    )
    temperature_eval: Annotated[float, Ge(0), Le(100)] | None = opt(
        None,
        "Temperature in evaluations, where 0 means greedy decoding. The default is the value of temperature.",
        decides=False,
    )
    top_p: Annotated[float, Ge(0.001), Le(1)] = opt(
        1.0, "Sample from the smallest set of tokens whose total probability is at least this."
    )
    top_k: Annotated[int, Ge(0)] | None = opt(0, "Sample from the k most likely tokens. 0 and None mean all tokens.")
    min_p: Annotated[float, Ge(0), Le(1)] | None = opt(
        None, "Sample from tokens whose probability is at least this fraction of the most likely token's."
    )
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = opt(
        1.0, "A value above 1 makes tokens that already occur in the text less likely."
    )
    stop: list[str] | None = opt(
        None,
        "A completion ends with the token that completes one of these strings in its text. The token belongs to the "
        "completion as a whole, and nothing is sampled after it.",
    )
    include_stop_str_in_output: bool = opt(
        True,
        "Whether rewards see the stop string at the end of the text. What is trained on is the same in both cases.",
    )
    ignore_eos: bool = opt(
        False,
        "Sample on after an end-of-sequence token, up to max_completion_length or a stop string, and train on all of "
        "it.",
    )
    learning_rate: float = opt(1e-6, "Initial learning rate.")
    generation_batch_size: BatchSize | None = opt(
        None,
        "Completions of a generation batch, over all processes. By default, it follows from steps_per_generation.",
        decides=False,
    )
    steps_per_generation: Annotated[int, Ge(1), Le(10**5)] | None = opt(
        None,
        "Micro-batches per generation batch and process, a multiple of gradient_accumulation_steps. By default, and "
        "if it is a divisor of that, each optimizer step has one generation batch, whose completions are all sampled "
        "with the same weights.",
        decides=False,
    )
    chat_template_kwargs: dict[str, Any] | str | None = opt(
        None, "Arguments for the chat template. On the command line, give it as JSON."
    )
    num_iterations: Annotated[int, Ge(1), Le(10**6)] = opt(1, "Number of passes over each generation batch.")
    shuffle_minibatches: bool = opt(
        False,
        "Visit the minibatches of a generation batch in a new random order in each pass after the first.",
    )
    router_replay: Literal["R2", "R3", True, False] | None = opt(
        None,
        "Which experts the routers of a mixture use in training: those that the sampler chose for each token ('R3', "
        "which is True), or those of the trainer's own pass that computes the old log-probs ('R2'); see docs/moe.md. "
        "With False, each pass chooses. The default is 'R3' where model and sampler can, with a warning where not.",
    )
    shuffle_dataset: bool = opt(True, "Visit prompts in a new random order each epoch.")
    log_completions: bool = opt(
        False,
        "Print completions of each generation batch as a table. All of them are sent to those trackers in report_to "
        "that have tables.",
        decides=False,
    )
    journal_keep: Annotated[int, Ge(0)] = opt(
        100,
        "Number of scored generation batches to keep in the folder completions, in addition to those that a resumed "
        "run needs. At 0 none are written, and a resumed run generates them again.",
        decides=False,
    )
    num_completions_to_print: Annotated[int, Ge(1)] | None = opt(
        4,
        "How many completions log_completions prints: the best and the worst of each prompt, up to this number. None "
        "means all.",
        decides=False,
        needs=["log_completions"],
    )
    log_unique_prompts: bool = opt(
        False, "Print only one completion per prompt with log_completions.", decides=False, needs=["log_completions"]
    )

    eval_sampling_params = ParamsOf("eval_sampling_kwargs", EvalSamplingParams)
    at_k_params = ParamsOf("pass_at_k_kwargs", AtKParams)

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """Options with which training on a group has to wait for the whole batch, and the remedy for each."""
        given = {
            "reward_shaping_kwargs: normalize": self.shaping_params.normalize,
            "dynamic_sampling": self.dynamic_sampling,
            "curriculum": self.curriculum,
        }
        return {f"{name}={value!r}": "Remove it." for name, value in given.items() if value}

    @property
    def micro_batches_per_generation(self: Any) -> int:
        """The effective value of `steps_per_generation`: at least that of an optimizer step."""
        steps, accumulation = self.steps_per_generation, int(self.gradient_accumulation_steps)
        if self.generation_batch_size is not None:
            steps = self.generation_batch_size // int(self.rows_per_micro_batch * self.num_ranks)
        return accumulation if steps is None or accumulation % steps == 0 else int(steps)

    @property
    def updates_per_generation(self: Any) -> int:
        """Optimizer steps in one pass over a generation batch."""
        return int(self.micro_batches_per_generation // self.gradient_accumulation_steps)

    @property
    def samples_per_evaluated_prompt(self) -> int:
        """The effective value of `num_generations_eval`."""
        return int(self.num_generations_eval or self.num_generations)

    @property
    def completions_per_rank(self) -> int:
        """Completions of a generation batch for one process, or one team of processes that share rows."""
        return int(self.rows_per_micro_batch) * self.micro_batches_per_generation

    @property
    def completions_of_generation(self: Any) -> int:
        """Completions of a generation batch, over all processes."""
        return int(self.completions_per_rank * self.num_ranks)

    @property
    def steps_of_a_generation(self) -> int:
        """Optimizer steps that learn from one generation batch."""
        return self.updates_per_generation * int(self.num_iterations)

    @property
    def generations_ahead(self) -> int:
        """Generation batches that may be requested in advance, in addition to the one that training needs.

        With order='ready', half of those that `max_staleness` allows: with all of them, each group would be due in the
        batch that it was asked for, and none could be taken before another.
        """
        if self.generation_mode != "async":
            return 0
        allowed = int(self.max_staleness) // self.steps_of_a_generation
        return allowed // 2 if self.async_params.order == "ready" else allowed

    @property
    def longest_completion(self) -> int:
        """`max_completion_length`, which is a number once a trainer has loaded the model."""
        if self.max_completion_length is None:
            raise ConfigError(
                "max_completion_length=None: a trainer sets it only after it has loaded the model. Set it."
            )
        return self.max_completion_length

    @property
    def scoring_temperature(self) -> float:
        """The sampling temperature: the distribution that is sampled from enters the losses."""
        return self.temperature

    @property
    def length_bound(self) -> LengthBound:
        """See `BaseConfig.length_bound`."""
        options = "max_prompt_length or max_completion_length"
        sampled = max(self.longest_completion, self.eval_sampling_params.max_completion_length or 1)
        return LengthBound(self.max_prompt_length, options, sampled=sampled)

    @property
    def prompts_per_evaluation_batch(self: Any) -> int:
        """Prompts of an evaluation batch on one process."""
        return max(1, int(self.per_device_eval_batch_size // self.samples_per_evaluated_prompt))

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt also needs a greedy completion."""
        return False

    @property
    def needs_rewards(self) -> bool:
        """Whether there must be at least one reward."""
        return self.learns_from_rewards

    @property
    def needs_scores_first(self) -> bool:
        """Whether the learning signal depends on log-probs of the policy before its first update from the batch."""
        return False

    def forget_episodes(self) -> None:
        """Reset all options of episodes, because what they played is known and nothing is played again."""
        for field in self._of_episodes():
            setattr(self, field.name, default_of(field))

    def validate_episodes(self, *, has_episodes: bool) -> None:
        """Warn of options of episodes if there are none, and refuse what episodes exclude; read a JSON `tool_parser`.

        Raises:
            ConfigError: An option cannot be combined with episodes, or has no effect with `strict_options`.
        """
        if isinstance(self.tool_parser, str) and self.tool_parser.lstrip().startswith("{"):
            self.tool_parser = json_mapping(self.tool_parser, "tool_parser")
        if has_episodes and not self.include_stop_str_in_output:
            raise ConfigError(
                "include_stop_str_in_output=False with episodes: the next turn follows what was sampled, and so does "
                "what rewards see. Leave it out."
            )
        if has_episodes and (length := self.eval_sampling_params.max_completion_length) is not None:
            raise ConfigError(
                f"eval_sampling_kwargs: max_completion_length={length} with episodes: the turns of an episode share "
                "max_completion_length, also in evaluations. Remove it."
            )
        if has_episodes and self.ignore_eos and not self.stop:
            raise ConfigError(
                "ignore_eos=True with episodes: only max_completion_length would end a turn, so there would be no "
                "second one. Remove it, or set stop to strings that end a turn."
            )
        for field in self._of_episodes() if not has_episodes else ():
            if (value := getattr(self, field.name)) != default_of(field):
                warn_of_hint(
                    self,
                    f"{field.name}={value!r} has no effect because there are no episodes. Set environment or tools "
                    "(in Python, environment_factory or tools), or leave it out.",
                )

    def _of_episodes(self) -> list[dataclasses.Field[Any]]:
        return [field for field in dataclasses.fields(self) if "episodes" in about(field).needs]

    def take_other_forms(self) -> None:
        """See `BaseOptions.take_other_forms`: also the keys of TRL's `generation_kwargs`."""
        super().take_other_forms()
        if self.generation_kwargs is not None:
            self._take_generation_kwargs()

    def _take_generation_kwargs(self) -> None:
        same = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "cache_implementation",
            "stop",
            "ignore_eos",
        )
        options = dict(zip(same, same, strict=True)) | {"stop_strings": "stop"}
        options |= dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length")
        anyway = {"do_sample": True, "num_beams": 1, "n": 1, "num_return_sequences": 1, "use_cache": True}
        defaults = {field.name: default_of(field) for field in dataclasses.fields(self)}
        known = {key: option for key, option in options.items() if option in defaults}
        for key, value in mapping_of(self, "generation_kwargs").items():
            if key in anyway and value == anyway[key]:
                continue
            if key not in known:
                raise ConfigError(
                    f"generation_kwargs: {key}={value!r} has no counterpart here. Known: {', '.join(known)}."
                )
            option = known[key]
            if (other := getattr(self, option)) not in (defaults[option], value):
                raise ConfigError(
                    f"generation_kwargs: {key}={value!r} and {option}={other!r}: given both ways. Remove one of them."
                )
            setattr(self, option, value)
        self.generation_kwargs = None

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        parse_json(self, "chat_template_kwargs")
        if self.knows_sizes:
            apply(self, GENERATION_SIZE_RULES)
        apply(self, SAMPLER_RULES, PROMPTS_RULES, NUMBERS_RULES, STOP_RULES, AT_K_RULES, LOCAL_RULES)
        shares_device = self.use_vllm and self.vllm_mode == "colocate"
        apply(self, SHARED_DEVICE_RULES if shares_device else OWN_DEVICE_RULES)
        apply(self, SERVER_RULES if self.use_vllm else NO_SERVER_RULES)
        if self.knows_sizes:
            apply(self, GENERATION_MODE_RULES)

    @property
    def scores_truncated(self) -> bool:
        """Whether losses score the truncated distribution with top_k, top_p or min_p, as it was sampled from."""
        return False
