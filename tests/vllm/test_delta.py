"""Changes of weights to a real server: after many steps, losses and a restart, it has the trainer's bits."""

from __future__ import annotations

import logging
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
    second_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, random = second_server, policy(second_server, seed=1), torch.Generator().manual_seed(0)
    weights, http, sizes = PolicyWeights(model), Http(key=second_server.key), []
    whole = sum(tensor.nbytes for _, tensor in weights)
    info = server_info(http, server)
    with proxy_of(server.url) as proxy, caplog.at_level(logging.WARNING, "prefrl"):
        deltas = WeightSync(http, method="delta", folder=None, timeout=100, over="gloo")
        everything = WeightSync(http, method="gloo", folder=None, timeout=100)
        for number in range(STEPS):
            step(model, random)
            if number == 15:
                proxy.fail("/update_weights", drop, times=1)
            if number == 30:
                # The server says yes and has nothing: it is found out at the next message.
                proxy.fail("/update_weights", lambda handler, _: handler.answer(200, b"{}"), times=1)
            if number == 40:
                server.restart()
            deltas.send({proxy.url: info}, weights, version=f"run:{number}")
            sizes.append(deltas.bytes_sent)
            if number in (31, 40):
                assert_serves(model, http, server, name=info.model, version=f"run:{number}")
    assert [number for number, size in enumerate(sizes) if size >= whole] == [0, 15, 31, 40]
    assert sum("All weights are sent again" in record.message for record in caplog.records) == 3
    assert max(size for number, size in enumerate(sizes) if number not in (0, 15, 31, 40)) < whole / 2
    found = state_of(server, http, info.model)
    everything.send({server.url: info}, weights, version="run:all")
    assert state_of(server, http, info.model) == found
    # That was another trainer, whose weights the changes do not belong to.
    step(model, random)
    deltas.send({server.url: info}, weights, version="run:last")
    assert deltas.bytes_sent >= whole
    assert state_of(server, http, info.model) != found
    assert_serves(model, http, server, name=info.model, version="run:last")
    for each in (deltas, everything, http):
        each.close()
