"""The model card is text, whatever the names of metrics and models are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from prefrl import GRPOConfig
from prefrl.trainer.model_card import RunFacts, write_model_card


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


def grpo_card(folder: Path, **options: Any) -> str:
    config = GRPOConfig(output_dir="/home/me/out", use_cpu=True, report_to=[], seed=7, **options)
    decisive = dict.fromkeys(options) | {
        "data": {"rows": 1234, "columns": ["prompt"], "hash": "0f0f"},
        "rewards": {"right": "abc"},
    }
    facts = RunFacts.of(config, decisive)
    history = [{"step": 3, "reward": 0.5}]
    write_model_card(folder, algorithm="grpo", base_model="org/base", log_history=history, facts=facts)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_card_has_what_it_takes_to_train_the_model_again(tmp_path: Path) -> None:
    text = grpo_card(tmp_path, learning_rate=3e-6, loss_type="dr_grpo", epsilon=0.2, max_steps=3)
    assert "prefrl grpo --config run.yaml" in text
    options = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert {name: options[name] for name in ("model_name_or_path", "learning_rate", "loss_type", "seed")} == {
        "model_name_or_path": "org/base",
        "learning_rate": 3e-6,
        "loss_type": "dr_grpo",
        "seed": 7,
    }
    assert options["reward_funcs"] == ["right"]
    assert "epsilon" not in options  # its default
    assert "1,234 (hash of a sample: `0f0f`)" in text
    assert "3 optimizer steps" in text
    assert "eprint = {2402.03300}" in text
    for part in ("Use", "Data", "Training", "Last logged values", "Versions", "Citation"):
        assert f"\n## {part}\n" in text


def test_options_with_paths_texts_and_secrets_are_left_out(tmp_path: Path) -> None:
    init = {"token": "open-sesame", "cache_dir": "/home/me"}
    text = grpo_card(tmp_path, model_init_kwargs=init, max_steps=3)
    assert "max_steps: 3" in text
    for private in ("open-sesame", "/home/me", "model_init_kwargs"):
        assert private not in text


def test_an_adapter_is_loaded_with_peft(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    text = card(tmp_path)
    assert ModelCard(text).data.library_name == "peft"
    assert "from peft import AutoPeftModelForCausalLM" in text
