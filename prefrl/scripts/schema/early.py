"""Checks options that exclude each other before anything heavy is imported.

The rules are those of the configs: functions and option groups of modules that need neither torch nor transformers.
What the rules read of heavier tables stands in schema.json. What needs a device, a model or a package is left to the
config.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.params import Params
from prefrl.options.suggest import check_known
from prefrl.trainer.base.options.autopilot import AutopilotOptions, check_autopilot, name_best_metric
from prefrl.trainer.base.options.checkpoint import CheckpointOptions, check_checkpoints
from prefrl.trainer.base.options.evaluation import check_evaluation
from prefrl.trainer.base.options.flat_names import fill_place
from prefrl.trainer.base.options.ignored import check_ignored_options
from prefrl.trainer.base.options.kwargs import KwargsOption
from prefrl.trainer.base.options.reference import OfflineReferenceOptions, ReferenceOptions
from prefrl.trainer.base.options.rules import (
    check_common,
    check_numbers,
    check_schedule,
    check_update,
    check_warmup_evaluations,
)
from prefrl.trainer.base.options.size import check_rate, derive_sizes, take_automatic
from prefrl.trainer.grpo_presets import PRESETS, combined
from prefrl.trainer.offline.loss_options import check_loss_options, check_pair_losses
from prefrl.trainer.offline.rules import (
    check_density_ratios,
    check_divergence,
    check_labels,
    check_packing,
    check_shape,
    check_workers,
)
from prefrl.trainer.online.flat_names import FLAT_NAMES
from prefrl.trainer.online.local_options import LocalOptions
from prefrl.trainer.online.policy_rules import (
    check_group,
    check_kl,
    check_level,
    check_pairs,
    check_ppo,
    check_ratio,
    check_reinforce_plus_plus,
    check_rloo,
    kl_part,
)
from prefrl.trainer.online.rules import GenerationRules
from prefrl.trainer.online.truncation_options import TruncationOptions
from prefrl.trainer.online.vllm_options import VLLMOptions

__all__ = ["check_pairs_of_options"]

_LIMITS: dict[str, Any] = {"ge": Ge, "gt": Gt, "le": Le, "lt": Lt}
_KINDS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate does
_Check = Callable[[Any], None]
# The rules of one algorithm; those before all others, and those after.
_FIRST: dict[str, _Check] = {
    "rloo": check_rloo,
    "reinforce_plus_plus": check_reinforce_plus_plus,
    "online_dpo": check_pairs,
}
_LAST: dict[str, _Check] = {
    "sft": check_packing,
    "dpo": check_divergence,
    "kto": check_labels,
    "bco": check_density_ratios,
    "cpo": check_shape,
    "grpo": check_group,
    "ppo": check_ppo,
}


class _Derived:
    """What configs derive from options, as far as the rules here read it."""

    rules: ClassVar[Mapping[str, Any]]
    device: ClassVar[Any] = SimpleNamespace(type="unknown")  # finding it out needs torch

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return max(int(os.environ.get(name, "1")) for name in _NUMBERS_OF_PROCESSES)

    @property
    def rows_per_micro_batch(self) -> int:
        """See `BaseConfig.rows_per_micro_batch` and `OnlineDPOConfig.rows_per_micro_batch`."""
        options: Any = self
        rows = int(options.per_device_train_batch_size)
        return rows * options.num_generations if self.rules.get("counts_prompts") else rows

    @property
    def scoring_truncation(self) -> object:
        """See `BaseConfig.scoring_truncation`: None if the whole softmax is scored."""
        return self if getattr(self, "truncated_logprobs", "softmax") == "exact" else None

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        options: Any = self
        return str(self.rules["estimator"] or options.advantage_estimator)

    @property
    def kl_part(self) -> str | None:
        """See `KLOptions.kl_part`."""
        return kl_part(self)


def check_pairs_of_options(
    algorithm: str,
    schema: Mapping[str, Any],
    options: Sequence[Mapping[str, Any]],
    given: Mapping[str, Any],
    *,
    knows_processes: bool = True,
) -> Any:
    """Check the options of an algorithm against each other.

    Args:
        algorithm: Its name in the registry.
        schema: The content of schema.json.
        options: Its options in the schema.
        given: Those that the user gives.
        knows_processes: False: the run is started on other processes, so sizes of batches are left to them.

    Returns:
        The options as attributes.

    Raises:
        ConfigError: The one that the config would raise.
    """
    rules, params = schema["rules"][algorithm], [_params(row) for row in schema["params"]]
    config = _config(rules, options, given)
    config.knows_sizes = knows_processes and not config.parallelism_config
    _check_sizes(config)
    for name, (what, *known) in rules["known"].items():
        check_known(name, str(getattr(config, name)), known, what)
    _FIRST.get(algorithm, _nothing)(config)
    for row in rules["kwargs"]:
        if row["switch"] is None or hasattr(config, row["switch"]):
            _kwargs_option(row, params).check(config)
    for check in (check_common, check_checkpoints, check_ignored_options, check_schedule, check_update):
        check(config)
    check_rate(config, config.automatic)
    check_evaluation(config)
    check_autopilot(config)
    if hasattr(config, "num_generations"):
        _check_online(config)
    else:
        _check_offline(config, params)
    _LAST.get(algorithm, _nothing)(config)
    return config


def _nothing(config: Any) -> None:
    """The rule of algorithms that have none."""


def _check_sizes(config: Any) -> None:
    config.automatic = take_automatic(config)
    check_numbers(config)
    name_best_metric(config)
    # As transformers does.
    if config.eval_strategy == "steps" and not config.eval_steps:
        config.eval_steps = config.logging_steps
    if config.activation_checkpointing is None:
        config.activation_checkpointing = config.gradient_checkpointing
    if config.include_num_input_tokens_seen is False:
        config.include_num_input_tokens_seen = "no"
    check_warmup_evaluations(config)
    config.sought = derive_sizes(config, config.automatic) if config.knows_sizes else frozenset()


def _check_online(config: Any) -> None:
    if config.knows_sizes:
        config.validate_generation_size()
        config.validate_generation_mode()
    config.validate_prompts()
    config.validate_local(use_vllm=config.use_vllm)
    config.validate_vllm()
    if hasattr(config, "sync_ref_model"):
        config.validate_reference()
    if hasattr(config, "importance_sampling_level"):
        check_level(config, config.rules["levels"][config.loss_type])
        check_kl(config)
        config.validate_truncation()
        check_ratio(config, of_tokens=config.estimator in config.rules["of_tokens"])


def _check_offline(config: Any, params: Sequence[type[Params]]) -> None:
    check_workers(config)
    if hasattr(config, "sync_ref_model"):
        config.validate_reference()
    losses = {
        name: SimpleNamespace(**{**row, "params": params[row["params"]]})
        for name, row in config.rules["pairs"].items()
    }
    if not losses:
        return
    chosen = config.loss_type if isinstance(config.loss_type, list) else [config.loss_type]
    if hasattr(config, "use_weighting"):
        check_pair_losses(config, losses)
    check_loss_options(config, losses, chosen)


def _config(rules: Mapping[str, Any], options: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Any:
    """The options as a dataclass with the light option groups of the config: defaults, preset, and what is given."""
    names = {option["name"] for option in options}
    fields = [(option["name"], Any, _with_default(option.get("default"))) for option in options]
    namespace = {"rules": rules, "best_metric": rules["best_metric"], "__module__": __name__}
    config: Any = dataclasses.make_dataclass(
        "Options", fields, bases=_groups(names), namespace=namespace, init=False, eq=False, repr=False
    )()
    for option in options:
        setattr(config, option["name"], option.get("default"))
    preset = given.get("preset")
    values = dict(given) if preset is None else combined(PRESETS[preset], given, FLAT_NAMES)
    for name in values.keys() - FLAT_NAMES.keys():
        setattr(config, name, values[name])
    for option in options:  # in the order of their declaration: some give way to others
        name, default = option["name"], option.get("default")
        if name in FLAT_NAMES and values.get(name, default) != default:
            fill_place(config, name, values[name], FLAT_NAMES[name])
    return config


def _groups(names: set[str]) -> tuple[type, ...]:
    """The option groups whose modules are light, as far as the algorithm has them."""
    groups: list[type] = [_Derived]
    if "truncated_logprobs" in names:
        groups += [TruncationOptions]
    if "num_generations" in names:
        groups += [LocalOptions, VLLMOptions, GenerationRules]
    if "sync_ref_model" in names:
        groups += [OfflineReferenceOptions if "precompute_ref_log_probs" in names else ReferenceOptions]
    return (*groups, CheckpointOptions, AutopilotOptions)


def _with_default(default: Any) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default))
    return dataclasses.field(default=default)


def _kwargs_option(row: Mapping[str, Any], params: Sequence[type[Params]]) -> KwargsOption[Any]:
    choices = {value: params[number] for value, number in row["choices"]}
    own_options = tuple(row.get("own_options", ()))
    rest = {key: row[key] for key in ("name", "switch", "label", "off", "checked_elsewhere") if key in row}
    return KwargsOption(**rest, description="", choices=choices, own_options=own_options)


def _params(row: Mapping[str, Mapping[str, Any]]) -> type[Params]:
    """A class of hyperparameters with the types, bounds and defaults of the schema."""
    fields = [(name, _type(field), _with_default(field.get("default"))) for name, field in row.items()]
    namespace = {"__module__": __name__}
    return dataclasses.make_dataclass("Hyperparameters", fields, bases=(Params,), namespace=namespace, frozen=True)


def _type(field: Mapping[str, Any]) -> Any:
    hint: Any = _KINDS.get(field.get("kind", ""), Any)
    if "choices" in field:
        hint = Literal[tuple(field["choices"])]
    if field.get("is_list"):
        hint = list[hint]
    if "bounds" in field:
        limits = (_LIMITS[kind](limit) for kind, limit in field["bounds"].items())
        hint = Annotated[(hint, *limits)]
    return hint | None if field.get("is_nullable") else hint
