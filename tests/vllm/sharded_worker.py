"""Run by a test on two processes: trains through a server with weights that are partitioned over them.

`sharded_worker JOB`: rank 0 stores in `JOB["result"]` what came of each run in `JOB["runs"]`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prefrl import distributed
from prefrl.distributed import Differences
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.generation.weights import wire
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http, HttpError
from prefrl.models.export import PolicyWeights
from tests.contract.cases import make_trainer
from tests.distributed.backends import enter, leave_training
from tests.patience import PATIENCE
from tests.vllm.client import be_patient
from tests.vllm.test_delta import state_of
from tests.vllm.test_delta import step as change
from tests.vllm.test_training import check_after_each_sync, logged, lora, online
from tests.vllm.test_weights import server_info

SECONDS_FOR_A_RUN = 400
STEPS = 4  # the third transfer is struck; one more goes to a server that was away
STRIKE = "/strike"
FOLLOWED = 50  # steps of `follow`


class Watched(PolicyWeights):
    """Counts what is read, and tells a server's proxy of the middle of a transfer.

    Args:
        model: The policy.
        url: Of the proxy; None: nobody is told.
        sync: Reads the weights.
    """

    def __init__(self, model: torch.nn.Module, url: str | None, sync: WeightSync) -> None:
        super().__init__(model)
        self.url = url
        self.sync = sync
        self.read: list[int] = []  # weights in each transfer

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.read.append(0)
        for weight in super().__iter__():
            self.read[-1] += 1
            if self.url is not None and (len(self.read), self.read[-1]) == (3, 12):
                with contextlib.closing(Http(key=None)) as http, contextlib.suppress(HttpError):
                    http.request("POST", self.url + STRIKE, timeout=PATIENCE)
                self._wait_until_the_sender_knows()
            yield weight

    def changes(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Tensor | Differences]]:
        self.read.append(0)
        for found in super().changes(*arguments, **options):
            self.read[-1] += 1
            yield found

    def _wait_until_the_sender_knows(self) -> None:
        """The rest of a tiny model may be read before the broken connection shows."""
        (server,) = self.sync._servers.values()
        assert server.answer is not None
        futures.wait([server.answer], timeout=PATIENCE)
        assert server.answer.done()


def run(number: int, job: dict[str, Any], backend: dict[str, Any]) -> dict[str, Any]:
    """`STEPS` steps; the server and the trainer's own model agree after each sync, or this raises."""
    options = dict(job["runs"][number])
    server = SimpleNamespace(url=options.pop("url"), model_dir=Path(job["model_dir"]))
    strikes = options.pop("strikes", False)
    if options.pop("lora", False):
        # With larger steps weights grow until rounding alone is a difference of more than 1e-4.
        options |= {"peft_config": lora(), "learning_rate": 2.0}
    leave_training()
    trainer = online(Path(job["result"]).parent / f"run-{number}", server, max_steps=STEPS, **options, **backend)
    assert isinstance(trainer.generator, VLLMGenerator)
    sync = trainer.generator.weight_sync
    trainer.weights = weights = Watched(trainer.policy, server.url if strikes else None, sync)
    firsts = check_after_each_sync(trainer)
    trainer.train()
    assert distributed.is_sharded(trainer.policy)
    trainer.generator.close()
    return {
        "steps": trainer.state.global_step,
        "firsts": firsts,
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
        "read": weights.read,
        "bytes_sent": sync.bytes_sent,
        "trained_bytes": sum(
            4 * distributed.shape_of(p).numel() for p in weights._model.parameters() if p.requires_grad
        ),
    }


def follow(number: int, job: dict[str, Any], backend: dict[str, Any]) -> dict[str, Any]:
    """Random steps of partitioned weights, after each of which the server gets what has changed.

    In the end, it must have the bits that it is sent by a whole model.
    """
    options, folder = job["runs"][number], Path(job["result"]).parent / f"run-{number}"
    leave_training()
    accelerator = make_trainer("sft", folder, **backend).accelerator
    leave_training()
    if accelerator.is_fsdp2:  # set for the trainer's model
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
    model, twin = (AutoModelForCausalLM.from_pretrained(job["model_dir"], dtype=torch.float32) for _ in range(2))
    distributed.prepare_frozen(accelerator, model)
    assert distributed.is_sharded(model)
    weights, random = PolicyWeights(model), torch.Generator().manual_seed(0)
    http = Http(key=os.environ["VLLM_API_KEY"])
    place = None if options["over"] == "gloo" else folder / "store"
    sync = WeightSync(http, method="delta", folder=place, timeout=PATIENCE, over=options["over"])
    server, sizes = SimpleNamespace(url=options["url"]), []
    info = server_info(http, server) if distributed.is_main() else None
    for step in range(FOLLOWED):
        change(twin, random)
        for own, value in zip(model.parameters(), twin.parameters(), strict=True):
            distributed.load_whole(own, value.detach())
        weights.lead(partial(sync.send, {server.url: info}, weights, version=f"run:{step}"))
        sizes.append(sync.bytes_sent)
    if info is not None:
        found = state_of(server, http, info.model)
        everything = WeightSync(http, method="shm", folder=folder / "files", timeout=PATIENCE)
        everything.send({server.url: info}, PolicyWeights(twin), version="run:all")
        assert state_of(server, http, info.model) == found
        everything.close()
    sync.close()
    http.close()
    return {"sizes": sizes, "whole": sum(tensor.nbytes for _, tensor in PolicyWeights(twin))}


def main(job: dict[str, Any]) -> None:
    """All runs, one after another."""
    be_patient()
    # A tiny model would go in one message.
    assert wire.messages.__kwdefaults__ is not None
    wire.messages.__kwdefaults__["bucket_bytes"] = 2**16
    backend = enter(job["backend"], Path(job["result"]).parent)
    results = []
    for number in range(len(job["runs"])):
        faulthandler.dump_traceback_later(SECONDS_FOR_A_RUN, exit=True)
        work = follow if "over" in job["runs"][number] else run
        results.append(work(number, job, backend))
    faulthandler.cancel_dump_traceback_later()
    if distributed.is_main():
        torch.save(results, job["result"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
