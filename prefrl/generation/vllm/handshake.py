"""Waiting for vLLM servers, and checking what they serve before anything is sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from prefrl.errors import AbsentServerError, ConfigError, GenerationError, printable
from prefrl.generation.server import INFO_PATH, ServerInfo, vocabulary_fingerprint
from prefrl.http import HttpError, Refused
from prefrl.options.server_rules import wrong_urls

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prefrl.http import Http

T = TypeVar("T")
_FIRST_S, _NEXT_S = 2.0, 10.0  # a server that answers at once is not worth a line


class Waiting:
    """Prints `waiting for http://... (12 of 120 s)` to standard error: after 2 seconds, then every 10.

    Args:
        url: What does not answer.
        limit: Seconds until the run gives up.
        console: Where to write; None: standard error, as it is then.
    """

    def __init__(self, url: str, limit: float, console: Console | None = None) -> None:
        self._url, self._limit, self._console = url, limit, console
        self._next = _FIRST_S

    def tell(self, seconds: float) -> None:
        """Say how long the run has waited, if it is time to say it again."""
        if seconds < self._next:
            return
        self._next = seconds + _NEXT_S
        console = self._console or Console(stderr=True)
        text = f"waiting for {self._url} ({seconds:.0f} of {self._limit:g} s)"
        console.print(Text(printable(text)), soft_wrap=True)


# Time limit of requests that cost the server almost nothing: health, weight version.
PROBE_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_LABELS = {
    "architecture": "architecture",
    "vocab_size": "size of the vocabulary",
    "hidden_size": "hidden size",
    "num_hidden_layers": "number of layers",
    "tokenizer": "tokenizer (fingerprint of its vocabulary)",
}


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a server must serve to generate for the policy."""

    model: str  # name or folder, for the command that starts the right server
    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    tokenizer: str  # `vocabulary_fingerprint`
    has_adapters: bool  # adapters are sent instead of all weights
    shares_device: bool = False  # it sleeps while the trainer works
    has_routes: bool = False  # the experts of a mixture are needed

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        has_adapters: bool,
        shares_device: bool = False,
        has_routes: bool = False,
    ) -> Requirements:
        """The requirements of a model, given without peft's wrapper, and its tokenizer."""
        config = model.config.get_text_config()
        return cls(
            model=model.name_or_path,
            architecture=type(model).__name__,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            tokenizer=vocabulary_fingerprint(tokenizer.get_vocab()),
            has_adapters=has_adapters,
            shares_device=shares_device,
            has_routes=has_routes,
        )

    def start_command(self, url: str) -> str:
        """The command that starts the right server at `url`."""
        parts = urlsplit(url)
        host = "" if parts.hostname in ("localhost", "127.0.0.1", "::1") else f"--host {parts.hostname} "
        return self.command(f"{host}--port {parts.port or 80}")

    def command(self, where: str) -> str:
        """The command that starts a right server with these options of its place."""
        more = " --max_lora_rank <rank>" if self.has_adapters else ""
        more += " --enable_sleep_mode --gpu_memory_utilization <share>" if self.shares_device else ""
        more += " --enable_return_routed_experts" if self.has_routes else ""
        return f"prefrl vllm-serve --model {self.model or '<model>'} {where}{more}"

    def check(self, url: str, info: ServerInfo) -> None:
        """Refuse a server that does not meet the requirements.

        Raises:
            GenerationError: A requirement is not met; the message names what was found and what is expected.
        """
        for field, label in _LABELS.items():
            found, expected = getattr(info, field), getattr(self, field)
            if found != expected:
                raise self.error(
                    url, f"serves another model: its {label} is {found!r}, but the policy has {expected!r}"
                )
        if info.logprobs_mode != "processed_logprobs":
            reason = f"has logprobs_mode {info.logprobs_mode!r}, but training needs 'processed_logprobs'"
            raise self.error(url, reason)
        if self.has_adapters and info.max_lora_rank is None:
            raise self.error(url, "takes no adapters, but weight_sync='adapter' sends only adapters")
        if self.shares_device and info.memory_share is None:
            raise self.error(url, "never sleeps, but vllm_mode='colocate' needs its memory while the trainer works")
        if self.has_routes and not info.returns_routes:
            raise self.error(url, "does not return the experts that it chooses, which router_replay=True needs")

    def error(self, url: str, reason: str) -> GenerationError:
        """An error that says what is wrong with the server at `url`, and how to start the right one."""
        return GenerationError(f"The vLLM server at {url} {reason}. Start it with `{self.start_command(url)}`.")


def check_server_url(url: str) -> str:
    """The base URL of a server, without trailing slashes.

    Raises:
        ConfigError: `url` is not a base URL.
    """
    if wrong_urls([url]):
        raise ConfigError(f"vLLM server {url!r}: must look like http://127.0.0.1:8000, without a path or user name")
    return url.rstrip("/")


async def handshake(http: Http, url: str, requirements: Requirements, *, timeout: float) -> ServerInfo:
    """Wait until a server answers, at most `timeout` seconds in all, and check what it serves.

    Raises:
        AbsentServerError: The server does not answer in time.
        GenerationError: The key is wrong or not required by the server, or the server does not meet the requirements.
    """

    async def look(seconds: float) -> ServerInfo:
        info = ServerInfo.from_json(url, await http.send("GET", url + INFO_PATH, timeout=seconds))
        requirements.check(url, info)
        if http.has_key:
            await _check_refuses_strangers(http, url, timeout=seconds)
        if info.memory_share is not None and not requirements.shares_device:
            await _wake(http, url, timeout=seconds)
        return info

    try:
        return await patiently(http, url, look, timeout=timeout)
    except HttpError as error:
        if isinstance(error, Refused) and error.status < 500:
            raise _refusal(url, error, requirements) from error
        reason = f"did not answer within {timeout:g} s (vllm_server_timeout). Last error: {error}"
        raise AbsentServerError(str(requirements.error(url, reason))) from error


async def patiently(http: Http, url: str, look: Callable[[float], Awaitable[T]], *, timeout: float) -> T:
    """What `look` finds out about a server, which gets the seconds that are left; waits until the server is healthy.

    Raises:
        HttpError: The server refuses a request, or the last error of one that did not answer within `timeout` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    pause, waiting = _FIRST_PAUSE, Waiting(url, timeout)
    while True:
        try:
            await http.send("GET", f"{url}/health", timeout=min(PROBE_SECONDS, deadline - loop.time()))
            return await look(deadline - loop.time())
        except HttpError as error:
            is_final = isinstance(error, Refused) and error.status < 500
            if is_final or loop.time() + pause >= deadline:
                raise
        waiting.tell(timeout - (deadline - loop.time()))
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _refusal(url: str, error: Refused, requirements: Requirements) -> GenerationError:
    if error.status in (401, 403):
        return GenerationError(
            f"The vLLM server at {url} refuses the key: {error}. In the trainer's environment, set VLLM_API_KEY to "
            "the key that the server was started with. If it was started without VLLM_API_KEY, its key is in the file "
            "~/.config/prefrl/vllm_api_key of its user."
        )
    return requirements.error(url, f"was not started by prefrl: {error}")


async def _check_refuses_strangers(http: Http, url: str, *, timeout: float) -> None:
    # With vLLM's own --api-key, this route stays open, and so do those that receive weights.
    try:
        await http.send("GET", f"{url}/weight_info", timeout=timeout, with_key=False)
    except Refused as error:
        if error.status == 401:
            return
        raise
    raise GenerationError(
        f"The vLLM server at {url} answers without the key: anyone who can reach it can replace the "
        "weights that it serves. Start it with `prefrl vllm-serve`."
    )


async def _wake(http: Http, url: str, *, timeout: float) -> None:
    """Wake a server that a trainer on its device has left asleep."""
    answer = await http.send("GET", f"{url}/is_sleeping", timeout=timeout)
    if not isinstance(answer, dict) or answer.get("is_sleeping") is not False:
        await http.send("POST", f"{url}/wake_up", timeout=timeout)


async def is_healthy(http: Http, url: str) -> bool:
    """Whether the server and its engine are running."""
    try:
        await http.send("GET", f"{url}/health", timeout=PROBE_SECONDS)
    except HttpError:
        return False
    return True


async def weight_version(http: Http, url: str, *, timeout: float | None = None) -> str:
    """The server's name for its weights.

    Args:
        http: HTTP client, with the key if there is one.
        url: Base URL.
        timeout: Time limit, in seconds; None: that of requests that cost the server almost nothing.

    Raises:
        HttpError: The request failed, or the answer has no version.
    """
    answer = await http.send("GET", f"{url}/weight_info", timeout=timeout or PROBE_SECONDS)
    try:
        return str(answer["weight_version"])
    except (KeyError, TypeError) as error:
        raise Refused(f"GET {url}/weight_info: no weight_version in {answer!r:.200}", status=200) from error
