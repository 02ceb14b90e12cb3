"""Write the option tables of the docs from the configs: `python docs/make_tables.py`.

A page says where with a pair of markers, `<!-- options: prefrl.GRPOConfig -->` and `<!-- end of options -->`. What
stands between them is replaced.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

DOCS = Path(__file__).parent
MARKERS = re.compile(r"(<!-- options: ([\w.]+) -->\n).*?(<!-- end of options -->)", re.S)
SIGNS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def render(page: str) -> str:
    """The page with its tables as they should be."""
    return MARKERS.sub(lambda found: f"{found[1]}\n{tables(load(found[2]))}\n{found[3]}", page)


def load(path: str) -> type[Any]:
    """The class at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def tables(config: type[Any]) -> str:
    """One table for each option group of the config, under the group's description; HuggingFace's are left out."""
    hints = typing.get_type_hints(config, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(config)}
    parts = []
    for group in config.__mro__:
        names = [name for name in inspect.get_annotations(group) if name in fields]
        if not group.__module__.startswith("prefrl.") or not names:
            continue
        assert group.__doc__ is not None
        title = group.__doc__.strip().splitlines()[0]
        rows = [row(name, hints[name], fields.pop(name)) for name in names]
        parts.append("\n".join([title, "", "| option | value | default | meaning |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def row(name: str, hint: Any, field: dataclasses.Field[Any]) -> str:
    """A line of a table."""
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return f"| `{name}` | {describe(hint)} | `{default}` | {field.metadata['help']} |"


def describe(hint: Any) -> str:
    """What a value may be, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [f"{SIGNS[type(b)][1]} {getattr(b, SIGNS[type(b)][0]):g}" for b in arguments[1:]]
        return f"{describe(arguments[0])} {', '.join(bounds)}"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {describe(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:  # a union; a mapping may also be given as JSON text
        is_mapping = any(typing.get_origin(part) is dict for part in arguments)
        return " or ".join(describe(part) for part in arguments if not (is_mapping and part is str))
    return "None" if hint is type(None) else str(hint.__name__)


def main() -> None:
    """Rewrite every page."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := render(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
