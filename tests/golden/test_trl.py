"""prefrl's first step against values of TRL, stored by `python -m benchmarks.agreement_with_trl --output`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefrl.scripts.migrate.python import migrate_script
from tests.golden.cases import AGREEMENT_CASES, prefrl_values
from tests.golden.trl_script import SCRIPT, values_of

GOLDEN = json.loads((Path(__file__).parent / "trl_1_16.json").read_text(encoding="utf-8"))
STORED = GOLDEN["values"]
EQUAL = [name for name, case in AGREEMENT_CASES.items() if case.differs_because is None]


def test_every_case_is_stored() -> None:
    assert STORED.keys() == AGREEMENT_CASES.keys()


@pytest.mark.parametrize("name", EQUAL)
def test_loss_and_gradient_norm_are_those_of_trl(name: str) -> None:
    values = prefrl_values(AGREEMENT_CASES[name])
    assert {key: values[key] for key in STORED[name]} == pytest.approx(STORED[name], rel=1e-4)


def test_the_inputs_tell_losses_apart() -> None:
    """Sorting changes something, and KTO's KL is above its lower bound 0."""
    assert STORED["dpo aot"] != STORED["dpo sigmoid even"]
    assert prefrl_values(AGREEMENT_CASES["kto"])["kl"] > 0.1


def test_a_migrated_script_starts_as_the_original_does() -> None:
    result = migrate_script(SCRIPT)
    assert not result.open
    assert values_of(result.text) == pytest.approx(GOLDEN["script"], rel=1e-4)
