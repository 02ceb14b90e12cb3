"""Evaluation is the same before and after a training that changes nothing; its loss; what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EvalPrediction

from prefrl import ConfigError, RewardError, SFTTrainer
from prefrl.rewards.at_k import best_at_k, pass_at_k
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import read_entry
from prefrl.trainer.online.learner import state_of
from prefrl.types import Rollout
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    ragged_reward,
    stopping_model,
)

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


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online_dpo"])
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


def length(completions: list[str], key: list[str], **_: Any) -> list[float]:
    assert set(key) == {"k"}  # a column of the evaluation's rows alone
    return [float(len(text)) for text in completions]


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


# Evaluations have two rewards where the training has one.
OWN: dict[str, Any] = {"eval_reward_funcs": [length, constant], "eval_reward_weights": [0.5, -2.0]}


def rows_with_a_key(algorithm: str) -> Dataset:
    return dataset_of(algorithm, 5).map(lambda row: {**row, "key": "k"})


def test_rewards_of_evaluations_leave_training_alone_and_are_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 3, "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 1}
    plain = make_trainer("grpo", tmp_path / "plain", **options)
    plain.train()
    options |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "rewards/length/mean", **OWN}
    folder, rows = tmp_path / "own", rows_with_a_key("grpo")
    trainer = make_trainer("grpo", folder, eval_dataset=rows, **options)
    trainer.train()
    assert_same_weights(trainer.model, plain.model)
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    for entry in evaluated:
        assert entry["eval_reward"] == pytest.approx(0.5 * entry["eval_rewards/length/mean"] - 2.0)
        assert "eval_loss" not in entry
    assert not any("ragged_reward" in name for entry in evaluated for name in entry)
    assert not any("/length/" in name for entry in trainer.state.log_history if "loss" in entry for name in entry)
    options["eval_reward_funcs"] = {length: 1.0}  # belongs to no update, so another run may have others
    resumed = make_trainer("grpo", folder, eval_dataset=rows, **{**options, "eval_reward_weights": None})
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert_same_weights(resumed.model, plain.model)
    later = [entry for entry in resumed.state.log_history if "eval_reward" in entry][1:]
    means = [entry["eval_rewards/length/mean"] for entry in evaluated[1:]]
    assert [entry["eval_reward"] for entry in later] == [entry["eval_rewards/length/mean"] for entry in later] == means


@pytest.mark.parametrize("algorithm", ["ppo", "online_dpo"])
def test_every_online_trainer_has_rewards_of_evaluations(algorithm: str, tmp_path: Path) -> None:
    options = {"pass_at_k_kwargs": {"k": [2], "reward": "constant"}, "num_generations_eval": 2, **OWN}
    metrics = make_trainer(algorithm, tmp_path, eval_dataset=rows_with_a_key(algorithm), **options).evaluate()
    assert metrics["eval_pass@2"] == metrics["eval_rewards/constant/mean"] == 1.0
    assert metrics["eval_reward"] == pytest.approx(0.5 * metrics["eval_rewards/length/mean"] - 2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OWN, "reward 'length' needs 'key', which is not a column"),
        ({**OWN, "eval_reward_weights": [1.0]}, r"^eval_reward_weights=\[1.0\]: 1 weights for 2 rewards"),
        ({"eval_reward_weights": [1.0]}, "eval_reward_weights=.* has no effect .* Give eval_reward_funcs"),
        ({"eval_reward_funcs": "string_check"}, "^eval_reward_funcs='string_check': the grader string_check needs"),
        ({"eval_reward_funcs": 3}, "eval_reward_funcs=int: must be what reward_funcs may be, or None"),
    ],
)
def test_rewards_of_evaluations_that_cannot_work_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer("grpo", tmp_path, eval_dataset=dataset_of("grpo", 2), **options)


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


SOURCES = ["math", "code", "math", "code", None]
EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}
# An epoch of 6 steps.
OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 4, "rows": 24, "max_steps": -1, "num_train_epochs": 2}


def steps_of(trainer: Any, folder: Path) -> tuple[list[int], list[int]]:
    """The steps that were evaluated, and those that were saved."""
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return evaluated, sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("options", "evaluated", "saved"),
    [
        ({}, [6, 12], [6, 12]),
        ({"eval_epochs": 0.5, "save_epochs": 2.0}, [3, 6, 9, 12], [12]),
        # Each of 6 steps completes a fifth of an epoch but the first: 0.17, 0.33, 0.5, 0.67, 0.83, 1.
        ({"eval_epochs": 0.2, "num_train_epochs": 1}, [2, 3, 4, 5, 6], [6]),
        ({"eval_epochs": 1.5, "save_epochs": 0.75, "num_train_epochs": 3}, [9, 18], [5, 9, 14, 18]),
        # The end of training counts as the end of an epoch.
        ({"eval_epochs": 3.0, "save_epochs": 0.5, "max_steps": 8}, [8], [3, 6, 8]),
        ({"eval_epochs": 0.5, "eval_delay": 0.7}, [6, 9, 12], [6, 12]),
    ],
    ids=str,
)
def test_intervals_are_counted_in_epochs(
    options: dict[str, Any], evaluated: list[int], saved: list[int], tmp_path: Path
) -> None:
    trainer = make_trainer("sft", tmp_path, eval_dataset=dataset_of("sft", 2), **{**OPTIONS, **EPOCH, **options})
    trainer.train()
    assert steps_of(trainer, tmp_path) == (evaluated, saved)


def test_a_run_that_is_resumed_between_two_evaluations_is_exact_and_goes_on_counting(tmp_path: Path) -> None:
    """With dropout, and against a run without evaluations: they draw no random number of training's."""
    stopping_model(attention_dropout=0.5).save_pretrained(tmp_path / "model")
    options = {**OPTIONS, "model": str(tmp_path / "model"), "optim": "adamw_torch", "learning_rate": 1e-2}
    plain = make_trainer("sft", tmp_path / "plain", **options)
    plain.train()
    evaluating = {**EPOCH, "eval_epochs": 1 / 3, "save_epochs": 0.5, "evaluate_training_set": True}
    evaluating |= {"max_eval_samples": 2, "eval_dataset": dataset_of("sft", 4)}
    make_trainer("sft", tmp_path / "run", **options, **evaluating).train()
    resumed = make_trainer("sft", tmp_path / "run", **options, **evaluating)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert steps_of(resumed, tmp_path / "run") == ([2, 4, 6, 8, 10, 12], [3, 6, 9, 12])
    assert_same_weights(resumed, plain)


def test_an_interval_of_no_epochs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_epochs=0\.0: must be a number > 0"):
        make_trainer("sft", tmp_path, eval_dataset=dataset_of("sft", 2), **EPOCH, eval_epochs=0.0)


@pytest.mark.parametrize("streams", [False, True])
def test_an_evaluation_of_the_first_rows_is_that_of_a_dataset_of_them(streams: bool, tmp_path: Path) -> None:
    rows = dataset_of("sft", 7)
    few = make_trainer("sft", tmp_path, eval_dataset=rows.take(3)).evaluate()
    given: Any = rows.to_iterable_dataset() if streams else rows
    trainer = make_trainer("sft", tmp_path, eval_dataset=given, max_eval_samples=3)
    assert trainer.evaluate()["eval_loss"] == few["eval_loss"]
    assert trainer.evaluate(rows)["eval_loss"] == few["eval_loss"]
    assert trainer.evaluate({"a": rows})["eval_a_loss"] == few["eval_loss"]
    assert (
        make_trainer("sft", tmp_path, eval_dataset=rows.take(3), max_eval_samples=5).evaluate()["eval_loss"]
        == (few["eval_loss"])
    )


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_the_training_set_is_evaluated_like_a_dataset_with_its_rows(algorithm: str, tmp_path: Path) -> None:
    data = {"eval_dataset": dataset_of(algorithm, 3), "train_dataset": dataset_of(algorithm, 9)}
    trainer = make_trainer(algorithm, tmp_path, evaluate_training_set=True, max_eval_samples=5, **data)
    found = trainer.evaluate()
    plain = make_trainer(algorithm, tmp_path, **data)
    assert found["eval_loss"] == plain.evaluate()["eval_loss"]
    assert found["eval_train_loss"] == plain.evaluate(dataset_of(algorithm, 5))["eval_loss"]
    assert not any(name.startswith("eval_train") for name in trainer.evaluate(dataset_of(algorithm, 2)))


def test_two_evaluations_called_train_and_one_without_an_end_are_refused(tmp_path: Path) -> None:
    rows = dataset_of("sft", 2)
    with pytest.raises(ConfigError, match="an eval_dataset named 'train'"):
        make_trainer("sft", tmp_path, eval_dataset={"train": rows}, evaluate_training_set=True)
    with pytest.raises(ConfigError, match="Set max_eval_samples"):
        make_trainer("sft", tmp_path, eval_dataset=rows, evaluate_training_set=True, streams=True)
    with pytest.raises(ConfigError, match="there is no train_dataset"):
        make_trainer("sft", tmp_path, eval_dataset=rows, evaluate_training_set=True, train_dataset=None)


def test_evaluations_sample_in_their_own_way(tmp_path: Path) -> None:
    """With only the most likely token to choose from, all samples of a prompt are one."""
    options: dict[str, Any] = {"eval_sampling_kwargs": {"top_k": 1, "repetition_penalty": 1.5}, "min_p": 0.1}
    trainer: Any = make_trainer("grpo", tmp_path, eval_dataset=dataset_of("grpo", 3), **options)
    of_evaluation, of_training = trainer.args.evaluation_sampling_params(), trainer.args.sampling_params()
    assert (of_evaluation.top_k, of_evaluation.repetition_penalty, of_evaluation.min_p) == (1, 1.5, 0.1)
    assert (of_training.top_k, of_training.repetition_penalty) == (None, 1.0)
    assert trainer.evaluate()["eval_frac_reward_zero_std"] == 1.0


def with_sources(num_rows: int = 5) -> Dataset:
    return dataset_of("grpo", num_rows).add_column("data_source", SOURCES[:num_rows])


def answering(completions: list[str], log_extra: Callable[[str, list[Any]], None], **_: Any) -> list[float]:
    """`ragged_reward`, and whether a completion is long as its answer."""
    log_extra("answer", [None if len(text) < 4 else len(text) > 8 for text in completions])
    return ragged_reward(completions)


class Kept:
    """A user's `compute_metrics` that keeps completions, rewards and rows."""

    def __call__(self, given: Any) -> dict[str, float]:
        self.texts, self.rewards, self.rows = given
        return {}


def test_an_evaluation_says_how_good_k_samples_of_a_prompt_are_for_each_source(tmp_path: Path) -> None:
    """Against the samples that `compute_metrics` sees: 6 of each prompt."""
    seen, threshold = Kept(), 1.2
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=answering,
        eval_dataset=with_sources(),
        compute_metrics=seen,
        num_generations_eval=6,
        pass_at_k_kwargs={"k": [1, 3], "threshold": threshold, "answer": "answer", "reward": "answering"},
    )
    metrics = trainer.evaluate()
    rewards = seen.rewards.reshape(5, 6)
    sources = np.array([row["data_source"] for row in seen.rows]).reshape(5, 6)[:, 0]
    assert 0 < (rewards >= threshold).mean() < 1
    for suffix, which in (("", sources == sources), ("/math", sources == "math"), ("/code", sources == "code")):
        for k in (1, 3):
            passed = [pass_at_k(6, int((row >= threshold).sum()), k) for row in rewards[which]]
            best = [best_at_k(row.tolist(), k) for row in rewards[which]]
            assert metrics[f"eval_pass@{k}{suffix}"] == pytest.approx(np.mean(passed))
            assert metrics[f"eval_best@{k}{suffix}"] == pytest.approx(np.mean(best))
            assert metrics[f"eval_pass@{k}_low{suffix}"] < np.mean(passed) < metrics[f"eval_pass@{k}_high{suffix}"]
            assert 0 <= metrics[f"eval_maj@{k}{suffix}"] <= 1
        if suffix:
            assert metrics[f"eval_reward{suffix}"] == pytest.approx(rewards[which].mean())
    assert not any("/None" in name for name in metrics)


def test_completions_without_the_reward_that_counts_are_left_out(tmp_path: Path) -> None:
    def of_math(data_source: list[str | None], **_: Any) -> list[float | None]:
        return [1.0 if source == "math" else None for source in data_source]

    trainer: Any = make_trainer(
        "grpo",
        tmp_path,
        reward=[answering, of_math],
        train_dataset=with_sources(),
        eval_dataset=with_sources(),
        pass_at_k_kwargs={"k": [2], "reward": "of_math", "answer": "answer"},
    )
    metrics = trainer.evaluate()
    assert metrics["eval_pass@2"] == metrics["eval_pass@2/math"] == 1.0
    assert "eval_pass@2/code" not in metrics
    # A process may have no prompts.
    assert trainer._evaluation.report(Collected([]), name="eval", step=0) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": [1, 5]}, "k=5: must be from 1 to 4, the samples of each prompt .* Set num_generations_eval=5"),
        ({"k": [0]}, "k=0: must be from 1 to 4"),
        ({"k": [1], "reward": "none"}, "reward='none': must be one of ragged_reward"),
    ],
    ids=str,
)
def test_sizes_and_rewards_that_there_are_not_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"pass_at_k_kwargs.*{message}"):
        make_trainer("grpo", tmp_path, pass_at_k_kwargs=given)


def test_answers_that_no_reward_logs_are_refused(tmp_path: Path) -> None:
    kwargs = {"k": [1], "answer": "solution"}
    trainer = make_trainer(
        "grpo", tmp_path, reward=answering, eval_dataset=dataset_of("grpo", 2), pass_at_k_kwargs=kwargs
    )
    with pytest.raises(ConfigError, match="answer='solution': no reward logs this column; they log answer"):
        trainer.evaluate()


def test_some_completions_of_each_evaluation_are_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts, five completions: one of each prompt, then a second one of two, the same prompts each time."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "log_val_generations": 5}
    rows = {"a/b": with_sources(3)}
    trainer = make_trainer("grpo", tmp_path, reward=answering, eval_dataset=rows, **options)
    trainer.train()
    files = sorted((tmp_path / "evaluations").iterdir())
    assert [path.name for path in files] == ["eval_a_b_00001.parquet", "eval_a_b_00002.parquet"]
    first, second = (read_entry(path).parts[0] for path in files)
    prompts = [rollout.prompt for rollout in first.rollouts]
    assert len(set(prompts[:3])) == 3
    assert len(set(prompts[3:])) == 2
    assert [rollout.prompt for rollout in second.rollouts] == prompts
    assert [rollout.reward for rollout in first.rollouts] == pytest.approx(
        ragged_reward([rollout.text for rollout in first.rollouts]), rel=1e-6
    )
    assert len(first.logged_columns["answer"]) == 5
    assert capsys.readouterr().out.count("Completions of eval_a/b after step") == 2
