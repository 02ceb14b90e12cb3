"""Heavy imports without Python's garbage collector, which takes a third of their CPU time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Import transformers and what needs it inside this context.

    The imports make a million objects that live as long as the process. The collector would go through them again and
    again while they are made, and at the end of the process. Here it waits, and never looks at them later on.

    If transformers is imported already, objects of someone else may be garbage by now, so nothing changes.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
