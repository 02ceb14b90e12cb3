"""Environments and tools from the command line: `prefrl play`, and training with them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prefrl.errors import printable
from prefrl.scripts.main import main
from tests.cli.conftest import write_jsonl
from tests.contract.cases import ONLINE

CODE = '''\
import httpx

from prefrl import Environment, Observation


class Guess(Environment):
    """Two guesses of a number."""

    def __init__(self, size=3):
        self.size = size

    def reset(self, **row):
        self.secret, self.num_left = 1 + self.seed % self.size, 2
        return "guess"

    def respond(self, message):
        self.num_left -= 1
        if not message["content"].isdigit():
            return Observation("a number?", reward=-0.5, done=self.num_left == 0)
        missing = self.secret - int(message["content"])
        if missing == 0:
            return Observation("right", reward=1.0, done=True)
        return Observation("higher" if missing > 0 else "lower", done=self.num_left == 0)


class Drawers:
    """A key in a drawer."""

    def reset(self, place: int, **row):
        self.place, self.found = place, False

    def open(self, number: int) -> str:
        """Open a drawer.

        Args:
            number: Which.
        """
        self.found = self.found or number == self.place
        return "the key" if number == self.place else "nothing"

    def get_reward(self):
        return {"found": float(self.found), "time": -0.25}


class Broken(Environment):
    def respond(self, message):
        return 1 / 0


def search(query: str) -> str:
    """Search.

    Args:
        query: What.
    """
    return query.upper()


def length(completions, environments, **columns):
    return [float(len(messages)) for messages in completions]


def _post(client, messages, **more):
    url, key = f"{client.base_url}/chat/completions", {"authorization": f"Bearer {client.api_key}"}
    answer = httpx.post(url, headers=key, json={"model": "policy", "messages": messages, **more}, timeout=None)
    return answer.json()["choices"][0]["message"]


def ask(row, client):
    return len(_post(client, [{"role": "user", "content": row["question"]}])["content"]) / 9


def solve(row, client):
    """Asks twice, the second time with a tool, and then for something else."""
    messages = [{"role": "system", "content": "Be [brief]."}, {"role": "user", "content": row["question"]}]
    messages += [_post(client, messages), {"role": "user", "content": "And now?"}]
    client.reward(-0.5)
    tool = {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}
    _post(client, messages, tools=[{"type": "function", "function": tool}])
    client.reward(0.25)
    _post(client, [messages[0], {"role": "assistant", "content": "earlier"}, {"role": "user", "content": "Sum up."}])
    client.reward(1)
    return {"solved": 2.0}
'''


@pytest.fixture
def env_file(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workspace / "my_env.py").write_text(CODE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "prefrl_code_of_my_env", raising=False)
    rows = [{"prompt": [{"role": "user", "content": f"Find {n}."}], "place": n} for n in (2, 4)]
    write_jsonl(workspace / "drawers.jsonl", rows)
    return workspace / "my_env.py"


def played(
    lines: list[str], *words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What `prefrl play` prints for lines that are typed, without the rule above each episode."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    capsys.readouterr()
    assert main(["play", *words]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines() if not line.startswith("episode ")]


@pytest.mark.usefixtures("env_file")
def test_a_game_by_hand_shows_turns_rewards_and_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = played(["what?", "1"], "my_env.py:Guess(size=1)", monkeypatch=monkeypatch, capsys=capsys)
    assert lines == [
        "user> guess",
        "assistant> what?",
        "user> a number?",
        "reward -0.5",
        "assistant> 1",
        "user> right",
        "reward +1",
        "ended after 2 turns: tool_done (a tool or the environment said that it is over)",
        "rewards of the turns: -0.5, 1",
        "reward 0.5",
    ]
    lines = played(["1"] * 2, "my_env.py:Guess(size=1)", "--num_episodes", "3", monkeypatch=monkeypatch, capsys=capsys)
    assert lines.count("reward 1") == 2
    assert lines[-2:] == ["", "ended by you"]  # the input has ended


@pytest.mark.usefixtures("env_file")
def test_calls_by_hand_are_run_and_what_is_wrong_with_them_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["open(3)", "opne(number=1)", "I try\\", "open(number=4)", "done"]
    words = ["my_env.py:Drawers", "--dataset_name", "drawers.jsonl", "--row", "1"]
    words += ["--tools", "my_env.py:search", "--reward_funcs", "my_env.py:length", "--reward_weights", "0.1"]
    lines = played(typed, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert lines == [
        "Drawers: the model can call search(query: string), open(number: integer)",
        "user> Find 4.",
        "assistant>",
        "calls open(number=3)",
        "tool open> nothing",
        "assistant>",
        "calls opne(number=1)",
        """tool opne> {"error": "There is no tool \\"opne\\". Did you mean 'open'?"}""",
        "assistant> I try",
        "calls open(number=4)",
        "tool open> the key",
        "assistant> done",
        "ended after 4 turns: stop (the model called no tool, and nothing replied)",
        "3 calls, of which 1 failed",
        "length: 7, weight 0.1",
        "Drawers: 0.75, weight 1",
        "get_reward: found 1",
        "get_reward: time -0.25",
        "reward 1.45",
    ]


AGENT = ["--agent", "my_env.py:solve", "--dataset_name", "questions.jsonl"]


@pytest.mark.usefixtures("env_file")
def test_an_agent_by_hand_shows_its_requests_and_rewards_as_they_come(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(workspace / "questions.jsonl", [{"question": "What?"}])
    lines = played(["nothing", 'look("up")', "done"], *AGENT, monkeypatch=monkeypatch, capsys=capsys)
    assert lines == [
        "system> Be [brief].",
        "user> What?",
        "assistant> nothing",
        "turn 1: reward -0.5",
        "solve: the model can call look(where: string = ...)",
        "user> And now?",
        "assistant>",
        'calls look(where="up")',
        "turn 2: reward +0.25",
        "solve: the model can call nothing",
        "another request, of which the first 1 messages were seen before",
        "assistant> earlier",
        "user> Sum up.",
        "assistant> done",
        "turn 3: reward +1",
        "ended after 3 turns: stop (the agent came to its end)",
        "1 calls, of which 0 failed",
        "rewards of the turns: -0.5, 0.25, 1",
        "returned: solved 2",
        "reward 2.75",
    ]


@pytest.mark.usefixtures("env_file")
def test_an_agent_with_a_model_shows_what_is_sampled(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(workspace / "questions.jsonl", [{"question": "What?"}])
    words = ["--model", str(model_folder), "--max_completion_length", "100", "--use_cpu"]
    lines = played([], *AGENT, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert [line for line in lines if line.startswith(("system>", "user>", "turn ", "another "))] == [
        "system> Be [brief].",
        "user> What?",
        "turn 1: reward -0.5",
        "user> And now?",
        "turn 2: reward +0.25",
        "another request, of which the first 1 messages were seen before",
        "user> Sum up.",
        "turn 3: reward +1",
    ]
    assert sum(line.endswith("tokens of context") for line in lines) == 3
    assert sum("tokens sampled" in line for line in lines) == 3


@pytest.mark.usefixtures("env_file")
def test_what_cannot_be_played_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    for words, message in (
        ([], "environment, agent, tools: not given"),
        (["my_env.py:Gues"], "my_env.py has no 'Gues'. Did you mean 'Guess'?"),
        (["--tools", "my_env.py:search"], "prompt: not given. With tools alone"),
        (["my_env.py:Guess", "--row", "3"], "row=3 has no effect because there is no dataset"),
        (
            ["my_env.py:Drawers", "--dataset_name", "drawers.jsonl", "--row", "2"],
            "row=2: the dataset has the rows 0 to 1",
        ),
        (["sft", "my_env.py:Guess"], "sft: has no episodes"),
        (["my_env.py:Guess", "--max_truns", "2"], "Did you mean '--max_turns'?"),
        (["my_env.py:Broken", "--prompt", "a"], "Broken.respond: ZeroDivisionError: division by zero ("),
    ):
        assert main(["play", *words]) == 2, words
        error = capsys.readouterr().err.strip()
        assert message in error.splitlines()[-1], words


def test_what_is_played_is_what_is_trained_on(
    env_file: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first completions of a training are those that are played, and parameters decide what is resumed."""
    values = {"model_name_or_path": str(model_folder), "environment": "my_env.py:Guess(size=2)", "max_turns": 2}
    values |= {"max_completion_length": 40, "num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1}
    values |= {"output_dir": "out", "use_cpu": True, "save_steps": 1, "report_to": "none", "seed": 3}
    (env_file.parent / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
    lines = played([], "run.yaml", "--num_episodes", "2", monkeypatch=monkeypatch, capsys=capsys)
    assert main(["grpo", "run.yaml"]) == 0
    (file,) = Path("out/completions").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [row["environment"] for row in rows] == ["Guess"] * len(rows)
    printed = "\n".join(lines)
    said = [row["turn_text"].partition("assistant: ")[2].partition("\n")[0].strip() for row in rows]
    assert all(printable(text) in printed for text in said)
    sampled = [int(line.split()[0]) for line in lines if "tokens sampled" in line]
    assert sampled == [len(row["completion_ids"]) for row in rows]
    capsys.readouterr()
    changed = ["--environment", "my_env.py:Guess(size=3)", "--max_steps", "2", "--resume_from_checkpoint", "true"]
    assert main(["grpo", "run.yaml", *changed]) == 2
    error = capsys.readouterr().err
    assert "episodes: Guess was" in error
    assert "{'size': 2}" in error
    assert "{'size': 3}" in error


@pytest.mark.parametrize("algorithm", [name for name in ONLINE if name != "grpo"])
@pytest.mark.usefixtures("env_file")
def test_every_online_algorithm_takes_environments_agents_and_tools(algorithm: str, model_folder: Path) -> None:
    """By the column of the dataset."""
    write_jsonl(Path("rows.jsonl"), [{"question": "?", "environment": name} for name in ("guess", "ask")])
    size = "2" if algorithm == "online_dpo" else "4"  # there, it counts prompts
    sizes = ["--max_completion_length", "12", "--num_generations", "2", "--per_device_train_batch_size", size]
    run = ["--use_cpu", "--max_steps", "1", "--output_dir", "out", "--save_strategy", "no", "--report_to", "none"]
    names = ["--environment", '{"guess": "my_env.py:Guess"}', "--agent", '{"ask": "my_env.py:ask"}']
    names += ["--tools", "my_env.py:search", "--dataset_name", "rows.jsonl"]
    names += ["--teacher_model_name_or_path", str(model_folder)] if algorithm == "distillation" else []
    assert main([algorithm, "--model_name_or_path", str(model_folder), *names, *sizes, *run]) == 0
    table = pq.read_table(next(Path("out/completions").glob("*.parquet")))
    assert {*table["environment"].to_pylist()} == {"Guess", "ask"}
