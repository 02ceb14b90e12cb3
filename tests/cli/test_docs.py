"""The code and commands in the README, the docs and the examples run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prefrl.losses.preference.pairwise import CPO_LOSSES, PAIR_LOSSES, PairLoss
from prefrl.options.fields import listed_fields
from prefrl.options.params import kwargs_options
from prefrl.registry import REGISTRY, Algorithm
from prefrl.scripts.arguments.launch import launch_options
from prefrl.scripts.inputs import read
from prefrl.scripts.main import OTHERS, main
from tests.assets import tiny_reward_model, tiny_tokenizer
from tests.cli.conftest import run_line, write_jsonl
from tests.pages import FILE, IN_ORDER, MODEL, PAGES, PYTHON_BLOCK, ROOT, module, name, shell_blocks
from tests.parsers import parser_of

# Pages whose blocks are one program.
ONE_PROGRAM = ("agents",)


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


@pytest.fixture(scope="session")
def in_place_of(
    stopping_folder: Path, reward_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    """What stands in for texts of the docs."""
    labels = tmp_path_factory.mktemp("labels")
    model = tiny_reward_model(num_labels=2)
    model.config.id2label = {0: "helpful", 1: "harmless"}
    model.save_pretrained(labels)
    tiny_tokenizer().save_pretrained(labels)
    rewards = dict.fromkeys(("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "my-org/chat-quality"), str(reward_folder))
    return {MODEL: str(stopping_folder), **rewards, "my-org/helpful-harmless": str(labels), '"cuda"': '"cpu"'}


@pytest.mark.parametrize("code", _blocks())
def test_python_blocks_run(code: str, workspace: Path, reward_folder: Path, in_place_of: Mapping[str, str]) -> None:
    prompts = workspace / "prompts.jsonl"
    prompts.write_text(prompts.read_text(encoding="utf-8") * 4, encoding="utf-8")  # a step has 8 rows
    shutil.copy(prompts, workspace / "questions.jsonl")
    if "RewardTrainer(" not in code:  # it writes this model
        shutil.copytree(reward_folder, workspace / "runs/reward")
    for text, other in in_place_of.items():
        code = code.replace(text, other)
    exec(compile(code, "<docs>", "exec"), {"__name__": "__main__"})


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


PROGRAMS = {
    *("prefrl", "accelerate", "python", "python3", "pip", "make", "sbatch", "curl"),
    *("cd", "docker", "echo", "export", "git", "hf", "lm_eval", "ln", "mkdir", "ollama", "source", "uvx", "vllm"),
}


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


@pytest.mark.parametrize(("word", "page"), WORDS.items())
def test_the_search_of_the_site_finds_these_words(word: str, page: str) -> None:
    """It looks for beginnings of the words that its separator leaves of a page."""
    (separator,) = re.findall(r"separator: '(.*)'", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.split(separator, text.replace("`", " ").lower())
    assert all(any(one.startswith(part) for one in found) for part in re.split(separator, word.lower()))


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
    for block in shell_blocks(page.read_text(encoding="utf-8")):
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
    blocks = shell_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) == len(README_BLOCKS)
    for block, (start, trial) in zip(blocks, README_BLOCKS.items(), strict=True):
        assert block.startswith(start)
        trial.run(block, model_folder)
    assert (workspace / "runs/grpo/report.html").is_file()
    printed = capsys.readouterr().out
    assert "model> " in printed
    assert "vllm-serve --model" in printed
