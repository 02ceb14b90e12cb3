"""Let the same things go wrong in TRL and in prefrl, and write down what each of them does.

    make bench-faults                         everything: about 4 minutes on 2 cores
    python -m benchmarks.faults "disk full"   the cases with these words

Each training runs in a process of its own, with a deadline. Both libraries get the same model, rows and options.
What is said about them was seen: how the process ended, and the weights, logs and warnings that it left. Results
are written to `results/faults.json`, and with `--write-docs` as a table into docs/survival.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import TrainerCallback

from benchmarks.report import replace_between_markers
from benchmarks.worker import LIBRARIES, Library, prepare_environment
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of, ragged_reward, weights_of

RESULTS = Path(__file__).parent / "results" / "faults.json"
DOCS = Path(__file__).parents[1] / "docs" / "survival.md"
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"

DEADLINE_S = 60.0
STEPS = 6
METRICS = ("reward", "loss", "grad_norm")
LONGEST = 140  # characters of a message in the table

OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": STEPS,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "model_init_kwargs": {"dtype": "float32"},
}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
OF_TASK: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 4, "max_completion_length": 12},
    "dpo": {},
    "sft": {},
}
OF_LIBRARY: dict[str, dict[str, Any]] = {"trl": {"gradient_checkpointing": False}, "prefrl": {}}

Rows = list[dict[str, Any]]
Meddle = Callable[[Any], None]  # gets the trainer before it trains


@dataclass
class Seen:
    """What one process did."""

    ended: str = ""  # other than by itself: "hangs (...)", "signal 9"
    exit_code: int = 0  # of a SystemExit
    phase: str = "in the config"
    error: str = ""  # type and message
    steps: int = 0
    weights: str = ""  # their hash at the end
    is_finite: bool = True
    has_changed: bool = True
    logged: dict[str, float] = field(default_factory=dict)  # the last log of a step
    messages: list[str] = field(default_factory=list)  # warnings and worse


# The process that trains.


@dataclass(frozen=True)
class Training:
    """One training, in the words that both libraries share."""

    library: Library
    task: str
    folder: Path
    model: Path
    rows: Dataset
    options: dict[str, Any]
    reward: Callable[..., Any]
    meddle: Meddle
    resume: bool | str

    def run(self, seen: Seen) -> None:
        """Train, and note what can be seen."""
        module, name = import_module(self.library), {"grpo": "GRPO", "dpo": "DPO", "sft": "SFT"}[self.task]
        options = OPTIONS | OF_TASK[self.task] | OF_LIBRARY[self.library] | self.options
        config = getattr(module, f"{name}Config")(output_dir=str(self.folder), **options)
        seen.phase = "in the constructor"
        arguments = {"reward_funcs": self.reward} if self.task == "grpo" else {}
        trainer = getattr(module, f"{name}Trainer")(
            model=str(self.model),
            args=config,
            train_dataset=self.rows,
            processing_class=tiny_tokenizer(),
            callbacks=[Watches(seen)],
            **arguments,
        )
        before = hash_of(trainer.model)
        self.meddle(trainer)
        seen.phase = "before step 1"
        try:
            trainer.train(resume_from_checkpoint=self.resume)
        finally:
            logs = [entry for entry in trainer.state.log_history if "loss" in entry]
            seen.logged = logs[-1] if logs else {}
        seen.steps = trainer.state.global_step
        seen.weights = hash_of(trainer.model)
        seen.has_changed = seen.weights != before
        seen.is_finite = all(bool(value.isfinite().all()) for value in weights_of(trainer.model).values())


class Watches(TrainerCallback):
    """Notes in which step an error is."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.seen.phase = f"in step {state.global_step + 1}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook. What follows the step, such as a checkpoint, is still its own."""
        self.seen.phase = f"after step {state.global_step}"


class Collects(logging.Handler):
    """Keeps what is logged as a warning or worse; Python's warnings, too."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages
        logging.captureWarnings(True)
        for name in (None, "transformers"):  # the latter keeps its records from the root
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Python's hook."""
        text = record.getMessage()
        # A warning is "file:line: Category: text" and a line of code.
        self.messages.append(re.sub(r"^\S+:\d+: (?=\w*Warning: )", "", text).split("\n  ")[0])


def hash_of(model: Any) -> str:
    """SHA-256 of all weights."""
    digest = hashlib.sha256()
    for _, value in sorted(weights_of(model).items()):
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def serve(training: Training, connection: Connection) -> None:
    """Body of the process."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(training.folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    seen = Seen()
    Collects(seen.messages)
    try:
        training.run(seen)
    except SystemExit as error:
        seen.exit_code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        seen.error = f"{type(error).__name__}: {error}"
    connection.send(seen)


# The side of a library.


class Side:
    """One library in one case: its folder, and the warnings that it also gives where nothing is wrong."""

    def __init__(self, library: Library, folder: Path, usual: set[str]) -> None:
        self.library = library
        self.folder = folder
        self.usual = usual

    def train(
        self,
        task: str = "grpo",
        *,
        run: str = "run",
        rows: Rows | Dataset | None = None,
        architecture: str = "qwen2",
        reward: Callable[..., Any] = ragged_reward,
        meddle: Meddle = lambda trainer: None,
        resume: bool | str = False,
        **options: Any,
    ) -> Seen:
        """Train in a process of its own and wait for its end, at most `DEADLINE_S`."""
        folder, model = self.folder / run, self.folder / architecture
        folder.mkdir(exist_ok=True)
        if not model.exists():
            tiny_model(architecture).save_pretrained(model)
        if not isinstance(rows, Dataset):
            rows = dataset_of(task) if rows is None else Dataset.from_list(rows)
        if isinstance(resume, str):
            resume = str(folder / resume)
        training = Training(self.library, task, folder, model, rows, options, reward, meddle, resume)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=serve, args=(training, sender))
        process.start()
        sender.close()
        ended = ""
        try:
            if receiver.poll(DEADLINE_S):
                return self.cleaned(receiver.recv())
            ended = f"hangs (stopped after {DEADLINE_S:.0f} s)"
        except EOFError:
            process.join()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        code = process.exitcode or 0
        return Seen(ended=ended or (f"ended by signal {-code}" if code < 0 else f"exit code {code}"))

    def cleaned(self, seen: Seen) -> Seen:
        """Without what is usual, and without the names of this machine's folders."""
        seen.error = self.short(seen.error)
        seen.messages = [text for text in map(self.short, seen.messages) if text not in self.usual]
        return seen

    def short(self, text: str) -> str:
        """A message in a line."""
        text = " ".join(text.replace(str(self.folder) + "/", "").replace("`", "'").split())
        text = re.sub(r"\S*/(?=[^/\s]+\.py\b)", "", text)
        return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " ..."

    def checkpoints(self, run: str = "run") -> str:
        """The names of those in the folder."""
        names = sorted(path.name for path in (self.folder / run).glob("checkpoint-*"))
        return ", ".join(names) or "no checkpoint"


# What is said about it.


def verdict(seen: Seen) -> str:
    """How one training went."""
    if seen.ended:
        return seen.ended
    if seen.error:
        return f"error {seen.phase}: `{seen.error}`"
    if seen.exit_code:
        return f"exit code {seen.exit_code}"
    return f"{result(seen)}; {said(seen)}"


def result(seen: Seen) -> str:
    """What a training that ended by itself has done."""
    if seen.steps == 0:
        return "ends at step 0"
    numbers = ", ".join(f"{name} {_short(seen.logged[name])}" for name in METRICS if name in seen.logged)
    weights = "weights as before" if not seen.has_changed else "weights are not finite" if not seen.is_finite else ""
    return ", ".join(filter(None, [f"trains {seen.steps} steps", weights, f"logs {numbers}"]))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def said(seen: Seen) -> str:
    """The first warning."""
    return f"warns: `{seen.messages[0]}`" if seen.messages else "nothing said"


def compared(whole: Seen, resumed: Seen) -> str:
    """A resumed training beside the undisturbed one."""
    if whole.ended or whole.error:
        return f"the undisturbed run: {verdict(whole)}"
    if not resumed.weights:
        return verdict(resumed)
    if resumed.weights != whole.weights:
        return f"other weights; {said(resumed)}"
    return f"exact; {said(resumed)}" if resumed.messages else "exact"


# Cases: each gets a side, and returns what was seen.


Case = Callable[[Side], str]


def plain(task: str = "grpo", *, own: dict[str, Any] | None = None, **arguments: Any) -> Case:
    """One training; `own` are options that only prefrl has."""

    def case(side: Side) -> str:
        return verdict(side.train(task, **arguments, **((own or {}) if side.library == "prefrl" else {})))

    return case


def resumed(task: str, saved_at: int, **options: Any) -> Case:
    """A training of 8 steps, and the same from one of its checkpoints on."""

    def case(side: Side) -> str:
        options_ = {"max_steps": 8, "save_strategy": "steps", "save_steps": saved_at, **options}
        whole = side.train(task, **options_)
        return compared(whole, side.train(task, **options_, resume=f"checkpoint-{saved_at}"))

    return case


def killed_in_step(side: Side) -> str:
    """In the fourth step, one step after a checkpoint."""
    whole = side.train(run="whole", **SAVING)
    killed = AtStep(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    side.train(meddle=lambda trainer: trainer.add_callback(killed), **SAVING)
    return compared(whole, side.train(resume=True, **SAVING))


def killed_in_save(side: Side) -> str:
    """At three places of the second checkpoint."""
    whole = side.train("sft", run="whole", **SAVING)
    seen = []
    places = ("_save_optimizer_and_scheduler", False), ("_save_rng_state", False), ("_save_rng_state", True)
    for number, place in enumerate(places):
        run = f"killed-{number}"
        side.train("sft", run=run, meddle=partial(dies_around, *place), **SAVING)
        seen.append(compared(whole, side.train("sft", run=run, resume=True, **SAVING)))
    exact = sum(text.startswith("exact") for text in seen)
    others = [text for text in seen if not text.startswith("exact")]
    return f"{exact} of {len(seen)} exact" + (f"; otherwise {others[0]}" if others else "")


def dies_around(name: str, is_after: bool, trainer: Any) -> None:
    """Kill the process before or after a method is called for checkpoint-4."""
    method = getattr(trainer, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 4 and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        returned = method(*args, **kwargs)
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return returned

    setattr(trainer, name, dying)


def without(name: str) -> Case:
    """A file of the last checkpoint is gone."""

    def case(side: Side) -> str:
        whole = side.train(**SAVING)
        shutil.rmtree(side.folder / "run" / "checkpoint-6")
        (side.folder / "run" / "checkpoint-4" / name).unlink()
        return compared(whole, side.train(resume=True, **SAVING))

    return case


class AtStep(TrainerCallback):
    """Does something at the beginning of a step."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.number, self.act = number, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        if state.global_step == self.number - 1:
            self.act()


def disk_full(side: Side) -> str:
    """No file may grow beyond 64 KiB, from the fourth step on."""
    whole = side.train("sft", run="whole", **SAVING)
    full = AtStep(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)))
    seen = side.train("sft", meddle=lambda trainer: trainer.add_callback(full), **SAVING)
    return f"{verdict(seen)}; started again: {compared(whole, side.train('sft', resume=True, **SAVING))}"


def terminated(side: Side) -> str:
    """SIGTERM in the fourth step."""
    whole = side.train("sft", run="whole")
    term = AtStep(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    seen = side.train("sft", meddle=lambda trainer: trainer.add_callback(term))
    return f"{verdict(seen)}, {side.checkpoints()}; started again: {compared(whole, side.train('sft', resume=True))}"


# Rewards.


def returns(value: Callable[[list[str]], Any]) -> Callable[..., Any]:
    """A reward that returns some function of the completions."""

    def reward(completions: list[str], **_: Any) -> Any:
        return value(completions)

    return reward


def raising(completions: list[str], **columns: Any) -> list[float]:
    """A reward that reads a column that is not there."""
    return [float(answer in text) for text, answer in zip(completions, columns["answer"], strict=True)]


def needing(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """A reward that names a column that is not there."""
    return [float(a in text) for text, a in zip(completions, answer, strict=True)]


def one(value: float) -> Callable[..., Any]:
    """A reward that returns a value for the first completion, and honest ones for the others."""
    return returns(lambda completions: [value, *ragged_reward(completions)[1:]])


def dataset(task: str, num_rows: int = 24, **columns: Any) -> Rows:
    """Rows of the task with other values in some columns; `...`: without the column."""
    rows = [{**row, **columns} for row in dataset_of(task, num_rows)]
    return [{name: value for name, value in row.items() if value is not ...} for row in rows]


def first(task: str, num_rows: int = 24, **columns: Any) -> Rows:
    """Rows of the task with other values in the first of them."""
    head, *tail = dataset_of(task, num_rows)
    return [{**head, **columns}, *tail]


TEXTS = [{"text": f"{number} and {number}"} for number in range(24)]
LONG = "a long prompt " * 5

CASES: dict[str, Case] = {
    "GRPO, resumed between two generation batches (`steps_per_generation=4`, saved at 4)": resumed(
        "grpo", 4, steps_per_generation=4
    ),
    "GRPO, resumed inside a generation batch (`steps_per_generation=4`, saved at 6)": resumed(
        "grpo", 6, steps_per_generation=4
    ),
    "GRPO, resumed inside a generation batch (`num_iterations=2`, `steps_per_generation=2`, saved at 6)": resumed(
        "grpo", 6, steps_per_generation=2, num_iterations=2
    ),
    "GRPO with `sync_ref_model`, resumed": resumed("grpo", 4, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2),
    "DPO, resumed": resumed("dpo", 4),
    "DPO with `sync_ref_model`, resumed": resumed("dpo", 4, sync_ref_model=True, ref_model_sync_steps=2),
    "GRPO, `kill -9` in a step, then `resume_from_checkpoint=True`": killed_in_step,
    "`kill -9` at 3 moments of a save, then `resume_from_checkpoint=True`": killed_in_save,
    **{
        f"`{name}` removed from the last checkpoint, then `resume_from_checkpoint=True`": without(name)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    },
    "the disk fills up during a save": disk_full,
    "SIGTERM in a step": terminated,
    "reward raises `KeyError`": plain(reward=raising),
    "reward needs a column that the dataset does not have": plain(reward=needing),
    "reward hangs (prefrl: `reward_timeout=5`, 600 by default)": plain(
        reward=returns(lambda _: time.sleep(1e6)), own={"reward_timeout": 5.0}
    ),
    "reward returns `None`": plain(reward=returns(lambda _: None)),
    "reward returns a number instead of a list": plain(reward=returns(lambda _: 1.0)),
    "reward returns strings": plain(reward=returns(lambda texts: ["good"] * len(texts))),
    "reward returns nested lists": plain(reward=returns(lambda texts: [[1.0, 2.0]] * len(texts))),
    "reward returns one value too few": plain(reward=returns(lambda texts: ragged_reward(texts)[1:])),
    "reward returns `None` for all completions": plain(reward=returns(lambda texts: [None] * len(texts))),
    "reward returns NaN for one completion": plain(reward=one(math.nan)),
    "reward returns infinity for one completion": plain(reward=one(math.inf)),
    "`num_generations=3` with 8 completions in a step": plain(num_generations=3),
    "GPT-2 with 512 positions, GRPO prompts of 600 tokens": plain(
        architecture="gpt2", rows=dataset("grpo", prompt="a" * 600), own={"max_prompt_length": None}
    ),
    "GPT-2 with 512 positions, SFT texts of 600 tokens": plain(
        "sft", architecture="gpt2", rows=[{"text": "a" * 600}] * 24
    ),
    **{f"{task.upper()}, empty dataset": plain(task, rows=dataset_of(task).select([])) for task in OF_TASK},
    "GRPO, 1 prompt where a step needs 2": plain(rows=dataset_of("grpo", 1)),
    "GRPO, no column `prompt`": plain(rows=[{"question": row["text"]} for row in TEXTS]),
    "DPO, no column `rejected`": plain("dpo", rows=dataset("dpo", rejected=...)),
    "SFT, no column that it reads": plain("sft", rows=[{"txt": row["text"]} for row in TEXTS]),
    "DPO, `chosen` is None in a row": plain("dpo", rows=first("dpo", chosen=None)),
    "SFT, `text` is None in a row": plain("sft", rows=[{"text": None}, *TEXTS]),
    "GRPO, a prompt is empty": plain(rows=first("grpo", 2, prompt="")),
    "SFT, all texts are empty": plain("sft", rows=[{"text": ""}] * 24),
    "DPO, all prompts longer than `max_length`": plain("dpo", rows=dataset("dpo", prompt=LONG), max_length=32),
    "DPO, one prompt longer than `max_length`": plain("dpo", rows=first("dpo", prompt=LONG), max_length=64),
    **{f"{task.upper()}, `learning_rate=1e30`": plain(task, learning_rate=1e30) for task in OF_TASK},
    'GRPO, `loss_type="drgpo"`': plain(loss_type="drgpo"),
    'DPO, `loss_type="sigmoids"`': plain("dpo", loss_type="sigmoids"),
    "GRPO, `temperature=0`": plain(temperature=0.0),
}


def run_case(library: Library, case: Case, usual: set[str]) -> str:
    """What was seen of a library in a case."""
    with tempfile.TemporaryDirectory(prefix="prefrl-faults-") as folder:
        return case(Side(library, Path(folder), usual))


def usual_messages(library: Library) -> set[str]:
    """What a library warns of where nothing is wrong."""
    with tempfile.TemporaryDirectory(prefix="prefrl-faults-") as folder:
        side = Side(library, Path(folder), set())
        found: set[str] = set()
        for task in OF_TASK:
            for resume in (False, True):
                seen = side.train(task, run=task, resume=resume, **SAVING)
                assert not seen.error, seen.error
                found.update(seen.messages)
            shutil.rmtree(Path(folder) / task / "checkpoint-6")
        return found


@contextmanager
def environment() -> Iterator[None]:
    """Import both libraries, from which all processes are forked."""
    with tempfile.TemporaryDirectory(prefix="prefrl-faults-") as cache:
        prepare_environment(cache)
        disable_progress_bars()
        import_module("transformers.utils.logging").disable_progress_bar()
        for library in LIBRARIES:
            for task in OF_TASK:
                import_module(f"{library}.trainer.{task}_trainer")
        yield


def table(stored: dict[str, dict[str, str]]) -> str:
    """The stored results as Markdown."""
    lines = ["| what happens | TRL 1.16 | prefrl |", "| --- | --- | --- |"]
    for name, row in stored.items():
        lines.append(f"| {name} | " + " | ".join(row[library].replace("|", "\\|") for library in LIBRARIES) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the cases whose names hold one of these; nothing: all")
    parser.add_argument("--write-docs", action="store_true", help="put the stored results into docs/survival.md")
    arguments = parser.parse_args(argv)
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    chosen = [name for name in CASES if not arguments.words or any(word in name for word in arguments.words)]
    with environment():
        usual = {library: usual_messages(library) for library in LIBRARIES}
        for name in chosen:
            stored[name] = {library: run_case(library, CASES[name], usual[library]) for library in LIBRARIES}
            print(json.dumps({name: stored[name]}, indent=1), flush=True)
            stored = {name: stored[name] for name in CASES if name in stored}
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if arguments.write_docs:
        replace_between_markers(DOCS, f"\n{table(stored)}\n", begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
