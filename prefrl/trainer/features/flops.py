"""Counts the floating-point operations of a step's passes, beside the fewest that its rows need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from prefrl import distributed
from prefrl.metrics import Mean, Metric
from prefrl.models.flops import FlopCounter, ModelCost, floor_flops, model_cost, recomputed_share
from prefrl.models.forward import verdict_of
from prefrl.trainer.parts import Run
from prefrl.trainer.steps import Pass
from prefrl.types import TokenBatch


def count_flops(run: Run) -> None:
    """Let the account of a run count operations from here on."""
    run.account.flops = StepFlops(run.policy, model_cost(run.policy))
    with run.accelerator.autocast():  # now, so that the self-check is not counted as part of a step
        verdict_of(run.policy)


class StepFlops:
    """Counts the operations of a step's passes, and the minimum that its rows need (the floor); see `models.flops`.

    The floor contains each pass of the algorithm once: the training pass, the passes of reference and teacher, and the
    no-grad passes of the policy. Generation and rewards are left out of both.

    Args:
        model: The policy.
        policy: The policy's cost.
    """

    def __init__(self, model: nn.Module, policy: ModelCost) -> None:
        self.others: dict[Pass, ModelCost] = {}
        self._model = model
        self._policy = policy
        self._rows: dict[Pass, list[TokenBatch]] = {}  # of the current step
        self._step_flops = 0.0
        self._is_counting = False
        self._counted = 0.0
        self._floor = 0.0

    def start(self) -> None:
        """Discard the counts of an unfinished step."""
        self._rows = {}
        self._step_flops = 0.0

    @contextmanager
    def count(self, kind: Pass, batches: Sequence[TokenBatch]) -> Iterator[None]:
        """Count the operations of the passes inside; nested calls count them once."""
        self._rows.setdefault(kind, []).extend(batches)
        if self._is_counting:
            yield
            return
        self._is_counting = True
        try:
            with FlopCounter() as counter:
                yield
        finally:
            self._is_counting = False
        self._step_flops += counter.total

    def finish(self) -> None:
        """End the step: add its counts to the totals."""
        self._counted += self._step_flops
        for kind, batches in self._rows.items():
            cost = self.others.get(kind, self._policy)
            trains = kind == "training"
            share = recomputed_share(self._model) if trains else 0.0
            self._floor += floor_flops(cost, batches, trains=trains, recomputed_share=share)
        self.start()

    def drain(self, seconds: float, num_steps: int) -> dict[str, Metric]:
        """Metrics of the steps since the last call.

        Args:
            seconds: Duration of the counted passes on this rank.
            num_steps: Number of optimizer steps.

        Returns:
            `perf/flops` and `perf/flops_floor`, per step, summed over ranks; `perf/step_efficiency`, the ratio of the
            floor to the counted operations; `perf/tflops_per_s`, 10^12 operations per second of those passes, for one
            process.
        """
        steps_of_all = num_steps / distributed.world_size()
        (counted,) = distributed.team_totals([self._counted], next(self._model.parameters()).device)
        floor = self._floor
        self._counted = self._floor = 0.0
        return {
            "perf/flops": Mean(counted, steps_of_all),
            "perf/flops_floor": Mean(floor, steps_of_all),
            "perf/step_efficiency": Mean(floor, counted),
            "perf/tflops_per_s": Mean(counted / 1e12, seconds * distributed.team_size()),
        }
