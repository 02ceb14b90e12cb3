"""Measure `weight_sync: delta`: bytes by learning rate, and the time of a sync over a slow link, with SmolLM2-135M.

    python -m benchmarks.delta bytes    share of weights that change in a step, and bytes of their message
    python -m benchmarks.delta link     a real vLLM server behind a link of 10 Mbit/s; needs root, ip and tc
    python -m benchmarks.delta shards   CPU seconds of a comparison under ZeRO-3, by each rank or by the first alone

The policy has float32 weights and Adam; its server has bfloat16. A step is that of a policy gradient: the log-probs
of sampled completions, times random advantages. Results are written to `results/delta.json`, and with `--write-docs`
as tables into docs/vllm.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.report import replace_between_markers
from prefrl import distributed
from prefrl.generation.server import INFO_PATH, ServerInfo
from prefrl.generation.weights.delta import HostCopy
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http
from prefrl.models.export import PolicyWeights
from prefrl.scripts.demo import cached_smollm2
from tests.contract.cases import make_trainer
from tests.distributed.backends import enter, leave_training
from tests.launch import launch
from tests.vllm.server import KEY, Server

RESULTS = Path(__file__).parent / "results" / "delta.json"
DOCS = Path(__file__).parents[1] / "docs" / "vllm.md"
BEGIN, END = "<!-- delta measurements -->", "<!-- end of delta measurements -->"
RATES = (1e-6, 1e-5, 1e-4)
LINK_RATE = 1e-6
STEPS = 6
ROWS, TOKENS = 8, 24  # completions of a step, and tokens of each
TIMEOUT = 3600.0
# A Llama of 33 million weights, and how many change before a comparison of shards.
SHARDED = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
SHARDED |= {"vocab_size": 49152, "tie_word_embeddings": True}
CHANGED = 0.01
NAMESPACE, INSIDE, OUTSIDE = "prefrl-trainer", "10.77.31.2", "10.77.31.1"
RATE = "10mbit"


@dataclass(frozen=True, slots=True)
class Bytes:
    """What is sent after each step with a learning rate."""

    learning_rate: float
    whole: int  # bytes of all weights
    sent: list[int]  # bytes of the changes after each step


@dataclass(frozen=True, slots=True)
class Sync:
    """One transfer over the link."""

    step: int  # before it; 0: the first transfer, of all weights
    megabytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison of partitioned weights with those before."""

    by_ranks: bool  # each compares its shard; otherwise rank 0 compares all weights, which are gathered
    megabytes: float  # of the message
    cpu_seconds: list[float]  # of each rank


class Training:
    """Steps of a policy gradient on SmolLM2."""

    def __init__(self, learning_rate: float) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(cached_smollm2(print), dtype=torch.float32)
        self._random = torch.Generator().manual_seed(0)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        torch.manual_seed(0)
        self._prompt = torch.tensor([[1, 4093, 198, 1780, 314, 260]])
        self._rows = self.model.generate(
            self._prompt.repeat(ROWS, 1), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, top_k=0
        )

    def step(self) -> None:
        """Another step; advantages are drawn anew."""
        advantages = torch.randn(ROWS, generator=self._random)
        logits = self.model(self._rows).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, self._rows[:, 1:, None])[..., 0]
        loss = -(advantages[:, None] * logprobs[:, self._prompt.shape[1] - 1 :]).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


def measure_bytes() -> list[Bytes]:
    """Steps with each learning rate, without a server."""
    rows = []
    for rate in RATES:
        training, copy = Training(rate), HostCopy()
        weights, sent = PolicyWeights(training.model), []
        for number in range(STEPS + 1):
            if number:
                training.step()
            sent.append(sum(part.nbytes for _, part in copy.changes(weights, dtype=torch.bfloat16)))
        rows.append(Bytes(rate, sent[0], sent[1:]))
        print(rows[-1], flush=True)
    return rows


def measure_link() -> list[Sync]:
    """A server in this network namespace, and a trainer in another one."""
    with tempfile.TemporaryDirectory() as folder, link():
        sizes = {"dtype": "bfloat16", "max_model_len": 64}
        server = Server(cached_smollm2(print), folder=Path(folder), host="0.0.0.0", **sizes)
        try:
            words = [sys.executable, "-m", "benchmarks.delta", "trainer", f"http://{OUTSIDE}:{server.port}"]
            command = ["ip", "netns", "exec", NAMESPACE, *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            server.stop()
    return [Sync(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def train_behind_link(url: str) -> list[Sync]:
    """All weights once, and then what changes in each step."""
    http, rows = Http(key=KEY), []
    info = ServerInfo.from_json(url, http.request("GET", url + INFO_PATH, timeout=60))
    sync = WeightSync(http, method="delta", folder=None, timeout=TIMEOUT, over="gloo")
    training = Training(LINK_RATE)
    weights = PolicyWeights(training.model)
    for number in range(STEPS + 1):
        if number:
            training.step()
        started = time.perf_counter()
        sync.send({url: info}, weights, version=f"link:{number}")
        rows.append(Sync(number, sync.bytes_sent / 1e6, time.perf_counter() - started))
        print(rows[-1], file=sys.stderr, flush=True)
    sync.close()
    http.close()
    return rows


def measure_shards() -> list[Comparison]:
    """Two processes under ZeRO-3, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        rows = launch("benchmarks.delta", "rank", folder, result=Path(folder, "result"))
    return [Comparison(**row) for row in rows]


def compare_shards(folder: Path) -> None:
    """In each rank: both ways in turn, after steps that change one weight in a hundred. Rank 0 writes the result."""
    backend = enter("zero3", folder)
    leave_training()
    accelerator = make_trainer("sft", folder / "trainer", **backend).accelerator
    leave_training()
    model, twin = (LlamaForCausalLM(LlamaConfig(**SHARDED)) for _ in range(2))
    distributed.prepare_frozen(accelerator, model)
    random, rows = torch.Generator().manual_seed(0), []
    sides = {by_ranks: (PolicyWeights(model), HostCopy()) for by_ranks in (True, False)}
    for number in range(STEPS + 1):
        for own, value in zip(model.parameters(), twin.parameters(), strict=True):
            value.data *= 1 + 0.05 * (torch.rand(value.shape, generator=random) < CHANGED)
            distributed.load_whole(own, value.detach())
        for by_ranks, (weights, copy) in sides.items():
            sizes: list[int] = []
            torch.distributed.barrier()
            began = time.process_time()
            weights.lead(partial(read, weights, copy, sizes, by_ranks=by_ranks))
            seconds = distributed.gather_objects(time.process_time() - began)
            if number:  # the first message has all weights
                rows.append(Comparison(by_ranks, sum(sizes) / 1e6, seconds))
    if distributed.is_main():
        torch.save([asdict(row) for row in rows], folder / "result")


def read(weights: PolicyWeights, copy: HostCopy, sizes: list[int], *, by_ranks: bool) -> None:
    """Read a message, and note the bytes of its parts."""
    message = (copy.changes_of if by_ranks else copy.changes)(weights, dtype=torch.bfloat16)
    sizes += [part.nbytes for _, part in message]


@contextmanager
def link() -> Iterator[None]:
    """A network namespace that is connected to this one by a slow link, removed at the end."""
    ends = {"prefrl-out": OUTSIDE, "prefrl-in": INSIDE}
    run("ip netns add", NAMESPACE)
    try:
        run("ip link add prefrl-out type veth peer name prefrl-in netns", NAMESPACE)
        for end, address in ends.items():
            inside = f"ip netns exec {NAMESPACE} " if address == INSIDE else ""
            run(f"{inside}ip address add {address}/24 dev {end}")
            run(f"{inside}ip link set {end} up")
            run(f"{inside}tc qdisc add dev {end} root tbf rate {RATE} burst 32kbit latency 400ms")
        run(f"ip netns exec {NAMESPACE} ip link set lo up")
        yield
    finally:
        run("ip netns delete", NAMESPACE)  # and with it both ends of the link


def run(*words: str) -> None:
    """Run a command, which must succeed."""
    subprocess.run(" ".join(words).split(), check=True)


PARTS: dict[str, Callable[[], list[Any]]] = {
    "bytes": measure_bytes,
    "link": measure_link,
    "shards": measure_shards,
}


def tables(stored: dict[str, Any]) -> str:
    """The stored results as Markdown."""
    parts = []
    if "bytes" in stored:
        lines = ["| learning rate | sent after a step, MB, median (range) | all weights, MB | all / sent |"]
        lines.append("| --- | --- | --- | --- |")
        for row in stored["bytes"]:
            sent = [size / 1e6 for size in row["sent"]]
            median = statistics.median(sent)
            whole = row["whole"] / 1e6
            lines.append(
                f"| {row['learning_rate']:g} | {median:.1f} ({min(sent):.1f} to {max(sent):.1f}) | {whole:.0f} | "
                f"{whole / median:.0f} |"
            )
        parts.append("\n".join(lines))
    if "link" in stored:
        lines = ["| over 10 Mbit/s, learning rate 1e-6 | sent, MB | seconds of the sync, median (range) |"]
        lines.append("| --- | --- | --- |")
        whole, *steps = stored["link"]
        seconds = [row["seconds"] for row in steps]
        lines += [
            f"| all weights | {whole['megabytes']:.0f} | {whole['seconds']:.0f} |",
            f"| after a step | {statistics.median(row['megabytes'] for row in steps):.1f} | "
            f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) |",
        ]
        parts.append("\n".join(lines))
    if "shards" in stored:
        lines = [
            "| who compares, under ZeRO-3 | CPU seconds of rank 0, median (range) | of rank 1 |",
            "| --- | --- | --- |",
        ]
        for by_ranks, name in ((False, "rank 0, which gathers all weights"), (True, "each rank its shard")):
            ranks = zip(*(row["cpu_seconds"] for row in stored["shards"] if row["by_ranks"] is by_ranks), strict=True)
            cells = (f"{statistics.median(rank):.2f} ({min(rank):.2f} to {max(rank):.2f})" for rank in ranks)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "trainer", "rank"], help="what to measure")
    parser.add_argument("url", nargs="?", help="of the server, for the trainer behind the link, or a rank's folder")
    parser.add_argument("--write-docs", action="store_true", help="put the stored results into docs/vllm.md")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.part == "trainer":
        print(json.dumps([asdict(row) for row in train_behind_link(arguments.url)]))
        return 0
    if arguments.part == "rank":
        compare_shards(Path(arguments.url))
        return 0
    found = [] if arguments.part is None else [asdict(row) for row in PARTS[arguments.part]()]
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if found:
        stored[arguments.part] = found
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    text = tables(stored)
    print(text)
    if arguments.write_docs:
        replace_between_markers(DOCS, f"\n{text}", begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
