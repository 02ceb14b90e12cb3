"""What runs in a step, and on the way from the command line to a trainer: named functions of prefrl, with their files.

    python -m tests.walks

prints one JSON object: for each walk the functions, as pairs of a file and a name.

    python -m tests.walks grpo

prints the third step of a run as a tree: each function below the one that calls it, in the order of the first calls,
with the number of its lines. Dots stand for calls that are shown further up.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from tests.launch import ROOT

LIBRARY = f"{ROOT / 'prefrl'}{os.sep}"
OPTIMIZED = 1  # what only the code of a function is, not that of a module or of a class

# Runs without options: one that is on is a further file to read.
RUN: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
GENERATION = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
STEPS: dict[str, dict[str, Any]] = {
    "grpo": GENERATION | {"beta": 0.0},
    "dpo": {"per_device_train_batch_size": 4},
    "sft": {"per_device_train_batch_size": 4},
}
ROWS = [{"prompt": "ab c" * (i % 3 + 1), "chosen": "yes" * (i % 2 + 1), "rejected": "no"} for i in range(16)]
COLUMNS = {"grpo": ["prompt"], "dpo": ["prompt", "chosen", "rejected"], "sft": ["chosen"]}
REWARD = """\
def reward(completions, **_):
    return [float(len(completion)) for completion in completions]
"""


Calls = dict[CodeType, "Calls"]  # functions in the order of their first calls, with what they call


class Walk:
    """Notes the functions of prefrl that are called while it is on; a lambda or a generator is part of a function."""

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on = is_on
        self.functions: set[tuple[str, str]] = set()
        self.calls: Calls = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Python's hook."""
        code = frame.f_code
        if event != "call" or not self.is_on or not _is_function(code):
            return
        self.functions.add((code.co_filename.removeprefix(LIBRARY), code.co_qualname))
        below, callers = self.calls, [caller.f_code for caller, _ in walk_stack(frame)]
        for code in reversed(callers):
            if _is_function(code):
                below = below.setdefault(code, {})

    def through(self, work: Callable[[], object]) -> list[tuple[str, str]]:
        """The functions that some work calls, in all threads that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        return sorted(self.functions)


def _is_function(code: CodeType) -> bool:
    is_ours = code.co_filename.startswith(LIBRARY)
    return is_ours and bool(code.co_flags & OPTIMIZED) and "<" not in code.co_name


def tree(calls: Calls) -> list[str]:
    """The lines of a tree of calls, which does not repeat that one function calls another."""
    shown: set[tuple[CodeType | None, CodeType]] = set()

    def lines(caller: CodeType | None, calls: Calls, depth: int) -> Iterator[str]:
        for code, below in calls.items():
            is_new = (caller, code) not in shown
            shown.add((caller, code))
            inner = list(lines(code, below, depth + 1))
            if is_new or inner:
                length = max(line for _, _, line in code.co_lines() if line) - code.co_firstlineno + 1
                place = f"{code.co_filename.removeprefix(LIBRARY)}:{code.co_firstlineno}"
                again = " ..." if below and not inner else ""
                yield f"{'  ' * depth}{code.co_qualname} ({place}, {length} lines){again}"
                yield from inner

    return list(lines(None, calls, 0))


class WalkToTrainer(Walk):
    """Ends where the first trainer is made."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Python's hook."""
        if self.is_on and frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Trainer):
            self.is_on = False
        super().__call__(frame, event, argument)


class ThirdStep(TrainerCallback):
    """Switches a walk on from the end of the second step to that of the third, which has nothing to set up."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.walk.is_on = state.global_step == 2


def to_trainer(folder: Path) -> list[tuple[str, str]]:
    """From `prefrl grpo --config run.json` to the trainer."""
    options = {"dataset_name": f"{folder}/rows.jsonl", "reward_funcs": [f"{folder}/rewards.py:reward"]}
    options |= {"model_name_or_path": f"{folder}/model", "output_dir": f"{folder}/run", "max_steps": 1}
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in ROWS))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "run.yaml").write_text(json.dumps(options | RUN | GENERATION))

    def command() -> None:
        from prefrl.scripts.main import main  # here: what its modules call when they are imported is on the way

        assert main(["grpo", "--config", f"{folder}/run.yaml"]) == 0

    return WalkToTrainer(is_on=True).through(command)


def of_step(algorithm: str, folder: Path) -> Walk:
    """The third optimizer step of a run, with its logs and callbacks."""
    from prefrl.registry import REGISTRY
    from tests.assets import tiny_model, tiny_tokenizer

    row, walk = REGISTRY[algorithm], Walk()
    options = {**RUN, **STEPS[algorithm], "output_dir": f"{folder}/{algorithm}", "max_steps": 4, "logging_steps": 1}
    rows = Dataset.from_list(ROWS).select_columns(COLUMNS[algorithm])
    rewards = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    trainer = row.load_trainer()(
        tiny_model(),
        args=row.load_config()(**options),
        train_dataset=rows if algorithm != "sft" else rows.rename_column("chosen", "text"),
        processing_class=tiny_tokenizer(),
        callbacks=[ThirdStep(walk)],
        **(rewards if algorithm == "grpo" else {}),
    )
    walk.through(trainer.train)
    return walk


def save_model(folder: Path) -> None:
    """A model for the command, made in a fork: nothing of prefrl may be imported before the command."""
    if (child := os.fork()) == 0:
        from tests.assets import tiny_model, tiny_tokenizer

        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def walks() -> dict[str, list[tuple[str, str]]]:
    """All of them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        found = {"command": to_trainer(folder)}  # first
        return found | {algorithm: sorted(of_step(algorithm, folder).functions) for algorithm in STEPS}


if __name__ == "__main__":
    sys.stdout, terminal = sys.stderr, sys.stdout
    if sys.argv[1:]:
        with tempfile.TemporaryDirectory() as name:
            terminal.write("\n".join(tree(of_step(sys.argv[1], Path(name)).calls)) + "\n")
    else:
        terminal.write(json.dumps(walks()) + "\n")
