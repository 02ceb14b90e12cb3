"""Run all rewards on a batch, and recognize whether a reward is the one that it was."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards.base import (
    Grader,
    RewardFunction,
    RewardLog,
    RewardSource,
    RewardSources,
    checked_values,
    excerpt,
    is_number,
)
from prefrl.rewards.call import (
    Call,
    ComputeScore,
    EventLoopThread,
    Outcome,
    call_all,
    is_async,
    is_compute_score,
    result_of,
)
from prefrl.rewards.confinement import own_randomness
from prefrl.rewards.model import ModelReward
from prefrl.types import Episode

if TYPE_CHECKING:
    from prefrl.rewards.model import ProcessingClass
    from prefrl.rewards.pool import RewardPool


def reward_fingerprint(function: Callable[..., Any]) -> str:
    """A hash of the source of a function or a class, or of the class of another callable; for a model, its name.

    Parameters of graders that decide their values are part of it. What the function calls is not.
    """
    if isinstance(function, ModelReward):
        return str(function.model.config.name_or_path)
    while isinstance(function, functools.partial | ComputeScore):
        function = function.func
    if isinstance(function, Grader):
        return _hashed(json.dumps([type(function).__name__, function.settings()], default=reward_fingerprint))
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        text = inspect.getsource(target)
    except (OSError, TypeError):  # defined in a shell
        text = f"{target.__module__}.{target.__qualname__}"
    return _hashed(text)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


logger = logging.getLogger(__name__)

# With on_error="skip", a reward that fails in so many batches one after another ends the run.
_MOST_FAILURES = 10

# What rewards get besides the columns of the dataset.
_STANDARD = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
_ENVIRONMENTS, _RESULT = "environments", "result"
# Columns that rewards get under another name, or not at all.
_HIDDEN = ("prompt", "prompt_ids", "unexpanded_ids")


def _of_episodes(environments: Mapping[str, Callable[..., Any]] | None) -> tuple[str, ...]:
    """What rewards get of episodes: the environments and, of agents, which are functions, what they returned."""
    if environments is None:
        return ()
    return (_ENVIRONMENTS,) if all(map(inspect.isclass, environments.values())) else (_ENVIRONMENTS, _RESULT)


@dataclass(frozen=True, slots=True)
class RewardScores:
    """The values of K rewards for B completions, and what the functions logged."""

    by_name: dict[str, list[float | None]]  # K entries of B values, in the order of the rewards
    metrics: dict[str, float] = field(default_factory=dict)  # means of the values passed to log_metric
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns of B values, passed to log_extra


@dataclass(frozen=True, slots=True)
class _Reward:
    name: str
    function: Callable[..., Any]
    required: frozenset[str]  # parameters without default
    accepted: frozenset[str] | None  # parameter names; None: any, because of **columns
    is_async: bool


class RewardRunner:
    """Calls one or several rewards, and raises an error for anything that is not a valid reward.

    Args:
        reward_funcs: One or several functions `f(prompts, completions, completion_ids, **columns)`, sync or async, and
            sequence-classification models by name, folder or instance. A mapping with functions as values gives them
            names; one with numbers as values gives its keys, which are rewards, their weights.
        weights: K weights. None means 1 each.
        timeout: Seconds for one function and one batch. None means no limit.
        num_workers: Processes in which plain functions score, each the completions of one prompt at a time. With 0,
            they run in this process. Reward models, async functions, and rewards that read environments stay here.
        needs_workers: Whether it is an error if `num_workers` is given and none of the rewards can use them.
        on_error: What happens if a function fails. "raise" raises its error. "skip" makes the function's values for
            that batch None, and raises an error only after 10 such batches in a row.
        processing_classes: Tokenizers of reward models, or processors of those that read images: one for all of them,
            or K entries with None for functions and for models that bring their own.
        columns: Columns of the dataset, if they are already known.
        environments: Classes of environments that have rewards of their own, and functions of agents, by name. Each is
            one more reward, of weight 1, after the others. None means there are none, so rewards cannot ask for them.
            With agents, rewards get what each has returned as `result`.
        needed: Whether there must be at least one reward.
        device: Device for reward models. By default, they stay where they are.
        model_init_kwargs: See `ModelReward`. They are used for models given by name or folder.
        model_kwargs: Other arguments of `ModelReward`, for models that are not given as its instances.
        warn: Is told of what has no effect. By default, it is logged.
    Raises:
        ConfigError: There are no rewards, one cannot work, or weights, timeout or tokenizers do not match them.
        ImportError: A reward needs a package that is not installed.
    """

    def __init__(  # noqa: PLR0913 - one argument for each option of the user
        self,
        reward_funcs: RewardSources | tuple[RewardSource, ...] | Mapping[str, RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        timeout: float | None = 600.0,
        num_workers: int = 0,
        needs_workers: bool = True,
        on_error: Literal["raise", "skip"] = "raise",
        processing_classes: ProcessingClass | Sequence[ProcessingClass | None] | None = None,
        columns: Collection[str] | None = None,
        environments: Mapping[str, Callable[..., Any]] | None = None,
        needed: bool = True,
        device: torch.device | str | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._warn, self._told_of_columns = warn, False
        self._environments: dict[str, Callable[..., Any]] = dict(environments or {})
        self._standard = (*_STANDARD, *_of_episodes(environments))
        if isinstance(reward_funcs, Mapping) and any(map(is_number, reward_funcs.values())):
            weights = _given_weights(reward_funcs, weights)
            reward_funcs = cast("list[RewardSource]", [*reward_funcs])
        if isinstance(reward_funcs, Mapping):
            sources: list[RewardSource] = list(cast("Mapping[str, RewardFunction]", reward_funcs).values())
        else:
            sources = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if needed and not sources and not self._environments:
            raise ConfigError(
                "reward_funcs=[]: at least one reward is needed, or an environment_factory whose environments have "
                "get_reward"
            )
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"reward_timeout={timeout}: needs to be > 0 seconds, or None for no limit")
        self.timeout = timeout
        self._skips_errors = on_error == "skip"
        self._failures: Counter[str] = Counter()  # batches one after another in which a reward failed
        self._warned: set[str] = set()  # of errors of these rewards
        self.weights = _weights(weights, len(sources)) + [1.0] * len(self._environments)
        is_model = [isinstance(source, str | os.PathLike | nn.Module) for source in sources]
        if model_kwargs and not any(is_model):
            raise ConfigError(
                f"reward_model_kwargs={dict(model_kwargs)} has no effect: no reward is a model. Remove it"
            )
        tokenizers = _tokenizers(processing_classes, is_model, warn)
        reward_of_model = functools.partial(ModelReward, device=device, **(model_kwargs or {}))
        reward_of_name = functools.partial(reward_of_model, model_init_kwargs=model_init_kwargs)
        functions = [
            _function(source, reward_of_model if isinstance(source, nn.Module) else reward_of_name, tokenizer)
            for source, tokenizer in zip(sources, tokenizers, strict=True)
        ]
        names = _unique(map(str, reward_funcs) if isinstance(reward_funcs, Mapping) else map(_name, functions))
        self._rewards = [_inspected(name, function) for name, function in zip(names, functions, strict=True)]
        # K names. A second reward of the same name is `name_2`.
        self.names = _unique([*(reward.name for reward in self._rewards), *self._environments])
        self._loop = EventLoopThread()
        self._pool = self._make_pool(num_workers, is_needed=needs_workers) if num_workers else None
        if columns is not None:
            self.check_columns(columns)

    def _make_pool(self, num_workers: int, *, is_needed: bool) -> RewardPool | None:
        from prefrl.rewards.pool import RewardPool, can_be_sent  # few runs have one

        of_episodes = set(self._standard) - set(_STANDARD)  # they cannot be sent to other processes
        functions = {
            reward.name: (reward.function, reward.accepted)
            for reward in self._rewards
            if not reward.is_async
            and not isinstance(reward.function, ModelReward)
            and not (of_episodes and (reward.accepted is None or of_episodes & set(reward.accepted)))
            and not (isinstance(reward.function, Grader) and not can_be_sent(reward.function))
        }
        if not functions and not is_needed:
            return None
        if not functions:
            raise ConfigError(
                f"reward_num_workers={num_workers} has no effect: none of the rewards {self.names} is a plain "
                "function that other processes can run. Set it to 0"
            )
        self._pooled = frozenset(functions)
        return RewardPool(functions, num_workers=num_workers, timeout=self.timeout)

    @property
    def required(self) -> frozenset[str]:
        """Arguments that the rewards require."""
        return frozenset[str]().union(*(reward.required for reward in self._rewards))

    @property
    def fingerprints(self) -> dict[str, str]:
        """K hashes by name; see `reward_fingerprint`."""
        functions = [*(reward.function for reward in self._rewards), *self._environments.values()]
        return {name: reward_fingerprint(f) for name, f in zip(self.names, functions, strict=True)}

    @property
    def models(self) -> list[ModelReward]:
        """The rewards that are models."""
        return [reward.function for reward in self._rewards if isinstance(reward.function, ModelReward)]

    @property
    def passes(self) -> list[tuple[nn.Module, Callable[[], None]]]:
        """Each model with a function that runs one pass of it without giving a reward."""
        return [(reward.model, reward.idle_pass) for reward in self.models]

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that a dataset has the columns that the rewards need.

        Raises:
            ConfigError: A column is missing.
        """
        hidden = sorted(set(columns) & set(self._standard))
        if hidden and not self._told_of_columns:
            self._told_of_columns = True
            self._warn(
                f"dataset columns {hidden} are not passed to rewards, which get other values under these names. "
                "Rename the columns if a reward should read them."
            )
        known = [*columns, *self._standard]
        for reward in self._rewards:
            if isinstance(reward.function, ComputeScore):
                reward.function.check_columns(columns)
            for name in sorted(reward.required):
                if name not in known or name in _HIDDEN:
                    raise ConfigError(_missing(reward.name, name, columns, self._standard))

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        *,
        episodes: Sequence[Episode] | None = None,
        trainer_state: object = None,
        seed: int | None = None,
    ) -> RewardScores:
        """Score B completions with all rewards.

        Args:
            prompts: B texts or lists of messages.
            completions: B texts or lists of messages.
            completion_ids: B lists of token ids.
            columns: The columns of the dataset, with B values each.
            episodes: B episodes. None means there are no tools and environments.
            trainer_state: Passed to the functions whose signature names it.
            seed: Seeds the global random generators for the functions; their states are restored afterwards. None
                means functions use the generators as they are.
        Raises:
            ConfigError: A column is missing.
            DataError: A function cannot use a row.
            RewardError: A function raised, took too long or returned something that is not B rewards.
            ValueError: The arguments have different lengths.
        """
        self.check_columns(columns)
        visible = {name: values for name, values in columns.items() if name not in self._standard}
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **visible}
        lengths = {name: len(values) for name, values in given.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"arguments of different lengths: {lengths}")
        if not prompts:
            return RewardScores({name: [] for name in self.names})
        log = RewardLog(len(prompts), self.names)
        calls = []
        for reward in self._rewards:
            # Each function gets its own lists, so that changes to them do not affect the next one.
            available: dict[str, Any] = {name: list(values) for name, values in given.items() if name not in _HIDDEN}
            if self._pool is not None and reward.name in self._pooled:
                pooled = {"name": reward.name, "given": available, "log": log, "trainer_state": trainer_state}
                calls.append(Call(reward.name, self._pool.score, pooled, is_async=False))
                continue
            available |= {"trainer_state": trainer_state, "log_metric": log.metric, "log_extra": log.extra}
            if _ENVIRONMENTS in self._standard:
                available[_ENVIRONMENTS] = [episode.environment for episode in episodes or ()]
            if _RESULT in self._standard:
                available[_RESULT] = [episode.result for episode in episodes or ()]
            accepted = reward.accepted
            arguments = {name: v for name, v in available.items() if accepted is None or name in accepted}
            calls.append(Call(reward.name, reward.function, arguments, reward.is_async))
        settle = functools.partial(self._settled, prompts=prompts, completions=completions)
        with nullcontext() if seed is None else own_randomness(seed):
            values = call_all(calls, settle, timeout=self.timeout, num_completions=len(prompts), loop=self._loop)
        failed = {
            f"rewards/{name}/failed": float(self._failures[name] > 0) for name in self.names if self._skips_errors
        }
        values += [[one.reward if one.kind == kind else None for one in episodes or ()] for kind in self._environments]
        means = {name: sum(values) / len(values) for name, values in log.values.items()}
        metrics = means | failed | (_parts(episodes) if episodes else {})
        return RewardScores(dict(zip(self.names, values, strict=True)), metrics, log.columns)

    def _settled(
        self, call: Call, outcome: Outcome, *, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> list[float | None]:
        """The values of a call; None for all completions if it failed and errors are skipped."""
        count = len(prompts)

        def batch() -> str:
            first = f"{excerpt(completions[0])} to {excerpt(prompts[0])}"
            return f"a batch of {count} completions, of which {first} is the first"

        try:
            result = result_of(call, outcome, timeout=self.timeout, batch=batch)
            values = checked_values(call.name, result, prompts, completions)
        except (RewardError, DataError) as error:
            self._note_failure(call, error)
            return [None] * count
        self._failures[call.name] = 0
        return values

    def _note_failure(self, call: Call, error: RewardError | DataError) -> None:
        """Raise, unless errors are skipped. Ranks take turns in a model, so one that leaves it cannot go on."""
        if not self._skips_errors or isinstance(call.function, ModelReward):
            raise error
        self._failures[call.name] += 1
        if self._failures[call.name] == _MOST_FAILURES:
            raise RewardError(
                f"{_MOST_FAILURES} batches failed one after another, with on_reward_error='skip'. The last: {error}"
            ) from error
        if call.name not in self._warned:
            self._warned.add(call.name)
            logger.warning(
                "%s. The values of reward %r are None for this batch, because on_reward_error='skip'; later batches "
                "like this are counted in rewards/%s/failed",
                error,
                call.name,
                call.name,
            )


def _parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """The means of the parts of environments' rewards that have names."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.rewards.items():
            found.setdefault(f"rewards/{episode.kind}/{name}/mean", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _given_weights(rewards: Mapping[Any, Any], weights: Sequence[float] | None) -> list[float]:
    """The values of a mapping from rewards to weights."""
    for reward, weight in rewards.items():
        if not is_number(weight):
            raise ConfigError(f"reward_funcs: the weight of {reward!r} is {weight!r}; it must be a number")
    if weights is not None:
        raise ConfigError(
            f"reward_weights={list(weights)}: reward_funcs already gives each reward a weight. Remove one of them"
        )
    return [*rewards.values()]


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ConfigError(
            f"reward_weights={list(weights)}: {len(weights)} weights for {count} rewards; there must be one for each"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"reward_weights={list(weights)}: weights need to be finite numbers")
    return [float(weight) for weight in weights]


def _tokenizers(
    given: ProcessingClass | Sequence[ProcessingClass | None] | None,
    is_model: Sequence[bool],
    warn: Callable[[str], None],
) -> list[ProcessingClass | None]:
    if given is not None and not any(is_model):
        warn("reward_processing_classes has no effect because none of reward_funcs is a model. Leave it out.")
    if not isinstance(given, list | tuple):
        if given is not None and sum(is_model) > 1:
            raise ConfigError(
                f"reward_processing_classes: one tokenizer for {sum(is_model)} models, whose tokens may differ. Pass "
                "a list with one entry for each reward: a tokenizer, or None for functions and for a model's own "
                "tokenizer"
            )
        return [given if model else None for model in is_model]
    if len(given) != len(is_model):
        raise ConfigError(
            f"reward_processing_classes: {len(given)} entries for {len(is_model)} rewards; there must be one for "
            "each, None for functions"
        )
    for i, (tokenizer, model) in enumerate(zip(given, is_model, strict=True)):
        if tokenizer is not None and not model and any(is_model):
            warn(f"reward_processing_classes[{i}] has no effect because that reward is a function. Set it to None.")
    return [tokenizer if model else None for tokenizer, model in zip(given, is_model, strict=True)]


def _function(
    source: RewardSource, model_reward: Callable[..., ModelReward], tokenizer: ProcessingClass | None
) -> Callable[..., Any]:
    if isinstance(source, str | os.PathLike | nn.Module):
        return model_reward(source, tokenizer=tokenizer)
    if not callable(source):
        raise ConfigError(
            f"reward_funcs: {source!r} ({type(source).__name__}) is not a reward. Allowed are functions, and names "
            "and instances of sequence-classification models"
        )
    if callable(setup := getattr(_unwrapped(source), "setup", None)):
        setup()
    return ComputeScore(source) if is_compute_score(source) else source


def _name(function: Callable[..., Any]) -> str:
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _unique(names: Iterable[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _inspected(name: str, function: Callable[..., Any]) -> _Reward:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ConfigError(f"reward {name!r} has no signature that can be read: wrap it in a function") from error
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if nameless:
        raise ConfigError(f"reward {name!r}: parameters {nameless} cannot be given by name. Remove the / after them")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return _Reward(
        name,
        function,
        required=frozenset(p.name for p in by_name if p.default is p.empty),
        accepted=None if takes_all else frozenset(p.name for p in by_name),
        is_async=is_async(function),
    )


def _missing(reward: str, name: str, columns: Collection[str], standard: Sequence[str]) -> str:
    visible = [column for column in columns if column not in _HIDDEN]
    close = difflib.get_close_matches(name, [*visible, *standard], n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return (
        f"reward {reward!r} needs {name!r}, which is not a column of the dataset. {hint}Columns: {visible}; rewards "
        f"are also given {', '.join(standard)}. Rename the column or the parameter, or give the parameter a default"
    )
