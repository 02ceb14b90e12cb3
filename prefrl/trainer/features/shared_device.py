"""A device that training shares with a vLLM server: the server sleeps except while completions are sampled."""

from __future__ import annotations

from collections.abc import Callable

from prefrl.trainer.parts import Part, Run


class SharedDevice(Part):
    """Puts the server to sleep before the first step, and again each time when completions are there.

    The generator wakes it when it sends the weights for the next ones.

    Args:
        rest: Puts the server to sleep.
    """

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest

    def opened(self, run: Run) -> None:
        """A server that has just started is awake, and trials of sizes need the memory."""
        self._rest()

    def sampled(self, run: Run) -> None:
        """See `Part`."""
        self._rest()
