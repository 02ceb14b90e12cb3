"""Evaluation is the same before and after a training that changes nothing; what it cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from prefrl import ConfigError, GRPOConfig, SFTConfig, SFTTrainer
from prefrl.trainer.base.ignored_options import _ACCELERATOR, _OPTIONS
from tests.contract.cases import dataset_of, make_trainer, ragged_reward, stopping_model

TIMES = ("runtime", "per_second", "time/", "epoch")


def metrics_of(trainer: Any) -> dict[str, float]:
    return {name: value for name, value in trainer.evaluate().items() if not any(part in name for part in TIMES)}


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "reward", "grpo", "ppo"])
def test_mixed_precision_is_that_of_training_before_training_too(algorithm: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_dataset": dataset_of(algorithm, 6), "learning_rate": 0.0, "num_train_epochs": 1}
    if algorithm == "ppo":
        options["critic_learning_rate"] = 1e-30
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


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_predict_is_refused_with_what_to_call_instead(algorithm: str, tmp_path: Path) -> None:
    trainer = make_trainer(algorithm, tmp_path)
    with pytest.raises(
        ConfigError, match=r"predict\(\) is not supported: .*evaluate\(dataset, metric_key_prefix='test'\)"
    ):
        trainer.predict(dataset_of(algorithm))
    metrics = trainer.evaluate(dataset_of(algorithm, 4), metric_key_prefix="test")
    assert all(name == "epoch" or name.startswith("test_") for name in metrics)


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


def test_metrics_that_are_no_numbers_by_name_are_refused(tmp_path: Path) -> None:
    results = {"a mapping of names": [0.5], "'mine' is .*: must be a number": {"mine": [0.5]}}
    for message, result in results.items():
        trainer = make_trainer("sft", tmp_path, eval_dataset=dataset_of("sft", 2), compute_metrics=Seen(result))
        with pytest.raises(ConfigError, match=message):
            trainer.evaluate()
    with pytest.raises(ConfigError, match="preprocess_logits_for_metrics: no logits are kept here"):
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


def test_every_row_of_the_table_has_a_case() -> None:
    assert set(SET) == {*_OPTIONS, *_ACCELERATOR}


@pytest.mark.parametrize("cls", [SFTConfig, GRPOConfig])
@pytest.mark.parametrize("name", SET)
def test_an_option_that_nothing_reads_is_refused_with_a_remedy(name: str, cls: Any, tmp_path: Path) -> None:
    option = {"accelerator_config": {name: SET[name]}} if name in _ACCELERATOR else {name: SET[name]}
    if name == "include_for_metrics":
        option["eval_strategy"] = "no"
    row = _OPTIONS.get(name) or _ACCELERATOR[name]
    with pytest.raises(ConfigError, match=f"{name}=.* has no effect because") as caught:
        cls(output_dir=str(tmp_path), use_cpu=True, report_to="none", **option)
    assert row.remedy in str(caught.value)
