"""Names of other libraries that prefrl uses: the list of the private ones is complete, and what it names is there."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import pytest
from transformers import Trainer

from prefrl.distributed.checkpoint import _DEEPSPEED
from prefrl.registry import REGISTRY
from prefrl.trainer.loop import Loop
from tests.private_names import (
    ABSENT,
    HOOKS,
    PRIVATE,
    PUBLIC,
    REPLACED,
    SHARED,
    VARIADIC,
    imported_names,
    is_in_sources,
    is_there,
    overridden_private_names,
    used_private_names,
)

LISTED = {name for names in PRIVATE.values() for name in names}
HERE = {owner: names for owner, names in PRIVATE.items() if not owner.startswith("vllm.")}


def _gone(names: dict[str, set[str]]) -> str:
    return "\n".join(f"{name}, used by {', '.join(sorted(files))}" for name, files in sorted(names.items()))


def test_every_private_name_of_another_library_is_listed() -> None:
    used = used_private_names()
    overridden = overridden_private_names()
    known = LISTED | PUBLIC | SHARED
    assert not _gone({name: files for name, files in used.items() if name not in known})
    assert not overridden - LISTED - HOOKS.keys() - VARIADIC
    assert not (known - used.keys()) - overridden, "listed, but prefrl does not use it"


@pytest.mark.parametrize("owner", HERE)
def test_private_names_are_there(owner: str) -> None:
    users = used_private_names()
    assert not _gone({f"{owner}.{name}": users.get(name, set()) for name in HERE[owner] if not is_there(owner, name)})


def test_what_is_imported_is_there() -> None:
    elsewhere = ("vllm.", "verl.", "prime_rl.", "nemo_rl.", "torchtitan.")  # they have environments of their own
    imported = {key: files for key, files in imported_names().items() if not key[0].startswith(elsewhere)}
    gone = {".".join(key): files for key, files in imported.items() if key not in ABSENT and not is_there(*key)}
    assert not _gone(gone)


def test_what_is_read_of_deepspeed_is_there() -> None:
    found = find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    packages = Path(found.origin).parents[1]
    read = [(module, name) for module, names in _DEEPSPEED.items() for name in names]
    assert not [key for key in read if not is_in_sources(packages, *key)]


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        ("torch.nn:Module", "_parameters", True),  # set in instances
        ("torch.nn:Module", "_parametres", False),
        ("torch.nn:Modul", "_parameters", False),
        ("torch.utils", "_python_dispatch", True),  # a module
        ("torch.utils", "_python_dispatcher", False),
        ("torch.utils.no_such_module", "anything", False),
    ],
)
def test_a_name_that_is_gone_is_found_out(owner: str, name: str, expected: bool) -> None:
    assert is_there(owner, name) is expected


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hooks_of_the_huggingface_loop_have_the_signature_that_was_read(name: str) -> None:
    parameters = inspect.signature(getattr(Trainer, name)).parameters
    assert [parameter for parameter in parameters if parameter != "self"] == HOOKS[name]


def test_every_overridden_hook_is_pinned() -> None:
    classes = {cls for row in REGISTRY.values() for cls in row.load_trainer().__mro__ if issubclass(cls, Trainer)}
    overridden = {
        name
        for cls in classes - {Trainer}
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType | staticmethod) and name in vars(Trainer)
    }
    assert overridden - VARIADIC - REPLACED == set(HOOKS)


def test_the_loop_alone_overrides_hooks() -> None:
    classes = {cls for row in REGISTRY.values() for cls in row.load_trainer().__mro__ if issubclass(cls, Loop)}
    known = {name for name, value in vars(Trainer).items() if callable(value) and not name.startswith("__")}
    assert {f"{cls.__name__}.{name}" for cls in classes - {Loop} for name in known & vars(cls).keys()} == set()


def test_transformers_still_reads_the_flag_that_the_loss_is_scaled_already() -> None:
    # Without it, HuggingFace would divide by gradient_accumulation_steps once more.
    assert "loss_is_scaled_for_ga" in inspect.getsource(Trainer.training_step)
