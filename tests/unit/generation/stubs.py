"""Servers without a network that take weights as files, and sample by them alone; they die, come back and join.

A completion is a function of the weights' bytes, the prompt and its seed: a server with other weights would answer
otherwise, and so training would end elsewhere.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from prefrl.generation.server import INFO_PATH
from prefrl.generation.vllm.handshake import Requirements
from prefrl.generation.vllm.members import Registration
from prefrl.http import Refused, Unreachable
from tests.unit.generation.scripted import info

GENERATE = "/inference/v1/generate"
FRESH = "default"


@dataclass
class Stub:
    """A server."""

    url: str
    registration: Registration | None
    version: str = FRESH
    weights: str = ""  # a hash
    is_alive: bool = True
    is_full: bool = False  # it has no memory for the next transfer


@dataclass
class World:
    """Servers, and what happens to them.

    Args:
        folder: Where they register; None: nowhere.
        key: Their key.
        model: What they serve.
        seed: Decides which requests are the last ones of their servers; None: nobody dies.
    """

    folder: Path | None
    key: str
    model: Requirements
    seed: int | None = None
    stubs: dict[str, Stub] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # of what happened
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def join(self, number: int = 1, *, port: int | None = None) -> None:
        """Start servers, or one again."""
        for _ in range(number):
            port_of_it = port or 1000 + len(self.stubs)
            url = f"http://s:{port_of_it}"
            registration = None
            if self.folder is not None:
                registration = Registration(self.folder, url, key=self.key)
                registration.renew()
            self.stubs[url] = Stub(url, registration)
            self.counts["joins"] += 1

    def die(self, stub: Stub, *, leaves: bool) -> None:
        """End a server, which may say that it leaves."""
        stub.is_alive = False
        self.counts["deaths"] += 1
        if leaves and stub.registration is not None:
            stub.registration.leave()
        if not self.alive:  # a run without servers would have to wait
            self.join(3)

    @property
    def alive(self) -> list[Stub]:
        return [stub for stub in self.stubs.values() if stub.is_alive]

    def answer(self, url: str, path: str, json: Any) -> Any:
        """What a server answers, see `ScriptedHttp`."""
        with self.lock:
            stub = self.stubs.get(url)
            if stub is None or not stub.is_alive:
                raise Unreachable(f"{url} is gone")
            if path == GENERATE:
                return self._completions(stub, json)
            if path == "/update_weights":
                self._load(stub, json["update_info"])
            elif path == "/update_weight_version":
                stub.version = json["new_version"]
            return {
                INFO_PATH: asdict(self._info()),
                "/weight_info": {"weight_version": stub.version},
                "/reset_prefix_cache": {"success": True},
            }.get(path)

    def _info(self) -> Any:
        names = ("architecture", "vocab_size", "hidden_size", "num_hidden_layers", "tokenizer")
        return info(max_model_len=256, **{name: getattr(self.model, name) for name in names})

    def _load(self, stub: Stub, update: Any) -> None:
        if stub.is_full:
            stub.is_full = False
            self.counts["refusals"] += 1
            raise Refused(f"{stub.url} is out of memory", status=500)
        digest = hashlib.sha256()
        for path in sorted(Path(update["path"]).iterdir()):
            for name, tensor in sorted(load_file(path).items()):
                digest.update(name.encode() + tensor.numpy().tobytes())
        stub.weights = digest.hexdigest()

    def _completions(self, stub: Stub, json: Any) -> Any:
        what = json["sampling_params"]
        asked = f"{json['token_ids']}{what['seed']}{stub.version.partition(':')[2]}"
        self._asked[asked] += 1
        if self.seed is not None and self._asked[asked] <= 2:
            fate = random.Random(f"{self.seed}{asked}{self._asked[asked]}").random()
            if fate < 0.3:
                self.die(stub, leaves=fate < 0.1)
                raise Unreachable(f"{stub.url} died")
        choices = [self._choice(stub, what, json["token_ids"], index) for index in range(what["n"])]
        return {"request_id": f"generate-tokens-{json['request_id']}", "choices": choices}

    def _choice(self, stub: Stub, what: Any, prompt: list[int], index: int) -> Any:
        source = random.Random(f"{stub.weights}{prompt}{what['seed'] + index}")
        tokens: list[int] = []
        while len(tokens) < what["max_tokens"] and not (tokens and tokens[-1] in what["stop_token_ids"]):
            tokens.append(source.randrange(self.model.vocab_size))
        reason = "stop" if tokens[-1] in what["stop_token_ids"] else "length"
        content = [{"token_id": token, "logprob": -1.0} for token in tokens]
        spans = [{"version": stub.version, "start": 0, "end": len(tokens)}]
        rest = {"logprobs": {"content": content}, "weight_versions": spans}
        return {"index": index, "finish_reason": reason, "token_ids": tokens} | rest
