"""All checks of a run that do not need its weights: those of `prefrl doctor`, and the short ones before a run.

vLLM servers are asked whether they are there and serve its model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import datasets

from prefrl.data.tools import signature_of
from prefrl.distributed import partitions_weights
from prefrl.errors import ConfigError, DataError, GenerationError
from prefrl.generation.server import INFO_PATH, ServerInfo
from prefrl.generation.vllm.handshake import PROBE_SECONDS, Requirements
from prefrl.generation.vllm.members import source_of
from prefrl.http import Http, Overdue, Refused, Unreachable
from prefrl.models.router_replay import found_routers
from prefrl.options.names import about_evaluations
from prefrl.registry import Algorithm
from prefrl.rewards.runner import RewardRunner
from prefrl.scripts.arguments.command import CommandArguments, Given, RewardArguments
from prefrl.scripts.arguments.launch import LaunchArguments, visible_gpus, with_mode
from prefrl.scripts.checkup.dataset import (
    UNLIMITED,
    Batches,
    check_rows,
    show_rows,
    try_rewards,
)
from prefrl.scripts.checkup.findings import Checkup, Section, logged_into, rows_in_memory
from prefrl.scripts.checkup.forecast import Costs, show_forecast
from prefrl.scripts.checkup.parallel import check_parallelism
from prefrl.scripts.checkup.resources import check_memory, check_resources, show_share
from prefrl.scripts.checkup.subject import Subject, plan_of
from prefrl.scripts.inputs import lora_of, options_of
from prefrl.trainer.online.generators import server_key
from prefrl.trainer.online.prompts import prompts_per_generation
from prefrl.trainer.online.sampling import Episodes


def check_servers(section: Section, subject: Subject) -> None:
    """Note which servers answer. One that does not may still start: a run waits for it.

    Raises:
        GenerationError: A server serves another model, or was not started by prefrl.
    """
    config = subject.config
    key = server_key(config)
    http = Http(key=key)
    adapters = config.weight_sync == "adapter"
    requirements = Requirements.of(
        subject.model,
        subject.tokenizer,
        has_adapters=adapters,
        shares_device=subject.shares_device,
        has_routes=config.router_replay in (True, "R3"),
    )
    place = config.engine_urls[0]
    found = source_of(config.engine_urls, key=key or "").find()
    for reason in found.left_out:
        section.warn(f"{place}: {reason}")
    if not found.urls:
        section.warn(f"{place} has no servers yet. A run waits for {config.vllm_server_timeout:g} s.")
    for url in found.urls:
        try:
            info = _served(http, url, requirements)
        except (Unreachable, Overdue):
            section.warn(
                f"{url} does not answer. A run waits for {config.vllm_server_timeout:g} s (vllm_server_timeout). "
                f"Start it with `{requirements.start_command(url)}`."
            )
        except GenerationError as error:
            if config.min_servers is None:
                raise
            section.warn(f"{error} Until then, runs do not use it.")
        else:
            section.ok(f"{url} serves {info.model} with vLLM {info.vllm}, up to {info.max_model_len:,} tokens")


def _served(http: Http, url: str, requirements: Requirements) -> ServerInfo:
    """What a server serves, if it is what the run needs."""
    try:
        answer = http.request("GET", url + INFO_PATH, timeout=PROBE_SECONDS)
    except Refused as error:
        raise requirements.error(url, f"refused the request: {error}") from error
    info = ServerInfo.from_json(url, answer)
    requirements.check(url, info)
    return info


_FEW_ROWS = 8  # that are tokenized before a run


def check_before(
    algorithm: Algorithm,
    script: CommandArguments,
    config: Any,
    dataset: Any,
    eval_dataset: Any,
    given: Mapping[str, Any],
) -> float | None:
    """Find mistakes in tokenizer, columns, first rows, memory and servers before the model is loaded.

    Args:
        algorithm: The algorithm.
        script: Options of model and data.
        config: Options of the trainer.
        dataset: To train on.
        eval_dataset: To evaluate on; of several, the first is read.
        given: What else the trainer is given: rewards, of which models are not loaded, tools and environments.

    Returns:
        See `check_memory`.

    Raises:
        ConfigError: An option does not fit the model or the data, or the memory cannot suffice.
        DataError: The columns are not those that the trainer reads, or none of the first rows can be used and other
            rows do not help.
        GenerationError: A server that answers serves another model.
    """
    if Path(script.model_name_or_path, "adapter_config.json").is_file():
        return None  # the trainer says what to do with an adapter
    subject = Subject(algorithm, script, config, partitions_weights(config, os.environ))
    if "tools" in given:
        with closing(subject.play(given["tools"], given["environment_factory"])) as episodes:
            episodes.readers(subject.processing_class)
            dataset = episodes.training_prompts(dataset, num_rows=_FEW_ROWS)
            eval_dataset = episodes.with_prompts(eval_dataset)
    share, of_training = None, given.get("reward_funcs", ())
    for rewards, part in ((of_training, dataset), (given.get("eval_reward_funcs", of_training), eval_dataset)):
        functions, rows = [reward for reward in rewards if callable(reward)], rows_in_memory(part, 1)
        if functions and rows is not None:
            with subject.naming_dataset(ConfigError) if part is dataset else nullcontext():
                environments = None if subject.episodes is None else subject.episodes.rewards
                RewardRunner(functions, environments=environments).check_columns(rows.column_names)
    for number, part in enumerate((dataset, eval_dataset)):
        rows = rows_in_memory(part, _FEW_ROWS)
        if rows is None or not len(rows):
            continue
        # The trainer warns of the whole dataset.
        with logged_into(Section("Rows")), subject.naming_dataset(DataError):
            try:
                trained = None if number == 0 else dataset
                tokenized = subject.tokenized(
                    rows, trained=trained, invalid_rows="drop", dataset_num_proc=None, **UNLIMITED
                )
            except DataError as error:
                tokenized = _all_tokenized(subject, part, trained, error)
        if number == 0 and len(tokenized):
            share = check_memory(subject, tokenized, Batches.of(subject, dataset))
    if subject.is_online and config.use_vllm:
        check_servers(Section("Server"), subject)
    return share


def _all_tokenized(subject: Subject, dataset: Any, trained: Any, error: DataError) -> datasets.Dataset:
    """All rows as the trainer prepares them, because none of the first can be used: it counts or drops such rows.

    Raises:
        DataError: Rows cannot be used. For streams and several datasets, which are not read as a whole, it is `error`.
    """
    if not isinstance(dataset, datasets.Dataset):
        raise error
    return subject.tokenized(dataset, trained=trained, dataset_num_proc=None)


def check_run(
    checkup: Checkup,
    algorithm: Algorithm,
    given: Given,
    data: tuple[Any, Any],
    launch: LaunchArguments | None = None,
    *,
    device_memory: float | None = None,
    costs: Sequence[str] | None = None,
) -> None:
    """Check everything but the data itself. What cannot be checked after a problem is left out.

    Args:
        checkup: Gets the findings.
        algorithm: The algorithm.
        given: Its options.
        data: From `check_data`.
        launch: How the run is started; None: in one process, without a server of its own.
        device_memory: GiB of each device; None: the devices of this machine are looked at.
        costs: For `Costs.read`, to forecast the time of a step; None: it is not forecast.

    Raises:
        ConfigError: Options exclude each other.
    """
    if launch is not None and launch.vllm is not None:
        given = with_mode(given, launch, visible_gpus(os.environ))
    with given.locating():
        script, config = options_of(algorithm, given, num_processes=None if launch is None else launch.num_processes)
        plan = plan_of(config, launch, device_memory=device_memory)
    is_partitioned = launch is not None and launch.accelerate_config not in (None, "single", "ddp")
    subject = Subject(algorithm, script, config, is_partitioned or partitions_weights(config, os.environ), plan)
    (raw, evaluated), rows = data, None
    with checkup.section("Model and tokenizer") as section:
        check_model(section, subject)
    acts = isinstance(script, RewardArguments) and script.has_episodes
    if isinstance(script, RewardArguments) and acts and not checkup.count("problem"):
        with checkup.section("Tools and environments") as section, closing(subject.play(**script.loaded())) as played:
            raw = played.training_prompts(raw, num_rows=prompts_per_generation(config))
            evaluated = played.with_prompts(evaluated)
            check_episodes(section, subject, played)
    if raw is None or checkup.count("problem"):
        return
    with checkup.section("Rows") as section:
        rows = check_rows(section, subject, raw, evaluated)
        show_rows(section, subject, rows)
    if subject.is_online:
        with checkup.section("Rewards") as section:
            try_rewards(section, subject, raw)
            with about_evaluations():
                try_rewards(section, subject, evaluated, option="eval_reward_funcs")
        if config.use_vllm:
            with checkup.section("Server") as section:
                if launch is not None and launch.vllm is not None:
                    section.ok(f"the run starts it (vllm={launch.vllm!r})")
                else:
                    check_servers(section, subject)
    batches = _check_sizes(checkup, subject, launch, raw, evaluated)
    if rows is not None:
        _check_cost(checkup, subject, rows, batches, costs)


def check_model(section: Section, subject: Subject) -> None:
    """Say what is trained and, with `router_replay`, which of its routers would replay.

    Raises:
        ConfigError: It has no router that could.
    """
    count = sum(parameter.numel() for parameter in subject.model.parameters())
    section.ok(f"{type(subject.model).__name__} with {count:,} weights")
    section.ok(f"{type(subject.tokenizer).__name__} with {len(subject.tokenizer):,} tokens")
    if (adapter := lora_of(subject.script)) is not None:
        section.ok(f"trains an adapter: {adapter.peft_type.value}, r={adapter.r}")
    if not (subject.is_online and subject.config.router_replay):
        return
    try:
        section.ok(found_routers(subject.model))
    except (RuntimeError, NotImplementedError) as error:  # a model's own code that needs data
        section.note(f"router_replay: routers were not looked at, since the model needs data ({type(error).__name__})")


def check_episodes(section: Section, subject: Subject, episodes: Episodes) -> None:
    """Say what the model can call, and how its calls are read.

    Raises:
        ConfigError: No format of tool calls fits the tokenizer's chat template.
    """
    for name, reader in episodes.readers(subject.processing_class).items():
        kind = episodes.kinds[name]
        which = kind.name if name is None else f"{kind.name} (environment={name!r})"
        if kind.agent is not None:
            section.ok(f"{which}: an agent, which brings its own tools")
            continue
        calls = [signature_of(schema) for schema in kind.schemas.values()]
        section.ok(
            f"{which}: the model can call {', '.join(calls)}" if calls else f"{which}: there is nothing to call"
        )
        if reader is not None:
            section.ok(f"calls are read in the format {reader.name}")
        if kind.make is not None and not kind.has_reward:
            section.note(f"{which} has no get_reward")


def _check_sizes(
    checkup: Checkup, subject: Subject, launch: LaunchArguments | None, raw: Any, evaluated: Any
) -> Batches:
    """Batches and processes."""
    with checkup.section("Batches") as section:
        batches = Batches.of(subject, raw)
        batches.report(section)
        if launch is not None and launch.num_processes is None and subject.config.device.type != "cpu":
            section.note("the sizes are those of one process; a run without num_processes starts one for each GPU")
    if subject.plan is not None and int(subject.config.world_size) > 1:
        with checkup.section("Processes") as section:
            check_parallelism(section, subject, subject.plan, batches, evaluated)
    return batches


def _check_cost(
    checkup: Checkup, subject: Subject, rows: datasets.Dataset, batches: Batches, costs: Sequence[str] | None
) -> None:
    """Memory and time."""
    with checkup.section("Memory and time") as section:
        check_resources(section, subject, rows, batches)
        if subject.shares_device:
            show_share(section, subject, rows, batches)
    if costs is not None:
        with checkup.section("Forecast") as section:
            show_forecast(section, subject, rows, batches, Costs.read(costs))
