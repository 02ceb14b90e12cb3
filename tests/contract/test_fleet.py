"""Training with servers that come and go: it ends where a quiet run ends, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl.errors import AbsentServerError
from prefrl.generation.vllm.handshake import Requirements
from prefrl.trainer.online import generators
from tests.assets import tiny_tokenizer
from tests.contract.cases import make_trainer, stopping_model
from tests.unit.generation.scripted import ScriptedHttp
from tests.unit.generation.stubs import World

KEY = "a-key-for-tests-of-more-than-32-characters"
STEPS, SERVERS = 8, 20


def world_of(folder: Path | None, **options: Any) -> World:
    requirements = Requirements.of(stopping_model(), tiny_tokenizer(), has_adapters=False)
    return World(folder, KEY, requirements, **options)


def trainer_of(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """GRPO at the servers of a world."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(generators, "Http", lambda key: ScriptedHttp(world.answer))
    defaults: dict[str, Any] = {
        "use_vllm": True,
        "vllm_server_base_url": f"dir:{world.folder}",
        "vllm_server_timeout": 60.0,
        "vllm_importance_sampling_correction": False,  # stubs do not know what is likely
        "vllm_kwargs": {},
        "weight_sync": "shm",
        "per_device_train_batch_size": 64,
        "max_steps": STEPS,
        "learning_rate": 0.5,
        "rows": 64,
    } | options
    defaults["vllm_kwargs"] = {"sync_folder": str(folder)} | defaults["vllm_kwargs"]
    return make_trainer("grpo", folder / "run", **defaults)


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    trainer.generator.close()
    return dict(trainer.policy.state_dict())


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Turmoil(TrainerCallback):
    """After each step, new servers join and some that died return; one cannot take the next weights."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        world = self.world
        dead = [stub for stub in world.stubs.values() if not stub.is_alive]
        for stub in dead[: len(dead) // 2]:
            world.join(port=int(stub.url.rpartition(":")[2]))
            world.counts["returns"] += 1
        world.join(max(0, SERVERS - len(world.alive)))
        world.alive[state.global_step].is_full = True
        if state.global_step == 4:  # nobody is left, but others come
            for stub in world.alive:
                world.die(stub, leaves=False)


def test_servers_that_die_and_join_change_no_bit_of_what_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = world_of(None)
    quiet.join()
    expected = trained(
        trainer_of(tmp_path / "quiet", quiet, monkeypatch, vllm_server_base_url=[*quiet.stubs], max_steps=STEPS)
    )
    world = world_of(tmp_path / "fleet", seed=3)
    world.join(SERVERS)
    trainer = trainer_of(tmp_path / "chaos", world, monkeypatch, callbacks=[Turmoil(world)])
    found = trained(trainer)
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name
    assert any(not torch.equal(weight, stopping_model().state_dict()[name]) for name, weight in expected.items())
    assert world.counts["deaths"] >= 2 * SERVERS
    assert world.counts["returns"] >= 10
    assert world.counts["refusals"] >= 5
    assert len({*logged(trainer, "server/alive")}) > 3
    assert sum(logged(trainer, "server/retries")) >= SERVERS


def test_a_run_without_servers_ends_and_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(tmp_path / "fleet")
    trainer = trainer_of(tmp_path, world, monkeypatch, vllm_server_timeout=0.2, vllm_kwargs={"min_servers": 2})
    world.join()
    words = r"dir:.*/fleet: 1 servers have the weights, but min_servers=2 .*within 0\.2 s.*--join .*/fleet"
    with pytest.raises(AbsentServerError, match=words):
        trainer.train()
    trainer.generator.close()
