"""The history of a run: what its logs say, in the words of the views, as lines, in a file, and when it has ended."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PrinterCallback, TrainerCallback

from prefrl.errors import printable, reason_of
from prefrl.options.online import OnlineOptions
from prefrl.registry import REGISTRY
from prefrl.rollout.summary import as_text
from prefrl.run.checkpoints import checkpoint_name
from prefrl.run.folder import METRICS_FILE, append_metrics
from prefrl.types import Rollout

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger(__name__)

# What is shown of a log, in this order: its name in the log and its title. Of two with one title, the first is shown.
_TITLES = {
    "reward": "reward",
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "mean_token_accuracy": "accuracy",
    "margin": "margin",
    "rewards/margins": "margin",
    "completions/mean_length": "length",
    "kl": "KL",
    "teacher_kl": "teacher KL",
    "entropy": "entropy",
}
_EVALUATION = "eval_"
_WIDTH = 9  # of a number with four digits, such as 1.234e-05


@dataclass(frozen=True, slots=True)
class Row:
    """One log.

    Args:
        step: Optimizer steps that were done.
        values: By title, in the order in which they are shown.
        rewards: Mean of each reward function, if there are several.
        phases: Seconds of a step by phase.
        step_s: Seconds of a step; None: not known.
    """

    step: int
    values: dict[str, float]
    rewards: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None

    @classmethod
    def of(cls, step: int, logs: Mapping[str, Any]) -> Row:
        """The row of a log of training steps."""
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        names = [name for name in _TITLES if name in numbers]
        if "reward" in names and "loss" in names:
            names.remove("loss")  # of a policy gradient: it says nothing about progress, and is often exactly 0
        values: dict[str, float] = {}
        for name in names:
            values.setdefault(_TITLES[name], numbers[name])
        parts = [name for name in numbers if name.startswith("rewards/") and name.endswith("/mean")]
        rewards = {name.removeprefix("rewards/").removesuffix("/mean"): numbers[name] for name in parts}
        titles = {*_TITLES.values()}  # a reward that has the title of a metric, such as `length`, is told from it
        return cls(
            step,
            values,
            {f"{n} reward" if n in titles else n: mean for n, mean in rewards.items()} if len(rewards) > 1 else {},
            {n.removeprefix("time/").removesuffix("_s"): s for n, s in numbers.items() if n.startswith("time/")},
            numbers.get("step_time"),
        )

    @classmethod
    def of_evaluation(cls, step: int, logs: Mapping[str, Any]) -> Row:
        """The row of an evaluation's log; with several datasets, titles begin with their names."""
        found: list[tuple[str, str, float]] = []  # name without its dataset, that dataset, value
        for name, value in logs.items():
            plain = name.removeprefix(_EVALUATION)
            known = max((key for key in _TITLES if plain == key or plain.endswith(f"_{key}")), key=len, default=None)
            if known is not None and name != plain and isinstance(value, int | float):
                found.append((known, plain.removesuffix(known).replace("_", " "), float(value)))
        values: dict[str, float] = {}
        for known, dataset, seen in sorted(found, key=lambda entry: [*_TITLES].index(entry[0])):
            values.setdefault(dataset + _TITLES[known], seen)
        for title in [title for title in values if title.endswith("reward")]:
            values.pop(f"{title.removesuffix('reward')}loss", None)  # as in training
        return cls(step, values)


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its prompt and total reward."""

    prompt: str
    completion: str
    reward: float


@dataclass
class History:
    """The rows of a run so far, and what else its views show.

    Args:
        facts: What to say about the run before its first step, by name.
        phase: What the run is doing now; None: nothing that has a name.
        clock: Returns seconds.
    """

    facts: Callable[[], Mapping[str, str]] = dict
    phase: Callable[[], str | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    rows: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    best: Sample | None = None
    worst: Sample | None = None
    total: int = 0  # optimizer steps of the run
    titles: dict[str, None] = field(default_factory=dict)  # those of all rows so far, in order
    first_step: int = 0  # after which this training goes on
    shows_ending: bool = True  # whether `train` ends with the panel; a command shows it after it has saved the model
    _start: float = 0.0

    def begin(self, *, step: int, total: int) -> None:
        """Start a run, at a step that is above 0 if it was resumed."""
        self.rows, self.evaluations, self.titles, self.best, self.worst = [], [], {}, None, None
        self.total, self.first_step, self._start = total, step, self.clock()

    def add(self, step: int, logs: Mapping[str, Any]) -> Row | None:
        """Add a log. Returns its row; None: the log is neither of training steps nor of an evaluation."""
        if "loss" in logs:
            self.rows.append(Row.of(step, logs))
            self.titles |= dict.fromkeys(self.rows[-1].values)
            return self.rows[-1]
        if any(name.startswith(_EVALUATION) for name in logs):
            self.evaluations.append(Row.of_evaluation(step, logs))
            return self.evaluations[-1]
        return None

    def show_samples(self, rollouts: Iterable[Rollout]) -> None:
        """Replace the best and the worst completion by those of a newer generation batch."""
        scored = [rollout for rollout in rollouts if rollout.reward == rollout.reward]
        if scored:
            best, worst = max(scored, key=lambda r: r.reward), min(scored, key=lambda r: r.reward)
            self.best, self.worst = (Sample(as_text(r.prompt), as_text(r.text), r.reward) for r in (best, worst))

    def series(self, title: str) -> list[float]:
        """The values of a title or of a reward function, oldest first; rows without it are left out."""
        found = (row.values.get(title, row.rewards.get(title)) for row in self.rows)
        return [value for value in found if value is not None]

    @property
    def seconds(self) -> float:
        """Seconds since the run started."""
        return self.clock() - self._start

    def seconds_left(self, step: int) -> float | None:
        """Seconds until the end of the run, at its mean speed so far; None: not known yet."""
        done = step - self.first_step
        return (self.clock() - self._start) / done * (self.total - step) if done > 0 else None


def number(value: float | None) -> str:
    """A number for a table: four digits; `-` if there is none."""
    return "-" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds as `42 s`, `3 min 5 s` or `2 h 10 min`; `-` if they are not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def sparkline(values: Sequence[float], *, width: int = 32) -> str:
    """Block characters whose heights are the last values, between the lowest and the highest of them."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(chr(0x2581 + (round(7 * (value - low) / span) if span else 0)) for value in shown)


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


class LineView(PrinterCallback):
    """Prints the latest row of a history as a line, in place of the dictionary that HuggingFace prints.

    Args:
        history: What is shown.
        console: Where to write; None: standard output, as it is then.
    """

    def __init__(self, history: History, console: Console | None = None) -> None:
        super().__init__()
        self.history = history
        self._console = console

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if state.is_world_process_zero:
            show_banner(self._console or Console(), self.history.facts())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Shows at once how long the first step took, if its metrics are logged with those of later steps."""
        is_first = state.global_step == self.history.first_step + 1
        if is_first and state.is_world_process_zero and not (control.should_log or control.should_training_stop):
            row = Row(state.global_step, {}, step_s=self.history.seconds)
            (self._console or Console()).print(Text(line(self.history, row)), soft_wrap=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """HuggingFace's hook."""
        if not state.is_world_process_zero or logs is None:
            return
        rows = self.history.rows if "loss" in logs else self.history.evaluations
        if rows and ("loss" in logs or any(name.startswith("eval_") for name in logs)):
            text = line(self.history, rows[-1])
            (self._console or Console()).print(Text(printable(text)), soft_wrap=True)


def line(history: History, row: Row) -> str:
    """A row as a line: the step, the values with their names and, for training steps, their time and the time left."""
    start = f"step {row.step:>{len(str(history.total))}}/{history.total}"
    if row in history.evaluations:
        return "  ".join([start, "evaluation", *(f"{title} {number(value)}" for title, value in row.values.items())])
    values = {title: row.values.get(title) for title in history.titles} | row.rewards
    cells = [f"{title} {number(value):>{_WIDTH}}" for title, value in values.items()]
    left = f"{duration(history.seconds_left(row.step))} left"
    return "  ".join([start, *cells, f"{number(row.step_s):>6} s/step", left])


class Recorder(TrainerCallback):
    """Adds each log to a history and, on the main process, to the file of the run.

    Args:
        history: What the views show.
        run: Returns the id of the run.
    """

    def __init__(self, history: History, run: Callable[[], str]) -> None:
        self.history = history
        self._run = run
        self._is_writing = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self.history.begin(step=state.global_step, total=state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """HuggingFace's hook."""
        if logs is None or not state.is_world_process_zero:
            return
        self.history.add(state.global_step, logs)
        if not self._is_writing:
            return
        about = {"run": self._run(), "step": state.global_step, "time": round(time.time(), 3), "epoch": state.epoch}
        try:
            append_metrics(Path(args.output_dir), about | logs)
        except OSError as error:
            self._is_writing = False
            _log.warning("%s cannot be written, so it ends here: %s", METRICS_FILE, reason_of(error))


# What a run is judged by: metrics, and whether more is better. The first one that was logged is shown, of each line.
_JUDGED = (
    (("eval_reward", True), ("eval_rewards/margins", True), ("eval_accuracy", True), ("eval_loss", False)),
    (("reward", True), ("rewards/margins", True), ("accuracy", True), ("loss", False)),
)
_PROMPT = "your prompt"
_WITHOUT_TEXT = ("reward",)  # algorithms whose models do not write


def show_ending(
    algorithm: str, state: TrainerState, folder: Path, commands: Callable[[str, str], list[str]], *, saved: bool
) -> None:
    """Print the panel about a training that has ended, and what to do next.

    Args:
        algorithm: Its name.
        state: HuggingFace's.
        folder: `output_dir`.
        commands: Returns the commands to go on with, see `next_commands`.
        saved: Whether the model is in the folder; if not, it is said how it gets there.
    """
    console = Console()
    where = {"model": str(folder) if saved else f"not saved yet; trainer.save_model() writes it to {folder}"}
    last = folder / checkpoint_name(state.global_step)
    if not saved and last.is_dir():
        where["checkpoint"] = str(last)
    steps = {"steps": state.global_step, "max_steps": state.max_steps}
    console.print(ending(algorithm, state.log_history, where=where, **steps))
    console.print("Next steps:")
    first = [] if saved else ["trainer.save_model()"]
    for command in first + commands(algorithm, str(folder)):
        console.print(Text(f"  {command}"), soft_wrap=True)  # in one piece, so that it can be copied


def ending(
    algorithm: str, log_history: Sequence[dict[str, Any]], *, where: Mapping[str, str], steps: int, max_steps: int
) -> Panel:
    """The panel about a training that has ended.

    Args:
        algorithm: Its name.
        log_history: Of HuggingFace's state.
        where: Where the model is, by name of what it is saved as.
        steps: Optimizer steps that were done.
        max_steps: Those that were planned.
    """
    rows = Table.grid(padding=(0, 2))
    for name, place in where.items():
        rows.add_row(name, Text(place))
    seconds = next((entry["train_runtime"] for entry in reversed(log_history) if "train_runtime" in entry), None)
    took = "" if seconds is None else f" in {duration(seconds)}"
    rows.add_row(
        "steps", f"{steps:,}{took}" if steps >= max_steps else f"{steps:,} of {max_steps:,}{took}: ended early"
    )
    for candidates in _JUDGED:
        judged = next((pair for pair in candidates if any(pair[0] in entry for entry in log_history)), None)
        if judged is not None:
            rows.add_row(judged[0], _course(log_history, *judged))
    return Panel(rows, title=f"{algorithm}: done" if steps >= max_steps else algorithm, expand=False)


def _course(log_history: Sequence[dict[str, Any]], name: str, is_greater_better: bool) -> str:
    values = [(float(entry[name]), int(entry.get("step", 0))) for entry in log_history if name in entry]
    values = [pair for pair in values if pair[0] == pair[0]]
    if not values:
        return "-"
    choose = max if is_greater_better else min
    best, at = choose(values, key=lambda pair: pair[0])
    (first, _), (last, end) = values[0], values[-1]
    return f"first {first:.4g}, last {last:.4g} at step {end}, best {best:.4g} at step {at}"


def next_commands(
    algorithm: str,
    folder: str,
    *,
    is_chat: bool,
    dataset: str | None = None,
    rewards: Sequence[str] | None = None,
    environment: Mapping[str, str] | str | None = None,
) -> list[str]:
    """The commands to go on with.

    Args:
        algorithm: Its name.
        folder: Where the model is, or will be.
        dataset: The dataset that was trained on; None: a mixture, its columns were mapped, or it has no name.
        rewards: Rewards that a command can name; None: there are none.
        is_chat: Whether the model has a chat template.
        environment: The option of the command; None: the run has no environment that a command can name.
    """
    commands = []
    if algorithm not in _WITHOUT_TEXT:
        commands += (
            [["chat", folder], ["generate", folder, _PROMPT]] if is_chat else [["generate", folder, _PROMPT, "--raw"]]
        )
    if environment:
        which = environment if isinstance(environment, str) else json.dumps(environment)
        commands.append(["play", which, "--model", folder])
    elif rewards and dataset is not None:
        commands.append(["eval", folder, dataset, "--reward_funcs", *rewards])
    # Without the first condition, those that an earlier run has left in the folder would count.
    if issubclass(REGISTRY[algorithm].load_options(), OnlineOptions) and (Path(folder) / "completions").is_dir():
        commands.append(["look", folder, "--worst", "5"])
    if (Path(folder) / "adapter_config.json").is_file():
        commands.append(["merge", folder, f"{folder.rstrip('/')}-merged"])
    commands.append(["report", folder])
    lines = [shlex.join(["prefrl", *words]) for words in commands]
    # A file has no split for evaluation: its rows are those that were trained on.
    return [
        f"{line}  # or held-out prompts" if words[0] == "eval" and Path(words[2]).exists() else line
        for words, line in zip(commands, lines, strict=True)
    ]
