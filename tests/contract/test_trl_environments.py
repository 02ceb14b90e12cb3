"""Environments and tools in the shapes that TRL 1.16 documents train as they are: only the import changes.

Where TRL's example talks to a service, a local object stands in for the client. What the model says is scripted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl import GRPOConfig, GRPOTrainer
from prefrl.errors import EpisodeError
from prefrl.generation.base import OnDemand, SamplingParams
from prefrl.generation.local.turns import LocalTurns, TurnRequest
from prefrl.rollout.journal import read_entry
from prefrl.types import Completion, Rollout
from tests.assets import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_GENERATIONS = 4


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Scripted:
    """A generator whose model says what `says` returns for the conversation so far, and for the seed."""

    context_limit = None

    def __init__(self, says: Callable[[str, int], str]) -> None:
        self.says = says
        self.tokenizer = tiny_tokenizer(chat_template=TEMPLATE)

    def turns(self, sampling: SamplingParams) -> LocalTurns:
        return LocalTurns(lambda wave: [self._answer(request) for request in wave])

    def _answer(self, request: TurnRequest) -> Completion:
        text = self.says(self.tokenizer.decode(request.prompt), request.seed)
        ids = self.tokenizer(text + "<|end|>", add_special_tokens=False)["input_ids"][: request.max_tokens]
        count = len(ids)
        is_whole = ids[-1] == self.tokenizer.eos_token_id
        return Completion(ids, "stop" if is_whole else "length", [-1.0] * count, [True] * count, [0] * count)

    def start(self, prompts: Any, sampling: SamplingParams, *, seeds: Sequence[int]) -> OnDemand:
        raise NotImplementedError

    def sync(self, weights: object, *, version: int) -> None: ...
    def invalidate(self) -> None: ...
    def close(self) -> None: ...


def lines(*said: str) -> Callable[[str, int], str]:
    """Says these, one for each turn; afterwards always the last."""
    return lambda text, seed: said[min(text.count("<|assistant|>") - 1, len(said) - 1)]


def train(
    folder: Path,
    says: Callable[[str, int], str],
    *,
    reward_funcs: Any = None,
    dataset: Any = "default",
    num_prompts: int = 2,
    **arguments: Any,
) -> tuple[list[Rollout], dict[str, float]]:
    """Train one step of GRPO; returns the rollouts as the table of completions has them, and the metrics."""
    if dataset == "default":
        dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}]}] * num_prompts)
    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=num_prompts * NUM_GENERATIONS,
        num_generations=NUM_GENERATIONS,
        max_completion_length=400,
        learning_rate=1e-3,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    trainer = GRPOTrainer(tiny_model(), reward_funcs, args, dataset, processing_class=tokenizer, **arguments)
    trainer.generator = Scripted(says)
    trainer.train()
    (path,) = Path(folder, "completions").glob("*.parquet")
    return read_entry(path).parts[0].rollouts, trainer.state.log_history[0]


def env_rewards(environments: Sequence[Any], **kwargs: Any) -> list[float]:
    return [environment.reward for environment in environments]


def test_a_class_with_a_client_and_one_tool(tmp_path: Path) -> None:
    class Client:
        def step(self, message: str) -> tuple[str, float]:
            return message, len(message) / 10

    class Echo:
        def __init__(self):
            self.client = Client()
            self.reward = 0.0

        def reset(self, **kwargs) -> str | None:
            assert kwargs["prompt"] == [{"role": "user", "content": "Go."}]
            self.reward = 0.0
            return None

        def echo(self, message: str) -> str:
            """
            Say it again.

            Args:
                message: What to say.

            Returns:
                The same.
            """
            said, self.reward = self.client.step(message)
            return said

    rollouts, metrics = train(
        tmp_path, lines(call("echo", message="hello"), "done"), reward_funcs=env_rewards, environment_factory=Echo
    )
    assert {rollout.text for rollout in rollouts} == {
        'assistant: echo({"message": "hello"})\ntool: hello\nassistant: done'
    }
    assert [rollout.reward for rollout in rollouts] == [0.5] * 8
    assert metrics["tools/call_frequency"] == 1
    assert metrics["tools/failure_frequency"] == 0


def test_a_game_whose_reset_tells_the_rules_and_whose_tool_raises_at_its_end(tmp_path: Path) -> None:
    class Word:
        def __init__(self):
            self.guesses: list[str] = []

        def reset(self, **kwargs) -> str | None:
            self.guesses, self.reward, self.done = [], 0.0, False
            return " Guess a word."

        def guess(self, guess: str) -> str:
            """Guess.

            Args:
                guess: A word in brackets.
            """
            if self.done:
                raise ValueError("Game over.")
            self.guesses.append(guess)
            self.done = guess == "[abc]"
            self.reward = float(self.done)
            return f"{len(self.guesses)}: {'GGG' if self.done else 'XXX'}"

    guesses = [call("guess", guess="[xyz]"), call("guess", guess="[abc]"), call("guess", guess="[abc]"), "bye"]
    rollouts, metrics = train(tmp_path, lines(*guesses), reward_funcs=env_rewards, environment_factory=Word)
    assert rollouts[0].prompt == "user: Go. Guess a word."
    answers = [line for line in rollouts[0].text.splitlines() if line.startswith("tool")]
    assert answers == ["tool: 1: XXX", "tool: 2: GGG", 'tool: {"error": "ValueError: Game over"}']
    assert metrics["reward"] == 1
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 3)


class Several:
    """One class for two games, chosen by a column of the dataset."""

    def __init__(self):
        self.active = None
        self.reward = 0.0
        self._client = None

    def reset(self, **kwargs) -> str | None:
        self.active, self.reward = kwargs.get("env", "word"), 0.0
        if self.active not in ("word", "catch"):
            raise ValueError(f"Unknown environment: {self.active}")
        self._client = iter(range(1, 10))  # made in reset, not before
        return f" {self.active}"

    def guess(self, guess: str) -> str:
        """Guess a word.

        Args:
            guess: The word.
        """
        if self.active != "word":
            raise ValueError("guess is only for words")
        self.reward = 1.0
        return "right"

    def _action(self, number: int) -> str:
        self.reward += number
        return f"step {next(self._client)}"

    def move(self, direction: str) -> str:
        """Move.

        Args:
            direction: "left" or "right".
        """
        if self.active != "catch":
            raise ValueError("move is only for catch")
        return self._action({"left": 0, "right": 2}[direction])

    def stay(self) -> str:
        """Do nothing."""
        return self._action(1)


def test_one_class_for_several_games_with_rewards_that_are_none_for_the_other(tmp_path: Path) -> None:
    def word_reward(environments, **kwargs) -> list[float | None]:
        return [environment.reward if environment.active == "word" else None for environment in environments]

    def catch_reward(environments, **kwargs) -> list[float | None]:
        return [environment.reward if environment.active == "catch" else None for environment in environments]

    def says(text: str, seed: int) -> str:
        turn = text.count("<|assistant|>")
        if "Go. word" in text:
            return ["", call("move", direction="left"), call("guess", guess="abc"), "done"][turn]
        return ["", call("stay"), call("move", direction="right"), "done"][turn]

    prompt = [{"role": "user", "content": "Go."}]
    dataset = Dataset.from_dict({"prompt": [prompt, prompt], "env": ["word", "catch"]})
    rollouts, metrics = train(
        tmp_path,
        says,
        reward_funcs=[word_reward, catch_reward],
        dataset=dataset,
        environment_factory=Several,
    )
    rewards = {rollout.prompt: rollout.rewards for rollout in rollouts}
    assert rewards == {
        "user: Go. word": {"word_reward": 1.0, "catch_reward": None},
        "user: Go. catch": {"word_reward": None, "catch_reward": 3.0},
    }
    assert metrics["tools/failure_frequency"] == 0.25


def test_as_many_instances_as_episodes_and_a_loop_of_each_instance(tmp_path: Path) -> None:
    """The constructor takes one of as many addresses as there are episodes, and drives an async client itself."""

    class Client:
        async def step(self, action: str) -> str:
            await asyncio.sleep(0)
            return f"did {action}"

    class Drive:
        addresses = None

        def __init__(self):
            self.address = next(Drive.addresses)
            self.client = Client()
            self._loop = asyncio.new_event_loop()

        def _run(self, coroutine):
            asyncio.set_event_loop(self._loop)
            return self._loop.run_until_complete(coroutine)

        @staticmethod
        def _describe(text: str) -> str:
            return f"Now: {text}."

        def reset(self, **kwargs) -> str | None:
            self.reward = 0.0
            return self._describe(self._run(self.client.step("reset")))

        def stop(self) -> str:
            """Brake."""
            self.reward = 1.0
            return self._describe(self._run(self.client.step("stop")))

    addresses = [f"https://{i}" for i in range(NUM_GENERATIONS)]
    Drive.addresses = iter(addresses)
    seen = []

    def reward(environments, **kwargs):
        seen.extend(environment.address for environment in environments)
        return [environment.reward for environment in environments]

    says = lines(call("stop"), "done")
    rollouts, metrics = train(tmp_path, says, reward_funcs=reward, num_prompts=1, environment_factory=Drive)
    assert sorted(seen) == addresses
    assert metrics["reward"] == 1
    assert rollouts[0].prompt == "user: Go.Now: did reset."
    assert "tool: Now: did stop." in rollouts[0].text


def test_content_blocks_as_results(tmp_path: Path) -> None:
    class Camera:
        def reset(self, **kwargs) -> list:
            return [{"type": "text", "text": " Look."}]

        def observe(self) -> list:
            """Look."""
            return [{"type": "text", "text": "A road"}, {"type": "text", "text": " and a tree."}]

    seen: list[Any] = []

    def reward(prompts, completions, **kwargs) -> list[float]:
        seen.append((prompts[0], completions[0][1]))
        return [0.0] * len(completions)

    blocks = [{"type": "text", "text": "Go."}]
    for content in ("Go.", blocks):
        dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}] * 2)
        says = lines(call("observe"), "done")
        train(tmp_path / str(len(seen)), says, reward_funcs=reward, dataset=dataset, environment_factory=Camera)
    ((prompt, observation), (prompt_of_blocks, _)) = seen
    assert prompt == [{"role": "user", "content": "Go. Look."}]
    assert prompt_of_blocks == [{"role": "user", "content": [*blocks, {"type": "text", "text": " Look."}]}]
    assert observation["content"] == [{"type": "text", "text": "A road"}, {"type": "text", "text": " and a tree."}]


def test_images_are_refused(tmp_path: Path) -> None:
    class Camera:
        def reset(self, **kwargs) -> None: ...

        def observe(self) -> list:
            """Look."""
            return [{"type": "image", "image": object()}, {"type": "text", "text": "A road"}]

    with pytest.raises(EpisodeError, match=r"tool observe returned a part of type 'image'"):
        train(tmp_path, lines(call("observe")), reward_funcs=lambda prompts: [0.0] * 8, environment_factory=Camera)


def test_functions_sync_and_async_as_tools(tmp_path: Path) -> None:
    def multiply(a: int, b: int) -> int:
        """Multiplies two integers.

        Args:
            a: The first.
            b: The second.
        """
        return a * b

    async def async_add(a: int, b: int) -> int:
        """Adds two integers.

        Args:
            a: The first.
            b: The second.
        """
        await asyncio.sleep(0)
        return a + b

    def reward(completions, **kwargs) -> list[float]:
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "tool", "assistant"]
        first = completions[0][0]["tool_calls"][0]
        assert first["type"] == "function"
        assert first["function"] == {"name": "async_add", "arguments": {"a": 2, "b": 3}}
        assert [message["name"] for message in completions[0][1:3]] == ["async_add", "multiply"]
        return [float(completion[1]["content"] == "5") for completion in completions]

    says = lines(call("async_add", a=2, b=3) + call("multiply", a=2, b=3), "done")
    rollouts, metrics = train(tmp_path, says, reward_funcs=reward, tools=[multiply, async_add])
    assert metrics["reward"] == 1
    assert metrics["tools/call_frequency"] == 2
    assert "tool: 6" in rollouts[0].text


def test_a_tool_that_sets_an_alarm_and_returns_rows(tmp_path: Path) -> None:
    """A database tool that limits its time by a signal; the rewards see its rows as a list."""
    database = tmp_path / "facts.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE facts (name TEXT, size INT)")
        connection.execute("INSERT INTO facts VALUES ('ant', 1), ('cat', 30)")

    def query(sql_command: str) -> list[tuple]:
        """Ask the database.

        Args:
            sql_command: A query.
        """
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            return sqlite3.connect(f"file:{database}?mode=ro", uri=True).execute(sql_command).fetchall()
        finally:
            signal.alarm(0)

    def evidence(completions, **kwargs) -> list[float]:
        rewards = []
        for completion in completions:
            results = [message["content"] for message in completion if message["role"] == "tool"]
            rewards.append(float(sum(len(result) for result in results if isinstance(result, list))))
        return rewards

    says = lines(call("query", sql_command="SELECT * FROM facts"), call("query", sql_command="nonsense"), "*yes*")
    rollouts, metrics = train(tmp_path / "run", says, reward_funcs=evidence, tools=[query])
    assert "tool: [('ant', 1), ('cat', 30)]\n" in rollouts[0].text
    assert 'tool: {"error": "' in rollouts[0].text
    assert metrics["tools/failure_frequency"] == 0.5
    assert metrics["reward"] == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_an_environment_that_brings_prompt_and_reward(tmp_path: Path, is_async: bool) -> None:
    """Neither a dataset nor reward functions."""

    class Counting:
        numbers = itertools.count()

        def reset(self, **kwargs) -> str:
            self.number = next(Counting.numbers)
            return f"Number {self.number}"

        def read(self) -> int:
            """Read the number."""
            return self.number

        if is_async:

            async def get_reward(self) -> float:
                await asyncio.sleep(0)
                return float(self.number)

        else:

            def get_reward(self) -> float:
                return float(self.number)

    rollouts, metrics = train(
        tmp_path, lines(call("read"), "done"), dataset=None, num_prompts=1, environment_factory=Counting
    )
    assert sorted(rollout.prompt for rollout in rollouts) == [f"user: Number {i}" for i in range(NUM_GENERATIONS)]
    assert all(rollout.prompt == f"user: Number {rollout.reward:.0f}" for rollout in rollouts)
    assert metrics["rewards/Counting/mean"] == 1.5


def test_environments_by_name_with_their_own_tools_and_rewards(tmp_path: Path) -> None:
    """The dataset only says which environment an episode is in, and what its `reset` needs."""

    class Coding:
        def reset(self, task: int) -> str:  # no other columns
            self.task, self.ran = task, False
            return f"Task {task}."

        def run(self, code: str) -> str:
            """Run code.

            Args:
                code: The program.
            """
            self.ran = True
            return "ok"

        def get_reward(self) -> float:
            return float(self.ran)

    class Game:
        def reset(self, task: int) -> str:
            self.won = False
            return f"Game {task}."

        def play(self) -> str:
            """Play."""
            self.won = True
            return "won"

    def won(environments, environment, **kwargs) -> list[float | None]:
        assert [type(one).__name__.lower() for one in environments] == environment
        return [float(one.won) if isinstance(one, Game) else None for one in environments]

    def says(text: str, seed: int) -> str:
        tools, _, said = text.partition("<|user|>")
        assert tools == ("[run]" if "Task" in said else "[play]")
        return "done" if "<|tool|>" in text else call("run", code="1") if tools == "[run]" else call("play")

    dataset = Dataset.from_list([{"environment": "coding", "task": 1}, {"environment": "game", "task": 2}])
    rollouts, metrics = train(
        tmp_path,
        says,
        reward_funcs=won,
        dataset=dataset,
        eval_dataset={"same": dataset},
        environment_factory={"coding": Coding, "game": Game},
    )
    assert {rollout.prompt: rollout.rewards for rollout in rollouts} == {
        "user: Task 1.": {"won": None, "Coding": 1.0},
        "user: Game 2.": {"won": 1.0, "Coding": None},
    }
    assert metrics["reward"] == 1


class Sandbox:
    """A sandbox with a loop of its own in a thread, and a reward that is computed when it is read first."""

    SUFFIX = ""

    def __init__(self, kind: str = "local"):
        self._kind = kind
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._files: dict[str, str] | None = None
        self._reward: float | None = None
        self.num_checks = 0

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def reset(self, task_dir: str | None = None, **kwargs) -> str:
        if task_dir is None:
            raise ValueError("needs task_dir")
        self._run(self._start())
        self._reward = None
        return f"Solve {task_dir}." + self.SUFFIX

    async def _start(self) -> None:
        self._files = {}

    async def _check(self) -> float:
        self.num_checks += 1
        return float(self._files == {"answer": "42"})

    @property
    def reward(self) -> float:
        if self._files is None:
            return 0.0
        if self._reward is None:
            self._reward = self._run(self._check())
        return self._reward

    def __del__(self):
        self._loop.call_soon_threadsafe(self._loop.stop)


class Bash(Sandbox):
    SUFFIX = " Use bash."

    def bash(self, command: str) -> str:
        """Run a command.

        Args:
            command: A command.
        """
        self._files["answer"] = command.rpartition(" ")[2]
        return "(empty output)"


def test_a_sandbox_in_a_subclass_made_by_a_function(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 2, "task_dir": ["a", "b"]})
    rollouts, metrics = train(
        tmp_path,
        lambda text, seed: "done" if "<|tool|>" in text else call("bash", command=f"write {40 + seed % 4}"),
        reward_funcs=env_rewards,
        dataset=dataset,
        environment_factory=lambda: Bash("remote"),
    )
    assert {rollout.prompt for rollout in rollouts} == {"user: Solve a. Use bash.", "user: Solve b. Use bash."}
    assert [rollout.reward for rollout in rollouts] == [float("write 42" in rollout.text) for rollout in rollouts]
    assert metrics["tools/call_frequency"] == 1


def test_tools_that_are_put_on_the_class_when_an_instance_is_made(tmp_path: Path) -> None:
    """As by an adapter that learns from a server which tools there are."""

    class Adapter:
        def __init__(self) -> None:
            def submit(self, text: str, times: int = 1) -> str:
                return self._call("submit", {"text": text, "times": times})

            submit.__doc__ = "Submit a text.\n\n    Args:\n        text: The text.\n        times: How often."
            submit.__annotations__ = {"text": str, "times": int, "return": str}
            if "submit" not in vars(Adapter):
                Adapter.submit = submit
            self.rewards: list[float | None] = []

        def reset(self, *, task_index: int = 0, task_spec: dict | None = None, **_: Any) -> str:
            self.rewards, self.task = [], task_index
            return f"Task {task_index}"

        def _call(self, name: str, arguments: dict) -> str:
            self.rewards.append(float(arguments["times"]))
            return f"{name}: {arguments}"

    def outcome(environments, **kwargs) -> list[float | None]:
        return [environment.rewards[-1] if environment.rewards else None for environment in environments]

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 2, "task_index": [3, 4]})
    rollouts, metrics = train(
        tmp_path,
        lines(call("submit", text="a"), call("submit", text="b", times=2), "done"),
        reward_funcs=outcome,
        dataset=dataset,
        environment_factory=lambda: Adapter(),
    )
    assert {rollout.prompt for rollout in rollouts} == {"user: Task 3", "user: Task 4"}
    assert metrics["reward"] == 2
