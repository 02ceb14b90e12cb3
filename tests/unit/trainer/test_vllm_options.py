"""Which options for a vLLM server GRPOConfig refuses, and what follows from options that are not set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from prefrl.errors import ConfigError
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.options.rollout import RolloutOptions
from prefrl.trainer.configs import GRPOConfig, OnlineDPOConfig, PPOConfig, ReinforcePlusPlusConfig, RLOOConfig
from prefrl.trainer.online.sampling import sync_method

UNCUT = {"use_vllm": True}
SOFTMAX = {**UNCUT, "truncated_logprobs": "softmax"}


def config(tmp_path: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**UNCUT, "vllm_server_port": 70000}, "vllm_server_port=70000: must be a number >= 1 and <= 65535"),
        ({**UNCUT, "vllm_server_timeout": 0}, "vllm_server_timeout=0: must be a number > 0"),
        ({**UNCUT, "vllm_server_base_url": "host:8000"}, "vllm_server_base_url='host:8000': must be like http"),
        ({**UNCUT, "weight_sync": "udp"}, "weight_sync='udp': must be one of 'nccl', 'gloo', 'shm', 'adapter'"),
        ({**UNCUT, "vllm_kwargs": "[1]"}, "vllm_kwargs='[1]': must be a JSON object"),
        (
            {
                **UNCUT,
                "generation_mode": "overlap",
                "advantage_kwargs": {"multi_objective_aggregation": "normalize_then_sum"},
            },
            "with multi_objective_aggregation='normalize_then_sum'",
        ),
        (
            {**SOFTMAX, "vllm_importance_sampling_correction": True, "min_p": 0.1, "top_p": 0.9},
            "with top_p=0.9, min_p=0.1",
        ),
        (
            {**UNCUT, "vllm_importance_sampling_correction": True, "vllm_guided_decoding_regex": "a"},
            "with vllm_guided_decoding_regex='a'",
        ),
        ({**SOFTMAX, "generation_mode": "async", "top_k": 50}, "generation_mode='async' with top_k=50"),
        (
            {**SOFTMAX, "top_k": 50, "vllm_importance_sampling_mode": "token_mask"},
            "vllm_importance_sampling_mode='token_mask' has no effect because sampling is not corrected",
        ),
        (
            {**UNCUT, "vllm_importance_sampling_kwargs": {"clip_min": 2.0}},
            "vllm_importance_sampling_kwargs: clip_min=2.0: must be a number > 0 and <= 1",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(tmp_path, **options)


def test_sampling_is_corrected_where_both_sides_score_the_same_distribution(tmp_path: Path) -> None:
    assert config(tmp_path, **UNCUT, temperature=0.7).corrects_sampling
    assert config(tmp_path, **UNCUT, top_k=None).corrects_sampling
    for cuts in ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        assert config(tmp_path, **UNCUT, **cuts).corrects_sampling
        assert not config(tmp_path, **SOFTMAX, **cuts).corrects_sampling
    assert not config(tmp_path, **UNCUT, vllm_guided_decoding_regex="a+").corrects_sampling
    assert not config(tmp_path, **UNCUT, vllm_kwargs={"guided_json": {"type": "object"}}).corrects_sampling
    assert not config(tmp_path, **UNCUT, vllm_importance_sampling_correction=False).corrects_sampling
    assert not config(tmp_path).corrects_sampling  # no server


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig, ReinforcePlusPlusConfig, PPOConfig])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_default_switches_the_correction_off(config_class: Any, mode: str, tmp_path: Path) -> None:
    assert config_class(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, generation_mode=mode).corrects_sampling


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_online_dpo_takes_a_server_by_defaults_and_corrects_nothing(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "use_vllm": True}
    assert not OnlineDPOConfig(**options, generation_mode=mode).corrects_sampling


def test_a_server_is_named_by_host_and_port_or_by_urls(tmp_path: Path) -> None:
    assert config(tmp_path, use_vllm=True).server_urls == ["http://127.0.0.1:8000"]
    assert config(tmp_path, use_vllm=True, vllm_server_host="n5", vllm_server_port=1).server_urls == ["http://n5:1"]
    assert config(tmp_path, use_vllm=True, vllm_server_base_url="https://n5/").server_urls == ["https://n5"]


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("http://127.0.0.1:1", "/dev/shm"),
        ("http://localhost:1", "/dev/shm"),
        ("http://[::1]:1", "/dev/shm"),
        ("http://10.0.0.1:1", None),
        ("http://node5:1", None),
    ],
)
def test_a_folder_is_shared_with_servers_on_this_host(tmp_path: Path, url: str, folder: str | None) -> None:
    assert config(tmp_path, use_vllm=True, vllm_server_base_url=[url]).shared_folder == folder
    both = ["http://127.0.0.1:2", url]
    assert config(tmp_path, use_vllm=True, vllm_server_base_url=both).shared_folder == folder


def test_weights_go_the_way_that_fits(tmp_path: Path) -> None:
    here = config(tmp_path, use_vllm=True)
    elsewhere = config(tmp_path, use_vllm=True, vllm_server_host="node5")
    assert sync_method(here, has_adapter=False) == "gloo"
    assert sync_method(here, has_adapter=True) == "adapter"
    assert sync_method(elsewhere, has_adapter=True) == "gloo"
    assert sync_method(config(tmp_path, use_vllm=True, weight_sync="shm"), has_adapter=True) == "shm"
    with pytest.raises(ConfigError, match="weight_sync='adapter': the model has no adapter"):
        sync_method(config(tmp_path, use_vllm=True, weight_sync="adapter"), has_adapter=False)


def test_an_adapter_that_servers_would_cut_is_merged(tmp_path: Path) -> None:
    assert sync_method(config(tmp_path, use_vllm=True), has_adapter=True, reads_images=True) == "gloo"
    with pytest.raises(ConfigError, match=r"vision tower, where vLLM ignores it\. Restrict"):
        sync_method(config(tmp_path, use_vllm=True, weight_sync="adapter"), has_adapter=True, reads_images=True)


def test_modes_of_the_correction_are_the_keys_of_its_table() -> None:
    hints = get_type_hints(RolloutOptions)
    assert set(get_args(hints["vllm_importance_sampling_mode"])) == set(OFF_POLICY_CORRECTIONS)
