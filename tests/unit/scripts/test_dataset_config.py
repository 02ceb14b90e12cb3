"""Options of datasets and models become datasets and configs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from prefrl.errors import ConfigError, DataError
from prefrl.scripts.arguments.datasets import DatasetConfig, DatasetMixtureConfig, get_dataset, load_part
from prefrl.scripts.arguments.model_config import (
    ModelConfig,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.jsonl with 10 rows, b.jsonl with 4, and c.jsonl with 8."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, count in (("a", 10), ("b", 4), ("c", 8)):
        rows = [{"text": f"{name}{i}", "id": i} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def mixed(*parts: Any, **options: Any) -> Any:
    return get_dataset(DatasetMixtureConfig(datasets=list(parts), **options))


def test_datasets_are_laid_end_to_end_with_the_columns_to_keep() -> None:
    mixture = mixed(DatasetConfig("a.jsonl", columns=["text"]), {"path": "b.jsonl", "columns": ["text"]})
    assert set(mixture) == {"train"}
    assert mixture["train"].to_dict() == {"text": [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(4)]}


def test_fractions_are_shares_of_the_largest_mixture_without_repetition() -> None:
    # 1 : 3 of at most 10 and 4 rows: 4 / 0.75 = 5.33 rows in all, and 1.33 of a.
    mixture = mixed({"path": "a.jsonl", "fraction": 1}, {"path": "b.jsonl", "fraction": 3})
    assert mixture["train"]["text"][:] == ["a0", "b0", "b1", "b2", "b3"]
    # 2 : 3 of at most 10 and 4 rows: 2.67 rows of a.
    mixture = mixed({"path": "a.jsonl", "fraction": 2}, {"path": "b.jsonl", "fraction": 3})
    assert mixture["train"]["text"][:] == ["a0", "a1", "a2", "b0", "b1", "b2", "b3"]
    # 5 : 1 of at most 10 and 4 rows.
    mixture = mixed({"path": "a.jsonl", "fraction": 0.5}, {"path": "b.jsonl", "fraction": 0.1})
    assert mixture["train"]["text"][:] == [*(f"a{i}" for i in range(10)), "b0", "b1"]


def test_a_fraction_of_less_than_half_a_row_leaves_its_dataset_out() -> None:
    mixture = mixed({"path": "a.jsonl", "fraction": 0.01}, {"path": "b.jsonl", "fraction": 1})
    assert mixture["train"]["text"][:] == ["b0", "b1", "b2", "b3"]


def test_a_share_or_a_number_of_rows_is_split_off_and_the_same_for_every_process() -> None:
    for size, count in ((0.25, 2), (3.0, 3), (1, 1)):
        mixture = mixed("c.jsonl", test_split_size=size)
        assert [len(mixture["train"]), len(mixture["test"])] == [8 - count, count]
        assert sorted([*mixture["train"]["id"], *mixture["test"]["id"]]) == list(range(8))
        assert mixed("c.jsonl", test_split_size=size)["test"]["id"][:] == mixture["test"]["id"][:]


def test_streams_are_mixed_as_streams() -> None:
    mixture = mixed("a.jsonl", "b.jsonl", streaming=True)
    assert isinstance(mixture["train"], datasets.IterableDataset)
    assert [row["text"] for row in mixture["train"]][9:11] == ["a9", "b0"]


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mixture needs at least one dataset"):
        get_dataset(DatasetMixtureConfig())


def test_a_revision_is_that_of_a_dataset_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, *_: Any, revision: str | None, **__: Any) -> datasets.Dataset:
        asked.append((path, revision))
        return datasets.Dataset.from_dict({"text": ["x"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    mixed({"path": "owner/name", "revision": "v1"}, "b.jsonl")
    assert asked == [("owner/name", "v1"), ("json", None)]
    with pytest.raises(ConfigError, match=r"datasets\[0\]\.path='b\.jsonl' is on this machine, but revision='v1'"):
        mixed({"path": "b.jsonl", "revision": "v1"})


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("streaming", [False, True])
def test_local_files_are_read_by_their_endings(tmp_path: Path, packed: str, streaming: bool) -> None:
    rows = [{"text": "to be,\tor", "id": 1}, {"text": "not", "id": 2}]
    table = pa.Table.from_pylist(rows)
    contents = {
        "rows.csv": b'text,id\n"to be,\tor",1\nnot,2\n',
        "rows.TSV": b'text\tid\n"to be,\tor"\t1\nnot\t2\n',
        "rows.txt": b"to be,\tor\nnot\n",
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}{packed}").write_bytes(gzip.compress(content) if packed else content)
    pq.write_table(table, tmp_path / "rows.parquet")
    for name in ["rows.parquet", *(f"{name}{packed}" for name in contents)]:
        expected = [{"text": row["text"]} for row in rows] if ".txt" in name else rows
        assert list(load_part(DatasetConfig(name), streaming=streaming)) == expected, name


def test_a_csv_file_may_have_another_delimiter(tmp_path: Path) -> None:
    for mark in (";", "\t", "|", ","):
        (tmp_path / "rows.csv").write_text(f"id{mark}text\n1{mark}a\n", encoding="utf-8")
        assert list(load_part(DatasetConfig("rows.csv"), streaming=True)) == [{"id": 1, "text": "a"}], mark


def test_a_file_that_cannot_be_read_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"")
    with pytest.raises(DataError, match=r"path='rows\.xlsx': this file cannot be read. .* \.parquet, \.csv"):
        load_part(DatasetConfig("rows.xlsx"), streaming=False)
    with pytest.raises(DataError, match=r"path='no\.csv\.gz': there is no such file"):
        load_part(DatasetConfig("no.csv.gz"), streaming=False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("latin.csv", "a,text\nb,caf\udce9\n", "line 2 is not UTF-8, byte 6 is 0xe9. Convert the file"),
        ("cut.jsonl", '{"text": "a"}\n\n{"text": \n{"text": "b"}\n', "cannot be loaded: line 3 is not JSON: "),
        ("cut.jsonl.gz", '{"text": "a"}\n{"text" "b"}\n', "line 2 is not JSON: Expecting ':' delimiter in column 9"),
        (
            "types.jsonl",
            '{"id": 1, "a": null}\n{"id": "b", "a": 1.5}\n\n',
            "cannot be loaded: 'id' is a number in line 1 and text in line 2. Give it one type",
        ),
        ("none.jsonl", "", "^path='none.jsonl': has no rows$"),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    content = text.encode(errors="surrogateescape")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=message):
        load_part(DatasetConfig(name), streaming=False)


def test_each_part_of_a_mixture_has_its_own_columns_and_template() -> None:
    mixture = mixed(
        {"path": "a.jsonl", "split": "train[:1]", "columns": [{"completion": "text"}], "prompt_template": "{id}:"},
        {"path": "b.jsonl", "split": "train[:1]", "columns": [{"completion": "text"}], "prompt_template": "{text}?"},
    )
    assert mixture["train"].to_list() == [{"completion": "a0", "prompt": "0:"}, {"completion": "b0", "prompt": "b0?"}]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"columns": {"prompt": 1}}, r"datasets\[0\].columns={'prompt': 1}: must hold names of columns"),
        ({"columns": {}}, "columns={}: must hold names of columns"),
        ({"columns": {"a": "text", "b": "text"}}, "names the dataset's column 'text' twice"),
        ({"columns": ["text", {"text": "id"}]}, "names the new column 'text' twice"),
        ({"prompt_template": "no column"}, "prompt_template='no column': names no column"),
        ({"prompt_template": "{a"}, "prompt_template='{a': cannot be read: expected '}'"),
        ({"prompt_template": "{a.b}"}, "{a.b} is not a column name"),
        ({"prompt_template": r"\boxed{}"}, "{} is not a column name. .* double literal braces"),
        ({"system_prompt": ""}, "system_prompt='': must be a text that is not empty"),
        ({"conversational": "yes"}, "conversational='yes': must be true or false"),
    ],
)
def test_options_of_columns_are_checked_before_the_dataset_is_read(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetMixtureConfig(datasets=[{"path": "a.jsonl", **entry}])  # type: ignore[list-item]


def test_options_of_lora_are_those_of_peft() -> None:
    config: Any = get_peft_config(
        ModelConfig(
            use_peft=True,
            lora_r=8,
            lora_alpha=16,
            lora_dropout=0.1,
            lora_task_type="SEQ_CLS",
            use_rslora=True,
            lora_target_modules=["up_proj", "down_proj"],
            lora_modules_to_save=["score"],
        )
    )
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (8, 16, 0.1, True)
    assert (config.task_type, config.target_modules) == ("SEQ_CLS", {"up_proj", "down_proj"})
    assert config.modules_to_save == ["score"]
    assert get_peft_config(ModelConfig()) is None


@pytest.mark.parametrize(
    ("given", "target"),
    [
        (["all-linear"], "all-linear"),
        ("all-linear", "all-linear"),
        ([r".*\.q_(proj|norm)"], r".*\.q_(proj|norm)"),
        (["q_proj"], {"q_proj"}),
        (["self_attn.q_proj"], {"self_attn.q_proj"}),
    ],
)
def test_a_single_target_may_be_a_pattern(given: Any, target: object) -> None:
    config: Any = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=given))
    assert config.target_modules == target


def test_four_bits_are_multiplied_and_stored_as_dtype() -> None:
    config: Any = get_quantization_config(
        ModelConfig(load_in_4bit=True, dtype="bfloat16", bnb_4bit_quant_type="fp4", use_bnb_nested_quant=True)
    )
    assert (config.load_in_4bit, config.load_in_8bit) == (True, False)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("fp4", True)
    assert config.bnb_4bit_compute_dtype == config.bnb_4bit_quant_storage == torch.bfloat16
    stored: Any = get_quantization_config(ModelConfig(load_in_4bit=True, bnb_4bit_quant_storage="uint8"))
    assert (stored.bnb_4bit_compute_dtype, stored.bnb_4bit_quant_storage) == (torch.float32, torch.uint8)


def test_eight_bits_and_none() -> None:
    eight: Any = get_quantization_config(ModelConfig(load_in_8bit=True, dtype="auto"))
    assert (eight.load_in_4bit, eight.load_in_8bit) == (False, True)
    assert get_quantization_config(ModelConfig()) is None
    with pytest.raises(ConfigError, match="dtype='auto' with load_in_4bit=True: the type of matrix products"):
        get_quantization_config(ModelConfig(load_in_4bit=True, dtype="auto"))


def test_a_quantized_model_is_loaded_on_the_accelerator_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    for is_available, device_map in ((False, None), (True, {"": 3})):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=is_available: found)
        assert get_kbit_device_map() == device_map
