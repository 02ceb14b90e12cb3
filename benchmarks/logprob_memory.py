"""Peak memory and CPU time of token log-probs, forward and backward: in chunks, and from the full logits.

Each case runs in a fresh process. Its memory growth is the peak resident memory of the case (VmHWM, reset just before)
minus the resident memory before it. It includes the gradients of hidden states and head, which every method returns.

    python benchmarks/logprob_memory.py --vocab 150000 --tokens 4096 --hidden 256
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.module_logprobs import module_logprobs
from prefrl.losses.per_token import WantName

MIB = 2**20
ENTROPY: tuple[WantName, ...] = ("entropy",)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, *, want: tuple[WantName, ...]) -> list[Tensor]:
    scores = chunked_logprobs(hidden, targets, Head(weight), temperature=1.0, want=want)
    return [scores.logprobs] if scores.entropy is None else [scores.logprobs, scores.entropy]


def module(hidden: Tensor, weight: Tensor, targets: Tensor, *, want: tuple[WantName, ...]) -> list[Tensor]:
    scores = module_logprobs(hidden, targets, lambda rows: rows @ weight.t(), temperature=1.0, want=want)
    return [scores.logprobs] if scores.entropy is None else [scores.logprobs, scores.entropy]


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    log_probs = (hidden @ weight.t()).log_softmax(1)
    return [log_probs.gather(1, targets[:, None]).squeeze(1)]


Method = Callable[[Tensor, Tensor, Tensor], list[Tensor]]
CASES: dict[str, Method] = {
    "full logits": full,
    "chunked": partial(chunked, want=()),
    "chunked + entropy": partial(chunked, want=ENTROPY),
    "module (checkpointed chunks)": partial(module, want=()),
}


def inputs(tokens: int, hidden_size: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, generator=generator) / hidden_size**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator)


def step(method: Method, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    total = torch.stack([output.sum() for output in method(hidden, weight, targets)]).sum()
    total.backward()
    return float(total.detach())


def memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure(method: Method, arguments: argparse.Namespace) -> dict[str, float]:
    dtype = getattr(torch, arguments.dtype)
    step(method, *inputs(16, arguments.hidden, 64, dtype))  # libraries loaded, threads started
    leaves = inputs(arguments.tokens, arguments.hidden, arguments.vocab, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, started = memory_kib("VmRSS"), time.process_time()
    total = step(method, *leaves)
    return {
        "growth_mib": (memory_kib("VmHWM") - before) / 1024,
        "cpu_s": time.process_time() - started,
        "mean": total / arguments.tokens,
    }


def measure_in_fresh_process(case: str, arguments: argparse.Namespace) -> dict[str, float] | None:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("vocab", "tokens", "hidden", "dtype", "threads")]
    command = [sys.executable, __file__, f"--case={case}", *sizes]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    # If the kernel kills a process because of its memory, that is a result and not an error of the benchmark.
    return json.loads(result.stdout) if result.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=list(CASES), help="measure this case in this process, print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        print(json.dumps(measure(CASES[arguments.case], arguments)))
        return
    sizes = f"{arguments.tokens} tokens, hidden {arguments.hidden}, vocabulary {arguments.vocab}"
    print(f"{sizes}, {arguments.dtype}, {arguments.threads} thread(s), forward + backward")
    print(f"one [N, V] float32 tensor: {arguments.tokens * arguments.vocab * 4 / MIB:.0f} MiB")
    print(f"gradient of the head, in float32: {arguments.vocab * arguments.hidden * 4 / MIB:.0f} MiB\n")
    print(f"{'case':30}{'peak growth MiB':>18}{'CPU s':>10}{'mean of outputs':>18}")
    for case in CASES:
        found = measure_in_fresh_process(case, arguments)
        if found is None:
            print(f"{case:30}{'out of memory, or failed':>46}")
        else:
            print(f"{case:30}{found['growth_mib']:>18.0f}{found['cpu_s']:>10.1f}{found['mean']:>18.4f}")


if __name__ == "__main__":
    main()
