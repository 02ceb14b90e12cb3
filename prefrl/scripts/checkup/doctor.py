"""`prefrl doctor run.yaml`: look at everything that a run needs before its model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, opt
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.inputs import read
from prefrl.scripts.startup import uncollected

if TYPE_CHECKING:
    from prefrl.registry import Algorithm

__all__ = ["main"]

_USAGE = "prefrl doctor [ALGORITHM] run.yaml [--option value ...]"


def main(argv: Sequence[str]) -> int:
    """Check a run and print what was found. The exit code is 0 if the run would begin, otherwise 2."""
    algorithm, options, own = _read(argv)
    given = read(algorithm, options)
    with uncollected():  # these import torch, which mistakes do not need
        from rich.console import Console

        from prefrl.scripts.arguments.launch import launch_options
        from prefrl.scripts.checkup.checkup import checkup_of

    launch = launch_options(given, os.environ)
    checkup = checkup_of(algorithm, given, launch, device_memory=own.device_memory)
    checkup.print(Console(highlight=False))
    return 2 if checkup.count("problem") else 0


@dataclass
class DoctorArguments:
    """What the doctor is told besides the options of the run."""

    device_memory: Annotated[float, Gt(0)] | None = opt(
        None, "GiB of memory of each device on which the run will be; None: look at the devices of this machine."
    )

    def __post_init__(self) -> None:
        check_fields(self)


def _read(argv: Sequence[str]) -> tuple[Algorithm, list[str], DoctorArguments]:
    """The algorithm, the command line of `prefrl <algorithm>`, and the doctor's own options."""
    parser = CommandParser(
        "doctor",
        (DoctorArguments,),
        "Check a run before it begins: data as tokens, rewards, server, batch sizes, memory, time. Options are "
        f"those of the algorithm. {_USAGE}. Without ALGORITHM, the file has to name it in a comment, such as '# "
        "prefrl grpo run.yaml'.",
        takes_config=False,
    )
    start = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    words, options = list(argv[:start]), list(argv[start:])
    if {"-h", "--help"}.intersection(options):
        parser.parse(["--help"])
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    names = [word for word in words if word not in files]
    if len(names) > 1 or len(files) > 1:
        raise ConfigError(f"{' '.join(words)}: give one algorithm and one file: {_USAGE}")
    (own,), options = parser.parse_known(options)
    config = [option for path in files for option in ("--config", path)]
    name = names[0] if names else _named_in(files)
    if name not in REGISTRY:
        raise ConfigError(f"unknown algorithm {name!r}. {nearest(name, list(REGISTRY))}")
    return REGISTRY[name], [*config, *options], own


def _named_in(files: Sequence[str]) -> str:
    """The algorithm that a comment of the file names."""
    for path in files:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        found: Any = re.search(r"^#.*\bprefrl (?:doctor )?(\w+)\b", text, re.MULTILINE)
        if found and found[1] in REGISTRY:
            return str(found[1])
    raise ConfigError(f"no algorithm is given: {_USAGE}, or write a comment '# prefrl grpo run.yaml' into the file")
