"""Sizes that are "auto": found by trial passes before the first step, the same in a run that resumes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from prefrl import distributed
from prefrl.errors import ConfigError, OutOfMemoryError
from prefrl.options.training import EVALUATED_ROWS, AutoSizeParams, largest_divisor
from prefrl.rewards.confinement import own_randomness
from prefrl.run.folder import write_identity
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.memory import EVALUATION, TrialMemory, explained
from prefrl.trainer.parts import Part, Run
from prefrl.trainer.steps import LongBatch
from prefrl.types import TokenBatch

_ROWS, _STEPS, _TOKENS = "per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch"
# The most rows that are tried on a CPU when nothing else bounds them; Ludwig's bound.
_MOST_ON_CPU = 128
# Passes over a micro-batch, of which the fastest counts, since other work of the machine slows some: two, and more if
# they are shorter than this together.
_SECONDS, _MOST_PASSES = 0.5, 20


def automatic_sizes(run: Run) -> AutomaticSizes | None:
    """What finds the sizes that need a trial, if any is "auto".

    Raises:
        ConfigError: Names the options.
    """
    args, is_deepspeed = run.args, run.is_deepspeed_enabled
    names = args.automatic - {"learning_rate"} if is_deepspeed else args.sought | (args.automatic & {EVALUATED_ROWS})
    if names and (is_deepspeed or run.is_fsdp_enabled):
        backend = "DeepSpeed" if is_deepspeed else "FSDP"
        raise ConfigError(
            f"{' and '.join(sorted(names))}='auto' with {backend}: weights are partitioned only when training begins, "
            "after the data loader needs the sizes. Find them once on one process, or set numbers."
        )
    return AutomaticSizes(args, run.model, run.trial, partial(_run_trial, run)) if args.sought else None


def _run_trial(run: Run, batch: TokenBatch) -> None:
    metrics = run.metrics["train"]
    run.metrics["train"] = {}
    with run.accelerator.autocast():  # accelerate wraps the model's forward only once training has started
        run.micro_step(run.model, batch, 1.0, is_last=True)
    run.metrics["train"] = metrics


class AutomaticSizes(Part):
    """Finds the sizes that need a trial, and sets them in the config.

    Passes over the longest rows measure speed and memory of micro-batches of 1, 2, 4, ... rows. There is no update, so
    weights and optimizer stay as they are; random numbers are drawn from generators that are restored afterwards.

    Args:
        args: Options, which get the sizes.
        model: What is trained.
        trial: Given a number of rows, a context with a micro-batch.
        run: Forward and backward pass of a micro-batch.
    """

    def __init__(
        self,
        args: BaseConfig,
        model: nn.Module,
        trial: Callable[[int], AbstractContextManager[LongBatch]],
        run: Callable[[TokenBatch], Any],
    ) -> None:
        self._args = args
        self._model = model
        self._trial = trial
        self._run = run
        self._params: AutoSizeParams = args.auto_size_params
        self.clock: Callable[[], float] = time.perf_counter  # seconds; what speeds are measured with
        self.trials: list[Trial] = []  # what the search has tried
        self.found: dict[str, int] = {}  # rows_per_step, and the size that was found

    def prepare(self, run: Run) -> None:
        """Set the sizes, which a resumed run needs, also before there is a checkpoint."""
        num_rows = len(run.train_dataset) if hasattr(run.train_dataset, "__len__") else None
        self.settle(run.start.sizes, num_rows=num_rows)
        run.found_sizes = self.found
        distributed.on_main(lambda: write_identity(run.run_folder.path, run.identity()))

    def settle(self, saved: Mapping[str, int], *, num_rows: int | None) -> None:
        """Set the sizes: those of the resumed run if it has found them, otherwise those that a search finds.

        All processes must call it. A second call searches no more.

        Args:
            saved: What the resumed run has found; {}: nothing.
            num_rows: Rows of the training dataset; None: not known.
        """
        if not self._args.sought:
            return
        if self._sought in saved:
            self.found = dict(saved)
        if not self.found:
            self.found = self._search(num_rows)
        self._set()

    @property
    def _sought(self) -> str:
        """The size that the search decides."""
        return _TOKENS if _TOKENS in self._args.sought else _ROWS

    def _set(self) -> None:
        """Set the sizes in the config; processes may be others than those that found them."""
        args, ranks = self._args, distributed.world_size()
        if _TOKENS in self.found:
            args.max_tokens_per_micro_batch = self.found[_TOKENS]
            return
        of_rank, rest = divmod(self.found["rows_per_step"], ranks)
        if _STEPS in args.sought:
            args.per_device_train_batch_size = largest_divisor(of_rank, self.found[_ROWS])
            args.gradient_accumulation_steps = of_rank // args.per_device_train_batch_size
            return
        args.per_device_train_batch_size, uneven = divmod(of_rank, int(args.gradient_accumulation_steps))
        if rest or uneven:
            raise ConfigError(
                f"{_ROWS}='auto': the resumed run had found {self.found['rows_per_step']} rows per step, which "
                f"{ranks} processes with {_STEPS}={args.gradient_accumulation_steps} cannot share evenly. Change one "
                "of them."
            )

    # The search.

    def _search(self, num_rows: int | None) -> dict[str, int]:
        args = self._args
        trained = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        with own_randomness(args.seed):
            memory = TrialMemory(
                args.device,
                share=self._params.memory_share,
                trained=trained,
                has_buckets=distributed.num_processes() > 1,
            )
            start = time.perf_counter()
            (load,) = distributed.max_over_ranks([memory.load_of_gradients], args.device)
            sizes = candidates(self._most(num_rows), divides=_STEPS in args.sought)
            self.trials = search(lambda rows: self._measured(rows, memory), sizes, load=load)
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        chosen = best(self.trials)
        of_step = int(args.per_device_train_batch_size * args.gradient_accumulation_steps)
        if args.sought == {_ROWS}:
            of_step = chosen.rows * int(args.gradient_accumulation_steps)
        found = {self._sought: chosen.tokens if self._sought == _TOKENS else chosen.rows}
        if distributed.is_main():
            sys.stderr.write(_report(self.trials, found, time.perf_counter() - start))
        return {**found, "rows_per_step": of_step * distributed.world_size()}

    def _most(self, num_rows: int | None) -> int:
        """The largest size to try: all rows of a step, or where the size of the step is sought, what is allowed."""
        args, most = self._args, self._params.max_batch_size
        if args.sought != {_ROWS}:
            of_step = int(args.per_device_train_batch_size * args.gradient_accumulation_steps)
            if most is None:
                return of_step
            return min(of_step, most) if _TOKENS in args.sought else largest_divisor(of_step, most)
        bounds = [most, _MOST_ON_CPU if most is None and args.device.type == "cpu" else None]
        if num_rows is not None:
            bounds.append(num_rows // (distributed.world_size() * int(args.gradient_accumulation_steps)))
        return max(1, min(bound for bound in bounds if bound is not None))

    def _measured(self, rows: int, memory: TrialMemory) -> Trial | None:
        """Run the passes; None: memory ran out on a process, with fewer rows there was enough."""
        with self._cut_into(rows), self._trial(self._args.rows_per_micro_batch) as long:
            try:
                # The first pass of all also sets up what later ones use.
                seconds = self._seconds(long.batch, 1 + (rows == 1))
                num_passes = min(max(int(_SECONDS / seconds), 1), _MOST_PASSES)
                seconds = min(seconds, self._seconds(long.batch, num_passes))
            except OutOfMemoryError:
                if rows == 1:
                    raise
                return None
            own_tokens = sum(long.batch.forward_tokens([row]) for row in range(long.batch.num_rows))
            numbers: list[float] = [memory.load, long.tokens, own_tokens]
        load, tokens, most_own_tokens = distributed.max_over_ranks(numbers, self._args.device)
        return Trial(rows, int(tokens), most_own_tokens / seconds, load)

    @contextmanager
    def _cut_into(self, rows: int) -> Iterator[None]:
        """Inside, micro-batches have this many rows, whatever another trainer with these options has found."""
        args = self._args
        before = args.per_device_train_batch_size, args.max_tokens_per_micro_batch
        args.per_device_train_batch_size, args.max_tokens_per_micro_batch = rows, None
        try:
            yield
        finally:
            args.per_device_train_batch_size, args.max_tokens_per_micro_batch = before

    def _seconds(self, batch: TokenBatch, num_passes: int) -> float:
        """The time of the fastest of some passes, on the slowest process.

        Raises:
            OutOfMemoryError: Memory ran out, on any process.
        """
        fastest, problem = math.inf, None
        try:
            fastest = min(self._timed(batch) for _ in range(num_passes))
        except OutOfMemoryError as error:
            problem = str(error)  # the error itself would keep the tensors of the pass
        self._model.zero_grad(set_to_none=True)
        (seconds,) = distributed.max_over_ranks([fastest], self._args.device)
        if math.isinf(seconds):
            raise OutOfMemoryError(problem or "out of memory in another process. See its message.")
        return seconds

    def _timed(self, batch: TokenBatch) -> float:
        self._model.zero_grad(set_to_none=True)
        _wait(self._args.device)
        start = self.clock()
        self._run(batch)
        _wait(self._args.device)
        return self.clock() - start


class EvaluationSize:
    """Finds the rows of an evaluation's batches, `per_device_eval_batch_size="auto"`, and sets them in the config.

    Passes over the longest rows measure speed and memory, as for training, but without gradients.

    Args:
        args: Options, which get the size.
        evaluate: Evaluates this number of rows of a dataset that are as long as any; returns the tokens of the pass.
        trained: Returns the bytes that training will need for gradients and moments, whatever it holds already.
    """

    def __init__(self, args: BaseConfig, evaluate: Callable[[Any, int], int], trained: Callable[[], int]) -> None:
        self._args, self._evaluate, self._trained = args, evaluate, trained
        self._params: AutoSizeParams = args.auto_size_params
        self._longest = 0  # tokens of the longest row that the size is known to suit
        self._seen: list[Any] = []  # datasets without longer ones
        self.clock: Callable[[], float] = time.perf_counter
        self.trials: list[Trial] = []

    def settle(self, dataset: Any) -> None:
        """Set the size for a prepared dataset: a new one if its rows are longer than any before.

        All processes must call it.
        """
        if any(dataset is one for one in self._seen):
            return
        self._seen.append(dataset)
        args, start = self._args, time.perf_counter()
        memory = TrialMemory(args.device, share=self._params.memory_share, trained=self._trained(), has_buckets=False)
        first = self._measured(dataset, 1, memory)
        if first is None or first.tokens <= self._longest:
            return
        self._longest = first.tokens
        bounds = [self._params.max_batch_size or (_MOST_ON_CPU if args.device.type == "cpu" else None)]
        bounds.append(math.ceil(len(dataset) / distributed.world_size()))
        most = min(bound for bound in bounds if bound is not None)
        self.trials = search(
            lambda rows: self._measured(dataset, rows, memory), candidates(most, divides=False), load=0.0
        )
        args.per_device_eval_batch_size = best(self.trials).rows
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        if distributed.is_main():
            found = {EVALUATED_ROWS: args.per_device_eval_batch_size}
            sys.stderr.write(_report(self.trials, found, time.perf_counter() - start))

    def _measured(self, dataset: Any, rows: int, memory: TrialMemory) -> Trial | None:
        """The faster of two passes; None: memory ran out on a process, with fewer rows there was enough.

        Raises:
            OutOfMemoryError: One row is too much, on any process.
        """
        seconds, tokens, problem = math.inf, 0, "out of memory in another process. See its message."
        try:
            with explained(lambda: f"an evaluation of {rows} of the longest rows", self._args, EVALUATION):
                for _ in range(2):
                    begun = self.clock()
                    tokens = self._evaluate(dataset, rows)
                    _wait(self._args.device)
                    seconds = min(seconds, self.clock() - begun)
        except OutOfMemoryError as error:
            seconds, problem = math.inf, str(error)  # the error itself would keep the tensors of the pass
        load, most, slowest = distributed.max_over_ranks([memory.load, tokens, seconds], self._args.device)
        if math.isinf(slowest) and rows == 1:
            raise OutOfMemoryError(problem)
        return None if math.isinf(slowest) else Trial(rows, int(most), most / slowest, load)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(trials: list[Trial], found: dict[str, int], seconds: float) -> str:
    """What was tried and found, for the terminal."""
    lines = [
        f"{trial.rows:>8} rows, {trial.tokens:>8,} tokens: {trial.speed:>10,.0f} tokens/s, {trial.load:4.0%} of memory"
        for trial in trials
    ]
    sizes = ", ".join(f"{name}={value}" for name, value in found.items())
    return "\n".join([f"found in {seconds:.1f} s: {sizes}", *lines, ""])


# The search.

# A larger micro-batch must be faster than the best smaller one by this factor, or it counts as no faster.
_FASTER = 1.02
# After this many sizes that are no faster, larger ones are not tried.
_PATIENCE = 2
# Of all sizes that reach this share of the best speed, the smallest is chosen: it needs the least memory.
_NEARLY_BEST = 0.99


@dataclass(frozen=True, slots=True)
class Trial:
    """What the passes over a micro-batch have shown, the same on all processes."""

    rows: int  # what per_device_train_batch_size counts
    tokens: int  # of the forward pass: prompts that rows share count once
    speed: float  # tokens of all rows, each with its own prompt, per second
    load: float  # the memory that training needs with such micro-batches, as a share of what it may need


def candidates(most: int, *, divides: bool) -> list[int]:
    """The sizes to try, each at least twice the one before: 1, 2, 4, ... and `most`.

    Args:
        most: The largest size.
        divides: Only divisors of `most`, so that all micro-batches of a step are equal.
    """
    sizes = [1]
    for size in range(2, most + 1):
        if size >= 2 * sizes[-1] and not (divides and most % size):
            sizes.append(size)
    return sizes if sizes[-1] == most else [*sizes, most]


def search(measure: Callable[[int], Trial | None], sizes: Sequence[int], *, load: float) -> list[Trial]:
    """Try sizes in ascending order, until memory would not suffice or nothing is gained any more.

    A size is not tried if the two before it predict, by a straight line, that it needs more than there is.

    Args:
        measure: Runs the passes; None: memory ran out.
        sizes: What to try; the first is always tried.
        load: What training needs without activations, as a share of what it may need.

    Returns:
        The trials of all sizes that fit; none if memory ran out in the first.
    """
    trials: list[Trial] = []
    before, num_no_faster = (0, load), 0
    for size in sizes:
        if trials and _predicted(before, trials[-1], size) > 1:
            break
        trial = measure(size)
        if trial is None or (trials and trial.load > 1):
            break
        if trials:
            before = trials[-1].rows, trials[-1].load
            is_faster = trial.speed > _FASTER * max(other.speed for other in trials)
            num_no_faster = 0 if is_faster else num_no_faster + 1
        trials.append(trial)
        if num_no_faster == _PATIENCE:
            break
    return trials


def _predicted(before: tuple[int, float], last: Trial, size: int) -> float:
    rows, load = before
    return last.load + (last.load - load) * (size - last.rows) / (last.rows - rows)


def best(trials: Sequence[Trial]) -> Trial:
    """The smallest of the sizes that are nearly as fast as the fastest."""
    fastest = max(trial.speed for trial in trials)
    return next(trial for trial in trials if trial.speed >= _NEARLY_BEST * fastest)
