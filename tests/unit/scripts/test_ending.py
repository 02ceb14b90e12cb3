"""The panel after training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from prefrl.scripts.ending import ending, next_commands

HISTORY = [
    {"step": 1, "loss": 0.5, "reward": 0.25},
    {"step": 2, "loss": 0.1, "reward": 0.75},
    {"step": 3, "loss": 0.3, "reward": float("nan")},
    {"step": 4, "loss": 0.2, "reward": 0.5},
    {"step": 4, "train_runtime": 3723.0},
]


def panel(history: list[dict[str, Any]], *, steps: int, max_steps: int) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(ending("grpo", history, folder="runs/a", steps=steps, max_steps=max_steps))
    return console.export_text()


def commands(folder: Path, algorithm: str, **given: Any) -> list[str]:
    about = {"dataset": "data.jsonl", "rewards": None, "is_chat": True} | given
    return next_commands(algorithm, str(folder), **about)


def test_the_panel_says_where_and_how_it_went() -> None:
    text = panel(HISTORY, steps=4, max_steps=4)
    assert "runs/a" in text
    assert "4 in 1 h 2 min" in text
    assert "first 0.25, last 0.5 at step 4, best 0.75 at step 2" in text  # the reward, not the loss


def test_a_loss_is_best_where_it_is_lowest() -> None:
    text = panel([{k: v for k, v in entry.items() if k != "reward"} for entry in HISTORY], steps=2, max_steps=9)
    assert "first 0.5, last 0.2 at step 4, best 0.1 at step 2" in text
    assert "2 of 9 in 1 h 2 min: ended early" in text


def test_the_commands_have_the_paths_filled_in(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    (tmp_path / "adapter_config.json").touch()
    lines = commands(tmp_path, "grpo", rewards=["my.py:f", "string_check(reference='7')"])
    assert [line.split()[1] for line in lines] == ["chat", "generate", "eval", "look", "merge", "report"]
    assert all(f" {tmp_path}" in line for line in lines)
    assert any(
        f"prefrl eval {tmp_path} data.jsonl --reward_funcs my.py:f 'string_check(reference='" in x for x in lines
    )


def test_commands_that_the_run_has_no_use_for_are_left_out(tmp_path: Path) -> None:
    assert [line.split()[1] for line in commands(tmp_path, "sft")] == ["chat", "generate", "report"]
    assert commands(tmp_path, "reward") == [f"prefrl report {tmp_path}"]  # a reward model does not write


def test_a_model_without_a_chat_template_continues_texts(tmp_path: Path) -> None:
    assert commands(tmp_path, "sft", is_chat=False)[0] == f"prefrl generate {tmp_path} 'your prompt' --raw"
