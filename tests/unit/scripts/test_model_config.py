"""Options of a model become configs of peft and bitsandbytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.scripts.arguments.command import (
    ModelConfig,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)


def test_options_of_lora_are_those_of_peft() -> None:
    config: Any = get_peft_config(
        ModelConfig(
            use_peft=True,
            lora_r=8,
            lora_alpha=16,
            lora_dropout=0.1,
            lora_task_type="SEQ_CLS",
            use_rslora=True,
            lora_target_modules=["up_proj", "down_proj"],
            lora_modules_to_save=["score"],
        )
    )
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (8, 16, 0.1, True)
    assert (config.task_type, config.target_modules) == ("SEQ_CLS", {"up_proj", "down_proj"})
    assert config.modules_to_save == ["score"]
    assert get_peft_config(ModelConfig()) is None


@pytest.mark.parametrize(
    ("given", "target"),
    [
        (["all-linear"], "all-linear"),
        ("all-linear", "all-linear"),
        ([r".*\.q_(proj|norm)"], r".*\.q_(proj|norm)"),
        (["q_proj"], {"q_proj"}),
        (["self_attn.q_proj"], {"self_attn.q_proj"}),
    ],
)
def test_a_single_target_may_be_a_pattern(given: Any, target: object) -> None:
    config: Any = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=given))
    assert config.target_modules == target


def test_four_bits_are_multiplied_and_stored_as_dtype() -> None:
    config: Any = get_quantization_config(
        ModelConfig(load_in_4bit=True, dtype="bfloat16", bnb_4bit_quant_type="fp4", use_bnb_nested_quant=True)
    )
    assert (config.load_in_4bit, config.load_in_8bit) == (True, False)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("fp4", True)
    assert config.bnb_4bit_compute_dtype == config.bnb_4bit_quant_storage == torch.bfloat16
    stored: Any = get_quantization_config(ModelConfig(load_in_4bit=True, bnb_4bit_quant_storage="uint8"))
    assert (stored.bnb_4bit_compute_dtype, stored.bnb_4bit_quant_storage) == (torch.float32, torch.uint8)


def test_eight_bits_and_none() -> None:
    eight: Any = get_quantization_config(ModelConfig(load_in_8bit=True, dtype="auto"))
    assert (eight.load_in_4bit, eight.load_in_8bit) == (False, True)
    assert get_quantization_config(ModelConfig()) is None
    with pytest.raises(ConfigError, match="dtype='auto' with load_in_4bit=True: the type of matrix products"):
        get_quantization_config(ModelConfig(load_in_4bit=True, dtype="auto"))


def test_a_quantized_model_is_loaded_on_the_accelerator_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    for is_available, device_map in ((False, None), (True, {"": 3})):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=is_available: found)
        assert get_kbit_device_map() == device_map
