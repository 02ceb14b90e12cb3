"""References between the keys of a file, and values that no one writes."""

from __future__ import annotations

from typing import Any

import pytest

from prefrl import ConfigError
from prefrl.scripts.migrate.run import of_yaml

FILE = """\
run:
  name: gsm8k
  folder: runs/${run.name}/${..project}
  lr: 1e-6
project: maths
same: ${run.lr}
size: 8
again: ${same}
files: ["${run.folder}/a", b]
above:
  own: ${.other}
  other: [1, 2]
"""
RESOLVED = [
    ("run.folder", "runs/gsm8k/maths"),
    ("again", 1e-6),
    ("files", ["runs/gsm8k/maths/a", "b"]),
    ("above.own", [1, 2]),
]


@pytest.mark.parametrize(("path", "value"), RESOLVED)
def test_references_to_keys_of_the_file_are_put_in(path: str, value: Any) -> None:
    assert of_yaml(FILE, ())[path][1] == value


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("${oc.select:size}", 8),
        ("${oc.select:missing,3}", 3),
        ("${oc.select:missing}", "${oc.select:missing}"),
        ("${oc.env:HOME}/a", "${oc.env:HOME}/a"),
        ("${missing}", "${missing}"),
        ("${x}", "${x}"),  # itself
        ("a${size", "a${size"),
    ],
)
def test_what_the_file_does_not_have_stays(reference: str, value: Any) -> None:
    assert of_yaml(f"{FILE}x: {reference}\n", ())["x"][1] == value


def test_references_in_a_circle_end() -> None:
    assert "${" in of_yaml("a: ${b}\nb: ${a}\n", ())["a"][1]


def test_references_that_multiply_are_refused() -> None:
    lines = [f"a{i}: ${{a{i + 1}}}${{a{i + 1}}}" for i in range(30)]
    with pytest.raises(ConfigError, match="has more than 4096 characters with its references put in"):
        of_yaml("\n".join([*lines, "a30: xxxxxxxx"]), ())


def test_arguments_are_one_value_unless_their_names_are_known() -> None:
    text = "a_kwargs: {x: 1}\nb_kwargs: {x: 1}\n"
    assert of_yaml(text, ["b_kwargs.x"]) == {"a_kwargs": (1, {"x": 1}), "b_kwargs.x": (2, 1)}


def test_a_number_that_python_does_not_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a\.b: this value cannot be read"):
        of_yaml(f"a:\n  b: {'9' * 20_000}\n", ())
