"""The files of the tutorials on SmolLM2, as a reader saves them: scripts write rows, one step of each run trains."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from prefrl.scripts.main import main
from tests.cli.conftest import write_jsonl

TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
# The first line of a file names it: `# sums.py`, `# prefrl grpo grpo.yaml`.
FILE = re.compile(r"^```(?:python|yaml)\n(# (?:prefrl \w+ )?(\S+)\n.*?)^```", re.M | re.S)
STEP = ["--max_steps", "1", "--use_cpu"]


@pytest.fixture
def folder(workspace: Path, model_folder: Path) -> Path:
    (workspace / "smollm2").symlink_to(model_folder)
    for page in ("grpo_smollm2", "sft_gsm8k", "dpo_gsm8k"):
        for text, name in FILE.findall((TUTORIALS / f"{page}.md").read_text(encoding="utf-8")):
            (workspace / name).write_text(text, encoding="utf-8")
    return workspace


def test_the_grpo_tutorial_trains_and_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("make_sums.py")
    assert main(["grpo", "grpo.yaml", *STEP]) == 0
    rewards = ["--reward_funcs", "sums.py:right", "sums.py:bare", "--correct_reward", "right"]
    capsys.readouterr()
    assert main(["eval", "runs/sums", "held_out.jsonl", *rewards, "--max_completion_length", "4"]) == 0
    assert "pass@1" in capsys.readouterr().out


def test_the_tutorials_on_gsm8k_train(folder: Path) -> None:
    write_jsonl(folder / "train.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(48)])
    solutions = {"small": {"solution": "5", "is_correct": True}, "large": {"solution": "6", "is_correct": False}}
    lines = [{"question": f"{i}+1?", "ground_truth": "5", **solutions} for i in range(48)]
    write_jsonl(folder / "example_model_solutions.jsonl", lines)
    runpy.run_path("make_sft_rows.py")
    assert main(["sft", "sft.yaml", *STEP]) == 0
    runpy.run_path("make_pairs.py")
    assert main(["dpo", "dpo.yaml", *STEP]) == 0
    assert (folder / "runs/gsm8k-dpo/model.safetensors").exists()
