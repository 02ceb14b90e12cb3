"""Traces of chosen steps for a timeline viewer, by torch.profiler, and what they held of the memory of a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile, schedule

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.options.run import ProfileParams
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run

logger = logging.getLogger(__name__)

FOLDER = "profile"  # in the output folder
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def profiler(args: BaseConfig) -> StepProfiler | None:
    """What profiles this process, if the options say so."""
    if not args.profile:
        return None
    params = args.profile_params
    is_traced = params.ranks is None or args.process_index in params.ranks
    return StepProfiler(params, Path(args.output_dir) / FOLDER, is_traced=is_traced)


class StepProfiler(Part):
    """Profiles the steps of a training run; a step ends before its evaluation and checkpoint, which the next one has.

    Writes `steps-<first>-<last>-rank-<rank>.json.gz` for chrome://tracing and https://ui.perfetto.dev, and
    `....memory.pickle` for https://docs.pytorch.org/memory_viz. Steps are numbered as in the logs.

    Args:
        params: Options.
        folder: Where traces are written.
        is_traced: Whether this process is profiled; if not, only the options are checked.
    """

    def __init__(self, params: ProfileParams, folder: Path, *, is_traced: bool) -> None:
        self.params, self.folder, self.is_traced = params, folder, is_traced
        self._profiler: profile | None = None
        self._last = 0  # the step of training that ended last
        self._first: int | None = None  # of the trace that is being recorded

    def begin(self, run: Run) -> None:
        """Start to count steps.

        Raises:
            ConfigError: Training ends before the first traced step.
        """
        params, left = self.params, run.state.max_steps - run.state.global_step
        before = params.skip_first + params.wait + params.warmup
        if left <= before:
            raise ConfigError(
                f"profile=True has no effect because training ends after {left} steps, and the first {before} are not "
                f"traced: skip_first={params.skip_first} + wait={params.wait} + warmup={params.warmup} of "
                "profile_kwargs. Set them lower."
            )
        self._stop()  # left by a training run that ended with an error
        if not self.is_traced:
            return
        self._last = run.state.global_step
        self._profiler = profile(
            schedule=schedule(
                wait=params.wait,
                warmup=params.warmup,
                active=params.active,
                repeat=params.repeat,
                skip_first=params.skip_first,
            ),
            on_trace_ready=self._write,
            record_shapes=params.record_shapes,
            profile_memory=params.profile_memory,
            with_stack=params.with_stack,
        )
        self._profiler.start()
        self._follow()

    def after_step(self, run: Run) -> None:
        """See `Part`."""
        if self._profiler is not None:
            self._last = run.state.global_step
            self._profiler.step()
            self._follow()

    def ended(self, run: Run) -> None:
        """A trace that is not complete is written, too."""
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            self._end_trace()

    def _follow(self) -> None:
        """Note that a trace begins with the next step, if it does."""
        assert self._profiler is not None
        if self._first is None and self._profiler.current_action in _RECORDING:
            self._first = self._last + 1
            if self.params.memory_snapshot:
                torch.cuda.memory._record_memory_history()

    def _write(self, traced: profile) -> None:
        """Called after the last step of a trace, and before the next one begins."""
        if self._first is not None and self._first <= self._last:  # not if training ends where a trace would begin
            number = distributed.rank_in_names(distributed.rank(), distributed.world_size())
            name = f"steps-{self._first}-{self._last}-rank-{number}"
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{name}.json.gz"
            traced.export_chrome_trace(str(path))
            if self.params.memory_snapshot:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))  # type: ignore[no-untyped-call]
            logger.info("Trace of steps %d to %d: %s", self._first, self._last, path)
        self._end_trace()

    def _end_trace(self) -> None:
        if self._first is not None and self.params.memory_snapshot:
            torch.cuda.memory._record_memory_history(None)
        self._first = None
