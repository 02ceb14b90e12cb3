"""Unmodified clients of seven packages: each asks, calls a tool and answers; and what they do to the history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from prefrl.rollout.batches import responses_of, sampled_batch
from prefrl.rollout.gateway.client import Client
from prefrl.rollout.gateway.formats import Reply
from prefrl.types import Rollout
from tests.unit.rollout.episodes.scripted import call
from tests.unit.rollout.gateway.served import Served
from tests.unit.rollout.gateway.test_formats import REPLIES, REQUESTS

QUESTION = "What is 2 * 37?"
ANSWER = "The answer is 74."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def openai_chat(client: Client, *, is_streamed: bool = False) -> str:
    import openai

    function = {"name": "multiply", "description": "Multiply.", "parameters": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(**client.openai, max_retries=0) as api:
        while True:
            asked: Any = {"model": client.model, "messages": messages}
            asked["tools"] = [{"type": "function", "function": function}]
            if is_streamed:
                with api.chat.completions.stream(**asked) as stream:
                    said: Any = stream.get_final_completion().choices[0].message
            else:
                said = api.chat.completions.create(**asked).choices[0].message
            if not said.tool_calls:
                return str(said.content)
            messages.append({"role": "assistant", "content": said.content, "tool_calls": [_plain(said.tool_calls[0])]})
            for made in said.tool_calls:
                product = _product(json.loads(made.function.arguments))
                messages.append({"role": "tool", "tool_call_id": made.id, "content": product})


def _plain(made: Any) -> dict[str, Any]:
    function = {"name": made.function.name, "arguments": made.function.arguments}
    return {"id": made.id, "type": "function", "function": function}


def _product(arguments: Any) -> str:
    return str(arguments["a"] * arguments["b"])


def openai_responses_stream(client: Client) -> str:
    import openai

    tool: Any = {"type": "function", "name": "multiply", "parameters": SCHEMA, "strict": False}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(**client.openai, max_retries=0) as api:
        while True:
            text = ""
            with api.responses.stream(model=client.model, input=items, tools=[tool]) as stream:
                for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
                said = stream.get_final_response()
            items += said.output
            calls = [item for item in said.output if item.type == "function_call"]
            if not calls:
                assert said.output_text == text
                return text
            for made in calls:
                product = _product(json.loads(made.arguments))
                items.append({"type": "function_call_output", "call_id": made.call_id, "output": product})


def anthropic_messages(client: Client, *, is_streamed: bool = False) -> str:
    import anthropic

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(**client.anthropic, max_retries=0) as api:
        while True:
            asked: Any = {"model": client.model, "max_tokens": 100, "messages": messages, "system": "Be brief."}
            asked["tools"] = [{"name": "multiply", "description": "Multiply.", "input_schema": SCHEMA}]
            if is_streamed:
                with api.messages.stream(**asked) as stream:
                    said = stream.get_final_message()
            else:
                said = api.messages.create(**asked)
            if said.stop_reason != "tool_use":
                return "".join(block.text for block in said.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": _product(block.input)}
                for block in said.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]


def openai_agents(client: Client, *, is_chat: bool = False, is_streamed: bool = False) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    kind = agents.OpenAIChatCompletionsModel if is_chat else agents.OpenAIResponsesModel

    async def run() -> str:
        async with openai.AsyncOpenAI(**client.openai, max_retries=0) as api:
            model = kind(model=client.model, openai_client=api)
            agent = agents.Agent(name="agent", instructions="Be brief.", tools=[multiply], model=model)
            if not is_streamed:
                return str((await agents.Runner.run(agent, QUESTION)).final_output)
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    return asyncio.run(run())


def pydantic_ai(client: Client) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel(client.model, provider=OpenAIProvider(**client.openai)), system_prompt="Be brief.")

    @agent.tool_plain
    def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    return str(asyncio.run(agent.run(QUESTION)).output)


def langgraph(client: Client) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def multiply(a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    model = ChatOpenAI(model=client.model, **client.openai, max_retries=0)  # type: ignore[arg-type]
    result = create_agent(model, [multiply]).invoke({"messages": [("user", QUESTION)]})  # type: ignore[arg-type]
    return str(result["messages"][-1].content)


def smolagents(client: Client) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def multiply(a: int, b: int) -> str:
        """Multiply.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a * b)

    model = OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    return str(ToolCallingAgent(tools=[multiply], model=model, max_steps=3, verbosity_level=0).run(QUESTION))


def _with(run: Callable[..., str], **options: bool) -> Callable[[Client], str]:
    return lambda client: run(client, **options)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.mark.parametrize(
    ("run", "num_rows"),
    [
        pytest.param(openai_chat, 1, id="openai"),
        pytest.param(_with(openai_chat, is_streamed=True), 1, id="openai streamed"),
        pytest.param(openai_responses_stream, 1, id="openai responses streamed"),
        pytest.param(anthropic_messages, 1, id="anthropic"),
        pytest.param(_with(anthropic_messages, is_streamed=True), 1, id="anthropic streamed"),
        pytest.param(openai_agents, 1, id="openai-agents"),
        pytest.param(_with(openai_agents, is_streamed=True), 1, id="openai-agents streamed"),
        pytest.param(_with(openai_agents, is_chat=True), 1, id="openai-agents chat"),
        pytest.param(pydantic_ai, 1, id="pydantic-ai"),
        pytest.param(langgraph, 1, id="langgraph"),
        pytest.param(smolagents, 2, id="smolagents"),  # it writes its own calls as text
    ],
)
def test_an_unmodified_client_is_answered_and_all_of_it_is_trained(
    run: Callable[[Client], str], num_rows: int, served: Served, record_property: Callable[[str, object], None]
) -> None:
    last = call("final_answer", answer=ANSWER) if run is smolagents else ANSWER
    with served.session([call("multiply", a=2, b=37), last].__getitem__) as (client, session):
        assert run(client) == ANSWER

    turns = session.turns
    assert "74" in served.text_of(turns[1].sent_ids)
    assert len(turns) == 2
    rollout = Rollout(turns, {}, 0)
    assert len(responses_of(rollout)) == num_rows
    batch = sampled_batch([rollout], mask_truncated=False)
    assert batch.trainable.sum() == sum(len(turn.completion.token_ids) for turn in turns)
    separate = sum(len(turn.sent_ids) + len(turn.completion.token_ids) for turn in turns)
    record_property("tokens", f"{separate} in separate requests, {batch.num_forward_tokens} in a forward pass")


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
