"""Computes a step again: of an online run, from its checkpoints and journal, or one whose numbers were not finite.

For the latter, it looks for where that begins.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoProcessor, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME

from prefrl import distributed
from prefrl.errors import ConfigError, NonFiniteError
from prefrl.models.adapters import saved_config
from prefrl.options.schedule import PlateauParams
from prefrl.registry import REGISTRY
from prefrl.rollout.journal import Journal, read_entry
from prefrl.run.checkpoints import find_last, step_of
from prefrl.run.folder import Identity
from prefrl.trainer.configs import OnlineConfig
from prefrl.trainer.dumps import DumpedBatch, read_dump
from prefrl.trainer.run_folder import StartingPoint
from prefrl.types import TokenBatch

# What a replay does in another way than the run: it writes nothing, asks nobody, runs in one process, and goes on
# where the run would have stopped. None of it decides the updates.
_OTHERWISE: dict[str, Any] = {
    "report_to": "none",
    "push_to_hub": False,
    "hub_token": None,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_epochs": 1.0,
    "save_epochs": 1.0,
    "evaluate_training_set": False,
    "warmup_evaluations": 0,  # warmup_steps has what follows from it
    "profile": False,
    "profile_kwargs": None,
    "load_best_model_at_end": False,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "disable_tqdm": True,
    "resume_from_checkpoint": None,
    "allow_resume_changes": None,
    "save_in_background": False,
    "checkpoint_kwargs": None,
    "upload_to": None,
    "upload_kwargs": None,
    "max_train_time": None,
    "on_nan": "skip",
    "nan_patience": 1_000_000,
    "on_spike": "ignore",
    "spike_kwargs": None,
    "early_stopping_patience": None,
    "early_stopping_kwargs": None,
    "model_soup": None,
    "model_soup_kwargs": None,
    "ema_decay": None,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "parallelism_config": None,
    "log_completions": False,
    "num_completions_to_print": 4,
    "log_unique_prompts": False,
    "journal_keep": 0,
    "journal_tokens": False,
}


def config_of_run(folder: Path, algorithm: str, scratch: str) -> Any:
    """The config that a run has left in a folder, changed to what a replay does in another way."""
    values = json.loads((folder / "training_args.json").read_text(encoding="utf-8"))
    config_class = REGISTRY[algorithm].load_config()
    if watches_evaluations(values):  # there are none
        values |= {"reduce_on_plateau": 0, "reduce_on_plateau_kwargs": None}
    names = {field.name for field in dataclasses.fields(config_class) if field.init}
    values |= {**_OTHERWISE, "output_dir": scratch}
    config = config_class(**{name: value for name, value in values.items() if name in names})
    if isinstance(config, OnlineConfig):  # the rewards are in the journal, and there are none of evaluations
        config.eval_reward_weights, config.pass_at_k_kwargs = None, None
        config.reward_num_workers, config.reward_model_kwargs = 0, None
    return config


def watches_evaluations(options: Mapping[str, Any]) -> bool:
    """Whether `reduce_on_plateau` waits for a metric of evaluations."""
    keys = options.get("reduce_on_plateau_kwargs") or {}
    return bool(options.get("reduce_on_plateau")) and PlateauParams(**keys).metric.startswith("eval_")


def processing_class_of(folder: Path) -> Any:
    """The tokenizer that is saved in a folder, or the processor."""
    has_processor = any((folder / name).exists() for name in ("processor_config.json", "preprocessor_config.json"))
    return (AutoProcessor if has_processor else AutoTokenizer).from_pretrained(folder)


def never(name: str) -> Callable[..., NoReturn]:
    """A reward with this name that must not be called: the rewards are in the journal."""

    def reward(completions: list[Any], **_: Any) -> NoReturn:
        raise ConfigError(f"the reward {name!r} was called, but a replay reads rewards from the journal")

    reward.__name__ = name
    return reward


# Characters of a row that are shown.
_SHOWN = 200


def replay_dump(folder: Path, identity: Identity) -> None:
    """Print loss and gradient norm of each micro-batch, and what is not finite first: a weight, a row or a gradient.

    Dropout is off. What a loss reads besides its micro-batch (running means, adaptive coefficients, the KL estimate of
    KTO) is as it is at the start of a run.
    """
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(folder, identity, scratch)
        trainer.state.global_step = int(folder.resolve().name.rpartition("-")[2]) - 1
        weight = distributed.first_non_finite(trainer.policy, trainer.args.device)
        finding: tuple[str, str] | None = None
        table = Table(box=None, header_style="dim")
        for column in ("process", "micro-batch", "rows", "tokens", "loss", "gradient norm"):
            table.add_column(column, justify="right")
        for dumped in read_dump(folder):
            loss, norm = _pass(trainer, dumped.batch, dumped.num_items)
            rows, tokens = dumped.batch.num_rows, dumped.batch.num_tokens
            numbers = (f"{loss:.9g}", f"{norm:.9g}")  # as many digits as tell apart all numbers of 32 bits
            table.add_row(*map(str, (dumped.rank, dumped.number, rows, tokens)), *numbers)
            if finding is None and not (math.isfinite(loss) and math.isfinite(norm)):
                found, remedy = _gradient(trainer) if math.isfinite(loss) else _rows(trainer, dumped)
                finding = f"Process {dumped.rank}, micro-batch {dumped.number}: {found}", remedy
        trainer.end()
    console.print(f"[bold]Step {trainer.state.global_step + 1}[/], computed again from {escape(str(folder))}")
    console.print("Loss and gradients of each micro-batch, with the weights before the step and without dropout:")
    console.print(table)
    if weight is not None:
        console.print(f"Before the step, {weight} holds NaN or infinity.", markup=False)
        finding = finding[0] if finding else "", _OF_WEIGHTS
    verdict, remedy = finding or ("Every loss and every gradient is finite here.", _OF_CHANCE)
    console.print(f"Verdict: {verdict}\nNext step: {remedy}", markup=False, highlight=False)


_OF_WEIGHTS = "Start again from a checkpoint before it, with a lower learning_rate or max_grad_norm."
_OF_ROWS = "Look at these rows, and leave them out, or set on_nan='skip' to go on without the steps that have them."
_OF_GRADIENTS = "Lower learning_rate, or train in bf16 or float32 if it was fp16."
_OF_CHANCE = "Dropout, or what the loss remembers of earlier steps, made the difference. Set on_nan='skip' to go on."


def _trainer(folder: Path, identity: Identity, scratch: str) -> Any:
    algorithm = REGISTRY[str(identity.decisive["algorithm"])]
    config = config_of_run(folder, algorithm.name, scratch)
    rewards = identity.decisive.get("rewards")
    extra: dict[str, Any] = {"eval_dataset": {}}  # the step has its rows
    if rewards is not None:
        extra["reward_funcs"] = [never(name) for name in rewards]
    processing_class = processing_class_of(folder)
    trainer = algorithm.load_trainer()(model=str(folder), args=config, processing_class=processing_class, **extra)
    if (folder / "critic").is_dir():
        trainer.critic.load(folder / "critic")
    return trainer


def _loss(trainer: Any, batch: TokenBatch) -> torch.Tensor:
    with trainer.accelerator.autocast():
        total: torch.Tensor = trainer.full_loss(trainer.policy, batch.to(trainer.args.device)).total
    return total


def _pass(trainer: Any, batch: TokenBatch, num_items: float) -> tuple[float, float]:
    """A micro-batch's share of the loss, and the norm of its gradient; leaves the gradient on the parameters."""
    trainer.policy.zero_grad()
    loss = _loss(trainer, batch) * (1.0 / num_items)  # as in training, bit by bit
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    gradients = [p.grad for p in trainer.policy.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.nn.utils.get_total_norm(gradients))


def _gradient(trainer: Any) -> tuple[str, str]:
    """What is not finite, and what to do about it."""
    named = trainer.policy.named_parameters()
    name = next((name for name, p in named if p.grad is not None and not p.grad.isfinite().all()), None)
    return f"the loss is finite, but the gradient of {name or 'all parameters together'} is not.", _OF_GRADIENTS


def _rows(trainer: Any, dumped: DumpedBatch) -> tuple[str, str]:
    """The first rows whose loss alone is not finite, and what to do about it; a group stays together."""
    batch = dumped.batch
    for group in dict.fromkeys(batch.group_index):
        rows = [row for row, of in enumerate(batch.group_index) if of == group]
        with torch.no_grad():
            own = batch.select(rows)
            loss = float(_loss(trainer, own))
        if not math.isfinite(loss):
            decode = trainer.tokenizer.decode
            texts = [repr(decode(ids.tolist()))[:_SHOWN] for ids in (own.prompt_ids, own.response_ids)]
            return f"the loss of rows {rows} alone is {loss}: prompt {texts[0]}, response {texts[1]}", _OF_ROWS
    return "the loss of each group alone is finite.", _OF_CHANCE


# Options that choose on the way what a step learns from, and their values if they do not.
_CHOOSE_STEPS = {"increase_batch_size_on_plateau": 0, "on_spike": "ignore"}
# Relative differences below this one are called rounding.
_ROUNDING = 1e-4
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
        self.config = config_of_run(self.checkpoint, self.algorithm, scratch)
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
        # The replay logs each step, which transformers would warn of.
        logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
        trainer = self._trainer()
        console = Console()
        try:
            trainer.start = StartingPoint(trainer.start.run, self.checkpoint)
            trainer._train()
        except NonFiniteError as error:  # about the weights after the step
            console.print(escape(str(error)))
        finally:
            trainer.end()
        computed = _logged(trainer.state.log_history, self.step)
        if computed is None:
            raise _beyond(self.step, trainer.state.max_steps)
        self._print(computed, trainer.state.max_steps, console)

    def _print(self, computed: Mapping[str, Any], num_steps: int, console: Console) -> None:
        """Print what was computed, the metrics beside those that the run logged, the verdict and the next step."""
        run, start = escape(str(self.folder)), 1 + (step_of(self.checkpoint.name) or 0)
        steps = f"step {start}" if start == self.step else f"steps {start} to {self.step}"
        console.print(
            f"[bold]Step {self.step}[/] of {num_steps}, computed again from {run}/{self.checkpoint.name}\n"
            f"Log-probs, advantages, losses, gradients and updates of {steps} were computed in this process. "
            f"Completions and rewards were read from {run}/completions.\n",
            soft_wrap=not console.is_terminal,
        )
        history = self._history()
        logged = _logged(history, self.step) or {}
        earlier = [entry["step"] for entry in history if "loss" in entry and entry["step"] < self.step]
        first = max(earlier, default=0) + 1
        pairs = [
            _Pair(name, value, logged.get(name) if first == self.step else None)
            for name, value in computed.items()
            if name != "step" and not name.startswith(_SPEED)
        ]
        console.print(_table(pairs))
        verdict = self._verdict(pairs, first if logged else None)
        console.print(f"\n[bold]Verdict:[/] {verdict}", soft_wrap=not console.is_terminal)
        console.print(
            f"Next steps:\n  prefrl look {run} --step {self.step} --worst 5", highlight=False, soft_wrap=True
        )
        if any(pair.differs for pair in pairs):
            console.print(
                f"  prefrl env  # and compare with the versions in: prefrl report {run}",
                highlight=False,
                soft_wrap=True,
            )

    def _verdict(self, pairs: Sequence[_Pair], first: int | None) -> str:
        """What the comparison says; `first` is the first step of the mean that the run logged, None if it did not."""
        if first != self.step:
            what = "nothing at this step" if first is None else f"only the mean of steps {first} to {self.step}"
            return f"The run logged {what}, so there is nothing to compare. With logging_steps=1, each step is logged."
        compared = [pair for pair in pairs if pair.then is not None]
        differing = sorted((pair for pair in compared if pair.differs), key=lambda pair: -pair.difference)
        if not differing:
            return f"All {len(compared)} numbers that the run logged of this step are the same to the last digit."
        worst = differing[0]
        kind = (
            "This is rounding, as between machines, numbers of threads or versions of torch."
            if worst.difference < _ROUNDING
            else "This is more than rounding: the code, the versions or the machine are not those of the run."
        )
        return (
            f"{len(differing)} of {len(compared)} numbers that the run logged of this step differ, {worst.name} most, "
            f"by {worst.difference:.1e} of its value. {kind}"
        )

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


class _Pair(NamedTuple):
    """A metric that was computed again, and its value in the run's log; None: the log does not have it."""

    name: str
    now: float
    then: float | None

    @property
    def differs(self) -> bool:
        """Whether the log has another value."""
        return self.then is not None and repr(self.now) != repr(self.then)  # NaN is NaN here

    @property
    def difference(self) -> float:
        """How far the values are apart, relative to the larger one; infinite if one is not a finite number."""
        if self.then is None or not (math.isfinite(self.now) and math.isfinite(self.then)):
            return math.inf
        return abs(self.now - self.then) / max(abs(self.now), abs(self.then))


def _table(pairs: Sequence[_Pair]) -> Table:
    """Six digits of what is the same, all digits of what is not."""
    table = Table(box=None, header_style="dim")
    columns = ["metric", "computed again", "logged", ""][: 4 if any(pair.then is not None for pair in pairs) else 2]
    for column in columns:
        table.add_column(column, justify="left" if column in ("metric", "") else "right", no_wrap=True)
    for pair in pairs:
        digits = repr if pair.differs else "{:.6g}".format
        then = "-" if pair.then is None else digits(pair.then)
        cells = (pair.name, digits(pair.now), then, "differs" if pair.differs else "")
        table.add_row(*cells[: len(columns)])
    return table


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
