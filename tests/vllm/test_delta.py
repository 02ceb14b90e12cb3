"""Changes of weights to a real server: after many steps, losses and a restart, it has the trainer's bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http
from prefrl.models.export import PolicyWeights
from tests.vllm.faults import drop, proxy_of
from tests.vllm.server import Server
from tests.vllm.test_weights import LONG, SHORT, assert_serves, generate, policy, server_info

pytestmark = pytest.mark.vllm

STEPS = 50
LOST, UNDONE, RESTART, GROUP, LOST_IN_GROUP = 10, 20, 30, 40, 45


def step(model: torch.nn.Module, random: torch.Generator) -> None:
    """Change one in a hundred weights, and of one parameter nearly all."""
    parameters = list(model.parameters())
    dense = int(torch.randint(len(parameters), (), generator=random))
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            is_changed = torch.rand(parameter.shape, generator=random) < (0.9 if number == dense else 0.01)
            parameter += 0.01 * torch.randn(parameter.shape, generator=random) * is_changed


def state_of(server: Server, http: Http, model: str) -> Any:
    """What shows bits of a server: hashes of the parameters that it keeps as they are, and unrounded log-probs."""
    checksums = http.request("POST", server.url + "/weight_checker", json={"action": "checksum"}, timeout=60)
    answers = [generate(http, server, prompt, model=model) for prompt in (SHORT, LONG)]
    return checksums, [(answer.token_ids, answer.logprobs) for answer in answers]


def test_after_many_steps_lost_messages_and_a_restart_a_server_has_the_trainers_bits(
    second_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, random = second_server, policy(second_server, seed=1), torch.Generator().manual_seed(0)
    weights, http, sizes = PolicyWeights(model), Http(key=second_server.key), []
    whole = sum(tensor.nbytes for _, tensor in weights)
    info = server_info(http, server)
    files = WeightSync(http, method="delta", folder=tmp_path, timeout=100, over="shm")
    group = WeightSync(http, method="delta", folder=None, timeout=100, over="gloo")
    everything = WeightSync(http, method="shm", folder=tmp_path, timeout=100)
    with proxy_of(server.url) as proxy, caplog.at_level(logging.WARNING, "prefrl"):
        for number in range(STEPS):
            step(model, random)
            sync = files if number < GROUP else group
            if number in (LOST, LOST_IN_GROUP):
                proxy.fail("/update_weights", drop, times=1)
            if number == UNDONE:  # the server says yes and has nothing, which shows at the next message
                proxy.fail("/update_weights", lambda handler, _: handler.answer(200, b"{}"), times=1)
            if number == RESTART:
                server.restart()
            sync.send({proxy.url: info}, weights, version=f"run:{number}")
            sizes.append(sync.bytes_sent)
            if number == RESTART:
                assert_serves(model, http, server, name=info.model, version=f"run:{number}")
    faults = [LOST, UNDONE + 1, RESTART, LOST_IN_GROUP]
    assert [number for number, size in enumerate(sizes) if size >= whole] == sorted([0, GROUP, *faults])
    assert sum("All weights are sent again" in record.message for record in caplog.records) == len(faults)
    assert sorted(sizes)[STEPS - 7] < whole / 2
    found = state_of(server, http, info.model)
    everything.send({server.url: info}, weights, version="run:all")
    assert state_of(server, http, info.model) == found
    # That was another trainer, whose weights the changes do not belong to.
    step(model, random)
    group.send({server.url: info}, weights, version="run:last")
    assert group.bytes_sent >= whole
    assert state_of(server, http, info.model) != found
    assert_serves(model, http, server, name=info.model, version="run:last")
    for each in (files, group, everything, http):
        each.close()
