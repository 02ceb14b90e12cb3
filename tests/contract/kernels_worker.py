"""Run by test_kernels.py: Liger's real kernels in Triton's interpreter, against the models without them.

`kernels_worker RESULT CASE...` writes a JSON file with a `Finding` for each case.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from prefrl.models import kernels as liger
from prefrl.models import selfcheck
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.kernels import apply_liger, liger_options
from prefrl.models.plans import ForwardPlan
from prefrl.types import TokenBatch
from tests import interpreter
from tests.assets import tiny_model
from tests.vlms import tiny_vlm

PACKAGES = ("liger-kernel", "triton", "torch", "transformers")
ALL = "norms, MLPs, rotary"
NO_ROTARY = "norms, MLPs"


@dataclass(frozen=True)
class Case:
    """A model, and which of its parts Liger replaces."""

    make: Callable[[], PreTrainedModel]
    kernels: str = ALL
    options: Mapping[str, bool] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    cannot: str = ""  # what is said if the interpreter, or this version of Liger, cannot run it


@dataclass
class Finding:
    """What came of a case; plans that the model does not support without Liger either are left out."""

    kernels: str = ""
    # plan -> relative differences, by norm, of the log-probs and of their gradient from those without Liger
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # plans that only the model without Liger supports
    error: str = ""
    cpu_seconds: float = 0.0


def small(architecture: str, *, num_hidden_layers: int = 1, **sizes: Any) -> Callable[[], PreTrainedModel]:
    """One layer: the interpreter takes a second for a few tokens."""
    return lambda: tiny_model(architecture, num_hidden_layers=num_hidden_layers, **sizes)


_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DENSE = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "olmo3"),
    *("granite", "smollm3", "exaone4", "hunyuan_v1_dense"),
)
_SPARSE = ("mixtral", "qwen3_moe", "hunyuan_v1_moe")

CASES = {
    **{name: Case(small(name)) for name in _DENSE},
    "gemma3_text": Case(small("gemma3_text", num_hidden_layers=2, sliding_window=3)),
    **{name: Case(small(name), NO_ROTARY) for name in ("gemma4_text", "glm4", "qwen3_5_text")},
    "gpt_oss": Case(small("gpt_oss", **_EXPERTS), "norms, rotary"),
    "deepseek_v4": Case(small("deepseek_v4", **_EXPERTS), "norms"),
    # Without the MLPs: those of experts are below.
    **{name: Case(small(name, **_EXPERTS), "norms, rotary", {"swiglu": False}) for name in _SPARSE},
}
_BY_BITS = "hidden states of this .* change by a relative nan"  # of a bfloat16, the interpreter multiplies the bits
_IMPORT = "Liger fails on a .*: cannot import name"  # transformers 5.23 has some classes of outputs no more
_NO_GPU = "0 active drivers"  # Liger asks Triton for the GPU, to size the products of experts
CANNOT = {
    "llama in bfloat16": Case(small("llama"), dtype=torch.bfloat16, cannot=_BY_BITS),
    "qwen3_5_moe_text": Case(small("qwen3_5_moe_text", **_EXPERTS), cannot=_IMPORT),
    "qwen2_5_vl": Case(lambda: tiny_vlm("qwen2_5_vl")[0], cannot=_IMPORT),
    **{f"experts of {name}": Case(small(name, **_EXPERTS), cannot=_NO_GPU) for name in _SPARSE},
}


def batch() -> TokenBatch:
    """Three rows of two prompts, not in the order of the prompts; one response has one token."""
    generator = torch.Generator().manual_seed(0)
    prompt_lengths, response_lengths, prompt_index = (3, 1), (2, 1, 4), (1, 0, 0)
    return TokenBatch(
        prompt_ids=torch.randint(2, 120, (sum(prompt_lengths),), generator=generator),
        prompt_lengths=prompt_lengths,
        prompt_index=prompt_index,
        response_ids=torch.randint(2, 120, (sum(response_lengths),), generator=generator),
        response_lengths=response_lengths,
        trainable=torch.ones(sum(response_lengths), dtype=torch.bool),
        group_index=prompt_index,
    )


def numbers(model: PreTrainedModel, plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a sum of them with weights that differ."""
    model.zero_grad(set_to_none=True)
    logprobs = token_logprobs(model, batch(), plan=plan).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    gradient = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return logprobs.detach().float(), torch.cat(gradient)


def replaced(model: PreTrainedModel) -> str:
    """Which parts of the model Liger replaced, as `Case.kernels` has them."""
    patched = [type(m).__name__ for m in model.modules() if liger._is_ligers(vars(m).get("forward"))]
    rotary = [v for code in liger._code_of(model) for v in vars(code).values() if isinstance(v, liger._Rotary)]
    found = {
        "norms": any(name.endswith("Norm") for name in patched),
        "MLPs": any(not name.endswith("Norm") for name in patched),
        "rotary": bool(rotary),
    }
    return ", ".join(name for name, is_there in found.items() if is_there)


def compare(case: Case) -> Finding:
    """Run the model with and without Liger's kernels."""
    started, model = time.process_time(), case.make()
    supported = [plan for plan in get_args(ForwardPlan) if plan not in verdict_of(model).reasons]
    expected = {plan: numbers(copy.deepcopy(model), plan) for plan in supported}
    found = Finding()
    model = model.to(case.dtype)
    try:
        apply_liger(model, liger_options(case.options))
        found.kernels = replaced(model)
        found.lost = [plan for plan in supported if plan in verdict_of(model).reasons]
        for plan in supported:
            pairs = zip(numbers(model, plan), expected[plan], strict=True)
            logprobs, gradient = (float((a - b).norm() / b.norm()) for a, b in pairs)
            found.differences[plan] = logprobs, gradient
    except Exception as error:  # the interpreter raises what it likes; the test compares the words
        found.error = f"{type(error).__name__}: {error}"
    return replace(found, cpu_seconds=round(time.process_time() - started, 1))


def main(result: str, *names: str) -> None:
    """Run the named cases, one after another."""
    interpreter.repair()
    # Elsewhere, tensors on the CPU go to the original function, since Triton's kernels do not run there.
    liger._Rotary.__call__ = lambda self, *args, **kwargs: self.fused(*args, **kwargs)  # type: ignore[method-assign]
    # Its own rows are longer, and would take the most of the time.
    selfcheck._random_batch = lambda model: batch()
    findings = {}
    for name in names:
        findings[name] = asdict(compare({**CASES, **CANNOT}[name]))
        print(name, findings[name], file=sys.stderr, flush=True)
    text = {"versions": {name: version(name).partition("+")[0] for name in PACKAGES}, "findings": findings}
    Path(result).write_text(json.dumps(text), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
