"""ASGI middleware in front of vLLM's routes: requires the key, and describes the server at `INFO_PATH`.

vLLM's own key protects only /v1, /v2, /inference and /cohere: pause, weight transfer and collective_rpc stay open.
A web page that sends requests to this machine does not have the key either, whatever its Host and Origin say.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import prefrl
from prefrl.errors import ConfigError
from prefrl.generation.server import INFO_PATH, KEY_VARIABLE, PROTOCOL, ServerInfo, vocabulary_fingerprint

# Open without the key: they only tell whether the server is running.
OPEN_PATHS = frozenset({"/health", "/ping"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Outermost middleware of the server. It imports nothing from vLLM, and only reads the state of its application.

    Args:
        app: The application to protect.

    Raises:
        ConfigError: There is no key.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise ConfigError(f"{KEY_VARIABLE}: not set. Start the server with `prefrl vllm-serve`.")
        self._expected = f"Bearer {key}".encode()
        self._info: ServerInfo | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse or forward one request or websocket."""
        if scope["type"] == "lifespan" or (scope["path"] in OPEN_PATHS and scope["type"] == "http"):
            await self._app(scope, receive, send)
        elif not self._may_enter(scope):
            await _refuse(scope, send)
        elif scope["path"] == INFO_PATH and scope["type"] == "http":
            await self._send_info(scope, send)
        else:
            await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)

    async def _send_info(self, scope: Scope, send: Send) -> None:
        if scope["method"] != "GET":
            await _answer(send, 405, {"error": f"{scope['method']} {INFO_PATH}: only GET is allowed"})
            return
        if self._info is None:
            self._info = _server_info(scope["app"].state)
        await _answer(send, 200, asdict(self._info))


def _server_info(state: Any) -> ServerInfo:
    config = state.vllm_config
    model = config.model_config
    return ServerInfo(
        protocol=PROTOCOL,
        prefrl=prefrl.__version__,
        vllm=version("vllm"),
        torch=version("torch"),
        transformers=version("transformers"),
        model=state.openai_serving_models.base_model_paths[0].name,
        architecture=model.hf_config.architectures[0],
        vocab_size=model.get_vocab_size(),
        hidden_size=model.get_hidden_size(),
        num_hidden_layers=model.get_total_num_hidden_layers(),
        tokenizer=vocabulary_fingerprint(state.engine_client.get_tokenizer().get_vocab()),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        logprobs_mode=model.logprobs_mode,
        max_lora_rank=None if config.lora_config is None else config.lora_config.max_lora_rank,
        num_workers=config.parallel_config.world_size_across_dp,
    )


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":  # closing it before it is accepted sends HTTP 403
        await send({"type": "websocket.close", "code": 1008})
        return
    text = f"this server requires a key: send 'Authorization: Bearer KEY'; trainers read KEY from {KEY_VARIABLE}"
    await _answer(send, 401, {"error": text}, (b"www-authenticate", b"Bearer"))


async def _answer(send: Send, status: int, body: dict[str, Any], *headers: tuple[bytes, bytes]) -> None:
    content = json.dumps(body).encode()
    base = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": content})
