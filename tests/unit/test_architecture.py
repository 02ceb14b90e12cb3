"""What the design promises about the code itself. Layers and forbidden imports are import-linter's."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, get_args, get_type_hints

import grimp
import pytest
from transformers import Trainer

import prefrl
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.advantage.balance import REWARD_BALANCES
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.preference.pairwise import CPO_LOSSES, PAIR_LOSSES
from prefrl.losses.supervised import SUPERVISED_LOSSES
from prefrl.options.balance import BALANCE_PARAMS
from prefrl.options.policy import KL_PARAMS, POLICY_LOSS_FACTS
from prefrl.options.policy_gradient import ESTIMATOR_FACTS
from prefrl.options.preference import CPO_LOSS_FACTS, PAIR_LOSS_FACTS
from prefrl.registry import REGISTRY, Algorithm
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.configs import GRPOConfig, ReinforcePlusPlusConfig, SFTConfig
from prefrl.trainer.loop import Loop
from prefrl.trainer.offline.trainer import OfflineTrainer
from prefrl.trainer.online.trainer import OnlineTrainer
from tests.parsers import parser_of
from tests.private_names import ROOT, SOURCES, nodes_of_files

ALGORITHMS = [pytest.param(row, id=row.name) for row in REGISTRY.values()]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_LEAF_LINES = 150

# Optional packages that `require` may be asked for, and where.
OPTIONAL = {
    "peft": ("prefrl/models/", "prefrl/rewards/model.py"),
    "bitsandbytes": ("prefrl/models/", "prefrl/trainer/optimizers.py"),
    "pytorch_optimizer": ("prefrl/trainer/optimizers.py",),
    "deepspeed": ("prefrl/distributed/",),
    "torchao": ("prefrl/models/kernels.py", "prefrl/trainer/base_config.py"),
    "liger_kernel": ("prefrl/models/kernels.py", "prefrl/trainer/base_config.py"),
    "sklearn": ("prefrl/trainer/bco_trainer.py",),
    "math_verify": ("prefrl/rewards/",),
    "rapidfuzz": ("prefrl/rewards/graders/plain.py",),
    "reasoning_gym": ("prefrl/rewards/named.py",),
    "PIL": ("prefrl/trainer/arguments.py",),
    "matplotlib": ("prefrl/scripts/",),
    "weave": ("prefrl/trainer/callbacks.py",),
    "harbor": ("prefrl/rollout/episodes/harbor.py",),
    "openreward": ("prefrl/rollout/episodes/openreward.py",),
    "starlette": ("prefrl/rollout/episodes/environment.py", "prefrl/scripts/gateway.py"),
    "uvicorn": ("prefrl/rollout/episodes/environment.py", "prefrl/scripts/gateway.py"),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("row", ALGORITHMS)
def test_config_and_trainer_of_each_algorithm_are_public(row: Algorithm) -> None:
    for path, loaded in ((row.config, row.load_config()), (row.trainer, row.load_trainer())):
        name = path.partition(":")[2]
        assert name in prefrl.__all__
        assert getattr(prefrl, name) is loaded


def test_no_public_config_or_trainer_is_outside_the_registry() -> None:
    registered = {path.partition(":")[2] for row in REGISTRY.values() for path in (row.config, row.trainer)}
    of_scripts = {"DatasetConfig", "DatasetMixtureConfig", "ModelConfig"}
    assert {name for name in prefrl.__all__ if name.endswith(("Config", "Trainer"))} - of_scripts == registered


def test_each_algorithm_has_one_docs_page_and_the_site_lists_it() -> None:
    pages = {relative(path) for path in (ROOT / "docs/trainers").glob("*.md")}
    assert pages == {row.docs for row in REGISTRY.values()} | {"docs/trainers/options.md"}
    assert {row.docs for row in REGISTRY.values()} == {f"docs/trainers/{name}.md" for name in REGISTRY}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [
        path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT / "docs").as_posix() not in navigation
    ]
    assert not missing


def _bases(cls: type) -> list[type]:
    return [base for base in cls.__bases__ if base is not Generic]


@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_leaf_stands_on_one_of_two_bases_and_on_no_other_leaf(row: Algorithm) -> None:
    trainer = row.load_trainer()
    assert _bases(trainer) in ([OfflineTrainer], [OnlineTrainer])
    assert _bases(OfflineTrainer) == _bases(OnlineTrainer) == [BaseTrainer]
    assert _bases(BaseTrainer) == [Loop]
    assert _bases(Loop) == [Trainer]
    assert trainer.algorithm == row.name
    assert len(inspect.getsource(trainer).splitlines()) <= MAX_LEAF_LINES


def test_configs_import_no_trainer() -> None:
    graph = grimp.build_graph("prefrl", exclude_type_checking_imports=True)
    trainers = {row.trainer.partition(":")[0] for row in REGISTRY.values()}
    for row in REGISTRY.values():
        assert not trainers & graph.find_upstream_modules(row.config.partition(":")[0])


def test_closed_sets_of_the_configs_are_the_keys_of_the_tables() -> None:
    hints = {config: get_type_hints(config) for config in (GRPOConfig, SFTConfig)}
    assert set(get_args(hints[GRPOConfig]["loss_type"])) == set(POLICY_LOSSES)
    assert set(get_args(hints[SFTConfig]["loss_type"])) == {*SUPERVISED_LOSSES, "chunked_nll"}  # TRL's name of "nll"
    configs = (GRPOConfig, ReinforcePlusPlusConfig)
    estimators = [get_args(get_type_hints(config)["advantage_estimator"]) for config in configs]
    assert {name for names in estimators for name in names} | {"gae"} == set(ADVANTAGES)  # PPO
    assert set(get_args(get_args(hints[GRPOConfig]["reward_balance"])[0])) == set(REWARD_BALANCES)
    assert set(get_args(hints[GRPOConfig]["kl_estimator"])) == {*KL_ESTIMATORS, "full", "sequence"}


def test_what_options_say_of_losses_is_about_the_losses_that_there_are() -> None:
    pairs: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = [
        (POLICY_LOSS_FACTS, POLICY_LOSSES),
        (ESTIMATOR_FACTS, ADVANTAGES),
        (BALANCE_PARAMS, REWARD_BALANCES),
        (PAIR_LOSS_FACTS, PAIR_LOSSES),
        (CPO_LOSS_FACTS, CPO_LOSSES),
        (KL_PARAMS, {**KL_ESTIMATORS, "full": None, "sequence": None}),
    ]
    for facts, functions in pairs:
        assert list(facts) == list(functions)


def test_files_and_functions_are_short() -> None:
    found = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if not text.isascii() or len(text.splitlines()) > MAX_FILE_LINES:
            found.append(relative(path))
        found += [
            f"{relative(path)}:{node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _lines_of_code(node) > MAX_FUNCTION_LINES
        ]
    assert not found


def _lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    if docstring is not None and docstring.end_lineno is not None:
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_optional_packages_are_asked_for_in_their_places_only() -> None:
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"):
                continue
            assert isinstance(node.args[0], ast.Constant), relative(path)
            package = str(node.args[0].value).partition(".")[0]
            assert relative(path).startswith(OPTIONAL[package]), package


def test_optional_packages_are_never_imported() -> None:
    engines = {"verl", "prime_rl", "nemo_rl", "torchtitan"}
    packages = {*OPTIONAL, "vllm", *engines}
    imported = {
        (relative(path), package)
        for path, nodes in nodes_of_files().items()
        for package in packages & _imported_packages(nodes)
    }
    # Runs inside vLLM's processes, and nothing imports it.
    plugin = {("prefrl/generation/vllm/plugin.py", "vllm")}
    # They have classes of theirs as bases, and are imported inside functions, as the next test sees.
    server = {("prefrl/rollout/gateway/server.py", package) for package in ("starlette", "uvicorn")}
    # Run inside processes of engines, and nothing imports them.
    adapters = {(f"prefrl/integrations/{engine}.py", engine) for engine in engines}
    assert imported == plugin | server | adapters | {("prefrl/rollout/gateway/recorded.py", "starlette")}


def test_trainers_import_no_server() -> None:
    found, left = set[str](), ["prefrl.trainer.online.trainer"]
    while left:
        module = left.pop()
        path = ROOT / f"{module.replace('.', '/')}.py"
        if module in found or not path.exists():
            continue
        found.add(module)
        top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        left += [name for node in top for name in (str(node.module), *(f"{node.module}.{n.name}" for n in node.names))]
    assert "prefrl.rollout.episodes.driver" in found
    assert "prefrl.rollout.gateway.server" not in found


def _imported_packages(every: list[ast.AST]) -> set[str]:
    """What is imported at run time."""
    for_types = {id(node) for block in every if _is_for_types(block) for node in ast.walk(block)}
    nodes = [node for node in every if id(node) not in for_types]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    return {module.partition(".")[0] for module in modules}


# Who imports modules by a name that is a string, and what the names are.
BY_STRING = {
    "prefrl/registry.py": "options, configs and trainers of algorithms, and public names",
    "prefrl/scripts/main.py": "commands",
    "prefrl/errors.py": "optional packages",
    "prefrl/distributed/checkpoint.py": "classes of DeepSpeed",
    "prefrl/models/attention/varlen.py": "parts of torch and flash-attn that not all versions have",
    "prefrl/options/names.py": "modules of the user",
    "prefrl/scripts/oracle/command.py": "modules of the user",
}
OF_THE_REGISTRY = {
    "prefrl/__init__.py": "public names",
    "prefrl/trainer/__init__.py": "public names",
}


def test_own_modules_are_imported_where_import_linter_sees_it() -> None:
    def with_(pattern: str) -> set[str]:
        return {relative(path) for path in SOURCES if re.search(pattern, path.read_text(encoding="utf-8"), re.M)}

    assert with_(r"\b(import_module|__import__|run_module|run_path)\(") == BY_STRING.keys()
    assert with_(r"^from prefrl\.registry import .*\bload\b") == OF_THE_REGISTRY.keys()


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _yaml_texts() -> list[object]:
    files = [(relative(path), path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.yaml"))]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [
        (f"{relative(page)}:{i}", block)
        for page in pages
        for i, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    ]
    return [pytest.param(text, id=name) for name, text in files + blocks]


@pytest.mark.parametrize("text", _yaml_texts())
def test_every_yaml_of_examples_and_docs_is_a_config(text: str, tmp_path: Path) -> None:
    """The first line names the algorithm: `# prefrl grpo --config ...`."""
    found = re.match(r"# prefrl (\w+) ", text)
    assert found, "the first line must be: # prefrl <algorithm> --config <file>"
    row = REGISTRY[found[1]]
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    parser_of(row).parse_args_and_config(
        ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=relative)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80
