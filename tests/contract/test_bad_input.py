"""Input that cannot work raises a typed error that names the field, the value, what is allowed and what to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from prefrl import ConfigError, DataError, GRPOConfig, GRPOTrainer, PrefrlError, RewardError, SFTConfig, SFTTrainer
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer
from tests.patience import PATIENCE


def grpo(
    tmp_path: Path,
    *,
    dataset: Any = None,
    reward: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return GRPOTrainer(
        tiny_model(),
        reward or (lambda completions, **_: [0.0] * len(completions)),
        config,
        Dataset.from_list([{"prompt": "one"}, {"prompt": "two, three"}]) if dataset is None else dataset,
        processing_class=tokenizer or tiny_tokenizer(),
    )


def sft(tmp_path: Path, dataset: Any, **options: Any) -> SFTTrainer:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    return SFTTrainer(tiny_model(), config, train_dataset=dataset, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_several_splits_are_no_dataset_to_train_on(tmp_path: Path, algorithm: str) -> None:
    splits = DatasetDict({"train": dataset_of(algorithm), "test": dataset_of(algorithm, 4)})
    message = r"train_dataset is a DatasetDict with the splits 'train', 'test': .* train_dataset=ds\['train'\]"
    with pytest.raises(DataError, match=message):
        make_trainer(algorithm, tmp_path, train_dataset=splits)
    with pytest.raises(DataError, match=r"dict with the splits 'a': .*ds\['a'\]"):
        make_trainer(algorithm, tmp_path, train_dataset={"a": dataset_of(algorithm)})


def test_several_splits_are_evaluated_by_name(tmp_path: Path) -> None:
    splits = DatasetDict({"easy": dataset_of("sft", 4), "hard": dataset_of("sft", 6)})
    trainer = make_trainer("sft", tmp_path, eval_dataset=splits, eval_strategy="steps", eval_steps=1)
    trainer.train()
    logged = {name for logs in trainer.state.log_history for name in logs}
    assert {"eval_easy_loss", "eval_hard_loss"} <= logged
    with pytest.raises(DataError, match=r"eval_dataset\['x'\] is a DatasetDict"):
        trainer.evaluate({"x": splits})


def needs_column(completions: list[str], answer: list[str]) -> list[float]:
    return [1.0] * len(completions)


DATA_CASES: list[Any] = [
    pytest.param({"dataset": Dataset.from_list([{"promt": "a"}])}, DataError, r"prompt.*promt", id="missing prompt"),
    pytest.param({"dataset": Dataset.from_dict({"prompt": []})}, DataError, "0 rows", id="empty dataset"),
    pytest.param({"dataset": [{"prompt": "a"}]}, DataError, "Dataset", id="list"),
    pytest.param({"dataset": Dataset.from_list([{"prompt": "a"}])}, DataError, "1 prompts.*needs 2", id="too few"),
    pytest.param({"dataset": Dataset.from_list([{"prompt": "a"}, {"prompt": None}])}, DataError, "1", id="None"),
    pytest.param({"dataset": Dataset.from_list([{"prompt": "a"}, {"prompt": ""}])}, DataError, "1", id="empty prompt"),
    pytest.param(
        {"truncation_mode": "error", "max_prompt_length": 5}, DataError, "row 1.*10.*5", id="over-long prompt"
    ),
    pytest.param({"reward": needs_column}, ConfigError, "needs_column.*answer", id="missing reward column"),
    pytest.param({"reward": "no/such-model-anywhere"}, PrefrlError, "no/such-model-anywhere", id="reward model"),
    pytest.param({"reward": 3}, ConfigError, "reward_funcs=int: must be", id="reward of another kind"),
    pytest.param({"reward_weights": [1.0, 2.0]}, ConfigError, "reward_weights", id="weights"),
]


@pytest.mark.parametrize(("given", "error", "message"), DATA_CASES)
def test_refused_before_training(given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        grpo(tmp_path, **given)


def _raises(**_: Any) -> list[float]:
    raise KeyError("answer")


def _sleeps(**_: Any) -> list[float]:
    time.sleep(8)  # shorter than until its process would be ended
    return []


async def _sleeps_async(**_: Any) -> list[float]:
    await asyncio.sleep(600)
    return []


def _returns(value: Any) -> Callable[..., Any]:
    def reward(completions: list[str], **_: Any) -> Any:
        return value(completions)

    return reward


REWARD_CASES: list[Any] = [
    pytest.param(_returns(lambda c: [1.0]), r"reward.*1.*8", id="wrong length"),
    pytest.param(_returns(lambda c: [0.0, float("nan")] + [0.0] * 6), r"reward.*1.*nan", id="nan"),
    pytest.param(_returns(lambda c: [float("inf")] * 8), r"reward.*0.*inf", id="inf"),
    pytest.param(_returns(lambda c: None), "reward.*None", id="None"),
    pytest.param(_returns(lambda c: 1.0), "reward.*1.0", id="scalar"),
    pytest.param(_returns(lambda c: ["good"] * 8), "reward.*good", id="text"),
    pytest.param(_raises, "_raises.*KeyError.*answer", id="exception"),
    pytest.param(_sleeps, "_sleeps.*0.2", id="time-out"),
    pytest.param(_sleeps_async, "_sleeps_async.*0.2", id="async time-out"),
]


@pytest.mark.parametrize(("reward", "message"), REWARD_CASES)
def test_bad_reward_stops_the_run(reward: Any, message: str, tmp_path: Path) -> None:
    is_late = reward in (_sleeps, _sleeps_async)
    trainer = grpo(tmp_path, reward=reward, reward_timeout=0.2 if is_late else PATIENCE)
    with pytest.raises(RewardError, match=f"(?s){message}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_without_a_signal_stops_where_it_was_asked_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = grpo(tmp_path, reward=_returns(lambda c: [1.0] * 8), stop_without_signal=2)
    trainer.args.max_steps = 4
    with pytest.raises(RewardError, match="stop_without_signal=2"):
        trainer.train()
    assert trainer.state.global_step == 1
    grpo(tmp_path, reward=_returns(lambda c: [None] * 8)).train()
    assert "got None from every reward" in caplog.text


SFT_CASES: list[Any] = [
    pytest.param(Dataset.from_list([{"txt": "a"}]), {}, DataError, "text.*txt", id="missing column"),
    pytest.param(Dataset.from_dict({"text": []}), {}, DataError, "0 rows", id="empty"),
    pytest.param(
        Dataset.from_list([{"text": "abc"}, {"text": 3 * "abc"}]),
        {"max_length": 5, "truncation_mode": "error"},
        DataError,
        "row 1.*5",
        id="over-long",
    ),
    pytest.param(Dataset.from_list([{"text": None}]), {}, DataError, "0", id="None"),
    pytest.param(
        Dataset.from_list([{"messages": [{"role": "usr", "content": "hi"}]}]), {}, DataError, "usr.*user", id="role"
    ),
    pytest.param(
        Dataset.from_list([{"text": "hello"}]),
        {"assistant_only_loss": True},
        ConfigError,
        "assistant_only_loss",
        id="assistant only on text",
    ),
    pytest.param(
        Dataset.from_list([{"prompt": "a" * 30, "completion": "b"}]),
        {"max_length": 8},
        DataError,
        "max_length",
        id="nothing to learn",
    ),
]


@pytest.mark.parametrize(("dataset", "options", "error", "message"), SFT_CASES)
def test_sft_refuses(
    dataset: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        sft(tmp_path, dataset, **options)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_trainer_without_a_dataset_is_refused(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset=None: .* For evaluation alone, pass eval_dataset"):
        make_trainer(algorithm, tmp_path, train_dataset=None)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_a_dataset_with_a_transform_is_refused(algorithm: str, tmp_path: Path) -> None:
    dataset = dataset_of(algorithm).with_transform(lambda batch: batch)
    with pytest.raises(
        DataError, match=r"train_dataset has a transform .* Apply it with map\(\), or .*with_format\(None"
    ):
        make_trainer(algorithm, tmp_path, train_dataset=dataset)
    with pytest.raises(DataError, match=r"eval_dataset\['a'\] has a transform"):
        make_trainer(algorithm, tmp_path, eval_dataset={"a": dataset})


def test_training_without_a_dataset_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, train_dataset=None, eval_dataset=dataset_of("sft", 2))
    with pytest.raises(ConfigError, match="train_dataset=None"):
        trainer.train()


def test_evaluation_without_a_dataset_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path)
    with pytest.raises(ConfigError, match="eval_dataset=None"):
        trainer.evaluate()
