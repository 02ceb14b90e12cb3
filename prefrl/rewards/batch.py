"""Answers questions of a batch in threads, within a deadline for all of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

__all__ = ["answer_all"]

Question = TypeVar("Question")
Answer = TypeVar("Answer")


def answer_all(
    questions: Sequence[Question],
    worker: Callable[[], AbstractContextManager[Callable[[Question], Answer]]],
    *,
    budget: float,
    num_threads: int,
    name: str,
) -> list[Answer | None]:
    """Answer questions concurrently, in their order; None for a question that nobody had begun in time.

    Args:
        questions: The questions.
        worker: Called in each thread; its context gives the function that answers. An answer has to end by itself.
        budget: Seconds for each thread, from the moment at which its worker is there.
        num_threads: The most threads.
        name: Of the threads.

    Raises:
        Exception: The first that a worker or an answer raised; no question is begun after it.
    """
    todo = deque(enumerate(questions))
    answers: list[Answer | None] = [None] * len(questions)
    errors: list[Exception] = []

    def work() -> None:
        try:
            with worker() as answer:
                ends = time.monotonic() + budget
                while time.monotonic() < ends:
                    try:
                        number, question = todo.popleft()
                    except IndexError:  # nothing to do
                        return
                    answers[number] = answer(question)
        except Exception as error:
            errors.append(error)
            todo.clear()

    threads = [threading.Thread(target=work, name=name, daemon=True) for _ in range(min(num_threads, len(questions)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        todo.clear()  # if the wait was interrupted, the workers end with what they are at
    if errors:
        raise errors[0]
    return answers
