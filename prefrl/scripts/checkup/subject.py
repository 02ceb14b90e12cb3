"""What a run consists of before its model is loaded: options, outline of the model, tokenizer, data, rewards, plan.

How it would be started is only found out as far as the state of its processes depends on it. Nothing is started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prefrl.data.images import ProcessingClass, tokenizer_of, with_named_images
from prefrl.data.teacher_columns import check_stored, is_stored
from prefrl.distributed import Partition, partition_of
from prefrl.errors import ConfigError, PrefrlError
from prefrl.models.adapters import add_adapter
from prefrl.models.footprint import outline_of
from prefrl.models.load import arguments_for_other, load_processing_class, num_embeddings
from prefrl.models.plans import position_limit
from prefrl.models.reference import check_vocabulary
from prefrl.registry import Algorithm
from prefrl.scripts.arguments.command import CommandArguments
from prefrl.scripts.arguments.launch import COLOCATE, LaunchArguments, config_file
from prefrl.scripts.inputs import lora_of
from prefrl.scripts.parsing.yaml_file import load_yaml
from prefrl.trainer.configs import BCOConfig, DistillationConfig, KTOConfig, OnlineConfig, RewardConfig, SFTConfig
from prefrl.trainer.offline.preference import prepare_pairs, prepare_unpaired
from prefrl.trainer.online.prompts import tokenized_prompts
from prefrl.trainer.online.sampling import Episodes
from prefrl.trainer.online.teachers import taught_rows
from prefrl.trainer.reward_trainer import tokenized_pairs
from prefrl.trainer.sft_trainer import tokenized_texts

_GIB = 2**30


@dataclass(frozen=True)
class LaunchPlan:
    """How a run would be started.

    Args:
        partition: How its processes share the state of the training.
        num_machines: Machines on which they run.
        device_memory: Bytes of memory of each device; None: those of the devices of this machine.
    """

    partition: Partition
    num_machines: int = 1
    device_memory: int | None = None

    @property
    def num_ranks(self) -> int:
        """Processes, or teams of them, with rows of their own."""
        return self.partition.num_processes // self.partition.team_size


def plan_of(config: Any, launch: LaunchArguments | None, *, device_memory: float | None = None) -> LaunchPlan:
    """The plan that options describe.

    Args:
        config: Options of the trainer; it knows the number of processes.
        launch: How the run is started; None: in one process.
        device_memory: GiB; see `LaunchPlan`.

    Raises:
        ConfigError: The accelerate config cannot be read, or the processes do not form whole teams.
    """
    count, launch = int(config.world_size), launch or LaunchArguments()
    option, content = "accelerate_config", _accelerate_config(launch, config)
    partition = partition_of(content, count, option=option)
    if config.parallelism_config is not None:
        partition = replace(partition, team_size=int(config.parallelism_config.sp_size))
    elif partition.team_size > 1:  # so that sizes count teams
        config.parallelism_config = SimpleNamespace(sp_size=partition.team_size)
    if count % partition.team_size:
        raise ConfigError(
            f"parallelism_config.sp_size={partition.team_size}: must divide the number of processes, {count}. Change "
            "one of them."
        )
    memory = None if device_memory is None else int(device_memory * _GIB)
    return LaunchPlan(partition, launch.num_machines or 1, memory)


def _accelerate_config(launch: LaunchArguments, config: Any) -> Mapping[str, Any]:
    """What accelerate's config says, or options of transformers that say the same."""
    if config.deepspeed is not None:
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": config.deepspeed}}
    if config.fsdp:
        return {"distributed_type": "FSDP"}
    path: Path | None = config_file(launch.accelerate_config)
    if path is None:
        return {}
    where = f"accelerate_config={launch.accelerate_config!r}"
    content = load_yaml(path, where)
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ConfigError(f"{where}: has no distributed_type, as accelerate configs have")
    return content


@dataclass
class Subject:
    """A training that has not begun.

    Args:
        algorithm: The algorithm.
        script: Options of model, data and rewards.
        config: Options of the trainer.
        is_partitioned: Whether processes may hold parts of the weights instead of copies.
        plan: How it would be started; None: this process trains.
    """

    algorithm: Algorithm
    script: CommandArguments
    config: Any
    is_partitioned: bool = False
    plan: LaunchPlan | None = None
    episodes: Episodes | None = field(default=None, init=False)

    def play(self, tools: Any, environment_factory: Any) -> Episodes:
        """From now on, the model acts. The result has to be closed.

        Raises:
            ConfigError: A tool or an environment cannot be used.
        """
        self.episodes = Episodes(self.config, tools, environment_factory, option="environment")
        return self.episodes

    @property
    def is_online(self) -> bool:
        """Whether it samples completions and scores them."""
        return isinstance(self.config, OnlineConfig)

    @property
    def shares_device(self) -> bool:
        """Whether completions are sampled by a server on the device of training."""
        return self.is_online and bool(self.config.use_vllm) and self.config.vllm_mode == COLOCATE

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model without its weights.

        Raises:
            ConfigError: It cannot be loaded.
        """
        return outline_of(
            self.script.model_name_or_path,
            model_init_kwargs=self.config.model_init_kwargs,
            is_classifier=isinstance(self.config, RewardConfig),
        )

    @cached_property
    def trained(self) -> PreTrainedModel:
        """The model with the adapter that is trained, if there is one; without its weights."""
        if (adapter := lora_of(self.script)) is None:
            return self.model
        outline = outline_of(self.script.model_name_or_path, model_init_kwargs=self.config.model_init_kwargs)
        with torch.device("meta"):
            return add_adapter(outline, adapter, task_type="CAUSAL_LM", seed=None)

    @cached_property
    def teachers(self) -> list[PreTrainedModel]:
        """The models that teach, without their weights.

        Raises:
            ConfigError: One cannot be loaded, or has another vocabulary than the model.
        """
        named = getattr(self.config, "teacher_model_name_or_path", None)
        names = list(named.values()) if isinstance(named, Mapping) else [] if named is None else [named]
        given, shared = self.config.model_init_kwargs, getattr(self.config, "teacher_model_init_kwargs", None)
        outlines = [
            outline_of(
                name, model_init_kwargs=arguments_for_other(name, self.model, given) if shared is None else shared
            )
            for name in names
        ]
        for name, outline in zip(names, outlines, strict=True):
            check_vocabulary(f"teacher_model_name_or_path={name!r}", outline, self.model)
        return outlines

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained."""
        return lora_of(self.script) is not None

    @cached_property
    def processing_class(self) -> ProcessingClass:
        """The tokenizer, or the processor of a model that reads images.

        Raises:
            ConfigError: There is none, or it does not fit the model.
        """
        arguments = self.config.model_init_kwargs
        changes = self.config.tokenizer_changes
        loaded = load_processing_class(self.model, model_init_kwargs=arguments, changes=changes)
        self.config.fit_context(position_limit(self.model))
        return loaded

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, also of a processor."""
        return tokenizer_of(self.processing_class)

    @property
    def num_embeddings(self) -> int:
        """Token ids that the model has embeddings for."""
        return num_embeddings(self.model)

    def tokenized(self, dataset: Any, *, trained: Any = None, **changes: Any) -> Any:
        """The dataset with token ids, as the trainer prepares it before it packs rows, with some other options.

        `trained` is the dataset to train on, if this one is for evaluations.

        Raises:
            ConfigError: An option does not fit the dataset.
            DataError: Rows cannot be used.
        """
        config, processing_class = _changed(self.config, changes), self.processing_class
        dataset = with_named_images(dataset, config.image_key)
        if isinstance(config, OnlineConfig):
            schemas = None if self.episodes is None else self.episodes.schemas
            with_prompts = partial(tokenized_prompts, processing_class=processing_class, args=config, tools=schemas)
            if isinstance(config, DistillationConfig):
                return self._taught(dataset, config, with_prompts, trained)
            return with_prompts(dataset)
        if isinstance(config, SFTConfig):
            return tokenized_texts(dataset, processing_class, config, is_packed=config.packing)
        if isinstance(config, RewardConfig):
            return tokenized_pairs(dataset, processing_class, config)
        if isinstance(config, KTOConfig | BCOConfig):
            return prepare_unpaired(dataset, processing_class, config, with_mismatched=False)
        return prepare_pairs(dataset, processing_class, config)

    def _taught(
        self, dataset: Any, config: DistillationConfig, with_prompts: Callable[[Any], Any], trained: Any
    ) -> Any:
        teacher, has_stored = config.teacher_model_name_or_path, is_stored(dataset if trained is None else trained)
        if has_stored:
            check_stored(None, config)
        return taught_rows(
            dataset,
            self.processing_class,
            config,
            with_prompts,
            names=list(teacher) if isinstance(teacher, Mapping) else None,
            num_tokens=self.num_embeddings,
            training=trained is None,
            has_stored=has_stored,
        )

    @contextmanager
    def naming_dataset(self, *kinds: type[PrefrlError]) -> Iterator[None]:
        """Inside this context, errors of these kinds begin with the option that names the dataset."""
        try:
            yield
        except kinds as error:
            name = self.script.dataset_name
            if name is None and not self.script.datasets:
                raise
            raise type(error)(f"{'datasets' if name is None else f'dataset_name={name!r}'}: {error}") from error


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """A copy of a config with other values, which is not validated again."""
    known = {field.name for field in dataclasses.fields(config)}
    changed = object.__new__(type(config))
    vars(changed).update(vars(config) | {name: v for name, v in changes.items() if name in known})
    return changed
