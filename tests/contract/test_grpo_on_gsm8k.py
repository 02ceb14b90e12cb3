"""GRPO on real questions, in the forms that users give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from prefrl import GRPOConfig, GRPOTrainer
from prefrl.rewards import numeric_reward
from tests.assets import tiny_tokenizer
from tests.contract.cases import stopping_model, weights_of

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "gsm8k_8.jsonl").read_text().splitlines()]


def digits(completions: list[Any], **_: Any) -> list[float]:
    """Share of digits, for text and for messages: a signal that a random model gives."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def gsm8k(*, conversational: bool) -> Dataset:
    def prompt(question: str) -> Any:
        return [{"role": "user", "content": question}] if conversational else f"{question}\n"

    return Dataset.from_list([{"prompt": prompt(row["question"]), "answer": row["answer"]} for row in ROWS])


CASES: list[Any] = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"conversational": True}, {}, id="conversational"),
    pytest.param({"lora": True}, {"beta": 0.04}, id="lora"),
    pytest.param({}, {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 8}, id="reuse"),
    pytest.param({}, {"beta": 0.0}, id="beta 0"),
    pytest.param(
        {},
        {"reward_weights": [1.0, 0.5], "advantage_kwargs": {"multi_objective_aggregation": "normalize_then_sum"}},
        id="gdpo",
    ),
    pytest.param({"conversational": True, "lora": True}, {"mask_truncated_completions": True}, id="masked"),
]


@pytest.mark.parametrize(("form", "options"), CASES)
def test_trains_and_logs(form: dict[str, bool], options: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "logging_steps": 1,
        "log_completions": True,
        "num_completions_to_print": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    rewards = [numeric_reward, digits]
    given = list(rewards)
    trainer = GRPOTrainer(
        stopping_model(),
        rewards,
        GRPOConfig(**{**settings, **options}),
        gsm8k(conversational=form.get("conversational", False)),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if form.get("lora") else None,
    )
    before = weights_of(trainer.model)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(trainer.model).items())
    assert rewards == given
    first = trainer.state.log_history[0]
    for name in (
        "loss",
        "grad_norm",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "rewards/numeric_reward/mean",
        "rewards/digits/mean",
        "rewards/digits/std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "entropy",
        "clip_ratio/low_mean",
        "clip_ratio/high_max",
        "clip_ratio/region_mean",
        "num_tokens",
        "step_time",
    ):
        assert name in first, name
    assert ("kl" in first) == (options.get("beta", 0.04) > 0)
    assert (trainer.reference is None) == (options.get("beta", 0.04) == 0)
    table = pq.read_table(tmp_path / "completions" / "completions_00000.parquet")
    assert table.num_rows == 8 * options.get("steps_per_generation", 1)
