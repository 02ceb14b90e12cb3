"""What each config refuses, what its options mean, and the types that they have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from prefrl import ConfigError, DPOConfig, GRPOConfig, SFTConfig
from prefrl.errors import MissingPackageError
from prefrl.losses.truncation import cumsum_permitted
from prefrl.models.modes import of_products
from prefrl.options.types import check_value
from prefrl.registry import REGISTRY, Algorithm
from prefrl.trainer.base_config import BaseConfig

GRPO_RULES = [
    pytest.param({"loss_type": "ppo"}, "loss_type='ppo': must be one of 'grpo', 'bnpo', 'dr_grpo', 'dapo'", id="loss"),
    pytest.param({"epsilon": -0.1}, "epsilon=-0.1: must be a number >= 0", id="epsilon"),
    pytest.param({"epsilon": float("nan")}, "epsilon=nan: must be a number", id="nan"),
    pytest.param({"beta": -1}, "beta=-1: must be a number >= 0", id="beta"),
    pytest.param({"beta": True}, "beta=True: must be a number", id="bool as number"),
    pytest.param({"temperature": 0.0}, "temperature=0.0: must be a number >= 0.001 and <= 100", id="temperature"),
    pytest.param({"top_p": 1.5}, "top_p=1.5: must be a number >= 0.001 and <= 1", id="top_p"),
    pytest.param({"scale_rewards": "std"}, "scale_rewards='std': must be one of 'group', 'batch', 'none'", id="scale"),
    pytest.param(
        {"steps_per_generation": 2, "gradient_accumulation_steps": 3}, "learns from one generation. Set 3.", id="part"
    ),
    pytest.param({"truncation_mode": "left"}, "truncation_mode='left': must be one of 'keep_start'", id="truncation"),
    pytest.param({"cache_implementation": "paged"}, "must be one of 'dynamic', 'offloaded'", id="kind of cache"),
    pytest.param({"chat_template_kwargs": "{a"}, "chat_template_kwargs='{a': must be a JSON object", id="json"),
]
SFT_RULES = [
    pytest.param({"loss_type": "mse"}, "loss_type='mse': must be one of 'nll', 'dft'", id="loss"),
    pytest.param({"max_length": 1}, "max_length=1: must be a number >= 2", id="length"),
    pytest.param({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr.* Set lr_scheduler_kwargs", id="min_lr"),
    pytest.param(
        {"lr_scheduler_kwargs": {"cycles": 2}}, "'linear' with .*'cycles'.* Set lr_scheduler_k", id="schedule"
    ),
    pytest.param(
        {"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch=0: must be a number >= 1", id="tokens"
    ),
    pytest.param({"liger_kernel_config": "{a"}, "liger_kernel_config='{a': must be a JSON object", id="kernels json"),
    pytest.param({"forward_plan": "dense"}, "forward_plan='dense': must be one of 'auto'", id="plan"),
    pytest.param({"num_train_epochs": 0}, "num_train_epochs=0: must be a number >= 1e-06", id="no epoch"),
    pytest.param({"warmup_steps": float("nan")}, "warmup_steps=nan: must be a number >= 0", id="warm-up"),
    pytest.param({"seed": -1}, "seed=-1: must be a number >= 0 and < 4294967296", id="seed"),
    pytest.param({"dataloader_num_workers": -1}, "dataloader_num_workers=-1: must be", id="loader's processes"),
    pytest.param({"eval_delay": -1}, "eval_delay=-1: must be a number >= 0", id="delay of evaluation"),
    pytest.param({"save_total_limit": 0}, "save_total_limit=0: must be a number >= 1", id="no checkpoint"),
    pytest.param({"ddp_timeout": 0}, "ddp_timeout=0: must be a number >= 1", id="no time for others"),
    pytest.param({"save_strategy": "steps", "save_steps": 0}, "save_steps=0: must be a number > 0", id="interval"),
    pytest.param({"hub_strategy": "now"}, "hub_strategy='now': must be one of 'end', 'every_save'", id="an enum"),
    pytest.param({"report_to": None}, "report_to=None: unknown tracker. Did you mean 'none'", id="no tracker"),
    pytest.param(
        {"report_to": ["wandbb"]}, "report_to='wandbb': unknown tracker. Did you mean 'wandb'", id="tracker's name"
    ),
    pytest.param({"learning_rate": -1e-5}, "learning_rate=-1e-05: must be a number >= 0", id="learning rate"),
    pytest.param({"learning_rate": float("nan")}, "learning_rate=nan: must be a number", id="learning rate nan"),
    pytest.param({"packin": True}, "SFTConfig has no option 'packin'. Did you mean 'packing'", id="unknown name"),
    pytest.param({"q": 1}, "SFTConfig has no option 'q'. docs/trainers lists the options", id="name like no other"),
    pytest.param({"weight_decay": float("inf")}, "weight_decay=inf: must be a number", id="weight decay"),
    pytest.param({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: must be", id="no row"),
    pytest.param({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: must be", id="accumulation"),
]
DPO_RULES = [
    pytest.param(
        {"loss_type": ["sft", "exo_pair"], "label_smoothing": 0.5}, "label_smoothing=0.5: exo_pair needs it", id="exo"
    ),
    pytest.param({"label_smoothing": 0.6}, "label_smoothing=0.6: must be a number >= 0 and <= 0.5", id="smoothing"),
    pytest.param(
        {"loss_type": "hinge", "label_smoothing": 0.1},
        r"label_smoothing=0.1 has no effect because loss_type=\['hinge'\] does not read it. It goes with 'sigmoid'",
        id="hinge",
    ),
    pytest.param({"discopop_tau": 0.1}, "discopop_tau=0.1 has no effect.* It goes with 'discopop'", id="tau"),
]


@pytest.mark.parametrize(("overrides", "message"), GRPO_RULES)
def test_grpo_config_refuses(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **overrides)


@pytest.mark.parametrize(("overrides", "message"), SFT_RULES)
def test_sft_config_refuses(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, **overrides)


@pytest.mark.parametrize(("overrides", "message"), DPO_RULES)
def test_dpo_config_refuses(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        DPOConfig(output_dir=str(tmp_path), use_cpu=True, **overrides)


def test_defaults_are_those_of_the_trl_grpo_page(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    expected = {
        "learning_rate": 1e-6,
        "max_prompt_length": 512,
        "num_generations": 8,
        "max_completion_length": 256,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "beta": 0.04,
        "num_iterations": 1,
        "epsilon": 0.2,
        "epsilon_high": None,
        "reward_weights": None,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "log_completions": False,
        "remove_unused_columns": False,
        "model_init_kwargs": None,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_the_old_booleans(given: Any, meant: str, tmp_path: Path) -> None:
    assert GRPOConfig(output_dir=str(tmp_path), use_cpu=True, scale_rewards=given).scale_rewards == meant


def test_json_options_are_parsed(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs='{"revision": "main"}')
    assert config.model_init_kwargs == {"revision": "main"}


REENTRANT = {"use_reentrant": True}
AS_JSON = '{"use_reentrant": true}'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (False, None)),
        ({"activation_checkpointing": True}, (True, None)),
        ({"gradient_checkpointing": True}, (True, None)),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": AS_JSON},
            (True, REENTRANT),
        ),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}, (True, REENTRANT)),
        ({"activation_checkpointing": False, "gradient_checkpointing": True}, (False, None)),
    ],
)
def test_activation_checkpointing_has_one_value_under_its_name_and_its_old_one(
    given: Any, expected: Any, tmp_path: Path
) -> None:
    config: Any = SFTConfig(output_dir=str(tmp_path), use_cpu=True, **given)
    assert (config.activation_checkpointing, config.activation_checkpointing_kwargs) == expected
    assert (config.gradient_checkpointing, config.gradient_checkpointing_kwargs) == expected


def test_activation_checkpointing_is_a_switch_on_the_command_line(tmp_path: Path) -> None:
    parser: Any = HfArgumentParser(SFTConfig)
    words = ["--output_dir", str(tmp_path), "--use_cpu"]
    for switch in ([], ["--activation_checkpointing"]):
        (made,) = parser.parse_args_into_dataclasses([*words, *switch])
        assert made.activation_checkpointing is bool(switch)


def test_the_switch_of_trls_commands_for_columns_is_taken(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--no_remove_unused_columns"]
    for cls in (DPOConfig, GRPOConfig):
        (made,) = HfArgumentParser(cls).parse_args_into_dataclasses(words)
        assert made.remove_unused_columns is False


def test_generation_sizes_follow_from_each_other(tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, gradient_accumulation_steps=2, generation_batch_size=32
    )
    assert config.micro_batches_per_generation == 4
    assert config.updates_per_generation == 2
    assert config.completions_per_rank == 32


@pytest.mark.parametrize("given", [{"steps_per_generation": 2}, {"generation_batch_size": 16}, {}])
def test_an_optimizer_step_learns_from_one_generation_batch(given: dict[str, int], tmp_path: Path) -> None:
    """Smaller batches would be sampled with the same weights."""
    config = GRPOConfig(str(tmp_path), use_cpu=True, gradient_accumulation_steps=4, **given)
    assert (config.micro_batches_per_generation, config.updates_per_generation) == (4, 1)


def test_groups_need_not_fit_into_the_completions_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    options: dict[str, Any] = {"output_dir": str(tmp_path), "num_generations": 8, "use_cpu": True}
    GRPOConfig(**options, per_device_train_batch_size=4)
    with pytest.raises(ConfigError, match=r"3 \* steps.* 1 \* 2 processes = 6 .* is 8, which is 4 on each process"):
        GRPOConfig(**options, per_device_train_batch_size=3)


def test_tokens_of_the_vocabulary_are_no_secrets(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, eos_token="<end>", hub_token="x")
    values = config.to_dict()
    assert (values["eos_token"], values["pad_token"]) == ("<end>", None)
    assert values["hub_token"] != "x"


def test_trust_remote_code_is_a_key_of_model_init_kwargs_which_wins(tmp_path: Path) -> None:
    def given(**options: Any) -> Any:
        return SFTConfig(output_dir=str(tmp_path), use_cpu=True, **options).model_init_kwargs

    assert given(trust_remote_code=True) == {"trust_remote_code": True}
    assert given(trust_remote_code=True, model_init_kwargs='{"revision": "v2"}') == {
        "trust_remote_code": True,
        "revision": "v2",
    }
    assert given() is None


def config(cls: Any = SFTConfig, **options: Any) -> Any:
    return cls(output_dir="runs/x", use_cpu=True, report_to="none", **options)


CASES: list[Any] = [
    pytest.param(
        SFTConfig,
        {"learning_rate": "1e-5"},
        r"^learning_rate='1e-5': must be a number >= 0\. Write 1\.0e-05 without .*YAML reads 1e-5 as a string",
        id="text of HuggingFace's option",
    ),
    pytest.param(
        GRPOConfig, {"beta": "0.1"}, r"beta='0\.1': must be a number >= 0\. Write 0\.1 ", id="text of our option"
    ),
    pytest.param(SFTConfig, {"warmup_steps": "10"}, "warmup_steps='10': must be a number", id="HuggingFace compares"),
    pytest.param(SFTConfig, {"max_steps": "10"}, "max_steps='10': must be an integer >= -1. Write 10 ", id="integer"),
    pytest.param(SFTConfig, {"max_steps": 1e3}, r"max_steps=1000\.0: must be an integer", id="float as integer"),
    pytest.param(
        SFTConfig,
        {"weight_decay": "much"},
        r"weight_decay='much': must be a number >= 0 and <= 1000\.$",
        id="no number",
    ),
    pytest.param(SFTConfig, {"learning_rate": True}, "learning_rate=True: must be a number", id="switch as number"),
    pytest.param(SFTConfig, {"learning_rate": None}, "learning_rate=None: must be a number", id="None"),
    pytest.param(SFTConfig, {"max_length": "9"}, "max_length='9': must be an integer", id="text of an optional one"),
    pytest.param(GRPOConfig, {"reward_weights": ["1"]}, r"reward_weights=\['1'\]: must be a list, each", id="list"),
    pytest.param(GRPOConfig, {"reward_weights": 1.0}, r"reward_weights=1\.0: must be a list", id="no list"),
    pytest.param(
        SFTConfig,
        {"packing": "false"},
        "packing='false': must be True or False. Write False .*in YAML false",
        id="switch",
    ),
]


@pytest.mark.parametrize(("cls", "options", "message"), CASES)
def test_another_type_is_an_error_with_field_value_and_remedy(cls: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(cls, **options)


def test_numbers_of_numpy_and_integers_for_floats_are_numbers() -> None:
    made = config(
        learning_rate=np.float32(0.5), max_steps=np.int64(3), weight_decay=0, eval_steps=None, bf16=np.False_
    )
    assert (made.learning_rate, made.max_steps) == (0.5, 3)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in REGISTRY.values()])
def test_defaults_are_of_their_types(row: Algorithm) -> None:
    made = config(row.load_config())
    assert dataclasses.replace(made, max_steps=3).max_steps == 3  # with what HuggingFace has made of the others


def test_the_parsers_of_command_lines_read_numbers_as_before(tmp_path: Path) -> None:
    parser: Any = HfArgumentParser(SFTConfig)
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--learning_rate", "1e-5", "--max_steps", "3"]
    (made,) = parser.parse_args_into_dataclasses(words)
    assert (made.learning_rate, made.max_steps) == (1e-5, 3)
    path = tmp_path / "config.yaml"
    options = "output_dir: runs/x\nuse_cpu: true\nreport_to: none\nlearning_rate: "
    path.write_text(f"{options}1.0e-5\n")
    assert parser.parse_yaml_file(path)[0].learning_rate == 1e-5
    path.write_text(f"{options}1e-5\n")
    assert yaml.safe_load(path.read_text())["learning_rate"] == "1e-5"
    with pytest.raises(ConfigError, match=r"1\.0e-05"):
        parser.parse_yaml_file(path)


def test_no_base_of_the_config_hides_what_another_one_declares() -> None:
    found = {field.name: field for field in dataclasses.fields(BaseConfig)}
    bases = [base for base in BaseConfig.__mro__[1:-1] if base is not TrainingArguments]
    for base in bases:
        declared = {field.name: field for field in dataclasses.fields(base) if field.name in base.__annotations__}
        assert all(found[name] is field for name, field in declared.items()), base.__name__
    assert bases
    assert next(iter(found)) == "output_dir"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8": True, "bf16": True}, "fp8=True on CPU: 8-bit products need a GPU of compute capability 8.9"),
        ({"tf32": True}, "tf32=True on a machine without a GPU that has TF32: "),
        (
            {"bf16": True, "use_cpu": False},
            "bf16=True on a machine without a GPU that computes in bfloat16. Set use_cpu",
        ),
        ({"deepspeed": {"zero_optimization": {}}}, "deepspeed: no launcher has started this process"),
        ({"torch_compile_backend": "inductr"}, "torch_compile_backend='inductr': unknown. Did you mean 'inductor'?"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SFTConfig(output_dir="x", **{"use_cpu": True} | options)


def test_deepspeed_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefrl.distributed.launch.is_installed", lambda _: False)
    with pytest.raises(MissingPackageError, match="deepspeed needs deepspeed: pip install"):
        SFTConfig(output_dir="x", deepspeed={"zero_optimization": {}})


def test_fp8_is_an_option_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="Remove it, and set fp8=True with bf16=True"):
        SFTConfig(output_dir="x", use_cpu=True)


def test_tensor_float_32_is_as_coarse_as_float16_on_gpus_alone() -> None:
    assert of_products(torch.float32, "cuda") == torch.float32
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert of_products(torch.float32, "cuda") == torch.float16
        assert of_products(torch.float32, "cpu") == torch.float32
        assert of_products(torch.bfloat16, "cuda") == torch.bfloat16
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("is_on", [False, True])
def test_cumulative_sums_are_permitted_only_inside(is_on: bool) -> None:
    refused = torch.zeros(3)  # put_ without accumulate has no deterministic form on any device
    try:
        torch.use_deterministic_algorithms(is_on)
        with cumsum_permitted():
            assert torch.are_deterministic_algorithms_enabled() is is_on
            refused.put_(torch.tensor([0]), torch.tensor([1.0]))
        assert torch.are_deterministic_algorithms_enabled() is is_on
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_message_names_the_types_in_their_order_whatever_was_described_before() -> None:
    for hint, words in (
        (None | int | str, "None, an integer, or a string"),
        (str | int | None, "a string, an integer, or None"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"name=0.5: must be {words}")):
            check_value("name", 0.5, hint)
