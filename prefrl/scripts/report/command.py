"""`prefrl report`: one HTML file about a run, or about two that are compared."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.scripts.command import command
from prefrl.scripts.report.page import page

__all__ = ["RunArguments", "main"]


@dataclass
class RunArguments:
    """One run, or two that are compared."""

    run: str | None = opt(None, "output_dir of a run.")
    other: str | None = opt(None, "output_dir of another run to compare it with.")

    def __post_init__(self) -> None:
        if self.run is None:
            raise ConfigError("run: not given. Write the output_dir of a run, such as runs/a.")

    def folders(self) -> list[Path]:
        """The folders of the runs."""
        return [Path(folder) for folder in (self.run, self.other) if folder is not None]


@dataclass
class ReportArguments(RunArguments):
    """The runs, and where the page goes."""

    output: str | None = opt(None, "File to write; None: report.html in the folder of the first run.")


@command(
    "report",
    ReportArguments,
    about="Write one HTML file with curves, rewards, completions, health, options and versions of a run. "
    "Example: prefrl report runs/a runs/b --output compared.html",
    takes_config=False,
    positional=("run", "other"),
)
def main(options: ReportArguments) -> int:
    """Write the page to a file that only this user can read, as the completions in it."""
    folders = options.folders()
    output = folders[0] / "report.html" if options.output is None else Path(options.output)
    text = page(folders)
    try:
        output.unlink(missing_ok=True)  # it could be a link
        with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"output={str(output)!r}: cannot be written: {error.strerror}. Give another file."
        ) from error
    print(output)
    return 0
