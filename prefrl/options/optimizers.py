"""Optimizers by name that HuggingFace's `optim` does not have, and which options they read.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from prefrl.errors import ConfigError
from prefrl.options.fields import Example, Rule, apply, example, mapping_of, plain_value, unset, when
from prefrl.options.names import nearest
from prefrl.options.types import check_value

# These take the model, or make an optimizer for each weight: there are no parameter groups.
_WITHOUT_GROUPS = ("lomo", "layerwise")
# The optimizers that read optim_target_modules have one of these in their names.
_LAYERWISE = ("galore", "apollo")
_RATE = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer of a library.

    Args:
        package: Where its class is.
        class_name: Its class.
        decay: What `weight_decay` is: a term of the gradient, a factor of the weights, or not there.
        keys: What `optim_args` may set.
        reads: Options of HuggingFace that it reads: betas stands for adam_beta1 and adam_beta2, eps for adam_epsilon.
        fixed: Arguments that make it what its name says.
        defaults: Other defaults than those of the class.
        elementwise: Whether each number of a weight is updated by itself, so that ZeRO may cut weights anywhere.
        fsdp2: Whether it can update weights that FSDP2 has partitioned.
    """

    package: Literal["torch", "bitsandbytes", "pytorch_optimizer"]
    class_name: str
    decay: Literal["L2", "decoupled", "none"]
    keys: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("betas", "eps")
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    elementwise: bool = True
    fsdp2: bool = True


def _torch(class_name: str, decay: Literal["L2", "decoupled", "none"], *keys: str, **more: Any) -> NamedOptimizer:
    return NamedOptimizer("torch", class_name, decay, keys, **more)


def _bitsandbytes(class_name: str, decay: Literal["L2", "none"], *keys: str, **more: Any) -> NamedOptimizer:
    return NamedOptimizer("bitsandbytes", class_name, decay, (*keys, "min_8bit_size"), fsdp2=False, **more)


_DECOUPLES = "decoupled_weight_decay"
_EIGHT_BITS = {"optim_bits": 8}
_PAGED = {"is_paged": True}

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adam": _torch("Adam", "L2", "amsgrad", _DECOUPLES),
    "amsgrad": _torch("Adam", "L2", _DECOUPLES, fixed={"amsgrad": True}),
    "adadelta": _torch("Adadelta", "L2", "rho", "eps", reads=()),
    "adamax": _torch("Adamax", "L2"),
    "nadam": _torch("NAdam", "L2", "momentum_decay", _DECOUPLES),
    "radam": _torch("RAdam", "L2", _DECOUPLES),
    "rprop": _torch("Rprop", "none", "etas", "step_sizes", reads=(), fsdp2=False),
    "asgd": _torch("ASGD", "L2", "lambd", "alpha", "t0", reads=()),
    "muon": _torch(
        "MuonWithAdamW",
        "decoupled",
        *("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "adamw_lr"),
        elementwise=False,
    ),
    "lamb": NamedOptimizer(
        "pytorch_optimizer",
        "Lamb",
        "L2",
        ("grad_averaging", "rectify", "degenerated_to_sgd", "n_sma_threshold"),
        fixed={"weight_decouple": False},  # inside the trust ratio, as in the paper
        elementwise=False,
        fsdp2=False,
    ),
    "lars": NamedOptimizer(
        "pytorch_optimizer",
        "LARS",
        "L2",
        ("momentum", "dampening", "nesterov", "trust_coefficient"),
        reads=(),
        fixed={"foreach": False},  # whose operations are not there for weights that FSDP2 has partitioned
        elementwise=False,
    ),
    "soap": NamedOptimizer(
        "pytorch_optimizer",
        "SOAP",
        "decoupled",
        (
            *("betas", "eps", "shampoo_beta", "precondition_frequency", "max_precondition_dim", "merge_dims"),
            *("precondition_1d", "correct_bias", "normalize_gradient"),
        ),
        reads=(),
        elementwise=False,
        fsdp2=False,
    ),
    # bitsandbytes decouples the decay of its Adam, which makes it its AdamW.
    "adam_8bit": _bitsandbytes("Adam", "none", fixed=_EIGHT_BITS),
    "paged_adam": _bitsandbytes("Adam", "none", fixed=_PAGED),
    "paged_adam_8bit": _bitsandbytes("Adam", "none", fixed=_EIGHT_BITS | _PAGED),
    "sgd_8bit": _bitsandbytes("SGD", "L2", "momentum", reads=(), fixed=_EIGHT_BITS, defaults={"momentum": 0.9}),
    "adagrad_8bit": _bitsandbytes("Adagrad", "L2", "eps", reads=(), fixed=_EIGHT_BITS),
}

_NO_TRUST_RATIO = (
    "bitsandbytes has no 8-bit kernel for it on GPUs, and its CPU kernel leaves out the trust ratio. Set "
)
# Names that users of other libraries try, and what to do.
REFUSED: dict[str, str] = {
    "lbfgs": "it computes the loss several times in a step, through a closure; transformers' loop passes only "
    "gradients to the optimizer. Set optim='soap' or optim='muon', which use more than a rate for each weight, too.",
    "lamb_8bit": f"{_NO_TRUST_RATIO}optim='lamb', or 'adamw_8bit' for 8-bit states.",
    "lars_8bit": f"{_NO_TRUST_RATIO}optim='lars', or 'sgd_8bit' for states of 8 bits.",
    "ftrl": "it is for sparse linear models. Set optim='adagrad'.",
    "adamw": "transformers calls it 'adamw_torch_fused', or 'adamw_torch'.",
    "lion": "transformers calls it 'lion_32bit'.",
    "paged_lion": "transformers calls it 'paged_lion_32bit'.",
    "paged_adamw": "transformers calls it 'paged_adamw_32bit'.",
    "rmsprop_8bit": "transformers calls it 'rmsprop_bnb_8bit'.",
}
# What bitsandbytes' Adam is called with its decay.
_WITH_DECAY = {
    "adam_8bit": "adamw_8bit",
    "paged_adam": "paged_adamw_32bit",
    "paged_adam_8bit": "paged_adamw_8bit",
}


def check_not_refused(name: str) -> None:
    """Reject a name that users of other libraries try.

    Raises:
        ConfigError: Says what to do.
    """
    if name in REFUSED:
        raise ConfigError(f"optim={name!r}: {REFUSED[name]}")


def check_rates(config: Any) -> None:
    """Reject learning rates of parameters that cannot be read, or that the optimizer cannot have.

    Raises:
        ConfigError: Names the expression, its rate and what to do.
    """
    for pattern, rate in mapping_of(config, "learning_rates").items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"learning_rates: {pattern!r} is not a valid regular expression: {error}") from error
        check_value(f"learning_rates[{pattern!r}]", rate, _RATE)
    apply(config, RATES_RULES)


def given_arguments(text: str | None) -> dict[str, Any]:
    """The values of `optim_args` by name: 'etas=(0.5, 1.2), nesterov=True'. Other words are texts.

    Raises:
        ConfigError: The text cannot be read.
    """
    if not text:
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
            return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(f"optim_args={text!r}: must be pairs such as 'momentum=0.9, nesterov=True'")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
    return ast.literal_eval(node)


def optimizer_of(o: Any) -> str:
    """The name of the optimizer."""
    return str(plain_value(o.optim))


def _does_not_read(o: Any, key: str) -> bool:
    name = optimizer_of(o)
    return name in OPTIMIZERS and key not in OPTIMIZERS[name].reads


def _unknown_argument(o: Any) -> str | None:
    """A key of `optim_args` that an optimizer of `OPTIMIZERS` does not have."""
    row = OPTIMIZERS.get(optimizer_of(o))
    return None if row is None else next((key for key in given_arguments(o.optim_args) if key not in row.keys), None)


def _nearest_argument(o: Any) -> str:
    keys = OPTIMIZERS[optimizer_of(o)].keys
    return nearest(str(_unknown_argument(o)), keys) if keys else "It has none."


def _without_decay(o: Any) -> str | None:
    """What is said of an optimizer that has no weight decay, or whose decay would not be a term of the gradient."""
    name = optimizer_of(o)
    row = OPTIMIZERS.get(name)
    if row is None or row.decay != "none":
        return None
    what, remedy = "has no decay", "Set regularization_type='l2' and regularization_lambda"
    if row.package == "bitsandbytes":
        what, remedy = "would decouple it, as AdamW does", f"{remedy}, or optim={_WITH_DECAY[name]!r}"
    return f"{row.package}'s optim={name!r} {what}. {remedy}."


def decay_rule(option: str, decay: Callable[[Any], float | None], example: Example) -> Rule:
    """A weight decay needs an optimizer that has one.

    Args:
        option: How the message calls the weight decay.
        decay: Its value.
        example: See `Rule`.
    """
    return when(
        lambda o: _without_decay(o) if decay(o) else None, f"{option}={{decay}}: {{found}}", example, decay=decay
    )


def _fixed(option: str, reason: str) -> Rule:
    return when(
        lambda o: option in (o.allow_resume_changes or ()),
        f"allow_resume_changes: {option} cannot change, because {reason}. Start a new training from the checkpoint's "
        "weights.",
        example("sft", allow_resume_changes=[option]),
    )


UPDATE_RULES = (
    *unset(
        {"optim_target_modules": ["q_proj"]},
        lambda o: not any(word in optimizer_of(o) for word in _LAYERWISE),
        "optim={optim!r} treats all weights in the same way. Leave it None; freeze leaves weights out.",
        example("sft"),
    ),
    when(
        lambda o: (o.regularization_type is not None) != (o.regularization_lambda > 0),
        "regularization_type={regularization_type!r} with regularization_lambda={regularization_lambda}: neither has "
        "an effect without the other. Set both, or neither.",
        example("sft", regularization_type="l1"),
    ),
    _fixed("learning_rates", "its expressions determine the order of the optimizer's state in checkpoints"),
    _fixed("optim_args", "checkpoints hold these arguments together with the optimizer's state"),
)
NAMED_OPTIMIZER_RULES = (
    *unset(
        {"adam_beta1": 0.5, "adam_beta2": 0.5},
        lambda o: _does_not_read(o, "betas"),
        "optim={optim!r} does not read it. Leave it out; see optim_args.",
        example("sft", optim="adadelta"),
    ),
    *unset(
        {"adam_epsilon": 1e-6},
        lambda o: _does_not_read(o, "eps"),
        "optim={optim!r} does not read it. Leave it out; see optim_args.",
        example("sft", optim="adadelta"),
    ),
    decay_rule("weight_decay", lambda o: o.weight_decay, example("sft", optim="rprop", weight_decay=0.1)),
    when(
        _unknown_argument,
        "optim_args: {found}={given!r} is not an argument of optim={optim!r}. {remedy}",
        example("sft", optim="adam", optim_args="momentum=1"),
        given=lambda o: given_arguments(o.optim_args)[str(_unknown_argument(o))],
        remedy=_nearest_argument,
    ),
)
RATES_RULES = (
    when(
        lambda o: mapping_of(o, "learning_rates") and any(word in optimizer_of(o) for word in _WITHOUT_GROUPS),
        "learning_rates={learning_rates!r} with optim={optim!r}, which has one rate for all weights. Choose another "
        "optimizer, or leave learning_rates None.",
        example("sft", optim="lomo", learning_rates={"a": 1.0}),
    ),
)
