"""A stand-in for a vLLM server on the trainer's GPU, in a process of its own: it receives weights as the plugin does.

It has no vLLM: what it receives is hashed instead of loaded.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from prefrl.generation.weights import device_memory, process_group, wire
from prefrl.http import Refused
from tests.patience import PATIENCE
from tests.unit.generation.scripted import ScriptedHttp


def digests(weights: Iterable[wire.Named]) -> dict[str, str]:
    """Dtype, shape and a hash of the bits of each tensor."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} "
        + hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in weights
    }


class WindowServer:
    """The process, and an HTTP client whose requests it answers.

    Args:
        spare: Device memory that it leaves free, in bytes; None: what servers do.
        hashes: Whether it hashes what it receives, or only keeps the time.
    """

    def __init__(self, *, spare: int | None = None, hashes: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, spare, hashes), daemon=True)
        self.process.start()
        other.close()
        self.ask("allocated")  # it has its context on the device
        self.http = ScriptedHttp(self._answer)
        self.received: dict[str, Any] = {}

    def ask(self, what: str, value: Any = None) -> Any:
        """What the process answers.

        Raises:
            Refused: It failed, or is gone.
        """
        try:
            self._pipe.send((what, value))
            if not self._pipe.poll(PATIENCE):
                raise Refused("no answer", status=500)
            is_well, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Refused("gone", status=500) from error
        if not is_well:
            raise Refused(answer, status=500)
        return answer

    def close(self) -> None:
        """End the process."""
        self.http.close()
        self.process.kill()
        self.process.join()

    def _answer(self, url: str, path: str, json: Any) -> Any:
        if path == "/init_weight_transfer_engine":
            self.ask("join", json["init_info"])
        elif path == "/update_weights":
            self.received = self.ask("receive", json["update_info"]["key"])
        return None


def _serve(pipe: Any, spare: int | None, hashes: bool) -> None:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    if spare is not None:
        device_memory._SPARE = spare
    groups: list[process_group.Group] = []

    def receive(key: str) -> dict[str, Any]:
        start = time.perf_counter()
        weights = wire.receive(groups[-1], bytes.fromhex(key))
        found = {"seconds": time.perf_counter() - start, "devices": {str(tensor.device) for _, tensor in weights}}
        return found | {"digests": digests(weights) if hashes else {}}

    def join(invitation: dict[str, Any]) -> None:
        groups.append(process_group.join(process_group.Invitation(**invitation), worker=0))

    def allocated(_: None) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    actions: dict[str, Callable[[Any], Any]] = {"join": join, "receive": receive, "allocated": allocated}
    while True:
        try:
            what, value = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, actions[what](value))
        except Exception as error:
            for group in groups:
                group.close()
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)
