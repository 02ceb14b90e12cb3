"""`prefrl resume RUN_DIR`: go on with a run from its last checkpoint, with the options that it was started with."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.printable import MASK
from prefrl.registry import REGISTRY
from prefrl.run.checkpoints import find_last
from prefrl.run.records import STARTS, read_identity, read_starts
from prefrl.scripts.command import command
from prefrl.scripts.inputs import read

__all__ = ["command_to_resume", "main"]

_RESUME = ["--resume_from_checkpoint", "true"]
_MODULE = "prefrl.scripts.main"


@dataclass
class ResumeArguments:
    """The run."""

    run_dir: str | None = opt(None, "output_dir of the run.")

    def __post_init__(self) -> None:
        if self.run_dir is None:
            raise ConfigError("run_dir: not given. Write prefrl resume RUN_DIR.")


@command(
    "resume",
    ResumeArguments,
    about="Continue a run from its last checkpoint, with the options that it was started with.",
    takes_config=False,
    positional=("run_dir",),
)
def main(options: ResumeArguments) -> int:
    """Start the run's own command again, in place of this process, which is another program afterwards."""
    words = command_to_resume(Path(str(options.run_dir)))
    print(f"prefrl resume: {shlex.join(['prefrl', *words])}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *words])


def command_to_resume(folder: Path) -> list[str]:
    """The algorithm and the options that resume a run.

    Args:
        folder: `output_dir` of the run.

    Raises:
        ConfigError: There is nothing to resume, or the run was not started by the command.
    """
    identity = read_identity(folder)
    starts = [] if identity is None else read_starts(folder, identity.run)
    if identity is None or not starts:
        raise ConfigError(f"{folder}: nothing to resume: no run has written its command there ({STARTS})")
    found = find_last(folder, run=identity.run)
    if found.folder is None:
        unusable = f" ({'; '.join(found.unusable)})" if found.unusable else ""
        raise ConfigError(
            f"{folder}: nothing to resume: the run has no complete checkpoint{unusable}. Start it again."
        )
    command = starts[-1].command
    words = _words(shlex.split(command))
    by_hand = f"Resume it by hand: add {' '.join(_RESUME)} to that command."
    if words is None:
        raise ConfigError(
            f"{folder}: was started by `{command}`, not by the command prefrl. Run that again, with "
            "trainer.train(resume_from_checkpoint=True)."
        )
    if MASK in command:
        raise ConfigError(f"{folder}: was started by `{command}`, but its secrets were not recorded. {by_hand}")
    output_dir = read(REGISTRY[words[0]], words[1:]).values.get("output_dir") or "trainer_output"
    if Path(output_dir).resolve() != folder.resolve():
        raise ConfigError(
            f"{folder}: was started by `{command}`, which writes to output_dir={output_dir!r} from here. Change to "
            "the folder in which the run was started."
        )
    return words if words[-2:] == _RESUME else [*words, *_RESUME]


def _words(command: Sequence[str]) -> list[str] | None:
    """The algorithm and its options in a recorded command; None: it is another command."""
    start = next((i for i, word in enumerate(command) if word in ("prefrl", _MODULE)), len(command))
    words = [word for i, word in enumerate(command) if i > start and not (i == start + 1 and word == "--debug")]
    return words if words and words[0] in REGISTRY else None
