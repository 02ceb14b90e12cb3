"""Task suites of Harbor as environments: a model works in the sandbox of a task, whose verifier gives the reward."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import tomllib
import uuid
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
from huggingface_hub import snapshot_download

from prefrl.errors import ConfigError, DataError, require
from prefrl.rollout.episodes.environment import EMPTY_PROMPT

_SHOWN = 8000  # characters of what a command prints
_METADATA = {
    "gold_answer": "gold_answer",
    "reward_mode": "reward_mode_initial",
    "difficulty_level": "difficulty_level",
    "kaggle_dataset": "kaggle_dataset_name",
}


_FEATURE = "HarborSpec"


def _harbor() -> Any:
    """The classes of the package that are used."""
    factory: Any = require("harbor.environments.factory", extra=None, feature=_FEATURE)
    tasks: Any = require("harbor.models.task.task", extra=None, feature=_FEATURE)
    configs: Any = require("harbor.models.trial.config", extra=None, feature=_FEATURE)
    paths: Any = require("harbor.models.trial.paths", extra=None, feature=_FEATURE)
    verifiers: Any = require("harbor.verifier.factory", extra=None, feature=_FEATURE)
    return SimpleNamespace(
        EnvironmentFactory=factory.EnvironmentFactory,
        Task=tasks.Task,
        EnvironmentConfig=configs.EnvironmentConfig,
        VerifierConfig=configs.VerifierConfig,
        TrialPaths=paths.TrialPaths,
        EnvironmentPaths=paths.EnvironmentPaths,
        VerifierFactory=verifiers.VerifierFactory,
    )


class _Sandbox:
    """The sandbox of a task, and the thread of the event loop that it belongs to."""

    def __init__(self) -> None:
        self.environment: Any = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="prefrl-harbor", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def stop(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            await environment.stop(delete=True)

    def close(self) -> None:
        try:
            self.run(self.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)


class HarborEnv:
    """A task of Harbor as an environment. A subclass adds the tools, which call `_exec`.

    Args:
        environment_type: Where Harbor runs sandboxes: "docker", "e2b", "daytona" or another one of its back ends.
    """

    PROMPT_SUFFIX = ""  # what the task's instruction ends with

    def __init__(self, environment_type: str = "docker") -> None:
        self._environment_type = environment_type
        self._sandbox = _Sandbox()
        self._task: Any = None
        self._paths: Any = None
        self._reward: float | None = None
        weakref.finalize(self, self._sandbox.close)  # also when the process exits

    def reset(self, task_dir: str | None = None, **row: Any) -> str:
        """Start the sandbox of a task, and return its instruction.

        Args:
            task_dir: The folder of the task.
            row: Other columns.

        Raises:
            DataError: There is no such column.
        """
        if task_dir is None:
            raise DataError("HarborEnv: the dataset has no column task_dir. Take HarborSpec(...).train_dataset.")
        self._reward = None
        return str(self._sandbox.run(self._start(task_dir))) + self.PROMPT_SUFFIX

    @property
    def reward(self) -> float:
        """The verdict of the task's verifier on the current sandbox, asked for once in an episode; 0 before
        `reset`.
        """
        if self._sandbox.environment is None:
            return 0.0
        if self._reward is None:
            self._reward = self._sandbox.run(self._verify())
        return self._reward

    def _exec(self, command: str, timeout: int = 180) -> str:
        """What a shell command prints in the sandbox, output before errors, at most 8,000 characters of it."""
        result = self._sandbox.run(self._env.exec(command, timeout_sec=timeout))
        text = (result.stdout or "") + (result.stderr or "")
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN]}\n... ({len(text) - _SHOWN} more characters)"
        return text or f"(no output, exit code {result.return_code})"

    async def _setup(self) -> None:
        """Prepare a sandbox that has just started; for subclasses."""

    @property
    def _env(self) -> Any:
        return self._sandbox.environment

    async def _start(self, task_dir: str) -> str:
        harbor = _harbor()
        await self._sandbox.stop()
        self._task = harbor.Task(task_dir=Path(task_dir))
        self._paths = harbor.TrialPaths(trial_dir=Path(tempfile.mkdtemp(prefix="prefrl_harbor_")))
        environment = self._sandbox.environment = harbor.EnvironmentFactory.create_environment_from_config(
            config=harbor.EnvironmentConfig(type=self._environment_type),
            environment_dir=self._task.paths.environment_dir,
            environment_name=self._task.short_name,
            session_id=uuid.uuid4().hex,
            trial_paths=self._paths,
            task_env_config=self._task.config.environment,
        )
        await environment.start(force_build=False)
        await self._copy_files()
        await environment.run_healthcheck()
        await environment.exec("mkdir -p /workdir /home/user/input")
        await self._setup()
        return str(self._task.instruction)

    async def _copy_files(self) -> None:
        """Copy the files that the task's Dockerfile copies: remote builds leave them out."""
        folder = Path(self._task.paths.environment_dir)
        dockerfile = folder / "Dockerfile"
        text = dockerfile.read_text(encoding="utf-8") if dockerfile.exists() else ""
        for words in (line.split() for line in text.splitlines()):
            if not words or words[0].upper() != "COPY" or any(word.startswith("--from") for word in words):
                continue
            *sources, target = [word for word in words[1:] if not word.startswith("--")]
            is_folder = target.endswith("/") or len(sources) > 1
            for source in (folder / name for name in sources if (folder / name).is_file()):
                place = f"{target.rstrip('/')}/{source.name}" if is_folder else target
                uploaded = f"/tmp/{uuid.uuid4().hex}"  # the folder of the target may belong to root
                await self._env.upload_file(source, uploaded)
                await self._env.exec(f"mkdir -p $(dirname {place}) && mv {uploaded} {place}", user="root")

    async def _verify(self) -> float:
        harbor = _harbor()
        await self._env.empty_dirs([harbor.EnvironmentPaths.for_os(self._env.os).verifier_dir], chmod=True)
        verifier = harbor.VerifierFactory.create_verifier_from_config(
            harbor.VerifierConfig(),
            task=self._task,
            trial_paths=self._paths,
            environment=self._env,
            override_env=self._task.config.verifier.env or None,
        )
        rewards = (await verifier.verify()).rewards or {}
        return float(rewards.get("reward", next(iter(rewards.values()), 0.0)))


class HarborBashEnv(HarborEnv):
    """A task of Harbor with a shell as its only tool; the answer is what is in /workdir/answer.txt at the end."""

    PROMPT_SUFFIX = (
        "\n\nYour only tool is `bash`, which runs a shell command in the sandbox. Files of the task are in "
        "/home/user/input/. To submit the answer, write it into the file /workdir/answer.txt with the tool, and keep "
        "it short. An answer that you only say does not count."
    )

    def bash(self, command: str) -> str:
        """Run a shell command in the sandbox and get what it prints. Each call is a new shell.

        Args:
            command: The command.
        """
        return self._exec(command)


AGENTS: dict[str, type[HarborEnv]] = {"bash": HarborBashEnv}


class HarborSpec:
    """A suite of Harbor's tasks; pass its `train_dataset`, `environment_factory` and `reward_funcs` to a trainer.

    Args:
        dataset: A folder that holds the tasks, directly or in a subfolder `tasks`, or the name of such a dataset on
            the Hub. A task is a folder with `task.toml`, `instruction.md`, `environment` and `tests`.
        agent: What the model can do in a sandbox: "bash", or a subclass of `HarborEnv`.
        environment_type: See `HarborEnv`.
        num_tasks: Number of tasks, in the order of their names. The default is all tasks.
        indices: Which tasks, by their positions in that order. The default is all tasks.
        include_metadata: Whether rows have columns with what `task.toml` says about the task.

    Raises:
        ConfigError: `num_tasks` and `indices` are both given, or there is no such agent.

    Source: https://github.com/laude-institute/harbor
    """

    def __init__(
        self,
        dataset: str,
        *,
        agent: str | type[HarborEnv] = "bash",
        environment_type: str = "docker",
        num_tasks: int | None = None,
        indices: Sequence[int] | None = None,
        include_metadata: bool = True,
    ) -> None:
        if num_tasks is not None and indices is not None:
            raise ConfigError("HarborSpec: num_tasks and indices are both given. Give one of them.")
        self.dataset = dataset
        self.environment_type = environment_type
        self.num_tasks = num_tasks
        self.indices = indices
        self.include_metadata = include_metadata
        self._agent = AGENTS.get(agent) if isinstance(agent, str) else agent
        if self._agent is None or not issubclass(self._agent, HarborEnv):
            known = ", ".join(map(repr, AGENTS))
            raise ConfigError(f"HarborSpec(agent={agent!r}): must be {known} or a subclass of prefrl.HarborEnv")

    @property
    def environment_factory(self) -> Callable[[], HarborEnv]:
        """For `environment_factory` of a trainer."""
        assert self._agent is not None
        return partial(self._agent, environment_type=self.environment_type)

    @property
    def reward_funcs(self) -> Callable[..., list[float]]:
        """For `reward_funcs` of a trainer: the verifiers' rewards."""
        return harbor_reward

    @cached_property
    def train_dataset(self) -> datasets.Dataset:
        """For `train_dataset` of a trainer: a row for each task."""
        chosen = self._chosen()
        rows = [{"prompt": EMPTY_PROMPT, "task_dir": str(folder), "task_index": i} for i, folder in chosen]
        if self.include_metadata:
            rows = [{**row, **_metadata_of(folder)} for row, (_, folder) in zip(rows, chosen, strict=True)]
        return datasets.Dataset.from_list(rows)

    def _chosen(self) -> list[tuple[int, Path]]:
        """The folders of the tasks, with their places in the suite."""
        root = Path(self.dataset)
        if not root.is_dir():
            root = Path(snapshot_download(self.dataset, repo_type="dataset", allow_patterns=["tasks/**"]))
        root = root / "tasks" if (root / "tasks").is_dir() else root
        folders = sorted(path.parent for path in root.glob("*/task.toml"))
        if not folders:
            raise DataError(f"HarborSpec(dataset={self.dataset!r}): no folder in {root} has a task.toml")
        places = range(len(folders))[: self.num_tasks] if self.indices is None else self.indices
        outside = [i for i in places if not 0 <= i < len(folders)]
        if outside:
            raise ConfigError(f"HarborSpec(indices=...): there is no task {outside[0]}, only 0 to {len(folders) - 1}")
        return [(i, folders[i]) for i in places]


def _metadata_of(folder: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8")).get("metadata", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / 'task.toml'} cannot be read: {error}") from error
    return {column: found.get(name) for column, name in _METADATA.items()}


def harbor_reward(environments: Sequence[HarborEnv], **columns: Any) -> list[float]:
    """The reward of each episode: what the verifier of its task says."""
    return [environment.reward for environment in environments]
