"""The model card is text, whatever the names of metrics and models are."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from prefrl.trainer.base.model_card import write_model_card


def card(folder: Path, name: str = "loss", base_model: str = "org/model-1.5") -> str:
    write_model_card(folder, algorithm="sft", base_model=base_model, log_history=[{name: 0.5}])
    return (folder / "README.md").read_text(encoding="utf-8")


def test_names_of_metrics_are_no_markup(tmp_path: Path) -> None:
    text = card(tmp_path, "rewards/<img src=x>|\n# title\x1b[2J/mean")
    assert r"| rewards/&lt;img src=x&gt;&#124; # title\x1b[2J/mean | 0.5 |" in text


@pytest.mark.parametrize("name", ["https://user:password@host/model", "/home/me/model", "a\nb", "../model"])
def test_only_a_name_on_the_hub_is_the_base_model(tmp_path: Path, name: str) -> None:
    assert "base_model: org/model-1.5" in card(tmp_path)
    assert "base_model" not in card(tmp_path, base_model=name)


def test_the_card_names_what_it_is_asked_to(tmp_path: Path) -> None:
    write_model_card(
        tmp_path,
        algorithm="sft",
        base_model="org/base",
        log_history=[],
        model_name="Mine | <b>",
        dataset_name="org/data",
        tags=["maths", "sft"],
    )
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# Mine &#124; &lt;b&gt;\n" in text
    metadata = ModelCard(text).data
    assert metadata.datasets == ["org/data"]
    assert metadata.tags == ["generated_from_trainer", "prefrl", "sft", "maths"]
    write_model_card(tmp_path, algorithm="sft", base_model="b", log_history=[], dataset_name="/home/me/data")
    assert "/home/me" not in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine", encoding="utf-8")
    (tmp_path / "README.md").symlink_to(target)
    assert "prefrl" in card(tmp_path)
    assert target.read_text(encoding="utf-8") == "mine"
