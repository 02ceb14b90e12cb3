"""Each row of each table of rules: its example breaks it and no row before it, in the config and in the command."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import prefrl.options
from prefrl.errors import ConfigError
from prefrl.options.fields import Rule, apply, example, unset, warn_of_hint, when
from prefrl.options.params import Params
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.schema import SchemaParser


def tables() -> dict[str, tuple[Rule, ...]]:
    """The tables of rules between options, by module and name, and those of hyperparameters, by their class."""
    for module in pkgutil.walk_packages(prefrl.options.__path__, "prefrl.options."):
        importlib.import_module(module.name)
    for algorithm in REGISTRY.values():
        algorithm.load_config()
    found: dict[int, tuple[str, tuple[Rule, ...]]] = {}
    for name, module in sorted(sys.modules.items()):
        for variable, table in vars(module).items() if name.startswith("prefrl.") else ():
            if isinstance(table, tuple) and table and all(isinstance(row, Rule) for row in table):
                found.setdefault(id(table), (variable, table))
    return dict(found.values()) | {
        params.__name__: vars(params)["rules"] for params in subclasses(Params) if "rules" in vars(params)
    }


def subclasses(params: type[Params]) -> list[type[Params]]:
    """All classes of hyperparameters."""
    return [other for direct in params.__subclasses__() for other in (direct, *subclasses(direct))]


TABLES = tables()
CHECK = apply.__code__
parser = cache(SchemaParser)


@cache
def config(algorithm: str, processes: int) -> type:
    """The config of an algorithm on some processes."""
    config_class = REGISTRY[algorithm].load_config()
    return config_class if processes == 1 else type("Config", (config_class,), {"world_size": processes})


def broken(check: Callable[[], Any]) -> tuple[Rule, str]:
    """The row that refuses options, and its message."""
    with pytest.raises(ConfigError) as refused:
        check()
    error: BaseException = refused.value
    while error.__context__ is not None:
        error = error.__context__  # told on: by HuggingFace's __post_init__, or as the key of an option
    rules = [frame.f_locals["rule"] for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is CHECK]
    return rules[-1], str(refused.value)


@pytest.mark.parametrize("name", TABLES)
def test_the_example_of_a_row_breaks_this_row_first_in_config_and_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in TABLES[name]:
        options = {"output_dir": str(tmp_path), **row.example.options, "use_cpu": True, "strict_options": row.hint}
        found, said = broken(partial(config(row.example.algorithm, row.example.processes), **options))
        assert found is row, (row.example, said)
        monkeypatch.setenv("WORLD_SIZE", str(row.example.processes))
        check = parser(row.example.algorithm).check
        assert broken(partial(check, Given(options, places={}))) == (row, said), row.example
        monkeypatch.delenv("WORLD_SIZE")


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if any(row.hint for row in table)])
def test_hints_are_warnings_of_the_config_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in (row for row in TABLES[name] if row.hint):
        said: list[str] = []
        monkeypatch.setattr("prefrl.options.fields._warn_once", said.append)
        options = {"output_dir": str(tmp_path), **row.example.options, "use_cpu": True}
        monkeypatch.setenv("WORLD_SIZE", str(row.example.processes))
        parser(row.example.algorithm).check(Given(options, places={}))
        monkeypatch.delenv("WORLD_SIZE")
        assert said == []
        made: Any = config(row.example.algorithm, row.example.processes)(**options)
        assert len(said) == 1, row.example
        assert re.search(r"ha(s|ve) no effect because .+\. [A-Z]", said[0])  # and what to do
        assert {name: getattr(made, name) for name in row.resets} == row.resets
        with pytest.raises(ConfigError, match=re.escape(said[0])):
            config(row.example.algorithm, row.example.processes)(**options, strict_options=True)


@pytest.mark.parametrize(("rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
def test_the_first_process_warns_once(
    rank: str | None, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    text = f"port=1 has no effect on rank {rank}."
    options = SimpleNamespace(strict_options=False, gives_warnings=True)
    for _ in range(2):
        warn_of_hint(options, text)
    assert caplog.messages == [text] * times


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_the_defaults_break_no_row(algorithm: str, tmp_path: Path) -> None:
    REGISTRY[algorithm].load_config()(output_dir=str(tmp_path), use_cpu=True)
    parser(algorithm).check(Given({}, places={}))


def test_all_tables_are_found() -> None:
    assert sum(map(len, TABLES.values())) > 150
    assert {"COMMON_RULES", "PACKING_RULES", "SERVER_RULES"} <= TABLES.keys()


# In messages, an option may be shown by another name of its value.
ALIASES = {
    "advantage_estimator": "estimator",
    "steps_per_generation": "micro_batches_per_generation",
    "vllm_server_base_url": "server_urls",
}


def test_messages_say_of_each_option_its_own_value() -> None:
    for row in (row for table in TABLES.values() for row in table):
        for option, shown in re.findall(r"(\w+)=\{([\w.]+)", row.message.replace("{{", "").replace("}}", "")):
            name = shown.rpartition(".")[2]
            assert name in (option, ALIASES.get(option), "found") or name in row.values, row.message


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ("grpo", {"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "this loss supports 'token'."),
        ("grpo", {"loss_type": "clip_cov", "importance_sampling_level": "sequence"}, "'sequence_token' and 'token'."),
        ("grpo", {"generation_batch_size": 12}, "a multiple of 8 = 8 completions of a micro-batch * 1 processes"),
        ("grpo", {"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "one generation. Set 2 or 4."),
        ("grpo", {"num_generations": 3}, "* 1 processes = 8 completions: must be a multiple of num_generations=3."),
        ("grpo", {"num_generations": 3}, "The nearest that works is 9, which is 9 on each process."),
        ("grpo", {"temperature_eval": 1e-4}, "greedy decoding, or at least 0.001"),
        ("grpo", {"use_vllm": True, "weight_sync": "shm", "vllm_server_host": "node5"}, "(http://node5:8000)"),
        ("dpo", {"loss_type": ["sigmo"]}, "must be one or several of sigmoid, hinge, ipo"),
        ("sft", {"optim": "adam", "optim_args": "momentum=1"}, "optim_args: momentum=1 is not an argument of"),
        ("sft", {"use_liger_kernel": True}, "this run is on the CPU."),
    ],
)
def test_messages_say_what_they_compute(algorithm: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config(algorithm, 1)(output_dir=str(tmp_path), use_cpu=True, **options)


RULES = (
    *unset({"a": 1, "b": 2}, lambda o: o.off, "off={off!r} {{}}. Set on.", example("sft")),
    when(lambda o: [o.a] if o.a > 1 else None, "a={found[0]!r}, {twice:.1f}", example("sft"), twice=lambda o: 2 * o.a),
)


@dataclasses.dataclass
class Options:
    off: str = ""
    a: int = 0
    b: Any = 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(), None),
        (Options("yes"), None),
        (Options(a=1, b=3), None),
        (Options("yes", a=1, b=3), "a=1 has no effect because off='yes' {}. Set on."),
        (Options("{b}", b="{off}"), "b='{off}' has no effect because off='{b}' {}. Set on."),
        (Options(a=2), "a=2, 4.0"),
    ],
)
def test_the_first_row_that_is_broken_says_what_the_options_are(options: Options, message: str | None) -> None:
    if message is None:
        apply(options, RULES)
    else:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            apply(options, RULES)


def test_the_example_of_an_option_without_effect_sets_it() -> None:
    assert [row.example for row in RULES[:2]] == [example("sft", a=1), example("sft", b=2)]
