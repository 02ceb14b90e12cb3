"""A gateway without a trainer: its keys, sampling options, and the files of its sessions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from datasets import load_dataset

from prefrl.data.formats import read_messages, read_tools
from prefrl.generation.base import SamplingParams
from prefrl.rewards.call import EventLoopThread
from prefrl.rollout.gateway import recorded
from prefrl.rollout.gateway.recorded import Answering, RecordingGateway
from prefrl.scripts.gateway import pairs_of
from prefrl.types import Completion
from tests.unit.rollout.episodes.scripted import completion, hermes

DEFAULTS = SamplingParams(num_samples=1, max_tokens=40, temperature=0.7)
USER = {"role": "user", "content": "hi"}


class Open:
    """A gateway that listens, and says what is written down.

    Args:
        folder: For the sessions.
        say: Gives the text of a completion by its number.
    """

    def __init__(self, folder: Path, say: Callable[[int], str], **options: Any) -> None:
        self.folder, self._say = folder, say
        self.asked: list[tuple[SamplingParams, int]] = []
        self._loop = EventLoopThread()
        answering = Answering(hermes(), self._ask, None, DEFAULTS)
        place = {"host": "127.0.0.1", "port": 0, "model": "runs/a", "key": None, **options}
        self.gateway = RecordingGateway(answering, folder, **place)
        self.run(self.gateway.start())

    def run(self, work: Any) -> Any:
        return self._loop.submit(work).result()

    def _ask(self, token_ids: Any, sampling: SamplingParams, seed: int) -> Future[Completion]:
        answer: Future[Completion] = Future()
        answer.set_result(completion(hermes(), self._say(len(self.asked)), sampling.max_tokens))
        self.asked.append((sampling, seed))
        return answer

    def chat(self, *messages: Any, key: str = "a", name: str | None = None, **body: Any) -> Any:
        headers = {} if name is None else {"X-Prefrl-Session": name}
        with openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=key, max_retries=0) as api:
            return api.chat.completions.create(model="any", messages=list(messages), extra_headers=headers, **body)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.gateway.url}{path}", json=body, headers={"authorization": "Bearer a", **headers})

    def rows(self) -> list[dict[str, Any]]:
        """What is on the disk, as a dataset."""
        files = sorted(map(str, self.folder.glob("session-*.parquet")), key=lambda name: Path(name).stat().st_ctime_ns)
        cache = str(self.folder.parent / "cache" / str(len(list(self.folder.parent.rglob("*")))))
        loaded: Any = load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
        return list(loaded)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Open]]:
    opened: list[Open] = []

    def serve(say: Callable[[int], str] = "said {}".format, **options: Any) -> Open:
        folder = tmp_path / f"sessions{len(opened)}"
        folder.mkdir()
        opened.append(Open(folder, say, **options))
        return opened[-1]

    yield serve
    for one in opened:
        one.run(one.gateway.close())


Serve = Callable[..., Open]


def answer(reply: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": reply.choices[0].message.content}


def test_any_key_and_any_name_is_a_session_and_none_is_refused(served: Serve) -> None:
    one = served()
    for key, name in (("a", None), ("b", None), ("c", "mine/1"), ("d", "mine/1"), ("a", None)):
        one.chat(USER, key=key, name=name)
    names = [row["session"] for row in one.rows()]
    assert sorted(map(names.count, set(names))) == [1, 2, 2]
    assert names.count("mine/1") == 2
    refused = one.post("/v1/chat/completions", {"messages": "no list"}, **{"x-prefrl-session": "refused"})
    assert refused.status_code == 400
    assert len(list(one.folder.iterdir())) == one.gateway.num_sessions == 3
    response = httpx.post(f"{one.gateway.url}/v1/messages", json={})
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert "the API key is missing" in response.text
    assert one.post("/v1/chat/completions", {}, host="evil.example").status_code == 403
    (model,) = openai.OpenAI(base_url=f"{one.gateway.url}/v1", api_key="z").models.list()
    assert model.id == "runs/a"


def test_a_key_that_is_set_is_the_only_one(served: Serve) -> None:
    one = served(key="secret")
    one.chat(USER, key="secret")
    with pytest.raises(openai.AuthenticationError, match="not the one that this server was started with"):
        one.chat(USER, key="secre")
    assert [row["session"] for row in one.rows()] == ["session"]  # nothing of the key


def test_a_request_decides_how_it_is_sampled(served: Serve, caplog: pytest.LogCaptureFixture) -> None:
    one = served()
    one.chat(USER)
    one.chat(USER, temperature=0, top_p=0.5, max_tokens=3, stop=["!"], extra_body={"top_k": -1, "min_p": 0.1})
    sampled = [sampling for sampling, _ in one.asked]
    assert sampled[0] == DEFAULTS
    assert sampled[1] == SamplingParams(1, 3, temperature=0, top_p=0.5, top_k=0, min_p=0.1, stop=("!",))
    for key in ("a", "b"):
        for seed in (5, -5, None):
            one.chat(USER, key=key, seed=seed)
    seeds = [seed for _, seed in one.asked]
    assert seeds[2:4] == seeds[5:7]
    assert len(set(seeds)) == len(seeds) - 2  # those of sessions and repetitions differ
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            one.chat(USER, frequency_penalty=0.5, presence_penalty=0)
    assert [record.getMessage().partition(", ")[0] for record in caplog.records] == [
        "a request asks for frequency_penalty=0.5"
    ]
    count = len(one.asked)
    refused: tuple[tuple[str, Any], ...] = (("temperature", "hot"), ("top_p", 2), ("seed", 0.5), ("temperature", True))
    for name, value in refused:
        with pytest.raises(openai.BadRequestError, match=f"{name}={value!r}"):
            one.chat(USER, **{name: value})
    assert len(one.asked) == count


def test_a_row_is_a_conversation_that_none_goes_on_from(served: Serve) -> None:
    one = served()
    first = one.chat(USER)
    more = {"role": "user", "content": "more"}
    second = one.chat(USER, answer(first), more)
    other = one.chat(USER, answer(first), {"role": "user", "content": "other"})  # a fork
    edited = one.chat(USER, {"role": "user", "content": "forget it"})
    rows = one.rows()
    assert [(row["turns"], row["completion"][-1]["content"]) for row in rows] == [
        (2, answer(second)["content"]),
        (2, answer(other)["content"]),
        (1, answer(edited)["content"]),
    ]
    assert [[message["content"] for message in row["prompt"]] for row in rows] == [["hi"], ["hi"], ["hi", "forget it"]]
    assert rows[0]["tokens"] == sum(reply.usage.completion_tokens for reply in (first, second))
    assert [row["finish_reason"] for row in rows] == ["stop"] * 3
    assert [message["role"] for message in read_messages(rows[0], "completion")] == ["assistant", "user", "assistant"]


def test_rewards_are_for_the_last_answer_or_for_the_named_one(served: Serve) -> None:
    one = served()
    assert (
        one.post("/v1/reward", {"reward": 1})
        .json()["error"]["message"]
        .endswith("no answer yet that a reward could be for")
    )
    first = one.chat(USER)
    one.chat(USER, answer(first), USER)
    one.chat({"role": "user", "content": "unrelated"})
    one.chat({"role": "user", "content": "unscored"})
    assert one.post("/v1/reward", {"reward": 0.5, "id": first.id}).status_code == 200
    assert one.post("/v1/reward", {"reward": 0, "id": "chatcmpl-00000002"}).status_code == 200
    assert [row["reward"] for row in one.rows()] == [0.5, 0.0, None]
    one.post("/v1/reward", {"reward": -2})
    assert [row["reward"] for row in one.rows()] == [0.5, 0.0, -2.0]
    for body in ({}, {"reward": True}, {"reward": "1"}, {"reward": 1, "id": "chatcmpl-00000009"}, [1]):
        assert one.post("/v1/reward", body).status_code == 400
    assert httpx.post(f"{one.gateway.url}/v1/reward", json={"reward": 1}).status_code == 401


def test_calls_with_unlike_arguments_in_several_files_are_one_dataset(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    arguments = [{"x": 1}, {"x": "one", "y": [{"z": 2.5}]}]
    calls = [
        {"tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": one}}]}
        for one in arguments
    ]
    for number, more in enumerate([*calls, {}]):
        said = [{"role": "assistant", "content": "so", **more}]
        row = {"prompt": [USER], "completion": said, "tools": json.dumps(tools) if more else None}
        recorded.write_conversations([row], tmp_path / f"session-{number}.parquet")
    rows: Any = list(load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / "cache")))
    assert [read_messages(row, "completion") for row in rows] == [
        [{"role": "assistant", "content": "so", **more}] for more in [*calls, {}]
    ]
    assert [read_tools(row) for row in rows] == [tools, tools, None]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.parquet")} == {0o600}


def test_a_session_that_could_not_be_written_is_written_with_the_next_answer(
    served: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = served()
    write = recorded.write_conversations

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorded, "write_conversations", full)
    one.chat(USER)
    assert "cannot be written: [Errno 28] No space left on device" in caplog.text
    monkeypatch.setattr(recorded, "write_conversations", write)
    one.chat(USER)
    assert len(one.rows()) == 2
    monkeypatch.setattr(recorded, "write_conversations", full)
    one.chat(USER)
    with pytest.raises(OSError, match="No space left"):
        one.run(one.gateway.close())


def test_long_sessions_go_on_in_another_file_and_old_ones_are_forgotten(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "_MOST_TURNS", 2)
    monkeypatch.setattr(recorded, "_MOST_SESSIONS", 3)
    one = served()
    for _ in range(3):
        one.chat(USER)
    assert one.post("/v1/reward", {"reward": 1}).status_code == 200
    for key in ("b", "a", "c", "d"):
        one.chat(USER, key=key)
    assert [len(session.turns) for session in one.gateway.sessions.values()] == [2, 1, 1]  # a, c, d
    rewards = [row["reward"] for row in one.rows()]
    assert (len(rewards), sum(reward is not None for reward in rewards)) == (7, 1)
    assert len(list(one.folder.iterdir())) == one.gateway.num_sessions == 5


def test_pairs_are_the_best_and_the_worst_of_a_prompt() -> None:
    def row(prompt: str, said: str, reward: float | None, tools: str | None = None) -> dict[str, Any]:
        messages = [{"role": "assistant", "content": said}]
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": messages,
            "tools": tools,
            "reward": reward,
        }

    rows = [
        *(row("p", said, reward) for said, reward in (("b", 0.5), ("c", -1.0), ("d", 2.0), ("e", None), ("f", 2.0))),
        *(row("q", said, 1.0) for said in "gh"),
        *(row("r", said, reward, tools) for said, reward, tools in (("i", 1.0, "[1]"), ("j", 0.0, None))),
    ]
    assert [json.loads(json.dumps(pair)) for pair in pairs_of(rows)] == [
        {
            "prompt": rows[0]["prompt"],
            "chosen": [{"role": "assistant", "content": "d"}],
            "rejected": [{"role": "assistant", "content": "c"}],
            "tools": None,
            "reward_chosen": 2.0,
            "reward_rejected": -1.0,
        }
    ]
