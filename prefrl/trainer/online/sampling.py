"""What an online trainer samples and scores with: its generator, the episodes of tools and environments, rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

import datasets

from prefrl import distributed
from prefrl.data.encode import RowEncoder, row_encoder
from prefrl.data.formats import Format, get_dataset_column_names
from prefrl.data.images import ProcessingClass, image_reader, tokenizer_of
from prefrl.data.tool_calls import ToolCallReader, tool_call_reader
from prefrl.errors import ConfigError
from prefrl.models.load import arguments_for_reward
from prefrl.options.fields import warn_of_hint
from prefrl.options.names import about_evaluations, nearest
from prefrl.options.types import TRUNCATION_SIDES
from prefrl.rewards.named import named_rewards
from prefrl.rewards.runner import RewardRunner, reward_fingerprint
from prefrl.rollout.collect import Collector, CompletionSampler, RolloutSampler
from prefrl.rollout.episodes.command import CommandAgent
from prefrl.rollout.episodes.driver import EpisodeSampler
from prefrl.rollout.episodes.environment import EMPTY_PROMPT, EnvironmentKind, Seats, environment_kinds
from prefrl.rollout.episodes.play import EpisodeLimits
from prefrl.rollout.episodes.threads import MainThread
from prefrl.trainer.base_trainer import Optimizers
from prefrl.trainer.configs import PolicyGradientConfig

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase, TrainerCallback

    from prefrl.data.tools import Schema
    from prefrl.generation.base import Generator
    from prefrl.rewards.base import RewardSources
    from prefrl.trainer.configs import OnlineConfig

Tools = list[Callable[..., Any]]
# A function of a dataset row and a client, or several by the value of the dataset's column `environment`.
Agents = Callable[[Mapping[str, Any], Any], Any] | Mapping[str, Callable[[Mapping[str, Any], Any], Any]]
EnvironmentFactory = Callable[[], Any] | Mapping[str, Callable[[], Any]]


class Episodes:
    """The trainer's arguments for episodes, checked.

    Args:
        args: Options.
        tools: Functions that the model may call.
        environment_factory: A class of environments, or several by the value of the dataset's column `environment`.
        option: The name of the latter where the user has set it, for messages.

    Raises:
        ConfigError: A tool or an environment cannot be used, or options do not fit.
    """

    def __init__(
        self,
        args: OnlineConfig,
        tools: Tools | None,
        environment_factory: EnvironmentFactory | None,
        *,
        option: str = "environment_factory",
    ) -> None:
        self._args = args
        self.exist = bool(tools) or environment_factory is not None
        args.validate_episodes(has_episodes=self.exist)
        self.kinds: dict[str | None, EnvironmentKind] = {}
        self.has_environments = environment_factory is not None
        if self.exist:
            self.kinds = environment_kinds(tools, environment_factory, option=option)
            for agent in self._commands:
                agent.setup()
            self._check(args)

    def _check(self, args: OnlineConfig) -> None:
        if isinstance(args, PolicyGradientConfig) and args.loss_params.min_filter_prefix_tokens is not None:
            raise ConfigError(
                f"loss_kwargs: min_filter_prefix_tokens={args.loss_params.min_filter_prefix_tokens} with tools or "
                "environment_factory: it compares the prefixes of completions, but the replies of tools and "
                "environments differ between episodes, too. Leave it out."
            )

    @property
    def rewards(self) -> dict[str, Callable[..., Any]] | None:
        """Classes of environments that have rewards of their own, and agents, by name; None: there are none."""
        if not self.has_environments:
            return None
        code = {kind.name: kind.cls or kind.agent for kind in self.kinds.values() if kind.has_reward}
        return {name: one for name, one in code.items() if one is not None}

    @property
    def schemas(self) -> dict[str | None, list[Schema]] | None:
        """The schemas of the tools of each kind; None: there are no episodes."""
        return {name: list(kind.schemas.values()) for name, kind in self.kinds.items()} if self.exist else None

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each tool and each class of environments, by name."""
        tools = {name: tool for kind in self.kinds.values() for name, tool in kind.tools.items()}
        code: dict[str, Callable[..., Any]] = {**tools}
        own = {kind.name: kind.cls or kind.agent for kind in self.kinds.values()}
        code |= {name: one for name, one in own.items() if one is not None}
        hashes = {name: reward_fingerprint(one) for name, one in code.items()}
        for kind in self.kinds.values():  # what a class or a function always gets
            made = kind.agent or kind.make
            if isinstance(made, partial) and made.keywords:
                hashes[kind.name] += f" {made.keywords!r}"
            elif isinstance(made, CommandAgent):
                hashes[kind.name] += f" {made!r}"
        return hashes

    def training_prompts(self, dataset: Any, *, num_rows: int) -> Any:
        """The training dataset, see `with_prompts`; without one, empty prompts, which the environment fills.

        Args:
            dataset: The training dataset, or None.
            num_rows: The number of prompts if there is none.

        Raises:
            ConfigError: Without a dataset, there are several environments, or the run is limited by its epochs; or the
                command of an agent names a column that the dataset does not have.
        """
        if not self.has_environments or dataset is not None or self._args.max_steps <= 0:
            return self.with_prompts(dataset)
        if None not in self.kinds:
            raise ConfigError(
                "train_dataset=None with several environments: the column 'environment' of a dataset names the "
                "environment of each episode. Pass train_dataset, or a single environment."
            )
        if self._args.stop_at_first_limit:
            raise ConfigError(
                "stop_at_first_limit=True without train_dataset: prompts that an environment brings have no epochs. "
                "Leave it False; max_steps ends the run."
            )
        return datasets.Dataset.from_dict({"prompt": [EMPTY_PROMPT] * num_rows})

    def with_prompts(self, dataset: Any) -> Any:
        """A dataset, or several by name, with empty prompts where environments bring their own."""
        if isinstance(dataset, Mapping):
            return {name: self.with_prompts(one) for name, one in dataset.items()}
        is_dataset = isinstance(dataset, datasets.Dataset | datasets.IterableDataset)
        if is_dataset:
            self._check_columns(get_dataset_column_names(dataset))
        if not self.has_environments or not is_dataset or "prompt" in get_dataset_column_names(dataset):
            return dataset
        if isinstance(dataset, datasets.IterableDataset):
            return dataset.map(lambda row: {**row, "prompt": EMPTY_PROMPT})
        return dataset.add_column("prompt", [EMPTY_PROMPT] * len(dataset))

    @property
    def _commands(self) -> list[CommandAgent]:
        return [kind.agent for kind in self.kinds.values() if isinstance(kind.agent, CommandAgent)]

    def _check_columns(self, columns: Sequence[str]) -> None:
        for agent in self._commands:
            if missing := sorted(agent.columns - {*columns}):
                remedy = nearest(missing[0], columns)
                raise ConfigError(f"agent={agent.command!r}: the dataset has no column {missing[0]!r}. {remedy}")

    def sampler(self, processing_class: ProcessingClass, generator: Callable[[], Generator]) -> RolloutSampler:
        """Samples rollouts as the arguments say.

        Raises:
            ConfigError: No format of tool calls fits the tokenizer's chat template.
        """
        tokenizer = tokenizer_of(processing_class)
        if not self.exist:
            hidden = [] if self._args.include_stop_str_in_output else self._args.stop or []
            return CompletionSampler(generator, tokenizer, image_reader(processing_class), hidden)
        encoder = self._encoder(processing_class)
        return EpisodeSampler(
            self.kinds,
            self.readers(processing_class),
            encoder=encoder,
            generator=generator,
            limits=_limits(self._args, tokenizer),
        )

    def readers(self, processing_class: ProcessingClass) -> dict[str | None, ToolCallReader | None]:
        """What reads the calls of each kind; None: it has no tools.

        Raises:
            ConfigError: No format of tool calls fits the tokenizer's chat template.
            DataError: There is no chat template.
        """
        encoder = self._encoder(processing_class)
        return {
            name: tool_call_reader(
                encoder.template({"environment": name}), kind.schemas, tool_parser=self._args.tool_parser
            )
            if kind.schemas
            else None
            for name, kind in self.kinds.items()
        }

    def _encoder(self, processing_class: ProcessingClass) -> RowEncoder:
        kwargs = cast("dict[str, Any] | None", self._args.chat_template_kwargs)
        return row_encoder(
            Format("prompt_only", ("prompt",), "conversational"), processing_class, kwargs, self.schemas
        )

    def close(self) -> None:
        """Close what was made to find out what the environments are, if no episode has had it."""

        async def closed() -> None:
            seats = Seats(MainThread(), self._args.tool_timeout)
            for kind in self.kinds.values():
                while kind.unused:
                    seats.take(kind)
            await seats.close()

        asyncio.run(closed())


def _limits(args: OnlineConfig, tokenizer: PreTrainedTokenizerBase) -> EpisodeLimits:
    longest_token = max(map(len, tokenizer.get_vocab()), default=1)
    return EpisodeLimits(
        max_prompt_length=args.max_prompt_length,
        truncation=TRUNCATION_SIDES[args.truncation_mode],
        max_tokens=args.longest_completion,
        max_characters=(args.longest_completion + 1) * longest_token,
        max_turns=args.max_turns,
        max_tool_calling_iterations=args.max_tool_calling_iterations,
        tool_timeout=args.tool_timeout,
        episode_timeout=args.episode_timeout,
        tool_error=args.tool_error,
        environment_error=args.environment_error,
        reasoning_in_history=args.reasoning_in_history,
        max_concurrent_environments=args.max_concurrent_environments,
        tool_parser=args.tool_parser,
    )


class OnlineArguments(TypedDict, total=False):
    """See `OnlineTrainer`."""

    train_dataset: Dataset | IterableDataset | None
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None
    processing_class: ProcessingClass | None
    reward_processing_classes: ProcessingClass | list[ProcessingClass | None] | None
    callbacks: list[TrainerCallback] | None
    optimizers: Optimizers
    quantization_config: BitsAndBytesConfig | None
    peft_config: PeftConfig | None
    tools: Tools | None
    environment_factory: EnvironmentFactory | None
    eval_reward_funcs: RewardSources | None
    agent: Agents | None


def reward_runner(
    args: PolicyGradientConfig,
    sources: RewardSources,
    environments: Mapping[str, Callable[..., Any]] | None,
    *,
    processors: ProcessingClass | list[ProcessingClass | None] | None = None,
    of_evaluations: bool = False,
) -> RewardRunner:
    """The rewards of training, or those of evaluations.

    Args:
        args: Options.
        sources: What the trainer is given.
        environments: Classes of environments that have rewards of their own, by name; None: there are no environments.
        processors: Tokenizers or processors of reward models.
        of_evaluations: Whether they have `eval_reward_weights`. Then none has to be one for `reward_num_workers`.

    Raises:
        ConfigError: One cannot work, or options do not fit.
    """
    return RewardRunner(
        named_rewards(sources),
        weights=args.eval_reward_weights if of_evaluations else args.reward_weights,
        timeout=args.reward_timeout,
        num_workers=args.reward_num_workers,
        needs_workers=not of_evaluations,
        on_error=args.on_reward_error,
        processing_classes=processors,
        environments=environments,
        needed=args.needs_rewards,
        device=args.device,
        model_init_kwargs=arguments_for_reward(cast("dict[str, Any] | None", args.model_init_kwargs)),
        model_kwargs=asdict(args.reward_model_params) if args.reward_model_kwargs else None,
        warn=partial(warn_of_hint, args),
    )


def evaluation_rewards(
    args: PolicyGradientConfig, sources: RewardSources | None, environments: Mapping[str, Callable[..., Any]] | None
) -> RewardRunner | None:
    """The rewards that evaluations have instead of those of training; None: they have the same.

    Raises:
        ConfigError: See `reward_runner`; or there are weights, but no rewards.
    """
    if sources is not None:
        with about_evaluations():
            return reward_runner(args, sources, environments, of_evaluations=True)
    if args.eval_reward_weights is not None:
        raise ConfigError(
            f"eval_reward_weights={args.eval_reward_weights} has no effect because evaluations have the rewards of "
            "training. Give eval_reward_funcs, or remove it."
        )
    return None


def collector_of(
    args: PolicyGradientConfig,
    sampler: RolloutSampler,
    state: Callable[[], object],
    clock: Callable[[], float],
    rewards: RewardRunner,
) -> Collector:
    """See `Collector`; `state` is asked each time, because HuggingFace makes a new one for each training.

    Ranks may share the weights of reward models, so that they run equally many passes.
    """
    if not rewards.models:
        return Collector(rewards, sampler, state, clock)
    company = partial(distributed.in_company, device=args.device)
    return Collector(rewards, sampler, state, clock, lambda: company(rewards.passes))
