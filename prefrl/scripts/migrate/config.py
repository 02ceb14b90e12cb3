"""Rewrites YAML files of TRL: the options have the same places, so the file is edited."""

from __future__ import annotations

import yaml

from prefrl.options.foreign.trl import TRL
from prefrl.scripts.migrate.edits import Migrated, converted, every_option

__all__ = ["migrate_trl_yaml"]


def migrate_trl_yaml(text: str) -> Migrated:
    """A YAML file for TRL's commands or scripts, with the names of prefrl; all else stays as it is."""
    result = Migrated(text)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    lines = text.splitlines(keepends=True)
    for key, value in reversed(root.value if isinstance(root, yaml.MappingNode) else []):
        row = None if key.value in every_option() else TRL.get(key.value)
        if row is None:
            continue
        first, said = key.start_mark.line, f"{key.value} {row.says}"
        end = value.end_mark.line + (value.end_mark.column > 0)
        options = converted(row, yaml.safe_load(yaml.serialize(value)))
        if row.may_go:
            lines[first:end] = []
        elif row.kind == "not there" or isinstance(options, str):
            result.open.append((first + 1, said))
            continue
        elif row.kind == "renamed":
            lines[first] = lines[first].replace(key.value, row.options[0], 1)
        else:
            lines[first:end] = [yaml.safe_dump(dict(options), sort_keys=False)]
        result.changes.append((first + 1, said))
    result.text = "".join(lines)
    result.changes.sort()
    result.open.sort()
    return result
