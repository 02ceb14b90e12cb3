"""`order: ready` with episodes: training takes those that end first, and forgets none."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import read_entry
from prefrl.trainer.online.trainer import OnlineTrainer
from tests.contract import episodes
from tests.contract.cases import assert_same_weights, weights_of
from tests.contract.late_worker import SAVING, Clock, LateTalk, late_trainer
from tests.launch import run_module


def journal(folder: Path) -> list[Collected]:
    """The generation batches in order."""
    files = sorted((folder / "completions").glob("completions_*.parquet"))
    return [read_entry(file).parts[0] for file in files]


def tickets(folder: Path) -> list[int]:
    return [ticket for collected in journal(folder) for ticket in collected.tickets]


def logged(trainer: OnlineTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_nothing_is_held(trainer: OnlineTrainer) -> None:
    sampler: Any = trainer._collector.sampler
    assert sampler._in_use == {}
    trainer.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"talks": "agent"},
        {"max_concurrent_environments": 9},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Dataset.from_list(episodes.prompts(3)[1:])},
    ],
    ids=["environment", "agent", "few places", "evaluations"],
)
def test_each_prompt_is_learned_from_once_and_episodes_that_end_first_are_first(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = late_trainer(tmp_path, max_steps=5, **options)
    trainer.train()
    learned = tickets(tmp_path)
    assert sorted(learned) == list(range(10))
    late = [learned.index(ticket) // 2 - ticket // 2 for ticket in range(0, 6, 3)]
    assert all(0 < steps <= 4 for steps in late)
    assert 2 <= max(logged(trainer, "sample/staleness_max")) <= 4
    assert logged(trainer, "sample/groups_dropped") == [0] * 5
    if "talks" not in options:  # the late turns were sampled later than the first ones, and say so
        versions = [one.policy_versions for collected in journal(tmp_path) for one in collected.rollouts]
        assert any(len(set(of_episode)) > 1 for of_episode in versions)
        assert all(sorted(of_episode) == of_episode for of_episode in versions)
    sampled, trained = (logged(trainer, f"episodes/tokens_{end}") for end in ("sampled", "trained"))
    assert sampled == trained
    check_nothing_is_held(trainer)


def test_episodes_that_are_too_late_are_dropped_and_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "late", {1, 4})
    monkeypatch.setattr(Clock, "num_late", 5)
    monkeypatch.setattr(LateTalk, "made", 0)
    trainer = late_trainer(tmp_path, max_steps=9, async_kwargs={"order": "ready", "stale": "drop"})
    trainer.train()
    assert sorted(tickets(tmp_path)) == list(range(18))
    assert sum(logged(trainer, "sample/groups_dropped")) == 2
    assert max(logged(trainer, "sample/staleness_max")) <= 4
    assert LateTalk.made <= 6 * 4 + 1  # the pool's, and the one that was looked at first
    check_nothing_is_held(trainer)


def test_updates_are_those_of_the_same_groups_in_order(tmp_path: Path) -> None:
    ready = late_trainer(tmp_path / "ready", max_steps=4)
    seen: list[Collected] = []
    collect = ready.prompts.collect

    def noted(*args: Any) -> Collected:
        seen.append(collect(*args))
        return copy.deepcopy(seen[-1])

    ready.prompts.collect = noted  # type: ignore[method-assign]
    ready.train()
    in_order = late_trainer(tmp_path / "in order", max_steps=4, async_kwargs={"order": "in_order"})
    in_order._collect = lambda number: seen[number]  # type: ignore[method-assign]
    before = weights_of(in_order.model)
    in_order.train()
    assert any((value != before[name]).any() for name, value in weights_of(in_order.model).items())
    assert_same_weights(in_order, ready)


def test_lost_turns_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds belong to prompts, so the episodes are those of a quiet run, whenever they were played."""
    monkeypatch.setattr(Clock, "late", ())  # servers are asked again once no episode goes on without them
    texts = []
    for num_lost in (0, 20):
        folder = tmp_path / str(num_lost)
        trainer = late_trainer(folder, num_lost=num_lost, max_steps=3, learning_rate=0.0)
        trainer.train()
        assert trainer.generator.num_lost == 0  # type: ignore[attr-defined]
        texts.append(sorted(str([one.prompt, one.text]) for batch in journal(folder) for one in batch.rollouts))
    assert texts[0] == texts[1]


class Flaky(LateTalk):
    """All episodes of some prompts fail."""

    def reset(self, prompt: Any, **row: Any) -> str:
        if prompt[-1]["content"].endswith("2"):
            raise ConnectionError("gone")
        return super().reset(prompt, **row)


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_a_group_that_failed_neither_ends_the_run_nor_counts_as_old(tmp_path: Path, stale: str) -> None:
    options: dict[str, Any] = {"environment": Flaky, "environment_error": "drop", "max_steps": 4}
    trainer = late_trainer(tmp_path, async_kwargs={"order": "ready", "stale": stale}, **options)
    trainer.train()
    assert sorted(tickets(tmp_path)) == list(range(8))
    assert sum(logged(trainer, "sample/groups_dropped")) == 0
    assert sum(logged(trainer, "episodes/stop_reason/environment_error")) == pytest.approx(0.5)


def test_a_killed_run_plays_again_what_it_has_not_learned_from(tmp_path: Path) -> None:
    """Killed after step 5, with a checkpoint of step 3: the journal has the steps between."""
    run_module("tests.contract.late_worker", tmp_path)
    assert len(tickets(tmp_path)) == 12
    state = json.loads((tmp_path / "checkpoint-3" / "pool.json").read_text(encoding="utf-8"))
    assert sorted(tickets(tmp_path)[:6] + state["tickets"][0]) == list(range(10))  # two batches are ahead
    before = [(tmp_path / "completions" / f"completions_{step:05d}.parquet").read_bytes() for step in range(6)]
    resumed = late_trainer(tmp_path, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    after = [(tmp_path / "completions" / f"completions_{step:05d}.parquet").read_bytes() for step in range(6)]
    assert after == before
    assert sorted(tickets(tmp_path)) == list(range(16))
    assert tickets(tmp_path) != list(range(16))
    assert max(logged(resumed, "sample/staleness_max")) <= 4
    check_nothing_is_held(resumed)


def test_steps_that_the_journal_has_are_replayed_exactly(tmp_path: Path) -> None:
    whole = late_trainer(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = late_trainer(tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(whole, resumed)
