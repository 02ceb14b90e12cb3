"""Measure prefrl on a real model, SmolLM2-135M-Instruct, and real text, GSM8K.

    make real GSM8K=FOLDER                                          everything
    python -m benchmarks.real --gsm8k FOLDER agreement logprobs     some of it
    python -m benchmarks.real --write-docs                          put the stored results into docs/real_models.md

FOLDER has `train.jsonl` and `example_model_solutions.jsonl` of the repository openai/grade-school-math. The model is
that of `prefrl demo --model smollm2`. `agreement` and `performance` need TRL 1.16 (extra `bench`); `logprobs` needs
the test tools (extra `dev`) and the environment of the servers, `.venv-vllm`. Exits with 1 if a result is not what it
must be.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.__main__ import environment_of
from benchmarks.real.tables import failures, tables
from benchmarks.report import replace_between_markers

RESULTS = Path(__file__).parents[1] / "results" / "real.json"
DOCS = Path(__file__).parents[2] / "docs" / "real_models.md"
Measure = Callable[..., Iterable[dict[str, Any]]]
# Modules are imported when their part is measured: two of them need TRL.
PARTS = {
    "agreement": "agreement:measure",
    "performance": "performance:measure",
    "logprobs": "logprobs:measure",
    "dpo": "training:measure_dpo",
    "sft": "training:measure_sft",
    "demo": "training:measure_demo",
}


def main(argv: list[str] | None = None) -> int:
    """Measure, store each row when it is done; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--gsm8k", type=Path, help="folder of the data")
    parser.add_argument("--model", type=Path, help="folder of the model; default: the demo's, fetched if need be")
    parser.add_argument("--write-docs", action="store_true", help="measure nothing; put the results into the docs")
    options = parser.parse_args(argv)
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if options.write_docs:
        replace_between_markers(DOCS, tables(stored))
        return 0
    unknown = set(options.parts) - PARTS.keys()
    if unknown or options.gsm8k is None:
        parser.error(f"unknown parts {sorted(unknown)}" if unknown else "--gsm8k FOLDER is needed")
    inputs = _inputs(options)
    for part in options.parts or PARTS:
        print(f"measuring: {part}", flush=True)
        environment = environment_of(argparse.Namespace(device="cpu", threads=1))
        stored[part] = {"rows": [], "environment": environment}
        for row in _measure_of(part)(inputs):
            stored[part]["rows"].append(row)
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(tables(stored))
    failed = failures(stored)
    for problem in failed:
        print(f"FAILED {problem}", file=sys.stderr)
    return int(bool(failed))


def _inputs(options: argparse.Namespace) -> Any:
    from benchmarks.real.inputs import Inputs
    from prefrl.scripts.demo import cached_smollm2

    return Inputs(model=options.model or cached_smollm2(print), gsm8k=options.gsm8k)


def _measure_of(part: str) -> Measure:
    module, _, name = PARTS[part].partition(":")
    return getattr(import_module(f"benchmarks.real.{module}"), name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    import_module("datasets").disable_progress_bars()
    import_module("transformers.utils.logging").disable_progress_bar()
    raise SystemExit(main())
