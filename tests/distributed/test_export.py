"""Partitioned weights are exported as by a single process, whatever the reading process does."""

from __future__ import annotations

from pathlib import Path

from tests.launch import launch

BACKENDS = ("zero3", "fsdp2")


def test_partitioned_weights_are_read_bit_by_bit(tmp_path: Path) -> None:
    """All weights, those below an adapter, changes of them, and the adapter's files; see the worker for the ways."""
    result = tmp_path / "results.pt"
    found = launch("tests.distributed.export_worker", result, *BACKENDS, result=result)
    assert found.keys() == {*BACKENDS}
    for backend, results in found.items():
        assert len(results) >= 16
        assert sum(len(ways) == 8 for ways in results.values()) >= 5
        wrong = {(case, way): names for case, ways in results.items() for way, names in ways.items() if names}
        assert wrong == {}, backend
