"""The record of what started a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefrl.run.records import STARTS, Identity, command_of, read_starts, record_start
from prefrl.trainer.run_folder import RunFolder


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/python3", "train.py", "--out", "a b"], "python3 train.py --out 'a b'"),
        (["/v/python", "/v/bin/prefrl", "sft", "--config", "run.yaml"], "prefrl sft --config run.yaml"),
        (["python", "t.py", "--hub-token", "abc", "--password=x"], "python t.py --hub-token '***' '--password=***'"),
        (["python", "t.py", "hf_0123456789abcdefghij"], "python t.py '***'"),
        (["python", "t.py", "--pad_token", "<pad>"], "python t.py --pad_token '<pad>'"),
        ([], ""),
    ],
)
def test_a_command_can_be_given_again_and_has_no_secrets(argv: list[str], command: str) -> None:
    assert command_of(argv) == command


def test_each_start_of_the_run_is_kept_in_order(tmp_path: Path) -> None:
    for run in ("a", "b", "a"):
        record_start(tmp_path, run)
    with (tmp_path / STARTS).open("a", encoding="utf-8") as file:
        file.write('{"run": "a", "ti')
    starts = read_starts(tmp_path, "a")
    assert [start.run for start in starts] == ["a", "a"]
    assert starts[0].time <= starts[1].time
    assert {"python", "prefrl", "torch"} <= starts[0].versions.keys()


def test_without_a_record_there_are_no_starts(tmp_path: Path) -> None:
    assert read_starts(tmp_path, "a") == []


def test_a_training_records_its_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None, in_background=False, is_first_of_node=True)
    for resume in (None, True):  # there is no checkpoint: both begin at step 0
        start = folder.start(resume, Identity("", {"seed": 1}), allowed=[])
    assert [start.run for start in read_starts(tmp_path, start.run)] == [start.run] * 2
