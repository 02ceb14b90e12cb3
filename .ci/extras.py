"""Install each extra alone into a new environment, and run what it promises: `python .ci/extras.py WHEEL [EXTRA ...]`.

`base` is the package without extras. The environments are made by `uv` where it is installed, else by `venv` and
`pip`, with the versions of constraints.txt, and are removed afterwards. The commands run outside of the clone, with an
empty home, and fetch no models and no data. A check that fails does not end the run: a table of all extras comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TINY = "--model_name_or_path model --use_cpu --per_device_train_batch_size 2 --max_steps 2 --output_dir out"
QUESTIONS = f"{TINY} --dataset_name questions.jsonl --num_generations 2 --max_completion_length 8"
EXAMPLE = "python -c \"import sys; sys.path[:0] = ['examples']; import {0} as e; e.main(None, 'out', max_steps=1{1})\""


class Promise(NamedTuple):
    """What an extra promises.

    Args:
        lines: Commands of its environment that show it.
        unseen: What these commands cannot show, and why.
    """

    lines: tuple[str, ...]
    unseen: str = ""


def imports(*names: str) -> str:
    """A command that imports modules."""
    return f'python -c "import {", ".join(names)}"'


PROMISES = {
    "base": Promise(
        (
            "prefrl doctor sft --dataset_name texts.jsonl --model_name_or_path model --use_cpu",
            f"prefrl sft --dataset_name texts.jsonl {TINY}",
            f"prefrl dpo --dataset_name pairs.jsonl {TINY}",
            f"prefrl grpo --reward_funcs numeric_reward {QUESTIONS}",
            f"prefrl launch sft --dataset_name texts.jsonl {TINY} --num_processes 2",
            "prefrl look out",
            "prefrl report out",
            "prefrl eval model questions.jsonl --reward_funcs numeric_reward --max_completion_length 4",
        )
    ),
    "peft": Promise((f"prefrl sft --use_peft --dataset_name texts.jsonl {TINY}", "prefrl merge out merged")),
    "quantization": Promise(
        (
            f"prefrl sft --load_in_4bit --use_peft --dtype float32 --dataset_name texts.jsonl {TINY}",
            f"prefrl sft --optim adamw_bnb_8bit --dataset_name texts.jsonl {TINY}",
        ),
    ),
    "optimizers": Promise((f"prefrl sft --optim lamb --dataset_name texts.jsonl {TINY}",)),
    "bco": Promise(("python bco.py",)),
    "math": Promise((f"prefrl grpo --reward_funcs accuracy_reward {QUESTIONS}",)),
    "fuzzy": Promise(
        (f"prefrl grpo --reward_funcs \"string_check(operation='fuzzy', reference='{{solution}}')\" {QUESTIONS}",)
    ),
    "reasoning-gym": Promise(
        (
            "python gym.py",
            f"prefrl grpo --reward_funcs reasoning_gym:chain_sum {QUESTIONS} --dataset_name q.jsonl",
        )
    ),
    "images": Promise((EXAMPLE.format("grpo_images", ""),)),
    "fp8": Promise((imports("torchao.float8"),), "fp8=True needs a GPU"),
    "liger": Promise((imports("liger_kernel.transformers.monkey_patch"),), "use_liger_kernel=True needs a GPU"),
    "agents": Promise((EXAMPLE.format("grpo_coding_agent", ", num_generations=2"),)),
    "agent-clients": Promise(
        (imports("openai", "anthropic", "agents", "pydantic_ai", "langchain_openai", "langgraph", "smolagents"),),
        "what they ask of a gateway: tests/unit/rollout/gateway",
    ),
    "deepspeed": Promise(
        (f"prefrl launch sft --accelerate_config zero2 --num_processes 2 --dataset_name texts.jsonl {TINY}",)
    ),
    "plot": Promise(
        (
            f"prefrl grpo --reward_funcs numeric_reward {QUESTIONS}",
            "python -c \"import pathlib; from prefrl.scripts import demo; demo._plot_rewards(pathlib.Path('out'))\"",
            "python -c \"assert open('out/reward_curve.png', 'rb').read(4)[1:] == b'PNG'\"",
        )
    ),
    "gguf": Promise((imports("gguf"),), "the demo with a real model, which `make demo-real` runs"),
    "docs": Promise((f"python -m mkdocs build --quiet --strict -f {ROOT / 'mkdocs.yml'} -d {{folder}}/site",)),
    "bench": Promise((imports("trl", "gguf", "PIL"),), "the comparison itself, which `make bench` runs"),
}
# An environment of its own, which `make test` fills with a build for CPUs; what each test run installs anyway.
LEFT_OUT = {"vllm", "dev"}

BCO = """
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from prefrl import BCOConfig, BCOTrainer

rows = [{"prompt": f"{i} +", "completion": " 2", "label": i % 2 == 0} for i in range(16)]
BCOTrainer(
    model="model",
    args=BCOConfig("out", use_cpu=True, max_steps=2, per_device_train_batch_size=4, prompt_sample_size=8),
    train_dataset=Dataset.from_list(rows),
    embedding_func=lambda input_ids, attention_mask: torch.nn.functional.one_hot(input_ids[:, 0], 64).float(),
    embedding_tokenizer=AutoTokenizer.from_pretrained("model"),
).train()
"""
GYM = """
from prefrl.rewards import reasoning_gym_dataset

reasoning_gym_dataset("chain_sum", size=8, seed=0).to_json("q.jsonl")
"""


def main(wheel: Path, names: list[str]) -> int:
    """Check the extras, print the table, and return 1 if one failed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = project["optional-dependencies"].keys() ^ (PROMISES.keys() - {"base"} | LEFT_OUT)
    if missing or (unknown := set(names) - PROMISES.keys()):
        raise SystemExit(f"{', '.join(sorted(missing or unknown))}: not both in PROMISES and in pyproject.toml")
    rows = [("extra", "install s", "run s", "MB", "result", "not shown here")]
    with tempfile.TemporaryDirectory() as models:
        for name in names or PROMISES:
            with environment() as folder:
                rows.append((name, *check(wheel.resolve(), name, folder, Path(models, "tiny")), PROMISES[name].unseen))
            print("  ".join(rows[-1]), flush=True)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    return int(any(row[4].startswith("FAILED") for row in rows))


@contextmanager
def environment() -> Iterator[Path]:
    """A new folder with an environment in `venv`, an empty home, data, and the examples."""
    with tempfile.TemporaryDirectory(prefix="prefrl-extra-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        shutil.copytree(ROOT / "examples", folder / "examples")
        rows = [{"prompt": f"{i} + 1 =", "answer": f"{i + 1}", "solution": f"${i + 1}$"} for i in range(8)]
        write(folder / "questions.jsonl", rows)
        write(folder / "texts.jsonl", [{"text": "1 + 1 = 2"}] * 8)
        write(folder / "pairs.jsonl", [{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}] * 8)
        (folder / "bco.py").write_text(BCO, encoding="utf-8")
        (folder / "gym.py").write_text(GYM, encoding="utf-8")
        yield folder


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def check(wheel: Path, name: str, folder: Path, model: Path) -> tuple[str, str, str, str]:
    """Seconds of the installation and of the commands, the size of the environment, and the result.

    The first environment makes the model, which is that of all.
    """
    start = time.monotonic()
    try:
        install(folder, f"prefrl{'' if name == 'base' else f'[{name}]'} @ {wheel.as_uri()}")
        installed = time.monotonic()
        if not model.exists():
            run(folder, f"python examples/tiny.py {model} {' '.join(map(str, range(10)))} + =")
        shutil.copytree(model, folder / "model")
        for line in PROMISES[name].lines:
            run(folder, line.replace("{folder}", str(folder)))
    except subprocess.CalledProcessError as error:
        print(error.stdout, flush=True)
        command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
        return "", f"{time.monotonic() - start:.0f}", "", f"FAILED: {command}"
    size = sum(path.stat().st_size for path in (folder / "venv").rglob("*") if path.is_file()) / 1e6
    return f"{installed - start:.0f}", f"{time.monotonic() - installed:.0f}", f"{size:.0f}", "passed"


def install(folder: Path, requirement: str) -> None:
    """Make the environment, with torch first: pip must never choose another version for it."""
    python, uv = folder / "venv/bin/python", shutil.which("uv")
    if uv:
        output(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv")
        pip = [uv, "pip", "install", "--quiet", "--python", python]
    else:
        output(sys.executable, "-m", "venv", folder / "venv")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    constraints = ROOT / "constraints.txt"
    output(*pip, "-c", constraints, "torch")
    output(*pip, "-c", constraints, requirement)


def output(*command: str | Path) -> str:
    """Run a command with this environment; what it prints is shown if it fails."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def run(folder: Path, line: str) -> None:
    """Run a line of the shell in the folder, with its environment and its home."""
    mine = ("PYTHON", "HF_", "VIRTUAL")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    variables |= {"HOME": str(folder / "home"), "PATH": f"{folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    print(f"$ {line}", flush=True)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    subprocess.run(line, shell=True, cwd=folder, env=variables, check=True, text=True, timeout=900, **streams)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
