"""Computes a step of an online run again, from its checkpoints and its journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME

from prefrl import distributed
from prefrl.errors import ConfigError, NonFiniteError
from prefrl.models.adapters import saved_config
from prefrl.registry import REGISTRY
from prefrl.rollout.collect import Collected
from prefrl.rollout.journal import Journal, read_entry
from prefrl.rollout.summary import print_table, title_of_step
from prefrl.run.checkpoints import find_last, step_of
from prefrl.run.records import Identity
from prefrl.scripts.replay.setup import config_of, never, processing_class_of, watches_evaluations
from prefrl.trainer.online.config import OnlineConfig

__all__ = ["Replay"]

# Options that choose on the way what a step learns from, and their values if they do not.
_CHOOSE_STEPS = {"increase_batch_size_on_plateau": 0, "on_spike": "ignore"}
# Metrics that say how fast a machine is.
_SPEED = ("time/", "perf/", "step_time", "server/", "epoch")


class _NoGenerator:
    """In the place of a generator: all completions are in the journal.

    Args:
        missing: What to say if one is asked for.
    """

    def __init__(self, missing: Callable[[], str]) -> None:
        self._missing = missing

    def sync(self, *_: Any, **__: Any) -> NoReturn:
        """Called before anything is generated."""
        raise ConfigError(self._missing())

    def invalidate(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Replay:
    """One step of an online run.

    Args:
        folder: The run's `output_dir`; nothing is written to it.
        identity: The run.
        step: Number of the step, counted from 1.
        scratch: A folder for what is written.
    """

    def __init__(self, folder: Path, identity: Identity, step: int, scratch: str) -> None:
        self.folder, self.identity, self.step = folder, identity, step
        self.algorithm = str(identity.decisive["algorithm"])
        self.checkpoint = self._checkpoint()
        self.config = config_of(self.checkpoint, self.algorithm, scratch)
        if not isinstance(self.config, OnlineConfig):
            raise ConfigError(
                f"run={str(folder)!r}: {self.algorithm} learns from a dataset, which the folder does not hold. Only "
                "its folder nan-step-N can be recomputed, if there is one."
            )
        _check_steps(folder, identity)
        if step > self.config.max_steps > 0:
            raise _beyond(step, self.config.max_steps)
        if not (self.checkpoint / OPTIMIZER_NAME).exists():
            if step != (next_step := 1 + (step_of(self.checkpoint.name) or 0)):
                raise ConfigError(
                    f"step={step}: {self.checkpoint} holds no optimizer state (from save_optimizer=False), so only "
                    f"step {next_step} can be recomputed from it."
                )
            self.config.checkpoint_kwargs = {"load_optimizer": False}
        self.first = (step - 1) // self.config.steps_of_a_generation * self.config.steps_of_a_generation

    def _checkpoint(self) -> Path:
        """The last checkpoint before the step."""
        found = find_last(self.folder, run=self.identity.run, before=self.step).folder
        if found is None:
            raise ConfigError(
                f"step={self.step}: {self.folder} has no complete checkpoint of an earlier step to start from. Choose "
                "a later step, or save more often: save_steps, save_total_limit."
            )
        processes = distributed.writer_of(found).num_processes
        if processes != 1:
            raise ConfigError(
                f"run={str(self.folder)!r}: {processes} processes trained it, but a replay uses a single process"
            )
        return found

    def run(self) -> None:
        """Train from the checkpoint to the step, and print it."""
        trainer = self._trainer()
        console = Console()
        try:
            trainer._train(str(self.checkpoint))
        except NonFiniteError as error:  # about the weights after the step
            console.print(escape(str(error)))
        finally:
            trainer.end()
        computed = _logged(trainer.state.log_history, self.step)
        if computed is None:
            raise _beyond(self.step, trainer.state.max_steps)
        path = trainer.journal.path_of(self.first)
        if path.exists():
            rollouts = Collected.concat(read_entry(path).parts).rollouts
            print_table(rollouts, title=title_of_step(self.first), console=console)
        console.print(self._table(computed))

    def _table(self, computed: Mapping[str, float]) -> Table:
        """The metrics of the step, beside those that the run logged."""
        history = self._history()
        logged = _logged(history, self.step)
        earlier = [entry["step"] for entry in history if "loss" in entry and entry["step"] < self.step]
        first = max(earlier, default=0) + 1
        of = "" if first == self.step else f" (mean of steps {first} to {self.step})"
        table = Table(title=f"Step {self.step}, from {self.checkpoint.name}")
        for column in ("metric", "computed again", f"logged then{of}"):
            table.add_column(column, justify="left" if column == "metric" else "right", overflow="fold")
        for name, value in computed.items():
            if name == "step" or name.startswith(_SPEED):
                continue
            then = "-" if logged is None or name not in logged else repr(logged[name])
            table.add_row(name, repr(value), then)
        return table

    def _history(self) -> list[dict[str, Any]]:
        """What the run logged until its last checkpoint."""
        last = find_last(self.folder, run=self.identity.run).folder
        assert last is not None  # there is one before the step
        state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
        return list(state["log_history"])

    def _trainer(self) -> Any:
        journal = Journal(self.folder / "completions", 0, 1, keep=0)
        rewards = [never(name) for name in self._rewards(journal)]
        self.config.forget_episodes()
        if self.config.reward_weights is not None:  # the rewards of environments have none of their own
            self.config.reward_weights += [1.0] * (len(rewards) - len(self.config.reward_weights))
        trainer = REGISTRY[self.algorithm].load_trainer()(
            args=self.config,
            reward_funcs=rewards,
            train_dataset=Dataset.from_list([{"prompt": "-"}] * self.identity.decisive["data"]["rows"]),
            processing_class=processing_class_of(self.checkpoint),
            **self._model(),
        )
        trainer.run_folder.run = self.identity.run
        trainer.journal, trainer.keeps_steps = journal, False
        trainer.generator = _NoGenerator(lambda: self._missing(trainer.state.global_step))
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_StopAfter(self.step))
        return trainer

    def _missing(self, step: int) -> str:
        number = step // self.config.steps_of_a_generation
        return (
            f"step={self.step}: generation batch {number}, which step {step + 1} learns from first, is not in the "
            f"journal {self.folder / 'completions'}. The run has not reached it, or it is damaged, or it was deleted: "
            "journal_keep."
        )

    def _rewards(self, journal: Any) -> list[str]:
        """The names of the rewards, in their order."""
        path = journal.path_of(self.first)
        if not path.exists():
            return list(self.identity.decisive["rewards"])
        return list(read_entry(path).parts[0].rollouts[0].rewards)

    def _model(self) -> dict[str, Any]:
        """The model to start with: the checkpoint, or where that is not enough, what the run began with."""
        adapter = self.checkpoint / "adapter_config.json"
        has_reference = getattr(self.config, "beta", 0.0) > 0 and not self.config.sync_ref_model
        if not adapter.exists() and not has_reference:
            return {"model": str(self.checkpoint)}
        if not self.identity.model:
            raise ConfigError(
                f"run={str(self.folder)!r}: the run uses the model that it started from as its reference, or trains "
                "an adapter on it, but that model was passed as an instance without a name. Only runs whose model is "
                "given by name or path can be recomputed."
            )
        if not adapter.exists():
            return {"model": self.identity.model}
        return {"model": self.identity.model, "peft_config": saved_config(self.checkpoint)}


def _logged(history: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """What was logged of training at a step."""
    return next((entry for entry in reversed(history) if entry["step"] == step and "loss" in entry), None)


def _check_steps(folder: Path, identity: Identity) -> None:
    """Refuse runs that decided on the way what a step learned from, or how much.

    Raises:
        ConfigError: Names the option.
    """
    options = dict(identity.decisive)
    chose = {name: options.get(name, unset) for name, unset in _CHOOSE_STEPS.items()}
    found = [f"{name}={value!r}" for name, value in chose.items() if value != _CHOOSE_STEPS[name]]
    if found or watches_evaluations(options):
        what = found[0] if found else "a learning rate that is reduced by a metric of evaluations (reduce_on_plateau)"
        raise ConfigError(
            f"run={str(folder)!r}: with {what}, the journal does not record what each step learned from, or at which "
            "rate. Only its folder nan-step-N can be recomputed, if there is one."
        )


def _beyond(step: int, num_steps: int) -> ConfigError:
    return ConfigError(f"step={step}: the run has {num_steps} steps. Choose one of them.")


class _StopAfter(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """HuggingFace's hook."""
        control.should_training_stop = state.global_step >= self._step
