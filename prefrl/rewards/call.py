"""Call sync and async reward functions, each with a deadline; rewards made of what was written for something else.

These are judges that rank pairs, and scoring functions for verl.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import itertools
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prefrl import distributed
from prefrl.errors import ConfigError, PrefrlError, RewardError
from prefrl.rewards.base import RewardFunction, completion_text
from prefrl.rewards.confinement import (
    SPARE_SIGNAL,
    DeadlineError,
    end_process_after,
    guarded,
    leave_if_forked,
    logged_wait,
)

# Seconds that a coroutine may still take after it was canceled at its deadline, before it is abandoned.
_GRACE_S = 1.0
# What is reported as an error of the reward. Other exceptions that are no Exception come from signals: they pass.
_REPORTED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError, DeadlineError)
_LONGEST_MESSAGE = 1000


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call:
    """A reward function and its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    is_async: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    result: object = None
    error: BaseException | None = None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: an `async def`, a partial of one, or an object whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class EventLoopThread:
    """One event loop in a daemon thread, so that a reward's clients can stay open between calls.

    A separate thread also works where the caller's thread already runs a loop, as in a notebook.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Run a coroutine in the loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            run = distributed.on_own_gpu(_run_loop)
            threading.Thread(target=run, args=(self._loop,), name="prefrl-rewards", daemon=True).start()
            weakref.finalize(self, _stop_loop, self._loop)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def abandon(self) -> None:
        """Abandon a loop that is blocked; the next call gets a new one."""
        if self._loop is not None:
            _stop_loop(self._loop)
            self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    # Tasks that were canceled just before the loop stopped have not seen it yet.
    loop.run_until_complete(_cancel_all())
    loop.close()


async def _cancel_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # a task may begin another when it is canceled
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


def call_all(
    calls: Sequence[Call],
    settle: Callable[[Call, Outcome], Result],
    *,
    timeout: float | None,
    num_completions: int,
    loop: EventLoopThread,
) -> list[Result]:
    """Call the functions. Async functions run concurrently; meanwhile the others run in sequence.

    A function that cannot be stopped at its deadline, because its native code does not return, ends the process.

    Args:
        calls: K functions with their arguments.
        settle: Makes the result of a call out of what became of it, or raises.
        timeout: Seconds for each function. None means no limit.
        num_completions: B, for messages.
        loop: Runs the async functions.
    Returns:
        K results of `settle`.
    """
    waiting = [call for call in calls if call.is_async]
    future = None
    with guarded(timeout):
        if waiting:
            future = loop.submit(_gather(waiting, timeout))
        try:
            settled = {
                id(call): settle(call, _call_sync(call, timeout, num_completions))
                for call in calls
                if not call.is_async
            }
            if future is not None:
                outcomes = _wait(future, waiting, timeout, num_completions, loop)
                settled |= {id(call): settle(call, o) for call, o in zip(waiting, outcomes, strict=True)}
        finally:
            if future is not None:
                future.cancel()
    return [settled[id(call)] for call in calls]


def result_of(call: Call, outcome: Outcome, *, timeout: float | None, batch: Callable[[], str]) -> object:
    """The unchecked result of a function; `batch` describes what it was called for.

    Raises:
        RewardError: It raised or took too long. Errors of prefrl are raised as they are.
        DeadlineError: It has no limit of its own, but the reward that it is a part of took too long.
    """
    error = outcome.error
    if error is None:
        return outcome.result
    if isinstance(error, PrefrlError):
        raise error
    if isinstance(error, DeadlineError):
        if timeout is None:  # the deadline is that of a reward which this one is a part of
            raise error
        raise RewardError(
            f"reward {call.name!r} took more than reward_timeout={timeout} s for {batch()}. Make it faster, or raise "
            "reward_timeout; None means no limit"
        )
    raise RewardError(
        f"reward {call.name!r} raised {type(error).__name__}: {_message(error)}{_place(error)}, for {batch()}. A "
        "reward may return None for a row that it cannot score"
    ) from error


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as failure:
        return f"(its text cannot be shown: str() raised {type(failure).__name__})"
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _place(error: BaseException) -> str:
    """The place in the user's function, without prefrl's frames above it and library frames below it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" (line {frames[0].lineno} of {frames[0].filename})" if frames else ""


def _call_sync(call: Call, timeout: float | None, num_completions: int) -> Outcome:
    """Call a plain function in this thread, where it may use signals, or if that cannot be interrupted, in another."""
    if timeout is not None:
        end_process_after(timeout)
    interrupts = SPARE_SIGNAL is not None and threading.current_thread() is threading.main_thread()
    in_thread = timeout is not None and not interrupts
    try:
        with logged_wait(
            f"reward {call.name!r}", num_completions=num_completions, timeout=timeout, interrupts=interrupts
        ):
            return _call_in_thread(call, timeout) if in_thread else outcome_of(call)
    except DeadlineError as error:
        return Outcome(error=error)


def outcome_of(call: Call, caught: type[BaseException] | tuple[type[BaseException], ...] = _REPORTED) -> Outcome:
    """What becomes of a call in this thread, with the exceptions that are reported as errors of the reward."""
    owner = os.getpid()
    try:
        return Outcome(call.function(**call.arguments))
    except caught as error:
        return Outcome(error=error)
    finally:
        leave_if_forked(owner, call.name)


def _call_in_thread(call: Call, timeout: float | None) -> Outcome:
    """The thread of a function that takes too long keeps running, because a thread cannot be ended."""
    outcomes: list[Outcome] = []
    context = contextvars.copy_context()
    run = distributed.on_own_gpu(lambda: outcomes.append(context.run(outcome_of, call, BaseException)))
    thread = threading.Thread(target=run, name=call.name, daemon=True)
    thread.start()
    thread.join(timeout)
    return outcomes[0] if outcomes else Outcome(error=DeadlineError())


async def _gather(calls: Sequence[Call], timeout: float | None) -> list[Outcome]:
    return await asyncio.gather(*(_call_async(call, timeout) for call in calls))


async def _call_async(call: Call, timeout: float | None) -> Outcome:
    owner = os.getpid()
    try:
        async with asyncio.timeout(timeout) as scope:
            return Outcome(result=await call.function(**call.arguments))
    except BaseException as error:  # SystemExit would end the loop's thread, and CancelledError would be lost
        return Outcome(error=DeadlineError() if scope.expired() else error)
    finally:
        leave_if_forked(owner, call.name)


def _wait(
    future: concurrent.futures.Future[list[Outcome]],
    calls: Sequence[Call],
    timeout: float | None,
    num_completions: int,
    loop: EventLoopThread,
) -> list[Outcome]:
    names = ", ".join(repr(call.name) for call in calls)
    if timeout is not None:
        end_process_after(timeout + _GRACE_S)
    try:
        with logged_wait(f"async rewards {names}", num_completions=num_completions, timeout=timeout, interrupts=False):
            return future.result(None if timeout is None else timeout + _GRACE_S)
    except TimeoutError:  # our own timeout: timeouts of the functions are in their outcomes
        loop.abandon()
        error = RewardError(
            f"async rewards {names}: one of them took more than reward_timeout={timeout} s and could not be canceled. "
            "Use `await` inside it, or make it a plain function"
        )
        return [Outcome(error=error)] * len(calls)


class PairwiseJudge(Protocol):
    """Says which of two completions of a prompt is better."""

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> Sequence[int | None]:
        """For each prompt and its two completions: the index of the better one, 0 or 1, or None for neither."""
        ...


def get_judge_reward(judge: PairwiseJudge, *, num_generations: int) -> RewardFunction:
    """A reward that compares a completion with the prompt's others: the fraction of these comparisons that it wins.

    A comparison without a winner counts as half a win for both. All pairs of a prompt are judged in one call.

    Args:
        judge: Judge that compares two completions.
        num_generations: Completions of each prompt, as in the config; at least 2.

    Raises:
        ConfigError: `num_generations` is below 2.
    """
    if num_generations < 2:
        raise ConfigError(f"num_generations={num_generations}: a judge compares at least 2 completions of a prompt")

    def judge_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        if len(completions) % num_generations:
            raise RewardError(
                f"judge_reward got {len(completions)} completions: needs a multiple of num_generations="
                f"{num_generations}. Give it the config's num_generations, also for evaluation."
            )
        rows = [
            (start + first, start + second)
            for start in range(0, len(completions), num_generations)
            for first, second in itertools.combinations(range(num_generations), 2)
        ]
        verdicts = judge(
            [prompts[first] for first, _ in rows],
            [(completions[first], completions[second]) for first, second in rows],
        )
        if len(verdicts) != len(rows):
            raise RewardError(f"the judge gave {len(verdicts)} verdicts on {len(rows)} pairs: needs one for each")
        wins = [0.0] * len(completions)
        for (first, second), verdict in zip(rows, verdicts, strict=True):
            if verdict not in (0, 1, None):
                raise RewardError(
                    f"the judge's verdict on rows {first} and {second} is {verdict!r}: needs 0, 1 or None"
                )
            share = 0.5 if verdict is None else 1.0 - verdict
            wins[first] += share
            wins[second] += 1.0 - share
        return [won / (num_generations - 1) for won in wins]

    return judge_reward


_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_compute_score(function: Any) -> bool:
    """Whether a function takes the arguments of verl's `compute_score`, by their names."""
    try:
        names = inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False
    return "solution_str" in names and "ground_truth" in names


class ComputeScore:
    """A reward from `compute_score(data_source, solution_str, ground_truth, extra_info)`, called for each completion.

    Args:
        function: Gets those of the four arguments that its signature names, or all with `**kwargs`: the columns
            `data_source` and `extra_info` (None if there is no such column), the text of the completion, and the
            column `ground_truth`, or the entry of this name in the column `reward_model`. It returns a number, or a
            mapping with the number as `score`, whose other entries become columns of the table of completions.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.func = function
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = [name for name in _ARGUMENTS if takes_all or name in parameters]

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        log_extra: Callable[[str, list[Any]], None],
        data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
        ground_truth: Sequence[Any] | None = None,
        reward_model: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Score B completions.

        Raises:
            RewardError: A row has no ground truth, or a mapping that was returned has no `score`.
        """
        results = []
        truths = self._truths(reward_model) if ground_truth is None else ground_truth
        for row, (completion, truth) in enumerate(zip(completions, truths, strict=True)):
            given = {
                "data_source": None if data_source is None else data_source[row],
                "solution_str": completion_text(completion),
                "ground_truth": truth,
                "extra_info": None if extra_info is None else extra_info[row],
            }
            results.append(self.func(**{name: given[name] for name in self._names}))
        mappings = [result if isinstance(result, Mapping) else {"score": result} for result in results]
        for row, mapping in enumerate(mappings):
            if "score" not in mapping:
                raise RewardError(
                    f"reward {self.__name__!r}, row {row}: returned {dict(mapping)!r}; it needs the key 'score'"
                )
        for name in sorted({str(key) for mapping in mappings for key in mapping} - {"score"}):
            log_extra(name, [mapping.get(name) for mapping in mappings])
        return [mapping["score"] for mapping in mappings]

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that a dataset says what is right.

        Raises:
            ConfigError: It does not.
        """
        if not {"ground_truth", "reward_model"} & {*columns}:
            raise ConfigError(
                f"reward {self.__name__!r} needs the column 'ground_truth', or 'reward_model' with entries of this "
                f"name. Columns: {[*columns]}. Rename one of them"
            )

    def _truths(self, reward_model: Sequence[Any] | None) -> list[Any]:
        for row, about in enumerate(reward_model or ()):
            if not isinstance(about, Mapping) or "ground_truth" not in about:
                raise RewardError(
                    f"reward {self.__name__!r}, row {row}: reward_model is {about!r}; it must be a mapping with the "
                    "key 'ground_truth', as in verl's files"
                )
        return [about["ground_truth"] for about in reward_model or ()]
