"""What a script does to its own process: imports without the garbage collector, and logs of errors alone."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


def init_zero_verbose() -> None:
    """Log errors alone, in color, and send Python's warnings to the log instead of the terminal.

    prefrl's warnings then do not show, either. Call it before other libraries set up their logs.
    """
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    logging.captureWarnings(True)
