"""The number of positions of a model, and whether it has no more."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefrl.models.plans import PositionLimit, position_limit
from tests.assets import tiny_model


def opt() -> PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = AutoConfig.for_model("opt", vocab_size=32, word_embed_proj_dim=16, max_position_embeddings=20, **sizes)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]  # untyped


def nested() -> PreTrainedModel:
    """As models for images and text have it: the sizes of the text model are in a config of its own."""
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 40}
    model = tiny_model("llama")
    model.config = AutoConfig.for_model("llava", text_config={"model_type": "llama", **text})
    return model


def stretched() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
    return tiny_model("llama", max_position_embeddings=24, rope_parameters=rope)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        (lambda: tiny_model("gpt2", n_positions=24), PositionLimit(24, is_table=True)),
        (opt, PositionLimit(20, is_table=True)),
        (lambda: tiny_model("llama", max_position_embeddings=24), PositionLimit(24, is_table=False)),
        (nested, PositionLimit(40, is_table=False)),
        (stretched, PositionLimit(24, is_table=False, is_scaled=True)),
        # Its tokens have as many rows as it has positions, but they are no positions.
        (lambda: tiny_model("llama", max_position_embeddings=128), PositionLimit(128, is_table=False)),
    ],
)
def test_limit_is_that_of_the_config_and_of_a_table(model: Any, limit: PositionLimit) -> None:
    assert position_limit(model()) == limit


def test_model_without_a_number_has_no_limit() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    assert position_limit(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))) is None
    model = tiny_model("llama")
    model.config.max_position_embeddings = -1  # how some configs say that there is no limit
    assert position_limit(model) is None
