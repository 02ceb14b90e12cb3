"""What the gateway costs: CPU time of a turn that an agent asks for over HTTP, and of one that an environment answers.

    python -m benchmarks.agents [--episodes 200] [--turns 10]    about a minute on one core

All episodes run at once, with the same conversations, whose answers are written down. So what is measured is all but
the model: chat template, tokenization, sessions, and, for the agent, server and client, which share the process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from prefrl import Environment
from prefrl.rollout.episodes.environment import with_agents
from tests.unit.rollout.episodes.scripted import Scripted, params, row, sampler
from tests.unit.rollout.gateway.unruly import opened, talk

__all__ = ["main"]


class Talk(Environment):
    """Replies as the agent `talk` does."""

    def reset(self, *, num_turns: int, **row: Any) -> None:
        """Begin."""
        self.left, self.number = num_turns - 1, 0

    def respond(self, message: Any) -> str | None:
        """The next question."""
        if self.number == self.left:
            return None
        self.number += 1
        return f"And {self.number - 1}?"

    def get_reward(self) -> float:
        """As the agent's."""
        return 1.0


def measure(factory: Any, num_episodes: int, num_turns: int) -> tuple[float, float]:
    """CPU ms and ms on the clock of a turn."""
    episodes = sampler(Scripted(lambda *_: "said"), factory=factory)
    rows = [row(num_turns=num_turns) for _ in range(num_episodes)]
    cpu, clock = time.process_time(), time.perf_counter()
    try:
        pending = episodes.start(rows, list(range(num_episodes)), params(1), list(range(num_episodes)))
        rollouts = [rollout for _, found in pending.as_completed() for rollout in found]
        used, passed = time.process_time() - cpu, time.perf_counter() - clock
        episodes.release(rollouts)
    finally:
        episodes.close()
    turns = sum(len(rollout.turns) for rollout in rollouts)
    if turns != num_episodes * num_turns:
        raise RuntimeError(f"{turns} turns were played, not {num_episodes * num_turns}")
    return 1000 * used / turns, 1000 * passed / turns


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args(arguments)
    factories = {"environment": Talk, "agent": with_agents(None, talk)}
    for factory in factories.values():
        measure(factory, 2, 2)  # what is loaded once
    before = opened()
    for name, factory in factories.items():
        cpu, clock = measure(factory, options.episodes, options.turns)
        print(f"{name:<12} {cpu:6.2f} ms of CPU a turn, {clock:6.2f} ms on the clock")
    time.sleep(1)
    print(f"file descriptors, threads, children: {before} before, {opened()} after")


if __name__ == "__main__":
    main()
