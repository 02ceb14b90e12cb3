"""`prefrl chat`: a conversation with a model in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from prefrl.options.fields import check_unset, opt
from prefrl.printable import printable
from prefrl.scripts.command import command
from prefrl.scripts.sampling.sampler import Sampler, SamplingArguments, make_sampler

__all__ = ["ChatArguments", "main"]

_COMMANDS = "/clear forgets the conversation, /undo its last turn; /exit or Ctrl-D ends."


@dataclass
class ChatArguments(SamplingArguments):
    """The model, and what it is told first."""

    system: str | None = opt(None, "A system prompt.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unset(
            self, "num_generations", because="a chat has only one answer to each question", remedy="Remove it."
        )


@command("chat", ChatArguments, about="Talk to a model in the terminal.", positional=("model_name_or_path",))
def main(options: ChatArguments) -> int:
    """Talk until the input ends."""
    console = Console(highlight=False)
    with console.status("Loading the model"):
        sampler = make_sampler(options, needs_template=True)
    console.print(f"[dim]{_COMMANDS}[/dim]")
    _talk(sampler, options, console)
    return 0


def _talk(sampler: Sampler, options: ChatArguments, console: Console) -> None:
    opening: list[dict[str, Any]] = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(opening)
    for text in _lines(console):
        if text == "/clear":
            messages = list(opening)
            continue
        if text == "/undo":
            messages = messages[: max(len(opening), len(messages) - 2)]
            continue
        asked = [*messages, {"role": "user", "content": text}]
        with console.status("..."):
            ((answer,),) = sampler.sample([asked])
        console.print(f"[bold green]model>[/bold green] {escape(printable(answer.text))}", soft_wrap=True)
        if answer.finish_reason == "length":
            console.print(f"[dim](cut off after max_completion_length={options.max_completion_length} tokens)[/dim]")
        messages = [*asked, {"role": "assistant", "content": answer.text}]


def _lines(console: Console) -> Iterator[str]:
    """What the user types, until the end."""
    while True:
        try:
            text = console.input("[bold blue]you>[/bold blue] ").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text:
            yield text
