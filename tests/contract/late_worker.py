"""Episodes of which some are late, on what stands for a server; as a process of its own, a run that is killed.

    python -m tests.contract.late_worker FOLDER

trains with `SAVING` and is killed at the end of step 5, while episodes go on.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.generation.vllm.asking import Done, Lost
from prefrl.generation.vllm.pending import VLLMTurns
from prefrl.generation.vllm.requests import PromptRequest
from prefrl.rollout.episodes.environment import Agent
from prefrl.trainer.online.trainer import OnlineTrainer
from tests.contract import episodes
from tests.contract.cases import make_trainer
from tests.contract.survival_worker import forked

READY: dict[str, Any] = {
    "use_vllm": True,
    "generation_mode": "async",
    "max_staleness": 4,
    "async_kwargs": {"order": "ready"},
    "per_device_train_batch_size": 8,  # two groups of 4
    "beta": 0.1,
    "turn_credit": "return",
    "max_completion_length": 16,
    "max_turns": 3,
    "shuffle_dataset": False,  # a ticket is the number of its row
    "tool_timeout": 3600,  # on a busy machine, steps take long
}
SAVING: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}


class TurnServer:
    """A generator whose turns are sampled meanwhile, one after another, with the weights of the last `sync`.

    It is also the `Asker` of its turns.

    Args:
        trainer: Its weights are sent.
        num_lost: How many turns are to be lost.
    """

    context_limit = None
    longest_silence = 60.0

    def __init__(self, trainer: OnlineTrainer, *, num_lost: int = 0) -> None:
        self._model = copy.deepcopy(trainer.policy)
        self._local = LocalGenerator(self._model, tokenizer=trainer.tokenizer)
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()  # no weights change within a turn
        self._step = 0
        self.num_lost = num_lost

    def turns(self, sampling: SamplingParams) -> VLLMTurns:
        return VLLMTurns(self, sampling, step=lambda: self._step)  # type: ignore[arg-type]

    def submit(
        self, requests: Sequence[PromptRequest], report: Callable[[Any], None], *, checks: bool = True
    ) -> Future[None]:
        return self._thread.submit(self._answer, requests, report)

    def _answer(self, requests: Sequence[PromptRequest], report: Callable[[Any], None]) -> None:
        for request in requests:
            if self.num_lost:
                self.num_lost -= 1
                report(Lost(request, "gone"))
                continue
            with self._lock:
                (completions,) = self._local.generate([request.token_ids], request.sampling, seeds=[request.seed])
            report(Done(request, completions))

    def recover(self) -> None: ...

    def sync(self, weights: Any, *, version: int) -> None:
        with self._lock:
            self._model.load_state_dict(dict(weights), strict=False)  # tied weights are sent once
            self._local.sync(weights, version=version)
            self._step = version

    def invalidate(self) -> None: ...

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class Clock:
    """The steps of the training that goes on."""

    state: Any = None
    late = range(0, 99, 3)  # rows whose episodes are late
    num_late = 2  # by how many steps

    @classmethod
    def end(cls) -> int:
        """The step at which a late episode that begins now ends; the last one at the latest."""
        return min(cls.state.global_step + cls.num_late, cls.state.max_steps - 1)

    @classmethod
    def is_late(cls, prompt: Any) -> bool:
        return int(prompt[-1]["content"].lstrip("?")) in cls.late

    @classmethod
    async def wait(cls, end: int) -> None:
        while cls.state.global_step < end:
            await asyncio.sleep(0.005)


class LateTalk(episodes.Talk):
    """Late episodes wait after their first answer."""

    made = 0

    def __init__(self) -> None:
        LateTalk.made += 1

    def reset(self, prompt: Any, **row: Any) -> str:
        self.end = Clock.end() if Clock.is_late(prompt) else 0
        return super().reset(prompt, **row)

    async def respond(self, message: Any) -> Any:
        await Clock.wait(self.end)
        return await super().respond(message)

    async def get_reward(self) -> float:
        await Clock.wait(self.end)
        return super().get_reward()


async def late_agent(row: Any, client: Any) -> float:
    """An agent that has asked all that it may before it is late."""
    end = Clock.end() if Clock.is_late(row["prompt"]) else 0
    try:
        return await episodes.stray(row, client)
    finally:
        await Clock.wait(end)


def late_trainer(folder: Path, *, talks: str = "faithful", num_lost: int = 0, **options: Any) -> OnlineTrainer:
    """A trainer of episodes that finishes groups out of order."""
    environment = Agent(late_agent) if talks == "agent" else LateTalk
    trainer = make_trainer("grpo", folder, talks=talks, **{"environment": environment, **READY, **options})
    assert isinstance(trainer, OnlineTrainer)
    trainer.generator = TurnServer(trainer, num_lost=num_lost)  # type: ignore[assignment]
    Clock.state = trainer.state
    trainer.add_callback(_Watching())
    return trainer


class _Watching(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        Clock.state = state  # HuggingFace makes a new one


class _Dies(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    assert forked(lambda: late_trainer(root, **SAVING, callbacks=[_Dies()]).train()) == -signal.SIGKILL
