"""What a run does by itself: batches that grow, an early end, soups, averages, rollbacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from prefrl import GRPOConfig, SFTConfig
from prefrl.errors import ConfigError
from prefrl.metrics import Max
from prefrl.trainer.evaluation import best_metric, check_metric_names
from prefrl.trainer.features.averages import MovingAverage
from prefrl.trainer.features.guard import StepGuard
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    model_of,
    relative_difference,
    weights_of,
    whole_and_resumed,
)

ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.1}
# The learning rate never rises, so the batch grows after the second step.
GROWS = {
    "increase_batch_size_on_plateau": 1,
    "increase_batch_size_kwargs": {"patience": 1, "eval_metric": "learning_rate"},
}


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in weights_of(model).values()])


# One completion for each prompt, whatever the seed: a run with larger batches from the start samples the same.
# Of the softmax: the only token that is kept has log-prob 0, whatever the weights are.
GREEDY = {**{"beta": 0.0, "top_k": 1, "truncated_logprobs": "softmax", "num_generations": 1, "shuffle_dataset": False}}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("sft", {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2}),
        ("orpo", {"train_sampling_strategy": "sequential", "max_tokens_per_micro_batch": 60}),
        ("reinforce_plus_plus", GREEDY),
    ],
)
def test_the_update_of_a_grown_batch_is_that_of_a_batch_of_its_size(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**options, "per_device_train_batch_size": 4 // options.get("gradient_accumulation_steps", 1)}
    model = model_of(algorithm)
    grown = make_trainer(algorithm, tmp_path / "grown", model=model, max_steps=6, **options, **GROWS)
    grown.train()
    assert [entry["batch_growth"] for entry in grown.state.log_history if "loss" in entry] == [1, 1, 2, 2]

    model = model_of(algorithm)
    make_trainer(algorithm, tmp_path / "before", model=model, max_steps=2, **options).train()
    before = vector(model)
    rest = dataset_of(algorithm).select(range(8, 24))
    options["per_device_train_batch_size"] *= 2
    make_trainer(algorithm, tmp_path / "after", model=model, max_steps=2, train_dataset=rest, **options).train()
    expected = vector(model) - before
    assert relative_difference(vector(grown.policy) - before, expected) < 1e-4


def test_schedule_and_epochs_of_a_run_whose_batch_grows_stay_as_they_are(tmp_path: Path) -> None:
    options = {**ADAM, "num_train_epochs": 2, "max_steps": -1, "lr_scheduler_type": "linear", "rows": 20}
    options |= {"per_device_train_batch_size": 4}

    def logged(folder: str, **more: Any) -> list[tuple[float, float]]:
        trainer = make_trainer("sft", tmp_path / folder, **options, **more)
        trainer.train()
        return [(entry["epoch"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]

    plain, grown = logged("plain"), logged("grown", **GROWS)
    # 5 planned steps in an epoch: 1, 1, 2, 1 and 2, 2, 1. The rate that is logged is that of the first of them.
    ends, starts = [1, 2, 4, 5, 7, 9, 10], [1, 2, 3, 5, 6, 8, 10]
    assert [epoch for epoch, _ in grown] == [plain[end - 1][0] for end in ends]
    assert [rate for _, rate in grown] == [plain[start - 1][1] for start in starts]


GROWING = [
    ("sft", {"lr_scheduler_type": "cosine"}, 3),
    ("kto", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": -1, "rows": 20}, 3),
    ("grpo", {"beta": 0.0}, 3),
    # Saved in the middle of two generation batches that are used together.
    ("grpo", {"steps_per_generation": 2, "num_iterations": 2}, 5),
    ("ppo", {"steps_per_generation": 2}, 1),
]


@pytest.mark.parametrize(("name", "options", "saved_at"), GROWING, ids=str)
def test_a_run_whose_batch_grows_resumes_bit_exactly(
    name: str, options: dict[str, Any], saved_at: int, tmp_path: Path
) -> None:
    settings = {**ADAM, "max_steps": 12, "save_strategy": "steps", "save_steps": 1, "rows": 40, **GROWS, **options}
    whole, resumed = whole_and_resumed(name, tmp_path, saved_at, **settings)
    assert_same_weights(resumed, whole)
    assert resumed.state.global_step == whole.state.global_step < 12
    assert resumed.state.epoch == whole.state.epoch
    assert whole.state.log_history[-2]["batch_growth"] == 2


UNLIKE = 7  # a row with a large loss
ROLLS_BACK: dict[str, Any] = {
    **ADAM,
    "learning_rate": 1e-3,
    "on_spike": "rollback",
    "spike_kwargs": {"threshold": 2.0, "metrics": ["loss"]},
    "lr_scheduler_type": "linear",
    "max_steps": 20,
    "save_strategy": "steps",
    "save_steps": 6,
    "train_sampling_strategy": "sequential",
    "per_device_train_batch_size": 2,
}


def spiking(algorithm: str) -> Dataset:
    """Rows of which those of the 15th step have another loss than all others, which are learned slowly."""
    rows = [dataset_of(algorithm)[0]] * 40
    rows[28] = rows[29] = dataset_of(algorithm)[UNLIKE]
    return Dataset.from_list(rows)


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def test_after_a_spike_training_goes_on_from_the_last_checkpoint_with_a_smaller_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**ROLLS_BACK, "train_dataset": spiking("sft")}
    plain = make_trainer("sft", tmp_path / "plain", **{**options, "on_spike": "ignore", "spike_kwargs": None})
    plain.train()
    trainer = make_trainer("sft", tmp_path / "run", **options)
    trainer.train()
    told = [record.getMessage() for record in caplog.records if "robust deviations" in record.getMessage()]
    times = len([text for text in told if "goes back to" in text])
    assert "checkpoint-12 with 0.5 times its learning rate: rollback 1 of max_rollbacks=3" in told[0]
    assert times == 3
    assert "has gone back" in told[-1]
    assert trainer.state.global_step == 20
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["guard/rollbacks"] == times
    # The same schedule, from the checkpoint on scaled; the step that spikes is left out in the end.
    assert rates(trainer)[:12] == rates(plain)[:12]
    expected = [rate * 0.5**times for rate in rates(plain)[12:15]]
    assert rates(trainer)[12:15] == pytest.approx(expected)


def test_a_run_that_went_back_resumes_bit_exactly(tmp_path: Path) -> None:
    options = {**ROLLS_BACK, "train_dataset": spiking("sft")}
    whole = make_trainer("sft", tmp_path, **options)
    whole.train()
    assert (tmp_path / "rollback.json").exists()
    for step in (12, 18):
        resumed = make_trainer("sft", tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same_weights(resumed, whole)
        assert rates(resumed) == rates(whole)


class KilledOnTheWayBack(TrainerCallback):
    """Ends a run right after it has noted a rollback, when it begins again from its checkpoint."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            raise RuntimeError("killed")


def test_rollouts_of_the_weights_before_a_rollback_are_not_learned_from_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path, *callbacks: TrainerCallback, **resume: Any) -> Any:
        options = {**ROLLS_BACK, "max_steps": 6, "save_steps": 2, "learning_rate": 1e-2, "beta": 0.0}
        del options["train_sampling_strategy"], options["per_device_train_batch_size"]
        options["spike_kwargs"] = {"max_rollbacks": 1, "learning_rate_factor": 0.1}
        trainer = make_trainer("grpo", folder, callbacks=list(callbacks), **options)

        def score(*_: Any) -> dict[str, Max]:
            return {"guard/grad_norm_spike": Max(99.0 if trainer.state.global_step == 5 else 0.0)}

        monkeypatch.setattr(StepGuard, "spike", score)
        trainer.train(**resume)
        return trainer

    whole = train(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "cut", KilledOnTheWayBack())
    resumed = train(tmp_path / "cut", resume_from_checkpoint=True)
    assert rates(whole)[4] == pytest.approx(0.1 * 1e-2 * 2 / 6)
    assert rates(resumed) == rates(whole)
    assert torch.equal(vector(resumed.model), vector(whole.model))


STOPS: dict[str, Any] = {
    "max_steps": 8,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "early_stopping_patience": 2,
    "learning_rate": 0.0,  # nothing improves
}


@pytest.mark.parametrize(("algorithm", "metric"), [("dpo", "loss"), ("grpo", "reward")])
def test_training_stops_early_and_a_resumed_run_counts_on(algorithm: str, metric: str, tmp_path: Path) -> None:
    options = {**STOPS, "eval_dataset": dataset_of(algorithm, 2)}
    trainer = make_trainer(algorithm, tmp_path, **options)
    trainer.train()
    assert trainer.args.metric_for_best_model == metric
    assert trainer.state.global_step == 3
    resumed = make_trainer(algorithm, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3
    finished = make_trainer(algorithm, tmp_path, **options)
    finished.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert finished.state.global_step == 3


def test_the_best_model_of_an_online_run_is_that_with_the_best_held_out_reward(tmp_path: Path) -> None:
    options = {**STOPS, "early_stopping_patience": None, "learning_rate": 0.5, "max_steps": 4}
    options |= {"load_best_model_at_end": True, "eval_dataset": dataset_of("grpo", 4)}
    trainer = make_trainer("grpo", tmp_path, **options)
    trainer.train()
    rewards = {e["step"]: e["eval_reward"] for e in trainer.state.log_history if "eval_reward" in e}
    assert trainer.state.best_global_step == max(rewards, key=rewards.__getitem__)
    assert trainer.evaluate()["eval_reward"] == pytest.approx(max(rewards.values()))
    assert len(set(rewards.values())) == 4


class EvaluatesAgain(TrainerCallback):
    """Evaluates another dataset at each checkpoint, and the same one once more."""

    trainer: Any

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate(dataset_of("sft", 3), metric_key_prefix="eval_other")
        self.trainer.evaluate()


def test_only_the_first_evaluation_after_a_step_counts(tmp_path: Path) -> None:
    again = EvaluatesAgain()
    options = {**STOPS, "eval_dataset": dataset_of("sft", 2), "eval_on_start": True, "callbacks": [again]}
    again.trainer = trainer = make_trainer("sft", tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_metric_that_evaluations_lack_is_an_error_that_names_those_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**STOPS, "metric_for_best_model": "rewards", "eval_dataset": dataset_of("grpo", 2)}
    trainer = make_trainer("grpo", tmp_path, **options)
    message = r"metric_for_best_model='rewards'.*'eval_rewards'.*'eval_reward'"
    with pytest.raises(ConfigError, match=message), caplog.at_level("WARNING"):
        trainer.train()
    assert "first rows has no metric 'eval_rewards'. Did you mean 'eval_reward'?" in caplog.text
    assert trainer.state.global_step == 1  # a reward may have logged such a metric


@pytest.mark.parametrize("metric", ["eval_entrop", "ema_runtim", "train_lss"])
def test_a_metric_that_no_evaluation_has_is_an_error_before_the_first_step(metric: str, tmp_path: Path) -> None:
    options = {**STOPS, "eval_dataset": dataset_of("sft", 2), "ema_decay": 0.5, "evaluate_training_set": True}
    trainer = make_trainer("sft", tmp_path, **options, max_eval_samples=2, metric_for_best_model=metric)
    with pytest.raises(ConfigError, match=rf"metric_for_best_model='{metric}': .* first rows .* Did you mean"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping_patience": 1}, "metric_for_best_model='loss': .* 'eval_loss'.* Choose 'eval_a_loss'"),
        (
            {"ema_decay": 0.5, "metric_for_best_model": "ema_loss"},
            "'eval_ema_loss'.* or 'eval_ema_b_'. Choose 'eval_ema_a_loss'",
        ),
        ({"reduce_on_plateau": 1}, "reduce_on_plateau_kwargs: metric='eval_loss': evaluations have no"),
        (
            {"increase_batch_size_on_plateau": 1, "increase_batch_size_kwargs": {"eval_split": "validation"}},
            "increase_batch_size_kwargs: eval_metric='loss': evaluations have no metric 'eval_loss'",
        ),
    ],
)
def test_a_metric_of_none_of_several_datasets_is_an_error_before_the_first_step(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    several = {"a": dataset_of("sft", 2), "b": dataset_of("sft", 2)}
    evaluates = {**STOPS, "early_stopping_patience": None, "eval_on_start": True, "eval_dataset": several}
    trainer = make_trainer("sft", tmp_path, **evaluates | options)
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert trainer.state.log_history == []


@pytest.mark.parametrize("metric", ["a_loss", "eval_b_loss", "train_loss", "ema_b_loss"])
def test_each_of_several_datasets_can_decide(metric: str, tmp_path: Path) -> None:
    options = {**STOPS, "metric_for_best_model": metric, "ema_decay": 0.5, "evaluate_training_set": True}
    several = {"a": dataset_of("sft", 2), "b": dataset_of("sft", 2)}
    trainer = make_trainer("sft", tmp_path, **options, max_eval_samples=2, eval_dataset=several)
    check_metric_names(trainer.args, trainer.eval_dataset)
    assert best_metric(trainer.args) in trainer.evaluate() or metric.startswith("ema_")  # there is no average yet


EVALUATES: dict[str, Any] = {
    **ADAM,
    "max_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def evaluations(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(("algorithm", "metric"), [("sft", "loss"), ("grpo", "reward")])
def test_the_moving_average_is_evaluated_and_saved_and_training_does_not_notice(
    algorithm: str, metric: str, tmp_path: Path
) -> None:
    options = {**EVALUATES, "eval_dataset": dataset_of(algorithm, 4)}
    plain = make_trainer(algorithm, tmp_path / "plain", **options)
    plain.train()
    trainer = make_trainer(algorithm, tmp_path / "run", **options, ema_decay=0.6)
    trainer.train()
    assert torch.equal(vector(trainer.model), vector(plain.model))
    assert evaluations(trainer, f"eval_{metric}") == evaluations(plain, f"eval_{metric}")
    trainer.save_model(str(tmp_path / "out"))
    saved = make_trainer(algorithm, tmp_path / "saved", model=str(tmp_path / "out" / "ema"), **options)
    of_average = evaluations(trainer, f"eval_ema_{metric}")
    assert saved.evaluate()[f"eval_{metric}"] == pytest.approx(of_average[-1], abs=1e-6)
    assert not torch.equal(vector(saved.model), vector(trainer.model))
    assert torch.equal(vector(trainer.model), vector(plain.model))


def test_a_generator_is_told_when_the_average_is_evaluated_and_when_that_is_over(tmp_path: Path) -> None:
    options = {**EVALUATES, "max_steps": 1, "eval_dataset": dataset_of("grpo", 2), "ema_decay": 0.6}
    trainer: Any = make_trainer("grpo", tmp_path, **options)
    told: list[str] = []

    def telling(name: str) -> Any:
        inner = getattr(trainer.generator, name)

        def tell(*arguments: Any, **more: Any) -> None:
            told.append(name)
            inner(*arguments, **more)

        return tell

    trainer.generator.sync, trainer.generator.invalidate = telling("sync"), telling("invalidate")
    trainer.train()
    of_training, of_evaluation, of_average = ["invalidate", "sync"], ["sync"], ["invalidate", "sync", "invalidate"]
    assert told == of_training + of_evaluation + of_average


@pytest.mark.parametrize(("algorithm", "options"), [("sft", {"optim": "adamw_torch"}), ("ppo", {"eval_steps": 2})])
def test_a_run_with_averages_resumes_bit_exactly(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {**EVALUATES, "ema_decay": 0.6, "model_soup": "greedy", "max_steps": 6, "save_steps": 2, **options}
    settings["eval_dataset"] = dataset_of(algorithm, 4)
    whole, resumed = whole_and_resumed(algorithm, tmp_path, 4, **settings)
    assert_same_weights(resumed, whole)
    for name in ("eval_ema_loss", "eval_soup_loss"):
        assert evaluations(resumed, name) == evaluations(whole, name)
        assert evaluations(whole, name)


def weights_in(folder: Path) -> torch.Tensor:
    return vector(AutoModelForCausalLM.from_pretrained(folder))


def test_the_uniform_soup_is_the_mean_of_the_best_checkpoints(tmp_path: Path) -> None:
    options = {**EVALUATES, "model_soup": "uniform", "model_soup_kwargs": {"top_k": 2}, "learning_rate": 0.1}
    options |= {"metric_for_best_model": "eval_entropy", "eval_dataset": dataset_of("sft", 4)}
    trainer = make_trainer("sft", tmp_path, **options)
    trainer.train()
    entropies = evaluations(trainer, "eval_entropy")
    best = sorted(range(4), key=entropies.__getitem__)[-2:]
    mean = torch.stack([weights_in(tmp_path / f"checkpoint-{i + 1}") for i in best]).mean(0)
    assert torch.allclose(vector(trainer.model), mean, atol=1e-7)
    record = json.loads((tmp_path / "soup.json").read_text())
    assert record["soup"] == trainer.evaluate()["eval_entropy"]
    assert [Path(row["checkpoint"]).name for row in record["checkpoints"]] == [
        f"checkpoint-{i + 1}" for i in best[::-1]
    ]


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_the_greedy_soup_is_not_worse_than_the_best_checkpoint_and_is_what_is_left(
    algorithm: str, tmp_path: Path
) -> None:
    options = {**EVALUATES, "model_soup": "greedy", "learning_rate": 0.05, "eval_dataset": dataset_of(algorithm, 8)}
    trainer = make_trainer(algorithm, tmp_path, **options)
    trainer.train()
    metric, sign = ("reward", 1) if algorithm == "grpo" else ("loss", -1)
    record = json.loads((tmp_path / "soup.json").read_text())
    best = max(sign * value for value in evaluations(trainer, f"eval_{metric}"))
    assert sign * record["soup"] >= best
    assert trainer.evaluate()[f"eval_{metric}"] == pytest.approx(record["soup"])
    used = [row["checkpoint"] for row in record["checkpoints"] if row["weight"]]
    mean = torch.stack([weights_in(Path(folder)) for folder in used]).mean(0)
    assert torch.allclose(vector(trainer.model), mean, atol=1e-7)


def test_adapters_are_averaged_and_stay_adapters_that_learn(tmp_path: Path) -> None:
    options = {**EVALUATES, "model_soup": "uniform", "ema_decay": 0.6, "eval_dataset": dataset_of("sft", 4)}
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer("sft", tmp_path, **options, peft_config=lora)
    trainer.train()
    (name, weight), *_ = [(n, p) for n, p in trainer.policy.named_parameters() if "lora_B" in n]
    assert weight.requires_grad
    files = [load_file(tmp_path / f"checkpoint-{i + 1}" / "adapter_model.safetensors") for i in range(4)]
    saved = name.replace(".default", "")
    assert torch.allclose(weight, torch.stack([file[saved] for file in files]).mean(0), atol=1e-7)
    trainer.save_model(str(tmp_path / "out"))
    average = load_file(tmp_path / "out" / "ema" / "adapter_model.safetensors")[saved]
    kept = trainer.parts[MovingAverage].average
    assert kept is not None
    assert torch.equal(average, kept.state(keep=True)[name])


def test_without_two_evaluated_checkpoints_there_is_no_soup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {**EVALUATES, "max_steps": 1, "model_soup": "uniform", "eval_dataset": dataset_of("sft", 4)}
    make_trainer("sft", tmp_path, **options).train()
    assert "there is no soup, because fewer than two checkpoints were evaluated: checkpoint-1" in caplog.text


REFUSED = [
    ({**EVALUATES, "model_soup": "greedy", "eval_steps": 2, "save_steps": 3}, "whose ratio is 1.5"),
    (
        {**EVALUATES, "model_soup": "greedy", "ema_decay": 0.9, "metric_for_best_model": "ema_loss"},
        "Set metric_for_best_model='loss'",
    ),
    ({"model_soup_kwargs": {"top_k": 2}}, "model_soup_kwargs"),
    ({"early_stopping_kwargs": {"threshold": 0.1}}, "early_stopping_patience=None: training does not stop early"),
    (
        {**EVALUATES, "early_stopping_patience": 2, "early_stopping_kwargs": {"patience": 1}},
        "patience=1 is not known with early_stopping_patience=2",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_parts_that_cannot_work_are_refused_at_once(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SFTConfig(output_dir=str(tmp_path), **{"save_strategy": "steps", "strict_options": True, **options})


def test_the_loss_of_an_online_trainer_is_no_sign_of_a_spike(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "on_spike": "rollback", "save_strategy": "steps"}
    assert SFTConfig(**options).watched_metrics == ("loss", "grad_norm", "kl")
    assert GRPOConfig(**options).watched_metrics == ("grad_norm", "kl")
    assert GRPOConfig(**options, spike_kwargs={"metrics": ["loss"]}).watched_metrics == ("loss",)


def test_a_dataset_cannot_have_the_name_of_the_average(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an eval_dataset named 'ema'"):
        make_trainer("sft", tmp_path, **EVALUATES, ema_decay=0.9, eval_dataset={"ema": dataset_of("sft", 2)})
