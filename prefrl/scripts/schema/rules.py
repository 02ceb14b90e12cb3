"""What schema.json says about options together: hyperparameters of mappings, and facts of the tables of losses.

The configs check these against classes and tables whose modules import torch; `prefrl.scripts.schema.early` reads them
here.
"""

from __future__ import annotations

import dataclasses
import typing
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.losses.advantage.estimators import ADVANTAGES
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.preference.pairwise import PAIR_LOSSES
from prefrl.losses.preference.reference_free import CPO_LOSSES
from prefrl.options.fields import default_of
from prefrl.options.kwargs import KwargsOption, kwargs_options
from prefrl.options.params import Params
from prefrl.registry import Algorithm
from prefrl.trainer.base.options.optimizer import KNOWN_OPTIMIZERS
from prefrl.trainer.base.options.schedule import SCHEDULE_NAMES

__all__ = ["ParamsTable", "rules_of"]

_LIMITS = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}
_KINDS = {int: "int", float: "float", bool: "bool", str: "str"}


class ParamsTable:
    """Classes of hyperparameters, each once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[type[Params], int] = {}

    def number(self, params: type[Params]) -> int:
        """The number of a class."""
        return self._numbers.setdefault(params, len(self._numbers))

    def rows(self) -> list[dict[str, Any]]:
        """The hyperparameters of each class: their types, bounds and defaults, and its rules as module:function."""
        return [
            {"fields": _fields(params), "rules": [f"{rule.__module__}:{rule.__name__}" for rule in params.all_rules()]}
            for params in self._numbers
        ]


def rules_of(algorithm: Algorithm, table: ParamsTable) -> dict[str, Any]:
    """What the options of an algorithm are checked against.

    Args:
        algorithm: A row of the registry.
        table: Gets the classes of hyperparameters.
    """
    config_class = algorithm.load_config()
    names = {field.name for field in dataclasses.fields(config_class)}
    rules: dict[str, Any] = {
        "kwargs": [_kwargs_option(option, table) for option in kwargs_options(config_class)],
        "known": {"optim": ["optimizer", *KNOWN_OPTIMIZERS], "lr_scheduler_type": ["schedule", *SCHEDULE_NAMES]},
        "best_metric": config_class.best_metric,
    }
    if "importance_sampling_level" in names:
        rules["levels"] = {name: sorted(row.levels) for name, row in POLICY_LOSSES.items()}
        rules["of_tokens"] = [name for name, row in ADVANTAGES.items() if row.level == "token"]
        rules["of_greedy"] = [name for name, row in ADVANTAGES.items() if "greedy" in row.needs]
        rules["reductions"] = {name: row.reduction for name, row in POLICY_LOSSES.items()}
        rules["estimator"] = None if "advantage_estimator" in names else config_class.estimator.fget(None)
    if "num_generations" in names:
        two = SimpleNamespace(per_device_train_batch_size=1, num_generations=2)
        rules["counts_prompts"] = _rows_of(config_class, two) == two.num_generations
    losses = {"dpo": PAIR_LOSSES, "cpo": CPO_LOSSES}.get(algorithm.name, {})
    rules["pairs"] = {
        name: {
            "params": table.number(row.params),
            "uses_log_ratios": row.uses_log_ratios,
            "is_batch_loss": row.is_batch_loss,
        }
        for name, row in losses.items()
    }
    return rules


def _rows_of(config_class: Any, options: Any) -> int:
    """Rows of a micro-batch, from a config that is not made as a whole."""
    config = object.__new__(config_class)
    vars(config).update(vars(options))
    return int(config.rows_per_micro_batch)


def _kwargs_option(option: KwargsOption[Any], table: ParamsTable) -> dict[str, Any]:
    row = {
        "name": option.name,
        "switch": option.switch,
        "label": option.label,
        "off": option.off,
        "own_options": option.own_options,
        "checked_elsewhere": [str(getattr(value, "value", value)) for value in option.checked_elsewhere],
        "choices": [[value, table.number(params)] for value, params in option.choices.items()],
    }
    return {key: value for key, value in row.items() if value not in ("", (), [])}


def _fields(params: type[Params]) -> dict[str, Any]:
    hints = typing.get_type_hints(params, include_extras=True)
    return {field.name: _field(hints[field.name], default_of(field)) for field in dataclasses.fields(params)}


def _field(hint: Any, default: Any) -> dict[str, Any]:
    """A hyperparameter as the schema has it. What is false or empty is left out."""
    is_union = typing.get_origin(hint) not in (Annotated, Literal, list, dict) and bool(typing.get_args(hint))
    parts = [part for part in (typing.get_args(hint) if is_union else (hint,)) if part is not type(None)]
    inner = parts[0] if len(parts) == 1 else None
    bounds = typing.get_args(inner)[1:] if typing.get_origin(inner) is Annotated else ()
    plain = typing.get_args(inner)[0] if bounds else inner
    is_list = typing.get_origin(plain) is list
    item = typing.get_args(plain)[0] if is_list else plain
    row = {
        "kind": _KINDS.get(item) if item is not None else None,
        "is_list": is_list,
        "is_nullable": type(None) in typing.get_args(hint),
        "choices": list(typing.get_args(plain)) if typing.get_origin(plain) is Literal else None,
        "bounds": {_LIMITS[type(limit)]: getattr(limit, _LIMITS[type(limit)]) for limit in bounds},
    }
    kept = {key: value for key, value in row.items() if value not in (None, False, {}, [])}
    return kept if default is None else {**kept, "default": default}
