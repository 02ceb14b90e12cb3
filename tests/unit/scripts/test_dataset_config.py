"""Datasets are loaded and mixed as their options say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from prefrl.errors import ConfigError
from prefrl.scripts.dataset_config import DatasetConfig, DatasetMixtureConfig, get_dataset


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
    with pytest.raises(ConfigError, match=r"datasets\.path='b\.jsonl' is on this machine: revision='v1'"):
        mixed({"path": "b.jsonl", "revision": "v1"})
