"""Liger's fused Triton kernels for a model's norms, rotary embeddings and MLPs.

Liger binds its forward methods to the modules of one model. In addition, it replaces names in the architecture's
Python module for the whole process: the classes that later models are built from, and the rotary function, which
attention looks up in every call. We restore the classes, so that a model has Liger's kernels only if this was
requested. The rotary function stays replaced, but tensors on the CPU go to the original.

Liger's losses are never used: they replace the forward that scores tokens, and their advantage, to avoid whole logits,
our losses have as well.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from prefrl.errors import ConfigError
from prefrl.models.scoring import inner_model, prepare_for_scoring
from prefrl.optional import require

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedModel

__all__ = ["apply_liger", "liger_options", "without_liger"]

_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")

# Originals of the names that Liger replaced in the modules of architectures.
_ORIGINALS: dict[tuple[ModuleType, str], Any] = {}


@dataclass(frozen=True)
class _Rotary:
    """Liger's rotary function, with the original for tensors on the CPU, where Triton kernels do not run."""

    fused: Callable[..., Any]
    original: Callable[..., Any]

    def __call__(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.original if query.device.type == "cpu" else self.fused
        return function(query, *args, **kwargs)


def liger_options(given: Mapping[str, bool] | None) -> dict[str, bool]:
    """Liger's options without its losses, which are on by default.

    Args:
        given: `liger_kernel_config`: kernel -> whether it is used.

    Raises:
        ConfigError: A loss is switched on, or a value is not a boolean.
    """
    options = {**dict.fromkeys(_LOSSES, False), **(given or {})}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ConfigError(f"liger_kernel_config={given}: {name!r} must be True or False")
        if value and name in _LOSSES:
            raise ConfigError(
                f"liger_kernel_config={given}: {name!r} must be False. Liger's losses would replace the forward pass "
                "that scores tokens, and prefrl does not keep all logits in memory even without them. Remove it."
            )
    return options


def apply_liger(model: nn.Module, options: Mapping[str, bool]) -> None:
    """Put Liger's kernels into the model, in place; copies of the model have them, too.

    A second call with the same options changes nothing, even if Liger itself was called in between.

    Args:
        model: A causal language model or sequence classifier, optionally wrapped in PEFT.
        options: The result of `liger_options`.

    Raises:
        ConfigError: Liger does not know the model type or one of the options, no kernel would be used, or the model
            already has Liger's kernels with other options.
        ImportError: liger-kernel or Triton is not installed.
    """
    inner = inner_model(model)
    state = prepare_for_scoring(inner)
    earlier = state.liger_options
    if earlier not in (None, options):
        raise ConfigError(
            f"liger_kernel_config={options}: Liger's kernels were already applied to this model, with {earlier}. "
            "Load the model again."
        )
    function = _patching_function(inner)
    parameters = inspect.signature(function).parameters
    _check_options(inner, parameters, options)
    code = {module: dict(vars(module)) for module in _code_of(inner)}
    try:
        function(model=inner, **{name: value for name, value in options.items() if name in parameters})
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"use_liger_kernel=True: Liger fails on a {type(inner).__name__}: {error}. Leave it False."
        ) from error
    finally:
        _put_back(code)
    state.liger_options = dict(options)


@contextmanager
def without_liger(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model runs the original transformers code."""
    patched = [module for module in model.modules() if _is_ligers(vars(module).get("forward"))]
    forwards = [vars(module).pop("forward") for module in patched]
    rotary = [
        (module, name, value)
        for module in _code_of(model)
        for name, value in vars(module).items()
        if isinstance(value, _Rotary)
    ]
    for code, name, function in rotary:
        setattr(code, name, function.original)
    try:
        yield
    finally:
        for module, forward in zip(patched, forwards, strict=True):
            vars(module)["forward"] = forward
        for code, name, function in rotary:
            setattr(code, name, function)


def _patching_function(model: PreTrainedModel) -> Callable[..., None]:
    """Liger's patching function for the model's type."""
    liger = require("liger_kernel.transformers.monkey_patch", extra="liger", feature="use_liger_kernel=True")
    known: dict[str, Callable[..., None]] = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    model_type = model.config.model_type
    if model_type not in known:
        raise ConfigError(
            f"use_liger_kernel=True has no effect: Liger has no kernels for model_type={model_type!r} "
            f"({type(model).__name__}), only for {', '.join(sorted(known))}. Leave it False."
        )
    return known[model_type]


def _check_options(
    model: PreTrainedModel, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, bool]
) -> None:
    kernels = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in (*_LOSSES, "model") and parameter.kind is not parameter.VAR_KEYWORD
    }
    chosen = {name: value for name, value in options.items() if name not in _LOSSES}
    unknown = sorted(chosen.keys() - kernels.keys())
    if unknown:
        raise ConfigError(
            f"liger_kernel_config={chosen}: Liger has no {', '.join(map(repr, unknown))} for "
            f"model_type={model.config.model_type!r}. Choose from {', '.join(map(repr, kernels))}."
        )
    if not any({**kernels, **chosen}.values()):
        raise ConfigError(
            f"use_liger_kernel=True has no effect with liger_kernel_config={chosen}, which turns off every kernel. "
            "Set use_liger_kernel=False."
        )


def _code_of(model: nn.Module) -> set[ModuleType]:
    """The Python modules of the model's classes, where Liger replaces names, and torch.nn, where it replaces some."""
    return {sys.modules[type(module).__module__] for module in model.modules()} | {nn}


def _put_back(before: Mapping[ModuleType, Mapping[str, Any]]) -> None:
    """Undo Liger's process-wide replacements in the architecture's module, except for the rotary function."""
    for module, names in before.items():
        for name, value in list(vars(module).items()):
            if not _is_ligers(value) or name not in names:
                continue
            if not (_is_ligers(names[name]) or isinstance(names[name], _Rotary)):
                _ORIGINALS[module, name] = names[name]
            original = _ORIGINALS.get((module, name))
            if original is not None:  # else the user had applied Liger before
                setattr(module, name, original if isinstance(value, type) else _Rotary(value, original))


def _is_ligers(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("liger_kernel.")
