"""`prefrl launch` with real processes: two on the CPU, one of which fails while the other waits for it."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import time
import tomllib
import uuid
from pathlib import Path

import pytest

from prefrl.scripts.launch.command import CONFIGS
from prefrl.scripts.launch.processes import with_variable
from prefrl.scripts.main import main

ROOT = Path(__file__).parents[2]
# Process 1 fails in its second optimizer step, and process 0 waits for it in the next collective.
REWARD = """
import os, time
from pathlib import Path
import torch

def length(completions, **columns):
    Path(f"world_of_{os.environ['RANK']}").write_text(str(torch.distributed.get_world_size()))
    return [-float(len(text)) for text in completions]

step, calls = torch.optim.AdamW.step, 0

def failing(self, *args, **kwargs):
    global calls
    calls += 1
    if calls == 2:
        Path("failed_at").write_text(str(time.time()))
        raise ZeroDivisionError("the cause")
    return step(self, *args, **kwargs)

if os.environ.get("RANK") == "1":
    torch.optim.AdamW.step = failing
"""
# Half a second on a quiet machine; a process group's own time-out is 30 minutes.
END_SECONDS = 180.0


def test_when_a_process_fails_the_others_end_and_its_error_is_told(workspace: Path, model_folder: Path) -> None:
    """The file of the run says how many processes there are."""
    (workspace / "failing_reward.py").write_text(REWARD, encoding="utf-8")
    (workspace / "run.yaml").write_text(
        f"model_name_or_path: {model_folder}\ndataset_name: prompts.jsonl\noutput_dir: out\nuse_cpu: true\n"
        "reward_funcs: [failing_reward:length]\nmax_completion_length: 5\nnum_generations: 2\n"
        "max_steps: 4\nper_device_train_batch_size: 2\nnum_processes: 2\n",
        encoding="utf-8",
    )
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-m", "prefrl.scripts.main", "grpo", "run.yaml"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARK_OF_TEST": mark},
        timeout=600,
    )
    ended = time.time()
    assert done.returncode == 1, done.stderr[-4000:]
    # One training of two processes, which share the data, and not two trainings.
    assert [(workspace / f"world_of_{rank}").read_text(encoding="utf-8") for rank in (0, 1)] == ["2", "2"]
    assert ended - float((workspace / "failed_at").read_text(encoding="utf-8")) < END_SECONDS
    assert with_variable("MARK_OF_TEST", mark) == []
    assert "%|" not in done.stderr + done.stdout  # a bar of a library
    assert "closing signal" not in done.stderr  # torchrun's own words
    first, message = done.stderr.partition("Traceback")[2], done.stderr.splitlines()[-1]
    assert "ZeroDivisionError: the cause" in first.partition("Traceback")[0]
    assert message == (
        "prefrl launch: training failed: process 1 of 2 ended with exit code 1; the others were ended, too. "
        "ZeroDivisionError: the cause"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the algorithm comes first: prefrl launch NAME. Known: sft, dpo,"),
        (["--num_processes", "2"], "the algorithm comes first"),
        (["demo"], "'demo' cannot be launched. Known: "),
        (["grop"], "'grop' cannot be launched. Did you mean 'grpo'?"),
        (["sft", "--learnin_rate", "1"], "unknown option '--learnin_rate'. Did you mean '--learning_rate'?"),
        (["sft", "--num_processes", "two"], "invalid int value: 'two'"),
        (["sft", "--config", "missing.yaml"], "config='missing.yaml': cannot be read"),
        (
            ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--num_processes", "2"],
            "no GPU is visible to train on. To try the run out on CPUs, add --use_cpu true.",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_line_and_nothing_is_started(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("prefrl launch: ConfigError: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_dry_run_prints_the_commands_without_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    argv = ["grpo", "--config", str(ROOT / "examples/grpo_vllm.yaml"), "--use_cpu", "--num_processes", "2"]
    assert main(["launch", *argv, "--vllm", "cpu", "--dry_run"]) == 0
    server, training = capsys.readouterr().out.splitlines()
    assert server.endswith("vllm-serve --model Qwen/Qwen2.5-0.5B-Instruct --port 8000")
    assert training.startswith("PREFRL_NUM_PROCESSES=2 ")
    assert training.endswith(f"grpo --config {ROOT}/examples/grpo_vllm.yaml --use_cpu --num_processes 2 --vllm cpu")
    assert "secret" not in server + training


def test_help_lists_the_options_of_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "grpo", "--help"])
    text = capsys.readouterr().out
    assert "--vllm" in text
    assert "--config" not in text  # it is the run's


def test_the_configs_are_in_the_package_and_the_examples_lead_to_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # All files in the folder of the package go into the wheel but those that git ignores.
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    names = {path.relative_to(ROOT / package).as_posix() for path in CONFIGS.iterdir()}
    assert len(names) == 7
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert not [name for name in (*names, "py.typed") for pattern in ignored if fnmatch.fnmatch(name, pattern)]
    link = ROOT / "examples/accelerate_configs"
    assert not link.readlink().is_absolute()
    assert link.resolve() == CONFIGS
