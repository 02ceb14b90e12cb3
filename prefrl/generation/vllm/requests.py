"""Requests for completions as vLLM reads them, and its answers, checked, as completions. Nothing here waits or sends.

One request asks for all samples of one prompt: token ids in, token ids, log-probs and weight versions out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from prefrl.errors import ConfigError, GenerationError
from prefrl.types import Completion, FinishReason

if TYPE_CHECKING:
    from prefrl.generation.base import SamplingParams

__all__ = ["Aborted", "BadAnswer", "Expected", "Guided", "OtherWeights", "Prompt", "completions_of", "request_body"]
__all__ += ["check_prompts", "check_sampling", "version_name"]

# vLLM gives sample g the seed `seed + g`, which must fit in 63 bits.
_SEED_MASK = 2**62 - 1
# vLLM silently raises lower temperatures to this one.
_LOWEST_TEMPERATURE = 0.01
# What vLLM writes where JSON has no number for -infinity or NaN.
_NO_LOGPROB = -9999.0
_ID_PREFIX = "generate-tokens-"


class BadAnswer(Exception):
    """The answer is not what was asked for."""


class Aborted(Exception):
    """The server gave up the request, as if it had not been asked."""


class OtherWeights(Exception):
    """Tokens were sampled by weights that are not of this run, as those of a server that was restarted are."""


@dataclass(frozen=True, slots=True)
class Guided:
    """What every completion has to match: exactly one of the three.

    Raises:
        ConfigError: None or several of them are given, or `json` is no JSON object.
    """

    regex: str | None = None
    json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text
    grammar: str | None = None  # EBNF

    def __post_init__(self) -> None:
        """Check that there is one."""
        given = [name for name in ("regex", "json", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"guided decoding by {given or 'nothing'}: give exactly one of regex, json and grammar")
        if self.json is not None:
            _schema(self.json)

    def to_json(self) -> dict[str, Any]:
        """As vLLM's `structured_outputs`."""
        if self.json is not None:
            return {"json": _schema(self.json)}
        return {"regex": self.regex} if self.regex is not None else {"grammar": self.grammar}


def _schema(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
    except ValueError as error:
        raise ConfigError(f"json={schema!r}: is no JSON ({error}); give a JSON schema") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"json={schema!r}: a JSON schema is an object, like {{'type': 'object'}}")
    return parsed


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a call, and how completions of it are drawn."""

    number: int  # in the call
    token_ids: Sequence[int]
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer is checked against."""

    request_id: str
    run: str
    vocab_size: int
    stop_ids: frozenset[int]
    is_guided: bool  # then a completion may also end where nothing more is allowed


def version_name(run: str, step: int) -> str:
    """What the server calls the weights of optimizer step `step` of a run."""
    return f"{run}:{step}"


def check_sampling(sampling: SamplingParams, guided: Guided | None) -> None:
    """Refuse what vLLM would change or could not answer.

    Raises:
        ConfigError: See there.
    """
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise ConfigError(
            f"temperature={sampling.temperature}: vLLM samples at {_LOWEST_TEMPERATURE} or above; use 0 for greedy "
            "decoding"
        )
    if sampling.logprobs == "raw" and not _is_undistorted(sampling, guided):
        raise ConfigError(
            'logprobs="raw": a vLLM server that trains gives the log-probs of the distribution that it samples from. '
            "They are the raw ones only at temperature 1 or 0, without top_p, top_k, min_p, repetition_penalty and "
            'guided decoding. Set those, or logprobs="sampled".'
        )


def _is_undistorted(sampling: SamplingParams, guided: Guided | None) -> bool:
    if guided is not None or sampling.repetition_penalty != 1.0:
        return False
    is_whole = sampling.top_p == 1.0 and not sampling.top_k and not sampling.min_p
    return sampling.temperature == 0 or (sampling.temperature == 1 and is_whole)


def check_prompts(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    """Refuse prompts that no token can follow.

    Raises:
        GenerationError: A prompt is empty, or too long for the server.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {number} is empty: a first token is sampled after at least one token")
        if len(prompt) + max_tokens > max_model_len:
            raise GenerationError(
                f"prompt {number} has {len(prompt)} tokens and max_tokens={max_tokens}: together at most "
                f"{max_model_len} on this vLLM server. Start it with a larger --max_model_len, or shorten the prompts "
                "(max_prompt_length) or the completions (max_completion_length)."
            )


def request_body(
    prompt: Prompt, expected: Expected, *, model: str, salt: str, guided: Guided | None
) -> dict[str, Any]:
    """The body of POST /inference/v1/generate.

    Args:
        prompt: What to complete.
        expected: What the answer will be checked against.
        model: The name of the model or adapter.
        salt: Parts the prefix cache: what was computed under another salt is not used.
        guided: What completions have to match.
    """
    sampling = prompt.sampling
    parameters = {
        # vLLM refuses several greedy samples, which would be equal.
        "n": 1 if sampling.temperature == 0 else sampling.num_samples,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": prompt.seed & _SEED_MASK,
        "logprobs": 0,  # of the sampled token alone
        # Stopping is the trainer's, whatever the server's own tokenizer and generation config say.
        "stop_token_ids": sorted(expected.stop_ids),
        "ignore_eos": True,
        "detokenize": guided is not None,
    }
    if guided is not None:
        parameters["structured_outputs"] = guided.to_json()
    return {
        "request_id": expected.request_id,
        "token_ids": list(prompt.token_ids),
        "model": model,
        "cache_salt": salt,
        "sampling_params": parameters,
    }


def completions_of(answer: Any, prompt: Prompt, expected: Expected) -> list[Completion]:
    """[G] completions of an answer.

    Raises:
        BadAnswer: It is not an answer to this request.
        Aborted: The server gave up.
        OtherWeights: Tokens are by weights that are not of this run.
    """
    try:
        return _completions(answer, prompt.sampling, expected)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"it lacks something, or has it in another form ({error!r}): {str(answer)[:300]}") from error


def _completions(answer: Any, sampling: SamplingParams, expected: Expected) -> list[Completion]:
    if answer["request_id"] != _ID_PREFIX + expected.request_id:
        raise BadAnswer(f"it is the answer to another request, {answer['request_id']!r}")
    num_choices = 1 if sampling.temperature == 0 else sampling.num_samples
    choices = {choice["index"]: choice for choice in answer["choices"]}
    if len(answer["choices"]) != num_choices or choices.keys() != set(range(num_choices)):
        indices = [choice["index"] for choice in answer["choices"]]
        raise BadAnswer(f"it has the choices {indices}, where 0..{num_choices - 1}, once each, were asked for")
    completions = [_completion(choices[index], sampling, expected) for index in range(num_choices)]
    return completions * (sampling.num_samples // num_choices)


def _completion(choice: Any, sampling: SamplingParams, expected: Expected) -> Completion:
    reason = choice["finish_reason"]
    if reason == "abort":
        raise Aborted(f"the server aborted the request after {len(choice['token_ids'])} tokens")
    tokens: list[int] = choice["token_ids"]
    _check_tokens(tokens, reason, sampling, expected)
    logprobs = _logprobs(choice, tokens)
    if sampling.temperature == 0 and sampling.logprobs == "sampled":
        logprobs = [0.0] * len(tokens)  # greedy decoding leaves no choice
    return Completion(
        token_ids=tokens,
        finish_reason=reason,
        logprobs=logprobs,
        trainable=[True] * len(tokens),
        policy_versions=_policy_versions(choice["weight_versions"], len(tokens), expected.run),
    )


def _check_tokens(tokens: list[int], reason: str, sampling: SamplingParams, expected: Expected) -> None:
    if reason not in get_args(FinishReason):
        raise BadAnswer(f"finish_reason {reason!r} is none of {get_args(FinishReason)}")
    if not 1 <= len(tokens) <= sampling.max_tokens:
        raise BadAnswer(f"a completion has {len(tokens)} tokens, where 1..{sampling.max_tokens} were asked for")
    strange = [token for token in tokens if type(token) is not int or not 0 <= token < expected.vocab_size]
    if strange:
        raise BadAnswer(f"token ids {strange[:5]} are outside the vocabulary, 0..{expected.vocab_size - 1}")
    has_stopped = tokens[-1] in expected.stop_ids
    if expected.stop_ids.intersection(tokens[:-1]):
        raise BadAnswer(f"tokens follow a stop token ({sorted(expected.stop_ids)})")
    if has_stopped != (reason == "stop") and not (reason == "stop" and expected.is_guided):
        raise BadAnswer(f"finish_reason {reason!r} with the last token {tokens[-1]}; {sorted(expected.stop_ids)} stop")
    if reason == "length" and len(tokens) < sampling.max_tokens:
        raise BadAnswer(f"cut off after {len(tokens)} tokens, before the {sampling.max_tokens} that were asked for")


def _logprobs(choice: Any, tokens: list[int]) -> list[float]:
    entries = choice["logprobs"]["content"]
    echoed = [entry["token_id"] for entry in entries]
    if echoed != tokens:
        raise BadAnswer(f"its log-probs are of the tokens {echoed[:20]}, its completion is {tokens[:20]}")
    logprobs = [float(entry["logprob"]) for entry in entries]
    # Above 0 only by rounding; NaN fails every comparison.
    for position, logprob in enumerate(logprobs):
        if not _NO_LOGPROB < logprob < math.inf:
            raise BadAnswer(
                f"the log-prob of token {position} is {logprob}. The weights have diverged or overflowed: lower "
                "learning_rate or max_grad_norm, and restart from a checkpoint before this"
            )
    return logprobs


def _policy_versions(spans: Any, num_tokens: int, run: str) -> list[int]:
    """The optimizer step behind each token, of spans `[start, end)` that follow each other."""
    steps: list[int] = []
    for span in spans or []:
        owner, _, step = span["version"].partition(":")
        if owner != run or not step.isdecimal():
            raise OtherWeights(f"tokens are by weights that the server calls {span['version']!r}, not {run}:<step>")
        if span["start"] != len(steps) or span["end"] < span["start"]:
            raise BadAnswer(f"its weight versions do not follow each other: {spans}")
        steps += [int(step)] * (span["end"] - span["start"])
    if len(steps) != num_tokens:
        raise BadAnswer(f"its weight versions cover {len(steps)} of {num_tokens} tokens: {spans}")
    return steps
