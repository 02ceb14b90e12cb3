"""Changes of how a model computes: frozen weights, compiled layers, 8-bit products, Liger's kernels, offloading.

torch.compile: rows have other lengths in every step, and compiling takes seconds. So the parts of each layer are
compiled with symbolic lengths, without the attention inside them: the layout of a flat row is a Python object, of
which every step has another one. What is compiled serves all layers of a kind, all lengths and all flat layouts.
Parts, not whole layers, because torch does not compile what it checkpoints. Generation, whose layers read a key/value
cache, is not compiled.

Products in 8 bits, by torchao: weights, inputs and the gradients of outputs are rounded to 8 bits for each product,
after a division by a scale: the largest magnitude of the tensor, rounded to a power of 2. With such scales a number is
rounded alike whatever else is in its row, so that log-probs do not depend on the way in which work is cut. Weights
stay what they are for the optimizer and for checkpoints. Embeddings and heads are left out.

Liger binds its forward methods to the modules of one model. In addition, it replaces names in the architecture's
Python module for the whole process: the classes that later models are built from, and the rotary function, which
attention looks up in every call. We restore the classes, so that a model has Liger's kernels only if this was
requested. The rotary function stays replaced, but tensors on the CPU go to the original. Liger's losses are never
used: they replace the forward that scores tokens, and their advantage, to avoid whole logits, our losses have as well.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from prefrl.errors import ConfigError, require
from prefrl.models.adapters import is_peft_model
from prefrl.models.scoring import inner_model, prepare_for_scoring

# Layers, and which of their weights are trained.


def layers_of(model: nn.Module, *, needed_by: str) -> list[nn.Module]:
    """The layers between the embeddings and the head, without those of a vision tower.

    Args:
        model: A causal language model or sequence classifier, PEFT included.
        needed_by: The option that changes them.

    Raises:
        ConfigError: There are none that are known.
    """
    inner = inner_model(model)
    layers = [part for part in inner.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"{needed_by}: {type(inner).__name__} has no known layers. Set it to False.")
    return layers


def freeze_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Do not train the parameters whose name contains a match of one of some regular expressions.

    Raises:
        ConfigError: An expression is none, matches nothing or only what is frozen, or nothing is left to train.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in patterns:
        for name in _matches(pattern, model, trainable):
            trainable[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in trainable.values()):
        if patterns:
            raise ConfigError(f"freeze={list(patterns)}: no parameter is left to train")
        remedy = " Load its adapter with is_trainable=True." if is_peft_model(model) else ""
        raise ConfigError(f"no parameter of the model requires a gradient: nothing can be trained.{remedy}")


def _matches(pattern: str, model: PreTrainedModel, trainable: Mapping[str, object]) -> list[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"freeze={pattern!r} is not a regular expression: {error}") from error
    names = [name for name, _ in model.named_parameters() if expression.search(name)]
    if not names:
        some = [name for name, _ in model.named_parameters()][:3]
        raise ConfigError(f"freeze={pattern!r} matches no parameter name. Names look like {', '.join(some)}.")
    matches = [name for name in names if name in trainable]
    if not matches:
        raise ConfigError(
            f"freeze={pattern!r} has no effect: all {len(names)} parameters that it matches are frozen already"
        )
    return matches


# torch.compile.


def compile_layers(model: nn.Module, *, backend: str, mode: str | None) -> None:
    """Compile the parts of a language model's layers, in place; nothing is compiled before the first pass.

    Call it before the model is wrapped. A copy of the model is not compiled.

    Args:
        model: A causal language model or sequence classifier, PEFT included.
        backend: Of torch.compile.
        mode: Of torch.compile; None: its default.

    Raises:
        ConfigError: It has no layers that are known.
    """
    for layer in layers_of(model, needed_by="torch_compile=True"):
        for part in layer.children():
            part.compile(backend=backend, mode=mode, dynamic=True)
    prepare_for_scoring(model).is_compiled = True


# Products in 8 bits.

_FLOAT8_CLASS = "Float8Linear"  # torchao's class, a subclass of torch's with no other parameters
_FLOAT8_MULTIPLE = 16  # of which the sizes of such products must be


def compute_in_fp8(model: nn.Module, *, emulate: bool = False) -> None:
    """Let the linear modules inside a model's layers compute in 8 bits, in place. Call it before it is wrapped.

    A model that is a copy of a converted one stays as it is.

    Args:
        model: A causal language model or sequence classifier, PEFT included.
        emulate: Round as 8 bits do, but multiply in higher precision, on devices that cannot do better.

    Raises:
        ConfigError: There is nothing to convert.
        ImportError: torchao is not installed.
    """
    float8 = require("torchao.float8", extra="fp8", feature="fp8=True")
    if _converted(model):
        return
    layers = layers_of(model, needed_by="fp8=True")
    wanted = {id(module) for layer in layers for module in _fitting(layer)}
    if not wanted:
        raise ConfigError(
            f"fp8=True: the layers of {type(model).__name__} have no linear modules with sizes that are multiples of "
            f"{_FLOAT8_MULTIPLE} and weights that are not quantized already. Set it to False."
        )
    config = float8.Float8LinearConfig(pad_inner_dim=True, round_scales_to_power_of_2=True, emulate=emulate)
    for layer in layers:
        float8.convert_to_float8_training(layer, module_filter_fn=lambda part, _: id(part) in wanted, config=config)


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Context in which such modules compute as they did before."""
    converted = _converted(model)
    classes = [type(module) for module in converted]
    for module in converted:
        module.__class__ = nn.Linear
    try:
        yield
    finally:
        for module, its_class in zip(converted, classes, strict=True):
            module.__class__ = its_class


def _converted(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == _FLOAT8_CLASS]


def _fitting(layer: nn.Module) -> Iterator[nn.Linear]:
    """Plain linear modules: subclasses hold quantized weights, and adapters are too thin to gain."""
    for name, module in layer.named_modules():
        fits = type(module) is nn.Linear and "lora_" not in name
        if fits and not (module.in_features % _FLOAT8_MULTIPLE or module.out_features % _FLOAT8_MULTIPLE):
            yield module


# Liger.

_LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")

# Originals of the names that Liger replaced in the modules of architectures.
_LIGER_REPLACED: dict[tuple[ModuleType, str], Any] = {}


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
    options = {**dict.fromkeys(_LIGER_LOSSES, False), **(given or {})}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ConfigError(f"liger_kernel_config={given}: {name!r} must be True or False")
        if value and name in _LIGER_LOSSES:
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
        if name not in (*_LIGER_LOSSES, "model") and parameter.kind is not parameter.VAR_KEYWORD
    }
    chosen = {name: value for name, value in options.items() if name not in _LIGER_LOSSES}
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
                _LIGER_REPLACED[module, name] = names[name]
            original = _LIGER_REPLACED.get((module, name))
            if original is not None:  # else the user had applied Liger before
                setattr(module, name, original if isinstance(value, type) else _Rotary(value, original))


def _is_ligers(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("liger_kernel.")


# For smaller tensors, starting a copy costs more than the freed memory is worth.
_SMALLEST_BYTES = 2**16


class OffloadActivations(saved_tensors_hooks):
    """Moves tensors that a forward pass inside saves for backward to pinned host memory, and back when needed.

    The copies are those of `torch.autograd.graph.save_on_cpu`, which moves every saved tensor. Here, tensors that are
    not worth moving stay on the device: weights and their autocast copies, which are on the device anyway; tensors
    without a gradient, such as rotary tables and attention masks, which all layers share and each layer would copy
    again; and small tensors. Checkpointed layers save only their input, so only that is moved.

    Args:
        device_type: Type of the accelerator that the forward pass runs on.
        smallest_bytes: Tensors below this size stay on the device.
    """

    def __init__(self, device_type: str, *, smallest_bytes: int = _SMALLEST_BYTES) -> None:
        library = save_on_cpu(pin_memory=True, device_type=device_type)

        def pack(tensor: Tensor) -> Tensor | tuple[object, Tensor]:
            if tensor.requires_grad and tensor.nbytes >= smallest_bytes and not _is_weight(tensor):
                return library.pack_hook(tensor)  # type: ignore[no-any-return]  # untyped
            # Detached, because a graph that holds its own output is a reference cycle, and would never be freed.
            return tensor.detach()

        def unpack(packed: Tensor | tuple[object, Tensor]) -> Tensor:
            return library.unpack_hook(packed) if isinstance(packed, tuple) else packed

        super().__init__(pack, unpack)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, an autocast copy of one, or a view of either."""
    source = tensor if tensor._base is None else tensor._base
    maker = source.grad_fn
    if maker is None or maker.name() != "ToCopyBackward0":
        return isinstance(source, nn.Parameter)
    origin = maker.next_functions[0][0]
    return origin is not None and origin.name() == "torch::autograd::AccumulateGrad"
