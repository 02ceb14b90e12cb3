"""Unmodified clients of seven packages: each is answered, and all of it is trained on as it was sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from prefrl.models.forward import token_logprobs
from prefrl.rollout.batches import sampled_batch
from prefrl.rollout.gateway.formats import Reply
from prefrl.rollout.gateway.server import Limits
from prefrl.types import Rollout, SampledBatch
from tests.assets import tiny_model
from tests.unit.data.tool_templates import HERMES, tool_template
from tests.unit.rollout.episodes.scripted import call, hermes
from tests.unit.rollout.gateway.clients import ANSWER, CLIENTS, SCHEMA, History, Weights
from tests.unit.rollout.gateway.served import Served
from tests.unit.rollout.gateway.test_formats import REPLIES, REQUESTS

DOCS = Path(__file__).parents[4] / "docs" / "agents.md"
ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(Limits(body=100_000)) as served:
        yield served


@pytest.fixture(scope="module")
def weights() -> Weights:
    size = len(hermes().tokenizer)
    return Weights(tiny_model(vocab_size=size, max_position_embeddings=8192).double())


def graded(weights: Weights, batch: SampledBatch, plan: Any) -> tuple[Tensor, Tensor]:
    """The log-probs of what is trained on, and the gradient of a sum of them in which each has a weight of its own."""
    weights.model.zero_grad()
    found = token_logprobs(weights.model, batch, temperature=1.0, plan=plan).logprobs[batch.trainable]
    own = (1000 * batch.sampling_logprobs[batch.trainable].double()).sin()
    (own * found).sum().backward()
    return found.detach(), torch.cat(
        [one.grad.flatten() for one in weights.model.parameters() if one.grad is not None]
    )


@pytest.mark.parametrize("name", CLIENTS)
def test_an_unmodified_client_is_answered_and_all_of_it_is_trained_as_it_was_sampled(
    name: str, served: Served, weights: Weights
) -> None:
    kind = CLIENTS[name]
    with served.session(kind.said.__getitem__, weights=weights) as (client, session):
        assert kind.run(client) == ANSWER

    turns = session.turns
    assert "74" in served.text_of(turns[1].sent_ids)
    history = History.of(turns)
    assert (history.num_turns, history.num_rows) == (2, kind.num_rows)
    batch = sampled_batch([Rollout(turns, {}, 0)], mask_truncated=False)
    assert batch.num_trainable == sum(len(turn.completion.token_ids) for turn in turns)
    found, gradient = graded(weights, batch, "shared_prefix")
    assert (found - batch.sampling_logprobs[batch.trainable]).abs().max() < 2e-6  # samplers tell them in float32

    separate = sampled_batch([Rollout([turn], {}, number) for number, turn in enumerate(turns)], mask_truncated=False)
    assert separate.num_forward_tokens > batch.num_forward_tokens
    _, expected = graded(weights, separate, "padded")
    assert (gradient - expected).norm() < 1e-6 * expected.norm()


def test_the_docs_tell_of_each_client() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("<!-- clients -->")[2].partition("<!-- end of clients -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in table.strip().splitlines()[2:]]
    assert rows == [[name, kind.api, "2", str(kind.num_rows)] for name, kind in CLIENTS.items()]


# Thinking.

THINKS = HERMES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
)
THOUGHT = "I should multiply."
THINKING = f"<think>\n{THOUGHT}\n</think>\n\n"


def _openai_chat(client: Any) -> tuple[str, int]:
    import openai

    function: Any = {"name": "multiply", "description": "Multiply.", "parameters": SCHEMA}
    with openai.OpenAI(**client.openai, max_retries=0) as api:
        asked: Any = {"model": client.model, "tools": [{"type": "function", "function": function}]}
        first = api.chat.completions.create(messages=ASK, **asked)
        said = first.choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "74"}
        api.chat.completions.create(messages=[*ASK, said.model_dump(exclude_none=True), result], **asked)
        return said.reasoning_content, first.usage.completion_tokens_details.reasoning_tokens  # type: ignore[attr-defined, union-attr]


def _openai_responses(client: Any) -> tuple[str, int]:
    import openai

    tool: Any = {"type": "function", "name": "multiply", "parameters": SCHEMA, "strict": False}
    with openai.OpenAI(**client.openai, max_retries=0) as api:
        with api.responses.stream(model=client.model, input=ASK, tools=[tool]) as stream:
            for _ in stream:
                pass
            said: Any = stream.get_final_response()
        thought, made = said.output
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "74"}
        api.responses.create(model=client.model, input=[*ASK, *said.output, result], tools=[tool])
        return thought.content[0].text, said.usage.output_tokens_details.reasoning_tokens


def _anthropic(client: Any) -> tuple[str, int]:
    import anthropic

    with anthropic.Anthropic(**client.anthropic, max_retries=0) as api:
        asked: Any = {"model": client.model, "max_tokens": 500}
        asked["tools"] = [{"name": "multiply", "description": "Multiply.", "input_schema": SCHEMA}]
        with api.messages.stream(messages=ASK, **asked) as stream:
            said: Any = stream.get_final_message()
        thought, made = said.content
        result = {"type": "tool_result", "tool_use_id": made.id, "content": "74"}
        messages: Any = [*ASK, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        api.messages.create(messages=messages, **asked)
        return thought.thinking, 0


@pytest.mark.parametrize("run", [_openai_chat, _openai_responses, _anthropic])
def test_thinking_is_told_in_each_formats_own_way_and_comes_back_unchanged(run: Any, served: Served) -> None:
    said = [f"{THINKING}{call('multiply', a=2, b=37)}", ANSWER]
    with served.session(said.__getitem__, template=tool_template(THINKS)) as (client, session):
        thought, num_thought = run(client)
    assert thought == THOUGHT
    if num_thought:
        ids = session.turns[0].completion.token_ids[:num_thought]
        assert served.text_of(ids) == f"<think>\n{THOUGHT}"
    first, second = session.turns
    row = [*first.sent_ids, *first.completion.token_ids]
    assert second.sent_ids[: len(row)] == row


# Errors.


def _asked(client: Any, package: str, **changes: Any) -> Any:
    """What a package returns or raises."""
    import anthropic
    import openai

    options = {"max_retries": 0, "api_key": changes.pop("api_key", client.api_key)}
    if package == "anthropic":
        with anthropic.Anthropic(base_url=client.root, **options) as api:
            return api.messages.create(**{"model": "policy", "max_tokens": 5, "messages": ASK, **changes})
    with openai.OpenAI(base_url=client.base_url, **options) as other:
        return other.chat.completions.create(**{"model": "policy", "messages": ASK, **changes})


LONG: Any = [{"role": "user", "content": "long " * 100}]
HUGE: Any = [{"role": "user", "content": "x" * 200_000}]


@pytest.mark.parametrize(
    ("changes", "error", "openai_code", "anthropic_type"),
    [
        ({"messages": LONG}, "BadRequestError", "context_length_exceeded", "invalid_request_error"),
        ({"tools": [{}]}, "BadRequestError", None, "invalid_request_error"),
        ({"api_key": "sk-x-y"}, "AuthenticationError", "invalid_api_key", "authentication_error"),
        ({"messages": HUGE}, "APIStatusError", None, "request_too_large"),
        ({"messages": [{"role": "user", "content": "fail"}]}, "InternalServerError", None, "api_error"),
    ],
    ids=["context", "tools", "key", "size", "sampler"],
)
@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_errors_are_those_that_the_clients_know(
    package: str, changes: Any, error: str, openai_code: str | None, anthropic_type: str, served: Served
) -> None:
    module = pytest.importorskip(package)
    with (
        served.session(lambda _: OSError("gone"), context_limit=300) as (client, _),
        pytest.raises(getattr(module, error)) as raised,
    ):
        _asked(client, package, **changes)
    body = raised.value.body
    if package == "openai":
        assert raised.value.code == openai_code
        text = body["message"]
    else:
        assert (body["type"], body["error"]["type"]) == ("error", anthropic_type)
        text = body["error"]["message"]
    if changes.get("messages") is LONG:
        assert text.startswith(
            "This model's maximum context length is 300" if package == "openai" else "prompt is too"
        )


def test_a_client_that_asks_after_the_end_is_told_so(served: Served) -> None:
    import openai

    with served.session(lambda _: "said") as (client, _):
        pass
    with pytest.raises(openai.APIStatusError, match="the episode of this key is over") as raised:
        _asked(client, "openai")
    assert raised.value.status_code == 410


def test_tokens_are_counted_as_they_are_sent(served: Served) -> None:
    import anthropic

    with (
        served.session(lambda _: "said") as (client, session),
        anthropic.Anthropic(**client.anthropic, max_retries=0) as api,
    ):
        asked: Any = {"model": client.model, "messages": ASK, "system": "Be brief."}
        asked["tools"] = [{"name": "multiply", "description": "Multiply.", "input_schema": SCHEMA}]
        counted = api.messages.count_tokens(**asked).input_tokens
        assert session.turns == []
        said = api.messages.create(max_tokens=50, **asked)
        assert counted == said.usage.input_tokens == len(session.turns[0].sent_ids)
        asked["messages"] = [*ASK, {"role": "assistant", "content": "said"}, *ASK]
        counted = api.messages.count_tokens(**asked).input_tokens
        api.messages.create(max_tokens=50, **asked)
        assert counted == len(session.turns[1].sent_ids) > len(session.turns[0].sent_ids)
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            api.messages.count_tokens(**{**asked, "tools": [{}]})
    with pytest.raises(anthropic.APIStatusError, match="is over"), anthropic.Anthropic(**client.anthropic) as api:
        api.messages.count_tokens(**asked)


# What is sent.


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("told", REPLIES, ids=lambda told: f"{told.ending} {'+'.join(sorted(told.message))}")
def test_answers_are_of_the_types_of_the_clients(name: str, told: Reply) -> None:
    form, body = REQUESTS[name]
    whole, events = _types(name)
    answer = whole.model_validate_json(json.dumps(form.write(told, body)), strict=True)
    of_kind = {} if name == "chat" else {_literal(event): event for event in events}

    told_last: dict[str, Any] = {}
    for kind, data in form.events(told, body):
        if data == "[DONE]":
            continue
        assert isinstance(data, dict)
        assert kind == data.get("type")
        (events[0] if kind is None else of_kind[kind]).model_validate_json(json.dumps(data), strict=True)
        told_last = data.get("response", data).get("usage") or told_last

    for usage in (answer.usage.model_dump(exclude_none=True), told_last):
        assert {key: usage[key] for key in usage if not key.endswith("_details")} == _usage(name)


def _types(name: str) -> tuple[Any, tuple[Any, ...]]:
    if name == "messages":
        from anthropic import types

        return types.Message, get_args(get_args(types.RawMessageStreamEvent)[0])
    if name == "chat":
        from openai.types import chat

        return chat.ChatCompletion, (chat.ChatCompletionChunk,)
    from openai.types import responses

    return responses.Response, get_args(get_args(responses.ResponseStreamEvent)[0])


def _literal(event: Any) -> str:
    return str(get_args(event.model_fields["type"].annotation)[0])


def _usage(name: str) -> dict[str, int]:
    if name == "chat":
        return {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    own = {"input_tokens": 3, "output_tokens": 4}
    return own if name == "messages" else {**own, "total_tokens": 7}
