"""What a recorded run shows: `prefrl report`, `watch` and `look`.

`report` writes one HTML file about a run, or about several that are compared. `watch` keeps the page up to date on
this machine's loopback interface. `look` shows completions of a run, from the files of its journal.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import pyarrow.parquet as pq
from annotated_types import Ge, Lt
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from prefrl.errors import ConfigError, DataError, printable
from prefrl.options.fields import check_fields, check_unset, opt
from prefrl.options.names import nearest
from prefrl.scripts.declaration import command
from prefrl.scripts.report_page import MOST_RUNS, page
from prefrl.scripts.report_tokens import TokenQuantity, text_of_tokens, turns_of


@dataclass
class RunArguments:
    """One run, or several that are compared."""

    runs: list[str] | None = opt(None, "The output_dir of a run, or of several that are compared.")

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("runs: not given. Write the output_dir of a run, such as runs/a.")
        if len(self.runs) > MOST_RUNS:
            raise ConfigError(f"runs={self.runs}: are {len(self.runs)}, and at most {MOST_RUNS} are compared.")

    def folders(self) -> list[Path]:
        """The folders of the runs."""
        return [Path(folder) for folder in self.runs or ()]


@dataclass
class ReportArguments(RunArguments):
    """The runs, and where the page goes."""

    output: str | None = opt(None, "File to write. The default is report.html in the folder of the first run.")


@command(
    "report",
    ReportArguments,
    about="Write one HTML file with curves, rewards, completions, health, options and versions of a run, or of "
    "several.\n\nExamples:\n  prefrl report runs/a\n  prefrl report runs/a runs/b --output compared.html",
    takes_config=False,
    positional=("runs",),
)
def report(options: ReportArguments) -> int:
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


_LOOPBACK = "127.0.0.1"
_WATCHED = ("*.json", "*.jsonl", "checkpoint-*", "nan-step-*", "completions", "evaluations")


@dataclass
class WatchArguments(RunArguments):
    """The runs, and the address of the page."""

    port: Annotated[int, Ge(0), Lt(2**16)] = opt(8765, "Port of the page. 0 takes any free port.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)


@command(
    "watch",
    WatchArguments,
    about="Show one run or several in the browser, while they train or later. Only this machine can open the page, "
    "with the address that is printed: it contains a random token, which keeps out other users.\n\n"
    "Examples:\n  prefrl watch runs/a\n  prefrl watch runs/a runs/b runs/c",
    takes_config=False,
    positional=("runs",),
)
def watch(options: WatchArguments) -> int:
    """Serve the page until Ctrl-C."""
    live = LivePage(options.folders())
    live.current()
    with serve(live, options.port) as server:
        print(f"http://{_LOOPBACK}:{server.server_port}{live.path}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class LivePage:
    """The page of today's files: it is made anew when a file has changed, and once a minute.

    Args:
        folders: `output_dir` of each run.
        clock: Returns seconds.

    Attributes:
        path: The page's path on the server, with a random token: the page shows prompts and completions, and every
            user of the machine can reach the port.
    """

    def __init__(self, folders: Sequence[Path], *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.path = f"/?token={secrets.token_urlsafe(32)}"
        self._folders = list(folders)
        self._lock = Lock()  # guards what follows
        self._stamp = ""
        self._page = b""

    def current(self) -> tuple[str, bytes]:
        """The page and its tag, which changes with it.

        Raises:
            ConfigError: A folder is not that of a run, or not any more.
        """
        with self._lock:
            stamp = _stamp_of(self._folders, minute=int(self._clock() // 60))
            if stamp != self._stamp:
                self._page = page(self._folders, is_live=True).encode()
                self._stamp = stamp
            return f'"{self._stamp}"', self._page


def serve(live: LivePage, port: int) -> ThreadingHTTPServer:
    """A server of the page on the loopback interface; it serves once `serve_forever` is called.

    Raises:
        ConfigError: The port is taken.
    """
    try:
        return ThreadingHTTPServer((_LOOPBACK, port), partial(_Handler, live))
    except OSError as error:
        raise ConfigError(f"port={port}: {error.strerror}. Choose another one with --port, or 0.") from error


class _Handler(BaseHTTPRequestHandler):
    """Answers the browser on this machine that has the token."""

    def __init__(self, live: LivePage, *arguments: Any) -> None:
        self._live = live
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page; nothing if the browser has it already."""
        # A site whose name resolves to this machine could read the page otherwise.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_LOOPBACK, "localhost"):
            self.send_error(403, "only for this machine")
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        if not hmac.compare_digest(self.path.encode(), self._live.path.encode()):
            self.send_error(403, "open the address that prefrl watch printed: it ends with a token")
            return
        try:
            tag, body = self._live.current()
        except ConfigError:
            self.send_error(503, "the folder of the run is gone")
            return
        if self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            self.end_headers()
            return
        self.send_response(200)
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body)), "ETag": tag}
        headers |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print no line for each request."""


def _stamp_of(folders: Sequence[Path], *, minute: int) -> str:
    """A hash of the sizes and times of the files that the page is made of, and of the minute, as silence is shown."""
    found = hashlib.sha256(f"{minute}\n".encode())
    for folder in folders:
        for path in sorted(path for pattern in _WATCHED for path in folder.glob(pattern)):
            try:
                about = path.stat()
            except OSError:
                continue
            found.update(f"{path}{about.st_mtime_ns}{about.st_size}\n".encode())
    return found.hexdigest()[:16]


_METADATA = b"prefrl"  # where the journal says which columns are rewards
_SHOWN_CHARACTERS, _SHOWN_LINES = 4000, 100
_DEFAULT_WORST = 3


@dataclass
class LookArguments:
    """Which completions of which run."""

    run_dir: str | None = opt(None, "Folder of the run, of its completions, or of sessions of prefrl gateway.")
    worst: Annotated[int, Ge(0)] | None = opt(
        None, "Number of completions with the lowest reward to show. The default is 3."
    )
    best: Annotated[int, Ge(0)] = opt(0, "Number of completions with the highest reward to show.")
    step: int | None = opt(None, "Optimizer step whose generation batch is shown. The default is the last one.")
    all_steps: bool = opt(False, "Search all generation batches that the run kept.")
    reward: str = opt(
        "reward", "Column to sort by: 'reward' for the total, the name of a single reward, or 'advantage'."
    )
    tokens: TokenQuantity | None = opt(
        None,
        "Color the tokens by this quantity. All but logprob need a run with journal_tokens=True. Where there are no "
        "colors, as in a file, the number is written behind each token that would have one.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.run_dir is None:
            raise ConfigError("run_dir: not given. Write prefrl look RUN_DIR --worst 5.")
        if self.step is not None and self.all_steps:
            raise ConfigError(f"step={self.step} and all_steps=True: remove one of them")
        if self.worst is None:
            self.worst = 0 if self.best else _DEFAULT_WORST


@command(
    "look",
    LookArguments,
    about="Show the worst and the best completions of a run.\n\nExamples:\n  prefrl look runs/a --worst 5\n"
    "  prefrl look runs/a --all_steps --best 3 --reward numeric_reward\n  prefrl look runs/a --tokens ratio",
    positional=("run_dir",),
)
def look(options: LookArguments) -> int:
    """Print completions."""
    folder = Path(str(options.run_dir))
    sessions = sorted(folder.glob("session-*.parquet"))
    if sessions:
        where, names, files = f"{len(sessions):,} sessions", [], {}
        rows = _conversations(sessions, options)
    else:
        files = _files(folder)
        chosen = _chosen(files, options)
        where = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]} to {chosen[-1]}"
        rows = [row for step in chosen for row in _last_turns(files[step], options.reward)]
        names = _reward_names(files[chosen[0]])
    scored = sorted(
        (row for row in rows if _is_number(row[options.reward])), key=lambda row: float(row[options.reward])
    )
    console = Console(highlight=False)
    console.print(_heading(where, rows, scored, options.reward))
    for title, some in (("worst", scored[: options.worst]), ("best", scored[len(scored) - options.best :][::-1])):
        for number, row in enumerate(some, start=1):
            tokens = None if options.tokens is None else _colored(folder, files, row, options.tokens, console)
            console.print(_panel(row, f"{title} {number}", names, tokens))
    return 0


# Backgrounds of levels away from 0, below it and above: blue and orange, which most people can tell apart.
_BELOW = ("on #16324f", "on #1f5a94", "on #3b82c4 #000000", "on #9cc9f5 #000000")
_ABOVE = ("on #4f2a12", "on #94501f", "on #d97a2b #000000", "on #ffc08a #000000")


def _colored(
    folder: Path, files: Mapping[int, list[Path]], row: Mapping[str, Any], key: str, console: Console
) -> Text:
    """The tokens of a completion by a quantity, after what its colors mean.

    Raises:
        DataError: The run has no tokenizer.
    """
    run, first, place = folder.parent if folder.name == "completions" else folder, row["step"], _place(row)
    if text_of_tokens(run) is None:
        raise DataError(f"tokens={key!r}: {run} has no tokenizer.json, neither in it nor in its last checkpoint.")
    end = min((step - 1 for step in files if step - 1 > first), default=math.inf)
    found = turns_of(run, files[first + 1], [place], first=first, end=end)
    scale = next(scale for scale in found.scales if scale.key == key)
    shown = Text(f"{scale.name}, the {scale.about}\n", style="dim")
    if scale.missing:
        return shown.append(f"{scale.missing}\n")
    for level, words in scale.legend():
        shown.append(f" {words} ", style=_style(level)).append(" ")
    for turn in found.turns[place]:
        shown.append("\n")
        for token in turn.tokens:
            value = token.values.get(key)
            level = 0 if value is None else scale.level(value)
            shown.append(token.text, style=_style(level))
            if level and console.color_system is None:
                shown.append(f"[{value:.3g}]")
    return shown.append("\n")


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["group"], row["rollout"]


def _style(level: int) -> str:
    return "" if level == 0 else (_ABOVE if level > 0 else _BELOW)[abs(level) - 1]


def _files(run: Path) -> dict[int, list[Path]]:
    """The files by the first step that learned from them, as logs count it; several processes wrote one each."""
    folder = run / "completions" if (run / "completions").is_dir() else run
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("completions_*.parquet")):
        number = path.stem.removeprefix("completions_").split("_")[0]
        if number.isdecimal():
            files.setdefault(int(number) + 1, []).append(path)  # the number is that of the steps before it
    if not files:
        raise DataError(
            f"run_dir={str(run)!r}: has no completions. Runs that sample (GRPO, RLOO, PPO, ...) write them to the "
            "folder completions of their output_dir; journal_keep=0 switches that off."
        )
    return files


def _conversations(paths: Sequence[Path], options: LookArguments) -> list[dict[str, Any]]:
    """The rows of the sessions of `prefrl gateway`, with texts for their messages."""
    from prefrl.data.formats import read_messages  # imports datasets
    from prefrl.rollout.summary import as_text

    check_unset(
        options, "step", "all_steps", "tokens", because="run_dir has sessions of prefrl gateway", remedy="Remove it."
    )
    if options.reward != "reward":
        raise ConfigError(f"reward={options.reward!r}: sessions have no other column of rewards than 'reward'")
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    return [{**row, **{name: as_text(read_messages(row, name)) for name in ("prompt", "completion")}} for row in rows]


def _chosen(files: Mapping[int, Any], options: LookArguments) -> list[int]:
    steps = sorted(files)
    if options.all_steps:
        return steps
    if options.step is None:
        return steps[-1:]
    before = [step for step in steps if step <= options.step]
    if not before:
        raise ConfigError(
            f"step={options.step}: the run kept steps {steps[0]} to {steps[-1]}. Raise journal_keep to keep more."
        )
    return before[-1:]


def _last_turns(paths: Iterable[Path], reward: str) -> list[dict[str, Any]]:
    """The rows of the files; of an episode, that of its last turn, which has the whole conversation."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        table = pq.read_table(path)
        if reward not in table.column_names:
            raise ConfigError(f"reward={reward!r}: is not a column. {nearest(reward, table.column_names)}")
        ids = ("prompt_ids", "completion_ids", "logprobs", "trainable", "policy_versions", "images")
        kept = [name for name in table.column_names if name not in ids]
        lengths = [len(ids or ()) for ids in table["completion_ids"].to_pylist()]
        for row, length in zip(table.select(kept).to_pylist(), lengths, strict=True):
            key = (path, row["group"], row["rollout"])
            tokens = length + (rows[key]["tokens"] if key in rows else 0)
            rows[key] = {**row, "tokens": tokens}
    return list(rows.values())


def _reward_names(paths: Sequence[Path]) -> list[str]:
    about = json.loads(pq.read_schema(paths[0]).metadata[_METADATA])
    return list(dict.fromkeys(name for part in about["parts"] for name in part["rewards"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _heading(where: str, rows: Sequence[Any], scored: Sequence[Mapping[str, Any]], reward: str) -> str:
    values = [float(row[reward]) for row in scored]
    told = f"{where}: {len(rows):,} completions"
    if not values:
        return f"{told}, none with a number in {reward}"
    return f"{told}, {reward} {min(values):.4g} to {max(values):.4g}, mean {math.fsum(values) / len(values):.4g}"


def _panel(row: Mapping[str, Any], title: str, rewards: Sequence[str], tokens: Text | None) -> Panel:
    numbers = [f"{name} {row[name]:.4g}" for name in ("reward", *rewards, "advantage") if _is_number(row.get(name))]
    about = f"{row['tokens']} tokens, {row['finish_reason']}"
    shown = Text()
    for name in ("prompt", "completion"):
        text = printable(str(row[name]), max_characters=_SHOWN_CHARACTERS, max_lines=_SHOWN_LINES)
        shown.append(f"{name}\n", style="dim").append(f"{text}\n")
    if tokens is not None:
        shown.append("tokens\n", style="dim").append(tokens)
    shown.append(" | ".join([*numbers, about]), style="bold")
    place = f"session {row['session']}" if "session" in row else f"step {row['step'] + 1}, prompt {row['group']}"
    return Panel(shown, title=printable(f"{title}, {place}"), title_align="left")
