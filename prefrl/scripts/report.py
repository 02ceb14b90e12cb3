"""`prefrl report`: one HTML file about a run, or about two that are compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prefrl.errors import ConfigError
from prefrl.scripts.light_parser import LightParser
from prefrl.scripts.report_html import page

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Write the page to a file that only this user can read, as the completions in it.

    Args:
        argv: The folders of one run or two, then the options.

    Returns:
        0.

    Raises:
        ConfigError: A folder is not that of a run, or the page cannot be written.
    """
    parser = LightParser(
        prog="prefrl report",
        description="Write one HTML file with curves, rewards, completions, health, options and versions of a run.",
        epilog="example: prefrl report runs/a runs/b --output compared.html",
    )
    parser.add_argument("run", type=Path, help="output_dir of a training")
    parser.add_argument("other", type=Path, nargs="?", help="output_dir of another one, to compare them")
    parser.add_argument("--output", type=Path, help="the file (default: report.html in the folder of the first run)")
    options = parser.read(argv)
    folders = [folder for folder in (options.run, options.other) if folder is not None]
    output = options.output or options.run / "report.html"
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
