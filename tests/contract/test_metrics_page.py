"""docs/metrics.md lists what runs log, for every trainer."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from prefrl.registry import REGISTRY
from tests.contract.cases import ONLINE, ROOT, dataset_of, make_trainer

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
OPTIONAL = "Only with some options"


def documented(name: str) -> tuple[set[str], set[str]]:
    """The metrics that a trainer always logs, and those that depend on options; `*` stands for a name."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        for metrics, trainers in re.findall(r"^\| (`[^|]+) \|.*\| ([^|]+) \|$", section, re.M):
            if name in trainers_of(trainers):
                names = {re.sub(r"<\w+>", "*", metric) for metric in re.findall(r"`([^`]+)`", metrics)}
                found[section.startswith(OPTIONAL)] |= names
    return found[False], found[True]


def trainers_of(cell: str) -> set[str]:
    """Of the last column, such as "all but `reward`"."""
    named = set(re.findall(r"`(\w+)`", cell))
    assert named <= REGISTRY.keys()
    many = {"all": {*REGISTRY}, "on prompts": {*ONLINE}}
    return many[cell.partition(" but ")[0]] - named if not cell.startswith("`") else named


@pytest.mark.parametrize("name", REGISTRY)
def test_the_page_of_metrics_has_what_a_run_logs_and_no_more(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, eval_strategy="steps", eval_steps=1, eval_dataset=dataset_of(name, 5))
    trainer.train()
    logged = {metric.removeprefix("eval_") for entry in trainer.state.log_history for metric in entry}
    always, sometimes = documented(name)
    assert {
        metric for metric in logged if not any(fnmatchcase(metric, known) for known in always | sometimes)
    } == set()
    assert {known for known in always if not any(fnmatchcase(metric, known) for metric in logged)} == set()
