"""What is said about a run before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prefrl.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["quantity", "show_banner"]


def show_banner(console: Console, facts: Mapping[str, str]) -> None:
    """Print facts by name: in a frame on a terminal, as plain lines elsewhere."""
    if not facts:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(Text(name), Text(printable(fact)))
    if console.is_terminal:
        console.print(Panel(table, title="prefrl", title_align="left", expand=False))
        return
    width = max(map(len, facts))
    for name, fact in facts.items():
        console.print(Text(f"{name:<{width}}  {printable(fact)}"), soft_wrap=True)


def quantity(count: float, unit: str = "") -> str:
    """A large number with three digits and a decimal prefix, such as `494 M` or, with a unit, `1.98 GB`."""
    for power, prefix in ((9, "G" if unit else "B"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}{unit}"
    return f"{count:g} {unit}".rstrip()
