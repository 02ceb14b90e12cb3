"""What a generation server and its clients agree on: the key, and the answer to `GET /prefrl/info`.

The key is that of the environment, or of a file that only its user can read. Server and trainer both import this: it
must stay light. `Guard` is ASGI middleware in front of vLLM's routes: it requires the key, and describes the server at
`INFO_PATH`. vLLM's own key protects only /v1, /v2, /inference and /cohere: pause, weight transfer and collective_rpc
stay open. A web page that sends requests to this machine does not have the key either, whatever its Host and Origin
say.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import prefrl
from prefrl.errors import ConfigError, GenerationError

INFO_PATH = "/prefrl/info"
# Increased when a server and a trainer of different releases can no longer work together.
PROTOCOL = 4


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's versions, model and limits."""

    protocol: int
    prefrl: str  # versions
    vllm: str
    torch: str
    transformers: str
    model: str  # the model name to use in requests
    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    tokenizer: str  # `vocabulary_fingerprint`
    dtype: str
    max_model_len: int  # tokens of prompt and completion
    logprobs_mode: str
    max_lora_rank: int | None  # None: the server takes no adapters
    num_workers: int  # processes that hold weights: tensor * pipeline * data parallel
    memory_share: float | None  # of its device, while it is awake; None: it never sleeps
    returns_routes: bool  # answers have the experts of a mixture

    @classmethod
    def from_json(cls, url: str, answer: Any) -> ServerInfo:
        """Read the answer of the server at `url`.

        Raises:
            GenerationError: The answer does not follow this protocol.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(answer, dict) or answer.get("protocol") != PROTOCOL or not names <= answer.keys():
            raise GenerationError(
                f"{url}{INFO_PATH} answered {answer!r:.200}: this server was not started with `prefrl vllm-serve` "
                f"of a compatible version (protocol {PROTOCOL}). Start it with the trainer's version of prefrl."
            )
        return cls(**{name: answer[name] for name in names})


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 of the tokens and their ids; it does not depend on the version of transformers."""
    entries = json.dumps(sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0])))
    return hashlib.sha256(entries.encode()).hexdigest()


# The environment variable with the key, of the server and of the trainer. vLLM reads it too.
KEY_VARIABLE = "VLLM_API_KEY"
MIN_KEY_LENGTH = 32  # characters: a key of that length cannot be found by trying


def check_key(key: str) -> None:
    """Refuse a key that is easy to guess, or that an HTTP header cannot contain.

    Raises:
        ConfigError: It is. The message does not contain it.
    """
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"{KEY_VARIABLE}: contains a space, a line break or a non-ASCII character, which an HTTP header cannot "
            "contain. Set another key."
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{KEY_VARIABLE}: has {len(key)} characters, but must have at least {MIN_KEY_LENGTH}. Set one that "
            "`python3 -c 'import secrets; print(secrets.token_hex(32))'` prints."
        )


def key_file(environment: Mapping[str, str]) -> Path:
    """Where the key of this user's servers is.

    Args:
        environment: Environment variables.
    """
    folder = environment.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path("~/.config").expanduser()) / "prefrl" / "vllm_api_key"


def key_of_user(environment: Mapping[str, str]) -> str:
    """The key of `VLLM_API_KEY`; if it is not set, that of `key_file`, which is created with a random key.

    Servers and trainers of one user on one machine so have the same key, and other users have none.

    Args:
        environment: Environment variables.

    Raises:
        ConfigError: The file cannot be created or read, or others can read it.
    """
    given = environment.get(KEY_VARIABLE)
    if given:
        return given
    try:
        path = key_file(environment)
        if not path.exists():
            _create(path)
        return _read(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise ConfigError(f"{KEY_VARIABLE} is not set, and there is no file for a key: {error}. Set it.") from error


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # by a process that started at the same time
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _read(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"{path}: other users can read or change this key. Remove the file, and a new key is created."
            )
        key = file.read().strip()
    check_key(key)
    return key


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
        # A CPU build refuses the flag, and takes the requests of a sleep, which then frees nothing.
        memory_share=config.cache_config.gpu_memory_utilization
        if model.enable_sleep_mode or config.device_config.device_type == "cpu"
        else None,
        returns_routes=config.aux_output_config.enable_return_routed_experts,
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
