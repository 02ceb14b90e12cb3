"""Evaluation is the same before and after a training that changes nothing; its loss; what it cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from prefrl import ConfigError, GRPOConfig, RewardError, SFTConfig, SFTTrainer
from prefrl.options.run_rules import IGNORED_PARTS_RULES, IGNORED_RULES
from prefrl.rollout.collect import Collected
from prefrl.trainer.online.learner import state_of
from prefrl.types import Rollout
from tests.contract.cases import ONLINE, dataset_of, make_trainer, ragged_reward, stopping_model

PROGRESS = ("runtime", "per_second", "time/", "epoch", "num_tokens")


def metrics_of(trainer: Any) -> dict[str, float]:
    return {name: value for name, value in trainer.evaluate().items() if not any(part in name for part in PROGRESS)}


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "reward", "grpo", "ppo"])
def test_mixed_precision_is_that_of_training_before_training_too(algorithm: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_dataset": dataset_of(algorithm, 6), "learning_rate": 0.0, "num_train_epochs": 1}
    if algorithm == "ppo":
        options["critic_learning_rate"] = 1e-300  # 0 in float32
    trainer = make_trainer(algorithm, tmp_path, bf16=True, **options)
    before = metrics_of(trainer)
    trainer.train()
    assert metrics_of(trainer) == before
    if algorithm in ("sft", "dpo", "kto", "reward"):
        assert metrics_of(make_trainer(algorithm, tmp_path, **options)) != before


def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path: Path) -> None:
    """Five rows of different lengths, in batches of two: each token counts once."""
    few, all_rows = (
        metrics_of(make_trainer("sft", tmp_path, eval_dataset=dataset_of("sft", 5), per_device_eval_batch_size=size))
        for size in (2, 5)
    )
    assert few["eval_loss"] == pytest.approx(all_rows["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("algorithm", ONLINE)
def test_the_best_model_of_an_online_training_is_found_by_its_reward(algorithm: str, tmp_path: Path) -> None:
    saved = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options = {**saved, "load_best_model_at_end": True, "max_steps": 2, "learning_rate": 0.5}
    trainer = make_trainer(algorithm, tmp_path, eval_dataset=dataset_of(algorithm, 4), **options)
    trainer.train()
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert trainer.state.best_metric == max(rewards)
    assert trainer.state.best_model_checkpoint is not None


def test_the_loss_of_an_online_evaluation_is_that_of_a_step_on_all_its_completions(tmp_path: Path) -> None:
    """In the first step all ratios are 1: the loss is -sum(A length) / sum(length), whatever the batches."""
    losses = []
    for size in (4, 20):
        options = {"per_device_eval_batch_size": size, "scale_rewards": "batch", "beta": 0.0}
        trainer: Any = make_trainer("grpo", tmp_path, eval_dataset=dataset_of("grpo", 5), **options)
        rollouts = watched(trainer)
        losses.append(metrics_of(trainer)["eval_loss"])
        lengths = [len(rollout.sampled_ids) for rollout in rollouts]
        expected = -sum(rollout.advantage * n for rollout, n in zip(rollouts, lengths, strict=True)) / sum(lengths)
        assert len(rollouts) == 20
        assert losses[-1] == pytest.approx(expected, rel=1e-4)
        assert abs(expected) > 0.01
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def watched(trainer: Any) -> list[Rollout]:
    """The rollouts that the loss of an evaluation is about to be computed from."""
    seen: list[Rollout] = []
    take = trainer._evaluation.take

    def watch() -> Collected:
        collected: Collected = take()
        seen[:] = collected.rollouts
        return collected

    trainer._evaluation.take = watch
    return seen


def test_an_evaluation_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    fails = [False, True, False, False]  # the second batch, once

    def reward(completions: list[str], **_: Any) -> list[float]:
        if fails and fails.pop(0):
            raise ValueError("unlucky")
        return ragged_reward(completions)

    trainer: Any = make_trainer(
        "grpo", tmp_path, reward=reward, eval_dataset=dataset_of("grpo", 2), per_device_eval_batch_size=4
    )
    with pytest.raises(RewardError, match="unlucky"):
        trainer.evaluate()
    rollouts = watched(trainer)
    trainer.evaluate()
    assert len(rollouts) == 2 * 4


def test_an_online_evaluation_logs_what_a_step_logs_of_its_completions(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, eval_dataset=dataset_of("grpo", 4), beta=0.1, entropy_coef=0.1)
    trainer.train()
    (step,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    of_training = ("time/", "grad_norm", "learning_rate", "step_time", "health/", "rewards/ragged_reward/none")
    names = {name for name in step if not name.startswith(of_training)} - {"epoch", "step"}
    assert {f"eval_{name}" for name in names} <= {*trainer.evaluate()}


def test_state_that_adapts_in_training_is_left_alone_by_an_evaluation(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "kl_kwargs": {"target": 0.01, "horizon": 10},
        "beta": 0.1,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "reward_shaping_kwargs": {"normalize": True},
    }
    trainer: Any = make_trainer("grpo", tmp_path, eval_dataset=dataset_of("grpo", 4), max_steps=2, **options)
    trainer.train()
    before = state_of(trainer.learner)
    assert before["learner"]["moments"]["count"] > 0
    trainer.evaluate()
    assert state_of(trainer.learner) == before
    assert not trainer.objective.adaptation.observed.any()


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_evaluation_says_how_many_tokens_were_trained_on_before(algorithm: str, tmp_path: Path) -> None:
    trainer = make_trainer(algorithm, tmp_path, eval_dataset=dataset_of(algorithm, 4))
    assert trainer.evaluate()["eval_num_tokens"] == 0
    trainer.train()
    (num_tokens,) = (entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry)
    assert trainer.evaluate()["eval_num_tokens"] == num_tokens > 0


class Seen:
    """A user's `compute_metrics` that keeps what it gets."""

    def __init__(self, result: Any = None) -> None:
        self.result = {"mine": np.float32(0.5), "eval_other": 2} if result is None else result

    def __call__(self, given: EvalPrediction) -> Any:
        self.given = given
        return self.result


@pytest.mark.parametrize("packed", [False, True])
def test_compute_metrics_gets_the_most_likely_tokens_where_the_labels_expect_them(
    packed: bool, tmp_path: Path
) -> None:
    seen = Seen()
    options: dict[str, Any] = {"packing": packed, "max_length": 64, "per_device_eval_batch_size": 2}
    trainer = make_trainer("sft", tmp_path, eval_dataset=dataset_of("sft", 5), compute_metrics=seen, **options)
    metrics = trainer.evaluate()
    assert (metrics["eval_mine"], metrics["eval_other"]) == (0.5, 2.0)
    whole = make_trainer("sft", tmp_path, train_dataset=dataset_of("sft", 5)).train_dataset
    rows = [row["input_ids"] for row in whole]
    predictions, labels = seen.given
    assert predictions.shape == labels.shape == (5, max(map(len, rows)))
    found = {}
    for predicted, label in zip(predictions, labels, strict=True):
        found[tuple(label[label != -100])] = (predicted[:-1][label[1:] != -100], int((label != -100).argmax()))
    for row, learned in zip(rows, whole["trainable"], strict=True):
        start = learned.index(True)
        logits = trainer.policy(torch.tensor([row])).logits[0]
        predicted, first = found[tuple(row[start:])]
        assert first == start
        assert predicted.tolist() == logits[start - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "cpo", "reward"])
def test_compute_metrics_gets_the_rewards_of_pairs(algorithm: str, tmp_path: Path) -> None:
    seen = Seen()
    options: dict[str, Any] = {"eval_dataset": dataset_of(algorithm, 5), "compute_metrics": seen}
    if algorithm == "dpo":
        options["ref_model"] = stopping_model(seed=5)
    metrics = make_trainer(algorithm, tmp_path, per_device_eval_batch_size=2, **options).evaluate()
    accuracy, margin = ("accuracy", "margin") if algorithm == "reward" else ("rewards/accuracies", "rewards/margins")
    predictions, labels = seen.given
    assert predictions.shape == (5, 2)
    assert (predictions.argmax(1) == labels).mean() == pytest.approx(metrics[f"eval_{accuracy}"])
    assert (predictions[:, 0] - predictions[:, 1]).mean() == pytest.approx(metrics[f"eval_{margin}"], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["kto", "bco"])
def test_compute_metrics_gets_the_rewards_of_rows(algorithm: str, tmp_path: Path) -> None:
    seen, dataset = Seen(), dataset_of(algorithm, 5)
    reference = stopping_model(seed=5)
    trainer = make_trainer(algorithm, tmp_path, eval_dataset=dataset, ref_model=reference, compute_metrics=seen)
    metrics = trainer.evaluate()
    predictions, labels = seen.given
    assert labels.tolist() == [int(label) for label in dataset["label"]]
    assert predictions[labels == 1].mean() == pytest.approx(metrics["eval_rewards/chosen"], rel=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_compute_metrics_gets_completions_rewards_and_dataset_rows(algorithm: str, tmp_path: Path) -> None:
    seen = Seen()
    trainer = make_trainer(algorithm, tmp_path, eval_dataset=dataset_of(algorithm, 5), compute_metrics=seen)
    metrics = trainer.evaluate()
    texts, rewards, rows = seen.given
    assert rewards.tolist() == pytest.approx(ragged_reward(texts))
    assert rewards.mean() == pytest.approx(metrics["eval_reward"])
    assert {row["prompt"] for row in rows} == set(dataset_of(algorithm, 5)["prompt"])


@pytest.mark.parametrize("algorithm", ["sft", "reward", "grpo"])
def test_predict_returns_what_compute_metrics_gets(algorithm: str, tmp_path: Path) -> None:
    seen, dataset = Seen(), dataset_of(algorithm, 4)
    with_metrics = make_trainer(algorithm, tmp_path / "metrics", compute_metrics=seen)
    evaluated = with_metrics.evaluate(dataset, metric_key_prefix="test")
    trainer = make_trainer(algorithm, tmp_path / "plain")
    output = trainer.predict(dataset)
    np.testing.assert_array_equal(output.predictions, seen.given.predictions)
    np.testing.assert_array_equal(output.label_ids, seen.given.label_ids)
    assert output.metrics["test_loss"] == evaluated["test_loss"]
    assert "test_mine" not in output.metrics
    assert with_metrics.predict(dataset).metrics["test_mine"] == 0.5
    assert trainer.state.log_history == []
    assert len(trainer.predict(trainer.train_dataset).label_ids) > 0
    with pytest.raises(ConfigError, match=r"test_dataset is dict: predict\(\) needs one dataset"):
        trainer.predict({"part": dataset})


def test_metrics_that_are_no_numbers_by_name_are_refused(tmp_path: Path) -> None:
    results = {"a mapping of names": [0.5], "'mine' is .*: must be a number": {"mine": [0.5]}}
    for message, result in results.items():
        trainer = make_trainer("sft", tmp_path, eval_dataset=dataset_of("sft", 2), compute_metrics=Seen(result))
        with pytest.raises(ConfigError, match=message):
            trainer.evaluate()
    with pytest.raises(ConfigError, match="preprocess_logits_for_metrics=function: must be None: no logits are kept"):
        SFTTrainer("no/such-model", preprocess_logits_for_metrics=lambda logits, labels: logits)  # type: ignore[call-arg]


SET: dict[str, Any] = {
    "average_tokens_across_devices": False,
    "label_smoothing_factor": 0.1,
    "include_num_input_tokens_seen": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "prediction_loss_only": True,
    "eval_accumulation_steps": 3,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "include_for_metrics": ["loss"],
    "batch_eval_metrics": True,
    "label_names": ["labels"],
    "length_column_name": "size",
    "dataloader_in_order": False,
    "split_batches": True,
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": False,
}


PARTS = {name for row in IGNORED_PARTS_RULES for name in row.example.options["accelerator_config"]}


def test_every_row_of_the_table_has_a_case() -> None:
    names = {name for row in IGNORED_RULES for name in row.example.options}
    assert set(SET) == names | PARTS


@pytest.mark.parametrize("cls", [SFTConfig, GRPOConfig])
@pytest.mark.parametrize("name", SET)
def test_an_option_that_nothing_reads_is_refused_with_a_remedy(name: str, cls: Any, tmp_path: Path) -> None:
    option = {"accelerator_config": {name: SET[name]}} if name in PARTS else {name: SET[name]}
    if name == "include_for_metrics":
        option["eval_strategy"] = "no"
    with pytest.raises(ConfigError, match=rf"{name}=.* has no effect because .+\. [A-Z]"):
        cls(output_dir=str(tmp_path), use_cpu=True, report_to="none", **option)
