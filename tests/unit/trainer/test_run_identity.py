"""What a resumed run is compared with."""

from __future__ import annotations

from prefrl.trainer.base.run_identity import model_fingerprint
from tests.assets import tiny_model


def test_special_tokens_are_no_architecture_and_sizes_are() -> None:
    fingerprint = model_fingerprint(tiny_model())
    # HuggingFace's loop gives the model the tokenizer's ids when training begins.
    assert model_fingerprint(tiny_model(eos_token_id=7, pad_token_id=9, bos_token_id=3)) == fingerprint
    assert model_fingerprint(tiny_model(vocab_size=192)) != fingerprint
