"""`prefrl sft` and `prefrl grpo` from files on disk to a saved model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from datasets import IterableDataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl.errors import ConfigError, DataError
from prefrl.registry import REGISTRY
from prefrl.rewards import numeric_reward
from prefrl.run.checkpoints import manifest_of, seal
from prefrl.scripts import inputs, train
from prefrl.scripts.main import main
from tests.cli.conftest import write_jsonl

ROOT = Path(__file__).parents[2]
QUICK = ["--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--learning_rate", "1e-2", "--output_dir", "out"]
GRPO = ["--max_completion_length", "5", "--num_generations", "2", "--per_device_train_batch_size", "2"]


def history(folder: Path) -> list[dict[str, float]]:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [dict(entry) for entry in state["log_history"]]


def test_sft_trains_and_saves_a_model_that_loads(
    workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    assert main([*argv, "--save_steps", "2"]) == 0
    model = AutoModelForCausalLM.from_pretrained("out")
    before = AutoModelForCausalLM.from_pretrained(model_folder)
    assert not model.lm_head.weight.equal(before.lm_head.weight)
    assert AutoTokenizer.from_pretrained("out").eos_token == "<|end|>"
    losses = [entry["loss"] for entry in history(workspace / "out/checkpoint-2") if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    printed = capsys.readouterr().out
    assert f"last {losses[1]:.4g} at step 2, best {losses[1]:.4g} at step 2" in printed
    assert "prefrl chat out" in printed


def test_a_model_that_cannot_be_pushed_is_saved_and_the_command_says_how_to_push_it(
    workspace: Path, model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ["--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl"]
    pushing = ["--push_to_hub", "true", "--hub_model_id", "me/model", "--save_strategy", "no"]
    assert main(["sft", *data, *QUICK, *pushing]) == 2
    (message,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("prefrl sft: ")]
    assert "HubError: me/model could not be pushed to the Hub: " in message
    assert "Training is complete. The model is saved in out. To push it: hf upload me/model out . --exclude" in message
    assert (workspace / "out" / "model.safetensors").is_file()


def test_grpo_trains_with_a_reward_of_the_working_directory(workspace: Path, model_folder: Path) -> None:
    (workspace / "run.yaml").write_text(
        f"model_name_or_path: {model_folder}\ndataset_name: prompts.jsonl\nreward_funcs: [my_rewards:short]\n",
        encoding="utf-8",
    )
    assert main(["grpo", "--config", "run.yaml", *QUICK, *GRPO, "--save_steps", "2"]) == 0
    logged = [entry for entry in history(workspace / "out/checkpoint-2") if "reward" in entry]
    assert len(logged) == 2
    assert all(-5 <= entry["rewards/short/mean"] <= 0 for entry in logged)
    assert (workspace / "out/model.safetensors").exists()


def test_grpo_with_lora_saves_an_adapter(workspace: Path, model_folder: Path) -> None:
    argv = ["grpo", "--model_name_or_path", str(model_folder), "--dataset_name", "chats.jsonl", *QUICK, *GRPO]
    lora = ["--use_peft", "--lora_r", "3", "--lora_target_modules", "q_proj", "--reward_funcs", "my_rewards:short"]
    assert main([*argv, *lora]) == 0
    adapter = load_file(workspace / "out/adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in adapter.items() if "lora_A" in name} == {3}
    assert all("q_proj" in name for name in adapter)


def test_evaluation_reads_the_test_split(workspace: Path, model_folder: Path) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    splits = ["--dataset_train_split", "train[:2]", "--dataset_test_split", "train[2:]"]
    assert main([*argv, *splits, "--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "2"]) == 0
    evaluated = [entry for entry in history(workspace / "out/checkpoint-2") if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [1, 2]


def test_resume_goes_on_from_the_last_checkpoint(workspace: Path, model_folder: Path) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    argv += ["--save_steps", "1"]
    assert main(argv) == 0
    path = workspace / "out/checkpoint-2/trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["log_history"][0]["seen"] = 1.0
    path.write_text(json.dumps(state), encoding="utf-8")
    manifest = manifest_of(path.parent)
    assert manifest is not None
    seal(path.parent, run=manifest.run, step=2, resumable=True)
    longer = ["--max_steps", "3", "--resume_from_checkpoint", "true"]
    assert main([*argv, *longer]) == 2  # the learning rate decays over the length of the training
    assert main([*argv, *longer, "--allow_resume_changes", "max_steps"]) == 0
    resumed = [entry for entry in history(workspace / "out/checkpoint-3") if "loss" in entry]
    assert [entry["step"] for entry in resumed] == [1, 2, 3]
    assert resumed[0]["seen"] == 1.0  # the first two steps were not run again


class Recorder:
    """Stands in the place of a trainer and keeps what it was given."""

    given: ClassVar[dict[str, Any]] = {}

    def __init__(self, **arguments: Any) -> None:
        Recorder.given = arguments
        self.history = SimpleNamespace(shows_ending=True)

    def show_ending(self, *, saved: bool, dataset: str | None, rewards: Any, environment: Any = None) -> None:
        assert saved
        assert not self.history.shows_ending  # else training has shown it, before the model was saved

    def train(self, resume_from_checkpoint: str | bool | None) -> None:
        Recorder.given["resume"] = resume_from_checkpoint

    def save_model(self, output_dir: str) -> None:
        Recorder.given["saved"] = output_dir

    def end(self) -> None:
        Recorder.given["ended"] = True


def test_what_the_command_line_says_reaches_the_trainer(workspace: Path) -> None:
    argv = ["--model_revision", "v2", "--dataset_name", "prompts.jsonl"]
    argv += ["--model_init_kwargs", '{"dtype": "bfloat16"}', "--resume_from_checkpoint", "out/checkpoint-7"]
    rewards = [
        "--reward_funcs",
        "numeric_reward",
        "my_rewards:short",
        "string_check(reference='7')",
        "--reward_model_name_or_path",
        "judge",
    ]
    given = recorded("grpo", [*argv, *rewards])
    assert given["ended"]
    assert given["model"] == "m"
    assert given["args"].model_init_kwargs == {"dtype": "bfloat16", "revision": "v2"}
    assert given["train_dataset"]["answer"][:] == ["2", "23"]
    assert given["eval_dataset"] is None
    assert given["peft_config"] is None
    assert given["reward_funcs"][0] is numeric_reward
    assert given["reward_funcs"][1](["abc"]) == [-3.0]
    assert given["reward_funcs"][2](completions=["7", "8"]) == [1.0, 0.0]
    assert given["reward_funcs"][3] == "judge"
    assert (given["resume"], given["saved"]) == ("out/checkpoint-7", "out")


def test_if_none_of_the_first_rows_can_be_used_all_of_them_are_looked_at(workspace: Path, model_folder: Path) -> None:
    write_jsonl(
        workspace / "empty.jsonl", [{"prompt": "1+1=", "completion": ""}] * 9 + [{"prompt": "a", "completion": "2"}]
    )
    row = dataclasses.replace(REGISTRY["sft"], trainer=f"{__name__}:Recorder")
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "empty.jsonl", *QUICK]
    with pytest.raises(DataError, match=r"^dataset_name='empty.jsonl': 9 of 10 rows cannot be used: row 0: "):
        train.main(row, inputs.read(row, argv))
    assert train.main(row, inputs.read(row, [*argv, "--invalid_rows", "drop"])) == 0  # the last row is trained on


def recorded(algorithm: str, argv: list[str]) -> dict[str, Any]:
    """What the trainer was given. The model is not there, so it is not looked at."""
    row = dataclasses.replace(REGISTRY[algorithm], trainer=f"{__name__}:Recorder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_before", lambda *_: None)
        assert train.main(row, inputs.read(row, ["--model_name_or_path", "m", *QUICK, *argv])) == 0
    return Recorder.given


def test_every_option_of_lora_reaches_peft(workspace: Path) -> None:
    options = ["--use_peft", "--lora_r", "3", "--lora_alpha", "5", "--lora_dropout", "0", "--lora_init", "gaussian"]
    options += ["--lora_target_modules", "q_proj", "v_proj", "--lora_modules_to_save", "lm_head", "--use_dora"]
    options += ["--lora_target_parameters", "experts.w", "--use_rslora", "--lora_rank_pattern", '{"q_proj": 2}']
    options += ["--lora_alpha_pattern", '{"v_proj": 4}']
    config = recorded("sft", ["--dataset_name", "texts.jsonl", *options])["peft_config"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.init_lora_weights) == (3, 5, 0, "gaussian")
    assert (config.target_modules, config.modules_to_save) == ({"q_proj", "v_proj"}, ["lm_head"])
    assert (config.target_parameters, config.use_rslora, config.use_dora) == (["experts.w"], True, True)
    assert (config.rank_pattern, config.alpha_pattern, config.task_type) == ({"q_proj": 2}, {"v_proj": 4}, None)


def test_quantization_reaches_the_loader_and_computes_in_the_dtype_of_the_run(workspace: Path) -> None:
    argv = ["--dataset_name", "texts.jsonl", "--use_peft"]
    four = ["--load_in_4bit", "--bnb_4bit_quant_type", "fp4", "--use_bnb_nested_quant", "--bf16"]
    config = recorded("sft", [*argv, *four])["args"].model_init_kwargs["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "fp4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    eight = recorded("sft", [*argv, "--load_in_8bit", "--model_init_kwargs", '{"revision": "v2"}'])["args"]
    assert eight.model_init_kwargs["quantization_config"].load_in_8bit
    assert eight.model_init_kwargs["revision"] == "v2"
    with pytest.raises(ConfigError, match=r"load_in_4bit and model_init_kwargs\['quantization_config'\].*remove one"):
        recorded("sft", [*argv, "--load_in_4bit", "--model_init_kwargs", '{"quantization_config": {}}'])


def test_sft_on_four_bits_saves_an_adapter(workspace: Path, model_folder: Path) -> None:
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    assert main([*argv, "--use_peft", "--load_in_4bit", "--lora_target_modules", "q_proj", "--save_steps", "2"]) == 0
    adapter = load_file(workspace / "out/adapter_model.safetensors")
    assert len(adapter) == 2 * 2  # layers, A and B
    assert all(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    losses = [entry["loss"] for entry in history(workspace / "out/checkpoint-2") if "loss" in entry]
    assert losses[1] < losses[0]


def write_mixture(folder: Path, *parts: str, **options: str) -> list[str]:
    write_jsonl(folder / "a.jsonl", [{"text": f"a{i}", "extra": i} for i in range(40)])
    write_jsonl(folder / "b.jsonl", [{"text": f"b{i}"} for i in range(40)])
    lines = ["datasets:", *(f"  - {part}" for part in parts), *(f"{name}: {value}" for name, value in options.items())]
    (folder / "mix.yaml").write_text("\n".join(lines), encoding="utf-8")
    return ["--config", "mix.yaml"]


def test_columns_are_mapped_for_training_and_evaluation(workspace: Path) -> None:
    argv = ["--dataset_name", "prompts.jsonl", "--columns", '{"completion": "answer"}']
    argv += ["--prompt_template", "{prompt}?"]
    given = recorded("sft", [*argv, "--eval_strategy", "steps", "--dataset_test_split", "train[1:]"])
    assert given["train_dataset"][0] == {"prompt": "1+1=?", "completion": "2"}
    assert given["eval_dataset"].to_list() == [{"prompt": "What is 20 + 3??", "completion": "23"}]


def test_a_mixture_without_weights_is_all_rows(workspace: Path) -> None:
    argv = write_mixture(workspace, "{path: a.jsonl, split: 'train[:3]', columns: [text]}", "{path: b.jsonl}")
    texts = recorded("sft", argv)["train_dataset"]["text"][:]
    assert texts == ["a0", "a1", "a2", *(f"b{i}" for i in range(40))]


def test_a_mixture_draws_by_weight_and_seed_until_a_dataset_ends(workspace: Path) -> None:
    argv = write_mixture(
        workspace,
        "{path: json, data_files: a.jsonl, columns: [text], weight: 3}",
        "{path: b.jsonl, weight: 1}",
    )
    texts = recorded("sft", argv)["train_dataset"]["text"][:]
    counts = {letter: sum(text[0] == letter for text in texts) for letter in "ab"}
    assert counts["a"] == 40  # the first to end
    assert 5 <= counts["b"] <= 25
    assert len(set(texts)) == len(texts)
    assert recorded("sft", argv)["train_dataset"]["text"][:] == texts
    assert recorded("sft", [*argv, "--seed", "7"])["train_dataset"]["text"][:] != texts


def test_a_mixture_is_evaluated_part_by_part(workspace: Path) -> None:
    options = {"eval_strategy": "steps", "dataset_test_split": "train[38:]"}
    argv = write_mixture(
        workspace, "{path: a.jsonl, columns: [text]}", "{path: b.jsonl}", "{path: b.jsonl}", **options
    )
    evaluated = {name: part["text"][:] for name, part in recorded("sft", argv)["eval_dataset"].items()}
    assert evaluated == {"a": ["a38", "a39"], "b_1": ["b38", "b39"], "b_2": ["b38", "b39"]}


def test_a_validation_file_of_a_single_dataset_needs_no_name(workspace: Path) -> None:
    part = "{path: json, data_files: {train: a.jsonl, test: b.jsonl}, columns: [text]}"
    given = recorded("sft", write_mixture(workspace, part, eval_strategy="steps"))
    assert given["train_dataset"]["text"][0] == "a0"
    assert given["eval_dataset"]["text"][0] == "b0"


def test_files_to_evaluate_on_have_the_columns_of_the_training_data(workspace: Path) -> None:
    write_jsonl(workspace / "val.jsonl", [{"prompt": "p", "answer": "x"}])
    write_jsonl(workspace / "own.jsonl", [{"prompt": "q", "completion": "y"}])
    argv = ["--dataset_name", "prompts.jsonl", "--columns", '{"completion": "answer"}', "--eval_strategy", "steps"]
    given = recorded("sft", [*argv, "--eval_datasets", "val.jsonl"])
    assert given["eval_dataset"].to_list() == [{"prompt": "p", "completion": "x"}]  # its metrics have plain names
    own = '{"path": "own.jsonl", "columns": ["prompt", "completion"]}'
    named = recorded("sft", [*argv, "--eval_datasets", "val.jsonl", own])["eval_dataset"]
    assert {name: part["completion"][:] for name, part in named.items()} == {"val": ["x"], "own": ["y"]}
    mixture = write_mixture(workspace, "{path: a.jsonl, columns: [text]}", "{path: b.jsonl}", eval_strategy="steps")
    assert recorded("sft", [*mixture, "--eval_datasets", "b.jsonl"])["eval_dataset"]["text"][0] == "b0"


def test_rows_of_a_single_dataset_are_held_out(workspace: Path) -> None:
    write_mixture(workspace)
    for size, count in (("0.25", 10), ("3", 3)):
        argv = ["--dataset_name", "a.jsonl", "--eval_strategy", "steps", "--test_split_size", size]
        given = recorded("sft", argv)
        evaluated = given["eval_dataset"]["text"][:]
        assert len(evaluated) == count
        assert sorted([*given["train_dataset"]["text"], *evaluated]) == sorted(f"a{i}" for i in range(40))
        assert recorded("sft", argv)["eval_dataset"]["text"][:] == evaluated
    with pytest.raises(ConfigError, match=r"test_split_size=40\.0: the dataset has 40 rows"):
        recorded("sft", [*argv[:-1], "40"])


def test_code_of_the_user_is_a_dataset(workspace: Path) -> None:
    (workspace / "my_data.py").write_text(
        "class Rows:\n"
        "    def __init__(self, split, size=2):\n        self.split, self.size = split, size\n"
        "    def __len__(self):\n        return self.size\n"
        "    def __getitem__(self, i):\n        return {'text': f'{self.split}{i}'}\n"
        "def some():\n    for i in range(4):\n        yield {'text': str(i)}\n"
        "def wrong():\n    return ['a']\n"
    )
    argv = ["--eval_strategy", "steps", "--dataset_name"]
    given = recorded("sft", [*argv, "my_data.py:Rows(size=3)"])
    assert given["train_dataset"]["text"][:] == ["train0", "train1", "train2"]
    assert given["eval_dataset"]["text"][:] == ["test0", "test1", "test2"]
    splits = ["--dataset_train_split", "train[:75%]", "--dataset_test_split", "train[75%:]"]
    given = recorded("sft", [*argv, "my_data.py:some", *splits])
    assert (given["train_dataset"]["text"][:], given["eval_dataset"]["text"][:]) == (["0", "1", "2"], ["3"])
    for name, message in (
        ("some", "'test': some has no parameter 'split'"),
        ("wrong", "row 0 is a str. It must be a class or a function that gives"),
        ("Rows(length=3)", r"got an unexpected keyword argument 'length'. Its parameters are \(split, size=2\)"),
        ("Row", "my_data.py has no 'Row'. Did you mean 'Rows'"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            recorded("sft", [*argv, f"my_data.py:{name}"])


def test_a_stream_is_read_in_order_and_needs_a_number_of_steps(workspace: Path) -> None:
    for argv in (
        write_mixture(workspace, "{path: a.jsonl, columns: [text]}", "{path: b.jsonl}"),
        ["--dataset_name", "a.jsonl"],
    ):
        stream = recorded("sft", [*argv, "--dataset_streaming"])["train_dataset"]
        assert isinstance(stream, IterableDataset)
        assert [row["text"] for row in stream.take(3)] == ["a0", "a1", "a2"]
        with pytest.raises(ConfigError, match="dataset_streaming=True and max_steps=-1: a stream has no length"):
            recorded("sft", [*argv, "--dataset_streaming", "--max_steps", "-1"])


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ("{path: no.jsonl}", DataError, r"datasets\[0\].path='no.jsonl': there is no such file"),
        (
            "{path: a.jsonl, split: test}",
            DataError,
            r"datasets\[0\].path='a.jsonl' with split='test' cannot be loaded",
        ),
        ("{path: a.jsonl, columns: [txt]}", DataError, r"yaml:\d+: datasets\[0\].columns: .* no column 'txt'"),
        ("{path: a.jsonl, data_files: b.jsonl}", ConfigError, "is a file: remove data_files and data_dir"),
        ("{path: a.jsonl, columns: [text], weight: 1}", ConfigError, "some have a weight and others do not"),
        ("{path: a.jsonl}", DataError, "'extra'"),
    ],
)
def test_a_part_that_cannot_be_mixed_is_named(
    workspace: Path, part: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        recorded("sft", write_mixture(workspace, part, "{path: b.jsonl}"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--reward_funcs", "no_such_reward_at_all"], ConfigError, "is neither a built-in reward nor module:function"),
        (["--reward_funcs", "my_rewards:shrot"], ConfigError, "my_rewards has no 'shrot'. Did you mean 'short'"),
        (["--reward_funcs", "my_rewards:NUMBER"], ConfigError, "is a int; a reward is a function"),
        (["--reward_funcs", "nowhere:short"], ConfigError, "No module named 'nowhere'"),
        (["--reward_funcs", "my_rewards:short", "--dataset_name", "no.jsonl"], DataError, "there is no such file"),
        (
            ["--reward_funcs", "my_rewards:short", "--dataset_train_split", "validation"],
            DataError,
            "dataset_train_split='validation' cannot be loaded",
        ),
        (
            ["--reward_funcs", "my_rewards:short", "--do_train", "--do_eval", "--strict_options"],
            ConfigError,
            "do_eval=True has no effect because eval_strategy='no'",
        ),
        (
            ["--reward_funcs", "my_rewards:short", "--eval_strategy", "steps", "--dataset_test_split", "held_out"],
            DataError,
            "dataset_test_split='held_out' cannot be loaded",
        ),
        (
            [
                "--reward_funcs",
                "my_rewards:short",
                "--model_revision",
                "a",
                "--model_init_kwargs",
                '{"revision": "b"}',
            ],
            ConfigError,
            "remove one of them",
        ),
    ],
)
def test_what_cannot_be_found_is_named(
    workspace: Path, model_folder: Path, options: list[str], error: type[Exception], message: str
) -> None:
    argv = ["grpo", "--model_name_or_path", str(model_folder), "--dataset_name", "prompts.jsonl", *QUICK, *GRPO]
    with pytest.raises(error, match=message):
        main(["--debug", *argv, *options])


@pytest.mark.parametrize(
    ("algorithm", "data", "message"),
    [
        ("sft", "dataset_name: prompts.jsonl", "run.yaml:3: dataset_name='prompts.jsonl': column 'completion' is"),
        ("sft", "datasets:\n  - path: prompts.jsonl", "run.yaml:3: datasets: column 'completion' is"),
        ("sft", "datasets: [texts.jsonl, prompts.jsonl]", "run.yaml:3: datasets: dataset 'prompts' does not have"),
        (
            "grpo",
            "dataset_name: texts.jsonl\nreward_funcs: [numeric_reward]",
            "run.yaml:3: dataset_name='texts.jsonl': reward 'numeric_reward' needs 'answer'",
        ),
    ],
)
def test_a_column_that_is_missing_is_told_with_the_line_of_the_dataset(
    algorithm: str, data: str, message: str, workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = workspace / "run.yaml"
    file.write_text(f"model_name_or_path: {model_folder}\nuse_cpu: true\n{data}\noutput_dir: out\n")
    assert main([algorithm, "run.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_the_check_of_a_run_ends_before_the_model_is_loaded(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFRL_ONLY_CHECK", "1")
    assert main(["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]) == 0
    assert not (workspace / "out").exists()


def test_the_module_runs_under_the_launcher_of_torch(workspace: Path, model_folder: Path) -> None:
    """As under `accelerate launch`. test_launch.py starts several processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "prompts.jsonl", *QUICK, *GRPO]
    argv += ["--reward_funcs", "my_rewards:short", "--save_steps", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "tests.cli.launched", "grpo", *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (workspace / "out/checkpoint-2/rollouts_0_of_1.safetensors").exists()


def test_options_of_the_model_and_a_share_of_a_mixture_reach_the_trainer(workspace: Path) -> None:
    parts = ["{path: a.jsonl, columns: [text], fraction: 1}", "{path: b.jsonl, fraction: 3}"]
    argv = write_mixture(workspace, *parts, test_split_size="0.25", eval_strategy="steps")
    options = ["--dtype", "bfloat16", "--attn_implementation", "eager", "--model_revision", "v2"]
    given = recorded("sft", [*argv, *options])
    kwargs = {"revision": "v2", "dtype": "bfloat16", "attn_implementation": "eager"}
    assert given["args"].model_init_kwargs == kwargs
    texts = [*given["train_dataset"]["text"], *given["eval_dataset"]["text"]]
    assert len(given["eval_dataset"]) == 14  # a quarter of 13 and 40 rows
    assert {letter: sum(text[0] == letter for text in texts) for letter in "ab"} == {"a": 13, "b": 40}
    assert recorded("sft", argv)["args"].model_init_kwargs is None


def test_a_reward_model_with_lora_needs_no_task_type(workspace: Path) -> None:
    argv = ["--dataset_name", "pairs.jsonl", "--use_peft"]
    assert recorded("reward", argv)["peft_config"].task_type is None
    given = recorded("reward", [*argv, "--lora_task_type", "SEQ_CLS"])
    assert given["peft_config"].task_type == "SEQ_CLS"


def test_ctrl_c_says_where_the_run_stopped(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefrl.trainer.sft_trainer.SFTTrainer.train", interrupt)
    argv = ["sft", "--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl", *QUICK]
    assert main(argv) == 130
    assert "prefrl sft: stopped in step 1; there is no checkpoint yet\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--report_to", "clearml"], "report_to='clearml': its package is not installed. Run `pip install clearml`"),
        (["--model_init_kwargs", '{"dtype": "bflot16"}'], "dtype='bflot16': is not a torch dtype. Set 'bfloat16'"),
    ],
)
def test_what_would_fail_inside_other_libraries_is_one_line(
    argv: list[str], message: str, workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--model_name_or_path", str(model_folder), "--dataset_name", "texts.jsonl"]
    assert main(["sft", *data, *QUICK, *argv]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prefrl sft: ")]
    assert message in line
