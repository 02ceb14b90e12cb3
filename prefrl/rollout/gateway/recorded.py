"""A gateway without a trainer: any key begins a session, requests decide how they are sampled, sessions are files.

Each answer is on the disk before it is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefrl.data.chat import ChatTemplate
from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.rollout.gateway.chat import CHAT
from prefrl.rollout.gateway.formats import Asked, RequestError
from prefrl.rollout.gateway.policy import Policy, Sample, Shared
from prefrl.rollout.gateway.server import FORMATS, Gateway, Limits, key_of, refusal
from prefrl.rollout.gateway.session import Session
from prefrl.types import Completion

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-prefrl-session"
_REWARD_PATH = "/v1/reward"
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# A session goes on in a new file after so many turns, and the least recently asked of so many sessions is forgotten.
_MOST_TURNS, _MOST_SESSIONS = 1000, 1000

Ask = Callable[[Sequence[int], SamplingParams, int], Future[Completion]]


@dataclass(frozen=True)
class Answering:
    """What answers the requests.

    Args:
        template: The model's chat template.
        ask: Requests one completion of some ids, with a seed. May be called from any thread.
        context_limit: Tokens of a request and its answer; None: no limit.
        sampling: For what a request does not say.
        seed: That the seeds of all turns depend on.
    """

    template: ChatTemplate
    ask: Ask
    context_limit: int | None
    sampling: SamplingParams
    seed: int = 0


class RecordedSession(Session):
    """A session and its file.

    Args:
        policy, seed: See `Session`.
        name: Of the session, for the file's readers.
        path: The file.
    """

    def __init__(self, policy: Policy, seed: Callable[[Sequence[int], int], int], *, name: str, path: Path) -> None:
        super().__init__(policy, seed)
        self.name, self._path = name, path
        self._rewards: list[tuple[int, float]] = []  # number of the turn, reward
        self._saved = (0, 0)  # turns and rewards that are in the file
        self._lock = asyncio.Lock()

    def reward(self, value: float, turn: int) -> None:
        """Add to the reward of a turn."""
        self._rewards.append((turn, value))

    async def save(self) -> bool:
        """Write what is new. Answers that come while the file is written are then written together.

        Returns:
            Whether there was no file before.

        Raises:
            OSError: The file cannot be written.
        """
        async with self._lock:
            state, before = (len(self.turns), len(self._rewards)), self._saved
            if state == before:
                return False
            await asyncio.to_thread(write_conversations, self._rows(), self._path)
            self._saved = state
            return before == (0, 0)

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for leaf in self.leaves():
            rewards = [value for turn, value in self._rewards if turn in leaf.numbers]
            rows.append(
                {
                    "session": self.name,
                    "prompt": leaf.prompt,
                    "completion": leaf.completion,
                    "tools": None if leaf.tools == "[]" else leaf.tools,
                    "reward": sum(rewards) if rewards else None,
                    "turns": len(leaf.numbers),
                    "tokens": sum(len(completion.token_ids) for completion in leaf.completions),
                    "finish_reason": leaf.completions[-1].finish_reason,
                }
            )
        return rows


class RecordingGateway(Gateway):
    """Answers whoever has a key, and writes what is said to files.

    The session of a request is that of the header `x-prefrl-session`; without it, each key is a session. Rewards are
    posted to `/v1/reward`.

    Args:
        source: What answers.
        folder: Where the files are written.
        host: Address of this machine on which it listens.
        port: Its port; 0: a free one.
        model: Its name for clients.
        key: The only key that is accepted; None: any.
    """

    def __init__(self, source: Answering, folder: Path, *, host: str, port: int, model: str, key: str | None) -> None:
        super().__init__(host, port, Limits(requests=Limits.connections), model)
        self._source, self._folder, self._key = source, folder, key
        self._shared = Shared()
        self.num_sessions = 0  # that have a file: those of refused requests alone have none

    def routes(self) -> list[Route]:
        """See `Gateway`."""
        return [*super().routes(), Route(_REWARD_PATH, self._reward, methods=["POST"])]

    def name_of(self, request: Request) -> str:
        """See `Gateway`; a new name begins a session."""
        key = key_of(request)
        if not key or (self._key is not None and not hmac.compare_digest(key.encode(), self._key.encode())):
            told = "is not the one that this server was started with" if key else "is missing"
            raise RequestError(f"the API key {told}", status=401, code="invalid_api_key")
        if self._key is None and request.url.hostname not in _LOOPBACK:  # a web page whose name leads to this machine
            raise RequestError("without a key of its own, this server is only for this machine", status=403)
        named = request.headers.get(SESSION_HEADER, "").strip()[:200]
        name = named or ("session" if self._key is not None else hashlib.sha256(key.encode()).hexdigest()[:16])
        session = self.sessions.pop(name, None)
        is_full = session is not None and len(session.turns) >= _MOST_TURNS and not session.num_open
        if session is None or (is_full and request.url.path in FORMATS):
            session = self._begun(name)
        self.sessions[name] = session  # the last one, so that the first one is that which was asked longest ago
        return name

    def _begun(self, name: str) -> RecordedSession:
        idle = [old for old, session in self.sessions.items() if not session.num_open]
        for old in idle[: 1 - _MOST_SESSIONS]:
            del self.sessions[old]
        policy = Policy(
            self._source.template,
            _never,
            max_tokens=2**62,
            context_limit=self._source.context_limit,
            shared=self._shared,
            follow=self._sampler,
        )
        readable = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)
        path = self._folder / f"session-{readable}-{secrets.token_hex(4)}.parquet"
        return RecordedSession(policy, partial(_seed, self._source.seed, name), name=name, path=path)

    async def answered(self, session: Session) -> None:
        """See `Gateway`."""
        assert isinstance(session, RecordedSession)
        try:
            is_new = await session.save()
        except OSError as error:
            logger.error("session %s cannot be written: %s. Its next answer tries again.", session.name, error)
        else:
            self.num_sessions += is_new

    async def close(self) -> None:
        """Stop listening, and write what could not be written before.

        Raises:
            OSError: A session still cannot be written.
        """
        await super().close()
        sessions = [session for session in self.sessions.values() if isinstance(session, RecordedSession)]
        await asyncio.gather(*(session.close() for session in sessions))
        saved = await asyncio.gather(*(session.save() for session in sessions), return_exceptions=True)
        for outcome in saved:
            if isinstance(outcome, BaseException):
                raise outcome
            self.num_sessions += outcome

    async def _reward(self, request: Request) -> Response:
        """Credit a turn: `{"reward": 1.0, "id": "chatcmpl-..."}`; without an id, it is the session's last one."""
        try:
            name = self.name_of(request)
            body = await self.body_of(request)
            session = self.sessions[name]
            assert isinstance(session, RecordedSession)
            session.reward(_number(body), _turn_of(body.get("id"), session))
        except RequestError as error:
            return refusal(CHAT, error)
        await self.answered(session)
        return JSONResponse({"session": name, "reward": body["reward"]})

    def _sampler(self, asked: Asked) -> Sample:
        """What samples as a request asks.

        Raises:
            RequestError: A sampling option has a value that is not allowed.
        """
        self._warn(asked.sampling)
        source = self._source
        given = {name: asked.sampling[name] for name in _FOLLOWED if name in asked.sampling}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, _FOLLOWED[name]):
                raise RequestError(f"{name}={value!r:.200}: must be a number, for some options an integer")
        own_seed = given.pop("seed", None)
        if given.get("top_k") == -1:  # of vLLM: all tokens
            given["top_k"] = 0
        try:
            sampling = replace(source.sampling, stop=asked.stop, **given)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        most = asked.max_tokens or sampling.max_tokens

        async def sample(token_ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
            seed = seed if own_seed is None else _seed(own_seed)
            limited = replace(sampling, max_tokens=min(max_tokens, most))
            return await asyncio.wrap_future(source.ask(token_ids, limited, seed))

        return sample

    def _warn(self, sampling: Mapping[str, Any]) -> None:
        """Warn, once for each name, of options that cannot be followed."""
        told = self._shared.told
        for name, value in sampling.items():
            if name in _FOLLOWED or name in told or _NOTHING.get(name) == value:
                continue
            told.add(name)
            text = (
                "a request asks for %s=%.200r, which is ignored: answers cannot be sampled like that. It is said once."
            )
            logger.warning(text, name, value)


def _seed(*entropy: Any) -> int:
    """A seed below 2^60, as a function of some values."""
    return int(hashlib.sha256(repr(entropy).encode()).hexdigest()[:15], 16)


async def _never(token_ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
    raise AssertionError("requests are followed")


_NUMBER = (int, float)
# Sampling options that are followed, and their types.
_FOLLOWED: dict[str, tuple[type, ...]] = {
    **{"temperature": _NUMBER, "top_p": _NUMBER, "min_p": _NUMBER},
    **{"top_k": (int,), "seed": (int,)},
}
# Values of others that change nothing.
_NOTHING = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "tool_choice": "auto"}


def _number(body: Mapping[str, Any]) -> float:
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, _NUMBER) or not math.isfinite(value):
        raise RequestError(f"reward={value!r:.200}: must be a finite number")
    return float(value)


def _turn_of(answer: Any, session: RecordedSession) -> int:
    """The number of the turn that an answer has the id of; without an id, that of the last one."""
    count = len(session.turns)
    if not count:
        raise RequestError(f"session {session.name!r} has no answer yet that a reward could be for")
    if answer is None:
        return count - 1
    found = re.search(r"[0-9a-f]{8,}$", str(answer))
    if found is None or int(found[0], 16) >= count:
        raise RequestError(f"id={answer!r:.200}: must be that of an answer of this session")
    return int(found[0], 16)


_TEXT = pa.string()


def _schema(columns: Sequence[str], arguments: pa.DataType) -> pa.Schema:
    function = pa.struct({"name": _TEXT, "arguments": arguments})
    calls = pa.list_(pa.struct({"type": _TEXT, "id": _TEXT, "function": function}))
    texts = dict.fromkeys(("role", "content", "reasoning_content", "name", "tool_call_id"), _TEXT)
    messages = pa.list_(pa.struct({**texts, "tool_calls": calls}))
    kinds = {"turns": pa.int64(), "tokens": pa.int64()}
    kinds |= dict.fromkeys(("reward", "reward_chosen", "reward_rejected"), pa.float64())
    kinds |= dict.fromkeys(("prompt", "completion", "chosen", "rejected"), messages)
    return pa.schema({name: kinds.get(name, _TEXT) for name in columns})


def write_conversations(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the same columns to a parquet file that only this user can read, whole or not at all.

    The schema does not depend on the rows, so that many files are one dataset: arguments of calls are JSON.

    Raises:
        OSError: It cannot be written.
    """
    as_text = [{name: _with_json(value) for name, value in row.items()} for row in rows]
    table = pa.Table.from_pylist(as_text, schema=_schema([*rows[0]], _TEXT)).cast(_schema([*rows[0]], pa.json_()))
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)  # it could be a link
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pq.write_table(table, file)
    os.replace(aside, path)


def _with_json(value: Any) -> Any:
    """A cell, with the arguments of calls in its messages as JSON."""
    if isinstance(value, list):
        return [_with_json(one) for one in value]
    if isinstance(value, dict):
        return {name: json.dumps(one) if name == "arguments" else _with_json(one) for name, one in value.items()}
    return value
