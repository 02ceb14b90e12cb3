"""`prefrl generate`: completions of a prompt, or of a dataset of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset, opt
from prefrl.printable import printable
from prefrl.run.folder import check_writable
from prefrl.scripts.arguments.datasets import FILES, SHAPING, ColumnArguments
from prefrl.scripts.declaration import command
from prefrl.scripts.sampling.sampler import (
    RESPONSES,
    SamplingArguments,
    TextOrMessages,
    check_output_file,
    has_messages,
    load_rows,
    make_sampler,
    write_rows,
)

__all__ = ["GenerateArguments", "main"]


@dataclass
class GenerateArguments(SamplingArguments, ColumnArguments):
    """The prompts, and where the completions go."""

    prompt: str | None = opt(None, "The prompt. Set this or dataset_name.")
    system: str | None = opt(None, "System prompt to use with prompt.")
    raw: bool = opt(False, "Continue the text of prompt directly, without the chat template.")
    dataset_name: str | None = opt(None, f"Prompts: a dataset on the Hub, a folder, or {FILES}.")
    dataset_split: str | None = opt(None, "Split, such as test[:100]; None: the whole of a file, otherwise test.")
    prompt_column: str = opt("prompt", "Column with the prompts, texts or lists of messages.")
    output_file: str | None = opt(
        None, f"A .jsonl or .parquet file to which the rows are written, with a column {RESPONSES}."
    )

    def __post_init__(self) -> None:
        for part in (SamplingArguments, ColumnArguments):
            part.__post_init__(self)
        if (self.prompt is None) == (self.dataset_name is None):
            given = "both are given" if self.prompt is not None else "not given"
            raise ConfigError(f'prompt, dataset_name: {given}. Write prefrl generate MODEL "..." or set dataset_name.')
        if self.dataset_name is None:
            names = ("dataset_split", "prompt_column", "output_file", *SHAPING)
            check_unset(self, *names, because="dataset_name is not set", remedy="Set dataset_name.")
            if self.raw:
                check_unset(self, "system", because="raw=True", remedy="Write it in the prompt.")
            return
        remedy = "system_prompt and conversational are the options for datasets."
        check_unset(self, "system", "raw", because="dataset_name is set", remedy=remedy)
        if self.output_file is None:
            raise ConfigError("output_file: not given. Set it to a .jsonl or .parquet file for the completions.")
        check_output_file("output_file", self.output_file)

    def messages(self) -> TextOrMessages:
        """The prompt as a conversation, or as text."""
        assert self.prompt is not None
        if self.raw:
            return self.prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


@command(
    "generate",
    GenerateArguments,
    about="Sample completions of a prompt, or of all prompts of a dataset.",
    positional=("model_name_or_path", "prompt"),
)
def main(options: GenerateArguments) -> int:
    """Sample, and print or write the completions."""
    if options.dataset_name is None:
        return _print(options)
    output, column = Path(str(options.output_file)), options.prompt_column
    rows = load_rows(options.dataset_name, options.dataset_split, column=column, options=options)
    check_writable(output.parent, option="folder of output_file")
    prompts = [row[options.prompt_column] for row in rows]
    samples = make_sampler(options, needs_template=has_messages(prompts)).sample(prompts)
    answered = [{**row, RESPONSES: [one.text for one in group]} for row, group in zip(rows, samples, strict=True)]
    write_rows(output, answered)
    print(f"{len(rows)} prompts with {options.num_generations} completions each are in {options.output_file}.")
    print(f"To score them: prefrl eval --dataset_name {options.output_file} --reward_funcs NAME")
    return 0


def _print(options: GenerateArguments) -> int:
    prompts = [options.messages()]
    (samples,) = make_sampler(options, needs_template=has_messages(prompts)).sample(prompts)
    console = Console(highlight=False)
    for number, sample in enumerate(samples):
        if len(samples) > 1:
            console.rule(f"{number + 1} of {len(samples)}")
        console.print(escape(printable(sample.text)), soft_wrap=True)
        if sample.finish_reason == "length":
            console.print(f"[dim](cut off after max_completion_length={options.max_completion_length} tokens)[/dim]")
    return 0
