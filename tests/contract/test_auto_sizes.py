"""Sizes that are found by trial: nothing else changes, a resumed run has the same, and so have all processes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.errors import ConfigError, OutOfMemoryError
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.features.sizes import AutomaticSizes, Trial
from tests.contract.cases import (
    ONLINE,
    Job,
    assert_same_weights,
    dataset_of,
    make_trainer,
    model_of,
    relative_difference,
    run_on_two_processes,
    update_of,
    weights_of,
)

ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 3, "rows": 40}
TOKENS = {"max_tokens_per_micro_batch": "auto"}
ROWS = {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": "auto", "effective_batch_size": 8}
# With dropout, running means and moments, adaptive weights and several visits: what a trial could disturb. Trainers
# that keep nothing of their own are left out.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"packing": True, "max_length": 48}),
    ("dpo", {"loss_type": ["sigmoid", "bco_pair"]}),
    ("kto", {}),
    ("bco", {}),
    ("reward", {}),
    ("grpo", {"num_iterations": 2, "kl_kwargs": {"target": 0.01, "horizon": 20}, "beta": 0.1}),
    ("grpo", {"reward_shaping_kwargs": {"normalize": True}, "beta": 0.0}),
    ("grpo", {"rollout_selection": "best", "selection_kwargs": {"num_selected": 2}}),
    ("grpo", {"top_k": 5, "top_p": 0.9}),
    ("ppo", {"critic_learning_rate": 1e-2, "critic_warmup": 1, "critic": "model"}),
    ("online_dpo", {}),
]


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefrl.trainer.features.sizes._SECONDS", 0.0)


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed decides nothing here: four rows are always the fastest."""
    original = AutomaticSizes._measured

    def measured(self: AutomaticSizes, rows: int, memory: Any) -> Trial | None:
        trial = original(self, rows, memory)
        return trial and Trial(trial.rows, trial.tokens, float(rows if rows <= 4 else 1), trial.load)

    monkeypatch.setattr(AutomaticSizes, "_measured", measured)


def values_of(trainer: BaseTrainer) -> list[str]:
    """What was logged but for times; as text, in which NaN equals NaN."""
    return [
        str({name: value for name, value in entry.items() if not name.startswith(("time/", "step_time", "train_"))})
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.usefixtures("few_trials")
def test_a_search_leaves_no_trace(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    def trained(**sizes: Any) -> BaseTrainer:
        model = model_of(name, attention_dropout=0.3)
        trainer = make_trainer(name, tmp_path / str(len(sizes)), model=model, **{**ADAM, **options, **sizes})
        trainer.train()
        return trainer

    found = trained(**TOKENS)
    given = trained(max_tokens_per_micro_batch=found.args.max_tokens_per_micro_batch)
    assert [trial.rows for trial in found.parts[AutomaticSizes].trials] == [1, 2, 4, 8]
    assert found.args.max_tokens_per_micro_batch == found.parts[AutomaticSizes].trials[2].tokens
    assert_same_weights(found, given)
    assert values_of(found) == values_of(given)


@pytest.mark.usefixtures("few_trials")
def test_weights_optimizer_and_random_numbers_are_restored_bit_by_bit(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, model=model_of("sft", attention_dropout=0.3), **ADAM, **ROWS)
    trainer.model.train()
    trainer.create_optimizer()
    before, random = weights_of(trainer.model), torch.get_rng_state()
    trainer.parts[AutomaticSizes].settle({}, num_rows=40)
    assert len(trainer.parts[AutomaticSizes].trials) == 4
    assert all(torch.equal(value, weights_of(trainer.model)[name]) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not trainer.optimizer.state
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.metrics["train"] == {}


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "online_dpo"])
@pytest.mark.usefixtures("few_trials")
def test_rows_and_accumulation_make_the_step_that_was_asked_for(name: str, tmp_path: Path) -> None:
    found = make_trainer(name, tmp_path / "found", **ROWS)
    given = make_trainer(name, tmp_path / "given", per_device_train_batch_size=8)
    assert relative_difference(update_of(found), update_of(given)) < 1e-5
    assert (found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps) == (4, 2)
    assert found.parts[AutomaticSizes].found == {"per_device_train_batch_size": 4, "rows_per_step": 8}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("sft", TOKENS),
        ("sft", ROWS),
        ("sft", {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 2}),
        ("grpo", {**ROWS, "generation_batch_size": 16}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("few_trials")
def test_a_resumed_run_has_the_sizes_that_were_found(
    name: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**ADAM, **sizes, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(name, tmp_path, **settings)
    whole.train()
    monkeypatch.setattr(AutomaticSizes, "_search", lambda *_: pytest.fail("it searches again"))
    resumed = make_trainer(name, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.parts[AutomaticSizes].found == whole.parts[AutomaticSizes].found
    assert resumed.args.per_device_train_batch_size == whole.args.per_device_train_batch_size
    assert resumed.state.train_batch_size == whole.state.train_batch_size == whole.args.per_device_train_batch_size
    assert_same_weights(resumed, whole)


def test_a_run_that_died_before_its_first_checkpoint_has_the_sizes_that_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    first = make_trainer("sft", tmp_path, **ADAM, **TOKENS, callbacks=[Dies()])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    monkeypatch.setattr(AutomaticSizes, "_search", lambda *_: pytest.fail("it searches again"))
    resumed = make_trainer("sft", tmp_path, **ADAM, **TOKENS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.parts[AutomaticSizes].found == first.parts[AutomaticSizes].found


def test_sizes_that_a_resumed_run_has_not_found_are_sought(tmp_path: Path) -> None:
    """Another trainer with the same options finds its own, too."""
    first = make_trainer("grpo", tmp_path, **TOKENS)
    first.parts[AutomaticSizes].settle({"per_device_train_batch_size": 4, "rows_per_step": 8}, num_rows=24)
    assert first.args.max_tokens_per_micro_batch is not None
    own = first.parts[AutomaticSizes]
    again = AutomaticSizes(first.args, first.model, first.trial, own._run)
    again.settle({}, num_rows=24)
    assert [trial.tokens for trial in again.trials][:3] == [trial.tokens for trial in own.trials][:3]


def test_sizes_of_a_resumed_run_fit_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"per_device_train_batch_size": 4, "rows_per_step": 24}
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    trainer = make_trainer("sft", tmp_path, **{**ROWS, "effective_batch_size": 24})
    trainer.parts[AutomaticSizes].settle(saved, num_rows=40)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (4, 3)
    given = {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 5}
    trainer = make_trainer("sft", tmp_path, **given)
    with pytest.raises(ConfigError, match="24 rows per step, which 2 processes with gradient_accumulation_steps=5"):
        trainer.parts[AutomaticSizes].settle(saved, num_rows=40)


def test_two_processes_have_the_same_sizes(tmp_path: Path) -> None:
    """Else their numbers of micro-batches differ, and the update is another, or never made."""
    sizes = {"sft": ROWS, "grpo": {**TOKENS, "per_device_train_batch_size": 4}}
    jobs = [Job(name, {"max_steps": 2, **options}, tmp_path / f"{name}.pt") for name, options in sizes.items()]
    for name, update in zip(sizes, run_on_two_processes(jobs), strict=True):
        expected = update_of(make_trainer(name, tmp_path / f"{name}-alone", max_steps=2))
        assert relative_difference(update, expected) < 1e-5


def test_the_slowest_process_and_the_fullest_memory_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("sft", tmp_path, **TOKENS)
    monkeypatch.setattr(distributed, "max_over_ranks", _other_process(seconds=[1e3], load=0.75))
    trainer.parts[AutomaticSizes].settle({}, num_rows=24)
    assert all(trial.load == 0.75 and trial.speed < 1 for trial in trainer.parts[AutomaticSizes].trials)


def _other_process(*, seconds: Sequence[float], load: float) -> Any:
    """Maxima with a process whose passes take these times, the last ones again and again, and that needs memory."""
    left = list(seconds)

    def others(count: int) -> list[float]:
        return [load, 0.0, 0.0] if count == 3 else [left.pop(0) if len(left) > 1 else left[0]]

    first = iter([[0.0]])  # the memory of gradients
    return lambda values, _: [max(pair) for pair in zip(values, next(first, None) or others(len(values)), strict=True)]


@pytest.mark.parametrize("first", [1, 4])
def test_memory_that_runs_out_ends_the_search_or_the_run(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("sft", tmp_path, **ROWS)
    original = trainer.micro_step

    def step(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.num_rows >= first:
            raise OutOfMemoryError("out of memory in a trial")
        return original(model, batch, *args, **kwargs)

    monkeypatch.setattr(trainer, "micro_step", step)
    if first == 1:
        with pytest.raises(OutOfMemoryError, match="out of memory in a trial"):
            trainer.parts[AutomaticSizes].settle({}, num_rows=24)
        return
    trainer.parts[AutomaticSizes].settle({}, num_rows=24)
    assert [found.rows for found in trainer.parts[AutomaticSizes].trials] == [1, 2]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_memory_that_runs_out_in_another_process_ends_the_search_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("sft", tmp_path, **ROWS)
    monkeypatch.setattr(distributed, "max_over_ranks", _other_process(seconds=[0.0, 0.0, math.inf], load=0.0))
    trainer.parts[AutomaticSizes].settle({}, num_rows=24)
    assert [found.rows for found in trainer.parts[AutomaticSizes].trials] == [1]


@pytest.mark.parametrize("name", ["sft", "kto", "grpo"])
def test_trials_have_the_longest_rows(name: str, tmp_path: Path) -> None:
    """A budget counts the mismatched completions of KTO, too."""
    trainer = make_trainer(name, tmp_path, **TOKENS)
    columns = [column for column in trainer.train_dataset.column_names if column.endswith("_ids")]
    longest = max(sum(len(row[column]) for column in columns) for row in trainer.train_dataset)
    trainer.args.per_device_train_batch_size = 1
    with trainer.trial(1) as long:
        assert long.tokens == longest + (trainer.args.max_completion_length if name in ONLINE else 0)
        assert long.batch.num_rows == 1


@pytest.mark.parametrize(("name", "family"), [("sft", "llava"), ("dpo", "llava"), ("grpo", "llava")])
def test_trials_have_images(name: str, family: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, pictures=family, **TOKENS)
    with trainer.trial(2) as long:
        assert long.batch.images
    trainer.train()


def test_a_batch_size_without_a_step_size_is_bounded(tmp_path: Path) -> None:
    def most(**options: Any) -> int:
        trainer = make_trainer("sft", tmp_path, per_device_train_batch_size="auto", **options)
        return trainer.parts[AutomaticSizes]._most(1000)

    assert most() == 128
    assert most(auto_size_kwargs={"max_batch_size": 300}) == 300
    assert most(gradient_accumulation_steps=50) == 20


def test_what_was_found_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer("sft", tmp_path, **TOKENS)
    trainer.train()
    trainer.train()
    printed = capsys.readouterr().err
    assert printed.count(f"max_tokens_per_micro_batch={trainer.args.max_tokens_per_micro_batch}\n") == 1
    assert printed.count(" tokens/s, ") == len(trainer.parts[AutomaticSizes].trials)


def test_evaluations_find_their_size_once_for_rows_that_are_no_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = dataset_of("sft", 6)
    options: dict[str, Any] = {"eval_dataset": rows, "per_device_eval_batch_size": "auto"}
    trainer = make_trainer("sft", tmp_path, **options, auto_size_kwargs={"max_batch_size": 4})
    before = state_of_generators()
    trainer.evaluate()
    metrics = trainer.evaluate()
    trainer.evaluate(rows.select(range(3)))
    assert capsys.readouterr().err.count("per_device_eval_batch_size=") == 1
    trainer.evaluate(rows.map(lambda row: {"completion": 2 * row["completion"]}))
    assert capsys.readouterr().err.count("per_device_eval_batch_size=") == 1
    assert trainer.args.per_device_eval_batch_size in (1, 2, 4)
    assert state_of_generators() == before
    expected = make_trainer("sft", tmp_path, **{**options, "per_device_eval_batch_size": 3}).evaluate()
    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def state_of_generators() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist()


def test_a_stream_has_no_longest_rows(tmp_path: Path) -> None:
    stream, automatic = dataset_of("sft", 2).to_iterable_dataset(), {"per_device_eval_batch_size": "auto"}
    with pytest.raises(ConfigError, match="eval_dataset is an IterableDataset, whose longest rows are not known"):
        make_trainer("sft", tmp_path, eval_dataset=stream, **automatic).evaluate()
    with pytest.raises(ConfigError, match="train_dataset is an IterableDataset, whose longest rows are not known"):
        make_trainer("sft", tmp_path, streams=True, **TOKENS).train()
    make_trainer("grpo", tmp_path, streams=True, **TOKENS).train()
    unlimited = {**TOKENS, "streams": True, "max_prompt_length": None}
    with pytest.raises(ConfigError, match="max_prompt_length=None with an IterableDataset"):
        make_trainer("grpo", tmp_path, **unlimited).train()
