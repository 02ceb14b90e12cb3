"""Train GRPO on a real vLLM server for thousands of steps while something fails every few steps.

    make bench-soak                                    2,000 steps, a fault every 20: 35 minutes on 2 cores
    python -m benchmarks.soak runs/soak --steps 200    fewer

What fails is drawn at random from `FAULTS`. A run that ends is started again with the same command, as by a scheduler.
The report says which faults struck, how each start of the trainer ended, and whether memory, open files and threads
grew. It is printed, and written to `results/soak.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from transformers import AutoModelForCausalLM, TrainerCallback

from prefrl.generation.vllm.members import Registration
from prefrl.scripts.launch.processes import kill_all, with_variable
from prefrl.trainer.configs import GRPOConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer
from tests.assets import tiny_tokenizer
from tests.contract.cases import dataset_of, ragged_reward
from tests.contract.survival_worker import scored, sealed
from tests.vllm.faults import GENERATE, Proxy, drop, hang, proxy_of, status
from tests.vllm.server import KEY, Server, living, save_tiny_model, shared_memory_of

__all__ = ["FAULTS", "Soak", "growth", "main", "train"]

RESULTS = Path(__file__).parent / "results" / "soak.json"
COMMAND = (sys.executable, "-m", "benchmarks.soak")
# A start of the trainer that made fewer steps says nothing about growth.
WARM_UP, FEWEST = 30, 100
# A run of this length has an end, even if training does not.
SECONDS_FOR_A_STEP = 30.0
# Environment variable of everything that a soak starts.
MARK = "PREFRL_SOAK"
SECONDS_TO_KILL = 10.0


# The trainer, a process of its own.


class Progress(TrainerCallback):
    """Writes a line after each step: process, step, resident memory in MB, open files, threads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "steps"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """HuggingFace's hook."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(" ".join(map(str, (os.getpid(), state.global_step, *usage(os.getpid())))) + "\n")


def usage(pid: int) -> tuple[float, int, int]:
    """Resident memory in MB, open files and threads of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return float(fields["VmRSS"].split()[0]) / 1024, num_files, int(fields["Threads"])


def train(folder: Path, steps: int) -> None:
    """Train to the end, or until something ends it."""

    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        order = folder / "reward-fault"
        if order.exists():
            kind = order.read_text(encoding="utf-8")
            order.unlink()
            if kind == "raise":
                raise ValueError("the checker is broken")
            time.sleep(3600)
        with (folder / "scored").open("a", encoding="utf-8") as file:
            file.write(f"{trainer_state.global_step}\n")
        return ragged_reward(completions, **columns)

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.generation_config.eos_token_id = [1, *range(10, 128, 5)]  # lengths differ
    config = GRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        use_vllm=True,
        vllm_server_base_url=[f"dir:{folder / 'fleet'}"],
        vllm_server_timeout=300,
        vllm_kwargs={"request_timeout": 20},
        reward_timeout=5,
        on_reward_error="skip",
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=32,
        max_steps=steps,
        save_steps=50,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
    )
    data, tokenizer = dataset_of("grpo", 256), tiny_tokenizer()
    trainer = GRPOTrainer(model, reward, config, data, processing_class=tokenizer, callbacks=[Progress(folder)])
    trainer.train(resume_from_checkpoint=True)


# What fails.


class Soak:
    """A server behind a proxy, one that joins and leaves, and a trainer that is started until training is complete."""

    def __init__(self, folder: Path, server: Server, proxy: Proxy, steps: int) -> None:
        self.folder, self.server, self.proxy, self.steps = folder, server, proxy, steps
        self.registrations = {proxy.url: Registration(folder / "fleet", proxy.url, key=KEY)}
        self.second: Server | None = None
        self.moving: threading.Thread | None = None
        self.joins = 0
        self.trainer: subprocess.Popen[bytes] | None = None
        self.ends: Counter[str] = Counter()
        self.sessions: list[int] = []
        self.scored_again: list[str] = []
        self.restarting: threading.Thread | None = None

    def start_trainer(self) -> None:
        """Start it, or start it again."""
        self._before = len(scored(self.folder)), sealed(self.folder / "run")
        with (self.folder / "trainer.log").open("ab") as log:
            self.trainer = subprocess.Popen(
                [*COMMAND, str(self.folder), "--train", "--steps", str(self.steps)],
                env=os.environ | {"VLLM_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions.append(self.trainer.pid)

    def has_ended(self) -> bool:
        """Whether training is complete. A trainer that ended in another way is started again."""
        code = self.running.poll()
        if code is None:
            return False
        count, known = self._before
        self.scored_again += [step for step in scored(self.folder)[count:] if step in known]
        self.ends[str(code)] += 1
        if code == 0:
            return True
        self.start_trainer()
        return False

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The trainer's process."""
        if self.trainer is None:
            raise RuntimeError("start_trainer() comes first")
        return self.trainer

    def restart_server(self) -> None:
        """Kill it and start it again meanwhile."""
        if self.restarting is not None:
            self.restarting.join()
        self.server.kill()
        self.restarting = threading.Thread(target=self.server.start)
        self.restarting.start()

    def show_life(self) -> None:
        """Renew the files of the servers, as `prefrl vllm-serve --join` does."""
        for registration in tuple(self.registrations.values()):
            registration.renew()

    def join_or_leave(self) -> None:
        """Let the second server come or, while it samples, go."""
        if self.moving is not None:
            self.moving.join()
        self.moving = threading.Thread(target=self._join if self.second is None else self._leave)
        self.moving.start()

    def _join(self) -> None:
        second = self.second = Server(self.server.model_dir, folder=self.folder)
        registration = Registration(self.folder / "fleet", second.url, key=KEY)
        registration.renew()
        self.registrations[second.url] = registration
        self.joins += 1

    def _leave(self) -> None:
        second, self.second = self.second, None
        if second is not None:
            self.registrations.pop(second.url).leave()
            second.stop()

    def end(self) -> None:
        """Wait for what is being done, and end the trainer and the second server."""
        if self.trainer is not None:
            self.trainer.kill()
        for thread in (self.restarting, self.moving):
            if thread is not None:
                thread.join()
        self._leave()

    def order(self, kind: str) -> None:
        """Let the next call of the reward fail."""
        (self.folder / "reward-fault").write_text(kind, encoding="utf-8")


FAULTS: dict[str, Callable[[Soak], None]] = {
    "server killed": Soak.restart_server,
    "a server joins or leaves": Soak.join_or_leave,
    "trainer killed": lambda soak: soak.running.send_signal(signal.SIGKILL),
    "trainer terminated": lambda soak: soak.running.send_signal(signal.SIGTERM),
    "three requests get status 500": lambda soak: soak.proxy.fail(GENERATE, status(500, "out of luck"), times=3),
    "three connections break": lambda soak: soak.proxy.fail(GENERATE, drop, times=3),
    "a request is not answered": lambda soak: soak.proxy.fail(GENERATE, hang, times=1),
    "a weight transfer is refused": lambda soak: soak.proxy.fail("/update_weights", status(500, "no"), times=1),
    "the reward raises": lambda soak: soak.order("raise"),
    "the reward hangs": lambda soak: soak.order("hang"),
}
# These strike less often than others, so that some starts of the trainer are long enough to see whether memory grows.
ENDS_THE_TRAINER, RARELY = ("trainer killed", "trainer terminated", "a weight transfer is refused"), 0.35


def run(folder: Path, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Train until all steps are done; returns the report."""
    rng, struck, started = random.Random(seed), Counter[str](), time.monotonic()
    model = save_tiny_model(folder / "model")
    server = Server(model, folder=folder, flags=["--num-gpu-blocks-override", "256"])  # a cache that is soon full
    memory_of_server: list[float] = []
    try:
        with proxy_of(server.url) as proxy, ExitStack() as stack:
            soak = Soak(folder, server, proxy, steps)
            stack.callback(soak.end)
            soak.start_trainer()
            next_fault = every
            while not soak.has_ended():
                soak.show_life()
                if time.monotonic() - started > steps * SECONDS_FOR_A_STEP:
                    raise TimeoutError(f"{last_step(folder)} of {steps} steps after {steps * SECONDS_FOR_A_STEP:g} s")
                if last_step(folder) >= next_fault:
                    (name,) = rng.choices(list(FAULTS), [RARELY if name in ENDS_THE_TRAINER else 1 for name in FAULTS])
                    print(f"{time.monotonic() - started:6.0f} s, step {last_step(folder)}: {name}", flush=True)
                    memory_of_server.append(round(sum(usage(pid)[0] for pid in living(server.process.pid))))
                    time.sleep(rng.random())  # at any place of a step
                    FAULTS[name](soak)
                    struck[name] += 1
                    next_fault += every
                time.sleep(0.05)
    finally:
        server.stop()
    state = json.loads((folder / "run" / f"checkpoint-{steps}" / "trainer_state.json").read_text(encoding="utf-8"))
    return {
        "steps": state["global_step"],
        "seconds": round(time.monotonic() - started),
        "faults": dict(struck),
        "joins": soak.joins,
        "ends_of_the_trainer": dict(soak.ends),
        "scored_again": soak.scored_again,
        "orphans": [pid for session in (*soak.sessions, server.process.pid) for pid in living(session)],
        "files": sum(path.is_file() for path in (folder / "run").rglob("*")),
        "server_mb": memory_of_server,
        "starts": growth((folder / "steps").read_text(encoding="utf-8").splitlines()),
    }


def last_step(folder: Path) -> int:
    """The last optimizer step that was made; after a crash, steps are made again."""
    path = folder / "steps"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return max((int(line.split()[1]) for line in lines[-200:]), default=0)


def growth(lines: list[str]) -> list[dict[str, float]]:
    """Of each start of the trainer with enough steps: how memory, files and threads changed after a warm-up.

    Args:
        lines: What `Progress` wrote.
    """
    rows = defaultdict(list)
    for line in lines:
        pid, *numbers = line.split()
        rows[pid].append([float(number) for number in numbers])
    found = []
    for steps in rows.values():
        if len(steps) < FEWEST:
            continue
        _, memory, files, threads = zip(*steps[WARM_UP:], strict=True)
        slope = statistics.linear_regression(range(len(memory)), memory).slope
        found.append(
            {
                "steps": len(steps),
                "mb_first": round(memory[0]),
                "mb_last": round(memory[-1]),
                "mb_in_100_steps": round(100 * slope, 2),
                "files_first": files[0],
                "files_last": files[-1],
                "threads_first": threads[0],
                "threads_last": threads[-1],
            }
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is written; emptied first")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--every", type=int, default=20, help="steps between two faults")
    parser.add_argument("--seed", type=int, default=0, help="decides which faults")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.train:
        train(arguments.folder, arguments.steps)
        return 0
    os.environ[MARK] = secrets.token_hex(8)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end_with_all)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    report = run(arguments.folder.resolve(), arguments.steps, arguments.every, arguments.seed)
    text = json.dumps(report, indent=1)
    print(text)
    RESULTS.write_text(text + "\n", encoding="utf-8")
    return 0


def _end_with_all(number: int, _frame: object) -> NoReturn:
    """End what this process has started, and this process: a thread may be waiting minutes for a server."""
    find = partial(with_variable, MARK, os.environ[MARK])
    segments = {path for pid in find() for path in shared_memory_of(os.getsid(pid))}
    kill_all(find, seconds=SECONDS_TO_KILL)
    for path in segments:
        path.unlink(missing_ok=True)
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
