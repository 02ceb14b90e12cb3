"""What comes after a run: generate, chat, eval, look and merge, from files on disk."""

from __future__ import annotations

import importlib
import io
import json
import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl.errors import ConfigError, GenerationError
from prefrl.models import export
from prefrl.models.export import load_merged
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import Entry, write_entry
from prefrl.scripts import commands, eval, report, sampling
from prefrl.scripts.main import OTHERS, main
from prefrl.types import Completion, Rollout, Turn
from tests.assets import tiny_model, tiny_tokenizer
from tests.cli.conftest import write_jsonl
from tests.unit.rewards.endpoint import Endpoint

PAGE = Path(__file__).parents[2] / "docs" / "after_training.md"
TEXT = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
LINES = [line.split(maxsplit=1)[1] for line in TEXT.splitlines() if line.startswith("prefrl ")]
SHORT = ["--max_completion_length", "4"]


def test_prompts_are_made_of_columns_as_in_training(workspace: Path, model_folder: Path) -> None:
    data = ["--dataset_name", "prompts.jsonl", "--prompt_template", "{prompt}!", "--columns", '{"gold": "answer"}']
    argv = [str(model_folder), *data, "--system_prompt", "Add.", *SHORT]
    assert sampling.generate([*argv, "--output_file", "answered.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("answered.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [[turn["content"] for turn in row["prompt"]] for row in rows] == [
        ["Add.", "1+1=!"],
        ["Add.", "What is 20 + 3?!"],
    ]
    Path("gold.py").write_text("def known(completions, gold):\n    return [float(int(g)) for g in gold]\n")
    assert eval.main([*argv, "--reward_funcs", "gold.py:known", "--output_dir", "scores"]) == 0
    found = json.loads(Path("scores/metrics.json").read_text(encoding="utf-8"))["all"]
    assert found["reward"]["value"] == 12.5
    with pytest.raises(ConfigError, match=r"prompt_template='x\{y\}' has no effect because dataset_name is not set"):
        sampling.generate([str(model_folder), "hi", "--prompt_template", "x{y}"])


def test_prompts_of_a_file_get_responses_that_eval_can_score(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(model_folder), "--dataset_name", "prompts.jsonl", "--num_generations", "3", *SHORT]
    assert sampling.generate([*argv, "--output_file", "answered.parquet"]) == 0
    rows = pq.read_table("answered.parquet").to_pylist()
    assert [row["answer"] for row in rows] == ["2", "23"]
    assert [len(row["responses"]) for row in rows] == [3, 3]
    assert "prefrl eval --dataset_name answered.parquet" in capsys.readouterr().out
    scoring = ["--reward_funcs", "my_rewards:short", "--output_dir", "scores"]
    assert eval.main(["--dataset_name", "answered.parquet", *scoring]) == 0
    mean = sum(-len(text) for row in rows for text in row["responses"]) / 6
    of_file = json.loads(Path("scores/metrics.json").read_text(encoding="utf-8"))["all"]
    assert of_file["reward"]["value"] == pytest.approx(mean)
    assert eval.main([*argv, *scoring]) == 0  # the same seed samples the same responses
    assert json.loads(Path("scores/metrics.json").read_text(encoding="utf-8"))["all"] == of_file


def test_a_completion_ends_with_a_stop_string_here_and_on_a_server(workspace: Path, model_folder: Path) -> None:
    argv = [str(model_folder), "--dataset_name", "prompts.jsonl", *SHORT, "--output_file", "answered.jsonl"]
    texts = {}
    for stop in ([], ["--stop", "#", "</a>"]):
        assert sampling.generate([*argv, *stop]) == 0
        rows = map(json.loads, Path("answered.jsonl").read_text(encoding="utf-8").splitlines())
        texts[bool(stop)] = [row["responses"][0] for row in rows]
    cut = [text[: text.index("#") + 1] if "#" in text else text for text in texts[False]]
    assert texts[True] == cut != texts[False]
    server: Any = SimpleNamespace(_options=SimpleNamespace(stop=["</a>", "#"]), url="http://h/v1")
    sample_of = partial(sampling.Server._sample_of, server)
    ended = sample_of({"text": "<a>4", "finish_reason": "stop", "stop_reason": "</a>"})
    assert (ended.text, ended.finish_reason) == ("<a>4</a>", "stop_string")
    at_end = sample_of({"message": {"content": "4"}, "finish_reason": "stop", "stop_reason": None})
    assert (at_end.text, at_end.finish_reason) == ("4", "stop")
    assert sample_of({"text": "4", "finish_reason": "length"}).text == "4"
    with pytest.raises(GenerationError, match=r"does not say which string of stop=\['</a>', '#'\]"):
        sample_of({"text": "4", "finish_reason": "stop"})
    with pytest.raises(ConfigError, match="must be one or more strings that are not empty"):
        sampling.generate([*argv, "--stop", ""])


def test_a_file_is_scored_without_the_name_of_its_option(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(workspace / "answered.jsonl", [{"prompt": "?", "answer": "4", "responses": ["4", "5"]}])
    assert eval.main(["answered.jsonl", "--reward_funcs", "numeric_reward"]) == 0
    assert "0.500" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^k=\[1, 3\]: a prompt has at most 2 responses"):
        eval.main(["answered.jsonl", "--reward_funcs", "numeric_reward", "--k", "1", "3"])


def test_a_place_that_cannot_be_written_to_is_refused_before_sampling(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (eval, sampling):
        monkeypatch.setattr(module, "make_sampler", lambda *_, **__: pytest.fail("samples"))
    scoring = ["--reward_funcs", "my_rewards:short", "--output_dir", "prompts.jsonl"]
    with pytest.raises(ConfigError, match=r"output_dir='prompts\.jsonl' cannot be written to"):
        eval.main(["m", "prompts.jsonl", *scoring])
    with pytest.raises(ConfigError, match=r"folder of output_file='prompts\.jsonl' cannot be written to"):
        sampling.generate(["m", "--dataset_name", "prompts.jsonl", "--output_file", "prompts.jsonl/a.jsonl"])


def test_the_total_is_the_weighted_sum_of_the_rewards_that_there_are(workspace: Path) -> None:
    write_jsonl(workspace / "answered.jsonl", [{"prompt": "?", "responses": ["a", "bbb", "cc"]}])
    Path("known.py").write_text("def known(completions):\n    return [1.0, 2.0, None]\n")
    argv = ["--dataset_name", "answered.jsonl", "--reward_funcs", "my_rewards:short", "known.py:known"]
    assert eval.main([*argv, "--reward_weights", "0.5", "10", "--output_dir", "scores"]) == 0
    assert pq.read_table("scores/completions.parquet").to_pylist()[0]["reward"] == [9.5, 18.5, -1.0]


def test_a_file_of_verl_is_scored_by_its_data_sources(workspace: Path) -> None:
    ask = [{"role": "user", "content": "?"}]
    rows = [
        {"data_source": "a", "prompt": ask, "reward_model": {"ground_truth": "4"}, "responses": ["is 4", "is 5"]},
        {"data_source": "b", "prompt": ask, "reward_model": {"ground_truth": "6"}, "responses": ["is 6", "is 6"]},
    ]
    Dataset.from_list(rows).to_parquet("verl.parquet")
    (workspace / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    answer = solution_str.split()[-1]\n"
        "    return {'score': float(answer == ground_truth), 'pred': answer}\n",
        encoding="utf-8",
    )
    argv = ["eval", "--dataset_name", "verl.parquet", "--output_dir", "scores", "--reward_funcs"]
    assert main([*argv, "score.py:compute_score"]) == 0
    found = json.loads(Path("scores/metrics.json").read_text(encoding="utf-8"))
    assert {source: found[source]["reward"]["value"] for source in found} == {"all": 0.75, "a": 0.5, "b": 1.0}
    assert (found["a"]["pass@2"]["value"], found["a"]["maj@2"]["value"], found["a"]["best@2"]["value"]) == (1, 0.5, 1)
    assert pq.read_table("scores/completions.parquet")["reward"].to_pylist() == [[1.0, 0.0], [1.0, 1.0]]
    assert main([*argv, "numeric_reward", "--reference_column", "reward_model.ground_truth"]) == 0
    again = json.loads(Path("scores/metrics.json").read_text(encoding="utf-8"))
    assert again["a"]["reward"] == found["a"]["reward"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset_name", "prompts.jsonl"], "reward_funcs=None: at least one reward is needed"),
        (["--dataset_name", "prompts.jsonl", "--reward_funcs", "numeric_reward"], "has no column 'responses'"),
        (["--dataset_name", "a.jsonl", "--reward_funcs", "x", "--temperature", "1"], "temperature=1.0 has no effect"),
        (["--reward_funcs", "numeric_reward"], "dataset_name: not given"),
        (
            ["m", "prompts.jsonl", "--server", "http://h/v1", "--reward_funcs", "repetition_penalty_reward"],
            "needs completion_ids, but files and servers provide only texts",
        ),
        (["m", "a.jsonl", "--reward_funcs", "x", "--response_column", "y"], "response_column='y' has no effect"),
        (["m", "a.jsonl", "--reward_funcs", "x", "--k", "1", "2"], "at most 1 responses. Raise num_generations"),
    ],
)
def test_eval_refuses_what_cannot_work(workspace: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eval.main(options)


def test_a_server_is_asked_with_the_conversation(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint(lambda text: f"{text}?")
    try:
        assert sampling.generate(["name", "why", "--server", endpoint.url, "--system", "be brief"]) == 0
    finally:
        endpoint.close()
    assert capsys.readouterr().out.strip() == "why?"
    (body,) = endpoint.bodies
    assert [message["content"] for message in body["messages"]] == ["be brief", "why"]
    assert (body["model"], body["n"], body["temperature"]) == ("name", 1, 0.0)


def test_a_model_without_a_chat_template_continues_texts(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("qwen2").save_pretrained("base")
    tiny_tokenizer(chat_template=None).save_pretrained("base")
    with monkeypatch.context() as patch:
        patch.setattr(export, "load_merged", None)  # refused before the weights are loaded
        for command, words in ((sampling.generate, ["base", "1+1", *SHORT]), (sampling.chat, ["base"])):
            with pytest.raises(ConfigError, match="has no chat template, so it only continues texts"):
                command(words)
    assert sampling.generate(["base", "1+1", "--raw", *SHORT]) == 0
    assert "Tokenizing" not in capsys.readouterr().err


def test_a_chat_remembers_and_forgets(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = Endpoint(lambda text: f"{text}!")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/undo\nthree\n/clear\nfour\n"))
    try:
        assert sampling.chat(["name", "--server", endpoint.url]) == 0
    finally:
        endpoint.close()
    told = [[message["content"] for message in body["messages"]] for body in endpoint.bodies]
    assert told == [["one"], ["one", "one!", "two"], ["one", "one!", "three"], ["four"]]
    assert "three!" in capsys.readouterr().out


def test_a_merged_adapter_gives_the_outputs_of_base_and_adapter(workspace: Path, model_folder: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained("adapter")
    assert main(["merge", "adapter", "merged"]) == 0
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        expected = adapted.eval()(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(model_folder)(ids).logits
        assert not torch.allclose(plain, expected, atol=1e-3)
        for model in (AutoModelForCausalLM.from_pretrained("merged"), load_merged("adapter")):
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained("merged").eos_token == "<|end|>"
    with pytest.raises(ConfigError, match="already holds a model"):
        commands.merge(["adapter", "merged"])
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        commands.merge([str(model_folder), "other"])


@pytest.mark.parametrize("line", LINES)
def test_the_commands_of_the_docs_parse(line: str) -> None:
    command, *words = shlex.split(line)
    module, _, function = OTHERS[command].module.partition(":")
    assert getattr(importlib.import_module(f"prefrl.scripts.{module}"), function or "main").parser().parse(words)


def rollout(group: int, text: str, reward: float) -> Rollout:
    turn = Turn([1, 2], Completion([3] * len(text), "stop", [0.0] * len(text), [True] * len(text), [0] * len(text)))
    row = {"prompt": f"question {group}", "prompt_ids": [1, 2]}
    return Rollout([turn], row, group, prompt=row["prompt"], text=text, rewards={"right": reward}, reward=reward)


def test_the_worst_and_best_completions_of_a_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"good": 1.0, "bad": -1.0, "middling": 0.5, "unscored": float("nan")}
    rollouts = [rollout(i, text, reward) for i, (text, reward) in enumerate(texts.items())]
    write_entry(Entry("run", 0, 0, [Collected(rollouts[:1])]), Path("run/completions/completions_00000.parquet"))
    write_entry(Entry("run", 1, 8, [Collected(rollouts[1:])]), Path("run/completions/completions_00008.parquet"))
    assert report.look(["run", "--worst", "1", "--best", "1"]) == 0
    shown = capsys.readouterr().out
    assert "step 9: 3 completions, reward -1 to 0.5, mean -0.25" in shown
    assert shown.index("bad") < shown.index("middling")
    assert "question 1" in shown
    assert "right -1 | 3 tokens, stop" in shown.replace("reward -1 | ", "")
    assert report.look(["run", "--worst", "0", "--best", "1", "--all_steps"]) == 0
    assert "good" in capsys.readouterr().out
    assert report.look(["run", "--step", "8"]) == 0
    assert "good" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Did you mean 'right'"):
        report.look(["run", "--reward", "righ"])
    with pytest.raises(ValueError, match="has no completions"):
        report.look(["elsewhere"])
