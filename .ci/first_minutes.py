"""The first ten minutes: every command of the README, in its order, in a new clone with an empty home.

`python .ci/first_minutes.py` runs them, compares what they print with what the page says of it, and prints the seconds
and the CPU seconds that each has taken. Commands that start servers are printed instead of run (`--dry_run`), and the
model is a tiny one, which needs no network.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- no-run: [^\n]+ -->\n)?```bash\n(.*?)^```", re.M | re.S)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# What a line must print, or which file it must leave.
SHOWS = {
    "make demo": r"held-out accuracy before SFT: 0\.0\d\d\n(.*\n)*held-out accuracy after SFT: 0\.\d+\n"
    r"held-out accuracy after GRPO: 0\.\d+\n",
    "prefrl doctor": r"(?i)memory",
    "prefrl grpo": r"(?i)reward|vllm-serve --model",
    "prefrl look": r"(?i)reward",
    "prefrl chat": r"model> ",
    "prefrl report": r"report\.html",
    "pip install": r"Successfully installed .*prefrl",
}


def main() -> int:
    """Run all commands, print the table, and return 1 if one failed or showed something else."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [(block, bool(no_run)) for no_run, block in BLOCK.findall(text)]
    rows: list[tuple[str, ...]] = [("command", "seconds", "CPU s", "result")]
    with tempfile.TemporaryDirectory(prefix="prefrl-first-") as name:
        clone = Path(name) / "prefrl"
        (Path(name) / "home").mkdir()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for block, is_left_out in blocks:
            for line in filter(None, (line.partition(" #")[0].strip() for line in block.splitlines())):
                if not line.startswith("#"):
                    rows.append(("not run: " + line, "", "", "") if is_left_out else step(line, clone, text))
                    print("  ".join(rows[-1]), flush=True)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    total, of_cpu = (sum(float(row[column]) for row in rows[1:] if row[column]) for column in (1, 2))
    print(f"{total:.0f} s, {of_cpu:.0f} CPU s")
    return int(any(row[3].startswith("FAILED") for row in rows))


def step(line: str, clone: Path, page: str) -> tuple[str, str, str, str]:
    """Run a line of the page; the line, its seconds, those of the CPU, and what came of it."""
    if line.startswith("prefrl init"):
        prepare(clone)
    shown, line = line, line.replace(MODEL, "model")
    if "--vllm auto" in line:
        line = line.replace("prefrl grpo", "prefrl launch grpo") + " --dry_run"
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = shell(line, clone)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = (f"{time.monotonic() - start:.0f}", f"{of_cpu:.0f}")
    if line.startswith("prefrl init"):
        fill(clone / line.split()[-1])
    expected = next((pattern for start, pattern in SHOWS.items() if line.startswith(start)), "")
    if done.returncode or not re.search(expected, done.stdout):
        print(done.stdout, flush=True)
        return shown, *seconds, f"FAILED: exit code {done.returncode}, expected output {expected!r}"
    return shown, *seconds, compared(done.stdout, page) if line == "make demo" else "as shown"


def compared(printed: str, page: str) -> str:
    """The accuracies of the demo beside those of the page. They depend on the processor, but each stage must gain."""
    found = [float(value) for value in re.findall(r"held-out accuracy .*: (0\.\d+)", printed)]
    page = " ".join(page.split())
    two = r"to between ([\d.]+) and ([\d.]+) after "
    ranges = re.search(f"from 0 {two}SFT, and {two}GRPO", page)
    told = "-".join(ranges.groups()[:2]) + ", " + "-".join(ranges.groups()[2:]) if ranges else "nothing"
    if not found[0] < found[1] < found[2]:
        return f"FAILED: accuracies {found}"
    return f"accuracies {found[1]}, {found[2]}; the page: {told}"


def prepare(clone: Path) -> None:
    """What a user has: data and a model."""
    rows = ({"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8))
    (clone / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = " ".join(map(str, (*range(10), "+", "=")))
    made = shell(f"python examples/tiny.py model {words}", clone)
    assert made.returncode == 0, made.stdout


def fill(config: Path) -> None:
    """What a user writes into the file: the model, and for how long to train."""
    text = config.read_text(encoding="utf-8").replace(MODEL, "model")
    text = re.sub(r"^max_steps: \d+", "max_steps: 2", text, flags=re.M)
    config.write_text(f"{text}\nuse_cpu: true\nmax_completion_length: 4\n", encoding="utf-8")


def shell(line: str, clone: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in the clone, with the environment that `make demo` has made, and an empty home."""
    mine = ("PYTHON", "HF_", "VIRTUAL", "PREFRL", "MAKE")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    variables |= {"HOME": str(clone.parent / "home"), "PATH": f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "input": "1 + 1 =\n", "text": True}
    return subprocess.run(["bash", "-c", line], cwd=clone, env=variables, timeout=3600, check=False, **streams)


if __name__ == "__main__":
    sys.exit(main())
