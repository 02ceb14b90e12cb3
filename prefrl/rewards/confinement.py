"""What a reward cannot do to its process: stay forever, end it as a success, double it, or draw its random numbers."""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

import numpy as np
import torch

from prefrl.models.modes import seeded

logger = logging.getLogger(__name__)

# Seconds without a result after which a line is logged.
_SILENCE_S = 60.0
# Seconds after its deadline in which a reward can still be stopped. After them, the process is ended.
_GRACE_S = 10.0
# A reward that swallows the exception at its deadline gets it again.
_REPEAT_S = 1.0
# A signal that nobody else uses; None: only Linux has one to spare.
SPARE_SIGNAL = signal.SIGRTMAX if sys.platform == "linux" else None
_STDERR = 2  # the file descriptor, because a notebook's sys.stderr has none


class DeadlineError(BaseException):
    """Raised inside a reward at its deadline. It is no Exception, so that `except Exception` does not swallow it."""


@contextmanager
def guarded(timeout: float | None) -> Iterator[None]:
    """Context in which rewards run.

    After a crash of native code, the traceback of all threads is on standard error. `os._exit(0)` raises SystemExit,
    because a training that ends with code 0 counts as done. Afterwards, the working directory, standard output and
    error, torch's default dtype and whether it records gradients are what they were before.

    Args:
        timeout: See `end_process_after`, which may be called again inside; None: no limit.
    """
    folder = os.open(".", os.O_RDONLY)  # by descriptor, because it may have been removed
    dtype, streams = torch.get_default_dtype(), (sys.stdout, sys.stderr)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=_STDERR)
    if timeout is not None:
        end_process_after(timeout)
    owner, leave = os.getpid(), os._exit

    def refuse_success(status: int) -> None:
        if status == 0 and os.getpid() == owner:
            raise SystemExit("os._exit(0) would end training as if it were complete")
        leave(status)

    os._exit = refuse_success  # type: ignore[assignment]  # it may raise instead of leaving
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        os._exit = leave
        if timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        torch.set_default_dtype(dtype)
        os.fchdir(folder)
        os.close(folder)
        sys.stdout, sys.stderr = (
            _reopened(descriptor) if stream is not None and stream.closed else stream
            for descriptor, stream in enumerate(streams, start=1)
        )


def _reopened(descriptor: int) -> TextIO:
    """Another stream on the descriptor of one that was closed, which Python leaves open."""
    return open(descriptor, "w", closefd=False)


def end_process_after(timeout: float) -> None:
    """End this process soon after a deadline, with the traceback of all threads, unless `guarded` is left before.

    Only this also ends native code that never releases the interpreter lock, such as a regular expression. It replaces
    a `faulthandler.dump_traceback_later` of the user's, of which a process has one.
    """
    seconds = min(timeout + _GRACE_S, threading.TIMEOUT_MAX / 2)
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def leave_if_forked(owner: int, name: str) -> None:
    """End this process if a reward forked it: it would go on as a second trainer."""
    if os.getpid() != owner:
        text = f"reward {name!r} forked process {os.getpid()}, which returned from it and is ended: leave a child "
        os.write(_STDERR, f"{text}with os._exit\n".encode())
        os._exit(1)


@contextmanager
def logged_wait(who: str, *, num_completions: int, timeout: float | None, interrupts: bool) -> Iterator[None]:
    """Context of a wait for rewards: after a minute without a result, a line is logged.

    Args:
        who: The rewards, for the line.
        num_completions: B, for the line.
        timeout: Seconds until the deadline; None: no limit.
        interrupts: Raise `DeadlineError` inside at the deadline; only in the main thread, which gets signals, and with
            `SPARE_SIGNAL`.
    Raises:
        DeadlineError: The deadline has passed.
    """
    is_done = threading.Event()
    alarm = previous = None
    if interrupts and timeout is not None and SPARE_SIGNAL is not None:
        ends = time.monotonic() + timeout

        def at_deadline(*_: object) -> None:
            if not is_done.is_set() and time.monotonic() >= ends:  # a late signal of an earlier call means nothing
                raise DeadlineError

        # It stays installed, because the default handler would end the process if a signal came late.
        previous = signal.signal(SPARE_SIGNAL, at_deadline)
        alarm = partial(signal.pthread_kill, threading.get_ident(), SPARE_SIGNAL)
    try:
        try:
            what = f"{who} on a batch of {num_completions} completions"
            threading.Thread(target=_watch, args=(is_done, what, timeout, alarm), daemon=True).start()
            yield
        finally:
            is_done.set()
    finally:  # if the deadline came before the line above
        is_done.set()
        if callable(previous) and SPARE_SIGNAL is not None:  # of a reward that this reward is a part of
            signal.signal(SPARE_SIGNAL, previous)


def _watch(is_done: threading.Event, what: str, timeout: float | None, alarm: Callable[[], None] | None) -> None:
    remaining = threading.TIMEOUT_MAX if timeout is None else min(timeout, threading.TIMEOUT_MAX)
    if remaining > _SILENCE_S:
        if is_done.wait(_SILENCE_S):
            return
        limit = "it has no time limit of its own" if timeout is None else f"its limit is reward_timeout={timeout} s"
        logger.warning("%s: no result for %.0f s; %s", what, _SILENCE_S, limit)
        remaining -= _SILENCE_S
    while alarm is not None and not is_done.wait(remaining):
        alarm()
        remaining = _REPEAT_S


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Context in which the global generators are seeded; afterwards they are as they were before.

    They are those of `random`, NumPy and torch; those of GPUs only if they are in use.

    Args:
        seed: At least 0. What is drawn differs from what a `torch.Generator` with this seed draws.
    """
    # SeedSequence, because a sampler may use the same seed.
    own = int(np.random.SeedSequence(seed).generate_state(1)[0])
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(own)
    np.random.seed(own)
    try:
        with seeded(own):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
