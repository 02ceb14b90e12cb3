"""Store the default of every option of TRL's configs in tests/data/trl_defaults.json.

    python -m benchmarks.trl_defaults

Run it with TRL 1.16.0, and with 1.12.0 for the configs that later versions lack: `pip install --no-deps trl==VERSION`.
What is stored for other versions stays, unless the installed one has the config, too.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from prefrl.registry import REGISTRY

FILE = Path(__file__).parents[1] / "tests" / "data" / "trl_defaults.json"


def main() -> None:
    """Write the file: the defaults of transformers, and for each config those that it adds or changes."""
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    base = defaults_of(TrainingArguments)
    stored["TrainingArguments"] = {"transformers": version("transformers"), "defaults": base}
    for name, row in REGISTRY.items():
        config = row.config.partition(":")[2]
        found = config_class(name, config)
        older = stored.get(config, {}).get("trl", "0")
        if found is not None and _number(version("trl")) >= _number(older):
            own = {key: value for key, value in defaults_of(found).items() if base.get(key, "none") != value}
            stored[config] = {"trl": version("trl"), "defaults": own}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(stored[name])}" for name in sorted(stored))
    FILE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


def config_class(algorithm: str, name: str) -> Any:
    """A config of the installed TRL; None if it has no such config."""
    for module in ("trl", f"trl.experimental.{algorithm}"):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


def defaults_of(config: Any) -> dict[str, Any]:
    """The default of each option, as JSON has it; None for an option without one."""
    made = {field.name: _default(field) for field in dataclasses.fields(config) if field.init}
    return {name: getattr(value, "value", value) for name, value in sorted(made.items())}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


if __name__ == "__main__":
    main()
