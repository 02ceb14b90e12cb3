"""`prefrl soup` from checkpoints on disk to a model that loads."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefrl import SFTConfig, SFTTrainer
from prefrl.errors import ConfigError
from prefrl.options.offline import OfflineReferenceOptions
from prefrl.registry import REGISTRY
from prefrl.scripts.main import main
from tests.assets import tiny_model, tiny_tokenizer
from tests.cli.conftest import write_jsonl

TEXTS = ["to be", "or not to be", "that"]
EVALUATION = ["--algorithm", "sft", "--dataset_name", "texts.jsonl", "--dataset_test_split", "train"]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: two checkpoints near a trained model, on two sides of it, and one far from it."""
    folder = tmp_path_factory.mktemp("saved")
    trained = SFTTrainer(
        tiny_model(),
        SFTConfig(output_dir=str(folder / "training"), use_cpu=True, report_to=[], max_steps=20, learning_rate=1e-2),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tiny_tokenizer(),
    )
    trained.train()
    for name, distance in (("checkpoint-9", 0.1), ("checkpoint-10", -0.1), ("checkpoint-200", 1.0)):
        model = tiny_model()
        generator = torch.Generator().manual_seed(0)
        state = {n: w.detach().cpu() for n, w in trained.policy.state_dict().items()}
        model.load_state_dict({n: w + distance * torch.randn(w.shape, generator=generator) for n, w in state.items()})
        model.save_pretrained(folder / "run" / name)
        tiny_tokenizer().save_pretrained(folder / "run" / name)
    (folder / "run/checkpoint-best").mkdir()
    return folder / "run"


@pytest.fixture
def run(workspace: Path, saved_run: Path) -> Path:
    """The same in the working directory."""
    return Path(shutil.copytree(saved_run, workspace / "run"))


def eval_loss(folder: str | Path, **options: Any) -> float:
    trainer = SFTTrainer(
        str(folder),
        SFTConfig(output_dir="scratch", use_cpu=True, report_to=[], **options),
        eval_dataset=Dataset.from_dict({"text": TEXTS}),
    )
    return trainer.evaluate()["eval_loss"]


def report() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path("soup/soup.json").read_text(encoding="utf-8"))
    return record


def head(folder: str | Path) -> torch.Tensor:
    weight: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.data
    return weight


def test_checkpoints_of_a_run_are_averaged_and_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soup", "--run_dir", "run", "--output_dir", "soup"]) == 0
    names = ["checkpoint-9", "checkpoint-10", "checkpoint-200"]
    expected = sum(head(run / name) for name in names) / 3
    torch.testing.assert_close(head("soup"), expected, atol=1e-6, rtol=0.0)
    assert AutoTokenizer.from_pretrained("soup").eos_token == "<|end|>"
    assert [row["checkpoint"] for row in report()["checkpoints"]] == [f"run/{name}" for name in names]
    assert report()["metric"] is None
    printed = capsys.readouterr().out
    assert "run/checkpoint-200" in printed
    assert "0.333333" in printed


def test_options_are_read_from_yaml_too(run: Path) -> None:
    Path("soup.yaml").write_text(
        "checkpoints: [run/checkpoint-9, run/checkpoint-10]\nweights: [3, 1]\noutput_dir: soup\n", encoding="utf-8"
    )
    assert main(["soup", "--config", "soup.yaml"]) == 0
    expected = 0.75 * head(run / "checkpoint-9") + 0.25 * head(run / "checkpoint-10")
    torch.testing.assert_close(head("soup"), expected, atol=1e-6, rtol=0.0)


def test_greedy_soup_is_chosen_by_the_algorithms_own_evaluation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["soup", "--run_dir", "run", "--output_dir", "soup", "--method", "greedy", "--metric", "eval_loss"]
    assert main([*argv, *EVALUATION]) == 0
    rows = {row["checkpoint"]: row for row in report()["checkpoints"]}
    assert {name: row["weight"] for name, row in rows.items()} == {
        "run/checkpoint-9": 0.5,
        "run/checkpoint-10": 0.5,
        "run/checkpoint-200": 0,
    }
    for name, row in rows.items():
        assert row["metric"] == pytest.approx(eval_loss(name), abs=1e-6)
    assert report()["soup"] == pytest.approx(eval_loss("soup"), abs=1e-6)
    assert report()["soup"] < min(row["metric"] for row in rows.values())
    assert f"{report()['soup']:.6g}" in capsys.readouterr().out


def test_a_metric_that_should_grow_turns_the_choice_around(run: Path) -> None:
    argv = ["soup", "--run_dir", "run", "--output_dir", "soup", "--method", "greedy", "--metric", "eval_loss"]
    assert main([*argv, *EVALUATION, "--greater_is_better", "true"]) == 0
    assert report()["checkpoints"][0]["checkpoint"] == "run/checkpoint-200"
    assert report()["soup"] >= max(row["metric"] for row in report()["checkpoints"])


def test_top_k_of_a_uniform_soup_leaves_the_worst_out(run: Path) -> None:
    argv = ["soup", "--run_dir", "run", "--output_dir", "soup", "--metric", "eval_loss", "--top_k", "2"]
    assert main([*argv, *EVALUATION]) == 0
    assert [row["weight"] for row in report()["checkpoints"]] == [0.5, 0.5, 0]
    assert report()["soup"] == pytest.approx(eval_loss("soup"), abs=1e-6)


def test_accuracy_is_a_metric_that_should_grow(run: Path) -> None:
    metric = "eval_mean_token_accuracy"
    assert main(["soup", "--run_dir", "run", "--output_dir", "soup", "--metric", metric, *EVALUATION]) == 0
    assert [row["weight"] for row in report()["checkpoints"]] == [pytest.approx(1 / 3)] * 3
    values = [row["metric"] for row in report()["checkpoints"]]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_eval_config_has_options_of_the_algorithm(run: Path) -> None:
    Path("evaluation.yaml").write_text("loss_type: dft\nuse_cpu: true\n", encoding="utf-8")
    argv = ["soup", "--run_dir", "run", "--output_dir", "soup", "--metric", "eval_loss", *EVALUATION]
    assert main([*argv, "--eval_config", "evaluation.yaml"]) == 0
    assert report()["soup"] == pytest.approx(eval_loss("soup", loss_type="dft"), abs=1e-6)
    assert abs(report()["soup"] - eval_loss("soup")) > 0.01


def test_algorithms_with_a_reference_need_the_model_that_training_began_with(
    run: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(Path("pairs.jsonl"), [{"prompt": "a", "chosen": "bc", "rejected": "d"}])
    argv = ["soup", "--run_dir", "run", "--output_dir", "soup", "--metric", "eval_loss", "--algorithm", "dpo"]
    argv += ["--dataset_name", "pairs.jsonl", "--dataset_test_split", "train"]
    assert main(argv) == 2
    assert "ref_model=None: dpo compares a model with a reference" in capsys.readouterr().err
    assert main([*argv, "--ref_model", str(model_folder)]) == 0
    # A model that is compared with itself has a loss of log 2, whatever it is.
    assert all(abs(row["metric"] - math.log(2)) > 0.01 for row in report()["checkpoints"])


def test_every_offline_algorithm_with_a_reference_is_recognized() -> None:
    with_reference = {n for n, row in REGISTRY.items() if issubclass(row.load_config(), OfflineReferenceOptions)}
    assert with_reference >= {"dpo", "kto", "bco"}
    assert not with_reference & {"sft", "orpo", "cpo", "reward", "grpo"}


FOLDERS = ["--output_dir", "soup", "--checkpoints", "run/checkpoint-9", "run/checkpoint-10"]
SCORED = [*FOLDERS, "--metric", "eval_loss"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--output_dir", "soup"], "checkpoints=None and run_dir=None: give one of them", id="nothing"),
        pytest.param([*FOLDERS, "--run_dir", "run"], "and run_dir='run': give one of them", id="both"),
        pytest.param(
            ["--output_dir", "soup", "--run_dir", "run/checkpoint-9"], "has no folders checkpoint-<step>", id="no run"
        ),
        pytest.param([*FOLDERS, "--method", "greedy"], "method='greedy' with metric=None", id="greedy without metric"),
        pytest.param([*FOLDERS, "--top_k", "5"], "top_k=5 has no effect because metric=None", id="top_k"),
        pytest.param([*FOLDERS, "--algorithm", "sft"], "algorithm='sft' has no effect", id="algorithm"),
        pytest.param([*FOLDERS, "--dataset_test_split", "t"], "dataset_test_split='t' has no effect", id="split"),
        pytest.param([*FOLDERS, "--greater_is_better", "false"], "greater_is_better=False has no effect", id="order"),
        pytest.param(SCORED, "algorithm, dataset_name: not given", id="no evaluation"),
        pytest.param([*SCORED, *EVALUATION, "--weights", "1", "2"], "weights=[1.0, 2.0] with metric", id="weights"),
        pytest.param([*SCORED, *EVALUATION, "--top_k", "1"], "top_k=1: must be at least 2", id="top_k of 1"),
        pytest.param([*SCORED, *EVALUATION, "--ref_model", "m"], "because algorithm='sft' has no reference", id="ref"),
        pytest.param(
            [*FOLDERS, "--metric", "eval_los", *EVALUATION], "Did you mean 'eval_loss'?", id="no such metric"
        ),
        pytest.param([*SCORED, *EVALUATION, "--algorithm", "sftt"], "Did you mean 'sft'?", id="no such algorithm"),
        pytest.param(
            [*SCORED, *EVALUATION, "--algorithm", "grpo"], "which this command does not support", id="online"
        ),
        pytest.param([*SCORED, *EVALUATION, "--dataset_name", "no.jsonl"], "there is no such file", id="no data"),
        pytest.param(
            [*SCORED, *EVALUATION, "--eval_config", "my_rewards.py"], "my_rewards.py:6: is not YAML", id="eval_config"
        ),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_no_soup(
    argv: list[str], message: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["soup", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not Path("soup/model.safetensors").exists()


@pytest.fixture
def small_run(workspace: Path, model_folder: Path) -> Path:
    for step in (9, 10):
        shutil.copytree(model_folder, workspace / f"run/checkpoint-{step}")
    return workspace / "run"


def test_help_shows_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["soup", "--help"])
    printed = capsys.readouterr().out
    for option in ("--checkpoints", "--run_dir", "--greater_is_better", "--top_k", "--eval_config"):
        assert option in printed
    assert "--learning_rate" not in printed


def test_debug_shows_the_traceback(workspace: Path) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        main(["--debug", "soup", "--checkpoints", "one", "--output_dir", "soup"])
