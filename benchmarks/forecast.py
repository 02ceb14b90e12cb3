"""The forecast of `prefrl doctor --costs` beside measurements, and for 8, 64 and 512 devices.

    python -m benchmarks.forecast check     measure runs on one thread of a CPU and forecast others from two of them
    python -m benchmarks.forecast table     7B and 70B, from the costs that are assumed below

Seconds are those of the CPU, so that other work on the machine does not count. Where a run has two processes, they are
those of one of them: what it waits for the other one, or for the network, is not among them. Where it samples on a
server, that is a stub, and only the server's time is simulated: the clock is the CPU seconds of training and what it
has waited for completions.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.doctor import ONLINE, OPTIONS, write_rows

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
# Options of the runs that are measured.
MEASURED = ("--log_flops", "--max_steps", "5", "--ignore_eos", "true", "--logging_steps", "1")


def _run(completions: int, tokens: int, **more: int | str) -> dict[str, int | str]:
    """Of a process."""
    return {"per_device_train_batch_size": completions, "max_completion_length": tokens, **more}


def _served(completions: int, tokens: int, **more: int | str) -> dict[str, int | str]:
    """By the stub of a server, which ends most completions early."""
    return _run(completions, tokens, use_vllm="true", ignore_eos="false", max_steps=12, **more)


def _async(completions: int, tokens: int, staleness: int) -> dict[str, int | str]:
    return _served(completions, tokens, generation_mode="async", max_staleness=staleness)


# In each part, the first two runs give the costs.
LOCAL = {
    "4 completions of 32 tokens": _run(4, 32),
    "16 completions of 64 tokens": _run(16, 64),
    "8 completions of 64 tokens": _run(8, 64),
    "16 completions of 128 tokens": _run(16, 128),
    "32 completions of 32 tokens": _run(32, 32),
    "16 completions of 64 tokens, 8 of a prompt": _run(16, 64, num_generations=8),
    "16 completions of 64 tokens, 2 micro-batches": _run(8, 64, gradient_accumulation_steps=2),
    "2 processes, each 8 completions of 64 tokens": _run(8, 64, num_processes=2),
    "2 processes, each 16 completions of 128 tokens": _run(16, 128, num_processes=2),
    "2 processes, each 4 completions of 32 tokens": _run(4, 32, num_processes=2),
}
SERVED = {
    "sync, 8 completions of up to 512 tokens": _served(8, 512),
    "sync, 32 completions of up to 512 tokens": _served(32, 512),
    "sync, 16 completions of up to 512 tokens": _served(16, 512),
    "async, `max_staleness` 1, 32 completions of up to 512": _async(32, 512, 1),
    "async, `max_staleness` 4, 32 completions of up to 512": _async(32, 512, 4),
    "async, `max_staleness` 1, 16 completions of up to 64": _async(16, 64, 1),
    "async, `max_staleness` 1, 16 completions of up to 512": _async(16, 512, 1),
    "async, `max_staleness` 4, 16 completions of up to 512": _async(16, 512, 4),
}
RUNS = LOCAL | SERVED
# Seconds that the stub spends on a decoding step, and on each of its tokens in addition; tokens of a completion.
DECODE_STEP, DECODE_TOKEN, MEAN_LENGTH = 0.01, 0.0005, 40
# What the table assumes of a GPU: 40 % of 989 TFLOP/s, 60 % of 3.35 TB/s, and 50 GB/s of network.
FLOPS, MEMORY, NETWORK = 0.4 * 989e12, 0.6 * 3.35e12, 50e9
# Weights, layers, bytes of keys and values of a token, and devices of a server, in bfloat16.
MODELS = {"7B": (7.6e9, 2 * 28 * 4 * 128 * 2, 1), "70B": (70.6e9, 2 * 80 * 8 * 128 * 2, 8)}
COMPLETIONS, MEAN, LONGEST, PROMPT, OF_A_PROMPT = 32, 2_000, 8_192, 500, 16  # completions for each device
PASSES = 3  # forward, and twice as much backward
AHEAD = 4


def check() -> None:
    """Measure all runs, and forecast each from the first two of its part."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _prepare()
        for name in RUNS:
            _train(name)
        print(
            "| run | measured, s | forecast | ratio | generation | training |",
            "|---|---|---|---|---|---|",
            sep="\n",
        )
        for part in (LOCAL, SERVED):
            for name in part:
                print("|", " | ".join((name, *_compared(name, [*part][:2]))), "|", flush=True)


def _train(name: str) -> None:
    """One run, in processes of its own."""
    from tests.vllm.server import free_port

    context = multiprocessing.get_context("spawn")
    count, port = int(RUNS[name].get("num_processes", 1)), free_port()
    ranks = [context.Process(target=_measure, args=(name, rank, count, port)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not any(rank.exitcode for rank in ranks), name


def _prepare() -> None:
    from tests.assets import tiny_model, tiny_tokenizer

    tiny_model(**(HEADS | SIZES)).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    write_rows("grpo", 1)


def _options(name: str) -> tuple[Any, Any, Any]:
    from prefrl.registry import REGISTRY
    from prefrl.scripts.inputs import options_of, read

    options = {key: value for key, value in RUNS[name].items() if key != "num_processes"}
    given = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    argv = ["--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", name, "--use_cpu"]
    argv += [*OPTIONS, *ONLINE, *MEASURED, *given]  # the last word counts
    processes = int(RUNS[name].get("num_processes", 1))
    return REGISTRY["grpo"], *options_of(REGISTRY["grpo"], read(REGISTRY["grpo"], argv), num_processes=processes)


def _measure(name: str, rank: int, count: int, port: int) -> None:
    if count > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {key: str(value) for key, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    server = Stub()
    time.perf_counter = server.now  # by which phases are measured
    import torch

    from prefrl.rewards.named import reward_by_name
    from prefrl.scripts.inputs import datasets_of

    torch.set_num_threads(1)
    row, script, config = _options(name)
    dataset, _ = datasets_of(script, config)
    rewards = [reward_by_name(name) for name in script.reward_funcs]
    trainer = row.load_trainer()(model="model", args=config, train_dataset=dataset, reward_funcs=rewards)
    if config.use_vllm:
        trainer.generator = server
    trainer.train()
    trainer.end()


class Stub:
    """A generator on a server that decodes all completions beside each other, on a clock that it shares with training.

    Completions are random: they end at each token with the same probability.
    """

    context_limit = None

    def __init__(self) -> None:
        self.skipped = 0.0  # seconds that were waited, less those that this simulation has taken
        self.time = 0.0  # until which it has decoded
        self.version = 0  # of the weights
        self.running: list[tuple[int, Asked, int]] = []  # decoding steps left, what it belongs to, number of the group

    def now(self) -> float:
        return time.process_time() + self.skipped

    def start(self, prompts: Sequence[Any], sampling: Any, *, seeds: Sequence[int], images: Any = None) -> Asked:
        from prefrl.types import Completion

        self.decode(self.now())
        self.time = max(self.time, self.now()) if not self.running else self.time
        began, asked = time.process_time(), Asked(self)
        for group, seed in enumerate(seeds):
            draw = random.Random(seed)
            completions = []
            for _ in range(sampling.num_samples):
                drawn = 1 + int(draw.expovariate(1 / MEAN_LENGTH))
                length, reason = min(sampling.max_tokens, drawn), "length" if drawn > sampling.max_tokens else "stop"
                ids = [draw.randrange(4, SIZES["vocab_size"]) for _ in range(length)]
                versions = [self.version] * length
                completions.append(Completion(ids, reason, [-4.0] * length, [True] * length, versions))
                self.running.append((length, asked, group))
            asked.groups[group] = completions
        self.skipped -= time.process_time() - began
        return asked

    def decode(self, until: float) -> None:
        """Decode up to a time, or until a group is finished."""
        began = time.process_time()
        while self.running and self.time < until:
            self.time += DECODE_STEP + DECODE_TOKEN * len(self.running)
            self.running = [(left - 1, *of) for left, *of in self.running if left > 1]  # type: ignore[misc]
        self.skipped -= time.process_time() - began

    def sync(self, weights: Any, *, version: int) -> None:
        self.version = version

    def invalidate(self) -> None: ...

    def close(self) -> None: ...


class Asked:
    """Completions that were requested; a `Pending`."""

    def __init__(self, server: Stub) -> None:
        self.server = server
        self.groups: dict[int, list[Any]] = {}

    def as_completed(self) -> Iterator[tuple[int, list[Any]]]:
        """All at once: a step learns from all of them."""
        while any(asked is self for _, asked, _ in self.server.running):
            self.server.decode(self.server.time + 1e-9)  # a decoding step
        self.server.skipped += max(0.0, self.server.time - self.server.now())
        yield from self.groups.items()

    def cancel(self) -> None: ...


def _compared(name: str, measured: Sequence[str]) -> tuple[str, ...]:
    from prefrl.run.folder import read_metrics
    from prefrl.scripts.checkup.dataset import Batches, check_rows
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.forecast import Costs, forecast_of, work_of
    from prefrl.scripts.checkup.subject import Subject
    from prefrl.scripts.inputs import datasets_of

    row, script, config = _options(name)
    subject = Subject(row, script, config)
    raw, evaluated = datasets_of(script, config)
    rows = check_rows(Section("Rows"), subject, raw, evaluated)
    costs = Costs.read(measured)
    found = forecast_of(subject, work_of(subject, rows, Batches.of(subject, len(raw)), costs), costs)
    steps = [step for step in read_metrics(Path(name)) if step.get("step", 0) > 1 and "step_time" in step]
    seconds = statistics.fmean(step["step_time"] for step in steps)
    generation = statistics.fmean(step["time/generation_s"] for step in steps)
    training = statistics.fmean(
        sum(step.get(f"time/{x}_s", 0) for x in ("forward", "backward", "reference")) for step in steps
    )
    return (
        f"{seconds:.2f}",
        f"{found['step']:.2f}",
        f"{found['step'] / seconds:.2f}",
        f"{generation:.2f}, {found['generation']:.2f}",
        f"{training:.2f}, {found['training']:.2f}",
    )


def table() -> None:
    """For each model and number of devices: the best split in each mode, and where the time goes."""
    from prefrl.scripts.checkup.forecast import MODES, Costs, Work, best_split

    names = ("model", "devices", "mode", "sample", "generation", "weights", "training", "step", "tokens/s a device")
    print(f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", sep="\n")
    for model, (weights, cached, of_server) in MODELS.items():
        costs = Costs(
            flops=FLOPS,
            decode_step=2 * weights / (of_server * MEMORY),
            decode_token=(2 * weights / FLOPS + (PROMPT + MEAN / 2) * cached / MEMORY) / of_server,
            mean_length=MEAN,
            weights=2 * weights / NETWORK,
            rest=0.5,
            network=NETWORK,
            devices_per_server=of_server,
        )
        for devices in (8, 64, 512):
            count = COMPLETIONS * devices
            tokens = count * (MEAN + PROMPT / OF_A_PROMPT)
            work = Work(2 * PASSES * weights * tokens, count, LONGEST, MEAN, int(2 * weights), 4)
            for mode in MODES:
                if devices <= of_server:
                    continue
                servers, found = best_split(work, costs, devices, mode, ahead=AHEAD)
                phases = (f"{found[phase]:.1f}" for phase in ("generation", "weights", "training", "step"))
                rate = count * MEAN / found["step"] / devices
                row = (model, str(devices), mode, str(servers * of_server), *phases, f"{rate:,.0f}")
                print("|", " | ".join(row), "|")


if __name__ == "__main__":
    {"check": check, "table": table}[sys.argv[1]]()
