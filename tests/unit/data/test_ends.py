"""Rows that end where generation does not stop are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl.data.checks import warn_of_unknown_end
from tests.assets import tiny_model
from tests.contract.cases import make_trainer
from tests.unit.data.templates import CHATML, chat_tokenizer

TOKENIZER = chat_tokenizer(CHATML)
END, TURN, NEWLINE, LETTER = TOKENIZER.convert_tokens_to_ids(["<|end|>", "<|im_end|>", "\n", "a"])
CHAT = {
    "prompt": [{"role": "user", "content": "hi"}],
    "chosen": [{"role": "assistant", "content": "yo"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([{"input_ids": [LETTER, TURN, NEWLINE]}], 1),
        ([{"chosen_ids": [LETTER, TURN], "rejected_ids": [LETTER, END]}], 1),
        ([{"input_ids": [LETTER, END]}, {"input_ids": [LETTER, TURN]}], 0),
        # Truncated rows do not show their end.
        ([{"completion_ids": [TURN, LETTER]}, {"completion_ids": [LETTER, TURN]}], 1),
        ([{"input_ids": [LETTER, TURN, LETTER, END], "seq_lengths": [2, 2]}], 1),
        ([{"input_ids": [LETTER, END, LETTER, TURN], "seq_lengths": [2, 2]}], 0),
    ],
)
def test_end_at_which_generation_goes_on_is_warned_of_once(
    rows: list[dict[str, Any]], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unknown_end(Dataset.from_list(rows * 2), TOKENIZER, end_ids=[END])
    assert ["'<|im_end|>'" in message and "only at '<|end|>'" in message for message in caplog.messages] == [
        True
    ] * count


def test_trainer_knows_where_its_model_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([CHAT]), "processing_class": TOKENIZER}
    make_trainer("dpo", tmp_path, model=tiny_model(eos_token_id=[END, TURN]), **given)
    assert "but generation stops only at" not in caplog.text
    make_trainer("dpo", tmp_path, model=tiny_model(eos_token_id=END), **given)
    assert caplog.text.count("but generation stops only at") == 1
