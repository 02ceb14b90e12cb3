"""What is logged at the end, of the entropy bonus, and of completions that have no gradient and are not run again."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs
from prefrl.registry import REGISTRY
from prefrl.rewards.base import RewardLog
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.types import Rollout
from tests.contract.cases import ONLINE, ROOT, dataset_of, make_trainer, ragged_reward

CLIP_RATIOS = [f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")]
# So small that the loss is the same, but then every completion has a gradient and is run.
RUNS_ALL = {"beta": 1e-12}


def equal(completions: list[str], **_: Any) -> list[float]:
    """No group has a signal."""
    return [1.0] * len(completions)


equal.__name__ = ragged_reward.__name__  # metrics are named by it


def equal_for_some(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Only the groups of the first and the last prompt have a signal."""
    rewards, have_signal = ragged_reward(completions), (prompts[0], prompts[-1])
    return [reward if prompt in have_signal else 1.0 for reward, prompt in zip(rewards, prompts, strict=True)]


def trained(tmp_path: Path, **options: Any) -> tuple[OnlineTrainer, list[list[Rollout]]]:
    """A trainer after its training, and the rollouts of each generation batch."""
    options = {"beta": 0.0, "per_device_train_batch_size": 16} | options
    trainer = make_trainer("grpo", tmp_path, **options)
    assert isinstance(trainer, OnlineTrainer)
    batches: list[list[Rollout]] = []
    original = trainer._report

    def report(own: Any, collected: Any) -> None:
        batches.append(collected.rollouts)
        original(own, collected)

    trainer._report = report  # type: ignore[method-assign]
    trainer.train()
    return trainer, batches


def logs(trainer: OnlineTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def surprisal(rollouts: list[Rollout]) -> float:
    """Mean of -log p over sampled tokens, under the distribution that they were sampled from."""
    values = [-logprob for rollout in rollouts for logprob in rollout.sampling_logprobs]
    return sum(values) / len(values)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_step_without_a_signal_logs_what_other_steps_log(mode: str, tmp_path: Path) -> None:
    options = {} if mode == "sync" else {"use_vllm": True, "generation_mode": mode, "arrival": 1}
    off = {"vllm_importance_sampling_correction": False}
    options |= {} if mode == "sync" else off
    (with_signal,) = logs(trained(tmp_path, **options)[0])
    trainer, (rollouts,) = trained(tmp_path, reward=equal, **options)
    (without,) = logs(trainer)
    assert {*without} == {*with_signal}
    assert not [name for name, value in without.items() if math.isnan(value)]
    assert [without[name] for name in CLIP_RATIOS] == [0.0] * 5
    assert without["entropy"] == pytest.approx(surprisal(rollouts), rel=1e-5)
    assert without["num_tokens"] == with_signal["num_tokens"]


def test_ratios_and_tokens_are_counted_over_all_completions(tmp_path: Path) -> None:
    options = {"reward": equal_for_some, "learning_rate": 0.5, "num_iterations": 2, "max_steps": 4}
    left_out, batches = trained(tmp_path, **options)
    every, _ = trained(tmp_path, **options, **RUNS_ALL)
    for some, all_of_them in zip(logs(left_out), logs(every), strict=True):
        for name in (*CLIP_RATIOS, "num_tokens"):
            assert some[name] == pytest.approx(all_of_them[name], rel=1e-4, abs=1e-6), name
    assert logs(left_out)[1]["clip_ratio/region_mean"] > 0.01
    # A generation batch is counted once, however often it is learned from.
    sizes = [sum(len(r.prompt_ids) + len(r.sampled_ids) for r in rollouts) for rollouts in batches]
    seen = [entry["num_tokens"] for entry in logs(left_out)]
    assert seen == [sizes[0], sizes[0], sum(sizes), sum(sizes)]


def test_the_entropy_of_completions_that_are_not_run_is_estimated_by_their_tokens(tmp_path: Path) -> None:
    trainer, (rollouts,) = trained(tmp_path, reward=equal_for_some, learning_rate=0.0)
    total = 0.0
    for batch in (batch for minibatch in trainer.buffer.minibatches for batch in minibatch.micro_batches):
        entropy = token_logprobs(trainer.policy, batch, want=("entropy",)).entropy
        total += float(entropy.detach().sum())
    not_run = [rollout for rollout in rollouts if rollout.advantage == 0]
    total += surprisal(not_run) * sum(len(r.sampled_ids) for r in not_run)
    count = sum(len(r.sampled_ids) for r in rollouts)
    assert logs(trainer)[0]["entropy"] == pytest.approx(total / count, rel=1e-5)


def test_the_entropy_is_exact_where_all_completions_were_scored(tmp_path: Path) -> None:
    options = {"reward": equal_for_some, "top_entropy_quantile": 0.5}
    left_out, every = (trained(tmp_path, **options, **more)[0] for more in ({}, RUNS_ALL))
    assert logs(left_out)[0]["entropy"] == pytest.approx(logs(every)[0]["entropy"], rel=1e-5)


@pytest.mark.parametrize("algorithm", ONLINE)
def test_rewards_cannot_log_under_a_name_of_the_trainer(algorithm: str, tmp_path: Path) -> None:
    trainer = make_trainer(algorithm, tmp_path, log_flops=True)
    trainer.train()
    log = RewardLog(1, ())
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    for name in entry:
        with pytest.raises(ConfigError, match="this name belongs to the trainer"):
            log.metric(name, 1.0)


def test_completions_that_are_not_run_cost_no_forward_pass(tmp_path: Path) -> None:
    trainer, (rollouts,) = trained(tmp_path, reward=equal_for_some)
    run = sum(batch.num_rows for minibatch in trainer.buffer.minibatches for batch in minibatch.micro_batches)
    assert 0 < run < len(rollouts)


class StopsAfterTheEvaluation(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def test_the_last_step_is_logged_once_whatever_logging_steps_is(tmp_path: Path) -> None:
    def steps_of(name: str, **options: Any) -> tuple[list[int], Any]:
        trainer = make_trainer("sft", tmp_path / name, learning_rate=0.1, **options)
        trainer.train()
        return [entry["step"] for entry in logs(trainer)], trainer.state.log_history

    all_steps, every = steps_of("every", max_steps=3)
    assert all_steps == [1, 2, 3]
    steps, seldom = steps_of("seldom", max_steps=3, logging_steps=2)
    assert steps == [2, 3]
    for name in ("loss", "mean_token_accuracy", "entropy", "num_tokens"):
        assert seldom[1][name] == every[2][name]
    early = {"callbacks": [StopsAfterTheEvaluation()], "eval_dataset": dataset_of("sft", 2), "eval_strategy": "steps"}
    assert steps_of("early", max_steps=9, logging_steps=2, eval_steps=3, **early)[0] == [2, 3]


def test_a_run_that_logs_no_step_has_its_means_in_the_last_entry(tmp_path: Path) -> None:
    rows = {}
    for strategy in ("steps", "no"):
        options: dict[str, Any] = {"logging_strategy": strategy, "logging_first_step": False}
        trainer = make_trainer("sft", tmp_path / strategy, max_steps=3, learning_rate=0.1, **options)
        trainer.train()
        rows[strategy] = trainer.state.log_history
    (last,) = rows["no"]
    assert "train_runtime" in last
    assert last["num_tokens"] == rows["steps"][2]["num_tokens"]
    means = [entry["entropy"] for entry in rows["steps"][:3]]
    assert min(means) < last["entropy"] < max(means)
    assert "entropy" not in rows["steps"][-1]  # each is logged once


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_loss_is_the_policy_loss_minus_the_entropy_bonus(adaptive: bool, tmp_path: Path) -> None:
    options = {"use_adaptive_entropy": adaptive, "entropy_kwargs": {"target": 100.0} if adaptive else None}
    trainer, _ = trained(tmp_path, beta=0.1, entropy_coef=0.25, max_steps=2, **options)
    entry = logs(trainer)[1]  # an adaptive bonus begins once the entropy is known
    bonus = entry["entropy_coef"] * entry["entropy"]
    assert entry["loss"] == pytest.approx(entry["policy_loss"] - bonus, rel=1e-5)
    assert entry["entropy_coef"] == pytest.approx(0.255 if adaptive else 0.25)
    assert abs(entry["policy_loss"]) > 1e-3


def test_without_an_entropy_bonus_the_loss_is_logged_alone(tmp_path: Path) -> None:
    (entry,) = logs(trained(tmp_path)[0])
    assert not {"policy_loss", "entropy_coef"} & {*entry}


PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
OPTIONAL = "Only with some options"


def documented(name: str) -> tuple[set[str], set[str]]:
    """The metrics that a trainer always logs, and those that depend on options; `*` stands for a name."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        for metrics, trainers in re.findall(r"^\| (`[^|]+) \|.*\| ([^|]+) \|$", section, re.M):
            if name in trainers_of(trainers):
                names = {re.sub(r"<\w+>", "*", metric) for metric in re.findall(r"`([^`]+)`", metrics)}
                found[section.startswith(OPTIONAL)] |= names
    return found[False], found[True]


def trainers_of(cell: str) -> set[str]:
    """Of the last column, such as "all but `reward`"."""
    named = set(re.findall(r"`(\w+)`", cell))
    assert named <= REGISTRY.keys()
    many = {"all": {*REGISTRY}, "on prompts": {*ONLINE}}
    return many[cell.partition(" but ")[0]] - named if not cell.startswith("`") else named


@pytest.mark.parametrize("name", REGISTRY)
def test_the_page_of_metrics_has_what_a_run_logs_and_no_more(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, eval_strategy="steps", eval_steps=1, eval_dataset=dataset_of(name, 5))
    trainer.train()
    logged = {metric.removeprefix("eval_") for entry in trainer.state.log_history for metric in entry}
    always, sometimes = documented(name)
    assert {
        metric for metric in logged if not any(fnmatchcase(metric, known) for known in always | sometimes)
    } == set()
    assert {known for known in always if not any(fnmatchcase(metric, known) for metric in logged)} == set()
