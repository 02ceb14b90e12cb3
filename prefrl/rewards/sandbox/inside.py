"""What runs inside of a sandbox, with the standard library alone: a program, or one side of a test by assertions.

Its text is given to `python -c`, with the JSON of its configuration as argument; the code to run comes through
standard input. `program` runs a completion as a program. `functions` runs it as a module, whose functions the other
side calls. `tests` runs the tests: in a process of its own, in another sandbox, so that the completion can neither see
the tests nor change what they compare or report. Names of the completion stand for calls across; only plain data is
copied.
"""

from __future__ import annotations

import builtins
import functools
import json
import operator
import os
import resource
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_LENGTH_BYTES = 8
_MAX_MESSAGE = 1 << 24
# JSON reads longer integers slowly, or not at all.
_MAX_PLAIN_INTEGER = 1 << 53
_PR_SET_DUMPABLE = 4
_STARTED, _DONE = b"s", b""


class Unsendable(Exception):
    """A test gives the completion something that is not plain data."""


class CandidateError(Exception):
    """The completion raised an exception that Python does not define, or ended."""


def main() -> None:
    """Run what the configuration says."""
    config = json.loads(sys.argv[1])
    header = json.loads(_read(0))
    if config["processes"] is not None:
        _limit_processes(config["processes"])
    if config["role"] == "tests":
        _hide_memory()
    null = os.open(os.devnull, os.O_RDWR)
    result = os.dup(1)
    if config["role"] != "program":
        os.dup2(null, 0)
        os.dup2(null, 1)
    os.set_inheritable(config["status"], False)
    os.write(config["status"], _STARTED)
    os.dup2(null, 2)  # until here, it told what went wrong in the sandbox itself
    if config["role"] == "program":
        _run_program(config, header["code"])
    os.close(config["status"])
    link = _Link(config["incoming"], config["outgoing"])
    if config["role"] == "functions":
        os.close(result)
        _Server(link).serve(header["code"])
    else:
        verdict = _run_tests(link, header["code"])
        os.write(result, json.dumps({"nonce": header["nonce"], **verdict}).encode())


def _limit_processes(most: int) -> None:
    """In a namespace of bwrap, where they are counted; elsewhere jail.py does it, as it sets all other limits."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _hide_memory() -> None:
    """Keep other processes of this user out of this one's memory, where they are not in another namespace anyway."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _run_program(config: dict[str, Any], code: str) -> None:
    name = config["file"]
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and others would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(config["interpreter"][0], [*config["interpreter"], name])


# --- messages


class _Link:
    """Messages to and from the other side."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming = incoming
        self.outgoing = outgoing

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        while data:
            data = data[os.write(self.outgoing, data) :]

    def receive(self) -> Any:
        """The next message; EOFError: there is none."""
        return json.loads(_read(self.incoming))


def _read(descriptor: int) -> bytes:
    length = int.from_bytes(_read_exactly(descriptor, _LENGTH_BYTES), "big")
    if length > _MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(descriptor, min(length - len(data), 1 << 16))
        if not part:
            raise EOFError("the other side has ended")
        data += part
    return bytes(data)


def _encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """JSON of plain data; subclasses of its types lose what they add to them. `other` encodes the rest."""
    if value is None or value is True or value is False:
        return value
    for kind, encode in _SCALARS.items():
        if isinstance(value, kind):
            return encode(value)
    if isinstance(value, list):
        return [_encode(item, other) for item in value]
    if isinstance(value, dict):
        return {"d": [[_encode(key, other), _encode(item, other)] for key, item in value.items()]}
    for tag, collection in _COLLECTIONS.items():
        if isinstance(value, collection):
            return {tag: [_encode(item, other) for item in value]}
    return other(value)


def _encoded_integer(value: int) -> Any:
    value = int(value)
    return value if abs(value) < _MAX_PLAIN_INTEGER else {"i": hex(value)}


def _decode(value: Any, reference: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, reference) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "r":
        return reference(int(content))
    if tag == "i":
        return int(content, 16)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "g":
        return range(*content)
    if tag == "c":
        return complex(*content)
    if tag == "d":
        return {_decode(key, reference): _decode(item, reference) for key, item in content}
    return _COLLECTIONS[tag](_decode(item, reference) for item in content)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _encoded_integer,
    float: float,
    str: str.__str__,
    bytes: lambda value: {"b": bytes(value).hex()},
    range: lambda value: {"g": [value.start, value.stop, value.step]},
    complex: lambda value: {"c": [value.real, value.imag]},
}
_COLLECTIONS: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset}


# --- the side of the completion

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "set attribute": setattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "contains": operator.contains,
    "length": len,
    "iterator": iter,
    "next": next,
    "text": str,
}


class _Server:
    """Calls what the tests call."""

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.objects: list[Any] = []  # what is no plain data stays here; the tests know it by its number

    def serve(self, code: str) -> None:
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        self._reply(lambda: exec(compile(code, "<completion>", "exec"), vars(module)))
        while True:
            try:
                operation, args, kwargs = self.link.receive()
            except EOFError:
                return
            if operation == "global":
                self._reply(functools.partial(operator.getitem, vars(module), args))
            else:
                self._do(_OPERATIONS[operation], self._decoded(args), self._decoded(kwargs))

    def _do(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self._reply(lambda: function(*args, **kwargs), args)

    def _reply(self, action: Callable[[], Any], args: Any = ()) -> None:
        """Send the result, and the arguments, which the call may have changed."""
        try:
            message = {"value": self._encoded(action()), "args": self._encoded(list(args))}
        except BaseException as error:
            message = {"error": type(error).__name__, "text": _text(error)}
        self.link.send(message)

    def _decoded(self, value: Any) -> Any:
        return _decode(value, self.objects.__getitem__)

    def _encoded(self, value: Any) -> Any:
        return _encode(value, self._keep)

    def _keep(self, value: Any) -> dict[str, int]:
        self.objects.append(value)
        return {"r": len(self.objects) - 1}


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""


# --- the side of the tests


class _Remote:
    """An object of the completion that is no plain data. It equals only itself: the completion compares nothing."""

    def __init__(self, client: _Client, number: int) -> None:
        object.__setattr__(self, "_remote", (client, number))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set attribute", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set item", key, value)

    def __contains__(self, item: Any) -> bool:
        return self._do("contains", item) is True

    def __len__(self) -> Any:
        return self._do("length")

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._do("iterator")
        while True:
            try:
                yield iterator._do("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._do("next")

    def __str__(self) -> str:
        return str(self._do("text"))

    def _do(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._remote[0].do(operation, self, *args, **kwargs)


class _Client:
    """Calls into the completion."""

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.num_uses = 0  # of anything that is the completion's

    def do(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        self.num_uses += 1
        encoded = [_encode(arg, self._refer) for arg in args]
        self.link.send([operation, encoded, _encode(kwargs, self._refer)])
        reply = self._receive()
        for number, theirs in enumerate(self._decoded(reply["args"])[: len(args)]):
            _change(args[number], theirs)
        return self._decoded(reply["value"])

    def globals(self, names: list[str]) -> dict[str, Any]:
        """What the completion calls by these names, as far as it does."""
        found = {}
        for name in names:
            self.link.send(["global", name, None])
            try:
                found[name] = self._decoded(self._receive()["value"])
            except KeyError:
                continue
            self.num_uses += not isinstance(found[name], _Remote)
        return found

    def wait_until_loaded(self) -> None:
        self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            reply = self.link.receive()
        except (EOFError, OSError) as error:
            raise CandidateError("the completion ended its process") from error
        if "error" not in reply:
            return {"value": reply["value"], "args": reply["args"]}
        kind = getattr(builtins, str(reply["error"]), CandidateError)
        is_usual = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if is_usual else CandidateError)(str(reply["text"]))

    def _decoded(self, value: Any) -> Any:
        return _decode(value, lambda number: _Remote(self, number))

    def _refer(self, value: Any) -> dict[str, int]:
        if not isinstance(value, _Remote):
            raise Unsendable(f"a test gives the completion a {type(value).__name__}")
        return {"r": value._remote[1]}


def _change(ours: Any, theirs: Any) -> None:
    """Do to an argument what the call did to its copy."""
    if type(ours) is not type(theirs) or ours == theirs:
        return
    if isinstance(ours, list):
        ours[:] = theirs
    elif isinstance(ours, (dict, set)):
        ours.clear()
        ours.update(theirs)


def _run_tests(link: _Link, code: str) -> dict[str, Any]:
    """The verdict. Only tests that run to their end pass, so that no completion gains by ending them early."""
    client = _Client(link)
    try:
        compiled = compile(code, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        return {"defect": f"{type(error).__name__}: {error}"}
    try:
        client.wait_until_loaded()
        # A completion's `all` or `abs` must not be the one that the tests use.
        names = [name for name in sorted(_names(compiled)) if not hasattr(builtins, name) and name[:2] != "__"]
        space = {**client.globals(names), "__name__": "tests"}
        exec(compiled, space)
    except Unsendable as error:
        return {"defect": str(error)}
    except BaseException as error:
        return {"failed": f"{type(error).__name__}: {_text(error)}"}
    return {"passed": True, "num_uses": client.num_uses}


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


if __name__ == "__main__":
    main()
