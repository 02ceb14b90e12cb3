"""Requests in vLLM's format, and checked completions from its answers. Nothing here waits or sends.

One request is for all samples of one prompt. It contains token ids; the answer contains token ids, log-probs and
weight versions. Images are sent as files, with one placeholder for each in the token ids; the server expands them with
its own processor, and returns the token ids of the prompt, which must be those of the trainer's processor.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.base import Home, SamplingParams
from prefrl.types import Completion, FinishReason, Images

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.models.router_replay import RouterReplay

# vLLM gives sample g the seed `seed + g`, which must fit in 63 bits.
_SEED_MASK = 2**62 - 1
# vLLM silently raises lower temperatures to this one.
_LOWEST_TEMPERATURE = 0.01
# vLLM writes this for -infinity and NaN, which JSON cannot express.
NO_LOGPROB = -9999.0
# A log-prob can exceed 0 by rounding, and by no more than that.
HIGHEST_LOGPROB = 1e-3
# Added to the logit of a token that must not be sampled: the least that vLLM's other routes accept.
_FORBIDDEN = -100.0
# Bytes of an answer: what it has in any case, for each prompt token, and for each token that was requested.
_BASE_BYTES, _PROMPT_TOKEN_BYTES, _TOKEN_BYTES = 2**16, 32, 1024
# Of the number of an expert: up to four bytes, in base 64.
_EXPERT_BYTES = 6
_ID_PREFIX = "generate-tokens-"


class BadAnswer(Exception):
    """The answer does not fit the request."""


class Aborted(Exception):
    """The server aborted the request. It can be repeated."""


class OtherWeights(Exception):
    """Tokens were sampled with weights that are not this run's, for example by a restarted server."""


@dataclass(frozen=True, slots=True)
class Guided:
    """Constraint on every completion: exactly one of the three.

    Raises:
        ConfigError: None or several of them are given, or `json` is not a JSON object.
    """

    regex: str | None = None
    json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text
    grammar: str | None = None  # EBNF

    def __post_init__(self) -> None:
        """Check that exactly one is given."""
        given = [name for name in ("regex", "json", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"guided decoding with {given or 'nothing'}: set exactly one of regex, json and grammar")
        if self.json is not None:
            _schema(self.json)

    def to_json(self) -> dict[str, Any]:
        """The value of vLLM's parameter `structured_outputs`."""
        if self.json is not None:
            return {"json": _schema(self.json)}
        return {"regex": self.regex} if self.regex is not None else {"grammar": self.grammar}


def _schema(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
    except ValueError as error:
        raise ConfigError(f"json={schema!r}: must be a JSON schema, but is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"json={schema!r}: must be a JSON schema, which is an object such as {{'type': 'object'}}")
    return parsed


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt of a call, and how its completions are sampled."""

    number: int  # its index in the call
    token_ids: Sequence[int]
    seed: int
    sampling: SamplingParams
    step: int  # optimizer step of the weights that the servers had at the call
    home: Home | None = None  # of the conversation that it belongs to; None: of none
    images: Images | None = None  # None: it has none


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer must agree with."""

    request_id: str
    run: str
    vocab_size: int
    stop_ids: frozenset[int]
    is_guided: bool  # a completion may then also end where the constraint allows no further token
    never: tuple[int, ...] = ()  # tokens that must not be sampled: placeholders of images
    replay: RouterReplay | None = None  # of routers whose choices the answer must have; None: they are not read


def version_name(run: str, step: int) -> str:
    """The server's name for the weights of optimizer step `step` of a run."""
    return f"{run}:{step}"


def check_sampling(sampling: SamplingParams, guided: Guided | None) -> None:
    """Refuse sampling parameters that vLLM would change or cannot serve.

    Raises:
        ConfigError: The temperature is too low, or raw log-probs cannot be returned.
    """
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise ConfigError(
            f"temperature={sampling.temperature}: vLLM samples at {_LOWEST_TEMPERATURE} or above. Raise it, or set 0 "
            "for greedy decoding."
        )
    if sampling.logprobs == "raw" and not _is_undistorted(sampling, guided):
        raise ConfigError(
            'logprobs="raw": the vLLM server returns log-probs of the distribution that it samples from. They equal '
            "the raw log-probs only at temperature 1 or 0, without top_p, top_k, min_p, repetition_penalty and guided "
            'decoding. Change these options, or set logprobs="sampled".'
        )


def _is_undistorted(sampling: SamplingParams, guided: Guided | None) -> bool:
    if guided is not None or sampling.repetition_penalty != 1.0:
        return False
    is_whole = sampling.top_p == 1.0 and not sampling.top_k and not sampling.min_p
    return sampling.temperature == 0 or (sampling.temperature == 1 and is_whole)


def check_token_prompts(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    """Refuse prompts that the server cannot complete.

    Raises:
        GenerationError: A prompt is empty, or too long for the server.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {number} is empty: must have at least one token")
        if len(prompt) + max_tokens > max_model_len:
            raise GenerationError(
                f"prompt {number} has {len(prompt)} tokens and max_tokens={max_tokens}: together must be at most "
                f"{max_model_len} on this vLLM server. Start the server with a larger --max_model_len, or shorten the "
                "prompts (max_prompt_length) or the completions (max_completion_length)."
            )


def request_body(
    prompt: PromptRequest, expected: Expected, *, model: str, salt: str, guided: Guided | None
) -> dict[str, Any]:
    """The body of POST /inference/v1/generate.

    Args:
        prompt: What to complete.
        expected: What the answer will be checked against.
        model: The name of the model or adapter.
        salt: Separates prefix caches: entries that were computed with another salt are not used.
        guided: Constraint on the completions.
    """
    sampling = prompt.sampling
    parameters = {
        # vLLM refuses several greedy samples; they would be equal.
        "n": 1 if sampling.temperature == 0 else sampling.num_samples,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": prompt.seed & _SEED_MASK,
        "logprobs": 0,  # only of the sampled token
        # The trainer decides where to stop, not the server's tokenizer and generation config.
        "stop_token_ids": sorted(expected.stop_ids),
        "ignore_eos": True,
        "detokenize": guided is not None or bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    if expected.never:
        parameters["logit_bias"] = dict.fromkeys(map(str, expected.never), _FORBIDDEN)
    if guided is not None:
        parameters["structured_outputs"] = guided.to_json()
    return {
        "request_id": expected.request_id,
        "token_ids": list(prompt.token_ids),
        "model": model,
        "cache_salt": salt,
        "sampling_params": parameters,
        **({} if prompt.images is None else _with_images(prompt.images)),
    }


def _with_images(images: Images) -> dict[str, Any]:
    """The fields of a request for a prompt with images."""
    return {
        "token_ids": list(images.unexpanded_ids),
        "content_parts": [{"type": "image_url", "url": _data_url(picture)} for picture in images.pictures],
        "return_token_ids": True,
    }


def _data_url(picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)  # without loss; higher levels take several times as long
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def answer_limit(prompt: PromptRequest, *, num_experts: int = 0) -> int:
    """The most bytes that an answer with all completions of a prompt can have.

    Args:
        prompt: What is completed.
        num_experts: Numbers of experts that the answer has for each token that was run.
    """
    num_tokens = prompt.sampling.num_samples * prompt.sampling.max_tokens
    num_run = prompt.sampling.num_samples * len(prompt.token_ids) + num_tokens
    of_routes = _EXPERT_BYTES * num_experts * num_run
    return _BASE_BYTES + _PROMPT_TOKEN_BYTES * len(prompt.token_ids) + _TOKEN_BYTES * num_tokens + of_routes


def completions_of(answer: Any, prompt: PromptRequest, expected: Expected, *, newest_step: int) -> list[Completion]:
    """The [G] completions in an answer.

    Args:
        answer: The JSON of the answer.
        prompt: What was completed.
        expected: What the answer must agree with.
        newest_step: Optimizer step of the weights that were sent last. If that was after the call, they have sampled
            some of the tokens.

    Raises:
        BadAnswer: It does not fit the request.
        Aborted: The server aborted the request.
        OtherWeights: Tokens were sampled with weights of another run, or of a step outside
            `prompt.step..newest_step`.
    """
    try:
        if prompt.images is not None:
            _check_expansion(answer["prompt_token_ids"], prompt.token_ids)
        completions = _completions(answer, prompt, expected)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"a field is missing or malformed ({error!r}): {answer!r:.300}") from error
    steps = {step for completion in completions for step in completion.policy_versions}
    other = sorted(step for step in steps if not prompt.step <= step <= newest_step)
    if other:
        raise OtherWeights(
            f"sampled with weights of the steps {other[:5]}, but the servers had those of {prompt.step}..{newest_step}"
        )
    return completions


def _check_expansion(found: Sequence[int], ours: Sequence[int]) -> None:
    if list(found) == list(ours):
        return
    first = next((i for i, (one, other) in enumerate(zip(found, ours, strict=False)) if one != other), None)
    place = min(len(found), len(ours)) if first is None else first
    raise BadAnswer(
        f"with its images, the prompt has {len(found)} tokens on the server and {len(ours)} in the trainer, which "
        f"differ from token {place} on. Both must expand images in the same way: serve the files of the trainer's "
        "processor (processing_class) with the model, and do not pass vLLM any --mm-processor-kwargs that the trainer "
        "does not use"
    )


def _completions(answer: Any, prompt: PromptRequest, expected: Expected) -> list[Completion]:
    sampling = prompt.sampling
    if answer["request_id"] != _ID_PREFIX + expected.request_id:
        raise BadAnswer(f"it is the answer to another request, {answer['request_id']!r}")
    num_choices = 1 if sampling.temperature == 0 else sampling.num_samples
    choices = {choice["index"]: choice for choice in answer["choices"]}
    if len(answer["choices"]) != num_choices or choices.keys() != set(range(num_choices)):
        indices = [choice["index"] for choice in answer["choices"]]
        raise BadAnswer(f"it has the choices {indices}, but each of 0..{num_choices - 1} was requested once")
    completions = [_completion(choices[index], sampling, expected) for index in range(num_choices)]
    if expected.replay is not None:
        completions = [
            replace(one, routes=_routes(choices[index], one, expected.replay, num_sent=len(prompt.token_ids)))
            for index, one in enumerate(completions)
        ]
    return completions * (sampling.num_samples // num_choices)


def _completion(choice: Any, sampling: SamplingParams, expected: Expected) -> Completion:
    reason = choice["finish_reason"]
    if reason == "abort":
        raise Aborted(f"the server aborted the request after {len(choice['token_ids'])} tokens")
    tokens: list[int] = choice["token_ids"]
    if reason == "stop" and choice.get("stop_reason") in sampling.stop:
        reason = "stop_string"
    _check_tokens(tokens, reason, sampling, expected)
    logprobs = _logprobs(choice, tokens)
    if sampling.temperature == 0 and sampling.logprobs == "sampled":
        logprobs = [0.0] * len(tokens)  # greedy decoding gives each token probability 1
    return Completion(
        token_ids=tokens,
        finish_reason=reason,
        logprobs=logprobs,
        trainable=[True] * len(tokens),
        policy_versions=_policy_versions(choice["weight_versions"], len(tokens), expected.run),
    )


def _routes(choice: Any, completion: Completion, replay: RouterReplay, *, num_sent: int) -> Tensor:
    """The experts of each token that was run: the bytes of an array in base 64, as vLLM returns them."""
    text = choice.get("routed_experts")
    if text is None:
        raise BadAnswer(
            "it has no routed_experts, which router_replay=True needs. Start the server with `prefrl vllm-serve "
            "--enable_return_routed_experts`"
        )
    array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    routes = replay.of_layers(torch.from_numpy(array.astype(np.int64)))
    num_run = num_sent + len(completion.token_ids) - 1
    if len(routes) != num_run:
        raise BadAnswer(f"it has the experts of {len(routes)} tokens, but {num_run} were run")
    return routes


def _check_tokens(tokens: list[int], reason: str, sampling: SamplingParams, expected: Expected) -> None:
    if reason not in get_args(FinishReason):
        raise BadAnswer(f"finish_reason {reason!r} is not one of {get_args(FinishReason)}")
    if not 1 <= len(tokens) <= sampling.max_tokens:
        raise BadAnswer(f"a completion has {len(tokens)} tokens, but 1..{sampling.max_tokens} were requested")
    strange = [token for token in tokens if type(token) is not int or not 0 <= token < expected.vocab_size]
    if strange:
        raise BadAnswer(f"token ids {strange[:5]} are outside the vocabulary, 0..{expected.vocab_size - 1}")
    if not set(expected.never).isdisjoint(tokens):
        raise BadAnswer(f"a completion has placeholders of images, one of {list(expected.never)}")
    has_stopped = tokens[-1] in expected.stop_ids
    if expected.stop_ids.intersection(tokens[:-1]):
        raise BadAnswer(f"further tokens follow a stop token (one of {sorted(expected.stop_ids)})")
    if reason != "stop_string" and has_stopped != (reason == "stop") and not (reason == "stop" and expected.is_guided):
        raise BadAnswer(
            f"finish_reason {reason!r} with the last token {tokens[-1]}, but the stop tokens are "
            f"{sorted(expected.stop_ids)}"
        )
    if reason == "length" and len(tokens) < sampling.max_tokens:
        raise BadAnswer(f"a completion is cut off after {len(tokens)} tokens, before max_tokens={sampling.max_tokens}")


def _logprobs(choice: Any, tokens: list[int]) -> list[float]:
    entries = choice["logprobs"]["content"]
    echoed = [entry["token_id"] for entry in entries]
    if echoed != tokens:
        raise BadAnswer(f"the log-probs are for the tokens {echoed[:20]}, but the completion is {tokens[:20]}")
    logprobs = [entry["logprob"] for entry in entries]
    for position, logprob in enumerate(logprobs):
        if type(logprob) not in (float, int) or HIGHEST_LOGPROB < logprob < math.inf:
            raise BadAnswer(f"the log-prob of token {position} is {logprob!r}: must be a number <= 0")
        if not NO_LOGPROB < logprob < math.inf:  # NaN fails every comparison
            raise BadAnswer(
                f"the log-prob of token {position} is {logprob}. The weights have diverged or overflowed: lower "
                "learning_rate or max_grad_norm, and resume from an earlier checkpoint"
            )
    return [float(logprob) for logprob in logprobs]


def _policy_versions(spans: Any, num_tokens: int, run: str) -> list[int]:
    """The optimizer step of the weights that sampled each token, from consecutive spans `[start, end)`."""
    steps: list[int] = []
    for span in spans or []:
        owner, _, step = span["version"].partition(":")
        if owner != run or not step.isdecimal():
            raise OtherWeights(f"sampled with weights that the server calls {span['version']!r}, not {run}:<step>")
        if span["start"] != len(steps) or not span["start"] <= span["end"] <= num_tokens:
            raise BadAnswer(
                f"the spans of its weight versions are not consecutive and within the {num_tokens} tokens: {spans}"
            )
        steps += [int(step)] * (span["end"] - span["start"])
    if len(steps) != num_tokens:
        raise BadAnswer(f"its weight versions cover {len(steps)} of {num_tokens} tokens: {spans}")
    return steps
