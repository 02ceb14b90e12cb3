"""CPU seconds of one policy-gradient loss step (forward and backward) by each plan of `token_logprobs`, on equal work.

    OMP_NUM_THREADS=1 python -m benchmarks.loss_step

All plans use the same chunked head on response positions only, so the ratios show what padding and repeated prompts
cost. Plans are timed in alternation; a ratio is printed only if the losses and gradients of all plans agree.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefrl.models.forward import token_logprobs
from prefrl.models.plans import ForwardPlan
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

PLANS: tuple[ForwardPlan, ...] = get_args(ForwardPlan)
LENGTHS = (16, 28, 40, 56, 72, 90, 110, 128)
LONG_LENGTHS = (32, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class Model:
    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    vocab_size: int

    def build(self) -> nn.Module:
        config = AutoConfig.for_model(
            "qwen2",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    num_prompts: int
    prompt_length: int
    response_lengths: tuple[int, ...]

    def batch(self, vocab_size: int) -> TokenBatch:
        generator = torch.Generator().manual_seed(1)
        num_tokens = self.num_prompts * sum(self.response_lengths)
        group = tuple(prompt for prompt in range(self.num_prompts) for _ in self.response_lengths)
        return TokenBatch(
            prompt_ids=torch.randint(vocab_size, (self.num_prompts * self.prompt_length,), generator=generator),
            prompt_lengths=(self.prompt_length,) * self.num_prompts,
            prompt_index=group,
            response_ids=torch.randint(vocab_size, (num_tokens,), generator=generator),
            response_lengths=self.response_lengths * self.num_prompts,
            trainable=torch.ones(num_tokens, dtype=torch.bool),
            group_index=group,
            advantages=torch.randn(num_tokens, generator=generator),
        )


MODELS = {
    "S": Model(hidden_size=256, layers=4, intermediate_size=768, heads=4, vocab_size=8192),
    "A": Model(hidden_size=512, layers=8, intermediate_size=2048, heads=8, vocab_size=32000),
}
WORKLOADS = [
    Workload("S, 1 prompt of 256 x 8", "S", 1, 256, LENGTHS),
    Workload("S, 1 prompt of 64 x 8, responses 32..256", "S", 1, 64, LONG_LENGTHS),
    Workload("S, 4 prompts of 128 x 8", "S", 4, 128, LENGTHS),
    Workload("A, 1 prompt of 256 x 8", "A", 1, 256, LENGTHS),
]


@dataclass(frozen=True)
class Step:
    cpu_s: float
    wall_s: float
    loss: float
    gradient: Tensor  # all parameters, flat


def step(model: nn.Module, batch: TokenBatch, plan: ForwardPlan) -> Step:
    model.zero_grad(set_to_none=True)
    wall, cpu = time.perf_counter(), time.process_time()
    logprobs = token_logprobs(model, batch, plan=plan).logprobs
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(ratio * batch.advantages).mean() + 0.01 * logprobs.mean()
    loss.backward()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return Step(cpu, wall, loss.item(), gradient)


def run(workload: Workload, repetitions: int) -> dict[ForwardPlan, list[Step]]:
    """Steps of each plan in alternation, after one warm-up each.

    Raises:
        SystemExit: Plans disagree, so their times compare different work.
    """
    shape = MODELS[workload.model]
    model, batch = shape.build(), workload.batch(shape.vocab_size)
    warm = {plan: step(model, batch, plan) for plan in PLANS}
    reference = warm["padded"]
    for plan, result in warm.items():
        gradient_difference = ((result.gradient - reference.gradient).norm() / reference.gradient.norm()).item()
        if abs(result.loss - reference.loss) > 1e-5 or not gradient_difference <= 1e-5:
            raise SystemExit(f"{workload.name}, {plan}: gradients differ by {gradient_difference:.1e}, relative")
    del warm, reference
    steps: dict[ForwardPlan, list[Step]] = {plan: [] for plan in PLANS}
    for _ in range(repetitions):
        for plan in PLANS:
            result = step(model, batch, plan)
            steps[plan].append(Step(result.cpu_s, result.wall_s, result.loss, torch.empty(0)))
    return steps


def row(workload: Workload, steps: dict[ForwardPlan, list[Step]]) -> str:
    def ratio(plan: ForwardPlan) -> float:
        pairs = zip(steps["padded"], steps[plan], strict=True)
        return median(padded.cpu_s / ours.cpu_s for padded, ours in pairs)

    cells: list[Any] = [workload.name, *(f"{median(s.cpu_s for s in steps[plan]):.3f}" for plan in PLANS)]
    cells += [f"{median(s.wall_s for s in steps[plan]):.3f}" for plan in PLANS]
    cells += [f"{ratio('packed'):.2f}", f"**{ratio('shared_prefix'):.2f}**"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["S"])
    arguments = parser.parse_args()
    print(
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, {arguments.repetitions} repetitions, medians"
    )
    heads = ["workload", *(f"{plan}, CPU s" for plan in PLANS), *(f"{plan}, wall s" for plan in PLANS)]
    heads += ["padded / packed", "padded / shared_prefix"]
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for workload in WORKLOADS:
        if workload.model in arguments.models:
            print(row(workload, run(workload, arguments.repetitions)), flush=True)


if __name__ == "__main__":
    main()
