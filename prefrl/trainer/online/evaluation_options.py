"""Options of evaluations by sampling: how completions are sampled, what they are measured by, which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.params import Params
from prefrl.options.rollout import AtKParams

__all__ = ["EvalSamplingParams", "SampledEvaluationOptions"]


@dataclass(frozen=True)
class EvalSamplingParams(Params):
    """How completions are sampled in evaluations; None: as in training."""

    top_p: Annotated[float, Ge(0.001), Le(1)] | None = opt(None, "See top_p.")
    top_k: Annotated[int, Ge(0)] | None = opt(None, "See top_k; 0: from all tokens.")
    min_p: Annotated[float, Ge(0), Le(1)] | None = opt(None, "See min_p; 0: off.")
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] | None = opt(None, "See repetition_penalty.")

    @property
    def given(self) -> dict[str, Any]:
        """Those that differ from training."""
        return {name: value for name in self.names() if (value := getattr(self, name)) is not None}


@dataclass
class SampledEvaluationOptions:
    """Sampling in evaluations, its metrics, and which completions are kept."""

    eval_sampling_kwargs: KwargsValue = kwargs(
        "How completions are sampled in evaluations, besides temperature_eval and num_generations_eval; None: as in "
        "training.",
        EvalSamplingParams,
        decides=False,
    )
    pass_at_k_kwargs: KwargsValue = kwargs(
        "pass@k, best@k and maj@k of evaluations, with 95% intervals; see docs/evaluation.md.",
        AtKParams,
        decides=False,
    )
    log_val_generations: Annotated[int, Ge(0)] = opt(
        0,
        "Number of completions of each evaluation that are printed as a table and written to the folder "
        "evaluations. The prompts are the same each time. 0: none.",
        decides=False,
    )

    eval_sampling_params = ParamsOf("eval_sampling_kwargs", EvalSamplingParams)
    at_k_params = ParamsOf("pass_at_k_kwargs", AtKParams)
