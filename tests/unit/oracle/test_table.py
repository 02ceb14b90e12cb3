"""The tables that the docs show."""

import re
from pathlib import Path

from prefrl.losses.advantage.estimators import ADVANTAGES
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.scripts.oracle.tables import HYPERPARAMETERS, TABLES, params_of

DOCS = Path(__file__).parents[3] / "docs"


def pages() -> str:
    return "".join((DOCS / name).read_text(encoding="utf-8") for name in ("oracle.md", "losses.md"))


def test_tables_of_the_docs_are_what_is_computed_now():
    """Else run `python docs/make_oracle.py`."""
    text = pages()
    for name, table in TABLES.items():
        assert f"<!-- oracle: {name} -->\n\n{table.markdown()}\n\n<!-- end of oracle -->" in text
    for name, values in HYPERPARAMETERS.items():
        assert f"`{name}`: {', '.join(f'`{key}={value}`' for key, value in values.items())}" in text


def test_every_name_of_every_table_of_losses_is_in_the_docs():
    text = pages()
    parts = dict(re.findall(r"<!-- oracle: (\w+) -->(.*?)<!-- end of oracle -->", text, re.S))
    for part, names in (("advantages", ADVANTAGES), ("policy", POLICY_LOSSES), ("kl", KL_ESTIMATORS)):
        assert all(f"`{name}`" in parts[part] for name in names)
    assert all(f"`{name}`" in parts["corrections"] for name in OFF_POLICY_CORRECTIONS)


def test_hyperparameters_of_the_tables_are_those_of_their_rows():
    rows = {**POLICY_LOSSES, **ADVANTAGES}
    for name, values in HYPERPARAMETERS.items():
        params = params_of(name, rows[name].params)
        assert {key: getattr(params, key) for key in values} == values
