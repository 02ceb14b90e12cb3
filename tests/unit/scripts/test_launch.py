"""What `prefrl launch` would start, on machines with any number of GPUs, and what it refuses before that."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.arguments.launch import LaunchArguments, launch_options, visible_gpus, with_mode
from prefrl.scripts.inputs import read
from prefrl.scripts.launch.command import CONFIGS, plan_training
from prefrl.scripts.launch.processes import Program
from prefrl.scripts.launch.vllm_serve import ServerProgram, check_start, choose_port, plan_server
from prefrl.scripts.schema import SchemaParser

EIGHT = [str(i) for i in range(8)]
GRPO = ["--model_name_or_path", "org/model", "--dataset_name", "d", "--reward_funcs", "numeric_reward"]


def training(options: LaunchArguments, gpus: list[str] = EIGHT, *, use_cpu: bool = False) -> Program:
    return plan_training(options, ["sft", "--seed", "1"], {"use_cpu": use_cpu}, gpus)


def server(*words: str, gpus: list[str] = EIGHT, **options: Any) -> ServerProgram:
    run = SchemaParser("grpo").read([*GRPO, *words])[0]
    return plan_server(LaunchArguments(**{"vllm": "6,7"} | options), run, gpus, {})


def asked(*words: str, **environment: str) -> LaunchArguments | None:
    """What `prefrl grpo` with these options would launch."""
    return launch_options(read(REGISTRY["grpo"], [*GRPO, *words]), environment)


def option(program: Program, name: str) -> str | None:
    return program.command[program.command.index(name) + 1] if name in program.command else None


@pytest.mark.parametrize(
    ("options", "config", "processes", "devices"),
    [
        pytest.param({}, "ddp", "8", "0,1,2,3,4,5,6,7", id="a process for each GPU"),
        pytest.param({"num_processes": 1}, "single", "1", "0", id="one sees one GPU"),
        pytest.param({"num_processes": 4, "accelerate_config": "zero3"}, "zero3", "4", "0,1,2,3", id="fewer"),
        pytest.param({"vllm": "6,7"}, "ddp", "6", "0,1,2,3,4,5", id="those of the server left out"),
        pytest.param({"vllm": "0, 3", "num_processes": 3}, "ddp", "3", "1,2,4", id="any of them"),
    ],
)
def test_processes_get_the_first_gpus_that_the_server_leaves(
    options: dict[str, Any], config: str, processes: str, devices: str
) -> None:
    program = training(LaunchArguments(**options))
    assert option(program, "--config_file") == str(CONFIGS / f"{config}.yaml")
    assert option(program, "--num_processes") == processes
    assert option(program, "--main_process_port") == "0"
    assert program.environment == {"CUDA_VISIBLE_DEVICES": devices, "PREFRL_NUM_PROCESSES": processes}
    # What started the run is recorded with its processes, also where they were not asked for.
    words = ["-m", "prefrl.scripts.main", "sft", "--seed", "1", "--num_processes", processes]
    assert program.command[-len(words) :] == words


def test_gpus_go_by_the_names_in_cuda_visible_devices() -> None:
    program = training(LaunchArguments(vllm="GPU-c"), ["GPU-a", "GPU-b", "GPU-c"])
    assert program.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_without_gpus_there_are_none_to_see() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == []


def test_on_cpus_processes_are_those_that_were_asked_for() -> None:
    for count, started, config in ((None, "1", "single"), (2, "2", "ddp")):
        program = training(LaunchArguments(num_processes=count), [], use_cpu=True)
        assert option(program, "--num_processes") == started
        assert option(program, "--config_file") == str(CONFIGS / f"{config}.yaml")
        assert program.environment == {"PREFRL_NUM_PROCESSES": started}


def test_each_of_several_machines_starts_its_share() -> None:
    options = LaunchArguments(num_processes=32, num_machines=4, machine_rank=3, main_process_ip="node0")
    program = training(options)
    assert program.environment == {"CUDA_VISIBLE_DEVICES": ",".join(EIGHT), "PREFRL_NUM_PROCESSES": "32"}
    named = ("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port")
    assert [option(program, name) for name in named] == ["32", "4", "3", "node0", "29500"]


def test_a_config_of_the_user_says_what_the_options_leave_open(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = "distributed_type: MULTI_GPU\nnum_processes: 6\nmain_process_port: 1234\ngpu_ids: all\n"
    path.write_text(text, encoding="utf-8")
    program = training(LaunchArguments(accelerate_config=str(path)))
    assert [option(program, name) for name in ("--num_processes", "--main_process_port")] == ["6", "1234"]
    program = training(LaunchArguments(accelerate_config=str(path), num_processes=2))
    assert option(program, "--num_processes") == "2"
    path.write_text(text.replace("6", "-1"), encoding="utf-8")
    assert option(training(LaunchArguments(accelerate_config=str(path))), "--num_processes") == "8"
    path.write_text(f"{text}num_machines: 2\nmachine_rank: 0\nmain_process_ip: node0\n", encoding="utf-8")
    program = training(LaunchArguments(accelerate_config=str(path)))
    named = ("--num_machines", "--machine_rank", "--main_process_ip")
    assert [option(program, name) for name in named] == ["2", "0", "node0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not YAML"),
        (
            "distributed_type: !!python/name:os.system x\n",
            "mine.yaml:1: the tag '!!python/name:os.system' is not allowed",
        ),
        ("distributed_type: " + "[" * 1000, "must have at most 20 levels"),
        ("distributed_type: NO\n# " + "x" * 2**18, "accelerate_config='.*': has more than 262144 characters"),
        ("learning_rate: 1\n", "has no distributed_type"),
        ("distributed_type: MULTI_GPU\ngpu_ids: 0,1\n", "has gpu_ids='0,1'. .*GPUs of CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        training(LaunchArguments(accelerate_config=str(tmp_path / "mine.yaml")))


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        pytest.param({}, [], "no GPU is visible to train on. .*--use_cpu true", id="no GPU"),
        pytest.param(
            {"num_processes": 9}, EIGHT, r"num_processes=9: 9 .* but only 8 \(0,.*,7\) can train", id="too many"
        ),
        pytest.param(
            {"num_processes": 8, "vllm": "6,7"},
            EIGHT,
            "but only 6 .* can train beside vllm='6,7'",
            id="beside",
        ),
        pytest.param({"vllm": "0,1"}, ["0", "1"], "no GPU is visible beside vllm='0,1'", id="none left"),
        pytest.param({"vllm": "7,8"}, EIGHT, "there is no GPU '8', GPUs 0,1,.* are visible", id="no such GPU"),
        pytest.param({"vllm": "1,1"}, EIGHT, "names a GPU twice", id="twice"),
        pytest.param({"accelerate_config": "zero33"}, EIGHT, "'zero33': .* Did you mean 'zero3'", id="no such config"),
        pytest.param({"machine_rank": 1}, EIGHT, "machine_rank=1 has no effect because one machine", id="rank alone"),
        pytest.param({"num_machines": 2, "num_processes": 4}, EIGHT, "machine_rank=None, .*set all", id="no rank"),
        pytest.param(
            {"num_machines": 2, "machine_rank": 2, "num_processes": 4, "main_process_ip": "a"},
            EIGHT,
            "machine_rank=2: must be below num_machines=2",
            id="rank",
        ),
        pytest.param(
            {"num_machines": 2, "machine_rank": 1, "num_processes": 5, "main_process_ip": "a"},
            EIGHT,
            "num_processes=5: .*must be a multiple of num_machines=2",
            id="uneven",
        ),
        pytest.param(
            {"num_machines": 2, "machine_rank": 1, "num_processes": 4, "main_process_ip": "a", "vllm": "7"},
            EIGHT,
            "vllm='7' with num_machines=2: .*vllm_server_host",
            id="server for several machines",
        ),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(options: dict[str, Any], gpus: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training(LaunchArguments(**options), gpus)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_python": "/usr/bin/python3"}, "vllm_python='/usr/bin/python3' has no effect because no server"),
        ({"vllm_args": "--dtype float32"}, "vllm_args='--dtype float32' has no effect"),
        ({"num_processes": 0}, "num_processes=0: must be"),
        ({"vllm": "true"}, "vllm='true': must be auto, cpu, or the GPUs of the server, such as 6,7"),
    ],
)
def test_options_of_the_launch_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchArguments(**options)


def test_the_server_has_the_model_of_the_run_on_all_of_its_gpus() -> None:
    program = server("--model_revision", "v2", "--vllm_server_port", "8123", vllm_args="--max_model_len 512")
    assert program.environment == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert program.command == [
        *(sys.executable, "-P", "-m", "prefrl.scripts.main", "vllm-serve", "--model", "org/model"),
        *("--port", "8123", "--revision", "v2", "--tensor_parallel_size", "2", "--max_model_len", "512"),
    ]
    on_cpu = server(vllm="cpu", gpus=[])
    assert on_cpu.environment == {}
    assert option(on_cpu, "--tensor_parallel_size") is None


def test_replicas_may_take_the_place_of_shards() -> None:
    program = server(vllm_args="--tensor_parallel_size 1 --data_parallel_size 2")
    assert program.command[-4:] == ["--tensor_parallel_size", "1", "--data_parallel_size", "2"]


def test_the_server_takes_the_adapters_of_the_run() -> None:
    assert option(server("--use_peft", "--lora_r", "12"), "--max_lora_rank") == "16"
    assert option(server("--use_peft", "--lora_rank_pattern", '{"q_proj": 33}'), "--max_lora_rank") == "64"
    assert option(server("--use_peft", "--weight_sync", "nccl"), "--max_lora_rank") is None


def test_the_python_of_the_server_may_be_another(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o755)
    assert server(vllm_python=str(python)).command[0] == str(python)
    run = SchemaParser("grpo").read(GRPO)[0]
    variable = {"PREFRL_VLLM_PYTHON": str(python)}
    assert plan_server(LaunchArguments(vllm="0"), run, EIGHT, variable).command[0] == str(python)
    with pytest.raises(ConfigError, match="vllm_python='/nowhere/python': is not a program"):
        server(vllm_python="/nowhere/python")


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (
            [],
            {"vllm_args": "--port 9000"},
            "port=9000 differ from the address that the run connects to.*vllm_server_port",
        ),
        ([], {"vllm_args": "--data_parallel_size 2"}, "is 4, but vllm names 2 GPUs"),
        ([], {"vllm_args": "--middleware a.B"}, "vLLM's --middleware cannot be given here"),
        ([], {"vllm_args": "--max_model_len 0"}, "max_model_len=0: must be"),
        ([], {"vllm_args": "--dtype 'float32"}, "vllm_args=.*No closing quotation. Write it as in a shell"),
    ],
)
def test_a_server_that_does_not_fit_the_run_is_refused(
    words: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        server(*words, **options)


def placed(gpus: list[str], *, use_cpu: bool = False, mode: str = "server", **options: Any) -> str | None:
    """Where `vllm="auto"` puts the server."""
    run = {"use_cpu": use_cpu, "vllm_mode": mode}
    return LaunchArguments(**{"vllm": "auto"} | options).placed(run, gpus).vllm


@pytest.mark.parametrize(
    ("use_cpu", "gpus", "place"), [(False, EIGHT, "7"), (False, [], "cpu"), (True, EIGHT, "cpu"), (True, ["0"], "cpu")]
)
def test_auto_is_the_last_gpu_or_the_cpu(use_cpu: bool, gpus: list[str], place: str) -> None:
    assert placed(gpus, use_cpu=use_cpu) == place
    assert placed(gpus, use_cpu=use_cpu, num_processes=1, mode="colocate") == (place if place == "cpu" else "0")


@pytest.mark.parametrize(
    ("gpus", "values", "vllm", "mode"),
    [
        pytest.param(["3"], {}, "auto", "colocate", id="the only one"),
        pytest.param(["3"], {"vllm_mode": "server"}, "auto", "server", id="unless told otherwise"),
        pytest.param(["3"], {"use_cpu": True}, "auto", None, id="the CPU needs no sharing"),
        pytest.param(["3"], {}, "cpu", None, id="a place for the server"),
        pytest.param(["3", "4"], {}, "auto", None, id="two"),
        pytest.param([], {}, "auto", None, id="none"),
    ],
)
def test_auto_shares_the_only_gpu(gpus: list[str], values: dict[str, Any], vllm: str, mode: str | None) -> None:
    found = with_mode(Given(values, {}), LaunchArguments(vllm=vllm), gpus)
    assert found.values.get("vllm_mode") == mode
    assert found.values.items() >= values.items()


def test_training_and_the_server_are_on_the_gpu_that_they_share() -> None:
    words = ["--vllm_mode", "colocate", "--use_vllm", "--num_processes", "1"]
    run = SchemaParser("grpo").read([*GRPO, *words])[0]
    options = LaunchArguments(vllm="auto", num_processes=1).placed(run, EIGHT)
    program = plan_training(options, ["grpo", *words], run, EIGHT)
    serve = plan_server(options, run, EIGHT, {})
    assert program.environment["CUDA_VISIBLE_DEVICES"] == serve.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert serve.command[-3:] == ["--port", "8000", "--enable_sleep_mode"]
    assert serve.with_share("0.41").command[-2:] == ["--gpu_memory_utilization", "0.41"]
    given = plan_server(options, run | {"vllm_gpu_memory_utilization": 0.5}, EIGHT, {})
    assert given.command[-3:] == ["--enable_sleep_mode", "--gpu_memory_utilization", "0.5"]


def test_a_mode_that_shares_the_gpu_starts_the_server() -> None:
    options = asked("--use_vllm", "--vllm_mode", "colocate", "--vllm_python", sys.executable)
    assert options is not None
    assert (options.vllm, options.server_python({})) == ("auto", sys.executable)
    assert asked("--vllm_mode", "colocate") is None, "without use_vllm, it says nothing"
    assert asked("--use_vllm", "--vllm_mode", "colocate", LOCAL_RANK="0") is None, "nothing is started by a worker"


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (["0"], {}, "vllm='auto' with vllm_mode='server': one GPU is visible, but the server and training need one"),
        (EIGHT, {"mode": "colocate"}, "num_processes=None and 8 visible GPUs: one process and one server share a GPU"),
        (["0"], {"mode": "colocate", "num_processes": 2}, "num_processes=2 and 1 visible GPUs: one process"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(gpus: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(gpus, **options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vllm", "6,7"], "vllm='6,7' with vllm_mode='colocate': the server shares the device of training"),
        (["--vllm_server_host", "node5"], "would start a server, but vllm_server_host='node5' names another one"),
    ],
)
def test_servers_elsewhere_share_nothing(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked("--use_vllm", "--vllm_mode", "colocate", *words)


@pytest.mark.parametrize(
    ("vllm_args", "message"),
    [
        ("--gpu_memory_utilization 0.9", "gpu_memory_utilization=0.9 with .*set vllm_gpu_memory_utilization of the"),
        ('--speculative_config \'{"model": "m"}\'', "speculative_config=.*the server forgets all weights"),
    ],
)
def test_a_server_that_could_not_sleep_and_go_on_is_refused(vllm_args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server("--use_vllm", "--vllm_mode", "colocate", vllm="0", vllm_args=vllm_args)


def test_a_server_that_could_not_start_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho vllm prefrl\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"vllm_python='.*/python': vllm and prefrl not found there\. Set"):
        check_start(ServerProgram([str(python)], {}, port=1, start_timeout=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(ConfigError, match=r"vLLM server needs Linux, not macOS\. Start prefrl vllm-serve on a"):
            check_start(ServerProgram([str(python)], {}, port=1, start_timeout=1.0))
    python.write_text("#!/bin/sh\necho\n")
    check_start(ServerProgram([str(python)], {}, port=1, start_timeout=1.0))


def test_a_port_in_use_is_refused_if_it_was_asked_for_and_otherwise_another_is_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"vllm_server_port={port}: another program uses this port"):
            choose_port(port, is_given=True)
        free = choose_port(port, is_given=False)
    assert free != port
    assert choose_port(free, is_given=True) == free


# What `prefrl ALGORITHM` hands over to the launcher.


def test_one_option_of_the_launch_starts_the_run_through_the_launcher() -> None:
    assert asked() is None
    assert asked("--num_processes", "2") == LaunchArguments(num_processes=2)
    assert asked("--vllm", "auto", "--vllm_args", "--dtype float32") == LaunchArguments(
        vllm="auto", vllm_args="--dtype float32"
    )
    assert asked("--num_processes", "2", PREFRL_NUM_PROCESSES="2") is None  # a process that the launcher started


def test_a_run_with_a_server_of_its_own_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("vllm: auto\nvllm_args: --dtype float32\nvllm_server_port: 8123\n", encoding="utf-8")
    assert read(REGISTRY["grpo"], [str(path), *GRPO]).values["use_vllm"] is True
    without = read(REGISTRY["grpo"], [str(path), *GRPO, "--use_vllm", "false"])
    assert not {"vllm", "vllm_args", "vllm_server_port"} & without.values.keys()
    assert launch_options(read(REGISTRY["grpo"], [str(path), *GRPO, "--vllm", "null", "--use_vllm"]), {}) is None


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("vllm: yes", {}, "run.yaml:1: vllm='yes': must be auto, cpu"),
        ("num_processes: 0", {}, "run.yaml:1: num_processes=0: must be"),
        ("vllm_args: --dtype half", {}, "run.yaml:1: vllm_args='--dtype half' has no effect because"),
        ("use_vllm: no\nvllm: cpu", {}, "run.yaml:2: vllm='cpu' has no effect because use_vllm=False"),
        (
            "vllm: 6,7\nvllm_server_host: h",
            {},
            "run.yaml:1: vllm='6,7': would start a server, but vllm_server_host='h'",
        ),
        ("vllm: cpu\nvllm_server_base_url: [http://a:1]", {}, "run.yaml:1: vllm='cpu': .* vllm_server_base_url="),
        (
            "num_processes: 2",
            {"LOCAL_RANK": "0"},
            "num_processes=2: would start processes, but torchrun or accelerate",
        ),
    ],
)
def test_a_mistake_about_the_launch_is_told_with_its_line(
    tmp_path: Path, text: str, environment: dict[str, str], message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        asked("--config", str(path), **environment)


def test_an_algorithm_without_generation_has_no_server() -> None:
    with pytest.raises(ConfigError, match=r"unknown option '--vllm'\. It is an option of grpo, .*; sft has no option"):
        read(REGISTRY["sft"], ["--model_name_or_path", "m", "--dataset_name", "d", "--vllm", "auto"])


# The configs: what accelerate makes of them.

BACK_ENDS = {
    "single": "NO",
    "ddp": "MULTI_GPU",
    "zero1": "DEEPSPEED",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "zero3_offload": "DEEPSPEED",
    "fsdp2": "FSDP",
}


def prepared(name: str, *words: str) -> tuple[Any, dict[str, str]]:
    """The command, None for torchrun's, and the variables that processes would get from `accelerate launch`."""
    argv = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--num_processes", "4", "--main_process_port", "0"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*argv, *words, "train.py"]))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        return prepare_deepspeed_cmd_env(arguments)
    assert arguments.multi_gpu or arguments.use_fsdp
    return None, prepare_multi_gpu_env(arguments)


def test_there_is_a_config_for_each_backend() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(BACK_ENDS)
    for name, distributed_type in BACK_ENDS.items():
        config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
        assert config.distributed_type.value == distributed_type
        # The precision is an option of the run, and a config that says CPU starts one process.
        assert (config.mixed_precision, config.use_cpu) == ("no", False)


@pytest.mark.parametrize(("name", "stage"), [("zero1", "1"), ("zero2", "2"), ("zero3", "3"), ("zero3_offload", "3")])
def test_deepspeed_has_the_stage_of_its_name(name: str, stage: str) -> None:
    _, environment = prepared(name)
    prefix = "ACCELERATE_DEEPSPEED_"
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment[f"{prefix}ZERO_STAGE"] == stage
    device = "cpu" if name.endswith("offload") else None
    for part in ("OPTIMIZER", "PARAM"):
        assert environment.get(f"{prefix}OFFLOAD_{part}_DEVICE") == device
    for flag in ("ZERO3_INIT", "ZERO3_SAVE_16BIT_MODEL"):
        assert environment.get(f"{prefix}{flag}") == ("true" if stage == "3" else None)
    # Each node starts its own processes, where DeepSpeed's way is to start them all over ssh.
    command, _ = prepared(name, "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1")
    assert command is None


def test_fsdp_is_of_version_2_and_shards_each_layer() -> None:
    _, environment = prepared("fsdp2")
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_OFFLOAD_PARAMS": "false",
    }
    assert expected.items() <= environment.items()


def test_data_parallel_processes_shard_nothing() -> None:
    _, environment = prepared("ddp")
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & environment.keys()
