"""Which optimizers learn, resume exactly, and make the update of one process under ZeRO-2 and FSDP2.

    python -m benchmarks.optimizers [NAME ...]     prints the table of docs/optimizers.md
    python -m benchmarks.optimizers --write-docs   puts it there

SFT of a tiny model on two gloo processes. The optimizers are those of prefrl, and of transformers those that need no
package besides bitsandbytes. With `--anyway`, those that prefrl refuses under a backend are tried, too.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.trainer.base import optimized
from prefrl.trainer.base.optimizers import OPTIMIZERS
from tests.distributed.backends import enter
from tests.distributed.cases import Case
from tests.distributed.worker import make, weights_of
from tests.launch import launch

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
BACKENDS = ("single", "zero2", "fsdp2")
STEPS = 6
SAVED_AT = 3
OF_TRANSFORMERS = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd", "adamw_8bit", "paged_adamw_32bit"),
    *("paged_adamw_8bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit", "paged_lion_8bit"),
    "rmsprop_bnb_8bit",
)
# Rates at which a tiny model learns in a few steps.
RATES = {"adadelta": 1.0, "asgd": 0.1, "lars": 1.0, "sgd": 0.1, "sgd_8bit": 0.02, "rprop": 1e-3, "muon": 1e-2}
# As in the tests: a small epsilon would make full steps of gradients that are rounding alone.
EPSILON = {"adam_epsilon": 1e-4}
READS_IT = ("adamw", "ademamix")


def options_of(name: str) -> dict[str, Any]:
    """The options of a training."""
    options: dict[str, Any] = {"optim": name, "learning_rate": RATES.get(name, 3e-3), "max_grad_norm": 1.0}
    reads = "eps" in OPTIMIZERS[name].reads if name in OPTIMIZERS else any(part in name for part in READS_IT)
    options |= {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED_AT}
    return options | (EPSILON if reads else {})


def train(name: str, backend: str, folder: Path) -> dict[str, Any]:
    """Train, and train again from a checkpoint on the way; what happened."""
    options, case = {**options_of(name), **enter(backend, folder), "rows": 48}, Case("sft")
    try:
        whole = make(name, case, folder, **options)
        before = weights_of(whole)
        whole.train()
        after = weights_of(whole)
        resumed = make(name, case, folder, **options | {"save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{SAVED_AT}"))
        again = weights_of(resumed)
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    return {
        "losses": losses,
        "update": torch.cat([(after[key] - before[key]).flatten() for key in before]),
        "resumed": all(torch.equal(value, again[key]) for key, value in after.items()),
    }


def worker(backend: str, folder: Path, names: list[str]) -> None:
    """One process."""
    results = {}
    if "--anyway" in names:
        names.remove("--anyway")
        optimized.works_under = lambda name: {"ZeRO": True, "FSDP2": True}
    for name in names:
        print(backend, name, file=sys.stderr, flush=True)
        results[name] = train(name, backend, folder)
    if distributed.is_main():
        torch.save(results, folder / f"{backend}.pt")


def cell(result: dict[str, Any], alone: dict[str, Any]) -> str:
    """What a backend did, in a cell of the table."""
    if "refused" in result:
        return "refused"
    if "failed" in result:
        return result["failed"]
    distance = float((result["update"] - alone["update"]).norm() / alone["update"].norm())
    return f"{distance:.0e}, {'exact' if result['resumed'] else 'NOT EXACT'}"


def table(names: list[str], *extra: str) -> str:
    """The table, with a row for each optimizer."""
    with tempfile.TemporaryDirectory(prefix="prefrl-optimizers-") as path:
        found = {}
        for backend in BACKENDS:
            folder = Path(path, backend)
            folder.mkdir()
            arguments = ("worker", backend, folder, *names, *extra)
            processes = 1 if backend == "single" else 2
            result = folder / f"{backend}.pt"
            found[backend] = launch("benchmarks.optimizers", *arguments, result=result, num_processes=processes)
    lines = [
        f"| `optim` | loss of steps 1 and {STEPS} | one process, resumed | ZeRO-2 | FSDP2 |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        alone = found["single"][name]
        if "losses" not in alone:
            lines.append(f"| `{name}` | {alone} | | | |")
            continue
        learns = f"{alone['losses'][0]:.2f}, {alone['losses'][-1]:.2f}"
        cells = [cell(found[backend][name], alone) for backend in ("zero2", "fsdp2")]
        lines.append(f"| `{name}` | {learns} | {'exact' if alone['resumed'] else 'NOT EXACT'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """The command."""
    if arguments[:1] == ["worker"]:
        worker(arguments[1], Path(arguments[2]), arguments[3:])
        return
    flags = [argument for argument in arguments if argument.startswith("--")]
    names = [argument for argument in arguments if argument not in flags] or [*OPTIMIZERS, *OF_TRANSFORMERS]
    text = table(names, *(flag for flag in flags if flag == "--anyway"))
    print(text)
    if "--write-docs" in flags:
        page = PAGE.read_text(encoding="utf-8")
        marked = re.compile(r"(<!-- measured -->\n).*?(\n<!-- end of measured -->)", re.S)
        PAGE.write_text(marked.sub(lambda part: f"{part[1]}\n{text}\n{part[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
