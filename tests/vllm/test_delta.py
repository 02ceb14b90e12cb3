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
LOST, UNDONE, RESTART, GROUP, LOST_IN_GROUP, STORE, UNDONE_IN_STORE, LOST_IN_STORE = 5, 10, 15, 20, 25, 30, 35, 40


def step(model: torch.nn.Module, random: torch.Generator) -> None:
    """Change one in a hundred weights, and of one parameter nearly all."""
    parameters = list(model.parameters())
    dense = int(torch.randint(len(parameters), (), generator=random))
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            is_changed = torch.rand(parameter.shape, generator=random) < (0.9 if number == dense else 0.01)
            parameter += 0.01 * torch.randn(parameter.shape, generator=random) * is_changed


def checksums(server: Server, http: Http, action: str = "checksum") -> dict[str, str]:
    """Hashes of the parameters that a server keeps as they are, by their names in vLLM; a CPU repacks matrices."""
    answer = http.request("POST", server.url + "/weight_checker", json={"action": action}, timeout=60)
    return {name.rpartition(":")[2]: found for name, found in answer.get("checksums", {}).items()}


def state_of(server: Server, http: Http, model: str) -> Any:
    """What shows bits of a server: hashes, and unrounded log-probs."""
    answers = [generate(http, server, prompt, model=model) for prompt in (SHORT, LONG)]
    return checksums(server, http), [(answer.token_ids, answer.logprobs) for answer in answers]


def test_after_many_steps_lost_messages_and_a_restart_a_server_has_the_trainers_bits(
    second_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, random = second_server, policy(second_server, seed=1), torch.Generator().manual_seed(0)
    weights, http, sizes = PolicyWeights(model), Http(key=second_server.key), []
    whole = sum(tensor.nbytes for _, tensor in weights)
    info = server_info(http, server)
    files = WeightSync(http, method="delta", folder=tmp_path, timeout=100, over="shm")
    group = WeightSync(http, method="delta", folder=None, timeout=100, over="gloo")
    store = WeightSync(http, method="delta", folder=f"file://{tmp_path}/store", timeout=100, over="store")
    everything = WeightSync(http, method="shm", folder=tmp_path, timeout=100)
    with proxy_of(server.url) as proxy, caplog.at_level(logging.WARNING, "prefrl"):
        for number in range(STEPS):
            step(model, random)
            sync = files if number < GROUP else group if number < STORE else store
            if number in (LOST, LOST_IN_GROUP, LOST_IN_STORE):
                proxy.fail("/update_weights", drop, times=1)
            if number in (
                UNDONE,
                UNDONE_IN_STORE,
            ):  # the server says yes and has nothing, which shows at the next message
                proxy.fail("/update_weights", lambda handler, _: handler.answer(200, b"{}"), times=1)
            if number == RESTART:
                server.restart()
            sync.send({proxy.url: info}, weights, version=f"run:{number}")
            sizes.append(sync.bytes_sent)
            if number == RESTART:
                assert_serves(model, http, server, name=info.model, version=f"run:{number}")
    faults = [LOST, UNDONE + 1, RESTART, LOST_IN_GROUP]
    assert [number for number, size in enumerate(sizes) if size >= whole] == sorted([0, GROUP, STORE, *faults])
    assert sum("All weights are sent again" in record.message for record in caplog.records) == len(faults)
    # The server in whose store nothing is missing reads on, or begins again, from what is there.
    assert sum("It is asked again" in record.message for record in caplog.records) == 1
    assert sorted(sizes)[STEPS - 8] < whole / 2
    found = state_of(server, http, info.model)
    everything.send({server.url: info}, weights, version="run:all")
    assert state_of(server, http, info.model) == found
    # That was another trainer, whose weights the changes do not belong to.
    step(model, random)
    group.send({server.url: info}, weights, version="run:last")
    assert group.bytes_sent >= whole
    assert state_of(server, http, info.model) != found
    assert_serves(model, http, server, name=info.model, version="run:last")
    # Only what has changed is loaded, and what is one matrix with it: of all that was set to 0, the rest stays 0.
    checksums(server, http, "reset")
    zeros, layer = checksums(server, http), "model.layers.0."
    with torch.no_grad():
        for name in ("self_attn.k_proj.weight", "post_attention_layernorm.weight"):
            model.get_parameter(layer + name).view(-1)[5] += 1
    group.send({server.url: info}, weights, version="run:some")
    loaded = {name for name, found in checksums(server, http).items() if found != zeros[name]}
    assert loaded == {layer + "self_attn.qkv_proj.bias", layer + "post_attention_layernorm.weight"}
    for each in (files, group, store, everything, http):
        each.close()
