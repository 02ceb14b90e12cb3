"""The beginning and the end of a process in a test that runs several of them."""

from __future__ import annotations

import gc
import os
import sys

from prefrl import distributed


def leave_modules_uncollected() -> None:
    """Leave what is loaded out of garbage collection.

    HuggingFace's Trainer collects garbage in each training, which took four fifths of the time of a small one.
    """
    gc.collect()
    gc.freeze()


def leave(status: int) -> None:
    """End at once, when all processes are done.

    Without the interpreter's teardown: now and then it ends in `terminate called without an active exception`, from a
    native thread of torch, long after everything that is tested is over.
    """
    distributed.gather_objects(None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
