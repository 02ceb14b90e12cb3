"""A teacher on vLLM servers: the likeliest tokens and their log-probs at each token of texts.

Any `vllm serve` of an ordinary causal language model will do. A text is a prompt for it, of which vLLM returns the
`prompt_logprobs`: those of the next token at temperature 1, whatever temperature a request asks for, and before
anything cuts the distribution. One request is for one text, and contains token ids.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from prefrl.distributed import gather_in_team, is_main, place_in_team, rank, team_size, without_teams
from prefrl.errors import AbsentServerError, ConfigError, GenerationError
from prefrl.generation.server import key_of_user
from prefrl.generation.vllm.asking import Asker, Balance, Server
from prefrl.generation.vllm.handshake import check_server_url, patiently
from prefrl.generation.vllm.pending import VLLMPending, error_of, raise_shared
from prefrl.generation.vllm.requests import HIGHEST_LOGPROB, NO_LOGPROB, BadAnswer
from prefrl.http import Http, HttpError, Refused
from prefrl.losses.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from prefrl.options.distillation import TeacherServerParams
    from prefrl.types import TokenBatch

logger = logging.getLogger(__name__)

_CONCURRENCY = 64  # requests that a process has running at each server
# Bytes of an answer: what it has in any case, and for each log-prob, with the text of its token.
_BASE_BYTES, _LOGPROB_BYTES = 2**16, 256
# What float32 probabilities may add up to.
_LARGEST_SUM = 1.001


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text, and how many of its last tokens are scored."""

    number: int  # its index in the call
    token_ids: Sequence[int]
    num_scored: int
    home: None = None


@dataclass(frozen=True, slots=True)
class _Served:
    name: str  # of the model, to use in requests
    max_model_len: int  # tokens of a text and the one token that vLLM adds to it


class TeacherServers(Asker[TextRequest, TopLogprobs]):
    """Scores texts under the model that vLLM servers serve.

    Every training process requests the scores of its own texts. All methods but `close` are collective.

    Args:
        urls: Base URLs of servers that serve the same model; a text goes to the one with the fewest requests.
        params: Settings of the requests.
        vocab_size: Size of the student's vocabulary.
        http: HTTP client, which `close` closes.

    Raises:
        ConfigError: `urls` contains an invalid URL.
    """

    item, wanted, server = "text", "log-probs", "the teacher's server"
    timeout_option = "request_timeout in teacher_server_kwargs"

    def __init__(self, urls: Sequence[str], params: TeacherServerParams, *, vocab_size: int, http: Http) -> None:
        first = rank() % len(urls)  # among equally busy servers, each process prefers a different one
        bases = [check_server_url(url) for url in [*urls[first:], *urls[:first]]]
        super().__init__(Balance(bases, _CONCURRENCY), http=http, request_timeout=params.request_timeout)
        self._params = params
        self._vocab_size = vocab_size
        self._served: dict[str, _Served] = {}  # by URL

    def recover(self) -> None:
        """Wait for all servers, find out what they serve, and use all of them.

        Raises:
            AbsentServerError: A server does not answer in time.
            GenerationError: A server refuses the key, or does not serve the model.
        """
        raise_shared(error_of(self._connect))
        self._balance.trust_all()

    def _connect(self) -> None:
        calls = {server.url: self._http.submit(self._look(server.url)) for server in self._balance.servers}
        self._served = {url: call.result() for url, call in calls.items()}

    async def _look(self, url: str) -> _Served:
        timeout, path = self._params.server_timeout, f"{url}/v1/models"

        async def models(seconds: float) -> Any:
            return await self._http.send("GET", path, timeout=seconds)

        try:
            answer = await patiently(self._http, url, models, timeout=timeout)
        except HttpError as error:
            if isinstance(error, Refused) and error.status in (401, 403):
                raise GenerationError(
                    f"{self.server} at {url} refuses the key: {error}. Set api_key_env in teacher_server_kwargs to "
                    "the name of an environment variable that has its key."
                ) from error
            if isinstance(error, Refused) and error.status < 500:
                raise GenerationError(f"{self.server} at {url} is no vLLM server: {error}") from error
            raise AbsentServerError(
                f"{self.server} at {url} did not answer within {timeout:g} s (server_timeout of "
                f"teacher_server_kwargs). Last error: {error}. Start it with `vllm serve <teacher>`."
            ) from error
        try:
            lengths = {card["id"]: card["max_model_len"] for card in answer["data"]}
            served = {  # an adapter has the length of the model below it
                card["id"]: _Served(card["id"], int(card["max_model_len"] or lengths[card["parent"]]))
                for card in answer["data"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationError(f"GET {path}: unexpected answer ({error!r}): {answer!r:.200}") from error
        name = next(iter(served), None) if self._params.model is None else self._params.model
        if name not in served:
            raise GenerationError(f"{self.server} at {url} does not serve model={name!r}, but {list(served)}")
        return served[name]

    @property
    def longest_text(self) -> int:
        """The most tokens that a text may have; known after `recover`."""
        return min(served.max_model_len for served in self._served.values()) - 1  # vLLM always adds one

    def check_tokenizer(self, ids_of: Mapping[str, Sequence[int]]) -> None:
        """Refuse servers whose tokenizer makes other ids of some texts. A server without /tokenize is not checked.

        Args:
            ids_of: Texts, and the ids that the student's tokenizer makes of them without adding special tokens.

        Raises:
            ConfigError: The ids of a text differ.
            GenerationError: A request failed.
        """
        raise_shared(error_of(lambda: self._compare(ids_of)) if is_main() else None)

    def _compare(self, ids_of: Mapping[str, Sequence[int]]) -> None:
        for url, served in self._served.items():
            for text, ids in ids_of.items():
                body = {"model": served.name, "prompt": text, "add_special_tokens": False}
                try:
                    answer = self._http.request(
                        "POST",
                        f"{url}/tokenize",
                        json=body,
                        timeout=self._request_timeout,
                        max_bytes=_bytes(len(text)),
                    )
                except Refused as error:
                    if error.status != 404:
                        raise GenerationError(f"{self.server} at {url} cannot tokenize: {error}") from error
                    logger.warning("%s at %s has no /tokenize: its tokenizer is not compared", self.server, url)
                    break
                except HttpError as error:
                    raise GenerationError(f"{self.server} at {url} cannot tokenize: {error}") from error
                if (others := answer.get("tokens")) != list(ids):
                    raise ConfigError(
                        f"teacher_server_base_url: the tokenizer of {served.name!r} at {url} makes {others!r:.60} of "
                        f"{text[:40]!r}, and the student's makes {list(ids)!r:.60}, so their distributions cannot be "
                        "compared. Serve a teacher of the student's family."
                    )

    def top_logprobs(self, batch: TokenBatch) -> TopLogprobs:
        """The likeliest tokens at each response token of a batch without images, in descending order.

        Args:
            batch: On the host; B rows, N response tokens, possibly none.

        Returns:
            ids [N, k] int32 and logprobs [N, k] float32 nats, at temperature 1.

        Raises:
            GenerationError: A text failed on some process, or a server did not come back in time.
        """
        requests = [
            TextRequest(number, text.tolist(), length)
            for number, (text, length) in enumerate(zip(batch.texts, batch.response_lengths, strict=True))
        ]
        mine = requests[place_in_team() :: team_size()]  # a team has the same texts
        with without_teams():
            own = dict(VLLMPending(self, mine).as_completed())
        found = {number: top for part in gather_in_team(own) for number, top in part.items()}
        none = torch.empty(0, self._params.top_k)
        tops = [found[number] for number in range(len(requests))]
        return TopLogprobs(
            torch.cat([none.int(), *(top.ids for top in tops)]), torch.cat([none, *(top.logprobs for top in tops)])
        )

    async def ask_once(self, server: Server, request: TextRequest, timeout: float) -> TopLogprobs:
        """See `Asker`."""
        served, num_logprobs, length = self._served[server.url], self._params.top_k, len(request.token_ids)
        if length >= served.max_model_len:
            raise self.error(
                server,
                request,
                f"takes texts of at most {served.max_model_len - 1} tokens, and this one has {length}. Start it with "
                "a larger --max-model-len, or lower max_prompt_length or max_completion_length.",
            )
        body = {
            "model": served.name,
            "prompt": list(request.token_ids),
            "max_tokens": 1,  # the least that vLLM accepts
            "temperature": 0.0,
            "prompt_logprobs": num_logprobs,
            "return_token_ids": True,
        }
        limit = _bytes(length * (num_logprobs + 1))
        try:
            answer = await self._http.send(
                "POST", f"{server.url}/v1/completions", timeout=timeout, json=body, max_bytes=limit
            )
        except Refused as error:
            if error.status >= 500:
                raise
            hint = ""
            if "max allowed" in str(error):
                hint = (
                    f". Start the server with `--max-logprobs {num_logprobs}`, or lower top_k in teacher_server_kwargs"
                )
            raise self.error(server, request, f"refuses: {error}{hint}") from error
        try:
            return _top_logprobs(answer, request, num_logprobs=num_logprobs, vocab_size=self._vocab_size)
        except BadAnswer as error:
            raise self.error(server, request, f"answers wrongly: {error}") from error

    def close(self) -> None:
        """Cancel running requests and disconnect from the servers."""
        self._http.close()


def teacher_key(params: TeacherServerParams, *, are_local: bool) -> str | None:
    """The servers' key; None: they get none.

    Raises:
        ConfigError: The environment variable is not set.
    """
    if params.api_key_env is None:
        return key_of_user(os.environ) if are_local else None
    key = os.environ.get(params.api_key_env)
    if not key:
        raise ConfigError(
            f"teacher_server_kwargs: api_key_env={params.api_key_env!r}: this environment variable is not set. Set it "
            "to the key of the teacher's servers, or leave api_key_env out if they need none."
        )
    return key


def _bytes(num_entries: int) -> int:
    return _BASE_BYTES + _LOGPROB_BYTES * num_entries


def _top_logprobs(answer: Any, request: TextRequest, *, num_logprobs: int, vocab_size: int) -> TopLogprobs:
    """The likeliest tokens at the scored ones.

    Raises:
        BadAnswer: The answer does not fit the request.
    """
    count, sent = request.num_scored, list(request.token_ids)
    ids: list[int] = []
    logprobs: list[float] = []
    try:
        (choice,) = answer["choices"]
        if choice["prompt_token_ids"] != sent:
            raise BadAnswer(f"it scores the tokens {choice['prompt_token_ids']!r:.60}, but {sent!r:.60} were sent")
        if len(choice["prompt_logprobs"]) != len(sent):
            raise BadAnswer(f"it scores {len(choice['prompt_logprobs'])} tokens, but {len(sent)} were sent")
        for place in range(len(sent) - count, len(sent)):
            token, found = str(sent[place]), dict(choice["prompt_logprobs"][place])
            if token not in found:
                raise BadAnswer(f"it has no log-prob of token {place}, which is {token}")
            if found[token]["rank"] > num_logprobs:  # it comes in addition to the likeliest tokens
                del found[token]
            if len(found) != num_logprobs:
                raise BadAnswer(f"it has log-probs of {len(found)} likely tokens at token {place}, not {num_logprobs}")
            ids += map(int, found)
            logprobs += [float(each["logprob"]) for each in found.values()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"a field is missing or malformed ({error!r}): {answer!r:.300}") from error
    top = TopLogprobs(
        torch.tensor(ids, dtype=torch.int32).view(count, num_logprobs),
        torch.tensor(logprobs, dtype=torch.float32).view(count, num_logprobs),
    )
    _check(top, vocab_size)
    order = top.logprobs.argsort(dim=1, descending=True, stable=True)
    return TopLogprobs(top.ids.gather(1, order), top.logprobs.gather(1, order))


def _check(top: TopLogprobs, vocab_size: int) -> None:
    """Refuse what are no log-probs of the student's tokens."""
    outside = top.ids[(top.ids < 0) | (top.ids >= vocab_size)]
    if len(outside):
        raise BadAnswer(
            f"it has the token {int(outside[0])}, but the student's vocabulary is 0..{vocab_size - 1}. Serve a "
            "teacher of the student's family"
        )
    bad = top.logprobs[~((top.logprobs > NO_LOGPROB) & (top.logprobs <= HIGHEST_LOGPROB))]  # NaN fails all comparisons
    if len(bad):
        raise BadAnswer(f"it has the log-prob {float(bad[0])}: must be finite and at most 0")
    largest = float(top.logprobs.double().exp().sum(1).max()) if top.logprobs.numel() else 0.0
    if largest > _LARGEST_SUM:
        raise BadAnswer(
            f"the probabilities of a token's likeliest successors add up to {largest:.4g}. Start the server without "
            "--logprobs-mode raw_logits or processed_logits"
        )
