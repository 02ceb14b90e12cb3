"""Every online trainer and every preset raises a reward that is easy to raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefrl.trainer.presets import PRESETS
from tests.contract.cases import ONLINE, make_trainer

STEPS = 25
RISE = 0.2  # of a share that begins at about a half


def share_of_low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Tokens of the lower half of the vocabulary: 0.5 by chance."""
    return [sum(token < 64 for token in ids) / max(len(ids), 1) for ids in completion_ids]


# What a case needs beside its defaults, to learn within so few steps.
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 32,
    "max_completion_length": 8,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ONLINE}
CASES["ppo"] = ("ppo", {"critic_learning_rate": 1e-1, "num_iterations": 2})
CASES["ppo, model"] = ("ppo", {"critic": "model", "critic_learning_rate": 1e-2, "num_iterations": 2})
CASES["reinforce_plus_plus, baseline"] = (
    "reinforce_plus_plus",
    {"advantage_estimator": "reinforce_plus_plus_baseline"},
)
CASES |= {f"preset {name}": ("grpo", dict(preset.options)) for name, preset in PRESETS.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    algorithm, options = CASES[name]
    options = {key: min(value, 16) if key == "num_generations" else value for key, value in options.items()}
    trainer = make_trainer(algorithm, tmp_path, reward=share_of_low_tokens, rows=64, **COMMON | options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    before, after = (sum(entry["reward"] for entry in part) / 4 for part in (logs[:4], logs[-4:]))
    print(f"LEARN {name}: {before:.3f} -> {after:.3f}")
    assert after > before + RISE


def test_a_critic_comes_to_foresee_the_return(tmp_path: Path) -> None:
    options = {"critic_learning_rate": 1e-2, "num_iterations": 2, "max_steps": 60, "learning_rate": 1e-4}
    trainer = make_trainer("ppo", tmp_path, reward=share_of_low_tokens, rows=64, **COMMON | options)
    trainer.train()
    explained = [entry["val/explained_variance"] for entry in trainer.state.log_history if "reward" in entry]
    print("EXPLAINED", sum(explained[:6]) / 6, sum(explained[-6:]) / 6)
    assert sum(explained[-6:]) / 6 > sum(explained[:6]) / 6 + 0.1
