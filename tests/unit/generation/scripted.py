"""Servers without a network: a function answers each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from prefrl.generation.server import PROTOCOL, ServerInfo
from prefrl.http import Http

A, B = "http://a:1", "http://b:1"


def info(**changes: Any) -> ServerInfo:
    """Of a tiny model; adapters are taken."""
    versions = {"protocol": PROTOCOL, "prefrl": "0", "vllm": "0", "torch": "0", "transformers": "0"}
    model = {"model": "m", "architecture": "X", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1}
    rest = {"tokenizer": "t", "dtype": "float32", "max_model_len": 16, "logprobs_mode": "processed_logprobs"}
    rest |= {"max_lora_rank": 8, "num_workers": 1, "memory_share": None, "returns_routes": False}
    return ServerInfo(**(versions | model | rest | changes))


class ScriptedHttp(Http):
    """Requests that are answered by `answer(base_url, path, json)`, which may raise; `asked` is what came."""

    def __init__(self, answer: Callable[[str, str, Any], Any]) -> None:
        super().__init__()
        self._answer = answer
        self.asked: list[tuple[str, str]] = []

    async def send(self, method: str, url: str, *, json: Any = None, **options: Any) -> Any:
        parts = urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
        self.asked.append((base, parts.path))
        return await asyncio.to_thread(self._answer, base, parts.path, json)

    def paths(self, url: str) -> list[str]:
        """What a server was asked for, in order."""
        return [path for base, path in self.asked if base == url]
