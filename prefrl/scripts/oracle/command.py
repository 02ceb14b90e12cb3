"""`prefrl verify`: compute exactly what your own loss, advantage or KL estimate does on average."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, check_unset, opt
from prefrl.options.names import nearest
from prefrl.options.params import Params
from prefrl.scripts.declaration import CommandParser

if TYPE_CHECKING:
    from prefrl.scripts.oracle.checks import Check
    from prefrl.scripts.oracle.recipe import Measurement

# The number of positional arguments, and the signature of the function.
_FORMS = {
    "policy": (1, "function(tokens: PolicyTokens, *, ...) -> TokenLoss"),
    "advantage": (1, "function(scored: ScoredRows or ScoredTokens, *, ...) -> Advantages"),
    "kl": (2, "function(logprobs, ref_logprobs, *, ...) -> tensor [N]"),
}
# Options that only some kinds of functions have.
_FOR_A_KIND = {
    "level": ("policy",),
    "reduction": ("policy", "kl"),
    "scored": ("advantage",),
    "group_size": ("advantage",),
    "placement": ("kl",),
}
_WORDS = {"none": None, "null": None, "true": True, "false": False}
# A right expected gradient differs only by rounding, about 1e-15 relative to its size.
_RIGHT = 1e-8


@dataclass
class VerifyArguments:
    """The function, and what it claims."""

    function: str = dataclasses.field(metadata={"help": "Function to verify, as module:function."})
    kind: Literal["policy", "advantage", "kl"] = opt(
        "policy",
        "What the function is. A 'policy' loss takes PolicyTokens and returns a TokenLoss. An 'advantage' takes "
        "ScoredRows or ScoredTokens and returns Advantages. A 'kl' takes the log-probs of policy and reference, and "
        "returns [N].",
    )
    claim: Literal["unbiased", "on_policy_unbiased", "none"] = opt(
        "none",
        "What must hold for exit code 0, besides the checks that every function has to pass. With "
        "'on_policy_unbiased', the expected gradient must be right for samples of the policy itself; with 'unbiased', "
        "for samples of other policies, too.",
    )
    hyperparameters: list[str] | None = opt(
        None, "Keyword arguments of the function, or fields of the dataclass that it takes last, as NAME=VALUE."
    )
    level: Literal["token", "sequence", "sequence_token", "sequence_sum"] = opt(
        "token", "Level of log_ratio, for a policy loss."
    )
    reduction: Literal["token", "sequence_mean", "sequence_sum"] = opt(
        "sequence_sum", "How the losses of tokens are reduced to one number, for a policy loss or a KL estimate."
    )
    scored: Literal["row", "token"] = opt(
        "row", "Whether an advantage takes ScoredRows ('row') or ScoredTokens ('token')."
    )
    group_size: Literal[2, 3] = opt(2, "Completions of a prompt, for an advantage.")
    placement: Literal["loss", "reward"] = opt(
        "loss", "Whether a KL estimate is added to the loss or subtracted from the reward."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kinds in _FOR_A_KIND.items():
            if self.kind not in kinds:
                check_unset(self, name, because=f"kind={self.kind!r}", remedy=f"It is for {' and '.join(kinds)}.")


def main(argv: Sequence[str]) -> int:
    """Verify and report. The exit code is 0 if the claim and all checks hold, else 1."""
    description = (
        "Compare the expected gradient of your own loss, advantage or KL estimate, summed over all completions, with "
        "the true one. The exit code is 0 if the claim and all checks hold, else 1.\n\nExamples:\n"
        "  prefrl verify my_losses:clipped --claim on_policy_unbiased\n"
        "  prefrl verify my_advantages:centered --kind advantage --group_size 3"
    )
    parser = CommandParser("verify", (VerifyArguments,), description, positional=("function",))
    (arguments,) = parser.parse(argv)
    bound = _bound(_load(arguments.function), arguments)
    try:
        checks, measurements = _examine(bound, arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        where = f"function={arguments.function!r}, kind={arguments.kind!r}"
        raise ConfigError(f"{where}: fails with {type(error).__name__}: {error}") from error
    failures = [check.name for check in checks if check.is_needed and not check.holds]
    failures += [f"claim {arguments.claim!r}: {m.setting}" for m in measurements if not _keeps(arguments.claim, m)]
    _print(arguments, checks, measurements)
    for failure in failures:
        print(f"does not hold: {failure}")
    return 1 if failures else 0


def _load(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"function={path!r}: must be module:function, such as my_losses:my_loss")
    sys.path.insert(0, "")  # unlike python -m, the command does not search the working directory
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"function={path!r}: the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove("")
    if not hasattr(module, name):
        functions = [other for other, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"function={path!r}: {module_name!r} has no {name!r}. {nearest(name, functions)}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"function={path!r}: is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # callable, checked above


def _bound(function: Callable[..., Any], arguments: VerifyArguments) -> Callable[..., Any]:
    """Bind the hyperparameters of the function, after checking that its signature is that of its kind."""
    count, form = _FORMS[arguments.kind]
    given = _hyperparameters(arguments.hyperparameters or [])
    where = f"function={arguments.function!r}"
    params = _params_class(function)
    known = _keyword_names(function) if params is None else params.names()
    for name in given.keys() - known:
        raise ConfigError(f"hyperparameters: {where} has no hyperparameter {name!r}. {nearest(name, known)}")
    if params is None:
        bound = functools.partial(function, **given)
    else:
        values = params(**given)
        bound = functools.partial(_with_params, function, values)
    try:
        inspect.signature(bound).bind(*range(count))
    except TypeError as error:
        raise ConfigError(
            f"{where}: {error}. A function of kind={arguments.kind!r} looks like {form}; set its keyword arguments "
            "with --hyperparameters NAME=VALUE ..."
        ) from error
    return bound


def _keyword_names(function: Callable[..., Any]) -> list[str]:
    """The names of the function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _params_class(function: Callable[..., Any]) -> type[Params] | None:
    """The class of the function's last argument, if that is a dataclass of hyperparameters."""
    annotations = [parameter.annotation for parameter in inspect.signature(function).parameters.values()]
    last = annotations[-1] if annotations else None
    if isinstance(last, str):
        last = vars(sys.modules[function.__module__]).get(last)
    return last if isinstance(last, type) and issubclass(last, Params) else None


def _with_params(function: Callable[..., Any], params: Params, *inputs: Any) -> Any:
    return function(*inputs, params)


def _hyperparameters(texts: Sequence[str]) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ConfigError(f"hyperparameters={text!r}: must be NAME=VALUE, such as epsilon=0.2")
        values[name] = _value(value)
    return values


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _examine(function: Callable[..., Any], arguments: VerifyArguments) -> tuple[list[Check], list[Measurement]]:
    from prefrl.scripts.oracle import checks as oracle_checks
    from prefrl.scripts.oracle import recipe as oracle_recipe

    if arguments.kind == "policy":
        checks = oracle_checks.check_policy_loss(function, level=arguments.level)
        return checks, oracle_recipe.measure_policy_loss(
            function, level=arguments.level, reduction=arguments.reduction
        )
    if arguments.kind == "advantage":
        checks = oracle_checks.check_advantages(function, level=arguments.scored)
        return checks, oracle_recipe.measure_advantages(
            function, level=arguments.scored, group_size=arguments.group_size
        )
    checks = oracle_checks.check_kl(function)
    return checks, oracle_recipe.measure_kl(function, placement=arguments.placement, reduction=arguments.reduction)


def _keeps(claim: str, measurement: Measurement) -> bool:
    is_claimed = claim == "unbiased" or (claim == "on_policy_unbiased" and measurement.is_on_policy)
    return not is_claimed or measurement.agreement.bias < _RIGHT


def _print(arguments: VerifyArguments, checks: Sequence[Check], measurements: Sequence[Measurement]) -> None:
    gradients = Table("samples", "bias", "scale", "cosine", "noise", title=f"Expected gradient: {arguments.function}")
    for measurement in measurements:
        found = measurement.agreement
        numbers = (found.bias, found.scale, found.cosine, found.noise)
        gradients.add_row(measurement.setting, *(f"{number:.3g}" for number in numbers))
    properties = Table("property", "holds", title="Checks")
    for check in checks:
        properties.add_row(check.name, "yes" if check.holds else "NO" if check.is_needed else "no (not needed)")
    console = Console(width=100)
    console.print(gradients)
    console.print(properties)
