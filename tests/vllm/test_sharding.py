"""GRPO through a real server, with weights that are partitioned over two processes."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.vllm.faults import Fault, Proxy, drop, proxy_of, vanish
from tests.vllm.server import Server
from tests.vllm.sharded_worker import FOLLOWED, STEPS, STRIKE

pytestmark = pytest.mark.vllm

SECONDS = 900


def train(backend: str, server: Server, folder: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of each run; they share one launch."""
    result = folder / "result.pt"
    job = {"backend": backend, "model_dir": str(server.model_dir), "result": str(result), "runs": runs}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", server.key)
        results: list[dict[str, Any]] = launch(
            "tests.vllm.sharded_worker", json.dumps(job), result=result, seconds=SECONDS
        )
    return results


def check(result: dict[str, Any]) -> None:
    """All steps, whose syncs were compared with the trainer's own model, and weights that moved."""
    assert result["steps"] == len(result["firsts"]) == STEPS
    assert max(result["firsts"]) - min(result["firsts"]) > 1e-3
    assert max(result["differences"]) < 1e-4


def dies_at_a_strike(proxy: Proxy) -> Fault:
    """An update whose server is gone in the middle of it, for a while."""
    struck = threading.Event()

    def strike(handler: Any, _: Any) -> None:
        vanish(proxy)
        struck.set()
        handler.break_off()

    def update(handler: Any, forward: Any) -> None:
        answers: list[tuple[int, bytes]] = []
        forwarding = threading.Thread(target=lambda: answers.append(forward()))
        forwarding.start()
        while forwarding.is_alive():
            forwarding.join(0.02)
            if struck.is_set():
                struck.clear()
                handler.break_off()
        handler.answer(*answers[0])

    proxy.fail(STRIKE, strike)
    return update


def loses_some(*, is_told: bool) -> Fault:
    """Updates of which the server never hears: of 20, one breaks off and, unless `is_told`, another one seems fine."""
    numbers = itertools.count(1)

    def update(handler: Any, forward: Any) -> None:
        number = next(numbers) % 20
        if number == 5:
            drop(handler, forward)
        elif number == 15 and not is_told:
            handler.answer(200, b"{}")
        else:
            handler.answer(*forward())

    return update


def check_followed(result: dict[str, Any], *, num_whole: int) -> None:
    """All steps, of which few sent all weights; the worker has compared bits."""
    assert len(result["sizes"]) == FOLLOWED
    assert sum(size >= result["whole"] for size in result["sizes"]) == num_whole
    assert sorted(result["sizes"])[FOLLOWED // 2] < result["whole"] / 10


def test_steps_under_zero3_also_when_a_server_dies_in_a_transfer(server: Server, tmp_path: Path) -> None:
    with proxy_of(server.url) as proxy, proxy_of(server.url) as other:
        proxy.fail("/update_weights", dies_at_a_strike(proxy))
        other.fail("/update_weights", loses_some(is_told=True))
        whole, adapter, followed = train(
            "zero3",
            server,
            tmp_path,
            {"url": proxy.url, "strikes": True, "weight_sync": "gloo"},
            {"url": server.url, "lora": True, "weight_sync": "adapter"},
            {"url": other.url, "over": "gloo"},
        )
    check_followed(followed, num_whole=4)  # the first, and one for each of the updates 5, 25 and 45
    check(whole)
    reads = whole["read"]
    assert len(reads) == STEPS + 1
    assert 12 <= reads[2] < reads[0], "weights were read on for a server that is gone"
    assert {*reads[:2], *reads[3:]} == {reads[0]}
    check(adapter)
    assert adapter["trained_bytes"] < adapter["bytes_sent"] < 2 * adapter["trained_bytes"]
    assert adapter["read"] == []


def test_steps_under_fsdp2_with_all_weights_and_with_changes_of_an_adapter(server: Server, tmp_path: Path) -> None:
    with proxy_of(server.url) as proxy:
        proxy.fail("/update_weights", loses_some(is_told=False))
        whole, merged, followed = train(
            "fsdp2",
            server,
            tmp_path,
            {"url": server.url, "weight_sync": "shm"},
            {"url": server.url, "weight_sync": "delta", "lora": True},
            {"url": proxy.url, "over": "store"},
        )
    check_followed(followed, num_whole=3)  # the first, and two when the changes were as large as it
    for result in (whole, merged):
        check(result)
        assert result["read"] == [result["read"][0]] * STEPS
