"""The tutorials run, and so do other blocks of the docs that need files, a module or a small model beside them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from datasets import Dataset
from IPython.core.interactiveshell import InteractiveShell

from prefrl.run.folder import read_metrics
from prefrl.scripts import demo
from prefrl.scripts.main import main
from tests.cli.conftest import run_line, write_jsonl
from tests.pages import FILE, IN_ORDER, MODEL, ROOT, marked_block, module, shell_lines
from tests.vlms import forget_classifiers, image, tiny_vlm

TUTORIALS = ROOT / "docs/tutorials"
STEP = ["--max_steps", "1", "--use_cpu"]


@pytest.fixture
def folder(workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the tutorials, with the tiny model in the places of SmolLM2 and of the story teller."""
    for page in ("grpo_smollm2", "sft_gsm8k", "dpo_gsm8k", "distillation"):
        for text, name in FILE.findall((TUTORIALS / f"{page}.md").read_text(encoding="utf-8")):
            (workspace / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(demo, "cached_smollm2", lambda say: model_folder)
    runpy.run_path("fetch_smollm2.py")
    (workspace / "stories260k").symlink_to(model_folder)
    return workspace


def test_the_grpo_tutorial_trains_and_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("make_sums.py")
    assert main(["grpo", "grpo.yaml", *STEP]) == 0
    rewards = ["--reward_funcs", "sums.py:right", "sums.py:bare", "--correct_reward", "right"]
    capsys.readouterr()
    assert main(["eval", "runs/sums", "held_out.jsonl", *rewards, "--max_completion_length", "4"]) == 0
    assert "pass@1" in capsys.readouterr().out


def test_the_tutorials_on_gsm8k_train(folder: Path) -> None:
    write_jsonl(folder / "train.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(48)])
    solutions = {"small": {"solution": "5", "is_correct": True}, "large": {"solution": "6", "is_correct": False}}
    lines = [{"question": f"{i}+1?", "ground_truth": "5", **solutions} for i in range(48)]
    write_jsonl(folder / "example_model_solutions.jsonl", lines)
    runpy.run_path("make_sft_rows.py")
    assert main(["sft", "sft.yaml", *STEP]) == 0
    runpy.run_path("make_pairs.py")
    assert main(["dpo", "dpo.yaml", *STEP]) == 0
    assert (folder / "runs/gsm8k-dpo/model.safetensors").exists()


def test_the_quickstart_trains(workspace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On rows like those of `openai/gsm8k`, which is on the Hub."""
    write_jsonl(workspace / "rows.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(16)])
    here = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--dataset_config", "None"]
    for text, name in FILE.findall((ROOT / "docs/quickstart.md").read_text(encoding="utf-8")):
        Path(name).write_text(text, encoding="utf-8")
        options = [*here, *STEP, "--bf16", "false", "--gradient_accumulation_steps", "1"]
        if name == "grpo.yaml":
            options += ["--max_completion_length", "4"]
        assert main([name.partition(".")[0], name, *options]) == 0
    look, measure = (shell_lines("quickstart.md", f"prefrl {command} ")[0] for command in ("look", "eval"))
    run_line(look)
    Path("gsm8k/main").mkdir(parents=True)
    Dataset.from_json("rows.jsonl").to_parquet("gsm8k/main/test-00000-of-00001.parquet")
    capsys.readouterr()
    assert main([*as_bash_reads(measure)[1:], "--max_completion_length", "4"]) == 0
    assert "best@1" in capsys.readouterr().out
    code = marked_block("quickstart.md", "GRPOTrainer(")
    shorter = {"=200": "=1", "=300": "=4", "accumulation_steps=4": "accumulation_steps=1", "bf16=True": "use_cpu=True"}
    smaller = {MODEL: str(model_folder), '"openai/gsm8k", "main"': '"json", data_files="rows.jsonl"'}
    for text, other in {**shorter, **smaller}.items():
        assert text in code
        code = code.replace(text, other)
    exec(compile(code, "<quickstart>", "exec"), {})


def as_bash_reads(line: str) -> list[str]:
    """The words of a line, also those in $'...'."""
    done = subprocess.run(["bash", "-c", rf"printf '%s\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_distillation_tutorial_trains(folder: Path) -> None:
    runpy.run_path("make_beginnings.py")
    assert main(["distillation", "stories.yaml", "--model_name_or_path", "smollm2", *STEP]) == 0
    assert Path("runs/stories/model.safetensors").exists()
    module(ROOT / "examples/first_layers.py").main("smollm2", "1", "small")
    runpy.run_path("make_questions.py")
    assert main(["distillation", "smollm2.yaml", *STEP, "--dataset_train_split", "train[:16]"]) == 0
    assert json.loads(Path("runs/small/config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 1


def test_a_teacher_in_a_file_teaches(workspace: Path, model_folder: Path) -> None:
    write_jsonl(workspace / "rows.jsonl", [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(16)])
    page = "trainers/distillation.md"
    ask, train = (*shell_lines(page, "prefrl teacher "), *shell_lines(page, "prefrl distillation "))
    run_line(ask.replace("Qwen/Qwen2.5-7B-Instruct", str(model_folder)))
    run_line(" ".join([train.replace(MODEL, str(model_folder)), *STEP, "--output_dir", "of-command"]))
    code = marked_block(page, "rows.parquet").replace(MODEL, str(model_folder))
    exec(compile(code, "<distillation>", "exec"), {})
    found = [read_metrics(Path(run))[0]["loss"] for run in ("of-command", "runs/stored")]
    assert found[0] == pytest.approx(found[1])


class Trial(NamedTuple):
    """Of the stand-in for Optuna: the first proposes the upper bound, the second the lower one."""

    number: int

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        return (high, low)[self.number]

    def suggest_categorical(self, name: str, choices: Sequence[float]) -> float:
        return choices[self.number]


class Study:
    """Of the stand-in: two trials."""

    def __init__(self, **options: Any) -> None:
        assert options["direction"] == "maximize"

    def optimize(self, objective: Callable[[Trial], float], n_trials: int) -> None:
        assert n_trials == 20
        self.values = [objective(Trial(number)) for number in range(2)]
        self.best_params, self.best_value = {}, max(self.values)


def test_the_script_of_a_sweep_runs_its_trials(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands run in this process."""
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=Study))
    options = {
        "model_name_or_path": model_folder,
        "dataset_name": "prompts.jsonl",
        "reward_funcs": "my_rewards.py:short",
    }
    options |= {"max_steps": 2, "per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
    lines = [f"{key}: {value}\n" for key, value in {**options, "logging_steps": 1, "use_cpu": "true"}.items()]
    Path("run.yaml").write_text("".join(lines), encoding="utf-8")
    code = marked_block("sweeps.md", "import optuna").replace("import subprocess\n", "")
    script: dict[str, Any] = {"subprocess": SimpleNamespace(run=run_words)}
    exec(compile(code, "<sweep>", "exec"), script)
    for number, rate in enumerate((1e-4, 1e-6)):
        rows = read_metrics(Path(f"runs/sweep/{number}"))
        assert rows[0]["learning_rate"] == rate
        rewards = [row["reward"] for row in rows if "reward" in row]
        assert script["study"].values[number] == pytest.approx(sum(rewards) / 2)


def run_words(words: Sequence[str], *, check: bool) -> None:
    """A command of a script."""
    assert words[0] == "prefrl"
    assert check
    assert main([*words[1:]]) == 0


def test_the_blocks_about_images_train(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_classifiers(monkeypatch)
    for part in tiny_vlm("llava"):
        part.save_pretrained("vlm")
    message = [{"role": "user", "content": "Which color?"}]
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    pairs = Dataset.from_list([{"prompt": message, **sides, "images": [image((255, 0, 0))]}] * 8)
    names: dict[str, Any] = {"pairs": pairs}
    for text in ("Image.new", "RewardTrainer("):
        code = marked_block("images.md", text).replace("Qwen/Qwen2.5-VL-3B-Instruct", "vlm").replace("* 32", "* 3")
        for run in ("squares", "judge"):
            code = code.replace(f'Config("runs/{run}"', f'Config("runs/{run}", use_cpu=True, max_steps=1')
        code = code.replace('GRPOConfig("runs/squares"', 'GRPOConfig("runs/squares", max_completion_length=4')
        exec(compile(code, "<images>", "exec"), names)
        assert "reward" in read_metrics(Path("runs/squares"))[0]
    assert Path("runs/judge/model.safetensors").exists()


@pytest.mark.parametrize(("body", "code"), [("a + b", 0), ("a * b", 1), ("__import__('os')._exit(0)", 1)])
def test_the_hidden_test_of_an_agent_passes_the_solution_alone(body: str, code: int, tmp_path: Path) -> None:
    hidden, solution = tmp_path / "hidden.py", tmp_path / "src/f.py"
    hidden.write_text(marked_block("agents.md", "# hidden.py"), encoding="utf-8")
    solution.parent.mkdir()
    solution.write_text(f"def f(a, b):\n    return {body}\n", encoding="utf-8")
    done = subprocess.run([sys.executable, hidden.name], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert not hidden.exists()


MAKER = module(ROOT / "docs/make_notebooks.py")


@pytest.mark.parametrize("page", MAKER.pages(), ids=lambda page: page.stem)
def test_a_notebook_is_that_of_its_tutorial(page: Path) -> None:
    """Else run `python docs/make_notebooks.py`."""
    assert MAKER.notebook_of(page).read_text(encoding="utf-8") == MAKER.notebook(page)


def test_each_notebook_has_a_tutorial() -> None:
    assert {MAKER.notebook_of(page) for page in MAKER.pages()} == {*MAKER.NOTEBOOKS.iterdir()}


@pytest.mark.parametrize("name", IN_ORDER)
def test_cells_run_in_their_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps instead of all."""
    folder = tmp_path / "docs/notebooks"  # the first cell goes up from it
    folder.mkdir(parents=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "examples"), *sys.path])
    shell = InteractiveShell()
    monkeypatch.setattr(shell, "system", run_line)
    for cell in json.loads((MAKER.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = re.sub(r"(max_steps(?:=|: ))\d+", r"\g<1>2", "".join(cell["source"]))
            shell.run_cell(code).raise_error()


def test_a_notebook_without_a_clone_gets_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Colab, which has only the notebook."""

    def system(line: str) -> None:
        lines.append(line)
        (tmp_path / "prefrl-1.0/docs/notebooks").mkdir(parents=True, exist_ok=True)

    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    shell = InteractiveShell()
    monkeypatch.setattr(shell, "system", system)
    shell.run_cell(MAKER.START).raise_error()
    assert [line.split()[:2] for line in lines] == [["pip", "download"], ["pip", "install"]]
    assert Path.cwd() == tmp_path / "prefrl-1.0"


def test_notebooks_can_be_opened_in_colab_where_github_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = module(ROOT / "docs/site_hooks.py")
    for page in MAKER.pages():
        text = page.read_text(encoding="utf-8")
        monkeypatch.delenv("PREFRL_REPOSITORY", raising=False)
        assert "colab" not in hooks.on_page_markdown(text)
        monkeypatch.setenv("PREFRL_REPOSITORY", "https://github.com/owner/name")
        link = f"https://colab.research.google.com/github/owner/name/blob/main/docs/notebooks/{page.stem}.ipynb"
        assert f"({link})" in hooks.on_page_markdown(text)
