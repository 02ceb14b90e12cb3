"""`journal_tokens`: what a training pass finds of each token is written, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from prefrl.errors import CheckpointError
from tests.contract.cases import assert_same_weights, dataset_of, make_trainer, model_of, weights_of

OPTIONS: dict[str, Any] = {"max_steps": 4, "num_iterations": 2, "beta": 0.1, "journal_tokens": True}


def rows_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "completions" / f"tokens_{step:05d}.parquet").to_pylist()


def journal_of(folder: Path, step: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = pq.read_table(folder / "completions" / f"completions_{step:05d}.parquet").to_pylist()
    return {(row["group"], *row["completion_ids"]): row for row in rows}


def logprobs_of(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Of the tokens of a response, by the definition."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(response)), response].tolist()


def test_the_values_are_those_of_policy_sampler_and_reference(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, **{**OPTIONS, "max_steps": 2, "save_strategy": "steps", "save_steps": 1})
    trainer.train()
    updated = model_of("grpo")
    updated.load_state_dict(weights_of(type(updated).from_pretrained(tmp_path / "checkpoint-1")))
    journal = journal_of(tmp_path, 0)
    for step, policy in enumerate((model_of("grpo"), updated)):
        rows = rows_of(tmp_path, step)
        assert rows
        for row in rows:
            sampled = journal[row["group"], *row["response_ids"]]
            assert row["num_before"] == len(sampled["prompt_ids"])
            assert row["sampling_logprobs"] == pytest.approx(sampled["logprobs"])
            assert row["advantages"] == pytest.approx([sampled["advantage"]] * len(row["response_ids"]))
            ids = sampled["prompt_ids"], sampled["completion_ids"]
            assert row["logprobs"] == pytest.approx(logprobs_of(policy, *ids), abs=1e-5)
            assert row["ref_logprobs"] == pytest.approx(logprobs_of(model_of("grpo"), *ids), abs=1e-5)
    changes = [abs(a - b) for row in rows for a, b in zip(row["logprobs"], row["sampling_logprobs"], strict=True)]
    assert max(changes) > 1e-3  # the second visit is of another policy


def test_updates_and_journal_are_the_same_without_it_and_after_a_resume(tmp_path: Path) -> None:
    runs = {}
    for name, is_on in (("with", True), ("without", False)):
        options = {**OPTIONS, "journal_tokens": is_on, "save_strategy": "steps", "save_steps": 3}
        runs[name] = make_trainer("grpo", tmp_path / name, **options)
        runs[name].train()
    assert_same_weights(runs["with"], runs["without"])
    for step in (0, 2):
        tables = [pq.read_table(tmp_path / name / "completions" / f"completions_{step:05d}.parquet") for name in runs]
        assert str(tables[0].to_pylist()) == str(tables[1].to_pylist())  # some are NaN
    assert not [*(tmp_path / "without" / "completions").glob("tokens_*")]
    before, left = rows_of(tmp_path / "with", 3), tmp_path / "with" / "completions" / "tokens_00007.parquet"
    left.write_bytes(b"of a longer run")
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 3}
    resumed = make_trainer("grpo", tmp_path / "with", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "with" / "checkpoint-3"))
    assert_same_weights(resumed, runs["with"])
    assert rows_of(tmp_path / "with", 3) == before
    assert not left.exists()


def test_a_full_disk_ends_the_run_and_what_others_put_into_the_folder_is_left_alone(tmp_path: Path) -> None:
    in_the_way = tmp_path / "run" / "completions" / "tokens_00001.part"
    in_the_way.mkdir(parents=True)
    other = in_the_way.with_name("tokens_of_mine.parquet")
    other.write_bytes(b"mine")
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(
        CheckpointError, match=r"values of tokens cannot be written to .*/completions: .*Free space, or"
    ):
        make_trainer("grpo", tmp_path / "run", **options).train()
    in_the_way.rmdir()
    resumed, whole = make_trainer("grpo", tmp_path / "run", **options), make_trainer("grpo", tmp_path / "2", **options)
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert_same_weights(resumed, whole)
    assert [rows_of(tmp_path / "run", step) for step in range(4)] == [
        rows_of(tmp_path / "2", step) for step in range(4)
    ]
    assert other.read_bytes() == b"mine"


def test_no_pass_is_added(tmp_path: Path) -> None:
    counts = []
    for is_on in (False, True):
        trainer = make_trainer("grpo", tmp_path / str(is_on), **{**OPTIONS, "journal_tokens": is_on})
        calls: list[int] = []
        trainer.policy.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trainer.train()
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_as_many_generation_batches_are_kept_as_of_the_journal(tmp_path: Path) -> None:
    options = {**OPTIONS, "max_steps": 6, "journal_keep": 2, "save_strategy": "no"}
    make_trainer("grpo", tmp_path, **options).train()
    names = sorted(path.name for path in (tmp_path / "completions").glob("tokens_*"))
    assert names == [f"tokens_{step:05d}.parquet" for step in (2, 3, 4, 5)]
    about = json.loads(pq.read_schema(tmp_path / "completions" / names[0]).metadata[b"prefrl"])
    journal = pq.read_schema(tmp_path / "completions" / "completions_00002.parquet").metadata[b"prefrl"]
    assert about == {"run": json.loads(journal)["run"], "step": 2}


@pytest.mark.parametrize("options", [{"kl_in": "reward"}, {"kl_estimator": "full"}], ids=["in reward", "full"])
def test_the_reference_is_there_wherever_the_kl_is(tmp_path: Path, options: dict[str, Any]) -> None:
    make_trainer("grpo", tmp_path, **{**OPTIONS, "max_steps": 1, **options}).train()
    journal = journal_of(tmp_path, 0)
    for row in rows_of(tmp_path, 0):
        ids = journal[row["group"], *row["response_ids"]]
        expected = logprobs_of(model_of("grpo"), ids["prompt_ids"], ids["completion_ids"])
        assert row["ref_logprobs"] == pytest.approx(expected, abs=1e-5)


def test_without_a_reference_there_are_no_log_probs_of_one(tmp_path: Path) -> None:
    make_trainer("grpo", tmp_path, **{**OPTIONS, "max_steps": 1, "beta": 0.0}).train()
    assert {*rows_of(tmp_path, 0)[0]} == {
        *("group", "num_before", "response_ids"),
        *("sampling_logprobs", "advantages", "logprobs"),
    }


def test_evaluations_are_not_written(tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("grpo", 4)}
    for name, options in (("with", evaluation), ("without", {})):
        make_trainer("grpo", tmp_path / name, **{**OPTIONS, **options}).train()
    assert rows_of(tmp_path / "with", 1) == rows_of(tmp_path / "without", 1)


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "reinforce_plus_plus"])
def test_all_policy_gradients_write_it(tmp_path: Path, algorithm: str) -> None:
    make_trainer(algorithm, tmp_path, max_steps=1, journal_tokens=True).train()
    for row in rows_of(tmp_path, 0):
        assert len(row["response_ids"]) == len(row["logprobs"]) == len(row["advantages"]) > 0


def test_a_response_of_several_turns_has_the_tokens_between_them(tmp_path: Path) -> None:
    make_trainer("grpo", tmp_path, max_steps=1, journal_tokens=True, talks="faithful").train()
    turns = pq.read_table(tmp_path / "completions" / "completions_00000.parquet").to_pylist()
    rows = rows_of(tmp_path, 0)
    later = [turn for turn in turns if turn["turn"] > 0]
    assert later
    found = 0
    for turn in later:
        for row in rows:
            start = len(turn["prompt_ids"]) - row["num_before"]
            ids = row["response_ids"][start : start + len(turn["completion_ids"])]
            found += row["group"] == turn["group"] and start > 0 and ids == turn["completion_ids"]
    assert found
