"""Public names, option names and defaults are pinned: a change of them is a decision, with a line in CHANGELOG.md.

The keys of options that are mappings, and their defaults, are pinned by the tables of the docs.

After such a decision: `python -m tests.unit.test_public_api` writes the new snapshot.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import prefrl
import prefrl.rewards
import prefrl.trainer
from prefrl.options.fields import default_of, init_vars
from prefrl.registry import REGISTRY

SNAPSHOT = Path(__file__).parents[1] / "data" / "public_api.json"


def own_defaults(config: Any) -> dict[str, str]:
    """Options that prefrl declares, with their defaults; HuggingFace's are HuggingFace's affair."""
    own = {name for cls in config.__mro__ if cls.__module__.startswith("prefrl.") for name in cls.__annotations__}
    return {field.name: repr(default_of(field)) for field in dataclasses.fields(config) if field.name in own}


def public_api() -> dict[str, Any]:
    return {
        "prefrl": sorted(prefrl.__all__),
        "prefrl.trainer": sorted(prefrl.trainer.__all__),
        "prefrl.rewards": sorted(prefrl.rewards.__all__),
        "options": {name: own_defaults(row.load_config()) for name, row in REGISTRY.items()},
        "flat names": {name: [*init_vars(row.load_config())] for name, row in REGISTRY.items()},
        "constructors": {
            name: [p for p in inspect.signature(row.load_trainer().__init__).parameters if p != "self"]
            for name, row in REGISTRY.items()
        },
    }


def test_public_api_is_as_pinned() -> None:
    assert public_api() == json.loads(SNAPSHOT.read_text())


def test_every_public_name_can_be_imported() -> None:
    for module in (prefrl, prefrl.trainer, prefrl.rewards):
        for name in module.__all__:
            assert getattr(module, name) is not None


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(public_api(), indent=1) + "\n")
