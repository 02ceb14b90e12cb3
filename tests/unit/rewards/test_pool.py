"""Plain functions that score in processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards import BySource, RewardRunner, pool
from tests.patience import PATIENCE, is_running, wait_until

# Two completions of "a", three of "b", one of "c".
PROMPTS = ["a", "a", "b", "b", "b", "c"]
TEXTS = ["x", "xx", "y", "yyy", "yy", "zzzz"]
ROWS: dict[str, Any] = {
    "prompts": PROMPTS,
    "completions": TEXTS,
    "completion_ids": [[1]] * 6,
    "columns": {"answer": [0.1, 0.2, 0.3, 0.4, None, 0.6], "data_source": ["s", "s", "t", "t", "t", "s"]},
}


def third(completions: list[str], answer: list[float | None]) -> list[float | None]:
    """A third of the answer, which is no short binary number."""
    assert multiprocessing.parent_process() is not None
    return [None if right is None else right / 3 for right in answer]


def logging(prompts: list[str], completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """A function that compares the completions of a prompt, and logs."""
    assert len(set(prompts)) == 1
    longest = max(map(len, completions))
    log_metric("longest", longest)
    log_metric("mean_length", sum(map(len, completions)) / len(completions))
    if prompts[0] != "c":
        log_extra("said", completions)
    return [len(text) / longest for text in completions]


def of_source(completions: list[str]) -> list[float]:
    """The length."""
    return [float(len(text)) for text in completions]


def drawing(completions: list[str]) -> list[float]:
    """Random numbers."""
    return [random.random() for _ in completions]


def stuck(completions: list[str]) -> list[float]:
    """Takes forever for one prompt."""
    if completions[0] == "y":
        threading.Event().wait()
    return [1.0 for _ in completions]


def crashing_once(completions: list[str], marker: str) -> list[float]:
    """Ends the first process that comes to the last prompt."""
    if completions[0] == "zzzz" and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0 for _ in completions]


def raising(completions: list[str]) -> list[float]:
    """Fails at a row."""
    return [1 / (len(text) - 3) for text in completions]


def refusing(completions: list[str]) -> list[float]:
    """Cannot use a row."""
    raise DataError("row 3 has no answer")


def counting(completions: list[str]) -> list[float]:
    """Returns too few numbers."""
    return [0.0]


class Counter:
    """Keeps state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str]) -> list[float]:
        """The number of calls."""
        self.calls += 1
        return [float(self.calls) for _ in completions]


async def waiting(completions: list[str]) -> list[float]:
    """An async function."""
    return [float(multiprocessing.parent_process() is None) for _ in completions]


def test_processes_score_as_this_process_does_in_order() -> None:
    rewards = [third, logging, BySource({"s": of_source, "t": None}), waiting]
    runner = RewardRunner(rewards, num_workers=2, timeout=PATIENCE)
    scores, again = runner.score(**ROWS, seed=1), runner.score(**ROWS, seed=1)
    assert scores == again
    lengths = [1.0, 2.0, None, None, None, 4.0]
    assert scores.by_name == {
        "third": [0.1 / 3, 0.2 / 3, 0.3 / 3, 0.4 / 3, None, 0.6 / 3],
        "logging": [0.5, 1.0, 1 / 3, 1.0, 2 / 3, 1.0],
        "by_source": lengths,
        "waiting": [1.0] * 6,
    }
    assert scores.metrics == {"longest": (2 + 3 + 4) / 3, "mean_length": (1.5 + 2 + 4) / 3, "by_source/s": 2.75}
    assert scores.extra == {"said": [*TEXTS[:5], None]}


def test_a_function_that_takes_too_long_ends_its_processes() -> None:
    runner = RewardRunner(stuck, num_workers=1, timeout=1.0)
    assert len(multiprocessing.active_children()) == 1
    with pytest.raises(RewardError, match=r"'stuck' took more than reward_timeout=1.0 s"):
        runner.score(**ROWS)
    assert wait_until(lambda: not multiprocessing.active_children())


def test_a_process_that_ends_is_an_error_and_another_follows(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    runner = RewardRunner(partial(crashing_once, marker=str(marker)), num_workers=1, timeout=PATIENCE)
    with pytest.raises(RewardError, match="one of the reward_num_workers=1 processes ended while it worked"):
        runner.score(**ROWS)
    assert runner.score(**ROWS).by_name == {"crashing_once": [1.0] * 6}


SCRIPT = """\
import os, signal, sys
from prefrl.rewards import RewardRunner
from tests.unit.rewards.test_pool import stuck, ROWS
import multiprocessing

if __name__ == "__main__":
    runner = RewardRunner(stuck, num_workers=1, timeout=None)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    runner.score(**ROWS)
"""


def test_a_killed_trainer_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, env=environment
    ) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(workers) == 1
    assert wait_until(lambda: not any(map(is_running, workers)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"f": lambda completions: [0.0]}, "reward 'f' cannot be sent to another process: .*at the top of a module"),
        (waiting, r"reward_num_workers=2 has no effect: none of the rewards \['waiting'\]"),
    ],
)
def test_what_processes_cannot_run_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RewardRunner(given, num_workers=2)


def test_rewards_of_evaluations_need_no_processes_because_training_has_some() -> None:
    runner = RewardRunner(waiting, num_workers=2, needs_workers=False)
    assert runner.score(["p"], ["c"], [[1]], {}).by_name == {"waiting": [1.0]}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs the tasks of a function here, as a process would."""

    def score(function: Any) -> list[Any]:
        name = getattr(function, "__name__", "f")
        monkeypatch.setattr(pool, "_payloads", {name: pool._pickled(name, function)})
        monkeypatch.setattr(pool, "_functions", {})
        owner = pool.RewardPool.__new__(pool.RewardPool)
        owner._accepted = {name: frozenset({"completions"})}
        random.seed(5)
        given = {name: ROWS[name] for name in ("prompts", "completions")}
        return [pool._score(task).values for task in owner._tasks(name, given, {})]

    return score


def test_random_numbers_depend_on_the_seed_and_the_prompt_alone(worker: Any) -> None:
    first = worker(drawing)
    assert first == worker(drawing)
    assert len({value for part in first for value in part}) == 6


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (raising, RewardError, r"raised ZeroDivisionError.*\(line \d+ of .*test_pool.*3 completions of a prompt"),
        (refusing, DataError, "row 3 has no answer"),
        (counting, RewardError, "returned 1 values for 2 completions"),
        (Counter(), RewardError, "reward 'f' keeps state"),
    ],
)
def test_an_error_in_a_process_says_what_it_says_here(worker: Any, function: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        worker(function)


def test_a_reward_that_cannot_be_loaded_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_payloads", {"f": b"cnowhere\nf\n."})
    with pytest.raises(ConfigError, match="'f' cannot be loaded in another process: ModuleNotFoundError"):
        pool._load_all()
