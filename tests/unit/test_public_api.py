"""Public names, option names and defaults are pinned: a change of them is a decision, with a line in CHANGELOG.md.

The keys of options that are mappings, and their defaults, are pinned by the tables of the docs.

After such a decision: `python -m tests.unit.test_public_api` writes the new snapshot.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import prefrl
import prefrl.library
import prefrl.rewards
import prefrl.trainer
from prefrl.options.fields import default_of, flat_names, listed_fields
from prefrl.registry import REGISTRY

SNAPSHOT = Path(__file__).parents[1] / "data" / "public_api.json"


def own_defaults(config: Any) -> dict[str, str]:
    """Options that prefrl declares, with their defaults; HuggingFace's are HuggingFace's affair."""
    own = {name for cls in config.__mro__ if cls.__module__.startswith("prefrl.") for name in cls.__annotations__}
    return {field.name: repr(default_of(field)) for field in listed_fields(config) if field.name in own}


def public_api() -> dict[str, Any]:
    return {
        "prefrl": sorted(prefrl.__all__),
        "prefrl.library": sorted(prefrl.library.__all__),
        "prefrl.trainer": sorted(prefrl.trainer.__all__),
        "prefrl.rewards": sorted(prefrl.rewards.__all__),
        "options": {name: own_defaults(row.load_config()) for name, row in REGISTRY.items()},
        "flat names": {name: [*flat_names(row.load_config())] for name, row in REGISTRY.items()},
        "constructors": {
            name: [p for p in inspect.signature(row.load_trainer().__init__).parameters if p != "self"]
            for name, row in REGISTRY.items()
        },
    }


def test_public_api_is_as_pinned() -> None:
    assert public_api() == json.loads(SNAPSHOT.read_text())


def test_every_public_name_can_be_imported() -> None:
    for module in (prefrl, prefrl.library, prefrl.trainer, prefrl.rewards):
        for name in module.__all__:
            assert getattr(module, name) is not None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("XPOTrainer", "prefrl has no XPOTrainer: use OnlineDPOTrainer, whose loss is that of DPO"),
        ("GMPOConfig", "prefrl has no GMPOConfig: GRPOConfig with loss_type='gmpo', epsilon=0.4 and epsilon_high=0.4"),
        ("GRPOTraine", "module 'prefrl' has no attribute 'GRPOTraine'. Did you mean 'GRPOTrainer'?"),
    ],
)
def test_a_name_of_trl_that_is_not_there_says_what_to_do(name: str, told: str) -> None:
    with pytest.raises(ImportError) as imported:
        exec(f"from prefrl import {name}")
    with pytest.raises(AttributeError) as read:
        getattr(prefrl, name)
    assert [str(imported.value), str(read.value)] == [told] * 2
    assert not hasattr(prefrl, name)


def test_the_scripts_that_launchers_run_are_the_commands_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefrl.scripts.main.main", lambda words: words)
    for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo"):  # as in TRL
        script = Path(prefrl.__file__).parent / "scripts" / f"{name}.py"
        code = compile(script.read_text(encoding="utf-8"), script, "exec")
        monkeypatch.setattr(sys, "argv", [str(script), "--seed", "1"])
        with pytest.raises(SystemExit) as left:
            exec(code, {"__name__": "__main__"})
        assert left.value.code == [name, "--seed", "1"]


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(public_api(), indent=1) + "\n")


ROOT = Path(__file__).parents[2]
# Of mypy, kept between runs.
CACHE = ROOT / ".mypy_cache" / "tests"
# A user's, but of other libraries only the classes that ours are made of are read, which is a fifth of the work.
MYPY = """
[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*,numpy.*,huggingface_hub.*,transformers.*]
follow_imports = skip
[mypy-transformers,transformers.training_args,transformers.trainer]
follow_imports = silent
"""

RIGHT = """
from datasets import Dataset

import prefrl
import prefrl.library
import prefrl.rewards
import prefrl.trainer
from prefrl import DPOTrainer, GRPOTrainer


def reward(completions: list[str], **columns: object) -> list[float]:
    return [0.0 for _ in completions]


dataset = Dataset.from_list([{"prompt": "a"}])
config = prefrl.GRPOConfig(output_dir="x", learning_rate=1e-5, num_generations=4)
length: int | None = config.max_completion_length
rate: float = config.learning_rate
trainer = GRPOTrainer("model", [reward, prefrl.rewards.accuracy_reward], config, dataset)
trainer.train()
pairs = DPOTrainer("model", None, prefrl.trainer.DPOConfig(beta=0.2), None, dataset, callbacks=[])
rows = prefrl.extract_prompt(dataset)
try:
    pairs.evaluate(dataset)
except prefrl.ConfigError as error:
    print(error)
"""
# Line -> part of the error.
WRONG = {
    'prefrl.GRPOConfig(output_dir="x", num_generation=4)': 'Unexpected keyword argument "num_generation"',
    'prefrl.SFTConfig(output_dir="x", lerning_rate=1e-5)': 'Unexpected keyword argument "lerning_rate"',
    'prefrl.DPOConfig(output_dir="x", beta="0.1")': 'Argument "beta" to "DPOConfig" has incompatible type "str"',
    'prefrl.SFTTrainer("model", prefrl.GRPOConfig())': 'Argument 2 to "SFTTrainer" has incompatible type "GRPOConfig"',
    'prefrl.SFTTrainer("model", train_data=None)': 'Unexpected keyword argument "train_data"',
    "prefrl.GRPOConfg": 'has no attribute "GRPOConfg"',
    "prefrl.trainer.GRPOConfg": 'has no attribute "GRPOConfg"',
    "prefrl.rewards.acuracy_reward": 'has no attribute "acuracy_reward"',
}


def test_mypy_accepts_a_right_script_and_finds_the_faults_of_a_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    head = "import prefrl\nimport prefrl.rewards\nimport prefrl.trainer\n"
    (tmp_path / "wrong.py").write_text(head + "\n".join(WRONG) + "\n")
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", f"--cache-dir={CACHE}", "right.py", "wrong.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True, timeout=500, check=False
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in errors if line.startswith("right.py")], done.stdout
    for number, (line, part) in enumerate(WRONG.items(), start=head.count("\n") + 1):
        found = [error for error in errors if error.startswith(f"wrong.py:{number}:")]
        assert len(found) == 1, (line, done.stdout, done.stderr)
        assert part in found[0]


@pytest.mark.parametrize("module", [prefrl, prefrl.trainer], ids=lambda module: module.__name__)
def test_names_for_type_checkers_are_those_that_are_imported_on_first_use(module: ModuleType) -> None:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    named = {str(alias.asname): f"{node.module}:{alias.name}" for node in imports for alias in node.names}
    assert named == module._PATHS
    assert sorted(named) == sorted(module.__all__)


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "prefrl" / "py.typed").is_file()
