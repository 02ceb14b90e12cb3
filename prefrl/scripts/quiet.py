"""Show only errors of a script."""

from __future__ import annotations

import logging

__all__ = ["init_zero_verbose"]


def init_zero_verbose() -> None:
    """Log errors alone, in color, and send Python's warnings to the log instead of the terminal.

    prefrl's warnings then do not show, either. Call it before other libraries set up their logs.
    """
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    logging.captureWarnings(True)
