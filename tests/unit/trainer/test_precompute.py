from __future__ import annotations

import json
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from prefrl import distributed
from prefrl.data.collate import preference_batch, unpaired_batch
from prefrl.errors import ConfigError, DataError
from prefrl.models.fingerprint import weights_fingerprint
from prefrl.models.forward import Scoring
from prefrl.models.reference import Reference, make_reference
from prefrl.trainer.offline import precompute as precompute_module
from prefrl.trainer.offline.precompute import precompute_reference
from prefrl.types import TokenBatch
from tests.assets import tiny_model
from tests.launch import run_ranks

ROOT = Path(__file__).parents[3]
IDS = datasets.List(datasets.Value("int32"))
LENGTHS = [(3, 4, 2), (2, 9, 5), (5, 1, 1), (1, 6, 7), (8, 2, 3), (2, 2, 2), (4, 3, 12)]  # of 7 ragged rows


def ids(*lengths: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 120, (sum(lengths),), generator=generator).tolist()  # type: ignore[no-any-return]


def pairs() -> datasets.Dataset:
    rows = [
        {name: ids(length, seed=10 * row + i) for i, (name, length) in enumerate(zip(names, lengths, strict=True))}
        for names in [("prompt_ids", "chosen_ids", "rejected_ids")]
        for row, lengths in enumerate(LENGTHS)
    ]
    features = datasets.Features(prompt_ids=IDS, chosen_ids=IDS, rejected_ids=IDS)
    return datasets.Dataset.from_list(rows, features=features)


def unpaired(*, with_mismatched: bool) -> datasets.Dataset:
    """Rows 1 and 4 have no mismatched completion."""
    rows = []
    for row, (prompt, completion, mismatched) in enumerate(LENGTHS):
        rows.append(
            {
                "prompt_ids": ids(prompt, seed=10 * row),
                "completion_ids": ids(completion, seed=10 * row + 1),
                "label": row % 2 == 0,
            }
        )
        if with_mismatched:
            rows[-1]["KL_completion_ids"] = [] if row in (1, 4) else ids(mismatched, seed=10 * row + 2)
    features = {"prompt_ids": IDS, "completion_ids": IDS, "label": datasets.Value("bool")}
    return datasets.Dataset.from_list(
        rows, features=datasets.Features(features | ({"KL_completion_ids": IDS} if with_mismatched else {}))
    )


CASES: dict[str, tuple[datasets.Dataset, Callable[[list[dict[str, Any]]], TokenBatch], list[str]]] = {
    "pairs": (pairs(), preference_batch, ["ref_chosen_logprobs", "ref_rejected_logprobs"]),
    "unpaired": (unpaired(with_mismatched=False), unpaired_batch, ["ref_logprobs"]),
    "KL": (unpaired(with_mismatched=True), unpaired_batch, ["ref_logprobs", "ref_KL_logprobs"]),
}


def reference() -> Reference:
    made = make_reference(tiny_model("llama"), beta=0.1)
    assert made is not None
    return made


class Scorer:
    """A reference that remembers what it scored."""

    def __init__(self) -> None:
        self.reference = reference()
        self.batches: list[TokenBatch] = []

    def __call__(self, batch: TokenBatch) -> Tensor:
        self.batches.append(batch)
        return self.reference.logprobs(batch, Scoring(0.7))


def refuse(batch: TokenBatch) -> Tensor:
    raise AssertionError("scored again")


def by_position(batch: TokenBatch) -> Tensor:
    """No model: minus each token's id and position in its row."""
    return -batch.response_ids - torch.cat([torch.arange(length) for length in batch.response_lengths]) / 16


def precompute(dataset: Any, score: Callable[[TokenBatch], Tensor], folder: Path | None, **changes: Any) -> Any:
    arguments = {"collate": preference_batch, "batch_size": 2, "weights": "w", "dtype": torch.float32}
    return precompute_reference(
        dataset, reference_logprobs=score, cache_dir=folder, **(arguments | {"temperature": 0.7} | changes)
    )


@pytest.mark.parametrize(("dataset", "collate", "columns"), CASES.values(), ids=CASES)
def test_precomputed_values_are_those_of_the_live_reference(
    dataset: datasets.Dataset, collate: Any, columns: list[str], tmp_path: Path
) -> None:
    live = reference()
    alone = precompute(dataset, Scorer(), tmp_path, collate=collate, batch_size=1)
    assert alone.column_names == [*dataset.column_names, *columns]
    for row, before in zip(alone, dataset, strict=True):
        expected = live.logprobs(collate([before]), Scoring(0.7))
        found = collate([row]).ref_logprobs
        assert found.equal(expected)
        assert found.numel() == sum(len(row[column]) for column in columns)
        assert {name: row[name] for name in before} == before
    for name in columns:
        assert alone.features[name] == datasets.List(datasets.Value("float32"))
    together = precompute(dataset, Scorer(), tmp_path / "other", collate=collate, batch_size=3)
    a, b = (collate(list(rows)).ref_logprobs for rows in (alone, together))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert float(a.std()) > 0.5


@pytest.mark.parametrize(("dataset", "collate", "columns"), CASES.values(), ids=CASES)
def test_values_go_to_their_row_and_column(
    dataset: datasets.Dataset, collate: Any, columns: list[str], tmp_path: Path
) -> None:
    scored = precompute(dataset, by_position, tmp_path, collate=collate, batch_size=4)
    sources = [name for name in dataset.column_names if name not in ("prompt_ids", "label")]
    for row in scored:
        for source, column in zip(sources, columns, strict=True):
            assert row[column] == [-token - i / 16 for i, token in enumerate(row[source])]


@pytest.mark.parametrize(("dataset", "collate", "columns"), CASES.values(), ids=CASES)
def test_a_second_call_reads_what_the_first_computed(
    dataset: datasets.Dataset, collate: Any, columns: list[str], tmp_path: Path
) -> None:
    first = precompute(dataset, Scorer(), tmp_path, collate=collate)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".parquet"
    second = precompute(dataset, refuse, tmp_path, collate=collate, batch_size=5)
    assert second.features == first.features
    assert second[:] == first[:]
    # Equal rows, held in another way.
    shuffled = dataset.select([3, 0, 1, 2, 4, 5, 6]).select([1, 2, 3, 0, 4, 5, 6])
    assert precompute(shuffled, refuse, tmp_path, collate=collate)[:] == first[:]
    assert list(tmp_path.iterdir()) == [file]


def test_other_weights_rows_or_scores_are_scored_anew(tmp_path: Path) -> None:
    dataset = pairs()
    precompute(dataset, by_position, tmp_path)
    changed = dataset.to_list()
    changed[4]["rejected_ids"][1] += 1
    prompt = dataset.to_list()
    prompt[4]["prompt_ids"][1] += 1
    variants: list[tuple[Any, dict[str, Any]]] = [
        (dataset, {"weights": "v"}),
        (dataset, {"temperature": 0.8}),
        (dataset, {"dtype": torch.bfloat16}),
        (datasets.Dataset.from_list(changed, features=dataset.features), {}),
        (datasets.Dataset.from_list(prompt, features=dataset.features), {}),
        (dataset.select(range(6)), {}),
        (dataset.select([1, 0, 2, 3, 4, 5, 6]), {}),
        (dataset.rename_columns({"chosen_ids": "rejected_ids", "rejected_ids": "chosen_ids"}), {}),
    ]
    for variant, changes in variants:
        score = Scorer()
        precompute(variant, score, tmp_path, **changes)
        assert sum(batch.num_rows for batch in score.batches) == 2 * len(variant)
    assert len(list(tmp_path.iterdir())) == 1 + len(variants)


def test_rows_of_a_batch_are_about_equally_long_and_the_longest_come_first(tmp_path: Path) -> None:
    score = Scorer()
    precompute(pairs(), score, tmp_path, batch_size=2)
    # Rows of 9, 16, 7, 14, 13, 6, 19 tokens with their prompt counted once.
    assert [batch.num_forward_tokens for batch in score.batches] == [19 + 16, 14 + 13, 9 + 7, 6]


def test_an_adapted_policy_shares_the_file_of_its_base_model(tmp_path: Path) -> None:
    import peft

    base, policy = (tiny_model("llama") for _ in range(2))
    policy = peft.get_peft_model(policy, peft.LoraConfig(target_modules=["q_proj"]))
    precompute(pairs(), Scorer(), tmp_path, weights=weights_fingerprint(base))
    precompute(pairs(), refuse, tmp_path, weights=weights_fingerprint(policy))


def test_the_default_folder_is_in_the_cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    precompute(pairs(), by_position, None)
    assert len(list((tmp_path / "prefrl_reference").glob("*.parquet"))) == 1


# What does not work.


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precompute_ref_log_probs=True with an IterableDataset.*known length"):
        precompute(pairs().to_iterable_dataset(), by_position, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    def broken(batch: TokenBatch) -> Tensor:
        return by_position(batch).index_fill(0, torch.tensor([1]), value)

    with pytest.raises(DataError, match="the reference gives log-probs of chosen_ids that are not finite"):
        precompute(pairs(), broken, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_batch_in_another_order_is_refused(tmp_path: Path) -> None:
    def backwards(rows: list[dict[str, Any]]) -> TokenBatch:
        return preference_batch(rows[::-1])

    with pytest.raises(ValueError, match="are laid out as responses of"):
        precompute(pairs(), by_position, tmp_path, collate=backwards)


def test_a_run_that_stops_in_between_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(batch: TokenBatch) -> Tensor:
        if batch.num_rows == 2:  # the last one
            raise KeyboardInterrupt
        return by_position(batch)

    with pytest.raises(KeyboardInterrupt):
        precompute(pairs(), stops, tmp_path)
    assert not list(tmp_path.iterdir())

    def half(table: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"PAR1 half")
        assert not list(tmp_path.glob("*.parquet"))  # a kill here leaves nothing that a later run would read
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", half)
        with pytest.raises(OSError, match="disk full"):
            precompute(pairs(), by_position, tmp_path)
    assert not list(tmp_path.iterdir())
    precompute(pairs(), by_position, tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    """Of the last log-prob of row 3's chosen side."""
    value = pq.read_table(path)["ref_chosen_logprobs"][3][-1].as_py()
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", value))] ^= 1
    path.write_bytes(bytes(content))


def replace_by_another(path: Path) -> None:
    precompute(pairs(), by_position, path.parent / "other", weights="v")
    shutil.move(next((path.parent / "other").iterdir()), path)


def forget_label(path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)


def drop_last_row(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)


def drop_last_row_and_relabel(path: Path) -> None:
    table = pq.read_table(path)
    label = json.loads(table.schema.metadata[b"prefrl"])
    label["num_rows"] -= 1
    table = table.slice(0, table.num_rows - 1).replace_schema_metadata({b"prefrl": json.dumps(label).encode()})
    pq.write_table(table, path)


def exchange_rows(path: Path) -> None:
    pq.write_table(pq.read_table(path).take([1, 0, 2, 3, 4, 5, 6]), path)


def drop_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["ref_rejected_logprobs"]), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot be read"),
        (empty, "cannot be read"),
        (flip_a_bit, "cannot be read"),
        (replace_by_another, "was written for other weights or rows"),
        (forget_label, "was written for other weights or rows"),
        (drop_last_row, "was written for other weights or rows"),
        (drop_last_row_and_relabel, "has log-probs of 6 rows with other numbers of tokens"),
        (exchange_rows, "with other numbers of tokens than chosen_ids"),
        (drop_column, "has the columns .'ref_chosen_logprobs'."),
    ],
)
def test_a_file_that_does_not_fit_is_never_used(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    precompute(pairs(), by_position, tmp_path)
    (file,) = tmp_path.iterdir()
    damage(file)
    with pytest.raises(DataError, match=rf"{file}(.|\n)*{message}(.|\n)*Delete it"):
        precompute(pairs(), by_position, tmp_path)
    file.unlink()
    precompute(pairs(), by_position, tmp_path)


# Two processes.


def score_on_two_processes(folder: Path) -> None:
    """Run by each process: score, and read what was scored."""
    torch.distributed.init_process_group("gloo")
    assert distributed.world_size() == 2
    score = Scorer()
    write = precompute_module._write

    def write_slowly(*arguments: Any) -> None:
        time.sleep(1)
        write(*arguments)

    precompute_module._write = write_slowly
    first = precompute(pairs(), score, folder / "cache")
    second = precompute(pairs(), refuse, folder / "cache")
    assert first[:] == second[:]
    result = {"rows": first[:], "passes": [batch.response_lengths for batch in score.batches]}
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(result))


def test_two_processes_share_the_rows_and_both_end_with_all(tmp_path: Path) -> None:
    run_ranks("tests.unit.trainer.test_precompute", tmp_path)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    expected = precompute(pairs(), Scorer(), tmp_path / "alone")
    for result in results:
        found = datasets.Dataset.from_dict(result["rows"], features=expected.features)
        a, b = (preference_batch(list(rows)).ref_logprobs for rows in (found, expected))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    # From the longest to the shortest in turn; the last row makes up for the one that the second process lacks.
    rows = {(chosen, rejected): row for row, (_, chosen, rejected) in enumerate(LENGTHS)}
    passes = [[[rows[tuple(p[i : i + 2])] for i in range(0, len(p), 2)] for p in r["passes"]] for r in results]
    assert passes == [[[6, 3], [0, 5]], [[1, 4], [2, 5]]]


if __name__ == "__main__":
    score_on_two_processes(Path(sys.argv[1]))
