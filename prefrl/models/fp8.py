"""Matrix products of a model's layers in 8-bit floating point, by torchao.

Weights, inputs and the gradients of outputs are rounded to 8 bits for each product, after a division by a scale: the
largest magnitude of the tensor, rounded to a power of 2. With such scales a number is rounded alike whatever else is
in its row, so that log-probs do not depend on the way in which work is cut. Weights stay what they are for the
optimizer and for checkpoints. Embeddings and heads are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from prefrl.errors import ConfigError
from prefrl.models.layers import layers_of
from prefrl.optional import require

__all__ = ["compute_in_fp8", "without_fp8"]

_NAME = "Float8Linear"  # torchao's class, a subclass of torch's with no other parameters
_MULTIPLE = 16  # of which the sizes of such products must be


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
            f"{_MULTIPLE} and weights that are not quantized already. Set it to False."
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
    return [module for module in model.modules() if type(module).__name__ == _NAME]


def _fitting(layer: nn.Module) -> Iterator[nn.Linear]:
    """Plain linear modules: subclasses hold quantized weights, and adapters are too thin to gain."""
    for name, module in layer.named_modules():
        fits = type(module) is nn.Linear and "lora_" not in name
        if fits and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE):
            yield module
