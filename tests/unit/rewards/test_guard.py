"""What rewards cannot do to the process that they run in."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefrl.errors import RewardError
from prefrl.rewards import RewardRunner, RewardScores, confinement
from prefrl.rewards.confinement import own_randomness
from tests.launch import run_module
from tests.patience import PATIENCE, before_a_deadline, wait_until
from tests.unit.rewards import hostile_worker

Ended = dict[str, tuple[int, str]]  # reward -> exit code and output


def score(reward: Any, **options: Any) -> RewardScores:
    return RewardRunner(reward, **options).score(["p"], ["c"], [[1]], {})


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("hostile")
    found = json.loads(run_module(hostile_worker.__name__, folder))
    return {name: (code, (folder / name).read_text()) for name, code in found.items()}


@pytest.mark.parametrize("name", ["holds_the_lock", "holds_the_lock_later"])
def test_native_code_that_holds_the_interpreter_lock_ends_the_process_with_its_line(name: str, ended: Ended) -> None:
    code, output = ended[name]
    assert code == 1
    assert "Timeout" in output
    assert "in holds_the_lock" in output


def test_a_reward_cannot_end_the_process_as_a_success(ended: Ended) -> None:
    code, output = ended["leaves_as_a_success"]
    assert code == 2
    assert "reward 'leaves_as_a_success' raised SystemExit: os._exit(0)" in output
    assert ended["has_a_child_that_leaves"] == (0, "value [0.0]\n")


def test_a_crash_leaves_a_traceback(ended: Ended) -> None:
    code, output = ended["crashes"]
    assert code == -signal.SIGSEGV
    assert "in crashes" in output


@pytest.mark.parametrize("name", ["forks", "forks_later"])
def test_a_child_that_comes_back_from_a_reward_is_ended(name: str, ended: Ended) -> None:
    code, output = ended[name]
    assert code == 0
    assert f"reward '{name}' forked process" in output
    assert output.endswith("value [1.0]\n")
    assert output.count("value") == 1


# Deadlines of functions that can be stopped are in test_runner.


def test_a_plain_function_may_use_signals_and_is_interrupted() -> None:
    is_over = []

    def reward(completions: list[str]) -> list[float]:
        try:
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))  # raises outside of the main thread
            time.sleep(600)
        finally:
            is_over.append(True)
        return [0.0]

    def attempt(seconds: float) -> bool | None:
        words = f"took more than reward_timeout={seconds} s for a batch of 1 completions"
        with pytest.raises(RewardError, match=words):
            score(reward, timeout=seconds)
        return True if is_over else None

    assert before_a_deadline(attempt)


def test_a_function_that_swallows_its_deadline_gets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_REPEAT_S", 0.1)

    def stubborn(completions: list[str]) -> list[float]:
        try:
            time.sleep(600)
        except BaseException:
            time.sleep(PATIENCE)
        return [0.0]

    with pytest.raises(RewardError, match="took more than"):
        score(stubborn, timeout=0.1)


def test_a_deadline_holds_outside_of_the_main_thread() -> None:
    errors: list[RewardError] = []
    is_over = threading.Event()

    def target() -> None:
        with pytest.raises(RewardError) as caught:
            score(lambda completions: is_over.wait(), timeout=0.1)
        errors.append(caught.value)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    is_over.set()
    assert "took more than reward_timeout=0.1 s" in str(errors[0])


def test_a_signal_that_comes_late_does_not_touch_the_next_call() -> None:
    score(lambda completions: [0.0], timeout=PATIENCE)
    signal.raise_signal(signal.SIGRTMAX)

    def reward(completions: list[str]) -> list[float]:
        signal.raise_signal(signal.SIGRTMAX)
        return [1.0]

    assert score(reward, timeout=PATIENCE).by_name == {"reward": [1.0]}


@pytest.mark.parametrize(("timeout", "limit"), [(None, "it has no time limit"), (30.0, "reward_timeout=30.0 s")])
def test_a_line_is_logged_when_a_reward_takes_long(
    timeout: float | None, limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(confinement, "_SILENCE_S", 0.05)

    def lines() -> list[str]:
        """Without those of a function that stalls, but is not slow."""
        found = (record.getMessage() for record in caplog.records)
        return [line for line in found if "'slow" in line]

    def slow(completions: list[str]) -> list[float]:
        assert wait_until(lambda: any("reward 'slow'" in line for line in lines()), seconds=20)
        return [0.0]

    async def slow_too(completions: list[str]) -> list[float]:
        assert wait_until(lambda: any("rewards 'slow_too'" in line for line in lines()), seconds=20)
        return [0.0]

    with caplog.at_level(logging.WARNING):
        score([slow_too, lambda completions: [0.0]], timeout=timeout)
        score(slow, timeout=timeout)
    first, second = lines()
    assert first.startswith("async rewards 'slow_too' on a batch of 1 completions: no result for 0 s; ")
    assert second.startswith("reward 'slow' on a batch of 1 completions: no result")
    assert limit in first
    assert limit in second


# Random numbers.


def draw(completions: list[str]) -> list[float]:
    return [random.random() + 10 * np.random.rand() + 100 * float(torch.rand(()))]


def test_what_a_reward_changes_around_it_is_changed_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    errors = sys.stderr

    def reward(completions: list[str]) -> list[float]:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.chdir("/")
        sys.stdout.close()
        sys.stderr = io.StringIO()
        return [1.0]

    assert score(reward).by_name == {"reward": [1.0]}
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert Path.cwd() == tmp_path
    assert sys.stdout.fileno() == 1
    assert sys.stderr is errors
    os.fstat(1)  # it stays open when the stream goes


def states() -> list[str]:
    return [repr(random.getstate()), repr(np.random.get_state()), repr(torch.get_rng_state().tolist())]


def test_rewards_that_draw_depend_on_the_seed_and_leave_the_generators_alone() -> None:
    def draw_and_seed(completions: list[str]) -> list[float]:
        values = draw(completions)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return values

    runner = RewardRunner(draw_and_seed)
    values = []
    for seed in (3, 3, 2**63 - 1):
        draw([])
        before = states()
        values.append(runner.score(["p"], ["c"], [[1]], {}, seed=seed).by_name["draw_and_seed"])
        assert states() == before
    assert values[0] == values[1]
    assert values[0] != values[2]


def test_rewards_do_not_draw_what_the_sampler_draws() -> None:
    with own_randomness(3):
        drawn = torch.rand(4)
    assert not torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
