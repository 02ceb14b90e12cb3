"""Online trainers on a stream of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from prefrl.errors import ConfigError
from tests.contract import episodes
from tests.contract.cases import ONLINE, dataset_of, make_trainer, update_of


@pytest.mark.parametrize("name", ONLINE)
def test_a_stream_of_prompts_gives_the_update_of_the_dataset(name: str, tmp_path: Path) -> None:
    options = {"shuffle_dataset": False, "max_steps": 2, "steps_per_generation": 1}
    plain = update_of(make_trainer(name, tmp_path, **options))
    assert plain.norm() > 1e-3
    assert torch.equal(update_of(make_trainer(name, tmp_path, **options, streams=True)), plain)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_resumed_run_reads_on_where_it_was_in_its_second_epoch(keep: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "journal_keep": keep}

    def update(checkpoint: str | None = None) -> torch.Tensor:
        stream = dataset_of("grpo", 5).to_iterable_dataset().shuffle(seed=3, buffer_size=5)  # 2 prompts in a step
        trainer = make_trainer("grpo", tmp_path, **options, train_dataset=stream)
        return update_of(trainer, resume_from_checkpoint=checkpoint)

    whole = update()
    assert torch.equal(update(str(tmp_path / "checkpoint-3")), whole)


def test_a_stream_is_evaluated_like_the_dataset(tmp_path: Path) -> None:
    rows = dataset_of("grpo", 5)
    trainer = make_trainer("grpo", tmp_path, per_device_eval_batch_size=8)
    plain, streamed = (
        {name: value for name, value in trainer.evaluate(data).items() if "/" in name and "time" not in name}
        for data in (rows, rows.to_iterable_dataset())
    )
    assert "eval_completions/mean_length" in plain
    assert streamed == plain


def test_environments_fill_the_empty_prompts_of_a_stream(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Noted(episodes.Talk):
        def reset(self, prompt: Any = None, **row: Any) -> str:
            seen.append(row["number"])
            return super().reset(prompt)

    stream = IterableDataset.from_generator(lambda: ({"number": number} for number in range(10)))
    options = {"talks": "faithful", "environment": Noted, "max_steps": 2}
    make_trainer("grpo", tmp_path, **options, train_dataset=stream).train()
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curriculum": "variance"}, "curriculum='variance' with an IterableDataset: it chooses among all prompts"),
        ({"dynamic_sampling": True}, "dynamic_sampling=True with an IterableDataset"),
        ({"max_steps": -1}, "max_steps=-1 with an IterableDataset"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer("grpo", tmp_path, **options, train_dataset=Dataset.from_list([{"prompt": "a"}]), streams=True)
