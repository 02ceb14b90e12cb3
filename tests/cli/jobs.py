"""Commands that stand for those of a cluster, and for `prefrl` on its nodes."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# As SLURM's: with --kill-on-bad-exit=1, a task that fails ends the step. A signal goes to its tasks.
SRUN = """#!/bin/bash
tasks=1
kills=1
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && tasks=${1#*=}
  [[ $1 == --kill-on-bad-exit=* ]] && kills=${1#*=}
  echo "$1" >> "$RECORDS/srun_$$"
  shift
done
trap 'kill $(jobs -p) 2>/dev/null' TERM
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & done
status=0
while [[ -n $(jobs -pr) ]]; do wait -n || { status=$?; ((kills)) && kill $(jobs -p) 2>/dev/null; }; done
exit $status
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && tr , '\\n' <<< "$3"
"""
# Stands for `prefrl`: writes down how it was called. A server runs until it is ended, or fails if it is told to.
# Training ends when there is a server, and fails if it is told to: its end is the end of the server, too.
RECORDER = """#!{python}
import json, os, sys, time
from pathlib import Path
call = {{"argv": sys.argv[1:], "rank": os.environ.get("SLURM_PROCID"), "key": os.environ.get("VLLM_API_KEY")}}
Path(os.environ["RECORDS"], f"call_{{os.getpid()}}").write_text(json.dumps(call))
serves = sys.argv[1] == "vllm-serve"
if os.environ.get("SERVER_FAILS"):
    sys.exit(5) if serves else time.sleep(600)
is_up = Path(os.environ["RECORDS"], "is_up")
if serves:
    is_up.touch()
    time.sleep(600)
while not is_up.exists():
    time.sleep(0.05)
sys.exit(int(os.environ.get("TRAINING_FAILS", "0")))
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def run_job(script: Path, folder: Path, nodes: int, prefrl: str, *options: str, **variables: str) -> int:
    """The exit code of a job whose environments have `prefrl` as their command."""
    executable(folder / "bin/srun", SRUN)
    executable(folder / "bin/scontrol", SCONTROL)
    executable(folder / "env/bin/prefrl", prefrl)
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "RECORDS": str(folder),
        "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{i + 1}" for i in range(nodes)),
        "TRAINER_ENV": f"{folder}/env",
        "SERVER_ENV": f"{folder}/env",
    }
    job = ["bash", str(script), *options]
    return subprocess.run(job, env={**os.environ, **environment, **variables}, cwd=ROOT, timeout=600).returncode


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
