"""Checks options that exclude each other before anything heavy is imported.

The rules are those of the configs: functions and option groups of modules that need neither torch nor transformers.
What the rules read of heavier tables stands in schema.json. What needs a device, a model or a package is left to the
config.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import parse_json
from prefrl.options.flat_names import fill_place, flat_names
from prefrl.options.generation_rules import (
    AT_K_RULES,
    GENERATION_MODE_RULES,
    GENERATION_SIZE_RULES,
    NUMBERS_RULES,
    PROMPTS_RULES,
    GenerationRules,
)
from prefrl.options.kwargs import KwargsOption
from prefrl.options.offline_rules import (
    DENSITY_RATIOS_RULES,
    DIVERGENCE_RULES,
    LABELS_RULES,
    PACKING_RULES,
    PAIR_LOSS_RULES,
    SHAPE_RULES,
    TRUNCATION_SIDE_RULES,
    WORKERS_RULES,
    check_loss_options,
)
from prefrl.options.optimizers import NAMED_OPTIMIZER_RULES, UPDATE_RULES, check_not_refused, check_rates
from prefrl.options.params import Params
from prefrl.options.policy_rules import (
    CRITIC_RULES,
    GROUP_RULES,
    HYPERPARAMETERS_RULES,
    KL_RULES,
    LEVEL_RULES,
    PAIRS_RULES,
    RATIO_RULES,
    REINFORCE_PLUS_PLUS_RULES,
    RLOO_RULES,
    PolicyGradientRules,
    kl_part,
    name_scale,
)
from prefrl.options.rules import Rule, apply
from prefrl.options.run_rules import (
    COMMON_RULES,
    COMPILATION_RULES,
    HUGGINGFACE,
    IGNORED_PARTS_RULES,
    IGNORED_RULES,
    LIGER_RULES,
    check_device,
    check_intervals,
    check_paths,
)
from prefrl.options.schedule_rules import (
    METRIC_SCHEDULE_RULES,
    PLATEAU_RULES,
    SCHEDULE_RULES,
    WARMUP_EVALUATIONS_RULES,
    WARMUP_RULES,
)
from prefrl.options.suggest import check_known
from prefrl.options.types import check_value
from prefrl.registry import load
from prefrl.trainer.base.options.autopilot import AUTOPILOT_RULES, AutopilotOptions, name_best_metric
from prefrl.trainer.base.options.checkpoint import CheckpointOptions, check_checkpoints
from prefrl.trainer.base.options.evaluation import EVALUATION_RULES
from prefrl.trainer.base.options.reference import (
    PRECOMPUTED_REFERENCE_RULES,
    REFERENCE_RULES,
    OfflineReferenceOptions,
    ReferenceOptions,
)
from prefrl.trainer.base.options.size import RATE_RULES, derive_sizes, take_automatic
from prefrl.trainer.grpo_presets import PRESETS, combined
from prefrl.trainer.online.flat_names import OnlineNames, PolicyGradientNames
from prefrl.trainer.online.local_options import LOCAL_RULES, LocalOptions
from prefrl.trainer.online.truncation_options import TRUNCATION_RULES, TruncationOptions
from prefrl.trainer.online.vllm_options import NO_SERVER_RULES, SERVER_RULES, VLLMOptions

__all__ = ["check_pairs_of_options"]

FLAT_NAMES = {**flat_names(OnlineNames), **flat_names(PolicyGradientNames)}
_LIMITS: dict[str, Any] = {"ge": Ge, "gt": Gt, "le": Le, "lt": Lt}
_KINDS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate does
# The rules of one algorithm; those before all others, and those after.
_FIRST: dict[str, tuple[Rule, ...]] = {
    "rloo": RLOO_RULES,
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS_RULES,
    "online_dpo": PAIRS_RULES,
}
_LAST: dict[str, tuple[Rule, ...]] = {
    "sft": PACKING_RULES,
    "dpo": DIVERGENCE_RULES,
    "kto": LABELS_RULES,
    "bco": DENSITY_RATIOS_RULES,
    "cpo": SHAPE_RULES,
    "reward": TRUNCATION_SIDE_RULES,
    "grpo": GROUP_RULES,
    "ppo": CRITIC_RULES,
}


# Properties of configs -> the options whose hyperparameters they are.
_HYPERPARAMETERS = {
    "loss_params": "loss_kwargs",
    "entropy_params": "entropy_kwargs",
    "kl_params": "kl_kwargs",
    "advantage_params": "advantage_kwargs",
    "selection_params": "selection_kwargs",
    "at_k_params": "pass_at_k_kwargs",
    "shaping_params": "reward_shaping_kwargs",
    "plateau_params": "reduce_on_plateau_kwargs",
    "critic_params": "critic_optim_kwargs",
}


class _Derived:
    """What configs derive from options, as far as the rules here read it."""

    rules: ClassVar[Mapping[str, Any]]
    kwargs: Mapping[str, KwargsOption[Any]]

    @property
    def device(self) -> Any:
        """Where the run computes, as far as that can be known without torch."""
        options: Any = self
        return SimpleNamespace(type="cpu" if options.use_cpu else "unknown")

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
    def of_tokens(self) -> bool:
        """See `PolicyGradientConfig.of_tokens`."""
        return self.estimator in self.rules["of_tokens"]

    @property
    def needs_greedy(self) -> bool:
        """See `PolicyGradientConfig.needs_greedy`."""
        return self.estimator in self.rules["of_greedy"]

    @property
    def levels(self) -> Sequence[str]:
        """See `PolicyLossOptions.levels`."""
        options: Any = self
        levels: Sequence[str] = self.rules["levels"][options.loss_type]
        return levels

    @property
    def reduction(self) -> str:
        """See `PolicyGradientConfig.reduction`."""
        options: Any = self
        return str(self.rules["reductions"][options.loss_type])

    @property
    def kl_part(self) -> str | None:
        """See `KLOptions.kl_part`."""
        return kl_part(self)

    @property
    def reduces_on_plateau(self) -> bool:
        """See `ScheduleOptions.reduces_on_plateau`."""
        options: Any = self
        return bool(options.reduce_on_plateau > 0)


def _hyperparameters(option: str) -> property:
    """A property of `_Derived`: the hyperparameters that an option maps to."""
    return property(lambda config: config.kwargs[option].of(config))


for _name, _option in _HYPERPARAMETERS.items():
    setattr(_Derived, _name, _hyperparameters(_option))


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
    check_not_refused(str(config.optim))
    for name, (what, *known) in rules["known"].items():
        check_known(name, str(getattr(config, name)), known, what)
    if algorithm == "grpo":
        name_scale(config)
    apply(config, _FIRST.get(algorithm, ()))
    config.kwargs = {row["name"]: _kwargs_option(row, params) for row in rules["kwargs"]}
    for option in config.kwargs.values():
        if option.switch is None or hasattr(config, option.switch):
            option.check(config)
    names = ("model_init_kwargs", "activation_checkpointing_kwargs", "liger_kernel_config", "chat_template_kwargs")
    parse_json(config, *(name for name in names if hasattr(config, name)))
    _check_common(config)
    if hasattr(config, "num_generations"):
        _check_online(config)
    else:
        _check_offline(config, params)
    apply(config, _LAST.get(algorithm, ()))
    return config


def _check_common(config: Any) -> None:
    check_paths(config)
    apply(config, COMMON_RULES)
    check_device(config)
    apply(config, LIGER_RULES, COMPILATION_RULES)
    check_checkpoints(config)
    apply(config, IGNORED_RULES, IGNORED_PARTS_RULES, SCHEDULE_RULES, METRIC_SCHEDULE_RULES, WARMUP_RULES)
    apply(config, UPDATE_RULES, NAMED_OPTIMIZER_RULES)
    check_rates(config)
    if config.reduces_on_plateau:
        apply(config, PLATEAU_RULES)
    apply(config, RATE_RULES, EVALUATION_RULES, AUTOPILOT_RULES)


def _check_sizes(config: Any) -> None:
    config.automatic = take_automatic(config)
    for name, hint in HUGGINGFACE.items():
        check_value(name, getattr(config, name), hint)
    check_intervals(config)
    name_best_metric(config)
    # As transformers does.
    if config.eval_strategy == "steps" and not config.eval_steps:
        config.eval_steps = config.logging_steps
    if config.activation_checkpointing is None:
        config.activation_checkpointing = config.gradient_checkpointing
    if config.include_num_input_tokens_seen is False:
        config.include_num_input_tokens_seen = "no"
    apply(config, WARMUP_EVALUATIONS_RULES)
    if config.warmup_evaluations:
        config.warmup_steps = config.warmup_evaluations * config.eval_steps
    config.sought = derive_sizes(config, config.automatic) if config.knows_sizes else frozenset()


def _check_online(config: Any) -> None:
    if config.knows_sizes:
        apply(config, GENERATION_SIZE_RULES, GENERATION_MODE_RULES)
    apply(config, PROMPTS_RULES, NUMBERS_RULES, AT_K_RULES, LOCAL_RULES)
    apply(config, SERVER_RULES if config.use_vllm else NO_SERVER_RULES)
    if hasattr(config, "sync_ref_model"):
        apply(config, REFERENCE_RULES)
    if hasattr(config, "importance_sampling_level"):
        apply(config, LEVEL_RULES, KL_RULES, TRUNCATION_RULES, RATIO_RULES, HYPERPARAMETERS_RULES)


def _check_offline(config: Any, params: Sequence[type[Params]]) -> None:
    apply(config, WORKERS_RULES)
    if hasattr(config, "sync_ref_model"):
        apply(config, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES)
    losses = config.pair_losses = {
        name: SimpleNamespace(**{**row, "params": params[row["params"]]})
        for name, row in config.rules["pairs"].items()
    }
    if not losses:
        return
    chosen = config.loss_type if isinstance(config.loss_type, list) else [config.loss_type]
    if hasattr(config, "use_weighting"):
        apply(config, PAIR_LOSS_RULES)
    check_loss_options(config, losses, chosen)


def _config(rules: Mapping[str, Any], options: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Any:
    """The options as a dataclass with the light option groups of the config: defaults, preset, and what is given."""
    names = {option["name"] for option in options}
    groups = _groups(names)
    mapped = {field.name for group in groups if dataclasses.is_dataclass(group) for field in dataclasses.fields(group)}
    mapped &= {row["name"] for row in rules["kwargs"]}  # as the groups declare them
    fields = [
        (option["name"], Any, _with_default(option.get("default")))
        for option in options
        if option["name"] not in mapped
    ]
    namespace = {"rules": rules, "best_metric": rules["best_metric"], "__module__": __name__}
    config: Any = dataclasses.make_dataclass(
        "Options", fields, bases=groups, namespace=namespace, init=False, eq=False, repr=False
    )()
    for option in options:
        setattr(config, option["name"], option.get("default"))
    preset = given.get("preset")
    values = dict(given) if preset is None else combined(PRESETS[preset], given, FLAT_NAMES)
    for name in values.keys() - FLAT_NAMES.keys():
        setattr(config, name, values[name])
    for option in options:
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
        rules = PolicyGradientRules if "importance_sampling_level" in names else GenerationRules
        groups += [LocalOptions, VLLMOptions, rules]
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


def _params(row: Mapping[str, Any]) -> type[Params]:
    """A class of hyperparameters with the types, bounds, defaults and rules of the schema."""
    fields = [(name, _type(field), _with_default(field.get("default"))) for name, field in row["fields"].items()]
    namespace = {"__module__": __name__, "rules": tuple(map(load, row["rules"]))}
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
