"""The panel after training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from prefrl.scripts.ending import ending

HISTORY = [
    {"step": 1, "loss": 0.5, "reward": 0.25},
    {"step": 2, "loss": 0.1, "reward": 0.75},
    {"step": 3, "loss": 0.3, "reward": float("nan")},
    {"step": 4, "loss": 0.2, "reward": 0.5},
    {"step": 4, "train_runtime": 3723.0},
]


def shown(folder: Path, algorithm: str, **given: Any) -> str:
    about = {"steps": 4, "max_steps": 4, "dataset": "data.jsonl", "rewards": None, "is_chat": True}
    about |= {"folder": str(folder), **given}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(ending(algorithm, HISTORY, **about))
    return console.export_text()


def test_the_panel_says_where_how_it_went_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    (tmp_path / "adapter_config.json").touch()
    text = shown(tmp_path, "grpo", rewards=["my.py:f", "string_check(reference='7')"])
    assert "4 in 1 h 2 min" in text
    assert "first 0.25, last 0.5, best 0.75 at step 2" in text  # the reward, not the loss
    for command in ("chat", "generate", "look", "merge"):
        assert f"prefrl {command} {tmp_path}" in text
    assert f"prefrl eval {tmp_path} data.jsonl --reward_funcs my.py:f 'string_check(reference='" in text


def test_a_loss_is_best_where_it_is_lowest(tmp_path: Path) -> None:
    history = [{name: value for name, value in entry.items() if name != "reward"} for entry in HISTORY]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(
        ending("sft", history, folder=str(tmp_path), steps=2, max_steps=9, dataset=None, rewards=None, is_chat=True)
    )
    text = console.export_text()
    assert "first 0.5, last 0.2, best 0.1 at step 2" in text
    assert "2 of 9 in 1 h 2 min: ended early" in text
    assert not any(f"prefrl {command}" in text for command in ("eval", "look", "merge"))


def test_a_reward_model_is_not_asked_to_write(tmp_path: Path) -> None:
    assert "prefrl chat" not in shown(tmp_path, "reward")


def test_a_model_without_a_chat_template_continues_texts(tmp_path: Path) -> None:
    text = shown(tmp_path, "sft", is_chat=False)
    assert "prefrl chat" not in text
    assert f"prefrl generate {tmp_path} ... --raw" in text
