"""Other parallelism than data parallelism is refused where it cannot work, with name, value, reason and remedy."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from prefrl import GRPOConfig, distributed
from prefrl.distributed import check_deepspeed, check_model, processes, set_up_parallelism, tell_ddp
from prefrl.distributed.launch import check_parallelism
from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs
from prefrl.registry import REGISTRY
from prefrl.trainer.online.prompts import check_prompts
from tests.assets import ragged_batch, tiny_model
from tests.contract.cases import make_trainer, ragged_reward


def accelerator_with(config: dict[str, Any] | None) -> Any:
    """What an accelerator knows of DeepSpeed."""
    plugin = None if config is None else SimpleNamespace(deepspeed_config=config)
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


def ulysses(*, sp_size: int = 2, processes: int = 4, handler: dict[str, Any] | None = None, **sizes: int) -> None:
    """Check a config with sequence parallelism for a trainer that can."""
    sp_handler = DeepSpeedSequenceParallelConfig(**(handler or {}))
    config = ParallelismConfig(sp_size=sp_size, sp_handler=sp_handler, **sizes)
    check_parallelism(config, trainer="SFTTrainer", num_processes=processes)


@pytest.mark.parametrize(("field", "remedy"), [("cp_size", "Use sp_size=2 instead"), ("tp_size", "Load the whole")])
def test_each_size_is_refused_with_its_value_the_trainer_and_a_remedy(field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallelism_config\.{field}=2: GRPOTrainer cannot .*\. {remedy}"):
        check_parallelism(ParallelismConfig(**{field: 2}), trainer="GRPOTrainer", num_processes=2)


def test_data_parallelism_is_not_refused() -> None:
    config = ParallelismConfig(dp_shard_size=2, dp_replicate_size=2)
    check_parallelism(config, trainer="GRPOTrainer", num_processes=4)


def test_sequence_parallelism_is_not_refused_where_all_sizes_agree() -> None:
    ulysses()
    ulysses(handler={"sp_seq_length_is_variable": True, "sp_attn_implementation": "sdpa"})
    ulysses(dp_shard_size=2)
    ulysses(dp_replicate_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sp_size": 3}, r"sp_size=3: must divide the number of processes, 4\."),
        ({"dp_shard_size": 4}, r"sp_size=2 with dp_replicate_size=1 and dp_shard_size=4: .* Set dp_shard_size=2\."),
        ({"handler": {"sp_seq_length": 512}}, r"sp_seq_length=512 .* Set only sp_seq_length_is_variable=True\."),
        (
            {"handler": {"sp_seq_length": 512, "sp_seq_length_is_variable": False}},
            r"sp_seq_length_is_variable=False: rows have different lengths",
        ),
        ({"handler": {"sp_attn_implementation": "flash_attention_2"}}, r'="flash_attention_2": .* Set "sdpa"'),
    ],
)
def test_options_of_sequence_parallelism_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ulysses(**options)


def test_a_size_of_accelerates_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    assert set_up_parallelism(None, trainer="SFTTrainer", longest_wait=1800) is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with pytest.raises(ConfigError, match=r"parallelism_config\.cp_size=4"):
        set_up_parallelism(None, trainer="SFTTrainer", longest_wait=1800)
    given = ParallelismConfig(cp_size=1, dp_shard_size=2)
    assert set_up_parallelism(given, trainer="SFTTrainer", longest_wait=1800) is given


def grpo(folder: Path, parallelism: ParallelismConfig | None, **options: Any) -> GRPOConfig:
    """Options of GRPO for four processes."""
    options |= {"output_dir": str(folder), "use_cpu": True, "parallelism_config": parallelism}
    return GRPOConfig.for_processes(4, **options, per_device_train_batch_size=8)


def test_a_generation_batch_counts_teams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def completions(parallelism: ParallelismConfig | None) -> int:
        return grpo(tmp_path, parallelism).completions_of_generation

    assert completions(None) == 32
    assert completions(ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig())) == 16
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    assert completions(None) == 32  # of a file that accelerate does not use
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert completions(None) == 8


def test_groups_that_arrive_at_other_times_on_each_process_of_a_team_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = grpo(tmp_path, None, generation_mode="overlap", use_vllm=True)
    check_prompts(config, None)
    monkeypatch.setattr(processes, "_teams", processes._Teams(2, None, None))
    with pytest.raises(ConfigError, match=r"generation_mode='overlap' with sp_size=2 of parallelism_config: .* Use "):
        check_prompts(config, None)


def test_a_model_whose_heads_cannot_be_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(processes, "_teams", processes._Teams(4, None, None))
    check_model(model, trainer="SFTTrainer")
    monkeypatch.setattr(processes, "_teams", processes._Teams(3, None, None))
    with pytest.raises(ConfigError, match=r"sp_size=3: must divide the model's 4 attention heads"):
        check_model(model, trainer="SFTTrainer")


def test_rows_that_are_padded_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model(), ragged_batch()
    monkeypatch.setattr(processes, "_teams", processes._Teams(2, None, None))
    with pytest.raises(ConfigError, match=r'sp_size=2 does not work for Qwen2ForCausalLM: .*, but plan="padded" pads'):
        token_logprobs(model, batch, plan="padded")
    unsuited = tiny_model("gemma2")
    with pytest.raises(ConfigError, match=r"sp_size=2 does not work for Gemma2ForCausalLM: .*, but it soft-caps"):
        token_logprobs(unsuited, batch)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size=2"),
        ({"sequence_parallel_size": 4}, "sequence_parallel_size=4"),
    ],
)
def test_parallelism_of_a_deepspeed_config_is_refused(config: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"{found} in the DeepSpeed config: SFTTrainer"):
        check_deepspeed(accelerator_with(config), trainer="SFTTrainer")
    check_deepspeed(accelerator_with({"tensor_parallel": {"autotp_size": 1}}), trainer="SFTTrainer")
    check_deepspeed(accelerator_with(None), trainer="SFTTrainer")


def test_a_model_that_transformers_has_distributed_is_refused() -> None:
    model = tiny_model()
    check_model(model, trainer="DPOTrainer")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        norm = model.model.norm
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), init_device_mesh("cpu", (1,))))
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ConfigError, match=r"distributed_config \(model.norm.weight is a DTensor\): DPOTrainer cannot"):
        check_model(model, trainer="DPOTrainer")


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_trainers_refuse_before_a_model_is_loaded(name: str, tmp_path: Path) -> None:
    row = REGISTRY[name]
    args = row.load_config()(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    args.parallelism_config = ParallelismConfig(cp_size=2)
    arguments = {"reward_funcs": ragged_reward} if name == "grpo" else {}
    dataset = datasets.Dataset.from_dict({"prompt": ["2+2="], "completion": ["4"]})
    with pytest.raises(ConfigError, match=r"cp_size=2"):
        row.load_trainer()(str(tmp_path / "no model"), args=args, train_dataset=dataset, **arguments)


@pytest.mark.parametrize(
    ("changed", "looks"),
    [
        ({}, False),
        ({"unused": True}, True),  # a weight that no pass reaches
        ({"layerdrop": 0.1}, True),  # layers that some passes leave out
        ({"ddp_find_unused_parameters": True}, True),  # as the user says
        ({"kind": "DEEPSPEED"}, True),  # where it means nothing, and the weights may be partitioned
    ],
    ids=str,
)
def test_ddp_looks_for_weights_without_a_gradient_where_there_may_be_some(
    changed: dict[str, Any], looks: bool
) -> None:
    model = tiny_model(attention_dropout=0.5).train()
    if "unused" in changed:
        model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    model.model.layerdrop = changed.get("layerdrop", 0.0)
    handler = SimpleNamespace(find_unused_parameters=True)
    kind = SimpleNamespace(value=changed.get("kind", "MULTI_CPU"))
    accelerator = SimpleNamespace(ddp_handler=handler, distributed_type=kind, autocast=nullcontext)
    args = SimpleNamespace(ddp_find_unused_parameters=changed.get("ddp_find_unused_parameters"), torch_compile=False)
    random = torch.get_rng_state()
    tell_ddp(accelerator, model, args, lambda: token_logprobs(model, ragged_batch()).logprobs.sum())
    assert handler.find_unused_parameters is looks
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("ppo", {"critic": "head"}), ("ppo", {"critic": "model"}), ("sft", {"pictures": "qwen2_5_vl"})],
    ids=str,
)
def test_ddp_knows_that_critics_and_vision_towers_have_a_gradient_in_each_pass(
    algorithm: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = SimpleNamespace(find_unused_parameters=True)

    def told(accelerator: Any, *arguments: Any) -> None:
        kind = SimpleNamespace(value="MULTI_CPU")
        pretended = SimpleNamespace(ddp_handler=handler, distributed_type=kind, autocast=accelerator.autocast)
        with monkeypatch.context() as patched:
            patched.setattr("prefrl.models.forward.num_processes", lambda: 2)  # each of which runs the tower
            tell_ddp(pretended, *arguments)

    monkeypatch.setattr(distributed, "tell_ddp", told)
    make_trainer(algorithm, tmp_path, rows=8, **options).train()
    assert handler.find_unused_parameters is False
