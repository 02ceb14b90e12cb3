"""Whole configs of verl, cosmos-rl and Ludwig: they migrate, and what comes out trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl.scripts.main import main

DATA = Path(__file__).parents[1] / "data" / "migrate"
ROWS = [
    {
        "question": f"{i}+1=",
        "answer": f"${i + 1}$",
        "turns": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "yes"}],
        "data_source": "sums",
        "reward_model": {"ground_truth": str(i + 1)},
    }
    for i in range(10)
]
CPU = ["--use_cpu", "--logging_steps", "1"]
RUNS: list[tuple[str, str, str, list[str], list[str]]] = [  # file, command, its folder, options, what is left to do
    ("verl_grpo.yaml", "grpo", "runs/sums/grpo", [], []),
    ("verl_ppo.yaml", "ppo", "runs/sums/ppo", [], []),
    ("verl_sft.yaml", "sft", "runs/sums/sft", [], []),
    ("cosmos_grpo.toml", "grpo", "runs/cosmos-grpo", ["--use_vllm", "false"], []),
    ("cosmos_sft.toml", "sft", "runs/cosmos-sft", [], []),
    (
        *("ludwig.yaml", "sft", "out"),
        ["--dataset_name", "rows", "--output_dir", "out"],
        ["Ludwig splits the rows", "set dataset_name"],
    ),
]


@pytest.fixture
def configs(workspace: Path, model_folder: Path) -> Path:
    """The working directory, with the configs and the files that they name."""
    shutil.copytree(DATA, workspace, dirs_exist_ok=True)
    (workspace / "model").symlink_to(model_folder)
    (workspace / "rows").mkdir()
    rows = Dataset.from_list(ROWS)
    for file in ("train.parquet", "test.parquet", "rows/train.parquet"):
        rows.to_parquet(workspace / file)
    (workspace / "score.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
    )
    return workspace


@pytest.mark.parametrize(("file", "command", "folder", "options", "left"), RUNS, ids=lambda value: str(value)[:16])
def test_a_whole_config_migrates_and_trains(
    file: str, command: str, folder: str, options: list[str], left: list[str], configs: Path, capsys: Any
) -> None:
    main(["migrate", file, "--output", "run.yaml"])
    to_do = [line for line in capsys.readouterr().out.splitlines() if ": to do: " in line]
    assert len(to_do) == len(left)
    assert all(words in line for words, line in zip(left, to_do, strict=True))
    assert (configs / "run.yaml").read_text(encoding="utf-8").startswith(f"# prefrl {command} --config FILE\n")
    assert main([command, "--config", "run.yaml", *CPU, *options]) == 0
    state = json.loads((configs / folder / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 1
    assert any(name.startswith("eval_") for entry in state["log_history"] for name in entry)
