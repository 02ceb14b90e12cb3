"""Training continues after its server is killed and started again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl.errors import GenerationError
from prefrl.models.export import PolicyWeights
from tests.launch import run_module
from tests.patience import PATIENCE
from tests.vllm.faults import proxy_of
from tests.vllm.server import START_SECONDS, Server
from tests.vllm.test_training import check_agreement_after_sync, logged, online

pytestmark = pytest.mark.vllm


class Killer:
    """Kills a server with all its processes and starts another one in its place, in the background."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.struck: list[str] = []
        self.starting: threading.Thread | None = None

    def strike(self, when: str) -> None:
        self.server.kill()
        self.struck.append(when)
        self.starting = threading.Thread(target=self.server.start)
        self.starting.start()


class BetweenSteps(TrainerCallback):
    """Strikes after the first step."""

    def __init__(self, killer: Killer) -> None:
        self.killer = killer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.killer.strike("between steps")


class InSync(PolicyWeights):
    """Weights in the middle of whose fourth transfer the server dies."""

    def __init__(self, model: torch.nn.Module, killer: Killer) -> None:
        super().__init__(model)
        self.killer = killer
        self.num_transfers = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_transfers += 1
        for number, weight in enumerate(super().__iter__()):
            if (self.num_transfers, number) == (4, 5):
                self.killer.strike("in a sync")
            yield weight


def test_a_server_that_is_killed_and_started_again_costs_no_step(
    tmp_path: Path, second_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between steps and in a sync. Kills in a generation are in test_faults.py."""
    monkeypatch.setenv("VLLM_API_KEY", second_server.key)
    killer = Killer(second_server)
    options: dict[str, Any] = {"max_steps": 4, "vllm_server_timeout": START_SECONDS, "weight_sync": "gloo"}
    options |= {"vllm_kwargs": {"sync_timeout": 60}, "callbacks": [BetweenSteps(killer)]}
    trainer = online(tmp_path, second_server, **options)
    trainer.weights = weights = InSync(trainer.policy, killer)
    trainer.train()
    assert killer.struck == ["between steps", "in a sync"]
    assert trainer.state.global_step == 4
    assert sum(logged(trainer, "server/restarts")) == 2
    # One for each step, and one more for the server that died with it.
    assert weights.num_transfers == 4 + 1
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    check_agreement_after_sync(trainer)
    trainer.generator.close()


def test_a_server_that_is_gone_for_good_ends_the_training(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    with proxy_of(server.url) as proxy:
        options: dict[str, Any] = {"max_steps": 1, "vllm_server_base_url": proxy.url, "vllm_server_timeout": 600}
        trainer = online(tmp_path, server, **options)
        trainer.train()
        trainer.generator.fleet.server_timeout = 3.0
        proxy.stop()
        try:
            started = time.monotonic()
            with pytest.raises(GenerationError, match=f"{proxy.url} did not answer within 3 s.*prefrl vllm-serve"):
                trainer.train()
            assert time.monotonic() - started < PATIENCE
        finally:
            proxy.restart()
        trainer.generator.close()


def test_a_killed_trainer_goes_on_exactly_with_a_server(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    job = {"url": server.url, "model_dir": str(server.model_dir), "folder": str(tmp_path), "kills": 2}
    output = run_module("tests.vllm.survival_worker", json.dumps(job))
    whole, killed, asked_again = json.loads(output.splitlines()[-1])
    assert set(killed) == {whole}
    assert asked_again == []
