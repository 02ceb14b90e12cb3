"""The command itself: help, unknown commands and options, how errors are shown, and what is imported for that."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import prefrl
from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.scripts.generated import huggingface_text
from prefrl.scripts.main import main
from prefrl.scripts.schema import HUGGINGFACE_FILE, SchemaParser
from tests.contract.cases import ONLINE

ROOT = Path(__file__).parents[2]
OTHERS = (
    *("chat", "demo", "doctor", "env", "eval", "gateway", "generate", "init", "launch", "look", "merge", "migrate"),
    *("pairs", "play", "replay", "report", "resume", "soup", "teacher", "verify", "vllm-serve", "watch"),
)
HEAVY = ("torch", "transformers", "datasets", "peft", "deepspeed", "vllm")


def python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_import_of_prefrl_loads_nothing_heavy() -> None:
    assert python(f"import sys, prefrl; print([m for m in {HEAVY} if m in sys.modules])").strip() == "[]"


def test_help_loads_nothing_heavy_and_names_every_command() -> None:
    code = (
        "import sys\nfrom prefrl.scripts.main import main\n"
        "try: main(['--help'])\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    *help_lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert {line.split()[0] for line in help_lines if line.startswith("  ") and line.strip()} >= {
        *REGISTRY,
        *OTHERS,
    }


# What is asked of a command, and what it says before it imports anything heavy.
CHEAP: list[tuple[list[str], str]] = [
    *(([name, "--help"], "") for name in OTHERS),
    *(([name, "--help"], "") for name in REGISTRY),
    (["soup"], "output_dir: not given"),
    (["gateway"], "model_name_or_path: not given. Write prefrl gateway RUN"),
    (["gateway", "m", "--host", "0.0.0.0"], "host='0.0.0.0': everyone who reaches it could ask the model"),
    (["pairs", "sessions"], "dataset_name, output_file: not given"),
    (["soup", "--output_dir", "o", "--checkpoints", "no/a", "no/b"], "'no/a': there is no such folder"),
    (["teacher"], "model_name_or_path: not given. Set it to a teacher"),
    (["teacher", "m", "rows.jsonl", "--output", "rows.jsonl"], "output_file='rows.jsonl': must end in .parquet"),
    (["verify"], "function: not given"),
    (["verify", "no_module:f"], "the module 'no_module' cannot be imported"),
    (["replay"], "run: not given"),
    (["replay", "no/run", "--step", "1"], "run='no/run': has no run.json"),
    (["migrate"], "no files"),
    (["migrate", "no.py"], "no.py: cannot be read"),
    (["report"], "runs: not given"),
    (["report", "no/run"], "is not the folder of a run"),
    (["look"], "run_dir: not given"),
    (["look", "no/run"], "has no completions"),
    (["watch"], "runs: not given"),
    (["watch", "no/run"], "is not the folder of a run"),
    (["merge"], "adapter: not given"),
    (["eval"], "dataset_name: not given"),
    (["eval", "m", "no.jsonl", "--reward_funcs", "numeric_reward"], "'no.jsonl': there is no such file"),
    (["generate"], "prompt, dataset_name: not given"),
    (["generate", "m", "--dataset_name", "no.jsonl", "--output_file", "o.jsonl"], "'no.jsonl': there is no such file"),
    (["chat"], "model_name_or_path: not given"),
    (["play", "no_env.py:Game"], "there is no file 'no_env.py'"),
    (["resume", "no/run"], "nothing to resume"),
    (["sft", "--model_name_or_path", "m", "--dataset_name", "no.jsonl"], "'no.jsonl': there is no such file"),
    (["launch", "sft", "--model_name_or_path", "m", "--dataset_name", "no.jsonl"], "there is no such file"),
]
IN_TURN = """
import contextlib, io, json, sys
from prefrl.scripts.main import main

said = []
for words in json.loads(sys.argv[1]):
    output, help = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(help), contextlib.suppress(SystemExit):
        main(words)
    said.append([output.getvalue(), [name for name in {heavy} if name in sys.modules]])
print(json.dumps(said))
"""


def test_help_and_what_is_missing_cost_no_import_of_anything_heavy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN.format(heavy=HEAVY), json.dumps([words for words, _ in CHEAP])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    for (words, message), (said, loaded) in zip(CHEAP, json.loads(done.stdout), strict=True):
        assert (words, loaded) == (words, [])
        assert message in said


def test_the_page_about_a_run_is_made_without_torch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code = (
        "import sys\nfrom prefrl.scripts.main import main\nimport prefrl.scripts.report\n"
        f"main(['report', {str(tmp_path)!r}])\nprint([m for m in {HEAVY} if m in sys.modules])"
    )
    assert python(code).splitlines()[-1] == "[]"
    assert (tmp_path / "report.html").is_file()


def test_the_doctor_says_what_the_data_is_before_it_imports_torch(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    code = (
        "import sys, types\nfrom prefrl.scripts.main import main\n"
        "rest = types.ModuleType('prefrl.scripts.checkup.checkup')\n"
        "rest.check_run = lambda *_, **__: print([m for m in ('torch', 'transformers') if m in sys.modules])\n"
        "sys.modules[rest.__name__] = rest\n"
        f"main(['doctor', 'sft', '--model_name_or_path', 'm', '--dataset_name', {str(data)!r}])"
    )
    found, loaded = python(code).splitlines()[2:4]
    assert (found, loaded) == ("  ok  1 row with the columns prompt, completion", "[]")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_bars_of_libraries_are_shown_on_terminals_only(is_terminal: bool, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code = (
        f"import sys\nsys.stderr.isatty = lambda: {is_terminal}\nfrom prefrl.scripts.main import main\n"
        f"main(['report', {str(tmp_path)!r}])\nfrom tqdm import tqdm\nassert list(tqdm([5])) == [5]"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TQDM_DISABLE", None)  # which main() sets, also in other tests
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ("100%|" in done.stderr) == is_terminal


# What would import torch is replaced: nobody trains.
TRAINING = """
import atexit, ctypes, sys, types
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # as a native thread does now and then
names = ("prefrl.scripts.inputs", "prefrl.scripts.train", "prefrl.distributed", "prefrl.distributed.launcher")
inputs, train, _, launcher = modules = [types.ModuleType(name) for name in names]
inputs.read = lambda *_: types.SimpleNamespace(values={{}})
inputs.check_files = lambda *_: None
train.main = lambda *_: atexit.register(print, "exit handler") and {code}
launcher.as_worker = lambda train: train()
sys.modules |= {{module.__name__: module for module in modules}}
from prefrl.scripts.main import main
sys.exit(main(["sft"]))
"""


@pytest.mark.parametrize(
    ("launched", "code", "expected"),
    [(True, "0", 0), (False, "0", -signal.SIGABRT), (True, "int('x')", -signal.SIGABRT)],
    ids=["worker", "no worker", "failed worker"],
)
def test_a_worker_that_is_done_exits_before_torch_can_abort_it(
    launched: bool, code: str, expected: int, tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if launched:
        environment |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, "-c", TRAINING.format(code=code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == expected, done.stderr
    assert done.stdout == "exit handler\n"


def test_help_is_quick() -> None:
    best = float("inf")
    for _ in range(3):  # the quickest of three, in CPU seconds: other work on the machine does not count
        before = cpu_seconds_of_children()
        python("from prefrl.scripts.main import main\ntry: main(['--help'])\nexcept SystemExit: pass")
        best = min(best, cpu_seconds_of_children() - before)
    assert best < 0.5


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


END = "-- end of a command --"


def quick(commands: list[list[str]]) -> tuple[list[str], str]:
    """What commands print, one after another in a process, and the heavy packages that they imported."""
    code = (
        "import sys\nfrom prefrl.scripts.main import main\nsys.stderr = sys.stdout\n"
        f"for argv in {commands}:\n    try: main(argv)\n    except SystemExit: pass\n    print('{END}')\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    *shown, loaded = python(code).split(END + "\n")
    return [text.strip() for text in shown], loaded.strip()


DATA = ("grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "r", "--output_dir", "o")
PAIRS = (
    ("--num_generations", "3"),
    ("--warmup_steps", "-1"),
    ("--optim", "adamw_torc"),
    ("--loss_kwargs", '{"rho": 4}'),
    ("--generation_mode", "overlap", "--use_vllm", "--num_iterations", "2"),
)


def test_help_and_mistakes_import_nothing_heavy_and_are_short() -> None:
    wrong = [
        ["sft", "--learnin_rate", "1"],
        ["sft", "--seed", "x"],
        ["grpo", "--dtype", "int8"],
        ["grpo", "--model_name_or_path", "m", "--max_staleness", "2", "--dataset_name", "d"],
        ["grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "r", "--vllm", "yes"],
        ["init", "grop"],
        ["sft", "--model_name_or_path", "m", "--dataset_name", "no.jsonl", "--output_dir", "o"],
        *([*DATA, *words] for words in PAIRS),
    ]
    shown, loaded = quick([[name, "--help"] for name in REGISTRY] + wrong)
    assert loaded == "[]"
    assert len(shown) == len(REGISTRY) + len(wrong)
    for name, text in zip(REGISTRY, shown, strict=False):
        assert len(text.splitlines()) <= 80  # each option has its whole first sentence
        assert "--model_name_or_path" in text
        assert "--max_tokens_per_micro_batch" in text
        assert "--fsdp" not in text  # in --help_all only
        assert ("--reward_funcs" in text) == (name in ONLINE)
    assert [text for text in shown[len(REGISTRY) :] if not text or "\n" in text] == []


@pytest.mark.parametrize("name", REGISTRY)
def test_a_file_made_by_init_is_accepted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    parser = SchemaParser(name)
    given = parser.parse([str(path)])
    assert given.values["output_dir"] == f"runs/{name}"
    parser.check(given)
    everything = re.sub(r"^#(?! )", "", text, flags=re.MULTILINE)  # every option at its default
    path.write_text(re.sub(r"^\w+: null .*$", "", everything, flags=re.MULTILINE), encoding="utf-8")
    assert len(SchemaParser(name).parse([str(path)]).values) > 15


def test_the_reward_model_of_a_command_has_the_name_of_trl_too() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_model_path", "rm"]
    given = SchemaParser("online_dpo").parse(words)
    assert given.values["reward_model_name_or_path"] == "rm"
    assert "reward_model_path" not in given.values
    with pytest.raises(ConfigError, match="reward_model_path='rm' and reward_model_name_or_path='b': given both ways"):
        SchemaParser("online_dpo").parse([*words, "--reward_model_name_or_path", "b"])


LIGHT = ("chat", "demo", "doctor", "env", "eval", "generate", "init", "launch", "look", "merge", "report", "watch")
EVERY_COMMAND = """
import contextlib, io, json, sys
from prefrl.scripts.main import main
texts = {{}}
for name in {names}:
    for words in (["--help"], ["grpo", "--seeed", "1"]):
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
            with contextlib.suppress(SystemExit):
                main([name, *words])
        texts[name + words[0]] = text.getvalue()
print(json.dumps([texts, [m for m in {heavy} if m in sys.modules]]))
"""


def test_other_commands_import_nothing_heavy_for_help_and_mistakes() -> None:
    texts, loaded = json.loads(python(EVERY_COMMAND.format(names=LIGHT, heavy=HEAVY)))
    assert loaded == []
    for name in LIGHT:
        text = texts[f"{name}--help"]
        assert text.startswith("usage: prefrl ")
        assert len(text.splitlines()) <= 80
        assert "\n\nGeneral:\n" in text
        assert texts[f"{name}grpo"].startswith(f"prefrl {name}: ConfigError: ")
        assert texts[f"{name}grpo"].count("\n") == 1
    assert "Did you mean '--seed'" in texts["chatgrpo"]
    assert "--num_generations" not in texts["chat--help"]


def test_help_finds_options_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["grpo", "--help", "staleness"])
    text = capsys.readouterr().out
    assert text.startswith("  --max_staleness int\n")
    assert "--seed" not in text


def test_the_options_of_huggingface_are_those_of_transformers() -> None:
    remedy = "run python -m prefrl.scripts.generated"
    assert huggingface_text() == HUGGINGFACE_FILE.read_text(encoding="utf-8"), remedy


def test_help_all_shows_the_options_of_huggingface_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sft", "--help_all"])
    assert stopped.value.code == 0
    assert "--weight_decay" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"prefrl {prefrl.__version__}\n"


def test_control_characters_of_an_unknown_option_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--\x1b[2J"])
    assert r"unrecognized arguments: --\x1b[2J" in capsys.readouterr().err


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["grop"], "prefrl grop: ConfigError: unknown command. Did you mean 'grpo'?", id="command"),
        pytest.param(["\x1b[2J"], r"prefrl \x1b[2J: ConfigError: unknown command.", id="control character"),
        pytest.param(["GRPO"], "prefrl GRPO: ConfigError: unknown command. Did you mean 'grpo'?", id="upper case"),
        pytest.param(
            ["xyz"],
            f"unknown command. Known: {', '.join(sorted([*REGISTRY, *OTHERS]))}.",
            id="command unlike any",
        ),
        pytest.param(
            ["sft", "--learnin_rate", "1"],
            "unknown option '--learnin_rate'. Did you mean '--learning_rate'?",
            id="flag",
        ),
        pytest.param(
            ["grpo", "--num-generation=4"], "Did you mean '--num-generations'?", id="flag with value, dashes"
        ),
        pytest.param(["sft", "--zzzzqqq", "1"], "unknown option '--zzzzqqq'. See --help_all", id="flag unlike any"),
        pytest.param(["sft", "x.txt"], "unexpected argument 'x.txt'. Write --dataset_name x.txt.", id="no flag"),
        pytest.param(
            ["soup", "no/a", "no/b", "--output_dir", "s"], "'no/a': there is no such folder", id="bare paths"
        ),
        pytest.param(["sft", "x.yaml"], "config='x.yaml': cannot be read", id="no file as the first word"),
        pytest.param(["sft", "--base_model", "m"], "is model_name_or_path here.", id="name of another library"),
        pytest.param(["sft", "--num_generations", "4"], "It is an option of grpo, ", id="of other algorithms"),
        pytest.param(["sft", "--learning_rate", "x"], "learning_rate='x': must be a number, or auto.", id="type"),
        pytest.param(
            ["sft", "--loss_type", "nlll"],
            "loss_type='nlll': must be one of nll, dft, chunked_nll. Did you mean 'nll'",
            id="choice",
        ),
        pytest.param(["sft"], "model_name_or_path: not given.", id="missing"),
        pytest.param(
            ["grpo", "--model_name_or_path", "m", "--dataset_name", "d"],
            "reward_funcs=None: at least one reward is needed",
            id="no reward",
        ),
        pytest.param(
            ["grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--agent", "python -c pass"],
            "reward_funcs=None: at least one reward is needed",
            id="a program has no reward",
        ),
        pytest.param(
            ["grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--agent", "no_agent.py:solve"],
            "no_agent.py",
            id="a function may have one",
        ),
        pytest.param(
            ["rloo", "--model_name_or_path", "m", "--dataset_name", "d", "--teacher_kl_coef", "0.5"],
            "teacher_model_name_or_path=None: teacher_kl_coef=0.5 needs a teacher. Give a model with the",
            id="no teacher",
        ),
        pytest.param(
            ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--lora_r", "4"],
            "lora_r=4 has no effect because use_peft=False",
            id="LoRA option without LoRA",
        ),
        pytest.param(
            ["grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "r", "--lora_alpha", "1"],
            "lora_alpha=1 has no effect because use_peft=False",
            id="the same with rewards",
        ),
        pytest.param(["sft", "--config", "missing.yaml"], "config='missing.yaml': cannot be read", id="no file"),
    ],
)
def test_what_is_refused_is_one_line_on_stderr_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_launch_prints_the_errors_that_its_workers_record(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_recorded:
        (tmp_path / "error.json").touch()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("PREFRL_NUM_PROCESSES", "2")
    assert main(["grop"]) == 2
    assert ("Did you mean" in capsys.readouterr().err) is not is_recorded


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", ["init grpo", "grpo --help_all"])
def test_a_full_disk_is_one_line_and_a_reader_that_has_seen_enough_is_none(words: str) -> None:
    command = [sys.executable, "-m", "prefrl.scripts.main", *words.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"prefrl {words.split()[0]}: OSError: [Errno 28] No space left on device. prefrl --")
    assert done.stderr.count("\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError, match="learnin_rate"):
        main(["--debug", "sft", "--learnin_rate", "1"])
