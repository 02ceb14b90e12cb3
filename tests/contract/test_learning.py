"""What learns, and what a real task logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from benchmarks import learning
from prefrl import GRPOConfig, GRPOTrainer
from prefrl.rewards import numeric_reward
from prefrl.scripts import demo as demo_tiny
from tests.assets import tiny_tokenizer
from tests.contract.cases import make_trainer, stopping_model, weights_of
from tests.launch import run_module

SEED = 1
GRPO_STEPS = 110  # the demo takes 400
REQUIRED_GAIN = 0.15
# Cosine of the angle between an update and the gradient of the expected reward: 0.28 to 0.71 after two steps. Of two
# directions chosen at random it is below 0.01.
LEAST_COSINE = 0.2
PLAIN = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.02}

# Cases that differ from others here in the loss alone, whose gradient is that of other libraries: see tests/golden.
LOSSES = {"loss dppo"} | {
    f"preset {name}"
    for name in ("dr_grpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "vespo", "luspo", "clip_cov", "kl_cov")
}

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo with fewer steps of GRPO."""
    folder = tmp_path_factory.mktemp("demo")
    run_module("tests.contract.demo_worker", folder, str(SEED), str(GRPO_STEPS), seconds=1800)
    return folder


@pytest.fixture(scope="session")
def weights(demo: Path) -> Weights:
    """Of its model after supervised training."""
    found: Weights = torch.load(demo / "after_sft.pt")
    return found


@pytest.fixture(scope="session")
def gradient(weights: Weights) -> Weights:
    """Of the expected reward over every fourth question, at these weights; nothing is sampled."""
    model = demo_tiny.make_model(SEED)
    model.load_state_dict(weights)
    questions = demo_tiny.make_questions(SEED)[0]
    learning.expected_reward(model, questions.select(range(0, len(questions), 4))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_the_demo_learns(demo: Path) -> None:
    summary = json.loads((demo / "summary.json").read_text(encoding="utf-8"))
    assert summary["grpo_steps"] == GRPO_STEPS
    assert summary["accuracy_grpo"] - summary["accuracy_sft"] > REQUIRED_GAIN


@pytest.mark.parametrize("name", [name for name in learning.CASES if name not in LOSSES])
def test_updates_point_towards_the_reward(name: str, weights: Weights, gradient: Weights, tmp_path: Path) -> None:
    trainer = learning.make_trainer(name, SEED, weights, tmp_path, **PLAIN)
    trainer.train()
    after = trainer.policy.state_dict()
    update = torch.cat([(after[key] - weights[key]).flatten() for key in gradient])
    best = torch.cat([gradient[key].flatten() for key in gradient])
    assert torch.cosine_similarity(update, best, dim=0) > LEAST_COSINE


def is_long_prompt(prompts: list[str], **_: Any) -> list[float]:
    return [float(len(prompt.split()) > 3) for prompt in prompts]


@pytest.mark.parametrize(
    ("critic", "options", "least"),
    [
        # The hidden states of random weights tell a head less than a model of its own can learn.
        ("head", {"critic_learning_rate": 1e-3, "vf_coef": 1.0}, 0.3),
        ("model", {"critic_learning_rate": 1e-2}, 0.9),
    ],
)
def test_a_critic_comes_to_foresee_a_return_that_the_prompt_decides(
    critic: str, options: dict[str, Any], least: float, tmp_path: Path
) -> None:
    common = {"max_steps": 60, "num_iterations": 2, "per_device_train_batch_size": 32, "max_completion_length": 8}
    common |= {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0, "critic": critic}
    trainer = make_trainer("ppo", tmp_path, reward=is_long_prompt, rows=64, **common | options)
    trainer.train()
    explained = [entry["val/explained_variance"] for entry in trainer.state.log_history if "reward" in entry]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # a new head gives 0 everywhere
    assert sum(explained[-10:]) / 10 > least


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
