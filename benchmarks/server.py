"""Measure generation on a vLLM server: weight transfers, tokens per CPU second, generation modes, and learning.

    make bench-server                       everything: about 20 minutes on 2 cores
    python -m benchmarks.server sync modes  some of it

The servers are real ones, on the CPU, in the environment of the tests. Results are written to `results/server.json`,
and as tables to `results/server.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.generation.vllm.handshake import Requirements
from prefrl.generation.weights.sync import SyncMethod, WeightSync
from prefrl.http import Http
from prefrl.models.export import PolicyWeights
from prefrl.scripts import demo as demo_tiny
from prefrl.trainer.configs import GRPOConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import dataset_of, ragged_reward
from tests.vllm.server import KEY, Server, living

RESULTS = Path(__file__).parent / "results" / "server.json"

SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 32}
SMALL |= {"num_hidden_layers": 2, "vocab_size": 512}
LARGE: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "head_dim": 64}
LARGE |= {"num_key_value_heads": 12, "num_hidden_layers": 12, "vocab_size": 50_304}


@dataclass(frozen=True, slots=True)
class Sync:
    """Weights that are sent to a server several times."""

    model_mb: float
    method: str
    megabytes: float  # sent
    seconds: list[float]  # of each transfer except the first


@dataclass(frozen=True, slots=True)
class Tokens:
    """The speed of a generator."""

    model_mb: float
    generator: str
    tokens_per_cpu_s: list[float]
    tokens_per_s: list[float]


@dataclass(frozen=True, slots=True)
class Mode:
    """GRPO steps with a server that is slowed down."""

    mode: str
    seconds: float  # wall time of a step
    waiting: float  # the part of it spent waiting for completions


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of the demo's GRPO."""

    seed: int
    generator: str
    before: float  # share of held-out questions that are answered right
    after: float


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to measure; nothing: everything")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["VLLM_API_KEY"] = KEY
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts or PARTS:
            print(f"measuring: {part}", flush=True)
            stored[part] = [asdict(row) for row in PARTS[part](Path(folder))]
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    text = tables(stored)
    print(text)
    RESULTS.with_suffix(".md").write_text(f"Written by `python -m benchmarks.server`.\n\n{text}\n", encoding="utf-8")
    return 0


# Weights.


def measure_sync(folder: Path) -> list[Sync]:
    """Send models of both sizes with each method."""
    rows = []
    for sizes in (SMALL, LARGE):
        with served(folder, sizes, max_lora_rank=8) as (server, model):
            for method in ("gloo", "shm"):
                rows.append(sync_of(server, model, method))
            lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
            adapted = get_peft_model(model, lora)
            rows.append(sync_of(server, adapted, "adapter"))
    return rows


def sync_of(server: Server, model: Any, method: SyncMethod, times: int = 6) -> Sync:
    """Send weights several times. The first time also connects, or sends the base weights of an adapter."""
    generator = generator_of(server, model, method)
    seconds = []
    for version in range(times):
        started = time.perf_counter()
        generator.sync(PolicyWeights(model), version=version)
        seconds.append(time.perf_counter() - started)
    megabytes = generator.weight_sync.bytes_sent / 1e6
    generator.close()
    return Sync(megabytes_of(model), method, megabytes, seconds[1:])


def megabytes_of(model: Any) -> float:
    """The size of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def generator_of(server: Server, model: Any, method: SyncMethod, url: str | None = None) -> VLLMGenerator:
    """A client of one server."""
    http = Http(key=server.key)
    folder = Path("/dev/shm") if method in ("shm", "adapter") else None
    base: PreTrainedModel = model.get_base_model() if method == "adapter" else model
    return VLLMGenerator(
        [url or server.url],
        http=http,
        weight_sync=WeightSync(http, method=method, folder=folder, timeout=120),
        requirements=Requirements.of(base, tiny_tokenizer(), has_adapters=method == "adapter"),
        stop_ids=[],
        server_timeout=60,
        request_timeout=300,
    )


@contextmanager
def served(folder: Path, sizes: dict[str, Any], **options: Any) -> Iterator[tuple[Server, PreTrainedModel]]:
    """A server with a random model, and the model."""
    model = tiny_model("qwen2", **sizes, tie_word_embeddings=True)
    path = folder / f"model-{sizes['hidden_size']}"
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    server = Server(path, folder=folder, **options)
    try:
        yield server, model
    finally:
        server.stop()


# Tokens.


def measure_tokens(folder: Path) -> list[Tokens]:
    """8 prompts of 16 tokens with 8 completions of 64 tokens each, sampled in turn by the server and this process."""
    rows = []
    for sizes, times in ((SMALL, 5), (LARGE, 3)):
        with served(folder, sizes) as (server, model):
            remote = generator_of(server, model, "shm")
            remote.sync(PolicyWeights(model), version=0)
            model.generation_config.eos_token_id = None
            local = LocalGenerator(model)
            found: dict[str, list[tuple[float, float]]] = {"server": [], "local": []}
            for turn in range(times + 1):
                for name, generator in (("server", remote), ("local", local)):
                    rate = tokens_of(generator, lambda: cpu_seconds(server), seed=turn)
                    if turn:  # the first turn is a warm-up
                        found[name].append(rate)
            remote.close()
        for name, rates in found.items():
            per_cpu, per_wall = zip(*rates, strict=True)
            rows.append(Tokens(megabytes_of(model), name, list(per_cpu), list(per_wall)))
    return rows


def tokens_of(generator: Any, server_cpu: Callable[[], float], seed: int) -> tuple[float, float]:
    """Tokens per CPU second, over this process and the server, and tokens per second."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(10, 100) for _ in range(16)] for _ in range(8)]
    sampling = SamplingParams(num_samples=8, max_tokens=64, temperature=1.0)
    started, cpu = time.perf_counter(), time.process_time() + server_cpu()
    groups = generator.generate(prompts, sampling, seeds=[seed * 100 + i for i in range(8)])
    seconds, cpu = time.perf_counter() - started, time.process_time() + server_cpu() - cpu
    count = sum(len(sample.token_ids) for group in groups for sample in group)
    return count / cpu, count / seconds


def cpu_seconds(server: Server) -> float:
    """CPU seconds used so far by the living processes of a server."""
    ticks = 0
    for pid in living(server.process.pid):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# Modes.


def measure_modes(folder: Path) -> list[Mode]:
    """12 steps in each mode. The completions of a prompt are delayed by up to 4 s, as by a slower server."""
    rows = []
    sizes = SMALL | {"num_hidden_layers": 8}
    with served(folder, sizes) as (server, model), slowed(server, longest=4.0) as url:
        for mode in ("sync", "overlap", "async"):
            config = GRPOConfig(
                output_dir=str(folder / mode),
                use_cpu=True,
                use_vllm=True,
                vllm_server_base_url=[url],
                generation_mode=mode,  # type: ignore[arg-type]
                **({"max_staleness": 2} if mode == "async" else {}),
                per_device_train_batch_size=64,
                num_generations=8,
                max_completion_length=96,
                temperature=1.0,
                top_k=None,
                beta=0.0,
                max_steps=12,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            data = dataset_of("grpo", 64)
            trainer = GRPOTrainer(model, ragged_reward, config, data, processing_class=tiny_tokenizer())
            trainer.train()
            logs = [entry for entry in trainer.state.log_history if "step_time" in entry][2:]
            seconds = statistics.mean(entry["step_time"] for entry in logs)
            rows.append(Mode(mode, seconds, statistics.mean(entry["time/generation_s"] for entry in logs)))
            trainer.generator.close()
    return rows


@contextmanager
def slowed(server: Server, *, longest: float) -> Iterator[str]:
    """The URL of a proxy that delays completions, by times that depend only on the prompt."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward(None)

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def forward(self, body: bytes | None) -> None:
            if self.path == "/inference/v1/generate" and body is not None:
                seed = json.loads(body)["sampling_params"]["seed"]
                time.sleep(random.Random(seed).uniform(0, longest))
            headers = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
            asked = Request(server.url + self.path, data=body, headers=headers, method=self.command)
            try:
                with urlopen(asked, timeout=300) as answer:
                    status, content = answer.status, answer.read()
            except HTTPError as error:
                status, content = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()


# What is learned.


def measure_demo(folder: Path) -> list[Learned]:
    """The demo's GRPO from the same supervised weights, with local generation and with a server, for three seeds."""
    rows = []
    path = folder / "demo"
    demo_tiny.make_model(0).save_pretrained(path)
    demo_tiny.make_tokenizer().save_pretrained(path)
    server = Server(path, folder=folder, max_model_len=64)
    try:
        for seed in range(3):
            train, held_out = demo_tiny.make_questions(seed)
            tokenizer, model = demo_tiny.make_tokenizer(), demo_tiny.make_model(seed)
            demo_tiny.sft(model, tokenizer, train, seed, folder / "sft", [demo_tiny.StopAtTokenAccuracy()])
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            before = demo_tiny.share_right(demo_tiny.greedy_answers(model, tokenizer, held_out), held_out)
            remote = {"use_vllm": True, "vllm_server_base_url": [server.url]}
            for name, options in (("local", {}), ("server", remote)):
                model.load_state_dict(weights)
                demo_tiny.grpo(model, tokenizer, train, seed, folder / name, **options)
                after = demo_tiny.share_right(demo_tiny.greedy_answers(model, tokenizer, held_out), held_out)
                rows.append(Learned(seed, name, before, after))
                print(rows[-1], flush=True)
    finally:
        server.stop()
    return rows


PARTS: dict[str, Callable[[Path], list[Any]]] = {
    "sync": measure_sync,
    "tokens": measure_tokens,
    "modes": measure_modes,
    "demo": measure_demo,
}


# Tables.


def tables(stored: dict[str, list[dict[str, Any]]]) -> str:
    """The stored results as Markdown."""
    parts = []
    if "sync" in stored:
        lines = ["| model, MB | `weight_sync` | sent, MB | seconds, median (range) |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {row['model_mb']:,.1f} | `{row['method']}` | {row['megabytes']:,.2f} | {spread(row['seconds'], 2)} |"
            for row in stored["sync"]
        ]
        parts.append("\n".join(lines))
    if "tokens" in stored:
        lines = ["| model, MB | completions from | tokens per CPU second | tokens per second |"]
        lines += ["| --- | --- | --- | --- |"]
        lines += [
            f"| {row['model_mb']:,.1f} | {row['generator']} | {spread(row['tokens_per_cpu_s'], 0)} | "
            f"{spread(row['tokens_per_s'], 0)} |"
            for row in stored["tokens"]
        ]
        parts.append("\n".join(lines))
    if "modes" in stored:
        lines = ["| `generation_mode` | seconds of a step | of them waiting |", "| --- | --- | --- |"]
        lines += [f"| `{row['mode']}` | {row['seconds']:.2f} | {row['waiting']:.2f} |" for row in stored["modes"]]
        parts.append("\n".join(lines))
    if "demo" in stored:
        lines = ["| seed | completions from | accuracy before | after |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {row['seed']} | {row['generator']} | {row['before']:.3f} | {row['after']:.3f} |"
            for row in stored["demo"]
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
