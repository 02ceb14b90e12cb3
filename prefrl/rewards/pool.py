"""Processes that run plain reward functions, so that slow ones use several CPU cores.

A function scores the completions of one prompt at a time, so what it returns does not depend on the number of
processes. Only functions that compare completions of different prompts score otherwise than in the training process.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import os
import pickle  # noqa: TID251 - as multiprocessing, between processes of one run
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefrl.errors import ConfigError, PrefrlError, RewardError
from prefrl.options.names import CODE_OF_FILE, imported
from prefrl.rewards.base import Grader, RewardLog, checked_values, excerpt
from prefrl.rewards.call import Call, ComputeScore, outcome_of, result_of
from prefrl.rewards.confinement import DeadlineError, guarded, own_randomness


@dataclass(frozen=True)
class _Task:
    """The completions of one prompt for one function."""

    name: str
    seed: int
    prompts: list[Any]
    completions: list[Any]
    arguments: dict[str, Any]
    logs: frozenset[str]  # of log_metric and log_extra, those that the function takes


@dataclass(frozen=True)
class _Scored:
    values: list[float | None]
    metrics: dict[str, list[float]]
    columns: dict[str, list[Any]]


class RewardPool:
    """Runs rewards in processes. They end with this process, however it ends.

    Args:
        rewards: Functions by name, with the parameters that each accepts; None: any.
        num_workers: Number of processes.
        timeout: Seconds for one function and one batch, after which all processes are ended; None: no limit.
    Raises:
        ConfigError: A function cannot be sent to another process, or the processes cannot begin.
    """

    def __init__(
        self,
        rewards: Mapping[str, tuple[Callable[..., Any], frozenset[str] | None]],
        *,
        num_workers: int,
        timeout: float | None,
    ) -> None:
        self._accepted = {name: accepted for name, (_, accepted) in rewards.items()}
        self._payloads = {name: _pickled(name, function) for name, (function, _) in rewards.items()}
        self._num_workers, self._timeout = num_workers, timeout
        self._lock = threading.Lock()  # a call that nobody waits for any more still ends its processes
        self._executor: ProcessPoolExecutor | None = None
        try:
            for loaded in [self._submit(_load_all) for _ in range(num_workers)]:
                loaded.result()
        except BrokenExecutor as error:
            raise ConfigError(
                f"reward_num_workers={num_workers}: a process ended before it could run a reward; its error is above. "
                "Processes import the script that starts them: put what it runs under if __name__ == '__main__'"
            ) from error

    def score(self, name: str, given: Mapping[str, Sequence[Any]], log: RewardLog, **more: Any) -> list[float | None]:
        """Score B completions with one function.

        Args:
            name: The function.
            given: B values of each argument, `prompts` and `completions` among them.
            log: Gets what the function logs.
            more: Arguments for functions whose signature names them.
        Raises:
            DataError: The function cannot use a row.
            DeadlineError: It took too long.
            RewardError: It raised, returned something that is not a reward for each completion, keeps state, or its
                process ended.
        """
        with self._lock:
            try:
                futures = [self._submit(_score, task) for task in self._tasks(name, given, more)]
                parts = self._results(futures)
            except BrokenExecutor as error:
                self._end()
                raise RewardError(
                    f"reward {name!r}: one of the reward_num_workers={self._num_workers} processes ended while it "
                    "worked. The system ends processes if memory is short, and native code may crash"
                ) from error
            except Exception:  # of the function: the processes go on
                raise
            except BaseException:  # too late, or Ctrl-C
                self._end()
                raise
        for part in parts:
            for metric, value in ((metric, value) for metric, values in part.metrics.items() for value in values):
                log.metric(metric, value)
        for column in dict.fromkeys(column for part in parts for column in part.columns):
            log.extra(column, [v for part in parts for v in part.columns.get(column, [None] * len(part.values))])
        return [value for part in parts for value in part.values]

    def _tasks(self, name: str, given: Mapping[str, Sequence[Any]], more: Mapping[str, Any]) -> Iterator[_Task]:
        accepted, seed = self._accepted[name], random.getrandbits(64)
        wanted = {key: values for key, values in given.items() if accepted is None or key in accepted}
        named = {key: value for key, value in more.items() if key in (accepted or ())}
        logs = frozenset(key for key in _LOGS if accepted is None or key in accepted)
        prompts = given["prompts"]
        starts = [row for row in range(len(prompts)) if row == 0 or prompts[row] != prompts[row - 1]]
        for number, (start, end) in enumerate(itertools.pairwise([*starts, len(prompts)])):
            rows = {key: list(values[start:end]) for key, values in wanted.items()}
            texts = (list(prompts[start:end]), list(given["completions"][start:end]))
            yield _Task(name, seed + number, *texts, rows | named, logs)

    def _results(self, futures: list[Future[_Scored]]) -> list[_Scored]:
        done, others = wait(futures, self._timeout, FIRST_EXCEPTION)
        for future in others:
            future.cancel()
        for future in futures:
            if future in done and (error := future.exception()) is not None:
                raise error
        if others:
            raise DeadlineError
        return [future.result() for future in futures]

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._executor is None:
            # Forked processes would have this one's locks, devices and threads.
            context = multiprocessing.get_context("spawn")
            self._started = context.SimpleQueue()
            modules = [(key, module) for key, module in sys.modules.items() if key.startswith(CODE_OF_FILE)]
            files = [str(module.__file__) for _, module in modules]
            begun = (self._started, self._timeout, files, self._payloads)
            self._executor = ProcessPoolExecutor(self._num_workers, context, _begin, begun)
        return self._executor.submit(function, *arguments)

    def _end(self) -> None:
        """End the processes, whatever they do; the next call starts others."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        executor.shutdown(wait=False, cancel_futures=True)
        mine = set()
        while not self._started.empty():
            mine.add(self._started.get())
        for process in multiprocessing.active_children():
            if process.pid in mine:
                process.kill()


def _pickled(name: str, function: object) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:  # objects say in many ways that they cannot be pickled
        raise ConfigError(
            f"reward {name!r} cannot be sent to another process: {error}. Define it at the top of a module, without "
            "open files, locks or clients, or set reward_num_workers=0"
        ) from error


def can_be_sent(grader: Grader) -> bool:
    """Whether a grader of ours can be copied to another process. Those that ask models cannot, and do not need it."""
    try:
        _pickled("", grader)
    except ConfigError:
        return False
    return True


# What runs in the processes.

_LOGS = ("log_metric", "log_extra")
_timeout: float | None = None
_files: list[str] = []
_payloads: Mapping[str, bytes] = {}
_functions: dict[str, Callable[..., Any]] = {}


def _begin(started: Any, timeout: float | None, files: list[str], payloads: Mapping[str, bytes]) -> None:
    global _timeout, _files, _payloads
    _timeout, _files, _payloads = timeout, files, payloads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path.append(os.getcwd())  # as the command, which searches the working directory for rewards
    started.put(os.getpid())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _load_all() -> None:
    for name in _payloads:
        _function(name)


def _function(name: str) -> Callable[..., Any]:
    if name not in _functions:
        try:
            for file in _files:
                imported(file, f"reward {name!r}")
            _functions[name] = pickle.loads(_payloads[name])
        except Exception as error:  # of the module that it is imported from
            raise ConfigError(
                f"reward {name!r} cannot be loaded in another process: {type(error).__name__}: {error}. Define it at "
                "the top of a module that can be imported, or set reward_num_workers=0"
            ) from None
    return _functions[name]


def _score(task: _Task) -> _Scored:
    """What a function makes of one prompt's completions."""
    function = _function(task.name)
    log = RewardLog(len(task.prompts), [])
    logs = {name: method for name, method in zip(_LOGS, (log.metric, log.extra), strict=True) if name in task.logs}
    call = Call(task.name, function, task.arguments | logs, is_async=False)
    before = _state(function)
    with guarded(_timeout), own_randomness(task.seed):
        outcome = outcome_of(call)
    try:
        result = result_of(call, outcome, timeout=_timeout, batch=partial(_batch, task))
    except PrefrlError as error:
        raise error from None  # its cause may not be picklable
    if _state(function) != before:
        raise RewardError(
            f"reward {task.name!r} keeps state: calling it changed its attributes, but each process has its own copy. "
            "Keep no state, or set reward_num_workers=0"
        )
    return _Scored(checked_values(task.name, result, task.prompts, task.completions), log.values, log.columns)


def _batch(task: _Task) -> str:
    first = f"{excerpt(task.completions[0])} to {excerpt(task.prompts[0])}"
    return f"{len(task.completions)} completions of a prompt, of which {first} is the first"


def _state(function: Callable[..., Any]) -> bytes:
    """The attributes of a callable object; nothing for functions and our graders, which keep nothing that matters."""
    while isinstance(function, partial | ComputeScore):
        function = function.func
    has_none = inspect.isroutine(function) or inspect.isclass(function) or isinstance(function, Grader)
    return b"" if has_none else pickle.dumps(function)
