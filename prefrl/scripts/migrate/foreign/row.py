"""What a name of another library is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    *("Counterpart", "aside", "asked", "becomes", "column", "if_set", "if_set_key", "instead", "layers", "loggers"),
    *("not_needed", "not_there", "renamed", "sampled_top_k", "server", "together"),
]

_UNSET = (None, "", "None", -1)

CounterpartKind = Literal["renamed", "becomes", "instead", "not needed", "server", "not there", "aside"]


@dataclass(frozen=True)
class Counterpart:
    """What a name of another library is here.

    Args:
        kind: Whether there is a counterpart, and whether the name may be left out.
        text: What it is, or why it is not needed, or what to do instead; no full stop.
        options: The options that it becomes; advice is given only where a config has the first of them.
        convert: From the value to those options, which may be none. None: the value alone does not decide them.
    """

    kind: CounterpartKind
    text: str
    options: tuple[str, ...] = ()
    convert: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def says(self) -> str:
        """The row in words that may follow the name."""
        return {
            "renamed": f"is {self.text} here",
            "becomes": f"becomes here: {self.text}",
            "instead": f"works differently here: {self.text}",
            "not needed": f"is not needed here: {self.text}",
            "server": f"belongs to prefrl vllm-serve here: {self.text}",
            "not there": f"has no counterpart here: {self.text}",
            "aside": f"has no counterpart here: {self.text}",
        }[self.kind]

    @property
    def may_go(self) -> bool:
        """Whether the name may be left out without another one in its place."""
        return self.kind in ("not needed", "server")


def renamed(option: str, key: str | None = None) -> Counterpart:
    """The same value under another name, or as a key of an option that is a mapping."""
    if key is None:
        return Counterpart("renamed", option, (option,), lambda value: {option: value})
    return Counterpart("becomes", f"the key {key!r} of {option}", (option,), lambda value: {option: {key: value}})


def becomes(text: str, convert: Callable[[Any], Mapping[str, Any]], *options: str) -> Counterpart:
    """Other options, or other values."""
    return Counterpart("becomes", text, options, convert)


def together(text: str, *options: str) -> Counterpart:
    """Other options, which the values of several keys decide together."""
    return Counterpart("becomes", text, options)


def asked(option: str, values: Mapping[Any, Any], text: str | None = None) -> Counterpart:
    """An option whose values have other names."""
    listed = ", ".join(f"{theirs} is {ours!r}" for theirs, ours in values.items())
    return Counterpart("becomes", text or f"{option}: {listed}", (option,), lambda value: {option: values[value]})


def if_set(option: str) -> Counterpart:
    """The same value under another name, unless it says that nothing is set."""
    return becomes(option, lambda value: {} if value in _UNSET else {option: value}, option)


def if_set_key(option: str, key: str) -> Counterpart:
    """The same value as a key of an option that is a mapping, unless it says that nothing is set."""
    convert = renamed(option, key).convert
    assert convert is not None
    return becomes(f"the key {key!r} of {option}", lambda value: {} if value in _UNSET else convert(value), option)


def sampled_top_k() -> Counterpart:
    """The number of tokens that evaluations sample from; a negative one stands for all of them."""
    option = "eval_sampling_kwargs"
    return becomes(f"the key 'top_k' of {option}, 0 for all tokens", lambda n: {option: {"top_k": max(n, 0)}}, option)


def column(name: str, *others: str) -> Counterpart:
    """The name of a column of the dataset; here it is `name`, or one of the others, unless `columns` maps it."""

    def convert(value: Any) -> Mapping[str, Any]:
        return {} if value in (name, *others, None, "") else {"columns": {name: value}}

    return becomes(f"columns, as {{{name}: ...}}", convert, "columns")


def layers() -> Counterpart:
    """The layers that get adapters."""
    option = "lora_target_modules"
    return becomes(option, lambda value: {option: [value] if isinstance(value, str) else value}, option)


def loggers() -> Counterpart:
    """The trackers of a run."""

    def convert(value: Any) -> Mapping[str, Any]:
        trackers = [name for name in ([value] if isinstance(value, str) else value) if name != "console"]
        if len(trackers) > 1:
            raise ValueError("report_to names one tracker, or all")
        return {"report_to": trackers[0] if trackers else "none"}

    return becomes("report_to; the console always has the log", convert, "report_to")


def not_needed(why: str) -> Counterpart:
    """Leaving it out changes nothing."""
    return Counterpart("not needed", why)


def server(text: str) -> Counterpart:
    """Not an option of training, but of the command that starts a server."""
    return Counterpart("server", text)


def instead(what: str) -> Counterpart:
    """Something else does this, which the user has to choose.

    Args:
        what: What to do, such as "set a=True".
    """
    return Counterpart("instead", what)


def not_there(why: str) -> Counterpart:
    """There is no counterpart."""
    return Counterpart("not there", why)


def aside(why: str) -> Counterpart:
    """There is no counterpart, but most runs mean the same without it: `prefrl migrate` turns it into a comment."""
    return Counterpart("aside", why)
