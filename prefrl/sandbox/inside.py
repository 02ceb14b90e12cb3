"""What runs inside of a sandbox, with the standard library alone: a program, or one side of a test by assertions.

Its text is given to `python -c`, with the JSON of its configuration as argument; the code to run comes through
standard input. `program` runs a completion as a program. `functions` runs it as a module, whose functions the other
side calls. `tests` runs the tests: in a process of its own, in another sandbox, so that the completion can neither see
the tests nor change what they compare or report. Names of the completion stand for calls across; only plain data is
copied. Without another side, `tests` finds out whether the tests can judge any completion.
"""

from __future__ import annotations

import builtins
import contextlib
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


class CandidateError(Exception):
    """The completion ended, or raised an exception that Python does not define or that would steer the tests."""


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
    if config["role"] == "functions":
        os.close(result)
        _Server(_Link(config["incoming"], config["outgoing"])).serve(header["code"])
    else:
        client = _Client(_Link(config["incoming"], config["outgoing"])) if "incoming" in config else _Nobody()
        verdict = _run_tests(client, header["code"])
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
    if tag == "l":
        return slice(*content)
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
    slice: lambda value: {"l": [value.start, value.stop, value.step]},
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
        self.raised: BaseException | None = None  # the last exception that came from there
        self.unsendable: str | None = None  # complaint about an argument that cannot be copied

    def do(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        message = [operation, [_encode(arg, self._refer) for arg in args], _encode(kwargs, self._refer)]
        self.num_uses += 1
        reply = self._ask(message)
        for number, theirs in enumerate(self._decoded(reply["args"])[: len(args)]):
            _change(args[number], theirs)
        return self._decoded(reply["value"])

    def named(self, name: str) -> Any:
        """What the completion calls by this name. KeyError: nothing."""
        value = self._decoded(self._ask(["global", name, None])["value"])
        self.num_uses += not isinstance(value, _Remote)
        return value

    def globals(self, names: list[str]) -> dict[str, Any]:
        """The global names of tests that use these names."""
        found = {}
        for name in names:
            with contextlib.suppress(KeyError):
                found[name] = self.named(name)
        return found

    def wait_until_loaded(self) -> None:
        self._answer("load")

    def _ask(self, message: list[Any]) -> dict[str, Any]:
        self.link.send(message)
        return self._answer(message[0])

    def _answer(self, operation: str) -> dict[str, Any]:
        try:
            reply = self.link.receive()
        except (EOFError, OSError) as error:
            raise CandidateError("the completion ended its process") from error
        if "error" not in reply:
            return {"value": reply["value"], "args": reply["args"]}
        self.raised = _exception(operation, str(reply["error"]), str(reply["text"]))
        raise self.raised

    def _decoded(self, value: Any) -> Any:
        return _decode(value, lambda number: _Remote(self, number))

    def _refer(self, value: Any) -> dict[str, int]:
        if not isinstance(value, _Remote):
            self.unsendable = f"it gives the completion a {type(value).__name__}, which is not plain data"
            raise TypeError(self.unsendable)
        return {"r": value._remote[1]}


class _Nobody(_Client):
    """In place of a completion: has every name that is asked for, and fails in every use."""

    def __init__(self) -> None:
        super().__init__(_Link(-1, -1))

    def wait_until_loaded(self) -> None:
        pass

    def named(self, name: str) -> Any:
        self.num_uses += 1
        return _Remote(self, 0)

    def globals(self, names: list[str]) -> dict[str, Any]:
        return {"__builtins__": _AllNames(self)}  # where Python looks for names that the tests do not define

    def _ask(self, message: list[Any]) -> dict[str, Any]:
        raise CandidateError("there is no completion")


class _AllNames(dict[str, Any]):
    """Python's built-in names, and all others."""

    def __init__(self, client: _Client) -> None:
        super().__init__(vars(builtins))
        self._client = client

    def __missing__(self, name: str) -> Any:
        if name[:2] == "__":
            raise KeyError(name)
        return self._client.named(name)


class _Solution(types.ModuleType):
    """The module `solution`, from which tests may import names of the completion. For `import *`, it has none."""

    def __init__(self, client: _Client) -> None:
        super().__init__("solution")
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name[:2] != "__":
            with contextlib.suppress(KeyError):
                return self._client.named(name)
        raise AttributeError(f"the completion has no {name!r}")


def _exception(operation: str, name: str, text: str) -> Exception:
    """What a call raises here. StopIteration would end a `map` of the tests as if all calls had been made."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return CandidateError(text)
    if issubclass(kind, (StopIteration, StopAsyncIteration)) and operation != "next":
        return CandidateError(f"{name} {text}")
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and others need more than a text
        return kind.__new__(kind, text)


def _change(ours: Any, theirs: Any) -> None:
    """Do to an argument what the call did to its copy."""
    if type(ours) is not type(theirs) or ours == theirs:
        return
    if isinstance(ours, list):
        ours[:] = theirs
    elif isinstance(ours, (dict, set)):
        ours.clear()
        ours.update(theirs)


def _run_tests(client: _Client, code: str) -> dict[str, Any]:
    """The verdict: `passed`; `failed`, why; or `doubt`, what is wrong with the tests rather than with the completion.

    Only tests that run to their end pass, or that exit with code 0, which no completion can do for them.
    """
    failure: BaseException | None = None
    try:
        compiled = compile(code, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        return {"doubt": f"{type(error).__name__}: {error}"}
    try:
        client.wait_until_loaded()
        _exec_tests(client, compiled)
    except SystemExit as end:
        failure = None if end.code in (None, 0) else end
    except BaseException as error:
        failure = error
    if client.unsendable is not None:
        return {"doubt": client.unsendable}
    if failure is not None:
        is_theirs = isinstance(failure, ImportError) and failure is not client.raised and failure.name != "solution"
        return {"doubt" if is_theirs else "failed": f"{type(failure).__name__}: {_text(failure)}"}
    if client.num_uses == 0:
        return {"doubt": "it passes without using anything from the completion"}
    return {"passed": True}


def _exec_tests(client: _Client, compiled: types.CodeType) -> None:
    """Run tests as a script."""
    # A completion's `all` or `abs` must not be the one that the tests use.
    names = [name for name in sorted(_names(compiled)) if not hasattr(builtins, name) and name[:2] != "__"]
    main = types.ModuleType("__main__")
    vars(main).update(client.globals(names))
    sys.modules.update({"__main__": main, "solution": _Solution(client)})
    sys.argv = ["tests"]
    if "unittest" in names:
        _make_unittest_tell()
    exec(compiled, vars(main))


def _make_unittest_tell() -> None:
    """Let `unittest.main` raise what failed, also with `exit=False`, which ignores failures."""
    import unittest

    class Program(unittest.TestProgram):
        exit: bool

        def runTests(self) -> None:
            exits, self.exit = self.exit, False
            super().runTests()
            if not self.result.wasSuccessful():
                texts = [text.splitlines()[-1] for _, text in (*self.result.failures, *self.result.errors)]
                raise AssertionError("; ".join(texts))
            if exits:
                raise SystemExit(0)

    unittest.main = unittest.TestProgram = Program  # type: ignore[misc]  # it is a subclass


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


if __name__ == "__main__":
    main()
