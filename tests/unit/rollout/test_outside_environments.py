"""Harbor's tasks and OpenReward's environments. Stand-ins for their packages have the names that are used."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from prefrl import ConfigError, DataError, HarborEnv, HarborSpec, OpenRewardSpec
from prefrl.rollout.episodes.environment import environment_kinds

FINISHED = {"blocks": [{"type": "text", "text": "right"}], "reward": 0.5, "metadata": {"n": 1}, "finished": True}
WITHOUT = {"blocks": [], "reward": None, "metadata": None, "finished": False}


class HarborSandbox:
    """Keeps what is done to it; a command says its name."""

    made: ClassVar[list[HarborSandbox]] = []
    os = "linux"

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.done: list[str] = []
        self.made.append(self)

    async def exec(self, command: str, timeout_sec: int = 0, user: str = "") -> Any:
        self.done.append(f"{user}:{command}")
        return SimpleNamespace(stdout=f"ran {command}" if command != "true" else "", stderr=None, return_code=0)

    async def upload_file(self, source: Path, target: str) -> None:
        self.done.append(f"upload {source.name}")

    async def start(self, force_build: bool) -> None:
        self.done.append("start")

    async def run_healthcheck(self) -> None:
        self.done.append("check")

    async def empty_dirs(self, folders: list[str], chmod: bool) -> None:
        self.done.append(f"empty {folders}")

    async def stop(self, delete: bool) -> None:
        self.done.append("stop")


def task(task_dir: Path) -> Any:
    config = SimpleNamespace(environment="of task", verifier=SimpleNamespace(env={"ANSWER": "4"}))
    paths = SimpleNamespace(environment_dir=task_dir / "environment")
    return SimpleNamespace(paths=paths, short_name=task_dir.name, config=config, instruction="Count.")


class Verifier:
    def __init__(self, config: Any, **given: Any) -> None:
        self.given = given

    async def verify(self) -> Any:
        assert self.given["override_env"] == {"ANSWER": "4"}
        return SimpleNamespace(rewards={"other": 0.0, "reward": len(self.given["environment"].done)})


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks, the second of which copies a file, and the package."""
    for name in ("b", "a"):
        folder = tmp_path / "tasks" / name / "environment"
        folder.mkdir(parents=True)
        (folder.parent / "task.toml").write_text(f'[metadata]\ngold_answer = "{name}"\n')
    (folder / "Dockerfile").write_text("FROM x\nCOPY --from=y z /z\nCOPY run.sh gone.sh /opt/\n")
    (folder / "run.sh").write_text("echo")
    factory = SimpleNamespace(create_environment_from_config=lambda **given: HarborSandbox(**given))
    paths = SimpleNamespace(for_os=lambda name: SimpleNamespace(verifier_dir=f"/{name}/logs"))
    modules = {
        "environments.factory": {"EnvironmentFactory": factory},
        "models.task.task": {"Task": task},
        "models.trial.config": {"EnvironmentConfig": dict, "VerifierConfig": dict},
        "models.trial.paths": {"TrialPaths": dict, "EnvironmentPaths": paths},
        "verifier.factory": {"VerifierFactory": SimpleNamespace(create_verifier_from_config=Verifier)},
    }
    for name, values in modules.items():
        module = ModuleType(f"harbor.{name}")
        vars(module).update(values)
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HarborSandbox, "made", [])
    return tmp_path


def test_a_task_of_harbor_is_an_episode_in_its_sandbox(suite: Path) -> None:
    spec = HarborSpec(str(suite), environment_type="e2b")
    first, second = spec.train_dataset
    assert [Path(row["task_dir"]).name for row in (first, second)] == ["a", "b"]
    assert (second["task_index"], second["gold_answer"], second["difficulty_level"]) == (1, "b", None)
    (kind,) = environment_kinds(None, spec.environment_factory).values()
    assert [*kind.schemas] == ["bash"]
    environment: Any = spec.environment_factory()
    assert spec.reward_funcs(environments=[environment]) == [0.0]  # no task, no sandbox
    assert environment.reset(**first).startswith("Count.\n\nYour only tool is `bash`")
    (sandbox,) = HarborSandbox.made
    assert sandbox.given["config"] == {"type": "e2b"}
    assert [what.split()[0] for what in sandbox.done] == ["start", "upload", "root:mkdir", "check", ":mkdir"]
    assert sandbox.done[2].endswith(" /opt/run.sh")
    assert environment.bash("ls") == "ran ls"
    assert environment.bash("true") == "(no output, exit code 0)"
    assert spec.reward_funcs(environments=[environment] * 2) == [8.0, 8.0]  # the verifier is asked once
    environment.reset(**second)
    assert sandbox.done[-1] == "stop"
    assert environment.reward == 4.0


def test_the_tasks_of_harbor_are_chosen_by_number(suite: Path) -> None:
    assert HarborSpec(str(suite), indices=[1], include_metadata=False).train_dataset["task_index"] == [1]
    assert len(HarborSpec(str(suite / "tasks"), num_tasks=1).train_dataset) == 1
    for given, told in (
        ({"indices": [2]}, "there is no task 2, only 0 to 1"),
        ({"indices": [0], "num_tasks": 1}, "num_tasks and indices are both given"),
        ({"agent": "shell"}, "must be 'bash' or a subclass of prefrl.HarborEnv"),
        ({"agent": dict}, "must be 'bash' or a subclass of prefrl.HarborEnv"),
    ):
        with pytest.raises(ConfigError, match=told):
            _ = HarborSpec(str(suite), **given).train_dataset
    with pytest.raises(DataError, match=r"has a task\.toml"):
        _ = HarborSpec(str(suite / "tasks" / "a")).train_dataset
    with pytest.raises(DataError, match="no column task_dir"):
        HarborEnv().reset()


def test_without_the_packages_an_error_says_what_to_install(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "harbor"]:
        monkeypatch.setitem(sys.modules, name, None)
    spec = HarborSpec(str(suite))
    with pytest.raises(ConfigError, match=r"HarborSpec needs harbor.*: pip install harbor"):
        spec.environment_factory().reset(**spec.train_dataset[0])
    monkeypatch.setitem(sys.modules, "openreward", None)
    with pytest.raises(ImportError, match=r"OpenRewardSpec needs openreward: pip install openreward"):
        _ = OpenRewardSpec("a/b").train_dataset


SUBMIT = {
    "name": "submit",
    "description": "Submit\nthe answer.",
    "input_schema": {
        "properties": {
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "answer": {"type": "integer", "description": "What\nit is."},
        },
        "required": ["answer"],
    },
}


class Served:
    """An environment of the package, whose tool says what it is given; task 1 has a tool of its own."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def list_tools(self) -> list[Any]:
        return [SUBMIT]

    def num_tasks(self, split: str) -> int:
        return 3

    def get_task(self, split: str, index: int) -> Any:
        return SimpleNamespace(task_spec={"prompt": "hidden", "level": index})

    def list_tasks(self, split: str) -> list[Any]:
        return [{"level": i} for i in range(3)]

    @contextlib.contextmanager
    def session(self, split: str, index: int, secrets: Any) -> Iterator[Any]:
        self.log.append((split, index, secrets))
        own = SimpleNamespace(name="peek", description="Look.", input_schema={})
        yield SimpleNamespace(
            list_tools=lambda: [SUBMIT, own] if index == 1 else [SUBMIT],
            get_prompt=lambda: [SimpleNamespace(type="text", text="Solve"), {"type": "image"}],
            call_tool=self.call,
        )
        self.log.append("end")

    def call(self, name: str, given: Any) -> Any:
        self.log.append((name, given))
        return SimpleNamespace(**(FINISHED if name == "submit" else WITHOUT))


def test_an_environment_of_openreward_is_episodes_on_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    served, asked = Served(), []
    client = SimpleNamespace(environments=SimpleNamespace(get=lambda name: asked.append(name) or served))
    package = ModuleType("openreward")
    package.OpenReward = lambda **given: asked.append(given) or client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openreward", package)
    monkeypatch.setenv("OPENREWARD_API_KEY", "key")
    spec = OpenRewardSpec("org/name", indices=[1, 0])
    assert [(row["task_index"], row["level"]) for row in spec.train_dataset] == [(1, 1), (0, 0)]
    assert spec.train_dataset[0]["prompt"] == [{"role": "user", "content": ""}]
    (kind,) = environment_kinds(None, spec.environment_factory).values()
    assert asked == [{"api_key": "key"}, "org/name"]
    assert [*kind.schemas] == ["peek", "submit"]
    parameters = kind.schemas["submit"]["function"]["parameters"]
    assert parameters["required"] == ["answer"]
    assert parameters["properties"]["answer"] == {"type": "integer", "description": "What it is."}
    served.log.clear()
    environment: Any = spec.environment_factory()
    assert environment.reset(task_index=1, level=1) == "Solve"
    assert environment.peek() == "(no output)"
    assert spec.reward_funcs(environments=[environment]) == [None]
    assert environment.submit(answer=4) == "right"
    assert environment.peek() == "(no output)"
    assert (environment.reward, environment.rewards) == (0.5, [None, 0.5, None])
    environment.reset()
    session = ("train", 1, {"api_key": "key"})
    told = [session, ("peek", {}), ("submit", {"answer": 4}), ("peek", {}), "end", ("train", 0, {"api_key": "key"})]
    assert served.log == told
    assert (environment.reward, environment.rewards) == (None, [])


def test_a_server_of_openreward_has_no_key_and_a_number_of_tasks_is_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, asked = Served(), []
    client = SimpleNamespace(environments=SimpleNamespace(get=lambda name: asked.append(name) or served))
    package = ModuleType("openreward")
    package.OpenReward = lambda **given: asked.append(given) or client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openreward", package)
    monkeypatch.setenv("OPENREWARD_API_KEY", "key")
    spec = OpenRewardSpec("http://localhost:8080", num_tasks=9)
    assert spec.train_dataset["level"] == [0, 1, 2]
    assert asked == [{"base_url": "http://localhost:8080"}, "env"]
    assert spec.session_secrets is None
    with pytest.raises(ConfigError, match="num_tasks and indices are both given"):
        OpenRewardSpec("a/b", num_tasks=1, indices=[0])
