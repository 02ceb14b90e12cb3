"""Which optimizers learn, resume exactly, and make the update of one process under ZeRO-2 and FSDP2.

    python -m benchmarks.optimizers               writes the table to results/optimizers.md
    python -m benchmarks.optimizers NAME ...      prints the rows of some

Each learns the sums of `prefrl demo` from examples. Then a tiny model is trained, and trained again from a checkpoint
on the way, alone and on two gloo processes; what prefrl refuses under a backend is tried there, too. The optimizers
are those of prefrl, and of transformers those that need no package besides bitsandbytes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from prefrl import SFTConfig, SFTTrainer, distributed
from prefrl.errors import ConfigError
from prefrl.options.optimizers import OPTIMIZERS
from prefrl.scripts.demo import make_model, make_questions, make_tokenizer
from prefrl.trainer import optimizers
from prefrl.trainer.optimizers import works_under
from tests.distributed.backends import enter
from tests.distributed.cases import Case
from tests.distributed.worker import make, weights_of
from tests.launch import launch

RESULTS = Path(__file__).parent / "results" / "optimizers.md"
BACKENDS = {"single": "", "zero2": "ZeRO", "fsdp2": "FSDP2"}
STEPS, SAVED_AT = 6, 3
DEMO_STEPS, DEMO_ROWS, LAST = 60, 64, 10
OF_TRANSFORMERS = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd", "adamw_8bit", "paged_adamw_32bit"),
    *("paged_adamw_8bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit", "paged_lion_8bit"),
    "rmsprop_bnb_8bit",
)
# Rates at which the models learn in a few steps; for the others 2e-3.
RATES = {
    **{"adadelta": 1.0, "asgd": 0.3, "lars": 3.0, "sgd": 0.3, "sgd_8bit": 0.03, "radam": 1e-2, "muon": 5e-3},
    **{"adagrad": 1e-2, "adagrad_8bit": 1e-2, "lamb": 1e-2, "lion_32bit": 5e-4, "lion_8bit": 5e-4},
    **{"paged_lion_8bit": 5e-4, "adafactor": 5e-3},
}
# As in the tests: a small epsilon would make full steps of gradients that are rounding alone.
EPSILON = {"adam_epsilon": 1e-4}
READS_IT = ("adamw", "ademamix")


def options_of(name: str) -> dict[str, Any]:
    """The options that every training with an optimizer has."""
    return {"optim": name, "learning_rate": RATES.get(name, 2e-3), "max_grad_norm": 1.0}


def learn(name: str, folder: Path) -> list[float]:
    """The loss of each step while the demo's model learns sums."""
    config = SFTConfig(
        **options_of(name),
        output_dir=str(folder / "demo"),
        max_steps=DEMO_STEPS,
        per_device_train_batch_size=DEMO_ROWS,
        lr_scheduler_type="constant",
        logging_steps=1,
        **{"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
    )
    train, _ = make_questions(seed=0)
    rows = train.select(range(DEMO_STEPS * DEMO_ROWS)).remove_columns("answer")
    trainer = SFTTrainer(make_model(seed=0), config, train_dataset=rows, processing_class=make_tokenizer())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(name: str, backend: str, folder: Path) -> dict[str, Any]:
    """Train, and train again from a checkpoint on the way; what happened."""
    reads_epsilon = "eps" in OPTIMIZERS[name].reads if name in OPTIMIZERS else any(part in name for part in READS_IT)
    options = {**options_of(name), **(EPSILON if reads_epsilon else {}), **enter(backend, folder), "rows": 48}
    options |= {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED_AT}
    try:
        whole = make(name, Case("sft"), folder, **options)
        before = weights_of(whole)
        whole.train()
        after = weights_of(whole)
        resumed = make(name, Case("sft"), folder, **options | {"save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{SAVED_AT}"))
        again = weights_of(resumed)
    except ConfigError:
        return {"failed": "refused"}
    except Exception as error:
        print(f"{backend} {name}: {error!r}", file=sys.stderr)
        return {"failed": type(error).__name__}
    return {
        "update": torch.cat([(after[key] - before[key]).flatten() for key in before]),
        "is_exact": all(torch.equal(value, again[key]) for key, value in after.items()),
    }


def worker(backend: str, folder: Path, names: list[str]) -> None:
    """One process."""
    optimizers.works_under = lambda name: dict.fromkeys(works_under(name), True)
    results = {}
    for name in names:
        print(backend, name, file=sys.stderr, flush=True)
        results[name] = train(name, backend, folder)
        if backend == "single":
            results[name]["losses"] = learn(name, folder)
    if distributed.is_main():
        torch.save(results, folder / f"{backend}.pt")


def cell(name: str, backend: str, result: dict[str, Any], alone: dict[str, Any]) -> str:
    """What a backend did, in a cell of the table."""
    works = works_under(name).get(BACKENDS[backend], True)
    if "failed" in result:
        return f"refused ({result['failed']})" if not works else result["failed"]
    distance = float((result["update"] - alone["update"]).norm() / alone["update"].norm())
    exact = "exact" if result["is_exact"] else "NOT EXACT"
    return f"{distance:.0e}, {exact}" if works else f"refused ({distance:.0e})"


def table(names: list[str]) -> str:
    """The table, with a row for each optimizer."""
    with tempfile.TemporaryDirectory(prefix="prefrl-optimizers-") as path:
        found = {}
        for backend in BACKENDS:
            folder = Path(path, backend)
            folder.mkdir()
            processes, result = 1 if backend == "single" else 2, folder / f"{backend}.pt"
            arguments = ("worker", backend, folder, *names)
            found[backend] = launch(
                "benchmarks.optimizers", *arguments, result=result, num_processes=processes, seconds=3600
            )
    lines = ["| `optim` | rate | loss on sums | resumed | ZeRO-2 | FSDP2 |", "|---|---|---|---|---|---|"]
    for name in names:
        alone = found["single"][name]
        losses = alone["losses"]
        cells = [cell(name, backend, found[backend][name], alone) for backend in ("zero2", "fsdp2")]
        learns = f"{losses[0]:.2f}, {statistics.fmean(losses[-LAST:]):.2f}"
        exact = "exact" if alone["is_exact"] else "NOT EXACT"
        lines.append(f"| `{name}` | {RATES.get(name, 2e-3):g} | {learns} | {exact} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """The command."""
    if arguments[:1] == ["worker"]:
        worker(arguments[1], Path(arguments[2]), arguments[3:])
        return
    text = table(arguments or [*OPTIMIZERS, *OF_TRANSFORMERS])
    print(text)
    if not arguments:
        RESULTS.write_text(f"Measured by `python -m benchmarks.optimizers`.\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
