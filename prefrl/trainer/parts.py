"""The optional parts of a training: which events they may hear, and what they see of the run.

A part is a plain class that defines the events it needs; no other event ever calls it. Whether it is on is asked once,
when a trainer is constructed: a run that does not use a part does not execute a line of it. Parts hear an event in the
order of `prefrl.trainer.features`, and do not know of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from transformers import TrainerCallback

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prefrl.metrics import Metric
    from prefrl.run.folder import Identity, StopRequest
    from prefrl.trainer.base_config import BaseConfig
    from prefrl.trainer.run_folder import RunFolder, StartingPoint
    from prefrl.trainer.scorer import Scorer
    from prefrl.trainer.steps import LongBatch, Step, StepAccount, StepPlan
    from prefrl.types import LossOutput, TokenBatch

# What a model does in a training.
Role = Literal["policy", "reference", "critic"]


class GoBack(Exception):
    """Raised by a part in a step that is not applied: training goes on from a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self.checkpoint = checkpoint


class Run(Protocol):
    """A training, as its parts and those who write its checkpoints see it. The trainer is one."""

    algorithm: str
    args: BaseConfig
    metrics: dict[Literal["train", "eval"], dict[str, Metric]]
    account: StepAccount
    plan: StepPlan
    parts: Parts
    run_folder: RunFolder
    start: StartingPoint
    found_sizes: Mapping[str, int]
    failure: Exception | None  # ends training after this step's logs
    stop_request: StopRequest
    stop_code: int
    scorer: Scorer
    current_step: Step  # the one that runs or has run last
    step_loss: Tensor  # this process's share of its loss
    keeps_steps: bool
    dataset_name: str | None
    hub_model_id: str | None
    # HuggingFace's.
    model: Any  # that it trains, in the backend's wrapper
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    control: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    callback_handler: Any
    train_dataset: Any
    eval_dataset: Any

    @property
    def policy(self) -> PreTrainedModel:
        """The model without the backend's wrapper."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""

    @property
    def policy_learns(self) -> bool:
        """Whether this step changes the policy."""

    def row_items(self, batch: Any) -> Tensor:
        """[B] what each row counts among the items of a step."""

    def penalized(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters in the penalty of a step."""

    def decisive(self) -> dict[str, Any]:
        """What decides the updates of this training, JSON values by name."""

    def identity(self) -> Identity:
        """What checkpoints say about their run."""

    def write_model(self, folder: Path) -> None:
        """Write model, tokenizer and options to a folder. All processes must call it."""

    def save_checkpoint(self) -> None:
        """Write a checkpoint now. All processes must call it."""

    def load_weights(self, checkpoint: Path) -> None:
        """Put the weights of a checkpoint of this run into the policy. All processes must call it."""

    def evaluate_policy(self, eval_dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        """The metrics of the policy with the weights that it has. All processes must call it."""

    def trial(self, num_rows: int) -> AbstractContextManager[LongBatch]:
        """A context with a micro-batch of rows as long as the longest. All processes must enter it."""

    def micro_step(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """Forward and backward pass of one micro-batch."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, overwrite: bool = False) -> None:
        """Save model, tokenizer and model card. All processes must call it."""

    def add_callback(self, callback: Any) -> None:
        """HuggingFace's, for parts whose state it keeps in its own."""


class Part:
    """An optional part of a training. A subclass defines the events that it needs, which come in this order.

    All processes call all of them.
    """

    def made(self, run: Run, model: nn.Module, role: Role) -> None:
        """A model is made, and no backend has wrapped it yet. If it is the policy, the run has no more than `args`."""

    def opened(self, run: Run) -> None:
        """`run.run_folder` is open and knows the run, which may be one that goes on."""

    def checkpoint_bytes(self, run: Run) -> int:
        """Bytes that the part adds to a checkpoint."""
        raise NotImplementedError

    def prepare(self, run: Run) -> None:
        """Training will begin from `run.start`. The data loader, the optimizer and the schedule are not there yet."""

    def load(self, run: Run, folder: Path) -> None:
        """Read what `save` wrote into a checkpoint. A run that did not use the part wrote nothing."""

    def begin(self, run: Run) -> None:
        """The first step follows."""

    def before_step(self, run: Run) -> None:
        """A step begins; its data is not there yet."""

    def sampled(self, run: Run) -> None:
        """All completions of a generation batch, or of an evaluation, are there. Passes of models follow."""

    def around_loss(self, run: Run, batch: TokenBatch, compute: Callable[[], LossOutput]) -> LossOutput:
        """The loss of a micro-batch, also of an evaluation, from that of `compute`. The last part is the outermost."""
        raise NotImplementedError

    def gradients(self, run: Run, model: nn.Module) -> None:
        """The gradients of the step are complete, and not clipped yet."""

    def before_update(self, run: Run, model: nn.Module, norm: Tensor | float | None) -> None:
        """The update follows. `norm` is that of the gradients before they were clipped.

        Raises:
            GoBack: Training goes on from a checkpoint.
        """

    def after_update(self, run: Run) -> None:
        """The optimizer has made the update, or the device is about to."""

    def after_step(self, run: Run) -> None:
        """The step is counted, and HuggingFace has decided whether it logs, evaluates and saves after it."""

    def epoch_ended(self, run: Run) -> None:
        """An epoch is over, and HuggingFace has decided whether it logs, evaluates and saves after it."""

    def logged(self, run: Run, logs: dict[str, float]) -> None:
        """Metrics are about to be shown: those of some steps or of an evaluation."""

    def other_weights(self, run: Run) -> Sequence[tuple[str, AbstractContextManager[None]]]:
        """Weights that are evaluated and saved beside those that are trained: names, and contexts that put them."""
        raise NotImplementedError

    def has_replaced_weights(self, run: Run) -> bool:
        """Whether that context is open."""
        raise NotImplementedError

    def may_save(self, run: Run) -> bool:
        """Whether a checkpoint may be written now."""
        raise NotImplementedError

    def save(self, run: Run, folder: Path) -> None:
        """Write what the next update depends on into a checkpoint; `args.should_save` says on which process."""

    def ended(self, run: Run) -> None:
        """The last step is done, and so are its logs, its evaluation and its checkpoint."""

    def left(self, run: Run, is_complete: bool) -> None:
        """HuggingFace has left its loop, and all checkpoints are in their places. Incomplete trainings end here."""

    def finished(self, run: Run) -> None:
        """Training is complete."""


# The names of all events.
EVENTS = tuple(name for name in vars(Part) if not name.startswith("_"))

Kind = TypeVar("Kind")


class Parts:
    """The parts of a trainer, each of which hears the events that it defines."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts: list[Part] = []
        self.listeners: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> None:
        """Add a part, the last."""
        self._parts.append(part)
        for event, listeners in self.listeners.items():
            if getattr(type(part), event) is not getattr(Part, event):
                listeners.append(getattr(part, event))

    def tell(self, event: str, run: Run, *about: Any) -> list[Any]:
        """Tell the parts of an event; returns their answers."""
        return [listen(run, *about) for listen in self.listeners[event]]

    def other_weights(self, run: Run) -> list[tuple[str, AbstractContextManager[None]]]:
        """All weights that are evaluated and saved beside those that are trained."""
        return [pair for pairs in self.tell("other_weights", run) for pair in pairs]

    def get(self, kind: type[Kind]) -> Kind | None:
        """The part of a class; None: it is off."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def __getitem__(self, kind: type[Kind]) -> Kind:
        """The part of a class.

        Raises:
            KeyError: It is off.
        """
        part = self.get(kind)
        if part is None:
            raise KeyError(kind.__name__)
        return part


class Events(TrainerCallback):
    """Forwards HuggingFace's events to the core of a training, and to its parts.

    Args:
        run: The training.
        begin: Called before the first step, after the parts.
        end: Called after the last step, after the parts.
    """

    def __init__(self, run: Run, *, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._run, self._begin, self._end = run, begin, end

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook."""
        self._run.parts.tell("begin", self._run)
        self._begin()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook, right after the update; the rest of the step counts as "other"."""
        self._run.parts.tell("after_update", self._run)
        self._run.account.switch("other")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook."""
        self._run.plan.end_step()
        self._run.parts.tell("after_step", self._run)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook."""
        self._run.parts.tell("epoch_ended", self._run)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """HuggingFace's hook."""
        self._run.parts.tell("logged", self._run, logs)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook."""
        self._run.parts.tell("ended", self._run)
        self._end()
