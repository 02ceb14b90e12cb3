"""What help and mistakes cost on the command line of prefrl and of TRL, in CPU seconds.

    .venv-bench/bin/python -m benchmarks.commands [--runs 3] [--write-docs]

Every command runs in a process of its own, in turn for both libraries; the least of its runs counts. CPU seconds are
those of the command and its children, so other work on the machine hardly matters. Results are written to
`results/commands.json`, and with `--write-docs` as a table into docs/commands.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import replace_between_markers
from tests.assets import tiny_model, tiny_tokenizer

RESULTS = Path(__file__).parent / "results" / "commands.json"
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "commands.md"
BEGIN, END = "<!-- commands -->", "<!-- end of commands -->"
LIBRARIES = {
    "prefrl": [sys.executable, "-m", "prefrl.scripts.main"],
    "trl": [str(Path(sys.executable).with_name("trl"))],
}
DATA = ["--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out", "--use_cpu", "true"]
DATA += ["--bf16", "false", "--report_to", "none", "--max_steps", "1"]
REWARDS = {"prefrl": ["--reward_funcs", "numeric_reward"], "trl": ["--reward_funcs", "accuracy_reward"]}
CASES: dict[str, list[str]] = {
    "help": ["grpo", "--help"],
    "typo": ["sft", *DATA, "--learnin_rate", "1e-5"],
    "wrong type": ["sft", *DATA, "--learning_rate", "fast"],
    "wrong pair: 8 completions in groups of 3": ["grpo", *DATA, "--num_generations", "3"],
    "missing YAML file": ["sft", "--config", "missing.yaml"],
    "missing column": ["sft", *DATA],
}


def main(argv: list[str] | None = None) -> None:
    """Measure, write down, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder))
        results = {case: _measure(case, words, Path(folder), options.runs) for case, words in CASES.items()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.write_docs:
        write_docs()


def write_docs() -> None:
    """Put the results into the docs."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = ["| | prefrl: CPU seconds | lines | TRL 1.16: CPU seconds | lines |", "|---|---|---|---|---|"]
    for case, row in results.items():
        cells = [f"{row[name]['cpu_s']:.2f} | {row[name]['lines']}" for name in LIBRARIES]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    replace_between_markers(DOCS, f"\n{table}\n", begin=BEGIN, end=END)


def _prepare(folder: Path) -> None:
    """A tiny model, and rows without a column that SFT reads."""
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"words": "1+1=2"}\n' * 8, encoding="utf-8")


def _measure(case: str, words: list[str], folder: Path, runs: int) -> dict[str, dict[str, float | int | str]]:
    found: dict[str, list[tuple[float, int, str]]] = {name: [] for name in LIBRARIES}
    for _ in range(runs):
        for name, command in LIBRARIES.items():
            extra = REWARDS[name] if "--num_generations" in words else []
            found[name].append(_run([*command, *words, *extra], folder))
    rows: dict[str, dict[str, float | int | str]] = {}
    for name, results in found.items():
        cpu_s, lines, last = min(results)
        last = last.replace(sys.prefix, Path(sys.prefix).name).replace(f"{ROOT}/", "")  # no folders of this machine
        rows[name] = {"cpu_s": round(cpu_s, 2), "lines": lines, "last_line": last}
        print(f"{case}: {name}: {cpu_s:.2f} s, {lines} lines: {last}", flush=True)
    return rows


def _run(command: list[str], folder: Path) -> tuple[float, int, str]:
    """CPU seconds, the number of lines that are printed, and the last one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    environment["PYTHONPATH"] = str(ROOT)
    before = _cpu_seconds()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return _cpu_seconds() - before, len(lines), lines[-1][:200] if lines else ""


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
