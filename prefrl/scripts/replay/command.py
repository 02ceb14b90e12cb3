"""`prefrl replay`: compute a past step of a run again, from what the run has left on the disk."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prefrl.errors import ConfigError
from prefrl.run.records import read_identity

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Compute the step and print it."""
    parser = argparse.ArgumentParser(prog="prefrl replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="output_dir of an online run, or a folder nan-step-N of any run")
    parser.add_argument("--step", type=int, help="number of the step, counted from 1, as it is logged")
    options = parser.parse_args(argv)
    identity = read_identity(options.run)
    if identity is None:
        raise ConfigError(
            f"run={str(options.run)!r}: has no run.json. Pass the output_dir of a run, or a folder nan-step-N in it."
        )
    if any(options.run.glob("step_*_of_*.safetensors")):
        if options.step is not None:
            raise ConfigError(f"step={options.step} has no effect: {options.run} holds a single step. Leave it out.")
        from prefrl.scripts.replay.steps import replay_dump  # imports torch, as the other below does

        replay_dump(options.run, identity)
        return 0
    if options.step is None or options.step < 1:
        raise ConfigError(f"step={options.step}: must be the number of a step, 1 or more. Set --step.")
    from prefrl.scripts.replay.steps import Replay

    with tempfile.TemporaryDirectory() as scratch:
        Replay(options.run, identity, options.step, scratch).run()
    return 0
