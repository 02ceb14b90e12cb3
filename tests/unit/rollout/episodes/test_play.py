"""One episode: what the model is told, why it ends, and which ids are trained on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from typing import Any

import pytest

from prefrl import DataError, Environment, EpisodeError, Observation
from prefrl.data.chat import ChatTemplate, special_tokens
from prefrl.rollout.batches import responses_of
from prefrl.rollout.episodes.environment import EMPTY_PROMPT
from prefrl.rollout.episodes.play import EnvironmentFailure
from prefrl.types import Completion
from tests.patience import PATIENCE, before_a_deadline
from tests.unit.data import templates
from tests.unit.data.tool_templates import tool_template
from tests.unit.rollout.episodes.scripted import ASK, END, NEEDS_IDS, Played, call, completion, hermes, kind_of


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Given:
    """A tool that returns what the test says."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.calls: list[int] = []

    @property
    def tool(self) -> Any:
        def give(number: int = 0) -> str:
            """Give something.

            Args:
                number: Any.
            """
            self.calls.append(number)
            result = self.results.pop(0)
            if isinstance(result, BaseException):
                raise result
            return result() if callable(result) else result

        return give


class World(Environment):
    """What it does is given by the test, method by method: a value, an error, a function of the argument, or
    several of these one after another."""

    script: dict[str, Any] = {}  # noqa: RUF012 - set for a test
    seen: list[tuple[str, Any]] = []  # noqa: RUF012

    def _does(self, method: str, given: Any) -> Any:
        World.seen.append((method, given))
        does = World.script.get(method)
        if isinstance(does, deque):
            does = does.popleft()
        if isinstance(does, BaseException):
            raise does
        return does(given) if callable(does) else does

    def reset(self, **row: Any) -> Any:
        return self._does("reset", row)

    def respond(self, message: Any) -> Any:
        return self._does("respond", message)

    def get_reward(self) -> Any:
        return self._does("get_reward", None)

    def act(self, number: int = 0) -> Any:
        """Act.

        Args:
            number: Any.
        """
        return self._does("act", number)


class Editing(World):
    def edit(self, messages: Any) -> Any:
        return self._does("edit", messages)


def world(*answers: Any, kind: type = World, does: dict[str, Any] | None = None, **more: Any) -> Played:
    World.script, World.seen = {}, []
    of_kind = kind_of(factory=kind)
    World.script = does or {}
    return Played(of_kind, *answers, **more)


def rows(played: Played) -> list[list[int]]:
    return [[*response.prompt_ids, *response.token_ids] for response in responses_of(played.rollout)]


def reply(text: str) -> str:
    """The next turn's context, behind what was sampled."""
    return f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_call_is_run_and_its_result_is_sent_behind_what_was_sampled() -> None:
    played = Played(kind_of(add), call("add", a=2, b=3), "five")
    assert played.episode.stop_reason == "stop"
    assert (played.episode.kind, played.episode.num_calls, played.episode.num_failed_calls) == ("tools", 1, 0)
    assert played.episode.reward is None
    assert played.text(1) == played.text(0) + call("add", a=2, b=3) + END + reply("5")
    # What rewards see, in TRL's form.
    question, answer, last = played.played.said
    (asked,) = question["tool_calls"]
    assert question["role"] == "assistant"
    assert asked["type"] == "function"
    assert asked["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert answer == {"role": "tool", "name": "add", "content": "5", "tool_call_id": asked["id"]}
    assert last == {"role": "assistant", "content": "five"}
    assert played.played.prompt == [ASK]
    # One row, of which only what was sampled is trained on; each turn has its seed.
    (response,) = responses_of(played.rollout)
    assert rows(played) == [[*played.sent[1][0], *played.played.turns[1].completion.token_ids]]
    sampled = [token for token, trains in zip(response.token_ids, response.trainable, strict=True) if trains]
    assert sampled == played.rollout.sampled_ids
    assert [seed for _, _, seed in played.sent] == [100, 101]


def test_calls_of_a_turn_are_run_in_order_and_have_ids_of_their_own() -> None:
    given = Given("one", "two", "three")
    twice = call("give", number=1) + "\n" + call("give", number=2)
    played = Played(kind_of(given.tool), twice, call("give", number=3), "done")
    assert given.calls == [1, 2, 3]
    assert played.told == ["one", "two", "three"]
    ids = [message["tool_call_id"] for message in played.played.said if message["role"] == "tool"]
    assert len(set(ids)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert [one["id"] for message in played.played.said for one in message.get("tool_calls", ())] == ids
    assert played.episode.num_calls == 3


# Why an episode ends.


def test_it_ends_with_the_last_allowed_turn_and_its_calls_are_not_run() -> None:
    given = Given("1", "2")
    played = Played(kind_of(given.tool), call("give"), call("give"), max_turns=2)
    assert (played.episode.stop_reason, len(given.calls), len(played.sent)) == ("max_turns", 1, 2)
    given = Given("1", "2")
    played = Played(kind_of(given.tool), call("give"), call("give"), max_tool_calling_iterations=1)
    assert (played.episode.stop_reason, len(given.calls), len(played.sent)) == ("max_turns", 1, 2)
    # An answer without a call is no matter of these limits.
    assert Played(kind_of(add), "yes", max_turns=1).episode.stop_reason == "stop"
    assert Played(kind_of(add), "yes", max_tool_calling_iterations=0).episode.stop_reason == "stop"


def test_a_broken_call_in_the_last_turn_is_a_parse_error() -> None:
    played = Played(kind_of(add), call("subtract"), max_turns=1)
    assert (played.episode.stop_reason, played.episode.num_calls) == ("parse_error", 0)


def test_all_tokens_behind_the_prompt_count_for_the_limit() -> None:
    first = call("add", a=2, b=3)
    free = Played(kind_of(add), first, "five")
    used = len(free.sent[1][0]) - len(free.sent[0][0])
    played = Played(kind_of(add), first, "five", max_tokens=used + 2)
    assert played.sent[0][1] == used + 2
    assert played.sent[1][1] == 2
    assert played.episode.stop_reason == "max_tokens"
    assert played.rollout.finish_reason == "length"
    assert played.rollout.turns[1].completion.token_ids == free.rollout.turns[1].completion.token_ids[:2]
    # No room for another turn at all.
    played = Played(kind_of(add), first, max_tokens=used)
    assert (played.episode.stop_reason, len(played.rollout.turns)) == ("max_tokens", 1)
    assert played.told == ["5"]
    assert played.rollout.finish_reason == "length"


def test_the_models_longest_context_ends_it_too() -> None:
    free = Played(kind_of(add), call("add", a=2, b=3), "five")
    length = len(free.sent[1][0])
    played = Played(kind_of(add), call("add", a=2, b=3), "five", context_limit=length + 3)
    assert played.sent[1][1] == 3
    assert played.episode.stop_reason == "context"
    assert played.rollout.finish_reason == "length"
    played = Played(kind_of(add), call("add", a=2, b=3), context_limit=length)
    assert (played.episode.stop_reason, len(played.rollout.turns)) == ("context", 1)


def test_a_prompt_without_room_is_an_error() -> None:
    length = len(Played(kind_of(add), "yes").sent[0][0])
    assert Played(kind_of(add), "yes", context_limit=length + 1).episode.stop_reason == "context"
    played = Played(kind_of(add), "yes", context_limit=length)
    assert isinstance(played.error, DataError)
    assert f"a prompt has {length} tokens, but a prompt and its completion may have at most {length}" in str(
        played.error
    )


def test_a_time_limit_keeps_the_turns_that_there_are() -> None:
    async def forever() -> None:
        await asyncio.sleep(1000)

    for answers in ([call("add", a=2, b=3), forever], [call("give")]):

        def attempt(seconds: float, answers: list[Any] = answers) -> Played | None:
            played = Played(kind_of(add, Given(forever).tool), *answers, episode_timeout=seconds)
            return played if played.error is None else None

        played = before_a_deadline(attempt)
        assert (played.episode.stop_reason, len(played.rollout.turns)) == ("timeout", 1)
        assert played.rollout.finish_reason == "length"
    played = Played(kind_of(add), forever, episode_timeout=0.1)
    assert isinstance(played.error, EnvironmentFailure)
    assert "no turn within episode_timeout=0.1 s" in str(played.error)


def test_a_timeout_of_the_sampler_is_not_one_of_the_episode() -> None:
    async def late() -> None:
        raise TimeoutError("server")

    played = Played(kind_of(add), call("add", a=2, b=3), late, episode_timeout=50)
    assert repr(played.error) == "TimeoutError('server')"


# What the model is told.


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("subtract", a=1), "There is no tool"),
        (call("add", a=1), "needs the argument 'b'"),
        (call("add", a="1", b=2), "must be an integer"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>', "cannot be read"),
        ("<tool_call>\nadd 1 and 2", "cannot be read"),
    ],
)
@pytest.mark.parametrize("jinja", [None, NEEDS_IDS], ids=["any", "needs ids"])
def test_a_malformed_call_is_told_to_the_model(said: str, told: str, jinja: str | None) -> None:
    template = hermes() if jinja is None else tool_template(jinja)
    played = Played(kind_of(add), said, "sorry", template=template)
    assert played.episode.stop_reason == "stop"
    assert (played.episode.num_calls, played.episode.num_failed_calls) == (1, 1)
    (answer,) = played.told
    assert told in json.loads(answer)["error"]
    assert answer in played.text(1)
    role = played.played.said[1]["role"]
    assert role == ("user" if jinja and "cannot be read" in told else "tool")
    assert rows(played) == [[*played.sent[1][0], *played.played.turns[1].completion.token_ids]]
    if "cannot be read" in told:
        assert played.played.said[0] == {"role": "assistant", "content": said}


def test_an_error_of_a_tool_is_told_or_raised() -> None:
    kind = kind_of(Given(ValueError("bad input.")).tool)
    played = Played(kind, call("give"), "oh")
    assert played.told == ['{"error": "ValueError: bad input"}']
    assert (played.episode.num_calls, played.episode.num_failed_calls) == (1, 1)
    played = Played(kind_of(Given(ValueError("bad")).tool), call("give", number=4), tool_error="raise")
    assert isinstance(played.error, EpisodeError)
    assert "tool 'give' with arguments {'number': 4}: ValueError: bad. Fix the tool, or set" in str(played.error)
    assert isinstance(played.error.__cause__, ValueError)
    # What the model did wrong is told in any case.
    assert Played(kind_of(add), call("add"), "oh", tool_error="raise").episode.num_failed_calls == 1


def test_a_hung_tool_is_told_and_the_next_call_works() -> None:
    gate = threading.Event()

    def attempt(seconds: float) -> Played | None:
        given = Given(gate.wait, "fine")
        played = Played(kind_of(given.tool), call("give"), call("give"), "ok", tool_timeout=seconds)
        assert played.told[0] == json.dumps({"error": f"No result within {seconds:g} seconds"})
        return played if played.told[1] == "fine" else None

    try:
        played = before_a_deadline(attempt)
    finally:
        gate.set()
    assert played.episode.stop_reason == "stop"


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("text", "text"),
        (None, "None"),
        ({"a": [1]}, "{'a': [1]}"),
        (1.5, "1.5"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        (Observation("seen"), "seen"),
        (Observation(5), "5"),  # type: ignore[arg-type]
        (Observation(), ""),
    ],
)
def test_results_are_shown_as_text(result: Any, told: str) -> None:
    played = Played(kind_of(Given(result).tool), call("give"), "ok")
    assert played.told == [result if isinstance(result, list) else told]  # rewards see lists as they are
    assert reply(told) in played.text(1)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([{"type": "image", "image": "x"}], "tool give returned a part of type 'image': only text"),
        (Observation([{"type": "image", "image": "x"}]), "tool give returned a part of type 'image'"),  # type: ignore[arg-type]
        (Observation("x", reward=None), "tool give returned the reward None: must be a number"),  # type: ignore[arg-type]
        (Observation("x", reward=float("nan")), "tool give returned the reward nan: must be finite"),
    ],
)
def test_what_cannot_be_shown_or_counted_ends_the_run(result: Any, message: str) -> None:
    played = Played(kind_of(Given(result).tool), call("give"))
    assert isinstance(played.error, EpisodeError)
    assert message in str(played.error)


def test_half_of_a_surrogate_pair_is_shown_as_a_question_mark() -> None:
    def echo(text: str) -> str:
        """Echo.

        Args:
            text: Any.
        """
        return f"a{text}b"

    played = Played(kind_of(echo), call("echo", text="\ud83d"), "done")
    assert played.error is None
    assert "a?b" in played.template.tokenizer.decode(played.sent[1][0])


def test_a_megabyte_is_cut_off_and_uses_up_the_tokens() -> None:
    given = Given("x" * 10**6)
    played = Played(kind_of(given.tool), call("give"), max_tokens=200, max_characters=201)
    assert played.episode.stop_reason == "max_tokens"
    assert played.told == ["x" * 201]
    assert len(played.rollout.turns) == 1


def test_an_observation_of_a_tool_has_a_reward_and_may_be_the_last() -> None:
    given = Given(Observation("a", reward=0.5), Observation("b", reward=0.25), Observation("c", 1.0, done=True), "no")
    twice = call("give") + "\n" + call("give")
    played = Played(kind_of(given.tool), twice, twice)
    assert played.episode.stop_reason == "tool_done"
    assert played.episode.turn_rewards == [0.75, 1.0]
    assert played.told == ["a", "b", "c"]
    assert (len(given.calls), played.episode.num_calls) == (3, 3)
    assert played.rollout.finish_reason == "stop"


# The environment.


def test_reset_gets_the_row() -> None:
    def reset(row: dict[str, Any]) -> None:
        row["prompt"].clear()  # must not change the row of others

    played = world("x", does={"reset": reset}, columns={"goal": 3})
    assert World.seen[0][1] == {"prompt": [], "goal": 3}
    assert played.row["prompt"] == [ASK]
    assert played.played.prompt == [ASK]
    assert played.sent[0][0] == hermes().tokenizer(hermes().render([ASK], add_generation_prompt=True)).input_ids


def test_an_empty_prompt_is_filled_by_reset_and_not_shown_to_it() -> None:
    played = world("x", does={"reset": "go"}, columns={"prompt": EMPTY_PROMPT, "goal": 3})
    assert World.seen[0][1] == {"goal": 3}
    assert played.played.prompt == [{"role": "user", "content": "go"}]


def test_the_seed_is_set_before_reset() -> None:
    class Seeded(World):
        def reset(self, **row: Any) -> str:
            return f" {self.seed}"

    assert world("x", kind=Seeded).played.prompt == [{"role": "user", "content": "hi 7"}]


@pytest.mark.parametrize(
    ("opening", "prompt"),
    [
        (None, [ASK]),
        (" there", [{"role": "user", "content": "hi there"}]),
        ([{"type": "text", "text": " a"}, {"type": "text", "text": "b"}], [{"role": "user", "content": "hi ab"}]),
        ([], [ASK]),
        ([{"role": "user", "content": "go"}], [ASK, {"role": "user", "content": "go"}]),
    ],
)
def test_what_reset_returns_is_added_to_the_prompt(opening: Any, prompt: list[dict[str, Any]]) -> None:
    played = world("x", does={"reset": opening})
    assert played.played.prompt == prompt
    assert played.text(0) == hermes().render(prompt, add_generation_prompt=True)


@pytest.mark.parametrize(
    "opening",
    [5, ["a"], [{"content": "no role"}], [{"role": "user", "content": "x"}, 1], [{"role": "user"}, {"type": "text"}]],
    ids=str,
)
def test_what_reset_may_not_return(opening: Any) -> None:
    played = world(does={"reset": opening})
    assert isinstance(played.error, EpisodeError)
    assert "World.reset returned" in str(played.error)
    assert "must be None, a text, or a list of messages" in str(played.error)
    picture = world(does={"reset": [{"type": "image", "image": "x"}]}).error
    assert "World.reset returned a part of type 'image': only text" in str(picture)


def test_text_is_added_to_a_prompt_of_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    jinja = hermes().tokenizer.chat_template.replace(
        "m.content", "(m.content if m.content is string else m.content[0].text + m.content[1].text)"
    )
    template = tool_template(jinja)
    columns = {"prompt": parts, "prompt_ids": [1]}
    played = world("x", does={"reset": "b"}, template=template, columns=columns)
    assert played.played.prompt == [{"role": "user", "content": [*parts[0]["content"], {"type": "text", "text": "b"}]}]
    assert "user\nab" in played.text(0)


def test_the_prompts_limit_holds_with_what_reset_adds() -> None:
    whole = world("x", does={"reset": " and more"}).sent[0][0]
    for truncation, expected in (("left", whole[-9:]), ("right", whole[:9])):
        played = world("x", does={"reset": " and more"}, max_prompt_length=9, truncation=truncation)
        assert played.sent[0][0] == expected
    played = world(does={"reset": " and more"}, max_prompt_length=9, truncation="error")
    assert isinstance(played.error, DataError)
    assert f"the prompt with what World.reset returned has {len(whole)} tokens, more than the 9" in str(played.error)


def test_the_environment_answers_until_it_is_done() -> None:
    answers = deque(["again", Observation("warm", reward=0.5), Observation("won", reward=1.0, done=True)])
    played = world("a", "b", "c", does={"respond": answers, "get_reward": 2})
    assert played.episode.stop_reason == "tool_done"
    assert played.episode.turn_rewards == [0.0, 0.5, 1.0]
    assert played.episode.reward == 3.5
    assert played.told == ["again", "warm", "won"]
    assert [given["content"] for name, given in World.seen if name == "respond"] == ["a", "b", "c"]
    assert played.text(1).endswith(f"a{END}\n<|im_start|>user\nagain{END}\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("answer", "told", "reason"),
    [
        (None, [], "stop"),
        (Observation(), [], "stop"),
        (Observation(done=True), [], "tool_done"),
        ([{"type": "text", "text": "x"}], [[{"type": "text", "text": "x"}]], "max_turns"),
        ("bye", ["bye"], "max_turns"),
    ],
)
def test_how_an_answer_ends_it(answer: Any, told: list[str], reason: str) -> None:
    played = world("a", does={"respond": answer}, max_turns=1)
    assert (played.told, played.episode.stop_reason) == (told, reason)


@pytest.mark.parametrize("answer", [False, 5, {"content": "x"}], ids=str)
def test_what_respond_may_not_return(answer: Any) -> None:
    played = world("a", does={"respond": answer})
    assert isinstance(played.error, EpisodeError)
    assert "World.respond returned" in str(played.error)
    assert "must be a text, an Observation or None" in str(played.error)


async def later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


@pytest.mark.parametrize(
    ("reward", "total", "parts"),
    [
        (2, 2.0, {}),
        (True, 1.0, {}),
        (None, None, {}),
        ({"won": 1, "fast": 0.5}, 1.5, {"won": 1.0, "fast": 0.5}),
        (lambda _: later(0.25), 0.25, {}),
    ],
)
def test_rewards_of_an_environment(reward: Any, total: float | None, parts: dict[str, float]) -> None:
    played = world("a", does={"get_reward": reward})
    assert (played.episode.reward, played.episode.rewards) == (total, parts)


def test_the_rewards_of_observations_are_added() -> None:
    for reward, total in (({"won": 1}, 1.5), (None, 0.5)):
        answers = deque([Observation("x", reward=0.5), None])
        assert world("a", "b", does={"respond": answers, "get_reward": reward}).episode.reward == total


def test_an_episode_without_rewards_of_its_observations_counts_as_nothing_won() -> None:
    class Game(Environment):
        def respond(self, message: Any) -> Observation | None:
            return Observation(reward=1.0, done=True) if message["content"] == "win" else None

    assert [world(said, kind=Game).episode.reward for said in ("win", "lose")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "World.get_reward returned the reward nan: must be finite"),
        ("much", "World.get_reward returned the reward 'much': must be a number"),
        ({"won": None}, "World.get_reward returned the reward None: must be a number"),
    ],
)
def test_what_get_reward_may_not_return(reward: Any, message: str) -> None:
    played = world("a", does={"get_reward": reward})
    assert isinstance(played.error, EpisodeError)
    assert message in str(played.error)


@pytest.mark.parametrize("method", ["reset", "respond", "get_reward", "edit"])
def test_a_failure_of_the_environment_is_no_result(method: str) -> None:
    def play(failure: Any, seconds: float = PATIENCE) -> Played:
        does = {"respond": deque(["go on", None]), "edit": lambda messages: messages, method: failure}
        return world("a", "b", kind=Editing, does=does, tool_timeout=seconds)

    played = play(OSError("gone"))
    assert isinstance(played.error, EnvironmentFailure)
    assert str(played.error) == f"Editing.{method}: OSError: gone"
    gate = threading.Event()
    try:
        for hangs in (lambda _: asyncio.sleep(1000), lambda _: gate.wait()):

            def attempt(seconds: float, hangs: Any = hangs) -> bool | None:
                said = str(play(hangs, seconds).error)
                return said == f"Editing.{method}: no result within tool_timeout={seconds:g} s" or None

            assert before_a_deadline(attempt)
    finally:
        gate.set()


def test_a_tool_of_the_environment_that_fails_is_the_models_matter() -> None:
    played = world(call("act", number=3), "ok", does={"act": OSError("gone")})
    assert played.told == ['{"error": "OSError: gone"}']
    assert World.seen[1] == ("act", 3)


def test_edited_history_is_a_row_of_its_own_and_keeps_what_was_sampled() -> None:
    def drop_first_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [messages[0], *messages[-2:]]
        messages[0]["content"] = "changed"  # in place, which must not reach what rewards see
        return kept

    as_it_is = lambda messages: later(messages)  # noqa: E731
    does = {
        "respond": deque(["more", "more", "more", None]),
        "edit": deque([as_it_is, drop_first_answer, as_it_is]),
    }
    played = world("one", "two", "three", "four", kind=Editing, does=does)
    assert played.error is None
    assert played.text(1) == f"{played.text(0)}one{END}\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"
    assert played.text(2) == played.text(1).replace("one", "two").replace("user\nhi", "user\nchanged")
    assert played.text(3) == f"{played.text(2)}three{END}\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"
    assert [len(given) for name, given in World.seen if name == "edit"] == [3, 5, 5]  # what was dropped stays so
    assert played.played.prompt == [ASK]
    assert [message["content"] for message in played.played.said[::2]] == ["one", "two", "three", "four"]
    ends = [played.sent[i][0] + played.rollout.turns[i].completion.token_ids for i in range(4)]
    assert rows(played) == [ends[1], ends[3]]


@pytest.mark.parametrize("edited", [None, "x", [1], [{"content": "x"}]], ids=str)
def test_what_edit_may_not_return(edited: Any) -> None:
    played = world("a", kind=Editing, does={"respond": "more", "edit": edited})
    assert isinstance(played.error, EpisodeError)
    assert "Editing.edit returned" in str(played.error)
    assert "must be the list of messages that the next turn sees" in str(played.error)


# Exact ids.


def split_tokenizer() -> ChatTemplate:
    """Text is encoded as "hello" and "add", but the policy samples "he" + "llo", and letters."""
    tokenizer = templates.chat_tokenizer(hermes().tokenizer.chat_template)
    tokenizer.add_tokens(["he", "llo", "hello", "add"])
    return ChatTemplate(tokenizer, special_tokens(tokenizer))


@pytest.mark.parametrize("reasoning", ["template", "keep"])
def test_ids_that_were_sampled_are_never_encoded_again(reasoning: str) -> None:
    template = split_tokenizer()
    ids = template.tokenizer.convert_tokens_to_ids

    def odd(text: str) -> Any:
        async def answer() -> Completion:
            before, _, after = text.partition("hello")
            tokens = [*before, "he", "llo", *after, END]
            return Completion(ids(tokens), "stop", [-1.0] * len(tokens), [True] * len(tokens), [0] * len(tokens))

        return answer

    asked = 'hello <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    played = Played(kind_of(add), odd(asked), odd("hello 3"), template=template, reasoning_in_history=reasoning)
    assert played.error is None
    assert template.tokenizer("hello", add_special_tokens=False)["input_ids"] == [ids("hello")]
    recorded = [played.sent[i][0] + played.rollout.turns[i].completion.token_ids for i in range(2)]
    assert played.sent[1][0][: len(recorded[0])] == recorded[0]
    assert rows(played) == [recorded[1]]
    assert ids("hello") not in recorded[1][len(played.sent[0][0]) :]


class Talk(Environment):
    def reset(self, **row: Any) -> None:
        self.num_left = 2

    def respond(self, message: Any) -> str | None:
        self.num_left -= 1
        return "more" if self.num_left else None


def test_thinking_stays_or_goes_as_the_option_says() -> None:
    thinking = tool_template(templates.THINKING)
    said = "<think>well</think>yes"
    sent = {
        option: Played(kind_of(factory=Talk), said, "no", template=thinking, reasoning_in_history=option)
        for option in ("template", "keep")
    }
    assert "well" not in sent["template"].text(1)
    assert len(rows(sent["template"])) == 2
    assert "<think>well</think>yes" in sent["keep"].text(1)
    assert len(rows(sent["keep"])) == 1
    for played in sent.values():
        recorded = [played.sent[i][0] + played.rollout.turns[i].completion.token_ids for i in range(2)]
        assert rows(played) == recorded[-len(rows(played)) :]
    kept = tool_template(templates.KEEPS_THINKING)
    assert "well" in Played(kind_of(factory=Talk), said, "no", template=kept).text(1)


def test_a_completion_that_was_cut_off_ends_the_episode() -> None:
    async def cut() -> Completion:
        return completion(hermes(), call("add", a=2, b=3), 20)

    played = Played(kind_of(add), cut, "never")
    assert (played.episode.stop_reason, len(played.rollout.turns)) == ("max_tokens", 1)
    assert played.episode.num_calls == 0
