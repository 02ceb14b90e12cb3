"""Questions to a model behind an OpenAI-compatible endpoint.

They are texts with fields, into which prompts, completions and columns are inserted as data.
"""

from __future__ import annotations

import asyncio
import functools
import json
import keyword
import logging
import math
import os
import string
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from prefrl.errors import MASK, ConfigError, RewardError, printable
from prefrl.http import Http, HttpError, Refused
from prefrl.rewards.base import check_name, completion_text, message_text

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]
T = TypeVar("T")
# Seconds before the first retry; doubled with each one, up to the longest.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
# Answers that are kept for equal requests.
_MAX_CACHED = 10_000
_SHOWN_CHARACTERS = 300
_OWN_PARAMETERS = ("model", "messages", "n", "stream")


@dataclass(frozen=True, slots=True)
class Replies(Generic[T]):
    """What a model answered to B questions."""

    values: list[T | None]  # None: not asked, or its answer could not be read
    num_unread: int  # questions whose answer could not be read


@dataclass(kw_only=True, eq=False)
class ChatModel:
    """The endpoint that a grader asks.

    Args:
        base_url: URL of the API, with its version: `http://localhost:8000/v1`. Requests go to `/chat/completions`.
        model: Name of the model on that server.
        api_key_env: Environment variable with the key. None means no key is sent. The key itself is not kept.
        sampling_params: More parameters of the request, such as `temperature`, `top_p`, `max_tokens` and `seed`.
        retries: How often a question is asked again, after an error of the server or an answer that cannot be read.
        timeout: Seconds for one request.
        max_concurrency: Maximum number of requests that a process has in flight at the same time.
    """

    base_url: str
    model: str
    api_key_env: str | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    retries: int = 3
    timeout: float = 60.0
    max_concurrency: int = 16
    name: str

    def _check_endpoint(self) -> None:
        who = f"grader {check_name(self.name)!r}: "
        address = urlsplit(self.base_url) if isinstance(self.base_url, str) else None
        if address is None or address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"{who}base_url={self.base_url!r}: must be a URL such as 'http://localhost:8000/v1'")
        if address.username or address.password or address.query or address.fragment:
            raise ConfigError(f"{who}base_url: must have no login, query or fragment. Pass a key with api_key_env")
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"{who}model={self.model!r}: must be the model's name at the endpoint")
        if own := sorted(set(self.sampling_params) & set(_OWN_PARAMETERS)):
            raise ConfigError(f"{who}sampling_params has {own}, which the grader sets. Leave them out")
        try:
            json.dumps(dict(self.sampling_params), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{who}sampling_params={self.sampling_params!r}: is not valid JSON: {error}") from error
        for option, least in (("retries", 0), ("max_concurrency", 1)):
            value = getattr(self, option)
            if type(value) is not int or value < least:
                raise ConfigError(f"{who}{option}={value!r}: must be an integer >= {least}")
        if not isinstance(self.timeout, int | float) or not 0 < self.timeout < math.inf:
            raise ConfigError(f"{who}timeout={self.timeout!r}: must be a number of seconds > 0")
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._warned = False

    @property
    def _url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def setup(self) -> None:
        """Check that the key is set.

        Raises:
            ConfigError: The environment variable is not set.
        """
        self._key()

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"grader {self.name!r}: api_key_env={self.api_key_env!r}: this environment variable is not set. Set "
                "it to the key, or leave api_key_env out if the endpoint needs none"
            )
        return key

    def _ask(
        self, questions: Sequence[Messages | None], read: Callable[[str], T | None], *, expected: str
    ) -> Future[Replies[T]]:
        """Ask B questions. Equal ones are asked once, also over several calls.

        Args:
            questions: B conversations. None means no question.
            read: Reads an answer. None means it cannot be read.
            expected: What an answer must have, for messages.
        """
        key = self._key()
        bodies = [
            None
            if messages is None
            else json.dumps({"model": self.model, "messages": list(messages), **self.sampling_params}, sort_keys=True)
            for messages in questions
        ]
        http = _http(key)
        return http.submit(self._ask_all(http, key, bodies, read, expected))

    async def _ask_all(
        self, http: Http, key: str | None, bodies: Sequence[str | None], read: Callable[[str], T | None], expected: str
    ) -> Replies[T]:
        known: dict[str, T | None] = {}
        unread: list[str] = []
        slots = asyncio.Semaphore(self.max_concurrency)

        async def ask(body: str) -> None:
            known[body] = await self._asked(http, body, read, slots, unread)

        try:
            async with asyncio.TaskGroup() as tasks:
                for body in {body: None for body in bodies if body is not None}:
                    if body in self._cache:
                        known[body] = self._cache[body]
                        self._cache.move_to_end(body)
                    else:
                        tasks.create_task(ask(body))
        except BaseExceptionGroup as errors:
            raise self._failure(errors.exceptions[0], key) from None  # the cause may quote the key
        self._remember({body: value for body, value in known.items() if value is not None})
        if unread:
            self._note_unread(unread, all_of=len(known), expected=expected)
        asked = [body for body in bodies if body is not None]
        values = [None if body is None else known[body] for body in bodies]
        return Replies(values, num_unread=sum(known[body] is None for body in asked))

    async def _asked(
        self,
        http: Http,
        body: str,
        read: Callable[[str], T | None],
        slots: asyncio.Semaphore,
        unread: list[str],
    ) -> T | None:
        """The answer that was read, or None after the last retry; its text is then in `unread`."""
        error: HttpError | None = None
        text = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))
            try:
                async with slots:
                    answer = await http.send("POST", self._url, timeout=self.timeout, json=json.loads(body))
                error = None
            except HttpError as failure:
                if _is_final(failure):
                    raise
                error = failure
                continue
            text, is_whole = _said(answer)
            value = read(text) if is_whole else None
            if value is not None:
                return value
        if error is not None:
            raise error
        unread.append(text)
        return None

    def _failure(self, error: BaseException, key: str | None) -> BaseException:
        if not isinstance(error, HttpError | _MalformedAnswer):
            return error
        text = str(error) if isinstance(error, HttpError) else f"POST {self._url}: {error}"
        message = text.replace(key, MASK) if key else text
        tries = "" if _is_final(error) else f" (asked {self.retries + 1} times)"
        return RewardError(f"grader {self.name!r}, model {self.model!r}: {message}{tries}")

    def _remember(self, known: Mapping[str, Any]) -> None:
        self._cache.update(known)
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)

    def _note_unread(self, unread: Sequence[str], *, all_of: int, expected: str) -> None:
        first = printable(repr(unread[0]), max_characters=_SHOWN_CHARACTERS)
        what = (
            f"grader {self.name!r}, model {self.model!r}, POST {self._url}: {len(unread)} of {all_of} answers cannot "
            f"be read, asked {self.retries + 1} times each. Expected {expected}; the first is {first}"
        )
        if len(unread) == all_of:
            raise RewardError(f"{what}. Check the prompt, the model, and max_tokens in sampling_params")
        if not self._warned:
            self._warned = True
            logger.warning("%s. Their values are None; later ones are counted in %s/unread_fraction", what, self.name)


class _MalformedAnswer(Exception):
    """An answer that is none of the chat API."""


def _is_final(error: Exception) -> bool:
    """Whether another try would fail like this one."""
    if isinstance(error, Refused):
        return error.status < 500 and error.status != 408  # 408: the server waited too long
    return isinstance(error, _MalformedAnswer)


def _said(answer: Any) -> tuple[str, bool]:
    """The text of an answer, and whether it is whole."""
    try:
        choice = answer["choices"][0]
        content = choice["message"]["content"]
    except (TypeError, KeyError, IndexError) as error:
        shown = printable(repr(answer), max_characters=_SHOWN_CHARACTERS)
        raise _MalformedAnswer(f"the answer has no choices[0].message.content: {shown}") from error
    return content if isinstance(content, str) else "", choice.get("finish_reason") != "length"


@functools.cache
def _http(key: str | None) -> Http:
    """The client of all graders with this key, whose thread lives as long as the process."""
    return Http(key=key)


# Fields that are no columns.
_OWN_FIELDS = ("prompt", "completion")
# What rewards get besides columns, under names that are easily mistaken for fields.
_NO_FIELDS = {
    "prompts": "prompt",
    "completions": "completion",
    "completion_ids": "completion",
    "trainer_state": None,
    "log_metric": None,
    "log_extra": None,
    "self": None,
}


class Template:
    """A text with fields such as `{completion}`.

    What is inserted is never read as a template again, so braces in it mean nothing.

    Args:
        text: The text. `{{` and `}}` are braces.
        where: The grader and the parameter that it is, for messages.
        fields: All fields that it may have. None means `prompt`, `completion` and any column.
    Raises:
        ConfigError: A brace is not closed, or a field is not a name that can be filled.
    """

    def __init__(self, text: str, *, where: str, fields: Sequence[str] | None = None) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"{where}={text!r}: must be a text with fields such as {{completion}}")
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{where}={text!r}: {error}. Write {{{{ and }}}} for literal braces") from error
        for _, name, form, conversion in parsed:
            if name is not None:
                _check_field(name, bool(form or conversion), where, fields)
        self.text = text
        self._parts = [(literal, name) for literal, name, _, _ in parsed]
        self.fields = frozenset(name for _, name in self._parts if name is not None)

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the dataset that it inserts."""
        return self.fields.difference(_OWN_FIELDS)

    @property
    def only_field(self) -> str | None:
        """The field, if the whole text is one field."""
        return self._parts[0][1] if len(self._parts) == 1 and not self._parts[0][0] else None

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with values for its fields."""
        return "".join(literal + (values[field] if field is not None else "") for literal, field in self._parts)


def _check_field(field: str, has_form: bool, where: str, fields: Sequence[str] | None) -> None:
    shown = f"{where}: {{{field}}}"
    if has_form or not field.isidentifier() or keyword.iskeyword(field):
        raise ConfigError(
            f"{shown} is not a field: allowed are the names of columns, without format, index or attribute. Write "
            "{{ and }} for literal braces"
        )
    if fields is not None and field not in fields:
        raise ConfigError(f"{shown} is not a field here: allowed are {', '.join(f'{{{name}}}' for name in fields)}")
    if fields is None:
        check_column(field, shown)


def check_column(field: str, shown: str) -> None:
    """Raise ConfigError if a name of one row's value, written as `shown`, is that of another argument of rewards."""
    if field in _NO_FIELDS:
        meant = _NO_FIELDS[field]
        remedy = f"Did you mean {meant!r}?" if meant else "It is an argument of rewards that a grader cannot read"
        raise ConfigError(f"{shown} is not the value of a row. {remedy}")


def fill_rows(
    templates: Sequence[Template],
    prompts: Sequence[Any] | None,
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> list[Mapping[str, str] | None]:
    """For each of B rows the texts of the fields that templates have; None if one of their columns is None there."""
    names = frozenset[str]().union(*(template.columns for template in templates))
    rows: list[Mapping[str, str] | None] = []
    for i, completion in enumerate(completions):
        values = {name: columns[name][i] for name in names}
        if any(value is None for value in values.values()):
            rows.append(None)
            continue
        texts = {name: _text(value) for name, value in values.items()}
        prompt = "" if prompts is None else joined_prompt(prompts[i])
        rows.append({**texts, "prompt": prompt, "completion": completion_text(completion)})
    return rows


def joined_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt: of its message, or if there are several, each with its role in front."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return message_text(prompt[0])
    return "\n\n".join(f"{message.get('role')}: {message_text(message)}" for message in prompt)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
