"""The overlap and async modes: training while completions are generated, and on completions of older weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from transformers import TrainerCallback, TrainerControl

from prefrl.errors import RewardError
from prefrl.rollout.journal import read_entry
from prefrl.trainer.online.trainer import OnlineTrainer
from tests.contract.cases import (
    ArrivingGenerator,
    Job,
    assert_same_weights,
    dataset_of,
    make_trainer,
    ragged_reward,
    relative_difference,
    run_on_two_processes,
    update_of,
    weights_of,
)

# Groups of 4 completions; 4 prompts in a step.
STEP = {"per_device_train_batch_size": 16, "max_steps": 2, "beta": 0.1, "use_vllm": True}
ASYNC = {"generation_mode": "async", "per_device_train_batch_size": 8}


def online(tmp_path: Path, **options: Any) -> OnlineTrainer:
    trainer = make_trainer("grpo", tmp_path, **{"arrival": 0, **STEP, **options})
    assert isinstance(trainer, OnlineTrainer)
    return trainer


# Metrics of a step that do not depend on who arrives first.
SAME = ("loss", "grad_norm", "reward", "reward_std", "num_tokens", "completions/mean_length", "entropy")


def logged(trainer: OnlineTrainer, name: str) -> list[float]:
    return values(trainer.state.log_history, name)


def values(history: list[dict[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in history if name in entry]


def zero_for_questions(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """All completions of some prompts are equally good: their groups have no advantage."""
    return [float(len(text) % 3) * ("?" not in prompt) for text, prompt in zip(completions, prompts, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "scale_rewards": "none"},
        {"loss_type": "dr_grpo", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        {"max_tokens_per_micro_batch": 60, "importance_sampling_level": "sequence"},
        {"beta": 0.0, "reward": zero_for_questions},
        {"max_grad_norm": 0.5, "mask_truncated_completions": True},
    ],
    ids=["dapo", "grpo", "two items", "sequence", "groups without signal", "clipped"],
)
def test_overlap_makes_the_update_of_sync_whatever_arrives_first(tmp_path: Path, options: dict[str, Any]) -> None:
    waited = online(tmp_path / "sync", **options)
    expected = update_of(waited)
    trainer = online(tmp_path / "overlap", arrival=2, generation_mode="overlap", **options)
    assert relative_difference(update_of(trainer), expected) < 2e-5
    for name in SAME:
        # The loss of a first step is a sum of terms of size 1 that cancel.
        assert logged(trainer, name) == pytest.approx(logged(waited, name), rel=1e-4, abs=1e-6), name


def logs_for_long_prompts(
    prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **_: Any
) -> list[float]:
    """Logs a column and a metric, but not in a call for the shortest prompts alone."""
    if any(len(prompt) > 4 for prompt in prompts):
        log_extra("asked", prompts)
        log_metric("share", 0.5)
    return [float(len(text) % 3) for text in completions]


def test_what_a_reward_logged_for_some_groups_alone_is_logged_in_overlap(tmp_path: Path) -> None:
    trainer = online(
        tmp_path, generation_mode="overlap", reward=logs_for_long_prompts, log_completions=True, max_steps=1, arrival=3
    )
    trainer.train()
    (file,) = (tmp_path / "completions").iterdir()
    table = parquet.read_table(file).to_pydict()
    assert table["asked"] == [prompt if len(prompt) > 4 else None for prompt in table["prompt"]]
    assert None in table["asked"]
    assert logged(trainer, "share") == [0.5]


def test_overlap_makes_the_same_update_on_two_processes(tmp_path: Path) -> None:
    waited = online(tmp_path / "sync")
    expected = update_of(waited)
    options = STEP | {"arrival": 3, "per_device_train_batch_size": 8, "generation_mode": "overlap"}
    (update,) = run_on_two_processes([Job("grpo", options, tmp_path / "update.pt")])
    assert relative_difference(update, expected) < 2e-5
    history = json.loads((tmp_path / "update.json").read_text(encoding="utf-8"))
    for name in SAME:
        assert values(history, name) == pytest.approx(logged(waited, name), rel=1e-4, abs=1e-6), name


def test_overlap_trains_on_a_group_before_the_next_is_read(tmp_path: Path) -> None:
    trainer = online(tmp_path, generation_mode="overlap", max_steps=1)
    events: list[str] = []
    pending = trainer.generator.start
    micro_step = trainer.micro_step

    def start(*args: Any, **kwargs: Any) -> Any:
        groups = pending(*args, **kwargs)
        arriving = groups.groups

        class Watched:
            def as_completed(self) -> Any:
                for number, completions in arriving:
                    events.append("arrives")
                    yield number, completions

        return Watched()

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        events.append("trained")
        return micro_step(*args, **kwargs)

    trainer.generator.start = start  # type: ignore[method-assign]
    trainer.micro_step = watched  # type: ignore[method-assign]
    trainer.train()
    assert events == ["arrives", "trained"] * 4


def test_a_reward_that_fails_in_overlap_is_named(tmp_path: Path) -> None:
    def fails(completions: list[str], **_: Any) -> list[float]:
        raise ZeroDivisionError("no")

    with pytest.raises(RewardError, match="fails"):
        online(tmp_path, generation_mode="overlap", reward=fails).train()


def test_async_learns_from_weights_that_are_at_most_max_staleness_old(tmp_path: Path) -> None:
    trainer = online(tmp_path, **ASYNC, max_staleness=2, max_steps=6)
    trainer.train()
    assert logged(trainer, "sample/staleness_max") == [0, 1, 2, 2, 2, 2]
    assert logged(trainer, "sample/staleness_mean") == [0, 1, 2, 2, 2, 2]
    # Nothing is generated that training does not use.
    assert logged(trainer, "sample/rollout_queue_size") == [2, 2, 2, 2, 1, 0]


def test_async_counts_the_steps_of_a_generation(tmp_path: Path) -> None:
    """Two updates and two iterations: 4 steps learn from one generation."""
    options = {"steps_per_generation": 2, "num_iterations": 2, "max_staleness": 5, "max_steps": 12}
    trainer = online(tmp_path, **ASYNC | options)
    trainer.train()
    assert logged(trainer, "sample/staleness_max") == [0, 4, 4]


def test_async_visits_the_prompts_of_sync_in_their_order_over_epochs(tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {"sync": [], "async": []}
    for mode, prompts in seen.items():

        def remember(completions: list[str], prompts: list[str], seen: list[str] = prompts, **_: Any) -> list[float]:
            seen.extend(prompts)
            return [float(len(text)) for text in completions]

        # 7 prompts, 2 for each step: an epoch has 3 steps.
        options = {"generation_mode": mode, "per_device_train_batch_size": 8, "max_steps": 7, "rows": 7}
        online(tmp_path / mode, reward=remember, **options).train()
    assert len(seen["sync"]) == 7 * 8
    assert seen["async"] == seen["sync"]


def test_async_draws_the_completions_of_sync_from_equal_weights(tmp_path: Path) -> None:
    """Seeds belong to the step that learns, not to the one that asks."""
    seen: dict[str, list[str]] = {"sync": [], "async": []}
    for mode, completions_seen in seen.items():

        def remember(completions: list[str], seen: list[str] = completions_seen, **_: Any) -> list[float]:
            seen.extend(completions)
            return [float(len(text)) for text in completions]

        options = {"generation_mode": mode, "per_device_train_batch_size": 8, "max_steps": 4, "learning_rate": 0.0}
        online(tmp_path / mode, reward=remember, **options).train()
    assert len(set(seen["sync"])) > 8
    assert seen["async"] == seen["sync"]


def test_async_with_the_newest_weights_is_sync(tmp_path: Path) -> None:
    """The first step has nothing older to learn from."""
    options = {"per_device_train_batch_size": 8, "max_steps": 1}
    expected = update_of(online(tmp_path / "sync", **options))
    assert torch.equal(update_of(online(tmp_path / "async", generation_mode="async", **options)), expected)


def test_a_training_that_stops_early_gives_up_what_is_under_way(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
            control.should_training_stop = True

    trainer = online(tmp_path, **ASYNC, max_staleness=3, max_steps=6, callbacks=[Stop()])
    trainer.train()
    assert isinstance(trainer.generator, ArrivingGenerator)
    assert trainer.generator.num_cancelled == 3
    assert trainer.prompts.prefetched is not None
    assert len(trainer.prompts.prefetched) == 0


def test_async_goes_on_after_a_resume_where_it_was(tmp_path: Path) -> None:
    options = {**ASYNC, "max_staleness": 2, "max_steps": 5}
    whole = online(tmp_path, **options, save_strategy="steps", save_steps=3)
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = online(tmp_path, **options)
    before = weights_of(resumed.model)
    resumed.train(resume_from_checkpoint=checkpoint)
    for name, value in weights_of(whole.model).items():
        assert torch.equal(value, weights_of(resumed.model)[name])  # learned from the journal
    # What was under way, and is not in the journal, is asked for again, with the weights of the checkpoint.
    shutil.rmtree(tmp_path / "completions")
    resumed = online(tmp_path, **options)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 5
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(resumed.model).items())
    assert logged(resumed, "sample/staleness_max")[-2:] == [0, 1]


# Ready groups first.

READY = {**ASYNC, "max_staleness": 4, "async_kwargs": {"order": "ready"}}


class Seen:
    """A reward that keeps the prompts that it has scored."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        self.prompts += prompts[::4]
        return [float(len(text) % 5) for text in completions]


def prompts_in_order(trainer: OnlineTrainer, *, num_generations: int) -> list[str]:
    """The prompts of the first generation batches."""
    return [
        trainer.prompts._prompt(number)[0]["prompt"] for number in range(num_generations * trainer.prompts.num_prompts)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"steps_per_generation": 2, "num_iterations": 2, "max_staleness": 8, "max_steps": 24},
        {"rows": 7},
        {"streams": True},
        {"async_kwargs": {"order": "ready", "stale": "drop"}},
    ],
    ids=["plain", "accumulated", "several steps", "epochs", "stream", "drop"],
)
def test_ready_learns_from_each_prompt_once_and_from_what_finishes_first(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    seen = Seen()
    trainer = online(tmp_path, **{**READY, "max_steps": 9, "reward": seen, **options}, arrival=5)
    trainer.train()
    expected = prompts_in_order(trainer, num_generations=len(seen.prompts) // trainer.prompts.num_prompts)
    assert len(seen.prompts) == len(expected) >= 12
    assert sorted(seen.prompts) == sorted(expected)
    assert seen.prompts != expected
    limit = {**READY, **options}["max_staleness"]
    assert 0 < max(logged(trainer, "sample/staleness_max")) <= limit


def test_ready_repeats_what_was_lost_with_a_server(tmp_path: Path) -> None:
    """The completions are those that a quiet run would have had, because seeds belong to prompts."""
    seen: dict[int, list[str]] = {0: [], 9: []}
    for num_lost, completions_seen in seen.items():

        def remember(completions: list[str], seen: list[str] = completions_seen, **_: Any) -> list[float]:
            seen.extend(completions)
            return [float(len(text)) for text in completions]

        trainer = online(tmp_path / str(num_lost), **READY, max_steps=6, reward=remember, learning_rate=0.0)
        assert isinstance(trainer.generator, ArrivingGenerator)
        trainer.generator.num_lost = num_lost
        trainer.train()
        assert trainer.generator.num_lost == 0
    assert sorted(seen[9]) == sorted(seen[0])


def test_an_evaluation_takes_nothing_from_the_pool(tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("grpo", 4)}
    seen = Seen()
    trainer = online(tmp_path, **READY, max_steps=5, **evaluated, eval_reward_funcs=ragged_reward, reward=seen)
    trainer.train()
    assert sorted(seen.prompts) == sorted(prompts_in_order(trainer, num_generations=5))


def test_ready_resumes_without_losing_or_repeating_a_prompt(tmp_path: Path) -> None:
    """Also those of steps that the journal has and the checkpoint does not, and of what was finished and waited."""
    options = {**READY, "max_steps": 8, "save_strategy": "steps", "save_steps": 3, "arrival": 5}
    whole = online(tmp_path, **options)
    whole.train()
    tickets = json.loads((tmp_path / "checkpoint-3" / "pool.json").read_text(encoding="utf-8"))
    assert len(tickets["tickets"][0]) == 4  # two generation batches of two prompts are ahead
    learned = [
        ticket
        for step in range(3)
        for ticket in read_entry(tmp_path / "completions" / f"completions_{step:05d}.parquet").parts[0].tickets
    ]
    for step in (6, 7):
        (tmp_path / "completions" / f"completions_{step:05d}.parquet").unlink()
    resumed = online(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    later = [read_entry(tmp_path / "completions" / f"completions_{step:05d}.parquet") for step in range(3, 8)]
    learned += [ticket for entry in later for ticket in entry.parts[0].tickets]
    assert sorted(learned) == list(range(16))
    assert learned != sorted(learned)


def test_ready_replays_the_steps_that_the_journal_has_exactly(tmp_path: Path) -> None:
    options = {**READY, "max_steps": 6, "arrival": 5}
    whole = online(tmp_path, **options, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = online(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(whole, resumed)


def test_a_checkpoint_at_an_error_of_rewards_has_the_groups_of_its_step(tmp_path: Path) -> None:
    def fails(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 3:
            raise ZeroDivisionError("no")
        return [float(len(text)) for text in completions]

    with pytest.raises(RewardError):
        online(tmp_path, **READY, max_steps=6, save_strategy="steps", save_steps=100, reward=fails).train()
    state = json.loads((tmp_path / "checkpoint-3" / "pool.json").read_text(encoding="utf-8"))
    learned = [
        ticket
        for step in range(3)
        for ticket in read_entry(tmp_path / "completions" / f"completions_{step:05d}.parquet").parts[0].tickets
    ]
    assert sorted(learned + state["tickets"][0]) == list(range(12))


def test_ready_on_two_processes_learns_from_each_prompt_once(tmp_path: Path) -> None:
    options = {**STEP, **READY, "max_steps": 6, "per_device_train_batch_size": 8, "arrival": 3, "journal_keep": 20}
    run_on_two_processes([Job("grpo", options, tmp_path / "update.pt")])
    files = [*tmp_path.rglob("completions_*.parquet")]
    assert len(files) == 12
    learned = [ticket for file in files for ticket in read_entry(file).parts[0].tickets]
    assert sorted(learned) == list(range(24))
