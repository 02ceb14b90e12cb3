"""`prefrl teacher`, from rows to a file that distillation learns from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer

from prefrl import ConfigError, DataError
from prefrl.data.teacher_columns import TEACHER_COLUMNS
from prefrl.scripts import teacher
from prefrl.scripts.main import main
from prefrl.scripts.teacher import TeacherArguments
from tests.assets import tiny_model, tiny_tokenizer
from tests.cli.conftest import write_jsonl
from tests.contract.cases import (
    assert_same_weights,
    dataset_of,
    make_trainer,
    relative_difference,
    stopping_model,
    update_of,
    whole_and_resumed,
)


@pytest.fixture(scope="module")
def of_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher and rows, half of which have the prompt of the row before."""
    folder = tmp_path_factory.mktemp("teacher")
    tiny_model(seed=9, hidden_size=24).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = dataset_of("sft", 16).to_list()
    write_jsonl(folder / "rows.jsonl", [{**rows[i - i % 2], "completion": rows[i]["completion"]} for i in range(16)])
    return folder


def given(folder: Path) -> dict[str, Any]:
    """Options of a trainer that samples nothing."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return {"num_generations": 1, "on_policy_fraction": 0.0, "processing_class": tokenizer}


def stored(folder: Path, output: Path, top_k: int, **options: Any) -> Dataset:
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    files = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--output", str(output)]
    assert main(["teacher", *files, "--top_k", str(top_k), *words]) == 0
    return load_dataset("parquet", data_files=str(output), split="train", cache_dir=str(output.parent / "cache"))


@pytest.mark.parametrize("max_tokens", [8192, 40])
def test_the_columns_are_the_largest_log_probs_and_the_rest(of_teacher: Path, tmp_path: Path, max_tokens: int) -> None:
    found = stored(of_teacher, tmp_path / "rows.parquet", 5, temperature=0.7, max_tokens_per_batch=max_tokens)
    model, tokenizer = tiny_model(seed=9, hidden_size=24), AutoTokenizer.from_pretrained(of_teacher / "model")
    assert found.column_names == ["prompt", "completion", *TEACHER_COLUMNS]
    assert len(found) == 16
    for row in found:
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        start = len(tokenizer(row["prompt"])["input_ids"])
        with torch.no_grad():
            log_probs = (model(torch.tensor([ids])).logits[0, start - 1 : -1] / 0.7).log_softmax(1)
        top = log_probs.topk(5)
        assert row["teacher_ids"] == top.indices.tolist()
        close = {"atol": 2e-3, "rtol": 1e-3}
        torch.testing.assert_close(torch.tensor(row["teacher_logprobs"]).float(), top.values, **close)
        others = (1 - top.values.double().exp().sum(1)).log().float()
        torch.testing.assert_close(torch.tensor(row["teacher_other_logprobs"]).float(), others, **close)
        about = json.loads(row["teacher_fingerprint"])
        assert (about["temperature"], about["dtype"]) == (0.7, "float32")


def test_all_tokens_teach_what_a_teacher_in_memory_does_and_fewer_teach_nearly_that(
    of_teacher: Path, tmp_path: Path
) -> None:
    plain = Dataset.from_json(str(of_teacher / "rows.jsonl"), cache_dir=str(tmp_path))
    options = {**given(of_teacher), "max_completion_length": 8, "beta": 0.0}
    live = update_of(make_trainer("distillation", tmp_path / "live", train_dataset=plain, **options))
    for top_k, distance in ((128, 2e-3), (100, 0.1)):
        rows = stored(of_teacher, tmp_path / f"{top_k}.parquet", top_k)
        trainer = make_trainer("distillation", tmp_path / "b", train_dataset=rows, teacher_model=None, **options)
        assert trainer.ref_model is None
        assert relative_difference(update_of(trainer), live) < distance
    assert relative_difference(update_of(trainer), live) > 1e-3


def test_evaluations_and_found_batch_sizes_use_the_columns(of_teacher: Path, tmp_path: Path) -> None:
    rows = stored(of_teacher, tmp_path / "rows.parquet", 128)
    options = {**given(of_teacher), "teacher_model": None, "train_dataset": rows, "max_completion_length": 20}
    trainer = make_trainer("distillation", tmp_path / "a", eval_dataset=rows, **options)
    with trainer.trial(4) as batch:  # of completions that are longer than those of the dataset
        assert batch.batch.teacher_ids.shape == (batch.batch.num_tokens, 128)
    plain = Dataset.from_json(str(of_teacher / "rows.jsonl"), cache_dir=str(tmp_path))
    sizes = {"per_device_train_batch_size": 16, "max_completion_length": 20}
    live = make_trainer("distillation", tmp_path / "b", train_dataset=plain, **given(of_teacher), **sizes)
    live.train()
    expected = live.state.log_history[0]["divergence"]  # of all rows, before the first update
    assert trainer.evaluate()["eval_divergence"] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(
        DataError, match=r"eval_dataset has no columns teacher_ids, .*: its columns are prompt, comple"
    ):
        make_trainer("distillation", tmp_path / "c", eval_dataset=plain, **options)


def test_a_resumed_run_has_the_columns_of_what_it_learns_from_again(of_teacher: Path, tmp_path: Path) -> None:
    options = {**given(of_teacher), "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    options |= {"train_dataset": stored(of_teacher, tmp_path / "rows.parquet", 7), "teacher_model": None}
    assert_same_weights(*whole_and_resumed("distillation", tmp_path / "run", 1, **options))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"teacher_model": stopping_model()}, "teacher_model=Qwen2ForCausalLM and a train_dataset with a column teacher_"),
    (
        {"teacher_model": "some/model"},
        "teacher_model='some/model' and a train_dataset with a column teacher_ids: both",
    ),
    ({"teacher_model_name_or_path": "m"}, "teacher_model_name_or_path='m' and a train_dataset with a column teacher"),
    ({"teacher_model_init_kwargs": {"revision": "a"}}, "teacher_model_init_kwargs={'revision': 'a'} and a train_data"),
    ({"on_policy_fraction": 0.5}, "on_policy_fraction=0.5 and a train_dataset with a column teacher_ids: they are of"),
    (
        {"later_tokens": True, "num_generations": 2, "on_policy_fraction": 1.0},
        "later_tokens=True and a train_dataset with a column teacher_ids: the importance weights are those of",
    ),
    ({"temperature": 0.5}, "row 0: the teacher's log-probs are at temperature 1.0, and temperature=0.5"),
    ({"max_prompt_length": 2}, "row 0: its prompt has"),
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 and a train_dataset with a column teacher_ids: it changes"),
    ({"filter_overlong_prompts": True}, "filter_overlong_prompts=True and a train_dataset with a column teacher_ids"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_be_combined_with_the_columns_is_refused(
    of_teacher: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    rows = stored(of_teacher, tmp_path / "rows.parquet", 4)
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        make_trainer(
            "distillation", tmp_path, **{**given(of_teacher), "teacher_model": None, "train_dataset": rows, **options}
        )


def test_a_run_that_was_stopped_goes_on_where_it_was(
    of_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = stored(of_teacher, tmp_path / "whole.parquet", 3)
    monkeypatch.setattr(teacher, "_VALUES_OF_A_PART", 200)
    output, original, counts = tmp_path / "rows.parquet", teacher._Teacher.columns, []

    def columns(self: Any, rows: Dataset) -> Any:
        if len(counts) == 2:
            raise KeyboardInterrupt
        counts.append(len(rows))
        return original(self, rows)

    monkeypatch.setattr(teacher._Teacher, "columns", columns)
    words = ["teacher", str(of_teacher / "model"), str(of_teacher / "rows.jsonl"), "--output", str(output)]
    assert main([*words, "--top_k", "3"]) == 130
    assert not output.exists()
    assert main([*words, "--top_k", "4"]) == 2
    assert "has parts of a run that was stopped and had another model, dataset or option" in capsys.readouterr().err
    done = sum(counts)
    assert 0 < done < 16
    counts.clear()
    monkeypatch.setattr(
        teacher._Teacher, "columns", lambda self, rows: counts.append(len(rows)) or original(self, rows)
    )
    assert main([*words, "--top_k", "3"]) == 0
    assert f"{done} of 16 rows are there from a run that was stopped" in capsys.readouterr().err
    assert done + sum(counts) == 16
    found = load_dataset("parquet", data_files=str(output), split="train", cache_dir=str(tmp_path / "cache"))
    assert found.to_list() == expected.to_list()
    assert [*tmp_path.glob("*.parts")] == []
    assert main([*words, "--top_k", "3"]) == 2
    assert "exists already. Remove it, or choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}], {}, "has no column 'prompt' and no column 'completion', but text. Name them with columns"),
        ([{"prompt": "a", "completion": "b", "teacher_ids": 1}], {}, "has a column 'teacher_ids' already. Remove it"),
        ([{"prompt": "a", "completion": "b", "images": []}], {}, "column 'images' holds images, which this command"),
        ([{"prompt": "a", "completion": "b"}], {"top_k": 129}, "top_k=129: the model has only 128 tokens. Lower it"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(
    rows: list[dict[str, Any]], options: dict[str, Any], message: str, of_teacher: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", rows)
    names = {"model_name_or_path": str(of_teacher / "model"), "dataset_name": str(tmp_path / "rows.jsonl")}
    arguments = TeacherArguments(**names, output_file=str(tmp_path / "out.parquet"), **options)
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        teacher.main.run(arguments)
