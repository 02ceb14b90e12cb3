"""When evaluations take place, what they evaluate, how they sample, and what they say about several samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from prefrl import ConfigError
from prefrl.rewards.at_k import best_at_k, pass_at_k
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import read_entry
from tests.contract.cases import dataset_of, make_trainer, ragged_reward, stopping_model, weights_of

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
    expected, actual = weights_of(plain.model), weights_of(resumed.model)
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


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
