"""Episodes whose turns are sampled by a real server: one request each, without a barrier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefrl.generation.vllm.client import VLLMGenerator
from tests.contract.cases import relative_difference, update_of
from tests.vllm.faults import proxy_of, second_door
from tests.vllm.server import Server
from tests.vllm.test_training import key as key
from tests.vllm.test_training import logged, online

pytestmark = pytest.mark.vllm


def test_overlap_makes_the_update_of_sync_and_scores_agree(tmp_path: Path, server: Server) -> None:
    options: dict[str, Any] = {"talks": "forgetful", "turn_credit": "return", "max_steps": 3, "learning_rate": 0.1}
    options |= {"per_device_train_batch_size": 16, "max_turns": 6}
    trainer = online(tmp_path / "sync", server, **options)
    expected = update_of(trainer)
    assert min(logged(trainer, "episodes/mean_turns")) > 2
    # The trainer and the server score the same ids in the same contexts.
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    update = update_of(online(tmp_path / "overlap", server, generation_mode="overlap", **options))
    assert relative_difference(update, expected) < 1e-4


def test_async_episodes_train(tmp_path: Path, server: Server) -> None:
    options: dict[str, Any] = {"talks": "faithful", "max_steps": 4, "generation_mode": "async", "max_staleness": 2}
    trainer = online(tmp_path, server, learning_rate=0.1, **options)
    trainer.train()
    assert logged(trainer, "sample/staleness_max")[-1] <= 2
    trainer.end()


def test_the_turns_of_an_episode_stay_with_their_server(tmp_path: Path, server: Server) -> None:
    with proxy_of(server.url) as one, proxy_of(server.url) as other:
        second_door(other)
        urls = [one.url, other.url]
        trainer = online(tmp_path, server, vllm_server_base_url=urls, weight_sync="shm", talks="faithful", max_steps=1)
        homes: list[tuple[int, str]] = []
        generator = trainer.generator
        assert isinstance(generator, VLLMGenerator)
        asked = generator._asker._ask_once

        async def noted(at: Any, prompt: Any, timeout: float) -> Any:
            homes.append((id(prompt.home), at.url))
            return await asked(at, prompt, timeout)

        generator._asker._ask_once = noted  # type: ignore[method-assign]
        trainer.train()
        assert len({url for _, url in homes}) == 2, "all at one server"
        assert len(set(homes)) == len({home for home, _ in homes}), "an episode moved to another server"
        trainer.end()
