"""A model folder and datasets on disk, as a user of the command line has them."""

from __future__ import annotations

import contextlib
import json
import runpy
import shlex
import sys
from pathlib import Path

import datasets
import pytest

from prefrl.scripts.main import main
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer
from tests.plans import checked_once  # noqa: F401 - of all tests here

# The template of `tiny_tokenizer`, which also shows the names of tools, and calls.
TEMPLATE = (
    "{% for t in tools or [] %}<|system|>{{ t.function.name }}<|end|>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PAIRS = Path(__file__).parents[1] / "data" / "gsm8k_pairs_8.jsonl"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model("qwen2").save_pretrained(folder)
    tiny_tokenizer(chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def stopping_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model for code that samples with default lengths: every fifth token ends a completion."""
    folder = tmp_path_factory.mktemp("stopping-model")
    tiny_model("qwen2", eos_token_id=[1, *range(10, 128, 5)]).save_pretrained(folder)
    tiny_tokenizer(chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-reward-model")
    tiny_reward_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a dataset of each kind, a module with a reward, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    questions = [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "What is 20 + 3?", "answer": "23"},
        {"prompt": [{"role": "user", "content": "9-4"}], "answer": "5"},
    ]
    plain, conversational = questions[:2], [questions[2], questions[2]]
    write_jsonl(tmp_path / "prompts.jsonl", plain)
    write_jsonl(tmp_path / "chats.jsonl", conversational)
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "to be"}, {"text": "or not to be"}, {"text": "that"}])
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    sides = [{"prompt": row["prompt"], "completion": row[side]} for side in ("chosen", "rejected") for row in pairs]
    write_jsonl(tmp_path / "rated.jsonl", [{**row, "label": i < len(pairs)} for i, row in enumerate(sides)])
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **columns):\n    return [-float(len(text)) for text in completions]\n\n\nNUMBER = 3\n",
        encoding="utf-8",
    )
    return tmp_path


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_line(command: str) -> None:
    """A command of a page, in this process: starting one would cost the imports once more."""
    words = shlex.split(command, comments=True)
    with contextlib.ExitStack() as stack:
        if words[-2:-1] == [">"]:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(words[-1], "w"))))
            words = words[:-2]
        if words[0] == "python":
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            assert words[0] == "prefrl"
            assert main(words[1:]) == 0, command
