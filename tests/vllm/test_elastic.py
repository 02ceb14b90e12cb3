"""Real servers that come and go during a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl.generation.vllm.members import Registration
from prefrl.http import Http
from tests.contract.cases import update_of
from tests.vllm.conftest import StartServer
from tests.vllm.server import Server
from tests.vllm.test_training import PROMPTS, check_agreement_after_sync, logged, online

pytestmark = pytest.mark.vllm


class AfterSteps(TrainerCallback):
    """Renews signs of life after each step, and does something after some of them."""

    def __init__(self, registered: dict[str, Registration], events: dict[int, Callable[[], None]]) -> None:
        self.registered, self.events = registered, events

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.get(state.global_step, lambda: None)()
        for registration in self.registered.values():
            registration.renew()


def answers(server: Server) -> tuple[str, list[Any]]:
    """The version of its weights, and what it samples with them."""
    http = Http(key=server.key)
    sampling = {"n": 2, "max_tokens": 16, "seed": 5, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    choices = []
    for prompt in PROMPTS:
        body = {"token_ids": prompt, "model": str(server.model_dir), "sampling_params": sampling}
        answer = http.request("POST", f"{server.url}/inference/v1/generate", timeout=120, json=body)
        choices += [(choice["token_ids"], choice["logprobs"]) for choice in answer["choices"]]
    version = http.request("GET", f"{server.url}/weight_info", timeout=60)["weight_version"]
    http.close()
    return version, choices


def test_one_of_two_servers_is_killed_and_a_third_one_joins(
    tmp_path: Path,
    server: Server,
    second_server: Server,
    start_server: StartServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    fleet, registered = tmp_path / "fleet", dict[str, Registration]()
    started: list[Server] = []

    def register(one: Server) -> None:
        registered[one.url] = Registration(fleet, one.url, key=one.key)
        registered[one.url].renew()

    def kill() -> None:
        second_server.kill()
        del registered[second_server.url]  # its file stays

    with ExitStack() as stack:

        def join() -> None:
            started.append(stack.enter_context(start_server(server.model_dir)))
            register(started[0])

        # Without the correction, the rounding of the log-probs that servers report does not reach the weights.
        same: dict[str, Any] = {"max_steps": 10, "learning_rate": 0.1, "vllm_importance_sampling_correction": False}
        quiet = online(tmp_path / "quiet", server, weight_sync="gloo", **same)
        expected = update_of(quiet)
        quiet.generator.close()
        register(server)
        register(second_server)
        options: dict[str, Any] = {"vllm_server_base_url": f"dir:{fleet}", **same}
        options["callbacks"] = [AfterSteps(registered, {5: join, 8: kill})]
        trainer = online(tmp_path / "fleet_run", server, weight_sync="gloo", **options)
        update = update_of(trainer)
        assert torch.equal(update, expected)
        assert trainer.state.global_step == 10
        assert logged(trainer, "server/alive") == [2] * 5 + [3] * 3 + [2] * 2
        check_agreement_after_sync(trainer)
        first, third = answers(server), answers(started[0])
        assert first == third
        assert first[0].endswith(":10"), "both have the last weights"
        trainer.generator.close()
