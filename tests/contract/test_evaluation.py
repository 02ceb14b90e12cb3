"""Evaluation is the same before and after a training that changes nothing; what it cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefrl import ConfigError, GRPOConfig, SFTConfig
from prefrl.trainer.base.ignored_options import _ACCELERATOR, _OPTIONS
from tests.contract.cases import dataset_of, make_trainer

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
