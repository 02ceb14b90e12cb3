"""The forecast of `prefrl doctor --costs` beside measurements, and for 8, 64 and 512 devices.

    python -m benchmarks.forecast check     measure runs on one thread of a CPU and forecast others from two of them
    python -m benchmarks.forecast table     7B and 70B, from the costs that are assumed below

Seconds are those of the CPU, so that other work on the machine does not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.doctor import ONLINE, OPTIONS, write_rows

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
# Options of the runs that are measured; the first two give the costs.
MEASURED = ("--log_flops", "--max_steps", "5", "--ignore_eos", "true", "--logging_steps", "1")
RUNS: dict[str, dict[str, int | float]] = {
    "4 completions of 32 tokens": {"per_device_train_batch_size": 4, "max_completion_length": 32},
    "16 completions of 64 tokens": {"per_device_train_batch_size": 16, "max_completion_length": 64},
    "8 completions of 64 tokens": {"per_device_train_batch_size": 8, "max_completion_length": 64},
    "16 completions of 128 tokens": {"per_device_train_batch_size": 16, "max_completion_length": 128},
    "32 completions of 32 tokens": {"per_device_train_batch_size": 32, "max_completion_length": 32},
    "16 completions of 64 tokens, 8 of a prompt": {
        "per_device_train_batch_size": 16,
        "max_completion_length": 64,
        "num_generations": 8,
    },
    "16 completions of 64 tokens, 2 micro-batches": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 64,
    },
}
# What the table assumes of a GPU: 40 % of 989 TFLOP/s, 60 % of 3.35 TB/s, and 50 GB/s of network.
FLOPS, MEMORY, NETWORK = 0.4 * 989e12, 0.6 * 3.35e12, 50e9
# Weights, layers, bytes of keys and values of a token, and devices of a server, in bfloat16.
MODELS = {"7B": (7.6e9, 2 * 28 * 4 * 128 * 2, 1), "70B": (70.6e9, 2 * 80 * 8 * 128 * 2, 8)}
COMPLETIONS, MEAN, LONGEST, PROMPT, OF_A_PROMPT = 32, 2_000, 8_192, 500, 16  # completions for each device
PASSES = 3  # forward, and twice as much backward
AHEAD = 4


def check() -> None:
    """Measure all runs, and forecast each from the first two."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _prepare()
        context = multiprocessing.get_context("spawn")
        print(
            "| run | measured, CPU s | forecast | ratio | generation | training |",
            "|---|---|---|---|---|---|",
            sep="\n",
        )
        for number, name in enumerate(RUNS):
            process = context.Process(target=_measure, args=(name, f"run{number}"))
            process.start()
            process.join()
            assert process.exitcode == 0, name
        for number, name in enumerate(RUNS):
            print("|", " | ".join((name, *_compared(name, f"run{number}"))), "|", flush=True)


def _prepare() -> None:
    from tests.assets import tiny_model, tiny_tokenizer

    tiny_model(**(HEADS | SIZES)).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    write_rows("grpo", 1)


def _options(name: str, output_dir: str) -> tuple[Any, Any, Any]:
    from prefrl.registry import REGISTRY
    from prefrl.scripts.inputs import options_of, read

    given = [word for option, value in RUNS[name].items() for word in (f"--{option}", str(value))]
    argv = ["--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", output_dir, "--use_cpu"]
    argv += [*OPTIONS, *ONLINE, *MEASURED, *given]  # the last word counts
    return REGISTRY["grpo"], *options_of(REGISTRY["grpo"], read(REGISTRY["grpo"], argv))


def _measure(name: str, output_dir: str) -> None:
    time.perf_counter = time.process_time  # of which phases are measured
    import torch

    from prefrl.rewards.named import reward_by_name
    from prefrl.scripts.inputs import datasets_of

    torch.set_num_threads(1)
    row, script, config = _options(name, output_dir)
    dataset, _ = datasets_of(script, config)
    rewards = [reward_by_name(name) for name in script.reward_funcs]
    trainer = row.load_trainer()(model="model", args=config, train_dataset=dataset, reward_funcs=rewards)
    trainer.train()
    trainer.end()


def _compared(name: str, output_dir: str) -> tuple[str, ...]:
    from prefrl.run.folder import read_metrics
    from prefrl.scripts.checkup.dataset import Batches, check_rows
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.forecast import Costs, forecast, work_of
    from prefrl.scripts.checkup.subject import Subject
    from prefrl.scripts.inputs import datasets_of

    row, script, config = _options(name, output_dir)
    subject = Subject(row, script, config)
    raw, evaluated = datasets_of(script, config)
    rows = check_rows(Section("Rows"), subject, raw, evaluated)
    costs = Costs.read(["run0", "run1"])
    work = work_of(subject, rows, Batches.of(subject, len(raw)), costs)
    found = forecast(work, costs, trainers=1, servers=1)
    steps = [step for step in read_metrics(Path(output_dir)) if step.get("step", 0) > 1 and "step_time" in step]
    measured = statistics.median(step["step_time"] for step in steps)
    generation = statistics.median(step["time/generation_s"] for step in steps)
    training = statistics.median(
        sum(step.get(f"time/{x}_s", 0) for x in ("forward", "backward", "reference")) for step in steps
    )
    return (
        f"{measured:.2f}",
        f"{found['step']:.2f}",
        f"{found['step'] / measured:.2f}",
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
