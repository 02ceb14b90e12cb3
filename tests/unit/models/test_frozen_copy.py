from __future__ import annotations

import pytest
import torch

from prefrl.errors import ConfigError
from prefrl.models.reference import create_reference_model
from tests.assets import tiny_model


def test_a_copy_is_frozen_and_keeps_its_weights_when_the_model_changes() -> None:
    model = tiny_model().train()
    reference = create_reference_model(model)
    assert not reference.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for weight, kept in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(weight, kept)
        assert weight.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize(
    ("architecture", "pattern"), [("qwen2", None), ("gpt2", None), ("gpt2", "transformer.h.{layer}")]
)
def test_shared_layers_are_the_same_memory_and_frozen_in_both(architecture: str, pattern: str | None) -> None:
    model = tiny_model(architecture)
    reference = create_reference_model(model, num_shared_layers=1, pattern=pattern)
    for (name, weight), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        is_shared = "embed_tokens" in name or ".wte." in name or ".wpe." in name or ".0." in name
        assert (weight.data_ptr() == other.data_ptr()) is is_shared, name
        assert weight.requires_grad is not is_shared
        assert not other.requires_grad


@pytest.mark.parametrize(("number", "pattern"), [(2, None), (1, "decoder.{layer}")])
def test_a_layer_that_is_not_there_is_refused(number: int, pattern: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"num_shared_layers={number}, pattern=.*no parameter has a name like this"):
        create_reference_model(tiny_model(), num_shared_layers=number, pattern=pattern)
