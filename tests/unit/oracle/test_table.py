"""The tables that the docs show."""

import re
from collections.abc import Callable
from pathlib import Path

from prefrl.losses.advantage.estimators import ADVANTAGES
from prefrl.losses.kl.estimators import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.oracle.tables import HYPERPARAMETERS, TABLES

PAGE = Path(__file__).parents[3] / "docs/oracle.md"


def test_tables_of_the_docs_are_what_is_computed_now():
    """Else run `python docs/make_oracle.py`."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        assert f"<!-- oracle: {name} -->\n\n{table.markdown()}\n\n<!-- end of oracle -->" in text
    assert all(f"`{name}={value}`" in text for name, value in HYPERPARAMETERS.items())


def test_every_name_of_every_table_of_losses_is_in_the_docs():
    text = PAGE.read_text(encoding="utf-8")
    parts = dict(re.findall(r"<!-- oracle: (\w+) -->(.*?)<!-- end of oracle -->", text, re.S))
    for part, names in (("advantages", ADVANTAGES), ("policy", POLICY_LOSSES), ("kl", KL_ESTIMATORS)):
        assert all(f"`{name}`" in parts[part] for name in names)
    assert all(f"`{name}`" in parts["corrections"] for name in OFF_POLICY_CORRECTIONS)


def test_every_hyperparameter_has_a_value():
    rows: list[Callable[..., object]] = [*POLICY_LOSSES.values(), *ADVANTAGES.values()]
    assert all(row.hyperparameters <= HYPERPARAMETERS.keys() for row in rows)
