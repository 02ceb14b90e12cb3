"""Compare loss and gradient norm of one step with TRL 1.16, with equal weights and rows, through both trainers.

    pip install -e '.[bench]' && python -m benchmarks.agreement_with_trl [--output values.json]

Policy and reference are different random models, so that no term is zero. `--output` stores TRL's values with a
description of the inputs, for the comparison in `tests/golden`, and those of a whole script for TRL.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from prefrl.registry import REGISTRY
from tests.golden.cases import AGREEMENT_CASES, AgreementCase, Inputs, inputs_of, model_beside, prefrl_values
from tests.golden.trl_script import SCRIPT, values_of

TOLERANCE = 1e-4


def trl_values(case: AgreementCase, inputs: Inputs | None = None) -> dict[str, float]:
    """The loss, gradient norm and metrics of TRL's first step, from those inputs or the case's own."""
    import trl

    if case.peer or case.trainer in ("orpo", "cpo"):
        from importlib import import_module

        module: Any = import_module(f"trl.experimental.{(case.peer or case.trainer).lower()}")
    else:
        module = trl
    row = REGISTRY[case.trainer]
    title = case.peer or row.config.partition(":")[2].removesuffix("Config")
    config_class, trainer_class = (getattr(module, f"{title}{kind}") for kind in ("Config", "Trainer"))
    inputs = inputs or inputs_of(case)
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=len(inputs.rows),
            learning_rate=1e-3,
            optim="sgd",
            max_grad_norm=1e9,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **case.trl_options,
            **case.trl,
        )
        extra = model_beside(case, inputs)
        trainer = trainer_class(
            inputs.model, args=args, train_dataset=inputs.rows, processing_class=inputs.tokenizer, **extra
        )
        trainer.train()
        return {key: value for key, value in trainer.state.log_history[0].items() if isinstance(value, float)}


def main() -> int:
    """Print the table; return 1 if a case differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    table = Table("case", "TRL loss", "prefrl loss", "rel. diff.", "TRL grad. norm", "prefrl", "rel. diff.", "verdict")
    stored: dict[str, dict[str, float]] = {}
    failed = 0
    for name, case in AGREEMENT_CASES.items():
        theirs, ours = trl_values(case), prefrl_values(case)
        stored[name] = {key: theirs[key] for key in ("loss", "grad_norm")}
        differences = [abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-12) for key in ("loss", "grad_norm")]
        agrees = max(differences) < TOLERANCE
        failed += not agrees and case.differs_because is None
        verdict = "equal" if agrees else case.differs_because or "DIFFERS"
        cells = [theirs["loss"], ours["loss"], differences[0], theirs["grad_norm"], ours["grad_norm"], differences[1]]
        table.add_row(name, *(f"{cell:.3g}" if i % 3 == 2 else f"{cell:.7g}" for i, cell in enumerate(cells)), verdict)
    Console(width=150).print(table)
    if arguments.output is not None:
        from importlib.metadata import version

        content = {"trl": version("trl"), "transformers": version("transformers"), "values": stored}
        content["script"] = values_of(SCRIPT)
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
