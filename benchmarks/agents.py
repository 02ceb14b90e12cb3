"""What the gateway costs: CPU time of a turn that an agent asks for over HTTP, and of one that an environment answers.

    python -m benchmarks.agents [--episodes 200] [--turns 10]    about a minute on one core
    python -m benchmarks.agents --clients [--model FOLDER]       what clients do to their histories
    python -m benchmarks.agents --write-docs                     the same, as a table into docs/agents.md

With a model, the log-probs of each client's turns are compared: those with which the sampler draws their ids, and
those of a training's forward pass, in float32 and in float64.

All episodes run at once, with the same conversations, whose answers are written down. So what is measured is all but
the model: chat template, tokenization, sessions, and, for the agent, server and client, which share the process.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl import Environment
from prefrl.data.chat import ChatTemplate, special_tokens
from prefrl.models.forward import token_logprobs
from prefrl.rollout.batches import sampled_batch
from prefrl.rollout.episodes.environment import with_agents
from prefrl.types import Rollout
from tests.unit.data.tool_templates import HERMES
from tests.unit.rollout.episodes.scripted import Scripted, params, row, sampler
from tests.unit.rollout.gateway.clients import CLIENTS, History, Weights
from tests.unit.rollout.gateway.served import Served
from tests.unit.rollout.gateway.unruly import opened, talk

__all__ = ["main"]

DOCS = Path(__file__).parents[1] / "docs" / "agents.md"
TABLE = re.compile(r"(<!-- clients -->\n).*?(<!-- end of clients -->)", re.S)
HEAD = (
    "| client | API | turns | rows | tokens of the requests and answers | tokens in the forward pass | saved |\n"
    "|---|---|---|---|---|---|---|"
)


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


def clients() -> str:
    """What each client does to its history, as a table."""
    lines = [HEAD]
    with Served() as served:
        for name, kind in CLIENTS.items():
            with served.session(kind.said.__getitem__) as (client, session):
                kind.run(client)
            lines.append(History.of(session.turns).row(name))
    return "\n".join(lines)


def compare(folder: str) -> None:
    """Print how far log-probs of the sampler and of a training's forward pass differ, for each client."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = HERMES
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    template = ChatTemplate(tokenizer, tuple(special_tokens(tokenizer)))
    with Served() as served:
        for dtype in (torch.float32, torch.float64):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            torch.manual_seed(0)
            model.resize_token_embeddings(len(tokenizer))
            for name, kind in CLIENTS.items():
                said = kind.said.__getitem__
                with served.session(said, template=template, weights=Weights(model)) as (client, session):
                    kind.run(client)
                batch = sampled_batch([Rollout(session.turns, {}, 0)], mask_truncated=False)
                with torch.no_grad():
                    found = token_logprobs(model, batch, temperature=1.0, plan="shared_prefix").logprobs
                far = (found - batch.sampling_logprobs)[batch.trainable].abs().max()
                print(f"{dtype} {name:<45} {batch.num_trainable:4} trained ids, largest difference {far:.1e}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--clients", action="store_true", help="look at clients instead")
    parser.add_argument("--model", help="folder of the model whose log-probs are compared")
    parser.add_argument("--write-docs", action="store_true", help="put what clients do into the docs")
    options = parser.parse_args(arguments)
    if options.clients or options.write_docs or options.model:
        table = clients()
        print(table)
        if options.write_docs:
            page = DOCS.read_text(encoding="utf-8")
            DOCS.write_text(TABLE.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page), encoding="utf-8")
        if options.model:
            compare(options.model)
        return
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
