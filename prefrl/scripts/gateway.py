"""`prefrl gateway` serves a model over chat APIs, and writes its sessions to files; `pairs` makes pairs of them."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from annotated_types import Ge, Le
from rich.console import Console

from prefrl.errors import ConfigError, DataError, GenerationError, require
from prefrl.options.fields import opt
from prefrl.run.folder import check_writable
from prefrl.scripts.arguments.datasets import FILES
from prefrl.scripts.declaration import command
from prefrl.scripts.sampling import LOOPBACK, REQUEST_SECONDS, Local, SamplingArguments, Server, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefrl.generation.base import SamplingParams
    from prefrl.types import Completion

_KEY_VARIABLE = "PREFRL_API_KEY"


@dataclass
class GatewayArguments(SamplingArguments):
    """What is served, where, and what becomes of the sessions."""

    GROUP: ClassVar[str] = "Server and sessions"

    num_generations: int = field(default=1, init=False)  # a request has one answer
    stop: list[str] | None = field(default=None, init=False)  # of requests
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Folder of a model or an adapter, or its name on the Hub. With a server, only its tokenizer and "
            "chat template are used; the default is the server's first model.",
            "aliases": ["--model"],
        },
    )
    max_completion_length: Annotated[int, Ge(1)] = opt(
        512, "Maximum length of an answer in tokens, if its request sets none."
    )
    temperature: Annotated[float, Ge(0)] = opt(
        1.0, "Sampling temperature of requests that set none. 0 decodes greedily."
    )
    host: str = opt("127.0.0.1", "Address to listen on. Any address other than a loopback one needs a key.")
    port: Annotated[int, Ge(0), Le(65535)] = opt(8080, "Port to listen on. 0 takes any free port.")
    api_key: str | None = opt(
        None,
        f"The only key that is accepted. The default is that of the environment variable {_KEY_VARIABLE}, which other "
        "users cannot read, unlike a command line. Without either, any key is accepted, and each is a session.",
    )
    output_dir: str = opt("sessions", "Folder for the sessions, each of which is a parquet file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_name_or_path is None and self.server is None:
            raise ConfigError("model_name_or_path: not given. Write prefrl gateway RUN, or set server.")
        self.api_key = self.api_key or os.environ.get(_KEY_VARIABLE) or None
        if self.host not in LOOPBACK and self.api_key is None:
            raise ConfigError(
                f"host={self.host!r}: everyone who reaches it could ask the model. Set {_KEY_VARIABLE} or api_key."
            )


class Source(Protocol):
    """Samples the answers."""

    name: str  # of the model
    tokenizer: PreTrainedTokenizerBase
    context_limit: int | None

    def ask(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Future[Completion]:
        """Request one completion. May be called from any thread."""
        ...

    def serve(self) -> None:
        """Answer requests until an exception, such as that of Ctrl-C."""
        ...


@dataclass(frozen=True, eq=False)
class _Request:
    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    answer: Future[Completion] = field(default_factory=Future)


# How long a wave waits for one more request, in seconds.
_LINGER_SECONDS = 0.002


class _Waves:
    """A model in this process: all requests that have arrived decode together, in the thread that calls `serve`."""

    def __init__(self, options: GatewayArguments) -> None:
        self.name = str(options.model_name_or_path)
        model = Local(options, self.name, needs_template=True)
        self.tokenizer, self._generator = model.tokenizer, model.generator
        # More positions could be computed with RoPE, but the model has not seen them.
        trained = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
        self.context_limit = self._generator.context_limit or trained
        self._requests: queue.Queue[_Request] = queue.Queue()

    def ask(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Future[Completion]:
        """See `Source`."""
        request = _Request(token_ids, sampling, seed)
        self._requests.put(request)
        return request.answer

    def serve(self) -> None:
        """See `Source`."""
        while True:
            wave = [self._requests.get()]
            with suppress(queue.Empty):
                while True:
                    wave.append(self._requests.get(timeout=_LINGER_SECONDS))
            wave = [request for request in wave if request.answer.set_running_or_notify_cancel()]
            for _, alike in groupby(sorted(wave, key=_way), key=_way):
                self._answer(list(alike))

    def _answer(self, requests: Sequence[_Request]) -> None:
        """Answer requests that are sampled alike. What goes wrong is told to them, and does not end the server."""
        try:
            found = self._generator.generate(
                [request.token_ids for request in requests],
                requests[0].sampling,
                seeds=[request.seed for request in requests],
                limits=[request.sampling.max_tokens for request in requests],
            )
        except Exception as error:
            for request in requests:
                request.answer.set_exception(error)
            return
        for request, (completion,) in zip(requests, found, strict=True):
            request.answer.set_result(completion)


def _way(request: _Request) -> str:
    """How a request is sampled, but for its length."""
    return repr(replace(request.sampling, max_tokens=1))


class _Remote:
    """A vLLM server, which gets and returns token ids."""

    def __init__(self, options: GatewayArguments) -> None:
        from prefrl.models.export import saved_tokenizer

        self._server = Server(replace(options, model_name_or_path=None))
        about = self._server.first_model()
        self._model, self.context_limit = about["id"], about.get("max_model_len")
        self.name = name = options.model_name_or_path or str(about.get("root") or about["id"])
        tokenizer = saved_tokenizer(name)
        if tokenizer is None or tokenizer.chat_template is None:
            lacks = "cannot be loaded" if tokenizer is None else "has no chat template"
            raise ConfigError(
                f"model_name_or_path={name!r}: its tokenizer {lacks}. Give the folder or the name of a model with the "
                "server's tokenizer and a chat template."
            )
        self.tokenizer = tokenizer

    def ask(self, token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> Future[Completion]:
        """See `Source`."""
        return self._server.http.submit(self._asked(list(token_ids), sampling, seed))

    def serve(self) -> None:
        """See `Source`."""
        threading.Event().wait()

    async def _asked(self, token_ids: list[int], sampling: SamplingParams, seed: int) -> Completion:
        from prefrl.http import Refused
        from prefrl.rollout.gateway.formats import RequestError
        from prefrl.types import Completion

        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p or 0,
            "seed": seed % 2**31,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        url = f"{self._server.url}/completions"
        try:
            answer = await self._server.http.send("POST", url, timeout=REQUEST_SECONDS, json=body, max_bytes=2**26)
        except Refused as error:
            if error.status == 400:  # a value that it does not allow: to ask again would not help
                raise RequestError(str(error)) from error
            raise
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise GenerationError(f"server={self._server.url!r}: returns no token_ids. Use a server of vLLM.")
        reason: Any = "stop_string" if isinstance(choice.get("stop_reason"), str) else choice["finish_reason"]
        count = len(ids)
        return Completion(ids, reason, [0.0] * count, [True] * count, [0] * count)


@command(
    "gateway",
    GatewayArguments,
    about="Serve a model over the chat APIs of OpenAI and Anthropic without training it, and write the sessions to "
    "files that prefrl sft, pairs and eval read.\n\nExamples:\n  prefrl gateway runs/grpo\n"
    "  prefrl gateway MODEL --server http://localhost:8000/v1 --port 9000",
    positional=("model_name_or_path",),
)
def serve(options: GatewayArguments) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    require("starlette", extra="agents", feature="prefrl gateway")
    require("uvicorn", extra="agents", feature="prefrl gateway")
    check_writable(Path(options.output_dir))
    with Console(stderr=True).status("Loading the model"):
        source: Source = _Waves(options) if options.server is None else _Remote(options)
    with _until_signal(), _serving(source, options) as url:
        keys = "any, each of which is a session" if options.api_key is None else "the one that was set"
        print(f"{source.name} is served. Ctrl-C ends it.")
        print(f"  OpenAI: {url}/v1\n  Anthropic: {url}\n  API key: {keys}", flush=True)
        source.serve()
    return 0


class _Ended(BaseException):
    """A signal has arrived."""


@contextmanager
def _until_signal() -> Iterator[None]:
    """Leave this context at Ctrl-C or SIGTERM; further ones are ignored until it is left."""

    def end(*_: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise _Ended

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, end)
        with suppress(_Ended):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _serving(source: Source, options: GatewayArguments) -> Iterator[str]:
    """The URL of a gateway that listens; in the end, all sessions are on the disk.

    Raises:
        ConfigError: The address cannot be used, or a session cannot be written.
    """
    from prefrl.data.chat import ChatTemplate, special_tokens
    from prefrl.rewards.call import EventLoopThread
    from prefrl.rollout.gateway.recorded import Answering, RecordingGateway

    template = ChatTemplate(source.tokenizer, special_tokens(source.tokenizer))
    answering = Answering(template, source.ask, source.context_limit, options.params(), options.seed)
    place: dict[str, Any] = {"host": options.host, "port": options.port, "key": options.api_key}
    gateway = RecordingGateway(answering, Path(options.output_dir), model=source.name, **place)
    loop = EventLoopThread()
    try:
        loop.submit(gateway.start()).result()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address, which is named here anyway
        where = f"host={options.host!r}, port={options.port}"
        raise ConfigError(f"{where}: {reason}. Choose another port, or 0 for any free one.") from error
    try:
        yield gateway.url
    finally:
        try:
            loop.submit(gateway.close()).result()
        except OSError as error:
            raise ConfigError(f"output_dir={options.output_dir!r}: cannot be written to: {error.strerror}") from error
        print(f"{gateway.num_sessions:,} sessions are in {options.output_dir}.")


@dataclass
class PairArguments:
    """Conversations with rewards, and the file for the pairs."""

    dataset_name: str | None = opt(None, f"Folder of sessions, or {FILES}, with prompt, completion and reward.")
    output_file: str | None = opt(None, "File to write the pairs to. It must end in .parquet.")

    def __post_init__(self) -> None:
        if self.dataset_name is None or self.output_file is None:
            raise ConfigError("dataset_name, output_file: not given. Write prefrl pairs sessions pairs.parquet.")
        if not self.output_file.endswith(".parquet"):
            raise ConfigError(f"output_file={self.output_file!r}: must end in .parquet")


@command(
    "pairs",
    PairArguments,
    about="Make preference pairs of the best and the worst completion of each prompt.\n\nExample:\n"
    "  prefrl pairs sessions pairs.parquet",
    takes_config=False,
    positional=("dataset_name", "output_file"),
)
def pairs(options: PairArguments) -> int:
    """Write the pairs."""
    output = Path(str(options.output_file))
    rows = load_rows(str(options.dataset_name), "train", column="reward")
    found = pairs_of(rows)
    if not found:
        num_scored = sum(row["reward"] is not None for row in rows)
        raise DataError(
            f"dataset_name={options.dataset_name!r}: none of its {len(rows):,} rows, {num_scored:,} of which have a "
            "reward, have the same prompt and tools and another reward, so there is no pair"
        )
    check_writable(output.parent, option="folder of output_file")
    from prefrl.rollout.gateway.recorded import write_conversations

    write_conversations(found, output)
    print(f"{len(found):,} pairs of {len(rows):,} conversations are in {output}.")
    return 0


def pairs_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A pair for each prompt whose completions have different rewards: the first of the best ones and of the worst."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["reward"] is not None:
            groups.setdefault(json.dumps([row["prompt"], row.get("tools")], sort_keys=True), []).append(row)
    found = []
    for group in groups.values():
        best, worst = (choose(group, key=lambda row: row["reward"]) for choose in (max, min))
        if best["reward"] > worst["reward"]:
            pair = {"prompt": best["prompt"], "chosen": best["completion"], "rejected": worst["completion"]}
            rewards = {"reward_chosen": best["reward"], "reward_rejected": worst["reward"]}
            found.append({**pair, "tools": best.get("tools"), **rewards})
    return found
