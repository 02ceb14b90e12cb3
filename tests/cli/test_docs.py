"""The code and commands in the README, the docs and the examples run."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from IPython.core.interactiveshell import InteractiveShell

from prefrl.losses.preference.pairwise import CPO_LOSSES, PAIR_LOSSES, PairLoss
from prefrl.options.fields import listed_fields
from prefrl.options.params import kwargs_options
from prefrl.registry import REGISTRY, Algorithm
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.inputs import read
from prefrl.scripts.main import OTHERS, main
from tests.cli.conftest import run_line, write_jsonl
from tests.parsers import parser_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# A block that cannot run here has a comment in the line before it, which says why: <!-- no-run: needs a GPU -->
# Tutorials whose blocks build on each other, which run below in their order.
IN_ORDER = ("first_run", "reward_ppo")
# Pages whose blocks are one program.
ONE_PROGRAM = ("agents",)
PYTHON_BLOCK = re.compile(r"^(<!-- no-run: [^\n]+ -->\n)?```python\n(.*?)^```", re.M | re.S)


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_option_tables_are_those_of_the_configs(page: Path) -> None:
    """Else run `python docs/make_tables.py`."""
    text = page.read_text(encoding="utf-8")
    assert module(ROOT / "docs/make_tables.py").render(text) == text


def test_keys_stand_on_the_page_that_the_line_of_their_option_links_to() -> None:
    tables: Any = module(ROOT / "docs/make_tables.py")
    for row in REGISTRY.values():
        for option in kwargs_options(row.load_config()):
            page = ROOT / "docs" / tables.KEY_PAGES.get(option.name, "losses.md")
            assert f"\n| `{option.name}` | " in page.read_text(encoding="utf-8").partition("<!-- keys:")[2], page


def test_each_algorithm_has_its_option_table() -> None:
    for row in REGISTRY.values():
        marker = f"<!-- options: prefrl.{row.config.partition(':')[2]} -->"
        assert marker in (ROOT / row.docs).read_text(encoding="utf-8")


@pytest.mark.parametrize("row", REGISTRY.values(), ids=lambda row: row.name)
def test_each_option_is_in_the_table_of_its_algorithm_or_in_a_shared_one_that_it_links_to(row: Algorithm) -> None:
    page = (ROOT / row.docs).read_text(encoding="utf-8")
    shared = re.split(r"^## ", (ROOT / "docs/trainers/options.md").read_text(encoding="utf-8"), flags=re.M)
    links = re.findall(r"^- \[(.+)\]\(options\.md#", page, re.M)
    tables = [page, *(section for section in shared if section.partition("\n")[0] in links)]
    listed = set(re.findall(r"^\| `(\w+)` \|", "".join(tables), re.M))
    groups = [group for group in row.load_config().__mro__ if group.__module__.startswith("prefrl.")]
    own = {name for group in groups for name in inspect.get_annotations(group)}
    assert {field.name for field in listed_fields(row.load_config())} & own <= listed


@pytest.mark.parametrize(("page", "losses"), [("dpo", PAIR_LOSSES), ("cpo", CPO_LOSSES)])
def test_each_loss_is_in_the_table_of_its_page_with_its_paper(page: str, losses: Mapping[str, PairLoss[Any]]) -> None:
    text = (ROOT / f"docs/trainers/{page}.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)`(?: \(default\))? \| (.+)\|$", text.partition("## Losses")[2], re.M))
    for loss, row in losses.items():
        for paper in re.findall(r"arXiv (\S+?),", row.source):
            assert f"https://arxiv.org/abs/{paper})" in table[loss]
    assert losses.keys() <= table.keys()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    """What stands between values, which the page writes as `...`."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "prefrl").rglob("*.py"))
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    code = "\n".join(text for text in texts if isinstance(text, str))
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8").partition("## Frequent messages")[2]
    messages = re.findall(r"^\| `\w+` \| `([^`]+)` \|", page, re.M)
    assert len(messages) > 15
    assert [part for message in messages for part in re.split(r"\.{3,4}", message) if part.strip() not in code] == []


def _blocks() -> list[object]:
    found = []
    for page in PAGES:
        codes = [code for no_run, code in PYTHON_BLOCK.findall(page.read_text(encoding="utf-8")) if not no_run]
        if page.stem in ONE_PROGRAM:
            codes = ["\n".join(codes)]
        if page.stem not in IN_ORDER:
            found += [pytest.param(code, id=f"{name(page)}-{i}") for i, code in enumerate(codes)]
    return found


@pytest.mark.parametrize("code", _blocks())
def test_python_blocks_run(code: str, workspace: Path, stopping_folder: Path, reward_folder: Path) -> None:
    prompts = workspace / "prompts.jsonl"
    prompts.write_text(prompts.read_text(encoding="utf-8") * 4, encoding="utf-8")  # a step has 8 rows
    shutil.copy(prompts, workspace / "questions.jsonl")
    if "RewardTrainer(" not in code:  # it writes this model
        shutil.copytree(reward_folder, workspace / "runs/reward")
    exec(compile(code.replace(MODEL, str(stopping_folder)), "<docs>", "exec"), {"__name__": "__main__"})


def _command_lines(command: str | None = None) -> list[object]:
    """Words of each line with an algorithm, behind `prefrl` or behind `prefrl COMMAND`."""
    before = ["prefrl"] if command is None else ["prefrl", command]
    lines = [
        (page, line)
        for page in PAGES
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        for line in block.replace("\\\n", "").splitlines()
    ]
    found = [(page, line, words) for page, line in lines for words in [shlex.split(line, comments=True)]]
    return [
        pytest.param(words[len(before) :], id=f"{name(page)}: {line}")
        for page, line, words in found
        if words[: len(before)] == before and words[len(before)] in REGISTRY
    ]


@pytest.mark.parametrize("words", _command_lines())
def test_command_lines_parse(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the examples, the files of the quickstart and the one that `prefrl init` prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert main(["init", words[0]]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    for text, file in FILE.findall((ROOT / "docs/quickstart.md").read_text(encoding="utf-8")):
        (tmp_path / file).write_text(text, encoding="utf-8")
    script, _, _ = parser_of(REGISTRY[words[0]]).parse_args_and_config([*words[1:], "--use_cpu"])
    assert script.model_name_or_path == MODEL


LAUNCHES = _command_lines("launch")
ON_CLUSTERS = [case for case in LAUNCHES if "--write" in case.values[0]]


@pytest.mark.parametrize("words", ON_CLUSTERS)
def test_files_for_clusters_are_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", words[0]]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    write_jsonl(tmp_path / "data.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    assert main(["launch", *words, "--output_dir", "out"]) == 0
    assert len([*Path("out").glob("launch.*")]) == 2


@pytest.mark.parametrize("words", [case for case in LAUNCHES if case not in ON_CLUSTERS])
def test_launches_parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given = read(REGISTRY[words[0]], [word for word in words[1:] if word != "--dry_run"])
    options = launch_options(given, {})
    if options is not None:
        options.check_machines()
    assert given.values["model_name_or_path"] == MODEL


EXAMPLE_CONFIGS = sorted((ROOT / "examples").glob("*.yaml"))
# tests/vllm trains those that need a server.
WITHOUT_SERVER = [path for path in EXAMPLE_CONFIGS if "use_vllm: true" not in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EXAMPLE_CONFIGS, ids=name)
def test_example_configs_say_how_they_are_run(path: Path) -> None:
    words = shlex.split(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#"))
    assert words[:4] == ["prefrl", path.stem.partition("_")[0], "--config", name(path)]


@pytest.mark.parametrize("path", WITHOUT_SERVER, ids=name)
def test_example_configs_train(
    path: Path, workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # for agents
    write_jsonl(workspace / "functions.jsonl", module(ROOT / "examples/grpo_coding_agent.py").rows())
    write_jsonl(workspace / "questions.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 8)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(workspace / "chats.jsonl", [{"messages": chat}] * 8)
    (workspace / "examples").symlink_to(ROOT / "examples")
    options = ["--model_name_or_path", str(model_folder), "--use_cpu", "--max_steps", "1", "--output_dir", "out"]
    if path.stem.startswith("grpo"):
        options += ["--num_generations", "2", "--per_device_train_batch_size", "2"]
    assert main([path.stem.partition("_")[0], "--config", str(path), *options]) == 0


@pytest.mark.parametrize(
    ("script", "data"), [("sft.py", "texts.jsonl"), ("dpo.py", "pairs.jsonl"), ("grpo_gsm8k.py", "gsm8k.jsonl")]
)
def test_example_scripts_train(script: str, data: str, workspace: Path, model_folder: Path) -> None:
    write_jsonl(workspace / "gsm8k.jsonl", [{"question": "What is 2+3?", "answer": "#### 5"}] * 4)
    module(ROOT / "examples" / script).main(str(model_folder), data, "out")
    assert (workspace / "out/model.safetensors").exists()


@pytest.mark.parametrize(
    ("script", "is_tiny"),
    [
        ("grpo_calculator.py", True),
        ("grpo_calculator.py", False),
        ("grpo_guessing_game.py", True),
        ("grpo_guessing_game.py", False),
    ],
)
def test_examples_of_episodes_train(
    script: str, is_tiny: bool, workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    model = None if is_tiny else str(model_folder)
    rewards = module(ROOT / "examples" / script).main(model, "out", max_steps=1)
    assert len(rewards) == 1


def test_the_example_of_a_coding_agent_trains(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert len(module(ROOT / "examples/grpo_coding_agent.py").main(None, "out", max_steps=1, num_generations=2)) == 1


def test_the_example_with_images_trains(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert len(module(ROOT / "examples/grpo_images.py").main(None, "out", max_steps=1)) == 1


TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
# The first line of a file names it: `# sums.py`, `# prefrl grpo grpo.yaml`.
FILE = re.compile(r"^```(?:python|yaml)\n(# (?:prefrl \w+ )?(\S+)\n.*?)^```", re.M | re.S)
STEP = ["--max_steps", "1", "--use_cpu"]


@pytest.fixture
def folder(workspace: Path, model_folder: Path) -> Path:
    (workspace / "smollm2").symlink_to(model_folder)
    for page in ("grpo_smollm2", "sft_gsm8k", "dpo_gsm8k", "distillation"):
        for text, name in FILE.findall((TUTORIALS / f"{page}.md").read_text(encoding="utf-8")):
            (workspace / name).write_text(text, encoding="utf-8")
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


def test_the_quickstart_trains(workspace: Path, model_folder: Path) -> None:
    """On rows like those of `openai/gsm8k`, which is on the Hub."""
    write_jsonl(workspace / "rows.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(16)])
    here = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--dataset_config", "None"]
    for text, name in FILE.findall((ROOT / "docs/quickstart.md").read_text(encoding="utf-8")):
        Path(name).write_text(text, encoding="utf-8")
        options = [*here, *STEP, "--bf16", "false", "--gradient_accumulation_steps", "1"]
        if name == "grpo.yaml":
            options += ["--max_completion_length", "4"]
        assert main([name.partition(".")[0], name, *options]) == 0
    assert Path("runs/gsm8k-grpo/completions").is_dir()


def test_the_distillation_tutorial_trains(folder: Path) -> None:
    module(ROOT / "examples/first_layers.py").main("smollm2", "1", "small")
    runpy.run_path("make_questions.py")
    assert main(["distillation", "smollm2.yaml", *STEP, "--dataset_train_split", "train[:16]"]) == 0
    assert json.loads(Path("runs/small/config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 1


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


BLOCK = re.compile(r"^( *)```(?:bash|sh|shell|console)\n(.*?)^\1```", re.M | re.S)
PROGRAMS = {
    *("prefrl", "accelerate", "python", "python3", "pip", "make", "sbatch", "curl"),
    *("cd", "docker", "echo", "export", "git", "hf", "lm_eval", "ln", "mkdir", "ollama", "source", "uvx", "vllm"),
}


def blocks_of(text: str) -> list[str]:
    """The shell blocks of a page, without the prompts of a console."""
    blocks = [textwrap.dedent(block) for _, block in BLOCK.findall(text)]
    return [re.sub(r"^\$ ", "", block, flags=re.M) for block in blocks]


# What people type into the search, and the page that they want: its title, or a heading of it, has the word.
WORDS = {
    "install": "installation.md",
    "quickstart": "quickstart.md",
    "out of memory": "memory.md",
    "OOM": "memory.md",
    "multi-turn": "environments.md",
    "colocate": "vllm.md",
    "QLoRA": "peft.md",
    "chat template": "chat_templates.md",
    "GGUF": "serve_and_export.md",
    "Ollama": "serve_and_export.md",
    "serve": "serve_and_export.md",
    "lm-eval": "serve_and_export.md",
    "generate": "after_training.md",
    "evaluate": "after_training.md",
    "resume": "checkpoints.md",
    "sweep": "sweeps.md",
    "SLURM": "distributed.md",
    "tools": "environments.md",
    "FAQ": "faq.md",
    "wandb": "watching.md",
}
WITHIN = {"wandb": "^.*`wandb`", "colocate": "^.*`?colocate`?", "SLURM": "^.*SLURM"}


@pytest.mark.parametrize(("word", "page"), WORDS.items())
def test_words_that_people_type_are_on_the_page_that_they_want(word: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.search(WITHIN.get(word, rf"^#+ .*{re.escape(word)}"), text, re.M | re.I)


def test_the_site_has_each_page_in_its_navigation_and_the_search_none_of_the_python_api() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/]+\.md)$", navigation, re.M))
    for path in (ROOT / "docs/api").glob("*.md"):
        assert path.read_text(encoding="utf-8").startswith("---\nsearch:\n  exclude: true\n---\n")


CODE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)
# What fits into the column of the site at 1280 pixels; output is set in a smaller size, see docs/site.css.
WIDTH, WIDTH_OF_OUTPUT = 78, 98


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_fits_into_its_column(page: Path) -> None:
    blocks = CODE.findall(page.read_text(encoding="utf-8"))
    lines = [(line, language) for _, language, code in blocks for line in textwrap.dedent(code).splitlines()]
    limits = {"text": WIDTH_OF_OUTPUT, "math": math.inf}
    assert [line for line, language in lines if len(line) > limits.get(language, WIDTH)] == []


def check(script: str) -> None:
    """Bash can parse it, and each line calls a program: a comment that is wrapped like prose is a command for bash."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}in:\n{script}"
    for line in script.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        assert not words or Path(words[0]).name in PROGRAMS, line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_shell_blocks_of_the_pages_parse(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        check(block)


def test_commands_in_the_help_parse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Indented below `Example:`, or at the end of a line, behind a colon."""
    monkeypatch.setenv("COLUMNS", "1000")
    found = 0
    for words in ([], *([command] for command in (*REGISTRY, *OTHERS))):
        with contextlib.suppress(SystemExit):
            main([*words, "--help"])
        for line in re.findall(r"(?<!usage)(?:^ +|: )(prefrl .*)$", capsys.readouterr().out, re.M):
            check(line)
            found += 1
    assert found > 2 * len(REGISTRY)


class Try(NamedTuple):
    """How a block of the README is run."""

    about: str
    run: Callable[[str, Path], None]


def _make(block: str, _: Path) -> None:
    """What the target would do."""
    # The variables of `make test`, if that runs the tests, would make it tell its folder in the last line.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = [*shlex.split(block), "--dry-run", "--always-make"]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("/prefrl demo")


def _pip(block: str, _: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for _, _, flag, package in (shlex.split(line, comments=True) for line in block.splitlines()):
        assert flag == "-e"
        assert set(package.removeprefix(".").strip("[]").split(",")) <= {*extras, ""}


def _prefrl(block: str, model: Path) -> None:
    first, *rest = block.splitlines()
    run_line(first)
    text = Path("run.yaml").read_text(encoding="utf-8").replace(MODEL, str(model))
    text = text.replace("max_steps: 100", "max_steps: 1")
    Path("run.yaml").write_text(f"{text}\nuse_cpu: true\nmax_completion_length: 4\n", encoding="utf-8")
    for line in rest:
        if "--num_processes" in line:
            line = line.replace("prefrl grpo", "prefrl launch grpo") + " --dry_run"
        if line and not line.startswith("#"):
            run_line(line)


README_BLOCKS = {
    "make demo": Try("make prints its commands: tests/contract/test_learning.py runs the demo itself", _make),
    "prefrl init": Try(
        "run for one step on a tiny model, in the file that the first line writes; of the run with four processes and "
        "a server, which would take minutes, the command that starts it is printed instead",
        _prefrl,
    ),
    "pip install": Try("the extras are looked up: to install them takes minutes and a network; CI does so", _pip),
}


def test_commands_of_the_readme_run(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """See `README_BLOCKS`."""
    write_jsonl(workspace / "data.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 8)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n"))
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) == len(README_BLOCKS)
    for block, (start, trial) in zip(blocks, README_BLOCKS.items(), strict=True):
        assert block.startswith(start)
        trial.run(block, model_folder)
    assert (workspace / "runs/grpo/report.html").is_file()
    printed = capsys.readouterr().out
    assert "model> " in printed
    assert "vllm-serve --model" in printed
