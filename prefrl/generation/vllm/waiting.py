"""Tells the user which server a run waits for."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from prefrl.printable import printable

__all__ = ["Waiting"]

_FIRST_S, _NEXT_S = 2.0, 10.0  # a server that answers at once is not worth a line


class Waiting:
    """Prints `waiting for http://... (12 of 120 s)` to standard error: after 2 seconds, then every 10.

    Args:
        url: What does not answer.
        limit: Seconds until the run gives up.
        console: Where to write; None: standard error, as it is then.
    """

    def __init__(self, url: str, limit: float, console: Console | None = None) -> None:
        self._url, self._limit, self._console = url, limit, console
        self._next = _FIRST_S

    def tell(self, seconds: float) -> None:
        """Say how long the run has waited, if it is time to say it again."""
        if seconds < self._next:
            return
        self._next = seconds + _NEXT_S
        console = self._console or Console(stderr=True)
        text = f"waiting for {self._url} ({seconds:.0f} of {self._limit:g} s)"
        console.print(Text(printable(text)), soft_wrap=True)
