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
    "fp8": Promise(("python eight.py",), "fp8=True, which needs a GPU: products were rounded as there"),
    "liger": Promise(
        ("TRITON_INTERPRET=1 python fused.py",), "use_liger_kernel=True, which needs a GPU: kernels were interpreted"
    ),
    "agents": Promise((f"prefrl grpo --agent talk.py:talk {QUESTIONS} --dataset_name asked.jsonl",)),
    "agent-clients": Promise(("python clients.py", EXAMPLE.format("grpo_coding_agent", ", num_generations=2"))),
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
    "gguf": Promise(
        ("python quantized.py", "prefrl sft --dataset_name texts.jsonl " + TINY.replace("model ", "converted ", 1)),
        "the demo with a real model, which `make demo-real` runs",
    ),
    "docs": Promise((f"python -m mkdocs build --quiet --strict -f {ROOT / 'mkdocs.yml'} -d {{folder}}/site",)),
    "bench": Promise(
        ("python -m benchmarks --only reward --turns 1 --output found.json",),
        "the table, which `make bench` makes",
    ),
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
TALK = """
import json
from urllib import request


def talk(row, client):
    body = {"model": client.model, "messages": [{"role": "user", "content": row["question"]}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    asked = request.Request(f"{client.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with request.urlopen(asked) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    return float(row["answer"] in text)
"""
EIGHT = """
import torch
from transformers import AutoModelForCausalLM

from prefrl.models.kernels import compute_in_fp8

model = AutoModelForCausalLM.from_pretrained("model")
ids = torch.arange(8)[None]
exact = model(ids).logits.detach()
compute_in_fp8(model, emulate=True)
error = (model(ids).logits - exact).norm() / exact.norm()
model(ids).logits.sum().backward()
assert 0 < error < 0.2, error
assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
"""
FUSED = """
import copy

import interpreter
import torch
from transformers import AutoModelForCausalLM

from prefrl.models.kernels import apply_liger, liger_options

interpreter.repair()
model = AutoModelForCausalLM.from_pretrained("model")
fused = copy.deepcopy(model)
apply_liger(fused, liger_options(None))
ids = torch.arange(8)[None]
assert "liger" in vars(fused.model.norm)["forward"].__module__
for one in (model, fused):
    one(ids).logits.square().sum().backward()
for one, other in zip(model.parameters(), fused.parameters(), strict=True):
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
"""
CLIENTS = """
import asyncio
import re
import subprocess

import agents
import anthropic
import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel

ASKED = [{"role": "user", "content": "1 + 1 ="}]
command = "prefrl gateway model --port 0 --max_completion_length 4 --output_dir sessions"
gateway = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
try:
    printed = "".join(iter(gateway.stdout.readline, "  API key: any, each of which is a session\\n"))
    url = re.search(r"Anthropic: (\\S+)", printed)[1]
    place = {"base_url": f"{url}/v1", "api_key": "openai"}
    plain = openai.OpenAI(**place)
    assert plain.chat.completions.create(model="model", messages=ASKED).usage.completion_tokens <= 4
    assert plain.responses.create(model="model", input="1 + 1 =").usage.output_tokens <= 4
    told = anthropic.Anthropic(base_url=url, api_key="anthropic")
    assert told.messages.create(model="model", max_tokens=4, messages=ASKED).usage.output_tokens <= 4

    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel("model", openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agents"))
    assert asyncio.run(agents.Runner.run(agents.Agent(name="one", model=model), "1 + 1 =")).final_output
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="pydantic")
    assert asyncio.run(Agent(OpenAIChatModel("model", provider=provider)).run("1 + 1 =")).output
    graph = create_agent(ChatOpenAI(model="model", base_url=f"{url}/v1", api_key="langgraph"), [])
    assert graph.invoke({"messages": [("user", "1 + 1 =")]})["messages"][-1].content
    assert OpenAIServerModel("model", api_base=f"{url}/v1", api_key="smolagents")(ASKED).content
finally:
    gateway.terminate()
    ended = gateway.communicate(timeout=60)[0]
assert "6 sessions are in sessions" in ended, ended
"""
QUANTIZED = """
import pathlib

import gguf
import numpy as np

from prefrl.scripts import demo

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", demo.PADDING, "ab", *"abcdefghijklmnopqrstuvwxyz0123456789+= "]
WIDTH, LAYERS = 64, 2
random = np.random.default_rng(0)
path = pathlib.Path("weights/model.gguf")
path.parent.mkdir()
writer = gguf.GGUFWriter(path, "llama")
writer.add_block_count(LAYERS)
writer.add_context_length(64)
writer.add_embedding_length(WIDTH)
writer.add_feed_forward_length(WIDTH)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_rope_dimension_count(WIDTH // 2)
writer.add_rope_freq_base(10000.0)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(len(WORDS))
writer.add_tokenizer_model("gpt2")
writer.add_token_list(WORDS)
writer.add_token_merges(["a b"])
writer.add_token_types([3] * 4 + [1] * (len(WORDS) - 4))
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
shapes = {"token_embd": (len(WORDS), WIDTH)}
for layer in range(LAYERS):
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.{layer}.{name}"] = (WIDTH, WIDTH)
for name, shape in shapes.items():
    weight = random.normal(0, 0.1, shape).astype(np.float32)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
for name in ("output_norm", *(f"blk.{layer}.{kind}_norm" for layer in range(LAYERS) for kind in ("attn", "ffn"))):
    writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
demo.convert(path, pathlib.Path("converted"))
"""
SCRIPTS = {
    "bco.py": BCO,
    "gym.py": GYM,
    "talk.py": TALK,
    "eight.py": EIGHT,
    "fused.py": FUSED,
    "clients.py": CLIENTS,
    "quantized.py": QUANTIZED,
}


def main(wheel: Path, names: list[str]) -> int:
    """Check the extras, print the table, and return 1 if one failed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = project["optional-dependencies"].keys() ^ (PROMISES.keys() - {"base"} | LEFT_OUT)
    if missing or (unknown := set(names) - PROMISES.keys()):
        raise SystemExit(f"{', '.join(sorted(missing or unknown))}: not both in PROMISES and in pyproject.toml")
    rows = [("extra", "install s", "run s", "MB", "result", "not shown here")]
    with tempfile.TemporaryDirectory(prefix="prefrl-extras-") as root:
        for name in names or PROMISES:
            with environment(Path(root)) as folder:
                rows.append((name, *check(wheel.resolve(), name, folder), PROMISES[name].unseen))
            print("  ".join(rows[-1]), flush=True)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    return int(any(row[4].startswith("FAILED") for row in rows))


@contextmanager
def environment(root: Path) -> Iterator[Path]:
    """A new folder for an environment in `venv`, with an empty home, data, and the examples.

    It is always at the same place, for which Python compiles what all environments have only once.
    """
    folder = root / "extra"
    (folder / "home").mkdir(parents=True)
    try:
        for room in ("examples", "benchmarks"):
            shutil.copytree(ROOT / room, folder / room)
        shutil.copy(ROOT / "tests/interpreter.py", folder)
        rows = [{"prompt": f"{i} + 1 =", "answer": f"{i + 1}", "solution": f"${i + 1}$"} for i in range(8)]
        write(folder / "questions.jsonl", rows)
        write(folder / "asked.jsonl", [{"question": row["prompt"], "answer": row["answer"]} for row in rows])
        write(folder / "texts.jsonl", [{"text": "1 + 1 = 2"}] * 8)
        write(folder / "pairs.jsonl", [{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}] * 8)
        for script, text in SCRIPTS.items():
            (folder / script).write_text(text, encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def check(wheel: Path, name: str, folder: Path) -> tuple[str, str, str, str]:
    """Seconds of the installation and of the commands, the size of the environment, and the result.

    The first environment makes the model, which is that of all.
    """
    start, model = time.monotonic(), folder.parent / "tiny"
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
        failed = f"FAILED with exit code {error.returncode}: {' '.join(map(str, error.cmd))}"
        return "", f"{time.monotonic() - start:.0f}", "", failed
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
    """Run a line of the shell in the folder, with its environment and its home.

    After 15 minutes, `timeout` ends all that it has started, with exit code 124.
    """
    mine = ("PYTHON", "HF_", "VIRTUAL")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    variables |= {"HOME": str(folder / "home"), "PATH": f"{folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(folder.parent / "compiled"),
    }
    print(f"$ {line}", flush=True)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = ["timeout", "--kill-after=30", "900", "bash", "-c", line]
    subprocess.run(command, cwd=folder, env=variables, check=True, text=True, **streams)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
